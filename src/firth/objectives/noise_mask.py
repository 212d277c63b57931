"""Noise masks: which tokens of the text are predicted, as a boolean array (B, L).

    TokenMasking, WholeWordMasking, SalientSpanMasking   exactly `rate` of each row; random keys are sorted
    SpanMasking, NgramMasking, BART's spans              `rate` on average; span lengths follow their distribution
    sample_windowed_spans                                XLNet: one span in each window of the row
    t5_noise_mask                                        T5: exact numbers of noise tokens and spans in each row

Special tokens and padding are never noise (`Rows.maskable`), and no span crosses a document boundary.

Shapes: B rows, L positions, W units (words or tokens) of a document, M spans, K target slots, S documents of all rows
(a flat list), N tokens of all documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, log

import numpy as np

from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.objectives.counter_rng import CounterRNG
from firth.tokens import Rows
from firth.tokens.packing import ragged_arange


def num_target_slots(rate: float, length: int) -> int:
    """Number of noise tokens in a text of `length`: rounded, at least 1."""
    return max(1, int(rate * length + 0.5))


def num_noise_tokens(rate: float, maskable_BL: np.ndarray) -> np.ndarray:
    """Number of noise tokens of each row (B,): rounded, at least 1 where there is text."""
    length_B = maskable_BL.sum(1)
    return np.where(length_B > 0, np.maximum(1, (rate * length_B + 0.5).astype(np.int64)), 0)


# --- single tokens, whole words, salient spans --------------------------------------------------------------------


@dataclass(frozen=True)
class TokenMasking:
    """Mask single tokens, exactly `rate` of each row (BERT, section 3.1)."""

    token_flags = ()
    noise_per_span = False

    def num_slots(self, rate: float, length: int) -> int:
        return num_target_slots(rate, length)

    def __call__(self, rows: Rows, rate: float, rng: CounterRNG) -> np.ndarray:
        return mask_lowest_keys(rng.uniform("tokens", rows.maskable.shape[1]), rows.maskable, rate)


@dataclass(frozen=True)
class WholeWordMasking:
    """Mask whole words in random order until `rate` is reached; a word that no longer fits is skipped (BERT's code)."""

    token_flags = ("word_start",)
    noise_per_span = False

    def num_slots(self, rate: float, length: int) -> int:
        return num_target_slots(rate, length)

    def __call__(self, rows: Rows, rate: float, rng: CounterRNG) -> np.ndarray:
        assert rows.word_start is not None
        key_BL = rng.uniform("words", rows.maskable.shape[1])
        return _mask_whole_units(rows.word_start, rows.maskable, key_BL, num_noise_tokens(rate, rows.maskable))


@dataclass(frozen=True)
class SalientSpanMasking:
    """Mask names, numbers and dates first, each as a whole; then other words (REALM, Guu et al. 2020, section 3.4).

    `firth prepare --salient` marks salient spans, with a built-in function or the user's own.
    """

    token_flags = ("word_start", "salient")
    noise_per_span = True

    def num_slots(self, rate: float, length: int) -> int:
        return num_target_slots(rate, length)

    def __call__(self, rows: Rows, rate: float, rng: CounterRNG) -> np.ndarray:
        assert rows.word_start is not None
        assert rows.salient is not None
        salient_BL, first_BL = rows.salient, is_document_start(rows.document_ids)
        changes_BL = first_BL | (salient_BL != shift_right(salient_BL, False))
        start_BL = rows.maskable & (changes_BL | (rows.word_start & ~salient_BL))
        key_BL = rng.uniform("words", start_BL.shape[1]) + ~salient_BL
        return _mask_whole_units(start_BL, rows.maskable, key_BL, num_noise_tokens(rate, rows.maskable))


def mask_lowest_keys(key_BL: np.ndarray, maskable_BL: np.ndarray, rate: float) -> np.ndarray:
    """Return a mask of the positions with the lowest keys, `rate` of each row; ties go to the lower position."""
    B, L = key_BL.shape
    count_B = num_noise_tokens(rate, maskable_BL)
    max_count = int(count_B.max(initial=0))
    order_BK = stable_argsort(np.where(maskable_BL, key_BL, np.float32(2)))[:, :max_count]
    flat = (order_BK + L * np.arange(B)[:, None])[np.arange(max_count) < count_B[:, None]]
    mask_BL = np.zeros((B, L), bool)
    mask_BL.reshape(-1)[flat] = True
    return mask_BL


def _mask_whole_units(
    start_BL: np.ndarray, maskable_BL: np.ndarray, key_BL: np.ndarray, count_B: np.ndarray
) -> np.ndarray:
    """Return a mask of whole units in the order of their keys, as many as fit into `count_B` tokens of each row.

    A unit reaches from its start to the next start, or to the end of the text. Each pass over all rows at once takes
    the longest prefix of the remaining units that fit; a row is done when its count is reached or no unit fits.
    """
    B, L = start_BL.shape
    position = np.arange(L)
    order_BL = stable_argsort(np.where(start_BL, key_BL, np.float32(3)))
    edge_BL = np.where(start_BL | ~maskable_BL, position, L)
    next_BL = np.minimum.accumulate(np.append(edge_BL[:, 1:], np.full((B, 1), L), 1)[:, ::-1], 1)[:, ::-1]
    size_BL = np.take_along_axis(np.where(start_BL, next_BL - position, L + 1), order_BL, 1)

    taken_BL, left_B, rows = np.zeros((B, L), bool), count_B.copy(), np.arange(B)
    while len(rows):
        size, left = size_BL[rows], left_B[rows, None]
        fits = ~taken_BL[rows] & (size <= left)
        fits &= np.cumsum(np.where(fits, size, 0), 1) <= left
        taken_BL[rows] |= fits
        left_B[rows] -= (size * fits).sum(1)
        rows = rows[fits.any(1) & (left_B[rows] > 0)]
    chosen_BL = np.zeros((B, L), bool)
    np.put_along_axis(chosen_BL, order_BL, taken_BL, 1)
    unit_BL = np.maximum.accumulate(np.where(start_BL, position, 0), 1)
    return np.take_along_axis(chosen_BL, unit_BL, 1) & maskable_BL


# --- spans of random length ---------------------------------------------------------------------------------------


class WordSpanMasking:
    """Mask spans of whole words whose lengths follow `length_probs`; the base of SpanBERT's and ALBERT's schemes.

    `rate` holds on average, not in every row; a span that is cut to meet it would change the distribution of lengths.
    No span crosses the boundary of a document or of the two texts of a pair.
    """

    max_span_length: int
    token_flags = ("word_start",)

    @property
    def length_probs(self) -> np.ndarray:
        """Probability of each span length from 0 to `max_span_length` words; 0 for length 0."""
        raise NotImplementedError

    @property
    def mean_length(self) -> float:
        return float(self.length_probs @ np.arange(self.max_span_length + 1))

    def num_slots(self, rate: float, length: int) -> int:
        """Number of target slots, with a margin for rows above the mean; `truncate_to_whole_spans` cuts the rest."""
        return min(length, num_target_slots(1.25 * rate, length) + self.max_span_length)

    def __call__(self, rows: Rows, rate: float, rng: CounterRNG) -> np.ndarray:
        assert rows.word_start is not None
        text_BL = rows.document_ids
        if rows.token_type_ids is not None:  # a pair is one document of two texts
            text_BL = text_BL + rows.token_type_ids
        documents = DocumentUnits(text_BL, rows.word_start)
        start_SM, length_SM = documents.sample_spans(self.length_probs, rate, rng)
        inside_SW = spans_to_mask(start_SM, length_SM, rows.maskable.shape[1])
        word_BL = np.maximum(documents.units_before_BL + rows.word_start - 1, 0)
        mask_BL = inside_SW[documents.document_index_BL, word_BL] & rows.maskable
        return truncate_to_whole_spans(mask_BL, self.num_slots(rate, rows.maskable.shape[1]))


@dataclass(frozen=True)
class SpanMasking(WordSpanMasking):
    """Mask spans of whole words; lengths are geometric with parameter `p` up to `max_span_length` (SpanBERT, 3.1)."""

    p: float = 0.2
    max_span_length: int = 10
    noise_per_span = True

    def __post_init__(self) -> None:
        if not (0 < self.p < 1 and self.max_span_length >= 1):
            raise UserError(
                "objective.masking.p must lie between 0 and 1, and objective.masking.max_span_length be at least 1."
            )

    @property
    def length_probs(self) -> np.ndarray:
        probs = np.append(0, self.p * (1 - self.p) ** np.arange(self.max_span_length))
        return probs / probs.sum()


@dataclass(frozen=True)
class NgramMasking(WordSpanMasking):
    """Mask n-grams of whole words, n at most `max_span_length`, with p(n) = (1/n) / sum_k (1/k) (ALBERT, section 4.1).

    Each token draws its own 80/10/10, as in ALBERT's code. Of 11 n-grams 6 are single words, 3 pairs and 2 triples.
    """

    max_span_length: int = 3
    noise_per_span = False

    def __post_init__(self) -> None:
        if self.max_span_length < 1:
            raise UserError(f"objective.masking.max_span_length is {self.max_span_length}, and must be at least 1.")

    @property
    def length_probs(self) -> np.ndarray:
        probs = np.append(0, 1 / np.arange(1, self.max_span_length + 1))
        return probs / probs.sum()


def poisson_length_probs(mean_length: float) -> np.ndarray:
    """Probability of each length of Poisson(mean_length) from 0 up to 10 standard deviations above the mean."""
    lengths = range(int(mean_length + 10 * mean_length**0.5) + 10)
    probs = np.array([exp(k * log(mean_length) - mean_length - lgamma(k + 1)) for k in lengths])
    return probs / probs.sum()


class DocumentUnits:
    """The documents of all rows as a flat list, and the number of units (words or tokens) before each position.

    `unit_start_BL` marks the first token of each unit.
    """

    def __init__(self, doc_BL: np.ndarray, unit_start_BL: np.ndarray) -> None:
        docs_B = doc_BL.max(1, initial=-1) + 1
        self.row_S, self.doc_S = np.repeat(np.arange(len(docs_B)), docs_B), ragged_arange(docs_B)
        number_BL = doc_BL + (np.cumsum(docs_B) - docs_B)[:, None]
        self.num_units_S = np.bincount(number_BL[unit_start_BL], minlength=len(self.row_S))
        self.document_index_BL = np.where(doc_BL >= 0, number_BL, 0)
        self.units_before_BL = count_earlier_in_document(unit_start_BL, is_document_start(doc_BL))

    def sample_spans(self, length_probs: np.ndarray, rate: float, rng: CounterRNG) -> tuple[np.ndarray, np.ndarray]:
        """Return starts and lengths (S, M) of spans that cover `rate` of each document on average."""
        document_rng = CounterRNG(rng.seed, hash_uint64(rng.index[self.row_S], self.doc_S))
        length_SM, start_SM = sample_span_starts_and_lengths(
            length_probs, rate * self.num_units_S, self.num_units_S, document_rng
        )
        return start_SM, length_SM


def sample_span_starts_and_lengths(
    length_probs: np.ndarray, expected_units_B: np.ndarray, num_units_B: np.ndarray, rng: CounterRNG
) -> tuple[np.ndarray, np.ndarray]:
    """Sample spans that cover `expected_units_B` of `num_units_B` units on average, with lengths from `length_probs`.

    Returns lengths and starts (B, M), starts ascending, at least one unit between two spans; length -1: no span.
    Columns that a row does not need change nothing in it, so a row does not depend on the other rows of its batch.

    Drawing lengths until their sum reaches the expected number prefers long spans; cutting the last one prefers short
    ones. A stationary renewal process has neither bias. Lengths are laid end to end from a little before 0; the first
    has the length-biased distribution of an interval that covers a given point. A span is taken where a uniform point
    of it lies between 0 and `expected_units_B`. Then every length is taken as often as `length_probs` says, and the
    expected sum is exact. Last, the taken spans are spread over the row with uniform gaps.
    """
    mean = float(length_probs @ np.arange(len(length_probs)))
    M = int(2 * expected_units_B.max(initial=0) / mean) + 12
    u_BM, v_BM = rng.uniform("span lengths", M), rng.uniform("span ends", M).astype(np.float64)
    length_BM = np.searchsorted(np.cumsum(length_probs)[:-1], u_BM, side="right")
    biased = length_probs * np.arange(len(length_probs)) / mean
    length_BM[:, 0] = np.searchsorted(np.cumsum(biased)[:-1], u_BM[:, 0], side="right")
    start_BM = np.cumsum(length_BM, 1) - length_BM - rng.uniform("span phase", 1) * length_BM[:, :1]
    point_BM = start_BM + v_BM * length_BM
    taken_BM = (point_BM >= 0) & (point_BM < expected_units_B[:, None])

    size_BM = np.where(taken_BM, length_BM + 1, 0)  # with the unit of text after it
    taken_BM &= np.cumsum(size_BM, 1) <= num_units_B[:, None] + 1  # spans that do not fit into a short row
    size_BM *= taken_BM
    free_B = num_units_B + 1 - size_BM.sum(1)
    gap_BM = np.floor(rng.uniform("span places", M) * (free_B[:, None] + 1))
    unused_BM = np.where(np.arange(M) == 0, -1, 2**31)  # not taken: column 0 sorts to the front, the others to the back
    gap_BM = np.sort(np.where(taken_BM, gap_BM, unused_BM), 1).astype(np.int64)
    return np.where(taken_BM, length_BM, -1), gap_BM + np.cumsum(size_BM, 1) - size_BM


def spans_to_mask(start_BM: np.ndarray, length_BM: np.ndarray, num_units: int) -> np.ndarray:
    """Return which of `num_units` units lie in a span (B, num_units)."""
    B = len(start_BM)
    used = length_BM > 0
    first = np.broadcast_to(np.arange(B)[:, None] * (num_units + 1), start_BM.shape)[used]
    change = np.zeros(B * (num_units + 1), np.int8)
    change[first + start_BM[used]] += 1  # no two spans begin or end at the same unit
    change[first + np.minimum(start_BM + length_BM, num_units)[used]] -= 1
    return np.cumsum(change.reshape(B, -1), 1, dtype=np.int8)[:, :num_units] > 0


def truncate_to_whole_spans(mask_BL: np.ndarray, max_tokens: int) -> np.ndarray:
    """Remove the last spans of rows with more than `max_tokens` masked tokens; a span is kept or removed as a whole."""
    over = np.flatnonzero(mask_BL.sum(1) > max_tokens)
    if len(over):
        mask = mask_BL[over]
        run = np.cumsum(mask & ~shift_right(mask, False), 1)
        fits = np.cumsum(mask, 1) <= max_tokens
        broken = np.where(mask & ~fits, run, mask.shape[1]).min(1)  # the first span that does not fit
        mask_BL = mask_BL.copy()
        mask_BL[over] = mask & (run < broken[:, None])
    return mask_BL


def sample_windowed_spans(maskable_BL: np.ndarray, rate: float, max_span_length: int, rng: CounterRNG) -> np.ndarray:
    """Return a mask with one span of n = 1..`max_span_length` tokens in each window of n / rate tokens (XLNet, 3.1).

    Lengths are uniform, as in `transformers`; the paper names no distribution, and the published program favours short
    spans, p(n) ~ 1 / n. Windows lie end to end over the text of a row; the row's end may cut the last span.
    """
    L = maskable_BL.shape[1]
    M = L // int(1 / rate) + 2
    length_BM = 1 + rng.integers("span lengths", M, max_span_length)
    end_BM = np.floor(np.cumsum(length_BM, 1) / rate + 1e-6).astype(np.int64)
    first_BM = shift_right(end_BM, 0)
    shift_BM = (rng.uniform("span places", M) * (end_BM - first_BM - length_BM + 1)).astype(np.int64)
    start_BM = first_BM + shift_BM
    length_BM = np.where(start_BM < L, length_BM, 0)
    inside_BL = spans_to_mask(start_BM, length_BM, L)
    mask_BL = np.take_along_axis(inside_BL, np.maximum(np.cumsum(maskable_BL, 1) - 1, 0), 1) & maskable_BL
    return truncate_to_whole_spans(mask_BL, num_window_slots(rate, max_span_length, L))


def num_window_slots(rate: float, max_span_length: int, length: int) -> int:
    """Number of target slots: the rate and one more span, rounded up to a multiple of 8 for matmuls on a GPU."""
    return min(length, -(-(int(rate * length) + max_span_length) // 8) * 8)


# --- helpers that masks and corruption share -----------------------------------------------------------------------


def stable_argsort(key_BL: np.ndarray, group_BL: np.ndarray | int = 0) -> np.ndarray:
    """Return the positions of each row sorted by group, then by key (0 to 3), then by position.

    It equals a stable argsort and is ten times faster: group, key and position are packed into one uint64 each, and the
    sort needs no indirection.
    """
    L = key_BL.shape[1]
    assert L <= 2**16, "positions have 16 bits"
    bits_BL = key_BL.astype(np.float32).view(np.uint32).astype(np.uint64)  # non-negative floats sort like their bits
    packed_BL = (
        np.asarray(group_BL, np.uint64) << np.uint64(48) | bits_BL << np.uint64(16) | np.arange(L, dtype=np.uint64)
    )
    packed_BL.sort(axis=1)
    return (packed_BL & np.uint64(2**16 - 1)).astype(np.int64)


def shift_right(x_BL: np.ndarray, fill: int | bool) -> np.ndarray:
    """Return for each position the value at the previous one; `fill` at the start of a row."""
    return np.concatenate([np.full_like(x_BL[:, :1], fill), x_BL[:, :-1]], 1)


def is_document_start(doc_BL: np.ndarray) -> np.ndarray:
    """Return the first position of each document (B, L); padding has none."""
    return (doc_BL >= 0) & (doc_BL != shift_right(doc_BL, -1))


def count_earlier_in_document(event_BL: np.ndarray, first_BL: np.ndarray) -> np.ndarray:
    """Return for each position the number of events before it in its document (B, L)."""
    before = np.cumsum(event_BL, 1) - event_BL
    return before - np.maximum.accumulate(np.where(first_BL, before, 0), 1)


# --- T5's spans ---------------------------------------------------------------------------------------------------


def t5_noise_mask(
    doc_BL: np.ndarray, maskable_BL: np.ndarray, num_noise_B: np.ndarray, num_spans_B: np.ndarray, rng: CounterRNG
) -> np.ndarray:
    """Return T5's noise mask (B, L): `num_noise_B` tokens of each row in `num_spans_B` spans.

    In a document, text and noise alternate, text first. Both are split into the same number of parts, uniformly over
    all splits into non-empty parts (Raffel et al. 2020, section 3.1.4; `random_spans_noise_mask` in its code). T5's
    code masks one document at a time; here a row holds several, so its noise and spans are first apportioned to them by
    length. A short document gets as much as it can hold: each span needs a noise token and a text token before it.
    """
    B, L = doc_BL.shape
    docs_B = doc_BL.max(1) + 1
    row_S = np.repeat(np.arange(B), docs_B)
    first_B = np.cumsum(docs_B) - docs_B
    length_S = np.bincount((doc_BL + first_B[:, None])[maskable_BL], minlength=len(row_S))

    u_B3 = rng.uniform("share", 3)
    max_spans_S = length_S // 2
    spans_S = _apportion(np.minimum(num_spans_B, _sum_per_row(max_spans_S, row_S, B)), max_spans_S, row_S, u_B3[:, 0])
    capacity_B = _sum_per_row(np.where(spans_S > 0, length_S - spans_S, 0), row_S, B)
    spans_S = np.where(
        (capacity_B < num_noise_B)[row_S], _one_span_per_longest_document(num_spans_B, length_S, row_S), spans_S
    )

    extra_B = np.maximum(num_noise_B - _sum_per_row(spans_S, row_S, B), 0)
    noise_S = spans_S + _apportion(extra_B, spans_S, row_S, u_B3[:, 1])
    noise_S = np.minimum(noise_S, length_S - spans_S)
    free_S = np.where(spans_S > 0, length_S - spans_S - noise_S, 0)
    left_B = np.minimum(num_noise_B - _sum_per_row(noise_S, row_S, B), _sum_per_row(free_S, row_S, B))
    noise_S = noise_S + _apportion(np.maximum(left_B, 0), free_S, row_S, u_B3[:, 2])

    lengths = _alternating_lengths(
        length_S - noise_S, noise_S, np.maximum(spans_S, 1), rng.uniform("spans", L)[maskable_BL]
    )
    mask_BL = np.zeros((B, L), bool)
    mask_BL[maskable_BL] = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return mask_BL


def _sum_per_row(x_S: np.ndarray, row_S: np.ndarray, B: int) -> np.ndarray:
    return np.bincount(row_S, weights=x_S, minlength=B).astype(np.int64)


def _apportion(amount_B: np.ndarray, size_S: np.ndarray, row_S: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Split a row's amount among its documents by size (S,): integers, exact total, proportional on average."""
    size_B = _sum_per_row(size_S, row_S, len(amount_B))
    before_S = np.cumsum(size_S) - size_S - (np.cumsum(size_B) - size_B)[row_S]
    scale_S, u_S = (amount_B / np.maximum(size_B, 1))[row_S], u_B.astype(np.float64)[row_S]
    upto = np.floor(u_S + scale_S * (before_S + size_S) + 1e-9) - np.floor(u_S + scale_S * before_S + 1e-9)
    return upto.astype(np.int64)


def _one_span_per_longest_document(num_spans_B: np.ndarray, length_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
    """Return one span for each of the longest documents of a row (S,), which leaves the most tokens for noise."""
    order = np.lexsort((-length_S, row_S))
    rank_S = np.empty_like(order)
    rank_S[order] = np.arange(len(order)) - np.searchsorted(row_S, row_S)
    return ((rank_S < num_spans_B[row_S]) & (length_S > 1)).astype(np.int64)


def _alternating_lengths(
    num_text_S: np.ndarray, num_noise_S: np.ndarray, num_parts_S: np.ndarray, key_N: np.ndarray
) -> np.ndarray:
    """Return the lengths of text, noise, text, noise ... through all documents, N tokens in total.

    The text of a document and its noise are each split into `num_parts_S` non-empty parts, all splits equally likely:
    the first token of each opens a part, and so do the tokens with the lowest keys. A document without noise has one
    part.
    """
    total_G = np.stack([num_text_S, num_noise_S], 1).ravel()  # G groups to split: text and noise of each document
    parts_G = np.where(total_G > 0, np.repeat(num_parts_S, 2), 0)
    group_N = np.repeat(np.arange(len(total_G)), total_G)
    unit_N = ragged_arange(total_G)
    order = np.argsort(group_N + np.where(unit_N == 0, 0, key_N), kind="stable")
    opens_N = np.zeros(len(order), np.int64)
    opens_N[order] = unit_N < parts_G[group_N]
    first_G = 2 * np.repeat(np.cumsum(num_parts_S) - num_parts_S, 2) + np.arange(len(total_G)) % 2
    part_N = np.cumsum(opens_N) - 1 - (np.cumsum(parts_G) - parts_G)[group_N]
    return np.bincount(first_G[group_N] + 2 * part_N, minlength=2 * int(num_parts_S.sum()))
