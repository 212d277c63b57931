"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from firth.console import warn
from firth.models import Model
from firth.models.weights import own_state
from firth.train.checkpoint import Kept, State, save_checkpoint


class Writer:
    """Writes checkpoints of a run, at most one at a time: the next one waits for the last.

    With `beside` tensors are copied to the host's memory, and a thread does the rest. A disk that is full or cannot be
    written costs a checkpoint, which is said, and not the run: the last whole one stays, and the next is tried again.
    """

    def __init__(self, run: Path | None, recipe: dict[str, Any], keep: int, model: Model, beside: bool) -> None:
        self.run, self.recipe, self.keep = run, recipe, keep
        self.saved: str | None = None  # the newest whole one
        self.failed: OSError | None = None  # why there is none of the last try
        self.twin = Twin(model) if beside and run is not None else None
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[Path] | None = None

    def save(self, kept: Kept, state: State, first: Callable[[], None] = lambda: None) -> None:
        """Write a checkpoint, or begin to, after what must be done `first`."""
        self.wait()
        if self.run is None:
            return
        if self.twin is None:
            self.settle(lambda: self.write(kept, state, first))
        else:
            copied, ready = self.twin.copy(kept)
            now = replace(state)

            def work() -> Path:
                ready()
                return self.write(copied, now, first)

            self.writing = self.pool.submit(work)

    def write(self, kept: Kept, state: State, first: Callable[[], None]) -> Path:
        assert self.run is not None
        first()
        return save_checkpoint(self.run, kept, state, self.recipe, self.keep)

    def look(self) -> None:
        """Take notice of one that is done by now, and of what went wrong with it."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Until the last one is written."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            self.settle(writing.result)

    def settle(self, result: Callable[[], Path]) -> None:
        try:
            self.saved, self.failed = result().name, None
        except OSError as e:
            self.failed = e
            stays = f"{self.saved} is whole still" if self.saved else "there is none yet"
            warn(f"a checkpoint could not be written ({e.strerror or e}): {stays}, and the run goes on.")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()


class Twin:
    """A copy of a run's tensors in the host's memory, in places that are made once; pinned where there is a GPU."""

    def __init__(self, model: Model) -> None:
        self.model = model.twin().to("cpu").requires_grad_(False)
        self.tensors: dict[str, torch.Tensor] = {}

    def copy(self, kept: Kept) -> tuple[Kept, Callable[[], None]]:
        """What was kept, copied; and a way to wait until that is done."""
        cuda = next(kept.model.parameters()).is_cuda
        if cuda:
            self.pin()
        mine = own_state(self.model)
        for name, value in own_state(kept.model).items():
            mine[name].copy_(value, non_blocking=True)
        training = {
            file: {name: self.place(f"{file}/{name}", value) for name, value in tensors.items()}
            for file, tensors in kept.training.items()
        }
        if not cuda:
            return Kept(self.model, training), lambda: None
        done = torch.cuda.Event()
        done.record()
        return Kept(self.model, training), done.synchronize

    def place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        known = self.tensors.get(name)
        if known is None or known.shape != value.shape:
            known = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self.tensors[name] = known
        return known.copy_(value, non_blocking=True)

    def pin(self) -> None:
        """Let a GPU copy to the model by itself, once."""
        for value in (*self.model.parameters(), *self.model.buffers()):
            if not value.data.is_pinned():
                value.data = value.data.pin_memory()
