"""Checkpoints that are written while the training goes on."""

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
    """Writes checkpoints of a run, at most one at a time: the next one waits for the last.

    With `is_async` tensors are copied to the host's memory, and a thread does the rest. A disk that is full or cannot be
    written costs a checkpoint, which is said, and not the run: the last whole one stays, and the next is tried again.
    """

    def __init__(
        self, run_dir: Path | None, recipe: dict[str, Any], save_total_limit: int, model: Model, is_async: bool
    ) -> None:
        self.run_dir, self.recipe, self.save_total_limit = run_dir, recipe, save_total_limit
        self.last_saved: str | None = None  # the newest whole one
        self.last_error: OSError | None = None  # why there is none of the last try
        self.snapshot = HostSnapshot(model) if is_async and run_dir is not None else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[Path] | None = None

    def save(
        self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None] = lambda: None
    ) -> None:
        """Write a checkpoint, or begin to, after what must be done `before_write`."""
        self.wait()
        if self.run_dir is None:
            return
        if self.snapshot is None:
            self.record_result(lambda: self.write(payload, state, before_write))
        else:
            copied, ready = self.snapshot.copy_from(payload)
            now = replace(state)

            def work() -> Path:
                ready()
                return self.write(copied, now, before_write)

            self.pending = self.pool.submit(work)

    def write(self, payload: CheckpointPayload, state: TrainState, before_write: Callable[[], None]) -> Path:
        assert self.run_dir is not None
        before_write()
        return save_checkpoint(self.run_dir, payload, state, self.recipe, self.save_total_limit)

    def poll(self) -> None:
        """Take notice of one that is done by now, and of what went wrong with it."""
        if self.pending is not None and self.pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the last one is written."""
        if self.pending is not None:
            writing, self.pending = self.pending, None
            self.record_result(writing.result)

    def record_result(self, result: Callable[[], Path]) -> None:
        try:
            self.last_saved, self.last_error = result().name, None
        except OSError as e:
            self.last_error = e
            stays = f"{self.last_saved} is whole still" if self.last_saved else "there is none yet"
            warn(f"a checkpoint could not be written ({e.strerror or e}): {stays}, and the run goes on.")

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


class HostSnapshot:
    """A copy of a run's tensors in the host's memory, in places that are made once; pinned where there is a GPU."""

    def __init__(self, model: Model) -> None:
        self.model = model.clone().to("cpu").requires_grad_(False)
        self.tensors: dict[str, torch.Tensor] = {}

    def copy_from(self, payload: CheckpointPayload) -> tuple[CheckpointPayload, Callable[[], None]]:
        """What was kept, copied; and a way to wait until that is done."""
        cuda = next(payload.model.parameters()).is_cuda
        if cuda:
            self.pin_memory()
        mine = unique_state_dict(self.model)
        for name, value in unique_state_dict(payload.model).items():
            mine[name].copy_(value, non_blocking=True)
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
        known = self.tensors.get(name)
        if known is None or known.shape != tensor.shape:
            known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.tensors[name] = known
        return known.copy_(tensor, non_blocking=True)

    def pin_memory(self) -> None:
        """Let a GPU copy to the model by itself, once."""
        for value in (*self.model.parameters(), *self.model.buffers()):
            if not value.data.is_pinned():
                value.data = value.data.pin_memory()
