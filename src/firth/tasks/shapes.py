"""Few shapes: batches of a run are padded to one of some sizes that were found in a trial, so that each compiles once.

B rows, T places, U places of the decoder, K slots of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from firth.objectives import IGNORED, Batch
from firth.tasks.packing import power_of_two

LEVELS = 3  # numbers of rows that are allowed, beside those of batches that are larger than any in the trial
TRIED = 256  # batches of a trial
WIDTH = 64  # rows are a multiple of so many places wide, where they are wider than that
WRITTEN = 16  # those of a decoder that reads an encoder, too
SLOTS = 8  # and have a multiple of so many slots
EMPTY = {"doc": -1, "decoder_doc": -1, "labels": IGNORED, "group": -1}  # where nothing is; 0 where it is not said


class Size(NamedTuple):
    """The size of a batch; 0 where it has no such thing."""

    rows: int
    width: int
    written: int
    slots: int


def size_of(batch: Batch) -> Size:
    rows, width = batch.tokens.shape
    written, slots = (0 if a is None else a.shape[1] for a in (batch.decoder_tokens, batch.asked))
    return Size(rows, width, written, slots)


@dataclass(frozen=True)
class Shapes:
    """Sizes to which batches are padded: one width, one number of slots, some numbers of rows.

    A batch that is larger than all in the trial gets a size of its own, rounded in the same way. `pad` is the id of the
    padding token, `filled` the share of all places that held text in the trial.
    """

    rows: tuple[int, ...]
    width: int
    written: int
    slots: int
    pad: int
    filled: float = 1.0

    def __str__(self) -> str:
        rows = " or ".join(map(str, self.rows))
        return f"batches of {rows} rows of {self.width} tokens, {100 * self.filled:.0f}% of which hold text"

    def fit(self, size: Size) -> Size:
        """The size that a batch of this one gets."""
        rows = next((level for level in self.rows if level >= size.rows), 0)
        return Size(
            rows or above(size.rows, self.rows[-1], 1),
            above(size.width, self.width, WIDTH),
            above(size.written, self.written, WRITTEN),
            above(size.slots, self.slots, SLOTS),
        )

    def __call__(self, batch: Batch) -> Batch:
        return padded(batch, self.fit(size_of(batch)), self.pad)


def above(n: int, largest: int, step: int) -> int:
    """The largest that was expected, and for more than that some quarters of it in addition.

    >>> above(5, 12, 1), above(13, 12, 1), above(16, 12, 1)
    (12, 15, 18)
    """
    return largest + rounded(max(n - largest, 0), rounded(max(1, largest // 4), step))


def rounded(n: int, step: int) -> int:
    """
    >>> rounded(5, 8), rounded(16, 8), rounded(0, 8)
    (8, 16, 0)
    """
    return -(-n // step) * step


def find_shapes(batches: Iterable[Batch], pad: int) -> Shapes:
    """The shapes that suit some batches of a run: those numbers of rows that pad the least."""
    sizes, tokens = [], 0
    for batch in batches:
        sizes.append(size_of(batch))
        tokens += int((batch.doc >= 0).sum())
    width, written, slots = (max(size[i] for size in sizes) for i in (1, 2, 3))
    levels = best_levels(Counter(size.rows for size in sizes), LEVELS)
    width = rounded(width, min(WIDTH, power_of_two(width)))
    found = Shapes(levels, width, rounded(written, WRITTEN), rounded(slots, SLOTS), pad)
    places = sum(size.rows * size.width for size in map(found.fit, sizes))
    return replace(found, filled=tokens / places)


def best_levels(count: Counter[int], num: int) -> tuple[int, ...]:
    """So many numbers of rows, the largest among them, that add the fewest when each is rounded up to the next.

    >>> best_levels(Counter({4: 10, 5: 80, 6: 9, 9: 1}), 2)
    (5, 9)
    """
    *others, largest = sorted(count)
    found = [(*some, largest) for some in combinations(others, min(num - 1, len(others)))]

    def cost(levels: Sequence[int]) -> int:
        return sum(times * next(level for level in levels if level >= rows) for rows, times in count.items())

    return min(found, key=cost)


def padded(batch: Batch, size: Size, pad: int) -> Batch:
    """The same batch with empty rows below, and empty places and slots at the right. Nothing that is asked changes.

    What a decoder reads at the end of a row is a part of its last text: so it has a text to read in the encoder.
    """
    fields = {}
    for name, array in zip(Batch._fields, batch, strict=True):
        if array is not None:
            columns = columns_of(name, batch, size)
            fields[name] = filled(array, size.rows, columns, empty_in(name, batch, pad), name == "decoder_doc")
    return batch._replace(**fields)


def columns_of(name: str, batch: Batch, size: Size) -> int:
    """How many columns a field has in a batch of this size."""
    if name.startswith("decoder_"):
        return size.written
    of_slots = name in ("asked", "group") or (name == "target" and batch.target.ndim == 2)
    if name == "labels" and batch.target is None:  # of the asked places, or of what is written; else what follows each
        of_slots = batch.asked is not None
        if not of_slots:
            return size.written
    if name == "target" and not of_slots:  # of a span: the places that are asked are those of the last stack
        return size.written or size.width
    if not of_slots:
        return size.width
    return size.slots * getattr(batch, name).shape[1] // batch.asked.shape[1]  # several may be one answer


def empty_in(name: str, batch: Batch, pad: int) -> float:
    """What a field holds where nothing is."""
    if name in ("tokens", "decoder_tokens"):
        return pad
    if name != "target":
        return EMPTY.get(name, 0)
    if batch.target.ndim == 3:
        return -1  # an answer may not be there
    if batch.target.dtype.kind == "f":
        return np.nan
    return IGNORED if batch.group is None else 0


def filled(array: np.ndarray, rows: int, columns: int, empty: float, repeat: bool = False) -> np.ndarray:
    """An array with more rows and columns, `empty` or, in columns, as the last one of each row."""
    out = np.full((rows, columns, *array.shape[2:]), empty, array.dtype)
    B, T = array.shape[:2]
    out[:B, :T] = array
    if repeat and columns > T:
        out[:B, T:] = array[:, -1:]
    return out


def unpadded(logits: Any, before: Size, after: Size) -> Any:
    """What a model says about a batch that was padded: (B, K, ...) as of the batch before that."""
    now, then = ((size.slots or size.written or size.width) for size in (before, after))
    return logits[: before.rows, : logits.shape[1] * now // then]


class Counting:
    """A function that makes batches, and how many shapes these have had."""

    def __init__(self, make: Callable[[int], list[Batch]], shapes: Shapes | None) -> None:
        self.make, self.shapes, self.seen = make, shapes, set[Size]()

    def __call__(self, step: int) -> list[Batch]:
        batches = self.make(step)
        found = batches if self.shapes is None else [self.shapes(batch) for batch in batches]
        self.seen.update(map(size_of, found))
        return found
