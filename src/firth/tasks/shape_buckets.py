"""Shape buckets: pad the batches of a run to a few fixed shapes.

`torch.compile` compiles once per input shape, and a CUDA graph replays one shape only. Packed batches of labelled
examples differ in their number of rows and in their width, so almost every step would compile or capture again.

A trial collates the first batches of the run and fits the buckets to them. There is one width, one decoder width and
one number of slots: the largest of the trial, rounded up. There are at most `NUM_ROW_BUCKETS` numbers of rows, those
that add the least padding. Every later batch is padded to its bucket. Padding holds no document and no label, so the
loss and the gradients do not change. The cost is the computation on padding; `ShapeBuckets.fill_share` measures it.

Shapes: B rows, T positions, U decoder positions, K slots per row. A slot is one target position of a row.
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

NUM_ROW_BUCKETS = 3  # row counts fitted to the trial; a batch larger than the trial's largest adds one more
MAX_TRIAL_BATCHES = 256  # batches that the trial collates
WIDTH_MULTIPLE_TOKENS = 64  # the row width is a multiple of this, or the next power of two below it
DECODER_WIDTH_MULTIPLE_TOKENS = 16  # the row width of an encoder-decoder's decoder is a multiple of this
SLOT_MULTIPLE = 8  # the number of slots per row is a multiple of this
# Padding value of each batch field. Default: 0.
FIELD_FILL_VALUES = {
    "document_ids": -1,
    "decoder_document_ids": -1,
    "labels": IGNORE_INDEX,
    "group_ids": -1,
    "soft_labels": np.nan,
}


class BatchShape(NamedTuple):
    """The size of a batch. `decoder_width` is 0 without a decoder input, `slots` is 0 without target positions."""

    rows: int
    width: int
    decoder_width: int
    slots: int


def batch_shape(batch: Batch) -> BatchShape:
    rows, width = batch.input_ids.shape
    decoder_width, slots = (0 if a is None else a.shape[1] for a in (batch.decoder_input_ids, batch.target_positions))
    return BatchShape(rows, width, decoder_width, slots)


@dataclass(frozen=True)
class ShapeBuckets:
    """Shapes to which batches are padded: one width, one number of slots, several numbers of rows.

    A batch larger than all trial batches is padded to a larger shape (`round_beyond_largest`). `pad_id` is the id of
    the padding token. `fill_share` is the fraction of the trial's padded positions that held text.
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
        """Return the shape to which a batch of this shape is padded."""
        rows = next((bucket for bucket in self.row_buckets if bucket >= shape.rows), 0)
        return BatchShape(
            rows or round_beyond_largest(shape.rows, self.row_buckets[-1], 1),
            round_beyond_largest(shape.width, self.width, WIDTH_MULTIPLE_TOKENS),
            round_beyond_largest(shape.decoder_width, self.decoder_width, DECODER_WIDTH_MULTIPLE_TOKENS),
            round_beyond_largest(shape.slots, self.slots, SLOT_MULTIPLE),
        )

    def __call__(self, batch: Batch) -> Batch:
        return pad_batch(batch, self.bucket_for(batch_shape(batch)), self.pad_id)


def round_beyond_largest(n: int, largest: int, step: int) -> int:
    """Round `n` up to `largest`, or beyond it in steps of a quarter of `largest` (a multiple of `step`).

    >>> round_beyond_largest(5, 12, 1), round_beyond_largest(13, 12, 1), round_beyond_largest(16, 12, 1)
    (12, 15, 18)
    """
    return largest + round_up_to_multiple(max(n - largest, 0), round_up_to_multiple(max(1, largest // 4), step))


def round_up_to_multiple(n: int, step: int) -> int:
    """Round `n` up to a multiple of `step`.

    >>> round_up_to_multiple(5, 8), round_up_to_multiple(16, 8), round_up_to_multiple(0, 8)
    (8, 16, 0)
    """
    return -(-n // step) * step


def fit_shape_buckets(batches: Iterable[Batch], pad_id: int) -> ShapeBuckets:
    """Fit the buckets to sample batches: the largest width and slots, and the row counts that add the least padding."""
    shapes, tokens = [], 0
    for batch in batches:
        shapes.append(batch_shape(batch))
        tokens += int((batch.document_ids >= 0).sum())
    _, width, decoder_width, slots = map(max, zip(*shapes, strict=True))
    width = round_up_to_multiple(width, min(WIDTH_MULTIPLE_TOKENS, next_power_of_two(width)))
    buckets = ShapeBuckets(
        choose_row_buckets(Counter(shape.rows for shape in shapes), NUM_ROW_BUCKETS),
        width,
        round_up_to_multiple(decoder_width, DECODER_WIDTH_MULTIPLE_TOKENS),
        round_up_to_multiple(slots, SLOT_MULTIPLE),
        pad_id,
    )
    padded_positions = sum(shape.rows * shape.width for shape in map(buckets.bucket_for, shapes))
    return replace(buckets, fill_share=tokens / padded_positions)


def choose_row_buckets(count: Counter[int], num_buckets: int) -> tuple[int, ...]:
    """Return the `num_buckets` row counts that add the fewest padding rows, the largest count included.

    `count` maps a number of rows to the number of batches that have it. Each batch is padded to the next bucket.

    >>> choose_row_buckets(Counter({4: 10, 5: 80, 6: 9, 9: 1}), 2)
    (5, 9)
    """
    *others, largest = sorted(count)
    candidates = [(*smaller, largest) for smaller in combinations(others, min(num_buckets - 1, len(others)))]

    def padded_rows(buckets: Sequence[int]) -> int:
        return sum(batches * next(b for b in buckets if b >= rows) for rows, batches in count.items())

    return min(candidates, key=padded_rows)


def pad_batch(batch: Batch, shape: BatchShape, pad_id: int) -> Batch:
    """Pad a batch with empty rows below and with empty positions and slots at the right. The targets do not change.

    Decoder padding repeats the last document id of its row, so that every decoder query has encoder keys to attend to.
    """
    fields = {}
    for name, array in zip(Batch._fields, batch, strict=True):
        if array is not None and name != "head":
            columns = num_field_columns(name, batch, shape)
            fields[name] = pad_array(
                array, shape.rows, columns, field_fill_value(name, batch, pad_id), name == "decoder_document_ids"
            )
    return batch._replace(**fields)


def num_field_columns(name: str, batch: Batch, shape: BatchShape) -> int:
    """Number of columns of a field in a batch padded to `shape`."""
    if name.startswith("decoder_"):
        return shape.decoder_width
    per_slot = name in ("target_positions", "group_ids", "reference_logps") or (
        name in ("task_labels", "soft_labels") and batch.task_labels.ndim == 2
    )
    # Without task labels, `labels` belong to the target positions or to the decoder; else to every input position.
    if name == "labels" and batch.task_labels is None:
        per_slot = batch.target_positions is not None
        if not per_slot:
            return shape.decoder_width
    if name in ("task_labels", "soft_labels") and not per_slot:  # span labels: per position of the last stack
        return shape.decoder_width or shape.width
    if not per_slot:
        return shape.width
    # A prediction may use several target positions, so this field may have fewer columns than there are slots.
    return shape.slots * getattr(batch, name).shape[1] // batch.target_positions.shape[1]


def field_fill_value(name: str, batch: Batch, pad_id: int) -> float:
    """Padding value of a field."""
    if name in ("input_ids", "decoder_input_ids"):
        return pad_id
    if name != "task_labels":
        return FIELD_FILL_VALUES.get(name, 0)
    if batch.task_labels.ndim == 3:
        return -1  # span labels: no answer
    if batch.task_labels.dtype.kind == "f":
        return np.nan
    return IGNORE_INDEX if batch.group_ids is None else 0


def pad_array(array: np.ndarray, rows: int, columns: int, fill_value: float, repeat_last: bool = False) -> np.ndarray:
    """Pad to (rows, columns, ...) with `fill_value`. With `repeat_last`, new columns repeat each row's last one."""
    out = np.full((rows, columns, *array.shape[2:]), fill_value, array.dtype)
    B, T = array.shape[:2]
    out[:B, :T] = array
    if repeat_last and columns > T:
        out[:B, T:] = array[:, -1:]
    return out


def unpad_logits(logits: Any, before: BatchShape, after: BatchShape) -> Any:
    """Cut the logits of a padded batch (shape `after`) to the (B, K, ...) of the batch before padding."""
    columns, padded_columns = ((shape.slots or shape.decoder_width or shape.width) for shape in (before, after))
    return logits[: before.rows, : logits.shape[1] * columns // padded_columns]


class ShapeCountingBatches:
    """Wrap a batch function: pad its batches to `shape_buckets` and record the distinct shapes in `seen_shapes`."""

    def __init__(self, batch_fn: Callable[[int], list[Batch]], shape_buckets: ShapeBuckets | None) -> None:
        self.batch_fn, self.shape_buckets, self.seen_shapes = batch_fn, shape_buckets, set[BatchShape]()

    def __call__(self, step: int) -> list[Batch]:
        batches = self.batch_fn(step)
        if self.shape_buckets is not None:
            batches = [self.shape_buckets(batch) for batch in batches]
        self.seen_shapes.update(map(batch_shape, batches))
        return batches
