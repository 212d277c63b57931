"""What is read and what is asked, once the noise is chosen.

B rows, L places before corruption, T after, U places of the decoder, K asked slots, X any places.
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

# --- masks --------------------------------------------------------------------------------------------------------


class TargetSlots(NamedTuple):
    """The places that are asked (B, K), rising, and which of the slots are used."""

    positions: np.ndarray
    is_used: np.ndarray


def select_targets(mask_BL: np.ndarray, K: int) -> TargetSlots:
    """The places of a mask in slots of a fixed number."""
    place_BL = np.broadcast_to(np.arange(mask_BL.shape[1]), mask_BL.shape)
    used_BK = np.arange(K) < mask_BL.sum(1, keepdims=True)
    return TargetSlots(_compact_rows(place_BL, mask_BL, K, 0), used_BK)


def apply_mlm_noise(
    tokens_BL: np.ndarray,
    targets: TargetSlots,
    rng: CounterRNG,
    vocab: Vocabulary,
    mask_prob: float,
    random_prob: float,
    span_BK: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """BERT's noise: a share of the chosen becomes [MASK], a share any real token, the rest is kept.

    Slots with the same `unit` share one fate. Returns what is read (B, L) and the answers (B, K).
    """
    assert vocab.mask is not None, "the objective asks for it before"
    B, K = targets.positions.shape
    truth_BK = np.take_along_axis(tokens_BL, targets.positions, 1)
    fate_BK = rng.uniform("fate", K)
    if span_BK is not None:
        fate_BK = np.take_along_axis(fate_BK, span_BK, 1)
    read_BK = np.where(fate_BK < mask_prob, vocab.mask, truth_BK)
    if random_prob:
        any_BK = vocab.non_special_ids[rng.integers("other", K, len(vocab.non_special_ids))]
        read_BK = np.where((fate_BK >= mask_prob) & (fate_BK < mask_prob + random_prob), any_BK, read_BK)
    read_BL = tokens_BL.copy()
    flat_BK = targets.positions + tokens_BL.shape[1] * np.arange(B)[:, None]
    read_BL.reshape(-1)[flat_BK[targets.is_used]] = read_BK[targets.is_used]
    return read_BL, np.where(targets.is_used, truth_BK, IGNORE_INDEX)


def find_target_spans(mask_BL: np.ndarray, targets: TargetSlots) -> tuple[np.ndarray, np.ndarray]:
    """The spans that asked places belong to: their number in the row (B, K), and their surroundings (B, K, 3).

    Surroundings are the last place before the span, the first one after it, and which place of it this one is.
    """
    L = mask_BL.shape[1]
    place = np.arange(L)
    opens_BL = mask_BL & ~shift_right(mask_BL, False)
    first_BL = np.maximum.accumulate(np.where(opens_BL, place, 0), 1)
    after_BL = np.minimum.accumulate(np.where(mask_BL, L, place)[:, ::-1], 1)[:, ::-1]
    number_BL = np.maximum(np.cumsum(opens_BL, 1) - 1, 0)
    number_BK, first_BK, after_BK = (
        np.take_along_axis(x, targets.positions, 1) for x in (number_BL, first_BL, after_BL)
    )
    around_BK3 = np.stack([first_BK - 1, after_BK, targets.positions - first_BK], 2)
    return np.where(targets.is_used, number_BK, 0), np.where(targets.is_used[:, :, None], around_BK3, 0)


# --- sentinels ----------------------------------------------------------------------------------------------------


class SentinelSides(NamedTuple):
    """What the two sides of a corrupted row are made of, before they are laid out.

    Each place of the source adds its token to the text where `keep_input` says so, and to the answer so many of `target_ids`
    as `keep_target` has (B, 3 L).
    """

    input_ids: np.ndarray
    keep_input: np.ndarray
    target_ids: np.ndarray
    keep_target: np.ndarray


def insert_sentinels(rows: Rows, noise_BL: np.ndarray, vocab: Vocabulary) -> SentinelSides:
    """T5's corruption: each noise span becomes one sentinel, and the answer is sentinel, span, sentinel, span, end.

    Every document of a row counts its sentinels from 0.
    """
    assert vocab.eos is not None, "the objective asks for it before"
    text_BL = rows.document_ids >= 0
    first_BL, last_BL = is_document_start(rows.document_ids), _is_document_end(rows.document_ids)
    opens_BL = noise_BL & (first_BL | ~shift_right(noise_BL, False))
    read_BL = rows.input_ids.copy()
    read_BL[opens_BL] = np.asarray(vocab.sentinel_ids)[count_earlier_in_document(opens_BL, first_BL)[opens_BL]]
    # What each place adds to the answer: a sentinel where a span opens, its token in a span, the end at the end.
    said_BX = np.stack([opens_BL, noise_BL, last_BL], 2).reshape(len(read_BL), -1)
    words_BX = np.stack([read_BL, rows.input_ids, np.full_like(read_BL, vocab.eos)], 2).reshape(len(read_BL), -1)
    return SentinelSides(read_BL, text_BL & (~noise_BL | opens_BL), words_BX, said_BX)


def sentinel_batch(rows: Rows, noise_BL: np.ndarray, T: int, U: int, vocab: Vocabulary) -> Batch:
    """Text with sentinels for an encoder of T places, and the answers for a decoder of U."""
    sides = insert_sentinels(rows, noise_BL, vocab)
    doc_BT = _compact_rows(rows.document_ids, sides.keep_input, T, -1)
    tokens_BT = _compact_rows(sides.input_ids, sides.keep_input, T, vocab.pad)
    labels_BU = _compact_rows(sides.target_ids, sides.keep_target, U, IGNORE_INDEX)
    answer_doc_BU = _compact_rows(np.repeat(rows.document_ids, 3, 1), sides.keep_target, U, -1)
    return encoder_decoder_batch(tokens_BT, doc_BT, labels_BU, answer_doc_BU, vocab.pad, vocab.pad)


def encoder_decoder_batch(
    tokens_BT: np.ndarray,
    doc_BT: np.ndarray,
    labels_BU: np.ndarray,
    doc_BU: np.ndarray,
    start_token_id: int,
    pad_token_id: int,
) -> Batch:
    """A batch for an encoder-decoder: the decoder reads `start_token_id` and then what it should have said so far."""
    before_BU = np.where(doc_BU == shift_right(doc_BU, -1), shift_right(labels_BU, IGNORE_INDEX), start_token_id)
    # Padding must see something, or its attention is empty: it passes for a part of the row's last document.
    last_B1 = doc_BT.max(1, keepdims=True)
    full_BU = np.where(doc_BU < 0, last_B1, doc_BU)
    return Batch(
        input_ids=tokens_BT,
        document_ids=doc_BT,
        position_ids=_build_position_ids(doc_BT),
        labels=labels_BU,
        decoder_input_ids=np.where((before_BU == IGNORE_INDEX) | (doc_BU < 0), pad_token_id, before_BU),
        decoder_document_ids=full_BU,
        decoder_position_ids=_build_position_ids(full_BU),
    )


def decoder_denoising_batch(
    rows: Rows, noise_BL: np.ndarray, T: int, K: int, vocab: Vocabulary, is_prefix_lm: bool
) -> Batch:
    """Each document's text with sentinels and, right after it, its answers, in one row of T; only answers are asked.

    With `is_prefix_lm` the text sees all of itself, else it is read in order like the answers.
    """
    sides = insert_sentinels(rows, noise_BL, vocab)
    doc_BX = np.concatenate([rows.document_ids, np.repeat(rows.document_ids, 3, 1)], 1)
    keep_BX = np.concatenate([sides.keep_input, sides.keep_target], 1)
    words_BX = np.concatenate([sides.input_ids, sides.target_ids], 1)
    answer_BX = np.broadcast_to(np.arange(doc_BX.shape[1]) >= rows.document_ids.shape[1], doc_BX.shape)
    key_BX = np.where(keep_BX, doc_BX, 2**15 - 1).astype(np.int16)
    order_BT = np.argsort(key_BX, axis=1, kind="stable")[:, :T]  # document by document, its text, then its answers
    kept_BT = np.take_along_axis(keep_BX, order_BT, 1)
    assert kept_BT.sum() == keep_BX.sum(), "the objective sees to it that there is room"
    tokens_BT, doc_BT = (np.take_along_axis(x, order_BT, 1) for x in (words_BX, doc_BX))
    tokens_BT, doc_BT = np.where(kept_BT, tokens_BT, vocab.pad), np.where(kept_BT, doc_BT, -1)
    answer_BT = np.take_along_axis(answer_BX, order_BT, 1) & kept_BT
    ahead_BT = np.append(answer_BT[:, 1:], np.zeros((len(answer_BT), 1), bool), 1)  # the next token is an answer
    asked = select_targets(ahead_BT, K)
    labels_BK = np.take_along_axis(tokens_BT, np.minimum(asked.positions + 1, T - 1), 1)
    started_BT = count_earlier_in_document(answer_BT, is_document_start(doc_BT)) + answer_BT
    return Batch(
        input_ids=tokens_BT,
        document_ids=doc_BT,
        position_ids=_build_position_ids(doc_BT),
        attention_rank=started_BT if is_prefix_lm else None,
        target_positions=asked.positions,
        labels=np.where(asked.is_used, labels_BK, IGNORE_INDEX),
    )


def split_prefix_batch(rows: Rows, prefix_BL: np.ndarray, vocab: Vocabulary) -> Batch:
    """The first tokens of each document for the encoder, with an end of their own, and the rest for the decoder."""
    assert vocab.eos is not None, "the objective asks for it before"
    L = rows.input_ids.shape[1]
    text_BL = rows.document_ids >= 0
    read_BL = text_BL & (rows.position_ids < prefix_BL)
    ends_BL = read_BL & (rows.position_ids == prefix_BL - 1)
    words_BX = np.stack([rows.input_ids, np.full_like(rows.input_ids, vocab.eos)], 2).reshape(len(rows.input_ids), -1)
    keep_BX = np.stack([read_BL, ends_BL], 2).reshape(len(rows.input_ids), -1)
    rest_BL = text_BL & ~read_BL
    return encoder_decoder_batch(
        _compact_rows(words_BX, keep_BX, L, vocab.pad),
        _compact_rows(np.repeat(rows.document_ids, 2, 1), keep_BX, L, -1),
        _compact_rows(rows.input_ids, rest_BL, L, IGNORE_INDEX),
        _compact_rows(rows.document_ids, rest_BL, L, -1),
        vocab.pad,
        vocab.pad,
    )


# --- BART's noise: each takes a text and gives one that is not longer ---------------------------------------------


class NoisyText(NamedTuple):
    """A text while it is being corrupted, (B, L) each."""

    input_ids: np.ndarray
    document_ids: np.ndarray
    maskable: np.ndarray


def permute_sentences(text: NoisyText, sentence_end_BL: np.ndarray, rate: float, rng: CounterRNG) -> NoisyText:
    """The sentences of a share of the documents in random order; frames stay where they are."""
    L = text.document_ids.shape[1]
    opens_BL = is_document_start(text.document_ids)
    begins_BL = text.maskable & (~shift_right(text.maskable, False) | shift_right(sentence_end_BL, False) | opens_BL)
    goes_on_BL = text.maskable & ~begins_BL
    ends_BL = text.maskable & ~np.append(goes_on_BL[:, 1:], np.zeros((len(begins_BL), 1), bool), 1)
    first_N, last_N = np.flatnonzero(begins_BL), np.flatnonzero(ends_BL)
    first_S = np.flatnonzero(opens_BL)
    chosen_S = rng.uniform_at("permuted", *np.divmod(first_S, L)) < rate
    document_N = np.searchsorted(first_S, first_N, side="right") - 1
    moves_N = chosen_S[document_N]
    first_N, length_N, document_N = first_N[moves_N], (last_N - first_N + 1)[moves_N], document_N[moves_N]
    order_N = np.lexsort((rng.uniform_at("sentences", *np.divmod(first_N, L)), document_N))  # equal ones as they stood
    tokens_BL = text.input_ids.copy()
    to, of = range_positions(first_N, length_N), range_positions(first_N[order_N], length_N[order_N])
    tokens_BL.reshape(-1)[to] = text.input_ids.reshape(-1)[of]
    return text._replace(input_ids=tokens_BL)


def range_positions(first_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    """Those of some stretches, one stretch after the other."""
    return np.repeat(first_N, length_N) + ragged_arange(length_N)


def rotate_documents(text: NoisyText, rate: float, rng: CounterRNG) -> NoisyText:
    """A share of the documents begin at a random token, and what was before it comes last."""
    place_BL = count_earlier_in_document(text.maskable, is_document_start(text.document_ids))
    length_BL = np.maximum(document_lengths(text.document_ids, text.maskable), 1)
    u_BL = broadcast_document_start(rng.uniform("rotation", text.document_ids.shape[1]), text.document_ids)
    key_BL = (place_BL - (u_BL * length_BL).astype(np.int64)) % length_BL / length_BL
    chosen_BL = broadcast_document_start(rng.uniform("rotated", text.document_ids.shape[1]), text.document_ids) < rate
    moved_BL = text.maskable & chosen_BL
    # Places that move are ordered among themselves, so that everything else stays where it is.
    order_BL = stable_argsort(key_BL, np.where(moved_BL, text.document_ids, 2**15))
    tokens_BL, count_B1 = text.input_ids.copy(), moved_BL.sum(1, keepdims=True)
    tokens_BL[moved_BL] = np.take_along_axis(text.input_ids, order_BL, 1)[
        np.arange(text.document_ids.shape[1]) < count_B1
    ]
    return text._replace(input_ids=tokens_BL)


def mask_or_delete(text: NoisyText, mask_BL: np.ndarray, delete: bool, vocab: Vocabulary) -> NoisyText:
    """Single tokens become a mask, or go without a trace."""
    assert vocab.mask is not None, "the objective asks for it before"
    if not delete:
        return text._replace(input_ids=np.where(mask_BL, vocab.mask, text.input_ids))
    return _keep_tokens(text, (text.document_ids >= 0) & ~mask_BL, vocab.pad)


def infill_spans(
    text: NoisyText, length_probs: np.ndarray, rate: float, rng: CounterRNG, vocab: Vocabulary
) -> NoisyText:
    """A share of the text goes in spans with lengths from `length_probs`; each becomes one mask, also one of no length."""
    assert vocab.mask is not None, "the objective asks for it before"
    B, L = text.document_ids.shape
    documents = DocumentUnits(text.document_ids, text.maskable)
    start_SM, length_SM = documents.sample_spans(length_probs, rate, rng)
    document_BL, place_BL = documents.document_index_BL, documents.units_before_BL
    hidden_BL = spans_to_mask(start_SM, length_SM, L + 1)[document_BL, place_BL] & text.maskable
    opens_BL = hidden_BL & ~shift_right(hidden_BL, False)
    keep_BL = (text.document_ids >= 0) & (~hidden_BL | opens_BL)
    put_SX = np.zeros((len(start_SM), L + 1), bool)
    number, span = np.nonzero(length_SM == 0)
    put_SX[number, start_SM[number, span]] = True
    after_BL = shift_right(text.maskable, False) & (text.document_ids >= 0)  # what follows the last word of a document
    put_BL = put_SX[document_BL, place_BL] & (text.maskable | after_BL)
    put_BL &= np.cumsum(put_BL, 1) <= L - keep_BL.sum(1, keepdims=True)  # never longer than before
    # Each place adds a mask where one is put before it, and itself where it is kept.
    added_BX = np.stack([put_BL, keep_BL], 2).reshape(B, -1)
    at_N = np.flatnonzero(added_BX)
    place_N, itself_N = at_N >> 1, (at_N & 1).astype(bool)
    tokens_N = np.where(itself_N & ~hidden_BL.ravel()[place_N], text.input_ids.ravel()[place_N], vocab.mask)
    filled_BL = np.arange(L) < added_BX.sum(1, keepdims=True)
    closed = NoisyText(
        np.full_like(text.input_ids, vocab.pad), np.full_like(text.document_ids, -1), np.zeros_like(text.maskable)
    )
    closed.input_ids[filled_BL] = tokens_N
    closed.document_ids[filled_BL], closed.maskable[filled_BL] = (
        text.document_ids.ravel()[place_N],
        text.maskable.ravel()[place_N],
    )
    return closed


def _keep_tokens(text: NoisyText, keep_BL: np.ndarray, pad_token_id: int) -> NoisyText:
    width = keep_BL.shape[1]
    return NoisyText(
        *(_compact_rows(x, keep_BL, width, empty) for x, empty in zip(text, (pad_token_id, -1, 0), strict=True))
    )


# --- small things -------------------------------------------------------------------------------------------------


def _compact_rows(x_BX: np.ndarray, keep_BX: np.ndarray, width: int, fill: int) -> np.ndarray:
    """What is kept of each row, without gaps, in rows of `width`."""
    count_B1 = keep_BX.sum(1, keepdims=True)
    assert count_B1.max(initial=0) <= width, "the objective sees to it that there is room"
    rows = np.full((len(x_BX), width), fill, x_BX.dtype)
    rows[np.arange(width) < count_B1] = x_BX[keep_BX]
    return rows


def _is_document_end(doc_BL: np.ndarray) -> np.ndarray:
    """The last place of each document; padding has none."""
    return is_document_start(doc_BL[:, ::-1])[:, ::-1]


def _build_position_ids(doc_BT: np.ndarray) -> np.ndarray:
    place = np.arange(doc_BT.shape[1])
    first = np.maximum.accumulate(np.where(doc_BT != shift_right(doc_BT, -2), place, 0), 1)
    return np.where(doc_BT < 0, 0, place - first)
