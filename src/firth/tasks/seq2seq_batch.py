"""Packed batches of source texts and answers for generative models, and the log-likelihood of each answer.

A decoder reads a source and its answer as one document; only the answer's tokens are targets. A prefix LM's source
attends to all of itself; UniLM predicts masked tokens of the answer. An encoder-decoder reads the source in the encoder
and the answer in the decoder. Both sides of an example share a row and a document id.

Ranking candidate answers needs log p(answer | source) of each. Three savings keep this cheap:
- the encoder runs once per source; its states serve further batches of candidates (`score_answers`);
- one decoder row holds several candidates, each a document that cross-attends to the same source (`source_index`);
- equal prefixes of a source's candidates have equal hidden states, so their logits are computed once (`shared_prefix`).

Shapes: N sources, M answers, B rows, T positions, U decoder positions, K target positions, A answer tokens in total,
S distinct hidden states that predict them, P states per chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from firth.models import Model
from firth.objectives import IGNORE_INDEX, Batch, CounterRNG
from firth.objectives.visibility import attention_rank
from firth.tasks.packing import MIN_ROW_TOKENS, TextPacking, next_power_of_two, pack_texts
from firth.tokens import TokenIds
from firth.tokens.packing import ragged_arange
from firth.train import ComputeConfig

MAX_ANSWER_CHUNK_LOGITS = 2**24  # logits in memory per chunk: 64 MB of float32


class DecoderExample(NamedTuple):
    """The token ids of a document, and the positions whose next token is a target."""

    ids: TokenIds
    target_positions: Sequence[int]


class PackedAnswers(NamedTuple):
    """A batch, and the index of every answer token in its flattened labels, in the order of the examples."""

    batch: Batch
    label_slots: np.ndarray  # (A,)
    answer_lengths: np.ndarray  # (M,) number of tokens of each answer
    # Only if a source has several answers:
    source_index: np.ndarray | None = None  # (B, U) the source, by its index in the row, of each decoder position
    shared_prefix: np.ndarray | None = None  # (A,) see `index_shared_prefixes`

    def sum_by_answer(self, value_A: np.ndarray) -> np.ndarray:
        """Return (M,): the sum of `value_A` over the tokens of each answer."""
        answer_A = np.repeat(np.arange(len(self.answer_lengths)), self.answer_lengths)
        return np.bincount(answer_A, weights=value_A, minlength=len(self.answer_lengths))


def pack_decoder_examples(
    examples: Sequence[DecoderExample], row_tokens: int, pad_id: int, num_prefix_tokens: Sequence[int] | None = None
) -> PackedAnswers:
    """Pack documents into decoder rows of up to `row_tokens` tokens. Labels are the tokens after `target_positions`.

    With `num_prefix_tokens` that many tokens of each document attend to all of each other (prefix LM).
    """
    packing = pack_texts([len(e.ids) for e in examples], row_tokens)
    doc_BT, position_BT = packing.document_ids_and_positions()
    tokens_BT = packing.scatter(np.concatenate([e.ids for e in examples]), pad_id)
    count_N = np.array([len(e.target_positions) for e in examples])
    width, slot_A = packing.allocate_slots(count_N)
    positions = [np.asarray(e.target_positions, np.int64) for e in examples]
    target_BK = np.zeros((packing.num_rows, width), np.int64)
    target_BK.reshape(-1)[slot_A] = np.concatenate(positions) + np.repeat(packing.start, count_N)
    labels_BK = np.full_like(target_BK, IGNORE_INDEX)
    answers = [np.asarray(e.ids)[target + 1] for e, target in zip(examples, positions, strict=True)]
    labels_BK.reshape(-1)[slot_A] = np.concatenate(answers)
    batch = Batch(
        tokens_BT, document_ids=doc_BT, position_ids=position_BT, target_positions=target_BK, labels=labels_BK
    )
    if num_prefix_tokens is not None:
        batch = batch._replace(attention_rank=prefix_attention_rank(packing, position_BT, num_prefix_tokens))
    return PackedAnswers(batch, slot_A, count_N)


def prefix_attention_rank(
    packing: TextPacking, position_BT: np.ndarray, num_prefix_tokens: Sequence[int]
) -> np.ndarray:
    """Return (B, T): 0 in the first `num_prefix_tokens` of each document, then 1, 2, ..."""
    prefix_BT = packing.scatter(np.repeat(num_prefix_tokens, packing.lengths), 0)
    return attention_rank(position_BT, prefix_BT)


def pack_masked_examples(
    examples: Sequence[DecoderExample], row_tokens: int, pad_id: int, mask_id: int, mask_rate: float
) -> Batch:
    """Pack sources and answers for UniLM: answer tokens are masked at random and predicted at their own positions.

    As in UniLM's fine-tuning (Dong et al. 2019, section 2.5), the source attends to all of itself, the answer to the
    source and causally to itself; its token type is 1. `mask_rate` of the answer's tokens, the end token included, and
    at least one of each answer become [MASK]; the published program keeps a tenth of them and replaces a tenth by
    random tokens, as BERT does. The random numbers are a hash of the batch's tokens: a function of the
    examples alone, that differs in each epoch because the batches do.
    """
    packed = pack_decoder_examples(examples, row_tokens, pad_id, [e.target_positions[0] + 1 for e in examples])
    batch, rng = packed.batch, CounterRNG(crc32(packed.batch.input_ids.tobytes()), np.arange(1))
    key_A = rng.uniform("answers", len(packed.label_slots))[0]
    answer_A = np.repeat(np.arange(len(examples)), packed.answer_lengths)
    lowest_M = np.full(len(examples), np.inf)
    np.minimum.at(lowest_M, answer_A, key_A)
    masked_A = (key_A < mask_rate) | (key_A == lowest_M[answer_A])
    labels_BK = np.full_like(batch.labels, IGNORE_INDEX)
    slots = packed.label_slots[masked_A]
    labels_BK.reshape(-1)[slots] = batch.labels.reshape(-1)[slots]
    position_BK = np.where(labels_BK == IGNORE_INDEX, 0, batch.target_positions + 1)  # at the token, not before it
    row_X, slot_X = np.nonzero(labels_BK != IGNORE_INDEX)
    input_ids_BT = batch.input_ids.copy()
    input_ids_BT[row_X, position_BK[row_X, slot_X]] = mask_id
    return batch._replace(
        input_ids=input_ids_BT,
        token_type_ids=(batch.attention_rank > 0).astype(np.int64),
        target_positions=position_BK,
        labels=labels_BK,
    )


def pack_seq2seq_examples(
    sources: Sequence[TokenIds],
    answers: Sequence[Sequence[TokenIds]],
    row_tokens: int,
    pad_id: int,
    decoder_start_id: int,
    reserved_tokens: Sequence[int] | None = None,
) -> PackedAnswers:
    """Pack sources into encoder rows and answers into decoder rows of up to `row_tokens` tokens each.

    A source and its answer share a row and a document id. If a source has several answers, each is a decoder document,
    and all of them cross-attend to the source. `reserved_tokens` is the number of decoder tokens to reserve per source
    (default: the length of its answers). With equal reservations, other answers to the same sources get the same rows.
    """
    flat_answers = [ids for candidates in answers for ids in candidates]
    length_M = np.array([len(ids) for ids in flat_answers])
    count_N = np.array([len(candidates) for candidates in answers])
    max_answers, candidate_A = count_N.max(), np.repeat(ragged_arange(count_N), length_M)
    source_N = np.array([len(ids) for ids in sources])
    target_N = np.array([sum(map(len, candidates)) for candidates in answers])
    reserved_N = target_N if reserved_tokens is None else np.asarray(reserved_tokens)
    shared = pack_texts(np.maximum(source_N, reserved_N), row_tokens)
    encoder, decoder = pack_alongside(shared, source_N), pack_alongside(shared, target_N)
    doc_BT, position_BT = encoder.document_ids_and_positions()
    doc_BU, _ = decoder.document_ids_and_positions()
    last_B = np.bincount(shared.row_index, minlength=shared.num_rows) - 1
    # Padding joins the row's last answer, so that its queries have encoder keys. It comes last and attention is causal,
    # so no answer token attends to it.
    text_BU = np.where(doc_BU < 0, last_B[:, None], doc_BU)
    batch = Batch(
        encoder.scatter(np.concatenate(sources), pad_id),
        document_ids=doc_BT,
        position_ids=position_BT,
        labels=decoder.scatter(np.concatenate(flat_answers), IGNORE_INDEX),
        decoder_input_ids=decoder.scatter(
            np.concatenate([[decoder_start_id, *ids[:-1]] for ids in flat_answers]), pad_id
        ),
        decoder_document_ids=text_BU * max_answers + decoder.scatter(candidate_A, max_answers - 1),
        decoder_position_ids=decoder.scatter(ragged_arange(length_M), 0),
    )
    if max_answers == 1:
        return PackedAnswers(batch, decoder.flat_positions, length_M)
    return PackedAnswers(batch, decoder.flat_positions, length_M, text_BU, index_shared_prefixes(answers))


def index_shared_prefixes(answers: Sequence[Sequence[TokenIds]]) -> np.ndarray:
    """Return (A,): for each answer token, the first token of the same source's answers that follows the same prefix.

    >>> index_shared_prefixes([[[1, 2], [1, 3]], [[1, 2]]]).tolist()
    [0, 1, 0, 1, 4, 5]
    """
    index: list[int] = []
    for candidates in answers:
        first: dict[tuple[int, ...], int] = {}
        for ids in candidates:
            index += [first.setdefault(tuple(ids[:n]), len(index) + n) for n in range(len(ids))]
    return np.array(index)


def pack_alongside(packing: TextPacking, length_N: np.ndarray) -> TextPacking:
    """Pack texts of other lengths into the rows and the order of `packing`. The row width follows the new lengths."""
    order = np.lexsort((packing.document_index, packing.row_index))
    used_B = np.bincount(packing.row_index, weights=length_N, minlength=packing.num_rows).astype(np.int64)
    first_N = np.empty_like(length_N)
    before_B = np.cumsum(used_B) - used_B
    first_N[order] = np.cumsum(length_N[order]) - length_N[order] - before_B[packing.row_index[order]]
    return packing._replace(width=round_row_width(int(used_B.max())), lengths=length_N, start=first_N)


def round_row_width(n: int) -> int:
    """Round a row width up to one of four values per power of two, which limits the number of distinct shapes.

    >>> [round_row_width(n) for n in (3, 17, 33, 41, 100, 300)]
    [16, 20, 40, 48, 112, 320]
    """
    step = max(1, next_power_of_two(n) // 8)
    return max(MIN_ROW_TOKENS, -(-n // step) * step)


@torch.no_grad()
def score_answers(
    model: Model, packed: PackedAnswers, compute: ComputeConfig, encoder_states: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
    """Return (A,) the log-probability of each answer token, (A,) whether it is the argmax, and the encoder states.

    Pass the encoder states back with other answers to the same sources: the encoder then does not run again. Logits are
    computed in chunks of P states, so that (S, V) never exists at once.
    """
    batch = packed.batch.to(compute.device)
    with compute.autocast():
        if batch.decoder_input_ids is None:
            x = model.target_hidden_states(batch)
        else:
            encoder_states = model.encode(batch) if encoder_states is None else encoder_states  # type: ignore[operator]
            source = None if packed.source_index is None else torch.from_numpy(packed.source_index).to(compute.device)
            x = model.hidden_states(batch, encoder_states, source)  # type: ignore[call-arg]
        first_S, state_A = np.unique(
            np.arange(len(packed.label_slots)) if packed.shared_prefix is None else packed.shared_prefix,
            return_inverse=True,
        )
        slot_S, label_A = packed.label_slots[first_S], packed.batch.labels.reshape(-1)[packed.label_slots]
        x_SD = x.flatten(0, 1)[torch.from_numpy(slot_S).to(compute.device)]
        logp_A, is_argmax_A = np.empty((2, len(state_A)), np.float32)
        chunk = max(1, MAX_ANSWER_CHUNK_LOGITS // model.config.vocab_size)
        for i, x_PD in enumerate(x_SD.split(chunk)):
            logits_PV = model.head(x_PD, model.embed.tokens.weight).float()
            in_chunk = np.flatnonzero(state_A // chunk == i)
            row, label = (torch.from_numpy(a[in_chunk]).to(compute.device) for a in (state_A % chunk, label_A))
            logp = logits_PV[row, label] - logits_PV.logsumexp(-1)[row]
            is_argmax = logits_PV.argmax(-1)[row] == label
            logp_A[in_chunk], is_argmax_A[in_chunk] = torch.stack([logp, is_argmax]).cpu().numpy()
    return logp_A, is_argmax_A > 0, encoder_states
