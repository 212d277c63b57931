"""Several texts in a row: little padding, and few shapes.

N texts, B rows, T places of a row, K answers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from firth.tokens.packing import best_fit_decreasing, ragged_arange

MIN_ROW_TOKENS = 16  # a single row is as narrow as its texts allow, but not narrower than this


class TextPacking(NamedTuple):
    """Which row each text is in, as which document of the row, and from which place on."""

    num_rows: int
    width: int
    lengths: np.ndarray  # (N,)
    row_index: np.ndarray  # (N,)
    document_index: np.ndarray  # (N,)
    start: np.ndarray  # (N,)

    @property
    def padding_share(self) -> float:
        """The share of places that hold no text."""
        return 1 - int(self.lengths.sum()) / (self.num_rows * self.width)

    @property
    def flat_positions(self) -> np.ndarray:
        """The place of every token, one text after the other, in the rows laid end to end."""
        return np.repeat(self.row_index * self.width + self.start, self.lengths) + ragged_arange(self.lengths)

    def scatter(self, values: Sequence[Any] | np.ndarray, fill_value: float, dtype: Any = np.int64) -> np.ndarray:
        """(B, T, ...): a value for each token, texts one after the other, put where it belongs; the rest is `fill_value`."""
        array = np.asarray(values, dtype)
        out = np.full((self.num_rows * self.width, *array.shape[1:]), fill_value, dtype)
        out[self.flat_positions] = array
        return out.reshape(self.num_rows, self.width, *array.shape[1:])

    def document_ids_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """(B, T) which document a place is in, -1 for padding, and (B, T) where in it."""
        return self.scatter(np.repeat(self.document_index, self.lengths), -1), self.scatter(
            ragged_arange(self.lengths), 0
        )

    def allocate_slots(self, count_N: np.ndarray, slots_per_answer: int = 1) -> tuple[int, np.ndarray]:
        """How many slots every row has, and which ones, end to end, belong to the texts with so many answers each.

        `slots_per_answer` slots are one answer. The slots of a row are in the order of its documents.
        """
        order = np.lexsort((self.document_index, self.row_index))
        before = np.cumsum(count_N[order]) - count_N[order]
        used_B = np.bincount(self.row_index, weights=count_N, minlength=self.num_rows).astype(np.int64)
        first_N = np.empty_like(before)
        first_N[order] = before - (np.cumsum(used_B) - used_B)[self.row_index[order]]
        width = slots_per_answer * next_power_of_two(-(-int(used_B.max()) // slots_per_answer))
        return width, np.repeat(self.row_index * width + first_N, count_N) + ragged_arange(count_N)


def pack_texts(lengths: Sequence[int] | np.ndarray, row_tokens: int, texts_per_group: int = 1) -> TextPacking:
    """Texts into rows of `row_tokens`, the longest first, each into the row where it leaves the least room.

    With `texts_per_group`, so many texts in a row are one thing and stay side by side; rows are so many times longer then.
    The same sizes always give the same rows.
    """
    size_N = np.asarray(lengths, np.int64)
    thing_M, row_tokens = size_N.reshape(-1, texts_per_group).sum(1), row_tokens * texts_per_group
    assert 0 < thing_M.max(initial=0) <= row_tokens, "texts are cut before they are packed"
    order = np.argsort(-thing_M, kind="stable")
    row_M = np.empty_like(thing_M)
    row_M[order], used = best_fit_decreasing(thing_M[order], row_tokens, None)
    row_N = np.repeat(row_M, texts_per_group)
    by_row = np.argsort(row_N, kind="stable")
    texts_B = np.bincount(row_N, minlength=used)
    doc_N, first_N = np.empty_like(size_N), np.empty_like(size_N)
    doc_N[by_row] = ragged_arange(texts_B)
    end = np.cumsum(size_N[by_row])
    begun_B = np.concatenate([[0], end[np.cumsum(texts_B) - 1][:-1]])
    first_N[by_row] = end - size_N[by_row] - np.repeat(begun_B, texts_B)
    width = row_tokens if used > 1 else min(row_tokens, max(MIN_ROW_TOKENS, next_power_of_two(int(size_N.sum()))))
    return TextPacking(round_row_count(used), width, size_N, row_N, doc_N, first_N)


def round_row_count(num_rows: int) -> int:
    """The next number of rows that is allowed: 1 to 16, then by twos to 32, by fours to 64 ...

    >>> [round_row_count(n) for n in (3, 16, 17, 31, 33, 100)]
    [3, 16, 18, 32, 36, 104]
    """
    step = max(1, next_power_of_two(num_rows) // 16)
    return -(-num_rows // step) * step


def next_power_of_two(n: int) -> int:
    """The next one.

    >>> [next_power_of_two(n) for n in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(n - 1, 0).bit_length()
