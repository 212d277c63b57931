"""What the model reads and which labels it gets, once the noise mask is known.

    MLM         replace target tokens in place                            apply_mlm_noise
    T5          replace spans by sentinels, on two sides or in one row    sentinel_batch, decoder_denoising_batch
                and mask tokens of the encoder's side                     mask_encoder_tokens
    prefix      split each document between encoder and decoder           split_prefix_batch
    BART        permute, rotate, delete, infill, mask                     functions from NoisyText to NoisyText

Every function works on whole arrays, without a loop over rows or documents. Sequences that change their length are
built in one way: stack all candidates for an output position along the row, mark the kept ones, and compact each
row (`_compact_rows`). Token ids are only moved and replaced, never inspected. `base.trace_sources` uses this: given
positions in place of ids, each function returns the source index of every output token.

Shapes: B rows, L positions of the source row, T of the corrupted row, U of the decoder, K target slots, X candidates
for output positions, N tokens or sentences of all rows (a flat list), S documents of all rows, M spans of a document.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from firth.objectives.batch import IGNORE_INDEX, Batch
from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import (
    DocumentUnits,
    count_earlier_in_document,
    is_document_start,
    shift_right,
    spans_to_mask,
    stable_argsort,
)
from firth.objectives.visibility import broadcast_document_start, document_lengths
from firth.tokens import Rows, Vocabulary
from firth.tokens.packing import ragged_arange

# --- MLM ----------------------------------------------------------------------------------------------------------


class TargetSlots(NamedTuple):
    """Target positions in ascending order (B, K), and which slots are in use (B, K)."""

    positions: np.ndarray
    is_used: np.ndarray


def select_targets(mask_BL: np.ndarray, K: int) -> TargetSlots:
    """Return the positions of a mask in K slots per row; unused slots have position 0."""
    position_BL = np.broadcast_to(np.arange(mask_BL.shape[1]), mask_BL.shape)
    used_BK = np.arange(K) < mask_BL.sum(1, keepdims=True)
    return TargetSlots(_compact_rows(position_BL, mask_BL, K, 0), used_BK)


def apply_mlm_noise(
    tokens_BL: np.ndarray,
    targets: TargetSlots,
    rng: CounterRNG,
    vocab: Vocabulary,
    mask_prob: float,
    random_prob: float,
    span_BK: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return BERT's input (B, L) and labels (B, K): each target becomes [MASK], a random token, or is kept.

    With `span_BK`, the targets of a span share one of the three outcomes (SpanBERT), though not the random token.
    """
    assert vocab.mask is not None, "the objective's template requires it"
    B, K = targets.positions.shape
    truth_BK = np.take_along_axis(tokens_BL, targets.positions, 1)
    u_BK = rng.uniform("fate", K)
    if span_BK is not None:
        u_BK = np.take_along_axis(u_BK, span_BK, 1)
    input_BK = np.where(u_BK < mask_prob, vocab.mask, truth_BK)
    if random_prob:
        random_BK = vocab.non_special_ids[rng.integers("other", K, len(vocab.non_special_ids))]
        input_BK = np.where((u_BK >= mask_prob) & (u_BK < mask_prob + random_prob), random_BK, input_BK)
    input_BL = tokens_BL.copy()
    flat_BK = targets.positions + tokens_BL.shape[1] * np.arange(B)[:, None]
    input_BL.reshape(-1)[flat_BK[targets.is_used]] = input_BK[targets.is_used]
    return input_BL, np.where(targets.is_used, truth_BK, IGNORE_INDEX)


def find_target_spans(mask_BL: np.ndarray, targets: TargetSlots) -> tuple[np.ndarray, np.ndarray]:
    """Return the span of each target: its number in the row (B, K), and its boundaries (B, K, 3).

    Boundaries are the position before the span, the position after it, and the target's offset in the span.
    """
    L = mask_BL.shape[1]
    position = np.arange(L)
    opens_BL = mask_BL & ~shift_right(mask_BL, False)
    first_BL = np.maximum.accumulate(np.where(opens_BL, position, 0), 1)
    after_BL = np.minimum.accumulate(np.where(mask_BL, L, position)[:, ::-1], 1)[:, ::-1]
    number_BL = np.maximum(np.cumsum(opens_BL, 1) - 1, 0)
    number_BK, first_BK, after_BK = (
        np.take_along_axis(x, targets.positions, 1) for x in (number_BL, first_BL, after_BL)
    )
    boundary_BK3 = np.stack([first_BK - 1, after_BK, targets.positions - first_BK], 2)
    return np.where(targets.is_used, number_BK, 0), np.where(targets.is_used[:, :, None], boundary_BK3, 0)


# --- T5's sentinels -----------------------------------------------------------------------------------------------


class SentinelSides(NamedTuple):
    """Candidates for both sides of a row with sentinels, and which of them are kept.

    Each source position has one candidate for the input (B, L) and three for the target (B, 3 L): the sentinel of a
    span that starts there, its own token, and the document's end token.
    """

    input_ids: np.ndarray
    keep_input: np.ndarray
    target_ids: np.ndarray
    keep_target: np.ndarray


def insert_sentinels(rows: Rows, noise_BL: np.ndarray, vocab: Vocabulary) -> SentinelSides:
    """Replace each noise span by one sentinel; the target is sentinel, span, sentinel, span, ..., end token.

    Sentinels are numbered from 0 in every document of a row.
    """
    assert vocab.eos is not None, "the objective's template requires it"
    first_BL, last_BL = is_document_start(rows.document_ids), _is_document_end(rows.document_ids)
    opens_BL = _opens_span(rows, noise_BL)
    input_BL = rows.input_ids.copy()
    input_BL[opens_BL] = np.asarray(vocab.sentinel_ids)[count_earlier_in_document(opens_BL, first_BL)[opens_BL]]
    keep_BX = _interleave(opens_BL, noise_BL, last_BL)
    target_BX = _interleave(input_BL, rows.input_ids, np.full_like(input_BL, vocab.eos))
    return SentinelSides(input_BL, _kept_by_encoder(rows, noise_BL), target_BX, keep_BX)


def mask_encoder_tokens(
    batch: Batch, rows: Rows, noise_BL: np.ndarray, mask_BL: np.ndarray, K: int, mask_id: int
) -> Batch:
    """Return the batch of `sentinel_batch` with these tokens of the encoder's text masked, as its own K targets."""
    T = batch.input_ids.shape[1]
    mask_BT = _compact_rows(mask_BL, _kept_by_encoder(rows, noise_BL), T, False)
    targets = select_targets(mask_BT, K)
    labels_BK = np.take_along_axis(batch.input_ids, targets.positions, 1)
    return batch._replace(
        input_ids=np.where(mask_BT, mask_id, batch.input_ids),
        encoder_target_positions=targets.positions,
        encoder_labels=np.where(targets.is_used, labels_BK, IGNORE_INDEX),
    )


def _kept_by_encoder(rows: Rows, noise_BL: np.ndarray) -> np.ndarray:
    """Mark what the encoder reads: the text without noise, and the first token of each span, a sentinel's place."""
    return (rows.document_ids >= 0) & (~noise_BL | _opens_span(rows, noise_BL))


def _opens_span(rows: Rows, noise_BL: np.ndarray) -> np.ndarray:
    return noise_BL & (is_document_start(rows.document_ids) | ~shift_right(noise_BL, False))


def sentinel_batch(rows: Rows, noise_BL: np.ndarray, T: int, U: int, vocab: Vocabulary) -> Batch:
    """Return text with sentinels for an encoder of T positions, and the spans as labels of a decoder of U."""
    sides = insert_sentinels(rows, noise_BL, vocab)
    doc_BT = _compact_rows(rows.document_ids, sides.keep_input, T, -1)
    tokens_BT = _compact_rows(sides.input_ids, sides.keep_input, T, vocab.pad)
    labels_BU = _compact_rows(sides.target_ids, sides.keep_target, U, IGNORE_INDEX)
    doc_BU = _compact_rows(np.repeat(rows.document_ids, 3, 1), sides.keep_target, U, -1)
    return encoder_decoder_batch(tokens_BT, doc_BT, labels_BU, doc_BU, vocab.pad, vocab.pad)


def encoder_decoder_batch(
    tokens_BT: np.ndarray,
    doc_BT: np.ndarray,
    labels_BU: np.ndarray,
    doc_BU: np.ndarray,
    start_token_id: int,
    pad_token_id: int,
) -> Batch:
    """Return a batch for an encoder-decoder; in each document the decoder reads `start_token_id`, then its labels."""
    shifted_BU = np.where(doc_BU == shift_right(doc_BU, -1), shift_right(labels_BU, IGNORE_INDEX), start_token_id)
    # Padding counts as part of the row's last document: a query without any key would give an empty softmax.
    full_BU = np.where(doc_BU < 0, doc_BT.max(1, keepdims=True), doc_BU)
    return Batch(
        input_ids=tokens_BT,
        document_ids=doc_BT,
        position_ids=_build_position_ids(doc_BT),
        labels=labels_BU,
        decoder_input_ids=np.where((shifted_BU == IGNORE_INDEX) | (doc_BU < 0), pad_token_id, shifted_BU),
        decoder_document_ids=full_BU,
        decoder_position_ids=_build_position_ids(full_BU),
    )


def decoder_denoising_batch(
    rows: Rows, noise_BL: np.ndarray, T: int, K: int, vocab: Vocabulary, is_prefix_lm: bool
) -> Batch:
    """Return rows of T with each document's text with sentinels and, right after it, its target; K target slots.

    With `is_prefix_lm` the text attends to all of itself, otherwise causally like the target.
    """
    sides = insert_sentinels(rows, noise_BL, vocab)
    L = rows.document_ids.shape[1]
    doc_BX = np.concatenate([rows.document_ids, np.repeat(rows.document_ids, 3, 1)], 1)
    keep_BX = np.concatenate([sides.keep_input, sides.keep_target], 1)
    tokens_BX = np.concatenate([sides.input_ids, sides.target_ids], 1)
    # A stable sort by document keeps a document's text before its target; int16 makes it a radix sort.
    key_BX = np.where(keep_BX, doc_BX, 2**15 - 1).astype(np.int16)
    order_BT = np.argsort(key_BX, axis=1, kind="stable")[:, :T]
    kept_BT = np.take_along_axis(keep_BX, order_BT, 1)
    assert kept_BT.sum() == keep_BX.sum(), "the objective chooses T large enough"
    tokens_BT = np.where(kept_BT, np.take_along_axis(tokens_BX, order_BT, 1), vocab.pad)
    doc_BT = np.where(kept_BT, np.take_along_axis(doc_BX, order_BT, 1), -1)
    is_target_BT = kept_BT & (order_BT >= L)
    targets = select_targets(_shift_left(is_target_BT), K)
    labels_BK = np.take_along_axis(tokens_BT, np.minimum(targets.positions + 1, T - 1), 1)
    rank_BT = count_earlier_in_document(is_target_BT, is_document_start(doc_BT)) + is_target_BT
    return Batch(
        input_ids=tokens_BT,
        document_ids=doc_BT,
        position_ids=_build_position_ids(doc_BT),
        attention_rank=rank_BT if is_prefix_lm else None,
        target_positions=targets.positions,
        labels=np.where(targets.is_used, labels_BK, IGNORE_INDEX),
    )


def split_prefix_batch(rows: Rows, prefix_BL: np.ndarray, vocab: Vocabulary) -> Batch:
    """Return `prefix_BL` tokens of each document and an end token for the encoder, the rest for the decoder."""
    assert vocab.eos is not None, "the objective's template requires it"
    L = rows.input_ids.shape[1]
    text_BL = rows.document_ids >= 0
    prefix_text_BL = text_BL & (rows.position_ids < prefix_BL)
    tokens_BX = _interleave(rows.input_ids, np.full_like(rows.input_ids, vocab.eos))
    keep_BX = _interleave(prefix_text_BL, prefix_text_BL & (rows.position_ids == prefix_BL - 1))
    rest_BL = text_BL & ~prefix_text_BL
    return encoder_decoder_batch(
        _compact_rows(tokens_BX, keep_BX, L, vocab.pad),
        _compact_rows(np.repeat(rows.document_ids, 2, 1), keep_BX, L, -1),
        _compact_rows(rows.input_ids, rest_BL, L, IGNORE_INDEX),
        _compact_rows(rows.document_ids, rest_BL, L, -1),
        vocab.pad,
        vocab.pad,
    )


# --- BART's noise: each function returns a text that is not longer than its input ---------------------------------


class NoisyText(NamedTuple):
    """A text while it is being corrupted, (B, L) each; `maskable` is False for special tokens and padding."""

    input_ids: np.ndarray
    document_ids: np.ndarray
    maskable: np.ndarray


def permute_sentences(text: NoisyText, sentence_end_BL: np.ndarray, rate: float, rng: CounterRNG) -> NoisyText:
    """Permute the sentences of a share of the documents; special tokens stay in place."""
    L = text.document_ids.shape[1]
    opens_BL = is_document_start(text.document_ids)
    starts_BL = text.maskable & (~shift_right(text.maskable, False) | shift_right(sentence_end_BL, False) | opens_BL)
    ends_BL = text.maskable & ~_shift_left(text.maskable & ~starts_BL)
    first_N, last_N = np.flatnonzero(starts_BL), np.flatnonzero(ends_BL)
    first_S = np.flatnonzero(opens_BL)
    chosen_S = rng.uniform_at("permuted", *np.divmod(first_S, L)) < rate
    document_N = np.searchsorted(first_S, first_N, side="right") - 1
    moves_N = chosen_S[document_N]
    first_N, length_N, document_N = first_N[moves_N], (last_N - first_N + 1)[moves_N], document_N[moves_N]
    order_N = np.lexsort((rng.uniform_at("sentences", *np.divmod(first_N, L)), document_N))
    tokens_BL = text.input_ids.copy()
    to, source = range_positions(first_N, length_N), range_positions(first_N[order_N], length_N[order_N])
    tokens_BL.reshape(-1)[to] = text.input_ids.reshape(-1)[source]
    return text._replace(input_ids=tokens_BL)


def range_positions(first_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    """Return the positions of N ranges, concatenated."""
    return np.repeat(first_N, length_N) + ragged_arange(length_N)


def rotate_documents(text: NoisyText, rate: float, rng: CounterRNG) -> NoisyText:
    """Start a share of the documents at a random token; the tokens before it come last."""
    L = text.document_ids.shape[1]
    offset_BL = count_earlier_in_document(text.maskable, is_document_start(text.document_ids))
    length_BL = np.maximum(document_lengths(text.document_ids, text.maskable), 1)
    u_BL = broadcast_document_start(rng.uniform("rotation", L), text.document_ids)
    key_BL = (offset_BL - (u_BL * length_BL).astype(np.int64)) % length_BL / length_BL
    chosen_BL = broadcast_document_start(rng.uniform("rotated", L), text.document_ids) < rate
    moved_BL = text.maskable & chosen_BL
    # Only tokens that move are sorted among themselves; all others stay in place.
    order_BL = stable_argsort(key_BL, np.where(moved_BL, text.document_ids, 2**15))
    tokens_BL = text.input_ids.copy()
    sorted_BL = np.take_along_axis(text.input_ids, order_BL, 1)
    tokens_BL[moved_BL] = sorted_BL[np.arange(L) < moved_BL.sum(1, keepdims=True)]
    return text._replace(input_ids=tokens_BL)


def delete_tokens(text: NoisyText, mask_BL: np.ndarray, pad_token_id: int) -> NoisyText:
    """Remove tokens and close the gaps; rows keep their length and end in padding."""
    keep_BL = (text.document_ids >= 0) & ~mask_BL
    L = keep_BL.shape[1]
    return NoisyText(
        _compact_rows(text.input_ids, keep_BL, L, pad_token_id),
        _compact_rows(text.document_ids, keep_BL, L, -1),
        _compact_rows(text.maskable, keep_BL, L, False),
    )


def mask_tokens(text: NoisyText, mask_BL: np.ndarray, vocab: Vocabulary) -> NoisyText:
    """Replace single tokens by [MASK]."""
    assert vocab.mask is not None, "the objective's template requires it"
    return text._replace(input_ids=np.where(mask_BL, vocab.mask, text.input_ids))


def infill_spans(
    text: NoisyText, length_probs: np.ndarray, rate: float, rng: CounterRNG, vocab: Vocabulary
) -> NoisyText:
    """Replace spans by one [MASK] each, `rate` of the tokens on average; a span of length 0 inserts a [MASK].

    `length_probs[n]` is the probability of a span of n tokens. Between two spans there is at least one token.
    """
    assert vocab.mask is not None, "the objective's template requires it"
    L = text.document_ids.shape[1]
    documents = DocumentUnits(text.document_ids, text.maskable)
    start_SM, length_SM = documents.sample_spans(length_probs, rate, rng)
    document_BL, offset_BL = documents.document_index_BL, documents.units_before_BL
    hidden_BL = spans_to_mask(start_SM, length_SM, L + 1)[document_BL, offset_BL] & text.maskable
    opens_BL = hidden_BL & ~shift_right(hidden_BL, False)
    keep_BL = (text.document_ids >= 0) & (~hidden_BL | opens_BL)
    insert_SX = np.zeros((len(start_SM), L + 1), bool)
    document, span = np.nonzero(length_SM == 0)
    insert_SX[document, start_SM[document, span]] = True
    text_end_BL = shift_right(text.maskable, False) & (text.document_ids >= 0)  # the position after a document's text
    insert_BL = insert_SX[document_BL, offset_BL] & (text.maskable | text_end_BL)
    insert_BL &= np.cumsum(insert_BL, 1) <= L - keep_BL.sum(1, keepdims=True)  # rows keep their length
    # Each position has two candidates: a [MASK] inserted before it, and itself (or the [MASK] of a span it opens).
    keep_BX = _interleave(insert_BL, keep_BL)
    index_N = np.flatnonzero(keep_BX)
    source_N, is_own_N = index_N >> 1, (index_N & 1).astype(bool)
    filled_BL = np.arange(L) < keep_BX.sum(1, keepdims=True)
    infilled = NoisyText(
        np.full_like(text.input_ids, vocab.pad), np.full_like(text.document_ids, -1), np.zeros_like(text.maskable)
    )
    infilled.input_ids[filled_BL] = np.where(
        is_own_N & ~hidden_BL.ravel()[source_N], text.input_ids.ravel()[source_N], vocab.mask
    )
    infilled.document_ids[filled_BL] = text.document_ids.ravel()[source_N]
    infilled.maskable[filled_BL] = text.maskable.ravel()[source_N]
    return infilled


# --- helpers ------------------------------------------------------------------------------------------------------


def _interleave(*candidates_BL: np.ndarray) -> np.ndarray:
    """Return the candidates of each position side by side, (B, C L) for C arrays (B, L)."""
    return np.stack(candidates_BL, 2).reshape(len(candidates_BL[0]), -1)


def _compact_rows(x_BX: np.ndarray, keep_BX: np.ndarray, width: int, fill: int | bool) -> np.ndarray:
    """Return the kept elements of each row without gaps, (B, width), with `fill` at the end."""
    count_B1 = keep_BX.sum(1, keepdims=True)
    assert count_B1.max(initial=0) <= width, "the objective chooses the width large enough"
    rows = np.full((len(x_BX), width), fill, x_BX.dtype)
    rows[np.arange(width) < count_B1] = x_BX[keep_BX]
    return rows


def _shift_left(x_BL: np.ndarray) -> np.ndarray:
    """Return for each position the value at the next one; False at the end of a row."""
    return np.append(x_BL[:, 1:], np.zeros((len(x_BL), 1), bool), 1)


def _is_document_end(doc_BL: np.ndarray) -> np.ndarray:
    """Return the last position of each document (B, L); padding has none."""
    return is_document_start(doc_BL[:, ::-1])[:, ::-1]


def _build_position_ids(doc_BT: np.ndarray) -> np.ndarray:
    position = np.arange(doc_BT.shape[1])
    first = np.maximum.accumulate(np.where(doc_BT != shift_right(doc_BT, -2), position, 0), 1)
    return np.where(doc_BT < 0, 0, position - first)
