"""Which tokens are noise.

B rows, L places, K slots, S documents of all rows one after the other (a ragged list), N tokens of them.
"""

from __future__ import annotations

import numpy as np

from firth.objectives.draw import Draw
from firth.tokens.rows import ragged_arange


def slots(rate: float, length: int) -> int:
    """How many tokens of `length` are chosen at a rate: rounded, and at least one."""
    return max(1, int(rate * length + 0.5))


def tokens(real_BL: np.ndarray, rate: float, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Single tokens, exactly `rate` of the real ones of each row.

    Returns places (B, K) in rising order and which slots are used; K is the same for every batch of this width.
    """
    L = real_BL.shape[1]
    K = slots(rate, L)
    key_BL = np.where(real_BL, draw.uniform("tokens", L), np.float32(2))
    asked_BK = np.argsort(key_BL, axis=1, kind="stable")[:, :K]  # equal keys by place, on every machine
    real_B = real_BL.sum(1)
    wanted_B = np.where(real_B > 0, np.maximum(1, (rate * real_B + 0.5).astype(int)), 0)
    used_BK = np.arange(K) < wanted_B[:, None]
    asked_BK = np.sort(np.where(used_BK, asked_BK, L), axis=1)  # unused slots last
    used_BK = asked_BK < L
    return np.where(used_BK, asked_BK, 0), used_BK


def spans(doc_BL: np.ndarray, real_BL: np.ndarray, noise_B: np.ndarray, spans_B: np.ndarray, draw: Draw) -> np.ndarray:
    """Noise as T5 makes it: `noise_B` tokens of a row in `spans_B` spans, none across a document's edge.

    Inside a document text and noise take turns, text first; both are cut into their pieces uniformly at random
    (Raffel et al. 2020, section 3.1.4, and its published code). Documents that are too short for so much get as much
    as they can hold: each span needs a token of its own and one of text before it. Returns a mask (B, L).
    """
    B, L = doc_BL.shape
    docs_B = doc_BL.max(1) + 1
    row_S = np.repeat(np.arange(B), docs_B)
    first_B = np.cumsum(docs_B) - docs_B
    length_S = np.bincount((doc_BL + first_B[:, None])[real_BL], minlength=len(row_S))

    u_B3 = draw.uniform("share", 3)
    most_S = length_S // 2
    spans_S = _share(np.minimum(spans_B, _per_row(most_S, row_S, B)), most_S, row_S, u_B3[:, 0])
    room_B = _per_row(np.where(spans_S > 0, length_S - spans_S, 0), row_S, B)
    spans_S = np.where((room_B < noise_B)[row_S], _in_the_longest(spans_B, length_S, row_S), spans_S)

    extra_B = np.maximum(noise_B - _per_row(spans_S, row_S, B), 0)
    noise_S = spans_S + _share(extra_B, spans_S, row_S, u_B3[:, 1])
    noise_S = np.minimum(noise_S, length_S - spans_S)
    room_S = np.where(spans_S > 0, length_S - spans_S - noise_S, 0)
    left_B = np.minimum(noise_B - _per_row(noise_S, row_S, B), _per_row(room_S, row_S, B))
    noise_S = noise_S + _share(np.maximum(left_B, 0), room_S, row_S, u_B3[:, 2])

    turns = _turns(length_S - noise_S, noise_S, np.maximum(spans_S, 1), draw.uniform("spans", L)[real_BL])
    mask_BL = np.zeros((B, L), bool)
    mask_BL[real_BL] = np.repeat(np.arange(len(turns)) % 2 == 1, turns)
    return mask_BL


def _per_row(x_S: np.ndarray, row_S: np.ndarray, B: int) -> np.ndarray:
    return np.bincount(row_S, weights=x_S, minlength=B).astype(np.int64)


def _share(amount_B: np.ndarray, size_S: np.ndarray, row_S: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Deal a row's amount out to its documents by size: whole numbers, the exact total, fair on average."""
    size_B = _per_row(size_S, row_S, len(amount_B))
    before_S = np.cumsum(size_S) - size_S - (np.cumsum(size_B) - size_B)[row_S]
    scale_S, u_S = (amount_B / np.maximum(size_B, 1))[row_S], u_B.astype(np.float64)[row_S]
    upto = np.floor(u_S + scale_S * (before_S + size_S) + 1e-9) - np.floor(u_S + scale_S * before_S + 1e-9)
    return upto.astype(np.int64)


def _in_the_longest(spans_B: np.ndarray, length_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
    """One span in each of the longest documents of a row: so placed, they have room for the most noise."""
    order = np.lexsort((-length_S, row_S))
    place_S = np.empty_like(order)
    place_S[order] = np.arange(len(order)) - np.searchsorted(row_S, row_S)
    return ((place_S < spans_B[row_S]) & (length_S > 1)).astype(np.int64)


def _turns(text_S: np.ndarray, noise_S: np.ndarray, parts_S: np.ndarray, key_N: np.ndarray) -> np.ndarray:
    """How long the pieces are: text, noise, text, noise ... through all documents, N tokens in all.

    The text of a document and its noise are each cut into its number of parts, none empty (unless there is no noise),
    all ways equally likely: the first token of each opens a part, and so do the others with the lowest keys.
    """
    total_G = np.stack([text_S, noise_S], 1).ravel()  # the groups of tokens to cut: text and noise of each document
    parts_G = np.where(total_G > 0, np.repeat(parts_S, 2), 0)
    group_N = np.repeat(np.arange(len(total_G)), total_G)
    unit_N = ragged_arange(total_G)
    order = np.argsort(group_N + np.where(unit_N == 0, 0, key_N), kind="stable")  # equal keys by place
    opens_N = np.zeros(len(order), np.int64)
    opens_N[order] = unit_N < parts_G[group_N]
    turn_G = 2 * np.repeat(np.cumsum(parts_S) - parts_S, 2) + np.arange(len(total_G)) % 2  # a group's first turn
    part_N = np.cumsum(opens_N) - 1 - (np.cumsum(parts_G) - parts_G)[group_N]
    return np.bincount(turn_G[group_N] + 2 * part_N, minlength=2 * int(parts_S.sum()))
