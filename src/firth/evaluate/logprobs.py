"""Ask a model how likely given tokens are at given places, many readings at a time.

B rows, T places, K asked places, N asked in all, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firth.generate.decode_state import eval_mode, pad_right
from firth.models import Model
from firth.models.heads import LMHeadModule
from firth.objectives import IGNORE_INDEX, Batch

EVAL_BATCH_TOKENS = 8192  # places that are computed at once
CHUNK_QUERIES = 2048  # readings that are sorted by length before they are put into batches
MAX_LOGITS_ELEMENTS = 2**24  # logits that are made at once: 64 MB of float32
QueryKey = tuple[tuple[int, ...] | None, ...]


class LogprobQuery(NamedTuple):
    """One reading, and the tokens that are asked. The places are those of what is written, where something is."""

    input_ids: list[int]
    target_positions: list[int]
    labels: list[int]
    decoder_input_ids: list[int] | None = None  # by the decoder that reads the encoder
    attention_rank: list[int] | None = None  # i sees j when rank[j] <= rank[i], for a model that hides tokens by order
    text_index: int = 0  # which text this belongs to


class TokenLogprobs(NamedTuple):
    """What the model says about the tokens asked: their log-probabilities, and the tokens it holds likeliest."""

    logprobs: np.ndarray  # (K,) float64, nats
    top_ids: np.ndarray  # (K,) ids


def compute_logprobs(
    model: Model, queries: Iterable[LogprobQuery], batch_tokens: int = EVAL_BATCH_TOKENS
) -> Iterator[tuple[LogprobQuery, TokenLogprobs]]:
    """The queries in their order, each with its answer. Readings of like length are computed together.

    The probabilities are those of the model's own softmax, over every row of its vocabulary, in float32: in bfloat16
    two sentences of a pair would often be equally likely. Queries that are the same are asked once, so that a tie is a
    tie: what is computed beside another row may differ in the last digit.
    """
    stream, before = iter(queries), dict[QueryKey, TokenLogprobs]()
    with eval_mode(model):
        while chunk := list(islice(stream, CHUNK_QUERIES)):
            once = {query_key(query): query for query in chunk}
            answers = {key: before[key] for key in once if key in before}  # those of a pair may be in two chunks
            new = [(key, query) for key, query in once.items() if key not in answers]
            for places in batch_queries_by_length([query for _, query in new], batch_tokens):
                found = score_query_batch(model, [new[i][1] for i in places])
                answers |= {new[i][0]: one for i, one in zip(places, found, strict=True)}
            yield from ((query, answers[query_key(query)]) for query in chunk)
            before = answers


def query_key(query: LogprobQuery) -> QueryKey:
    """All of a query but whose it is, as something that can be looked up."""
    return tuple(None if part is None else tuple(part) for part in query[:-1])


def batch_queries_by_length(queries: Sequence[LogprobQuery], batch_tokens: int) -> Iterator[list[int]]:
    """Places in `queries` by falling length, as many at once as make `batch_tokens` with their padding."""
    size = [max(len(query.input_ids), len(query.decoder_input_ids or ())) for query in queries]
    order = sorted(range(len(queries)), key=lambda i: -size[i])
    while order:
        rows = max(1, batch_tokens // size[order[0]])
        yield order[:rows]
        order = order[rows:]


@torch.no_grad()
def score_query_batch(model: Model, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
    """One batch."""
    batch = collate_queries(queries, get_pad_token_id(model)).to(model.embed.tokens.weight.device)
    used_BK = batch.labels != IGNORE_INDEX
    logp_N, best_N = label_logprobs(model, model.target_hidden_states(batch)[used_BK], batch.labels[used_BK])
    ends = np.cumsum([len(query.labels) for query in queries])[:-1]
    return [TokenLogprobs(*pair) for pair in zip(np.split(logp_N, ends), np.split(best_N, ends), strict=True)]


def label_logprobs(model: Model, hidden_ND: Tensor, labels_N: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each label, and the likeliest token, never holding the logits of all at once."""
    assert isinstance(model.head, LMHeadModule), "checked before anything is asked"
    rows = max(1, MAX_LOGITS_ELEMENTS // model.config.vocab_size)
    logp, best = [], []
    for x, labels in zip(hidden_ND.split(rows), labels_N.split(rows), strict=True):
        logits = model.head(x, model.embed.tokens.weight).float()
        logp.append(logits.gather(1, labels[:, None])[:, 0].double() - logits.double().logsumexp(1))
        best.append(logits.argmax(1))
    return torch.cat(logp).cpu().numpy(), torch.cat(best).cpu().numpy()


def collate_queries(queries: Sequence[LogprobQuery], pad_token_id: int) -> Batch:
    """The queries side by side, padded on the right."""
    tokens, doc = pad_right([query.input_ids for query in queries], pad_token_id)
    asked, _ = pad_right([query.target_positions for query in queries], 0)
    labels, _ = pad_right([query.labels for query in queries], IGNORE_INDEX)
    batch = Batch(tokens, document_ids=doc, target_positions=asked, labels=labels)
    if queries[0].attention_rank is not None:
        batch = batch._replace(attention_rank=pad_right([query.attention_rank or [] for query in queries], 0)[0])
    if queries[0].decoder_input_ids is None:
        return batch
    written, _ = pad_right([query.decoder_input_ids or [] for query in queries], pad_token_id)
    # Padding comes last, and a decoder does not look ahead.
    return batch._replace(decoder_input_ids=written, decoder_document_ids=np.zeros_like(written))


def get_pad_token_id(model: Model) -> int:
    assert model.tokenizer is not None, "checked before anything is asked"
    return model.tokenizer.vocab.pad
