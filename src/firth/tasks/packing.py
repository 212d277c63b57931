"""Pack several texts into one row: little padding, few batch shapes.

Padding a batch to its longest text wastes half of the computation on usual fine-tuning data (docs/finetune.md).
Instead, texts are placed into rows of `row_tokens` by best-fit decreasing bin packing: the longest text first, each
into the row with the least remaining space that holds it (Krell et al. 2021, "Efficient Sequence Packing without
Cross-contamination"). Document ids keep attention inside each text.

Row count, row width and slot count are rounded, so that few shapes occur: each new shape costs a compilation or a CUDA
graph capture.

N texts, M groups of texts, B rows, T positions of a row, K slots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from firth.tokens.packing import best_fit_decreasing, ragged_arange

MIN_ROW_TOKENS = 16  # minimum width of a batch with a single row


class TextPacking(NamedTuple):
    """Row, document index in the row, and start position of each text."""

    num_rows: int
    width: int
    lengths: np.ndarray  # (N,)
    row_index: np.ndarray  # (N,)
    document_index: np.ndarray  # (N,)
    start: np.ndarray  # (N,)

    @property
    def padding_share(self) -> float:
        """Fraction of padding positions."""
        return 1 - int(self.lengths.sum()) / (self.num_rows * self.width)

    @property
    def flat_positions(self) -> np.ndarray:
        """(tokens,): index of every token, text by text, in the flattened (B, T)."""
        return np.repeat(self.row_index * self.width + self.start, self.lengths) + ragged_arange(self.lengths)

    def scatter(self, values: Sequence[Any] | np.ndarray, fill_value: float, dtype: Any = np.int64) -> np.ndarray:
        """(B, T, ...): move one value per token, text by text, to its position; padding gets `fill_value`."""
        array = np.asarray(values, dtype)
        out = np.full((self.num_rows * self.width, *array.shape[1:]), fill_value, dtype)
        out[self.flat_positions] = array
        return out.reshape(self.num_rows, self.width, *array.shape[1:])

    def document_ids_and_positions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return document ids (-1: padding) and position ids, both (B, T)."""
        return self.scatter(np.repeat(self.document_index, self.lengths), -1), self.scatter(
            ragged_arange(self.lengths), 0
        )

    def allocate_slots(self, count_N: np.ndarray, slots_per_answer: int = 1) -> tuple[int, np.ndarray]:
        """Return K, and the index in the flattened (B, K) of every slot, where text n needs count_N[n] slots.

        The slots of a row are in the order of its documents. K is `slots_per_answer` times a power of two.
        """
        order = np.lexsort((self.document_index, self.row_index))
        before = np.cumsum(count_N[order]) - count_N[order]
        used_B = np.bincount(self.row_index, weights=count_N, minlength=self.num_rows).astype(np.int64)
        first_N = np.empty_like(before)
        first_N[order] = before - (np.cumsum(used_B) - used_B)[self.row_index[order]]
        width = slots_per_answer * next_power_of_two(-(-int(used_B.max()) // slots_per_answer))
        return width, np.repeat(self.row_index * width + first_N, count_N) + ragged_arange(count_N)


def pack_texts(lengths: Sequence[int] | np.ndarray, row_tokens: int, texts_per_group: int = 1) -> TextPacking:
    """Pack texts of these lengths into rows of `row_tokens` by best-fit decreasing; a pure function of the lengths.

    With `texts_per_group`, consecutive texts form groups that stay adjacent, in rows `texts_per_group` times longer.
    """
    length_N = np.asarray(lengths, np.int64)
    group_M, row_tokens = length_N.reshape(-1, texts_per_group).sum(1), row_tokens * texts_per_group
    assert 0 < group_M.max(initial=0) <= row_tokens, "texts must be truncated before packing"
    order = np.argsort(-group_M, kind="stable")
    row_M = np.empty_like(group_M)
    row_M[order], num_rows = best_fit_decreasing(group_M[order], row_tokens, None)
    row_N = np.repeat(row_M, texts_per_group)
    by_row = np.argsort(row_N, kind="stable")
    texts_B = np.bincount(row_N, minlength=num_rows)
    document_N, start_N = np.empty_like(length_N), np.empty_like(length_N)
    document_N[by_row] = ragged_arange(texts_B)
    end = np.cumsum(length_N[by_row])
    row_start_B = np.concatenate([[0], end[np.cumsum(texts_B) - 1][:-1]])
    start_N[by_row] = end - length_N[by_row] - np.repeat(row_start_B, texts_B)
    width = row_tokens if num_rows > 1 else min(row_tokens, max(MIN_ROW_TOKENS, next_power_of_two(int(length_N.sum()))))
    return TextPacking(round_row_count(num_rows), width, length_N, row_N, document_N, start_N)


def round_row_count(num_rows: int) -> int:
    """Round up to an allowed number of rows: 1 to 16, then steps of 2 to 32, steps of 4 to 64 ...

    >>> [round_row_count(n) for n in (3, 16, 17, 31, 33, 100)]
    [3, 16, 18, 32, 36, 104]
    """
    step = max(1, next_power_of_two(num_rows) // 16)
    return -(-num_rows // step) * step


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n.

    >>> [next_power_of_two(n) for n in (0, 1, 3, 4, 5)]
    [1, 1, 4, 4, 8]
    """
    return 1 << max(n - 1, 0).bit_length()
