"""Background checkpoints: training continues while a host copy is written to disk.

A checkpoint must hold the weights, optimizer state and random state of one step, and the next step overwrites them in
place. Writing directly would block training for as long as the disk takes. Instead:

1. `HostSnapshot.copy_from` starts copying every tensor to preallocated host memory, pinned on a GPU machine so that the
   copy runs asynchronously. The copies are ordered before the next step on the same CUDA stream, so they see this step.
2. A thread waits for the copy (a CUDA event), hashes and writes the files, fsyncs them and renames the folder.

The cost is one more copy of model and optimizer in host memory, and a few milliseconds per checkpoint. One checkpoint
is written at a time: the host copy is reused, so the next `save` waits for the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from firth.core.console import warn
from firth.models import Model
from firth.models.hf.convert import unique_state_dict
from firth.train.checkpoint import CheckpointPayload, TrainState, save_checkpoint


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time; with `is_async` in a thread, from a host copy.

    A disk error costs one checkpoint, not the run: it is printed, and the previous checkpoint stays.
    """

    def __init__(
        self, run_dir: Path | None, recipe: dict[str, Any], save_total_limit: int, model: Model, is_async: bool
    ) -> None:
        self.run_dir, self.recipe, self.save_total_limit = run_dir, recipe, save_total_limit
        self.last_saved: str | None = None  # name of the newest intact checkpoint
        self.last_error: OSError | None = None  # error of the last attempt, None if it succeeded
        self.snapshot = HostSnapshot(model) if is_async and run_dir is not None else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[Path] | None = None
        self.on_saved: Callable[[Path], None] | None = None  # called with each new checkpoint

    def save(
        self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None] = lambda: None
    ) -> None:
        """Write a checkpoint, or start to. `before_write` runs first, in the writing thread (it syncs the log)."""
        self.wait()
        if self.run_dir is None:
            return
        if self.snapshot is None:
            self.record_result(lambda: self.write(payload, state, before_write))
        else:
            copied, ready = self.snapshot.copy_from(payload)
            state_copy = replace(state)

            def write_copy() -> Path:
                ready()
                return self.write(copied, state_copy, before_write)

            self.pending = self.pool.submit(write_copy)

    def write(self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None]) -> Path:
        assert self.run_dir is not None
        before_write()
        return save_checkpoint(self.run_dir, payload, state, self.recipe, self.save_total_limit)

    def poll(self) -> None:
        """Record the result of the pending checkpoint if it is finished; never blocks."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Block until the pending checkpoint is written, and record its result."""
        if self.pending is not None:
            future, self.pending = self.pending, None
            self.record_result(future.result)

    def record_result(self, result: Callable[[], Path]) -> None:
        try:
            folder = result()
            self.last_saved, self.last_error = folder.name, None
            if self.on_saved is not None:
                self.on_saved(folder)
        except OSError as e:
            self.last_error = e
            previous = f"{self.last_saved} is still intact" if self.last_saved else "none is saved yet"
            warn(f"a checkpoint could not be written ({e.strerror or e}): {previous}. Training continues.")

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


class HostSnapshot:
    """A reusable copy of a run's tensors in host memory, allocated once; pinned if the run is on a GPU."""

    def __init__(self, model: Model) -> None:
        self.model = model.clone().to("cpu").requires_grad_(False)
        self.tensors: dict[str, torch.Tensor] = {}

    def copy_from(self, payload: CheckpointPayload) -> tuple[CheckpointPayload, Callable[[], None]]:
        """Start the copy; return the copied payload and a function that waits until the copy is complete."""
        cuda = next(payload.model.parameters()).is_cuda
        if cuda:
            self.pin_memory()
        host_tensors = unique_state_dict(self.model)
        for name, value in unique_state_dict(payload.model).items():
            host_tensors[name].copy_(value, non_blocking=True)
        training = {
            file: {name: self.stage_tensor(f"{file}/{name}", value) for name, value in tensors.items()}
            for file, tensors in payload.training_tensors.items()
        }
        if not cuda:
            return CheckpointPayload(self.model, training), lambda: None
        done = torch.cuda.Event()
        done.record()
        return CheckpointPayload(self.model, training), done.synchronize

    def stage_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self.tensors.get(name)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.tensors[name] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def pin_memory(self) -> None:
        """Pin the model copy's memory, which asynchronous copies from a GPU need; pinned tensors stay as they are."""
        for value in (*self.model.parameters(), *self.model.buffers()):
            if not value.data.is_pinned():
                value.data = value.data.pin_memory()
