"""The batches of the next step, prepared by a thread while the device computes, and a hash of all data so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from zlib import crc32

import numpy as np

from firth.core.errors import UserError
from firth.objectives import Batch
from firth.train.distributed import SINGLE_PROCESS, DistContext
from firth.train.step import sum_counts


def prefetch_batches(
    batch_fn: Callable[[int], Sequence[Batch]],
    start: int,
    end: Callable[[], int],
    data_hash: int = 0,
    dist_context: DistContext = SINGLE_PROCESS,
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[tuple[int, Sequence[Batch], dict[str, int], int]]:
    """Yield (step, micro-batches, target counts over all processes, hash of all data so far).

    A thread prepares the next step's batches while the device computes the current one. `waiting` is entered to wait
    for it. `end` may change meanwhile.
    """
    thread_context = dist_context.for_thread("batches")

    def prepare(step: int, previous_hash: int) -> tuple[Sequence[Batch], dict[str, int], int]:
        try:
            micro_batches = batch_fn(step)
        except MemoryError:
            raise UserError(
                "Out of host memory while making a batch: lower --per-device-train-batch-size or --max-seq-length."
            ) from None
        counts = thread_context.all_reduce_sum(
            {**sum_counts(micro_batches), "rows": sum(map(hash_rows, micro_batches))}
        )
        return (
            micro_batches,
            {name: int(n) for name, n in counts.items()},
            chain_hash(int(counts["rows"]), previous_hash),
        )

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        step, next_batches = start, pool.submit(prepare, start, data_hash) if start < end() else None
        while next_batches is not None:
            with waiting():
                micro_batches, counts, data_hash = next_batches.result()
            next_batches = pool.submit(prepare, step + 1, data_hash) if step + 1 < end() else None
            yield step, micro_batches, counts, data_hash
            step += 1


def chain_hash(rows_hash: int, previous_hash: int) -> int:
    """Chain a step's row hash to the hash of all earlier steps."""
    return crc32((rows_hash % 2**32).to_bytes(4, "little"), previous_hash)


def hash_rows(batch: Batch) -> int:
    """Return the sum of the rows' CRCs. A sum does not depend on how processes share the rows."""
    row_hashes = [0] * len(batch.input_ids)
    for array in batch:
        if array is not None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            size = len(data) // len(row_hashes)
            row_hashes = [crc32(data[i * size : (i + 1) * size], before) for i, before in enumerate(row_hashes)]
    return sum(row_hashes)
