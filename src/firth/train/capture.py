"""Steps that are not compiled as a whole, replayed as CUDA graphs: the GPU then never waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firth.console import warn
from firth.models import Model
from firth.objectives import Batch
from firth.train.device import Machine

Losses = Callable[[Any], dict[str, Tensor]]
MOST = 16  # shapes that have a graph; others are computed as ever


@dataclass
class Held:
    """What a graph reads, at places that stay: a batch on the device, what its losses are divided by, their scale."""

    batch: Batch
    names: list[str]
    counts: Tensor
    scale: Tensor

    def fill(self, batch: Batch, counts: Mapping[str, int], scale: Tensor | None) -> None:
        """Put in the next ones, which have the same shape."""
        device = self.counts.device
        for held, new in zip(self.batch, batch.to(device), strict=True):
            if held is not None:
                held.copy_(new)
        self.counts.copy_(divisors(self.names, counts).pin_memory(), non_blocking=True)
        self.scale.fill_(1) if scale is None else self.scale.copy_(scale)


class Captured:
    """The losses of a model, and a graph for each shape of a batch that adds up loss and gradients.

    The first batch of a shape is computed as ever, then its work is recorded. A graph reads and writes weights and
    gradients where they lay then: where one of them lies elsewhere now, or has begun or ceased to learn, all is
    recorded anew. Dropout draws what it would without graphs: each replay begins with the seed of its step.
    """

    def __init__(self, model: Model, losses: Losses, machine: Machine) -> None:
        self.model, self.losses, self.machine = model, losses, machine
        self.stream = torch.cuda.Stream(machine.device)
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Held, Tensor]] = {}
        self.places: list[Any] = []
        self.works = True

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        return self.losses(batch)

    def add_gradients(self, batch: Batch, counts: Mapping[str, int], scale: Tensor | None) -> Tensor:
        """The loss of a micro-batch, whose gradients are added to those that are there."""
        shape = tuple(None if a is None else (a.shape, a.dtype) for a in batch)
        if shape in self.graphs and self.places == self.where():
            graph, held, loss = self.graphs[shape]
            held.fill(batch, counts, scale)
            graph.replay()
            return loss
        device, names = self.machine.device, sorted(batch.counts)
        own_scale = torch.ones((), device=device) if scale is None else scale.clone()
        held = Held(batch.to(device), names, divisors(names, counts).to(device), own_scale)
        now = torch.cuda.current_stream(device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            loss = self.compute(held)
        now.wait_stream(self.stream)
        if self.works:
            self.record(shape, held)
        return loss

    def compute(self, held: Held) -> Tensor:
        with self.machine.precision():
            counts = dict(zip(held.names, held.counts, strict=True))
            loss = torch.stack([part / counts[name] for name, part in self.losses(held.batch).items()]).sum()
        (loss * held.scale).backward()
        return loss.detach()

    def record(self, shape: Any, held: Held) -> None:
        """Record what the first batch of a shape did. Where that cannot be, all goes on without."""
        if self.places != (places := self.where()):
            self.graphs.clear()
            self.places = places
        if len(self.graphs) == MOST:
            return
        pool = next((graph.pool() for graph, _, _ in self.graphs.values()), None) or torch.cuda.graph_pool_handle()
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.machine.device)
        torch.cuda.empty_cache()  # a graph has memory of its own, and what the first batch took is free again
        try:
            # `now` again, where it breaks off: torch leaves the other one on
            with torch.cuda.stream(now), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                loss = self.compute(held)
        except RuntimeError as e:
            self.stop(str(e).partition("\n")[0])
            self.mend(pool)
            return
        self.graphs[shape] = graph, held, loss

    def stop(self, why: str) -> None:
        """Go on without graphs, and give back what they hold."""
        self.works = False
        self.graphs.clear()
        warn(f"the steps are not replayed as CUDA graphs from here on: {why}")

    def mend(self, pool: Any) -> None:
        """Undo what a recording that broke off has left: memory that is its own, and a generator that takes all that
        is drawn for part of it.
        """
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # nothing is left where it broke off for want of memory
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):  # one that does not break off
                torch.zeros((), device=self.machine.device)

    def where(self) -> list[Any]:
        """Where weights and gradients lie, and what learns."""
        parameters = list(self.model.parameters())
        gradients = [0 if p.grad is None else p.grad.data_ptr() for p in parameters]
        return [*gradients, *((p.data_ptr(), p.requires_grad) for p in parameters)]


def divisors(names: list[str], counts: Mapping[str, int]) -> Tensor:
    return torch.tensor([float(max(counts[name], 1)) for name in names])
