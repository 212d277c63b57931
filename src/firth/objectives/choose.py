"""Which tokens are noise.

B rows, L places, K slots, S documents of all rows one after the other (a ragged list), P pieces of them.
"""

from __future__ import annotations

import numpy as np

from firth.objectives.draw import Draw


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
    asked_BK = np.argpartition(key_BL, K - 1, axis=1)[:, :K]
    order = np.argsort(np.take_along_axis(key_BL, asked_BK, 1), axis=1)
    asked_BK = np.take_along_axis(asked_BK, order, 1)
    real_B = real_BL.sum(1)
    wanted_B = np.where(real_B > 0, np.maximum(1, (rate * real_B + 0.5).astype(int)), 0)
    used_BK = np.arange(K) < wanted_B[:, None]
    asked_BK = np.sort(np.where(used_BK, asked_BK, L), axis=1)  # unused slots last
    used_BK = asked_BK < L
    return np.where(used_BK, asked_BK, 0), used_BK


def spans(doc_BL: np.ndarray, real_BL: np.ndarray, noise_B: np.ndarray, spans_B: np.ndarray, draw: Draw) -> np.ndarray:
    """Noise as T5 makes it: `noise_B` tokens of a row in `spans_B` spans, none across a document's edge.

    Inside a document text and noise take turns, text first; both are cut into their pieces uniformly at random
    (Raffel et al. 2020, section 3.1.4, and its published code). Returns a mask (B, L).
    """
    B, L = doc_BL.shape
    docs_B = doc_BL.max(1) + 1
    row_S = np.repeat(np.arange(B), docs_B)
    first_B = np.cumsum(docs_B) - docs_B
    doc_of_token = (doc_BL + first_B[:, None])[real_BL]
    length_S = np.bincount(doc_of_token, minlength=len(row_S))
    start_S = _before(length_S, row_S)

    u_B2 = draw.uniform("share", 2)
    spans_S = _share(np.minimum(spans_B, _per_row(length_S // 2, row_S, B)), length_S // 2, row_S, u_B2[:, 0])
    extra_B = np.maximum(noise_B - _per_row(spans_S, row_S, B), 0)
    noise_S = spans_S + _share(extra_B, spans_S, row_S, u_B2[:, 1])
    noise_S = _fit(noise_S, length_S - spans_S, spans_S > 0, row_S)

    parts_S = np.maximum(spans_S, 1)
    text_P = _compose(length_S - noise_S, parts_S, row_S, start_S, draw.uniform("text", L))
    noise_P = _compose(noise_S, parts_S, row_S, start_S, draw.uniform("noise", L))
    turns = np.stack([text_P, noise_P], 1).ravel()
    mask_BL = np.zeros((B, L), bool)
    mask_BL[real_BL] = np.repeat(np.arange(len(turns)) % 2 == 1, turns)
    return mask_BL


def _per_row(x_S: np.ndarray, row_S: np.ndarray, B: int) -> np.ndarray:
    return np.bincount(row_S, weights=x_S, minlength=B).astype(np.int64)


def _before(x_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
    """The sum of what stands before each document in its row."""
    total_S = np.cumsum(x_S) - x_S
    first_S = np.searchsorted(row_S, row_S)
    return total_S - total_S[first_S]


def _share(amount_B: np.ndarray, size_S: np.ndarray, row_S: np.ndarray, u_B: np.ndarray) -> np.ndarray:
    """Deal a row's amount out to its documents by size: whole numbers, the exact total, fair on average."""
    size_B = np.maximum(_per_row(size_S, row_S, len(amount_B)), 1)
    before_S = _before(size_S, row_S)
    scale_S, u_S = (amount_B / size_B)[row_S], u_B.astype(np.float64)[row_S]
    upto = np.floor(u_S + scale_S * (before_S + size_S) + 1e-9) - np.floor(u_S + scale_S * before_S + 1e-9)
    return upto.astype(np.int64)


def _fit(x_S: np.ndarray, most_S: np.ndarray, open_S: np.ndarray, row_S: np.ndarray) -> np.ndarray:
    """Hand what does not fit in one document to the others of its row that have room, from the left."""
    over_S = np.maximum(x_S - most_S, 0)
    if not over_S.any():
        return x_S
    x_S = x_S - over_S
    room_S = np.where(open_S, most_S - x_S, 0)
    over_B = _per_row(over_S, row_S, int(row_S[-1]) + 1)
    return x_S + np.clip(over_B[row_S] - _before(room_S, row_S), 0, room_S)


def _compose(
    total_S: np.ndarray, parts_S: np.ndarray, row_S: np.ndarray, start_S: np.ndarray, key_BL: np.ndarray
) -> np.ndarray:
    """Cut each total into its number of parts, none empty (unless the total is 0), all ways equally likely."""
    doc = np.repeat(np.arange(len(total_S)), total_S)  # one entry per unit
    begin_S = np.cumsum(total_S) - total_S
    unit = np.arange(len(doc)) - begin_S[doc]
    key = np.where(unit == 0, np.float32(-1), key_BL[row_S[doc], start_S[doc] + unit])
    order = np.lexsort((key, doc))  # the units of a document by key; the first unit always opens a part
    opens = np.zeros(len(doc), np.int64)
    opens[order] = np.arange(len(doc)) - begin_S[doc] < parts_S[doc]
    part = np.cumsum(opens) - 1
    # a document with total 0 has one empty part that no unit belongs to: shift what follows
    empty_S = np.cumsum(total_S == 0)
    return np.bincount(part + empty_S[doc], minlength=int(parts_S.sum()))
