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

from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.packing import next_power_of_two

NUM_ROW_BUCKETS = 3  # numbers of rows that are allowed, beside those of batches that are larger than any in the trial
MAX_TRIAL_BATCHES = 256  # batches of a trial
WIDTH_MULTIPLE_TOKENS = 64  # rows are a multiple of so many places wide, where they are wider than that
DECODER_WIDTH_MULTIPLE_TOKENS = 16  # those of a decoder that reads an encoder, too
SLOT_MULTIPLE = 8  # and have a multiple of so many slots
FIELD_FILL_VALUES = {
    "document_ids": -1,
    "decoder_document_ids": -1,
    "labels": IGNORE_INDEX,
    "group_ids": -1,
}  # where nothing is; 0 where it is not said


class BatchShape(NamedTuple):
    """The size of a batch; 0 where it has no such thing."""

    rows: int
    width: int
    decoder_width: int
    slots: int


def batch_shape(batch: Batch) -> BatchShape:
    rows, width = batch.input_ids.shape
    written, slots = (0 if a is None else a.shape[1] for a in (batch.decoder_input_ids, batch.target_positions))
    return BatchShape(rows, width, written, slots)


@dataclass(frozen=True)
class ShapeBuckets:
    """Sizes to which batches are padded: one width, one number of slots, some numbers of rows.

    A batch that is larger than all in the trial gets a size of its own, rounded in the same way. `pad_id` is the id of the
    padding token, `fill_share` the share of all places that held text in the trial.
    """

    row_buckets: tuple[int, ...]
    width: int
    decoder_width: int
    slots: int
    pad_id: int
    fill_share: float = 1.0

    def __str__(self) -> str:
        rows = " or ".join(map(str, self.row_buckets))
        return f"batches of {rows} rows of {self.width} tokens, {100 * self.fill_share:.0f}% of which hold text"

    def bucket_for(self, shape: BatchShape) -> BatchShape:
        """The size that a batch of this one gets."""
        rows = next((level for level in self.row_buckets if level >= shape.rows), 0)
        return BatchShape(
            rows or round_beyond_largest(shape.rows, self.row_buckets[-1], 1),
            round_beyond_largest(shape.width, self.width, WIDTH_MULTIPLE_TOKENS),
            round_beyond_largest(shape.decoder_width, self.decoder_width, DECODER_WIDTH_MULTIPLE_TOKENS),
            round_beyond_largest(shape.slots, self.slots, SLOT_MULTIPLE),
        )

    def __call__(self, batch: Batch) -> Batch:
        return pad_batch(batch, self.bucket_for(batch_shape(batch)), self.pad_id)


def round_beyond_largest(n: int, largest: int, step: int) -> int:
    """The largest that was expected, and for more than that some quarters of it in addition.

    >>> round_beyond_largest(5, 12, 1), round_beyond_largest(13, 12, 1), round_beyond_largest(16, 12, 1)
    (12, 15, 18)
    """
    return largest + round_up_to_multiple(max(n - largest, 0), round_up_to_multiple(max(1, largest // 4), step))


def round_up_to_multiple(n: int, step: int) -> int:
    """
    >>> round_up_to_multiple(5, 8), round_up_to_multiple(16, 8), round_up_to_multiple(0, 8)
    (8, 16, 0)
    """
    return -(-n // step) * step


def fit_shape_buckets(batches: Iterable[Batch], pad_id: int) -> ShapeBuckets:
    """The shapes that suit some batches of a run: those numbers of rows that pad the least."""
    sizes, tokens = [], 0
    for batch in batches:
        sizes.append(batch_shape(batch))
        tokens += int((batch.document_ids >= 0).sum())
    width, written, slots = (max(size[i] for size in sizes) for i in (1, 2, 3))
    levels = choose_row_buckets(Counter(size.rows for size in sizes), NUM_ROW_BUCKETS)
    width = round_up_to_multiple(width, min(WIDTH_MULTIPLE_TOKENS, next_power_of_two(width)))
    found = ShapeBuckets(
        levels,
        width,
        round_up_to_multiple(written, DECODER_WIDTH_MULTIPLE_TOKENS),
        round_up_to_multiple(slots, SLOT_MULTIPLE),
        pad_id,
    )
    places = sum(size.rows * size.width for size in map(found.bucket_for, sizes))
    return replace(found, fill_share=tokens / places)


def choose_row_buckets(count: Counter[int], num_buckets: int) -> tuple[int, ...]:
    """So many numbers of rows, the largest among them, that add the fewest when each is rounded up to the next.

    >>> choose_row_buckets(Counter({4: 10, 5: 80, 6: 9, 9: 1}), 2)
    (5, 9)
    """
    *others, largest = sorted(count)
    found = [(*some, largest) for some in combinations(others, min(num_buckets - 1, len(others)))]

    def cost(levels: Sequence[int]) -> int:
        return sum(times * next(level for level in levels if level >= rows) for rows, times in count.items())

    return min(found, key=cost)


def pad_batch(batch: Batch, shape: BatchShape, pad_id: int) -> Batch:
    """The same batch with empty rows below, and empty places and slots at the right. Nothing that is asked changes.

    What a decoder reads at the end of a row is a part of its last text: so it has a text to read in the encoder.
    """
    fields = {}
    for name, array in zip(Batch._fields, batch, strict=True):
        if array is not None:
            columns = num_field_columns(name, batch, shape)
            fields[name] = pad_array(
                array, shape.rows, columns, field_fill_value(name, batch, pad_id), name == "decoder_document_ids"
            )
    return batch._replace(**fields)


def num_field_columns(name: str, batch: Batch, shape: BatchShape) -> int:
    """How many columns a field has in a batch of this size."""
    if name.startswith("decoder_"):
        return shape.decoder_width
    of_slots = name in ("target_positions", "group_ids") or (name == "task_labels" and batch.task_labels.ndim == 2)
    if (
        name == "labels" and batch.task_labels is None
    ):  # of the asked places, or of what is written; else what follows each
        of_slots = batch.target_positions is not None
        if not of_slots:
            return shape.decoder_width
    if name == "task_labels" and not of_slots:  # of a span: the places that are asked are those of the last stack
        return shape.decoder_width or shape.width
    if not of_slots:
        return shape.width
    return shape.slots * getattr(batch, name).shape[1] // batch.target_positions.shape[1]  # several may be one answer


def field_fill_value(name: str, batch: Batch, pad_id: int) -> float:
    """What a field holds where nothing is."""
    if name in ("input_ids", "decoder_input_ids"):
        return pad_id
    if name != "task_labels":
        return FIELD_FILL_VALUES.get(name, 0)
    if batch.task_labels.ndim == 3:
        return -1  # an answer may not be there
    if batch.task_labels.dtype.kind == "f":
        return np.nan
    return IGNORE_INDEX if batch.group_ids is None else 0


def pad_array(array: np.ndarray, rows: int, columns: int, fill_value: float, repeat_last: bool = False) -> np.ndarray:
    """An array with more rows and columns, `fill_value` or, in columns, as the last one of each row."""
    out = np.full((rows, columns, *array.shape[2:]), fill_value, array.dtype)
    B, T = array.shape[:2]
    out[:B, :T] = array
    if repeat_last and columns > T:
        out[:B, T:] = array[:, -1:]
    return out


def unpad_logits(logits: Any, before: BatchShape, after: BatchShape) -> Any:
    """What a model says about a batch that was padded: (B, K, ...) as of the batch before that."""
    now, then = ((size.slots or size.decoder_width or size.width) for size in (before, after))
    return logits[: before.rows, : logits.shape[1] * now // then]


class ShapeCountingBatches:
    """A function that makes batches, and how many shapes these have had."""

    def __init__(self, batch_fn: Callable[[int], list[Batch]], shape_buckets: ShapeBuckets | None) -> None:
        self.batch_fn, self.shape_buckets, self.seen_shapes = batch_fn, shape_buckets, set[BatchShape]()

    def __call__(self, step: int) -> list[Batch]:
        batches = self.batch_fn(step)
        found = batches if self.shape_buckets is None else [self.shape_buckets(batch) for batch in batches]
        self.seen_shapes.update(map(batch_shape, found))
        return found
