"""Compute the logits of batches: on a CPU one by one, on a GPU one batch ahead of the host.

A GPU computes a batch of short texts in a few milliseconds. Python needs longer to launch its hundreds of kernels. If
it waits for the logits before it packs the next batch, the GPU waits for Python in turn. So three things happen here:

1. `launch` returns before the logits are there. They are copied to pinned memory behind the computation, and the host
   packs the next batch meanwhile (`num_ahead`).
2. Shapes are rounded up to few sizes: rows and widths in steps of an eighth. Padding costs less than a new shape.
3. The second batch of a shape is captured as a CUDA graph; the next ones replay it with one call. All graphs share a
   memory pool, since they run one after another, and each result is copied before the next replay.

Where a capture fails, the runner continues without graphs.

B rows, T positions of a row, K slots of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firth.core.console import warn
from firth.models import Model
from firth.objectives import Batch
from firth.objectives.batch import to_host_tensor
from firth.tasks.packing import next_power_of_two
from firth.tasks.shape_buckets import BatchShape, batch_shape, pad_batch, round_up_to_multiple, unpad_logits
from firth.train import ComputeConfig
from firth.train.cuda_graphs import clean_up_failed_capture

MAX_GRAPHS = 64  # shapes with a graph; others run without
MIN_SHAPE_STEP = 8  # rows below 8 and widths are multiples of this, or of an eighth of the next power of two
BATCH_TOKENS = 16_384  # tokens of a batch on a GPU


def round_size(n: int) -> int:
    """Round up a number of rows or positions to one of few sizes, at most an eighth too large from 64 on.

    >>> [round_size(n) for n in (1, 3, 8, 9, 65, 130, 256)]
    [1, 4, 8, 16, 80, 160, 256]
    """
    if n <= MIN_SHAPE_STEP:
        return next_power_of_two(n)
    return round_up_to_multiple(n, max(MIN_SHAPE_STEP, next_power_of_two(n) // 8))


class LogitsRunner:
    """Compute logits eagerly. `num_ahead` batches may be launched before the first one is read."""

    num_ahead = 0

    def __init__(self, model: Model, compute: ComputeConfig) -> None:
        self.model, self.compute = model, compute

    def row_tokens(self, longest: int) -> int:
        """Return the width of rows for texts of at most this many tokens."""
        return longest

    def split(self, items: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
        """Split items into batches."""
        return [items[first : first + batch_size] for first in range(0, len(items), batch_size)]

    def launch(self, batch: Batch, pad_id: int) -> Callable[[], np.ndarray]:
        """Start a batch; the returned function waits for its logits (float32)."""
        logits = self.compute_logits(batch.to(self.compute.device)).cpu().numpy()
        return lambda: logits

    def compute_logits(self, batch: Batch) -> Tensor:
        with self.compute.autocast():
            return self.model.logits(batch).float()


class AheadRunner(LogitsRunner):
    """Compute one batch ahead, in few shapes, with a CUDA graph for each shape that occurs again.

    `batch_tokens` is the number of tokens of a batch; 0 keeps the number of items that the caller asks for. On a CPU,
    for tests, the same steps run without graphs and without pinned memory.
    """

    num_ahead = 1

    def __init__(
        self, model: Model, compute: ComputeConfig, batch_tokens: int = BATCH_TOKENS, use_graphs: bool = True
    ) -> None:
        super().__init__(model, compute)
        self.batch_tokens = batch_tokens
        self.is_cuda = compute.device.type == "cuda"
        self.use_graphs = use_graphs and self.is_cuda and model.config.recurrent is None
        self.graphs: dict[Any, CapturedLogits] = {}
        self.num_seen: Counter[Any] = Counter()
        self.address = 0  # of the weights that the graphs read
        self.pool: Any = None

    def row_tokens(self, longest: int) -> int:
        return round_size(longest)

    def split(self, items: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
        """Split items, which are sorted by length, into batches of at most `batch_tokens` with padding."""
        if not self.batch_tokens:
            return super().split(items, batch_size)
        batches: list[Sequence[Any]] = []
        first = longest = 0
        for i, item in enumerate(items):
            longest = max(longest, item.num_tokens)
            if i > first and longest * (i + 1 - first) > self.batch_tokens:
                batches.append(items[first:i])
                first, longest = i, item.num_tokens
        return [*batches, items[first:]] if first < len(items) else batches

    def launch(self, batch: Batch, pad_id: int) -> Callable[[], np.ndarray]:
        before = batch_shape(batch)
        # Widths are round already, unless a row reaches the model's maximum length (`HeadTask.pack_items`).
        after = BatchShape(round_size(before.rows), before.width, before.decoder_width, before.slots)
        padded = pad_batch(batch, after, pad_id)
        read = self.copy_to_host(self.run(padded))
        return lambda: unpad_logits(read(), before, after)

    def run(self, batch: Batch) -> Tensor:
        """Return the logits on the device, by the graph of the batch's shape if there is one."""
        if not self.use_graphs:
            return self.compute_logits(batch.to(self.compute.device))
        key = tuple(a if a is None or isinstance(a, str) else (a.shape, str(a.dtype)) for a in batch)
        address = next(self.model.parameters()).data_ptr()
        if address != self.address:  # the model was moved
            self.graphs.clear()
            self.address = address
        if (captured := self.graphs.get(key)) is not None:
            return captured.replay(batch)
        self.num_seen[key] += 1
        on_device = batch.to(self.compute.device)
        if self.num_seen[key] < 2 or len(self.graphs) >= MAX_GRAPHS:
            return self.compute_logits(on_device)
        return self.capture(key, on_device)

    def capture(self, key: Any, batch: Batch) -> Tensor:
        """Capture a graph for the shape of a batch, and return its logits."""
        logits = self.compute_logits(batch)  # also the warm-up: a capture forbids what the first use allocates
        stream = torch.cuda.Stream(self.compute.device)
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            self.graphs[key] = CapturedLogits(self.compute_logits, batch, self.pool, stream)
        except RuntimeError as e:
            self.use_graphs = False
            self.graphs.clear()
            clean_up_failed_capture(self.pool, stream, self.compute.device)
            warn(f"Predictions run without CUDA graphs: {str(e).partition(chr(10))[0]}")
        return logits

    def copy_to_host(self, logits: Tensor) -> Callable[[], np.ndarray]:
        """Start to copy logits to the host; the returned function waits for the copy."""
        if not self.is_cuda:
            array = logits.numpy()
            return lambda: array
        host = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
        host.copy_(logits, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return partial(wait_for, event, host)


def wait_for(event: Any, host: Tensor) -> np.ndarray:
    event.synchronize()
    array: np.ndarray = host.numpy()
    return array


class CapturedLogits:
    """The logits of one batch shape as a CUDA graph."""

    def __init__(self, compute_logits: Callable[[Batch], Tensor], batch: Batch, pool: Any, stream: Any) -> None:
        self.batch, self.graph = batch, torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(batch.input_ids.device)
        torch.cuda.synchronize(batch.input_ids.device)
        # set the stream again: after a failed capture torch leaves the capture stream current
        with torch.cuda.stream(current), torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.logits = compute_logits(batch)

    def replay(self, batch: Batch) -> Tensor:
        """Copy a batch of the same shape to the captured addresses, and compute it. The next replay overwrites it."""
        for held, array in zip(self.batch, batch, strict=True):
            if isinstance(held, Tensor):
                held.copy_(to_host_tensor(array).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.logits
