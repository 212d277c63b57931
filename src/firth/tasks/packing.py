"""Several texts in a row: little padding, and few shapes.

N texts, B rows, T places of a row, K answers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from firth.tokens.rows import best_fit, ragged_arange

NARROWEST = 16  # a single row is as narrow as its texts allow, but not narrower than this


class Packing(NamedTuple):
    """Which row each text is in, as which document of the row, and from which place on."""

    num_rows: int
    width: int
    size: np.ndarray  # (N,)
    row: np.ndarray  # (N,)
    doc: np.ndarray  # (N,)
    first: np.ndarray  # (N,)

    @property
    def padding(self) -> float:
        """The share of places that hold no text."""
        return 1 - int(self.size.sum()) / (self.num_rows * self.width)

    @property
    def flat(self) -> np.ndarray:
        """The place of every token, one text after the other, in the rows laid end to end."""
        return np.repeat(self.row * self.width + self.first, self.size) + ragged_arange(self.size)

    def lay(self, values: Sequence[Any] | np.ndarray, empty: float, dtype: Any = np.int64) -> np.ndarray:
        """(B, T, ...): a value for each token, texts one after the other, put where it belongs; the rest is `empty`."""
        array = np.asarray(values, dtype)
        out = np.full((self.num_rows * self.width, *array.shape[1:]), empty, dtype)
        out[self.flat] = array
        return out.reshape(self.num_rows, self.width, *array.shape[1:])

    def documents(self) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) which document a place is in, -1 for padding, and (B, T) where in it."""
        return self.lay(np.repeat(self.doc, self.size), -1), self.lay(ragged_arange(self.size), 0)

    def slots(self, count_N: np.ndarray, each: int = 1) -> tuple[int, np.ndarray]:
        """How many slots every row has, and which ones, end to end, belong to the texts with so many answers each.

        `each` slots are one answer. The slots of a row are in the order of its documents.
        """
        order = np.lexsort((self.doc, self.row))
        before = np.cumsum(count_N[order]) - count_N[order]
        used_B = np.bincount(self.row, weights=count_N, minlength=self.num_rows).astype(np.int64)
        first_N = np.empty_like(before)
        first_N[order] = before - (np.cumsum(used_B) - used_B)[self.row[order]]
        width = each * power_of_two(-(-int(used_B.max()) // each))
        return width, np.repeat(self.row * width + first_N, count_N) + ragged_arange(count_N)


def pack(sizes: Sequence[int] | np.ndarray, length: int, together: int = 1) -> Packing:
    """Texts into rows of `length`, the longest first, each into the row where it leaves the least room.

    With `together`, so many texts in a row are one thing and stay side by side; rows are so many times longer then.
    The same sizes always give the same rows.
    """
    size_N = np.asarray(sizes, np.int64)
    thing_M, length = size_N.reshape(-1, together).sum(1), length * together
    assert 0 < thing_M.max(initial=0) <= length, "texts are cut before they are packed"
    order = np.argsort(-thing_M, kind="stable")
    row_M = np.empty_like(thing_M)
    row_M[order], used = best_fit(thing_M[order], length, None)
    row_N = np.repeat(row_M, together)
    by_row = np.argsort(row_N, kind="stable")
    texts_B = np.bincount(row_N, minlength=used)
    doc_N, first_N = np.empty_like(size_N), np.empty_like(size_N)
    doc_N[by_row] = ragged_arange(texts_B)
    end = np.cumsum(size_N[by_row])
    begun_B = np.concatenate([[0], end[np.cumsum(texts_B) - 1][:-1]])
    first_N[by_row] = end - size_N[by_row] - np.repeat(begun_B, texts_B)
    width = length if used > 1 else min(length, max(NARROWEST, power_of_two(int(size_N.sum()))))
    return Packing(few(used), width, size_N, row_N, doc_N, first_N)


def few(rows: int) -> int:
    """The next number of rows that is allowed: 1 to 16, then by twos to 32, by fours to 64 ...

    >>> [few(n) for n in (3, 16, 17, 31, 33, 100)]
    [3, 16, 18, 32, 36, 104]
    """
    step = max(1, power_of_two(rows) // 16)
    return -(-rows // step) * step


def power_of_two(n: int) -> int:
    """The next one.

    >>> [power_of_two(n) for n in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(n - 1, 0).bit_length()
