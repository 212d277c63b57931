"""Log-probabilities of given tokens at given positions, in batches of similar length.

A `LogprobQuery` is one input row with target positions and labels. Queries are sorted by length in chunks, padded on
the right, and run without gradients. The vocabulary projection runs only at the target positions, in pieces, so that
the logits of a batch are never held at once.

Queries with the same input, such as the labels of one prompt, become one row with several labels at a position. In a
causal decoder no position sees a later one, so an input that is the beginning of another one needs no row of its own.
Labels of several tokens differ only in the last tokens of their rows: the long beginning is computed once, and a KV
cache of it is copied to each of them (`score_prefix_groups`).

B rows, T positions, K target positions of a row, N target positions of a batch, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firth.generate.decode_state import CachedDecode, eval_mode, get_mask_ids, pad_right, require_tokenizer
from firth.models import Model
from firth.models.heads import LMHeadModule
from firth.models.kv_cache import can_cache
from firth.objectives import IGNORE_INDEX, Batch

EVAL_BATCH_TOKENS = 8192  # tokens per batch, with padding
CHUNK_QUERIES, CHUNK_BATCHES = 2048, 32  # queries that are sorted by length together, at most
MAX_LOGITS_ELEMENTS = 2**24  # logits held at once: 64 MB of float32
MIN_PREFIX_TOKENS = 64  # a shorter common beginning does not repay the steps after it
MAX_TAIL_TOKENS = 8  # tokens after a common beginning, one step each
QueryKey = tuple[tuple[int, ...] | None, ...]


class LogprobQuery(NamedTuple):
    """One input row and its labels. With a decoder, `target_positions` are positions in `decoder_input_ids`."""

    input_ids: list[int]
    target_positions: list[int]
    labels: list[int]
    decoder_input_ids: list[int] | None = None  # encoder-decoder
    attention_rank: list[int] | None = None  # i attends to j if rank[j] <= rank[i] (XLNet)
    token_type_ids: list[int] | None = None  # XLNet's segments
    text_index: int = 0  # index of the text that the query belongs to


class TokenLogprobs(NamedTuple):
    """Log-probability of each label, and the most likely token at its position."""

    logprobs: np.ndarray  # (K,) float64, nats
    top_ids: np.ndarray  # (K,)


def compute_logprobs(
    model: Model, queries: Iterable[LogprobQuery], batch_tokens: int = EVAL_BATCH_TOKENS
) -> Iterator[tuple[LogprobQuery, TokenLogprobs]]:
    """Yield each query with its log-probabilities, in order.

    The softmax is over the whole vocabulary, in float32: in bfloat16 the two sentences of a minimal pair would often
    tie. Equal queries are computed once, so that true ties stay ties: rounding depends on the other rows of a batch.
    """
    stream, previous = iter(queries), dict[QueryKey, TokenLogprobs]()
    with eval_mode(model):
        while chunk := take_chunk(stream, CHUNK_BATCHES * batch_tokens):
            unique = {query_key(query): query for query in chunk}
            results = {key: previous[key] for key in unique if key in previous}  # a pair can span two chunks
            new = [(key, query) for key, query in unique.items() if key not in results]
            rows = merge_shared_inputs([query for _, query in new], model.config.architecture == "decoder")
            rows, grouped = take_prefix_groups(model, rows)
            for group_rows, scored in score_prefix_groups(model, grouped, batch_tokens):
                for row, one in zip(group_rows, scored, strict=True):
                    results |= {new[k][0]: part for k, part in row.split(one)}
            for indices in batch_queries_by_length([row.query for row in rows], batch_tokens):
                scored = score_query_batch(model, [rows[i].query for i in indices])
                for i, one in zip(indices, scored, strict=True):
                    results |= {new[k][0]: part for k, part in rows[i].split(one)}
            yield from ((query, results[query_key(query)]) for query in chunk)
            previous = results


def take_chunk(stream: Iterator[LogprobQuery], max_tokens: int) -> list[LogprobQuery]:
    """The next queries, up to `CHUNK_QUERIES` or `max_tokens`: results of long rows must come now and then, too."""
    chunk: list[LogprobQuery] = []
    num_tokens = 0
    for query in stream:
        chunk.append(query)
        num_tokens += len(query.input_ids) + len(query.decoder_input_ids or ())
        if len(chunk) == CHUNK_QUERIES or num_tokens >= max_tokens:
            break
    return chunk


class SharedRow(NamedTuple):
    """A row that answers several queries: the labels of all `members`, one after the other."""

    query: LogprobQuery
    members: list[tuple[int, int]]  # index of a query, and its number of labels

    def split(self, logprobs: TokenLogprobs) -> Iterator[tuple[int, TokenLogprobs]]:
        """Yield the index of each query with its own log-probabilities."""
        ends = np.cumsum([size for _, size in self.members])[:-1]
        parts = zip(np.split(logprobs.logprobs, ends), np.split(logprobs.top_ids, ends), strict=True)
        for (index, _), part in zip(self.members, parts, strict=True):
            yield index, TokenLogprobs(*part)


def merge_shared_inputs(queries: Sequence[LogprobQuery], is_causal: bool) -> list[SharedRow]:
    """Join queries whose inputs are equal; with a causal decoder also those whose input begins another one.

    >>> rows = merge_shared_inputs([LogprobQuery([1, 2], [1], [7]), LogprobQuery([1, 2, 3], [1, 2], [3, 8])], True)
    >>> [(row.query.input_ids, row.query.target_positions, row.query.labels, row.members) for row in rows]
    [([1, 2, 3], [1, 2, 1], [3, 8, 7], [(1, 2), (0, 1)])]
    """
    rows: list[SharedRow] = []
    longer: InputKey | None = None
    # In descending order, an input comes right after those that continue it.
    for key, index in sorted(((input_key(query, is_causal), i) for i, query in enumerate(queries)), reverse=True):
        query = queries[index]
        if longer is None or not key.begins(longer):
            rows.append(SharedRow(trim_unseen(query, is_causal)._replace(target_positions=[], labels=[]), []))
            longer = key
        row = rows[-1]
        row.query.target_positions.extend(query.target_positions)
        row.query.labels.extend(query.labels)
        row.members.append((index, len(query.labels)))
    return rows


def trim_unseen(query: LogprobQuery, is_causal: bool) -> LogprobQuery:
    """Drop the tokens after the last target position, which a causal decoder does not see there."""
    end = max(query.target_positions) + 1
    if query.decoder_input_ids is not None:
        return query._replace(decoder_input_ids=query.decoder_input_ids[:end])
    return query._replace(input_ids=query.input_ids[:end]) if is_causal and query.attention_rank is None else query


class InputKey(NamedTuple):
    """The input of a query, for sorting: the part that must be equal, and the ids that others may continue.

    The ids are bytes, most significant first, so that they sort as lists do and compare fast.
    """

    fixed: tuple[Sequence[int], ...]
    ids: bytes
    may_grow: bool

    def begins(self, other: InputKey) -> bool:
        """Whether the row of the other input answers this query too."""
        same = other.ids.startswith(self.ids) if self.may_grow else other.ids == self.ids
        return self.fixed == other.fixed and same


def input_key(query: LogprobQuery, is_causal: bool) -> InputKey:
    query = trim_unseen(query, is_causal)
    fixed = (query.attention_rank or (), query.token_type_ids or ())
    if query.decoder_input_ids is not None:
        ids = np.array(query.decoder_input_ids, dtype=">u4").tobytes()
        return InputKey((*map(tuple, fixed), tuple(query.input_ids)), ids, True)
    ids = np.array(query.input_ids, dtype=">u4").tobytes()
    return InputKey(tuple(map(tuple, fixed)), ids, is_causal and query.attention_rank is None)


class PrefixGroup(NamedTuple):
    """Rows that begin with the same `num_shared` tokens and are scored after them."""

    rows: list[SharedRow]
    num_shared: int

    @property
    def num_tail(self) -> int:
        return max(len(row.query.input_ids) for row in self.rows) - self.num_shared


def take_prefix_groups(model: Model, rows: Sequence[SharedRow]) -> tuple[list[SharedRow], list[PrefixGroup]]:
    """Split rows, which are sorted, into single ones and groups with a long common beginning."""
    config, tokenizer = model.config, require_tokenizer(model)
    is_plain = config.architecture == "decoder" and can_cache(config) and not get_mask_ids(model)
    if not is_plain or config.vocab_size != tokenizer.vocab.size:  # `CachedDecode` drops logits of padding
        return list(rows), []
    single, groups = [], []
    group: list[SharedRow] = []
    for row in (*rows, None):
        if row is not None and shared_tokens([*group, row]):
            group.append(row)
            continue
        if len(group) > 1:
            groups.append(PrefixGroup(group, shared_tokens(group)))
        else:
            single += group
        group = [] if row is None else [row]
    return single, groups


def shared_tokens(rows: Sequence[SharedRow]) -> int:
    """Tokens of the common beginning of sorted rows; 0 if it is short, or if much comes after it."""
    first, last = rows[0].query, rows[-1].query  # of sorted rows, the outer ones differ first
    if any(row.query.attention_rank is not None for row in rows):
        return 0
    size = min(len(first.input_ids), len(last.input_ids))
    equal = np.array(first.input_ids[:size]) == np.array(last.input_ids[:size])
    num = size if equal.all() else int(equal.argmin())
    num = min(num, 1 + min(position for row in rows for position in row.query.target_positions))
    tail = max(len(row.query.input_ids) for row in rows) - num
    return num if num >= MIN_PREFIX_TOKENS and tail <= MAX_TAIL_TOKENS else 0


@torch.no_grad()
def score_prefix_groups(
    model: Model, groups: Sequence[PrefixGroup], batch_tokens: int
) -> Iterator[tuple[list[SharedRow], list[TokenLogprobs]]]:
    """Run each common beginning once, then the tails of all its rows token by token; yield rows with their results."""
    order = sorted(groups, key=lambda group: -group.num_shared)
    while order:
        length = order[0].num_shared + MAX_TAIL_TOKENS
        rows = np.cumsum([len(group.rows) for group in order])
        num = max(1, int(np.searchsorted(rows, batch_tokens // length, side="right")))
        batch, order = order[:num], order[num:]
        yield [row for group in batch for row in group.rows], score_group_batch(model, batch)


def score_group_batch(model: Model, groups: Sequence[PrefixGroup]) -> list[TokenLogprobs]:
    """The log-probabilities of the rows of these groups."""
    rows = [(row.query, group.num_shared) for group in groups for row in group.rows]
    num_tail = max(group.num_tail for group in groups)
    state = CachedDecode(model, [group.rows[0].query.input_ids[: group.num_shared] for group in groups], num_tail)
    logits_BV = state.prefill()
    row_B = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group.rows) for group in groups]))
    row_B = row_B.to(logits_BV.device)
    state.select_rows(row_B)
    logits_BV, pad = logits_BV[row_B], get_pad_token_id(model)
    found = [TokenLogprobs(np.zeros(len(query.labels)), np.zeros(len(query.labels), np.int64)) for query, _ in rows]
    for step in range(num_tail + 1):
        targets = [
            (i, k, query.labels[k])
            for i, (query, first) in enumerate(rows)
            for k, position in enumerate(query.target_positions)
            if position == first - 1 + step
        ]
        if targets:
            at_N, label_N = (torch.tensor([target[x] for target in targets], device=logits_BV.device) for x in (0, 2))
            logits_BV = logits_BV.float()
            logp_N = logits_BV[at_N, label_N].double() - logits_BV.double().logsumexp(1)[at_N]
            best_N = logits_BV.argmax(1)[at_N]
            for (i, k, _), value, best in zip(targets, logp_N.tolist(), best_N.tolist(), strict=True):
                found[i].logprobs[k], found[i].top_ids[k] = value, best
        if step < num_tail:
            next_ids = [
                query.input_ids[first + step] if first + step < len(query.input_ids) else pad for query, first in rows
            ]
            logits_BV = state.decode_step(torch.tensor(next_ids, device=logits_BV.device))
    return found


def query_key(query: LogprobQuery) -> QueryKey:
    """A query without its text index, hashable."""
    return tuple(None if part is None else tuple(part) for part in query[:-1])


def batch_queries_by_length(queries: Sequence[LogprobQuery], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of queries by decreasing length, at most `batch_tokens` with padding in each batch."""
    size = [max(len(query.input_ids), len(query.decoder_input_ids or ())) for query in queries]
    order = sorted(range(len(queries)), key=lambda i: -size[i])
    while order:
        rows = max(1, batch_tokens // size[order[0]])
        yield order[:rows]
        order = order[rows:]


@torch.no_grad()
def score_query_batch(model: Model, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
    """Run one batch and split its results by query."""
    batch = collate_queries(queries, get_pad_token_id(model)).to(model.embed.tokens.weight.device)
    is_target_BK = batch.labels != IGNORE_INDEX
    logp_N, best_N = label_logprobs(model, model.target_hidden_states(batch)[is_target_BK], batch.labels[is_target_BK])
    ends = np.cumsum([len(query.labels) for query in queries])[:-1]
    return [TokenLogprobs(*pair) for pair in zip(np.split(logp_N, ends), np.split(best_N, ends), strict=True)]


def label_logprobs(model: Model, hidden_ND: Tensor, labels_N: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of each label and the most likely token, (N,) each; the logits are computed in pieces."""
    assert isinstance(model.head, LMHeadModule), "checked when the model was opened"
    rows = max(1, MAX_LOGITS_ELEMENTS // model.config.vocab_size)
    logp, best = [], []
    for x, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        logits = model.head(x, model.embed.tokens.weight).float()
        logp.append(logits.gather(1, labels[:, None])[:, 0].double() - logits.double().logsumexp(1))
        best.append(logits.argmax(1))
    return torch.cat(logp).cpu().numpy(), torch.cat(best).cpu().numpy()


def collate_queries(queries: Sequence[LogprobQuery], pad_token_id: int) -> Batch:
    """A batch of queries, padded on the right."""
    input_ids, document_ids = pad_right([query.input_ids for query in queries], pad_token_id)
    target_positions, _ = pad_right([query.target_positions for query in queries], 0)
    labels, _ = pad_right([query.labels for query in queries], IGNORE_INDEX)
    batch = Batch(input_ids, document_ids=document_ids, target_positions=target_positions, labels=labels)
    if queries[0].attention_rank is not None:
        batch = batch._replace(attention_rank=pad_right([query.attention_rank or [] for query in queries], 0)[0])
    if queries[0].token_type_ids is not None:
        batch = batch._replace(token_type_ids=pad_right([query.token_type_ids or [] for query in queries], 0)[0])
    if queries[0].decoder_input_ids is None:
        return batch
    decoder_input_ids, _ = pad_right([query.decoder_input_ids or [] for query in queries], pad_token_id)
    # Padding comes last, and the decoder is causal: no mask is needed.
    zeros = np.zeros_like(decoder_input_ids)
    return batch._replace(decoder_input_ids=decoder_input_ids, decoder_document_ids=zeros)


def get_pad_token_id(model: Model) -> int:
    assert model.tokenizer is not None, "checked when the model was opened"
    return model.tokenizer.vocab.pad
