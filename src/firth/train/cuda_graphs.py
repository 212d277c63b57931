"""Steps that are not compiled as a whole, replayed as CUDA graphs: the GPU then never waits for Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firth.core.console import warn
from firth.models import Model
from firth.objectives import Batch
from firth.train.compute import ComputeConfig

LossFn = Callable[[Any], dict[str, Tensor]]
MAX_CUDA_GRAPHS = 16  # shapes that have a graph; others are computed as ever


@dataclass
class StaticInputs:
    """What a graph reads, at places that stay: a batch on the device, what its losses are divided by, their scale."""

    batch: Batch
    loss_names: list[str]
    counts: Tensor
    loss_scale: Tensor

    def copy_from(self, batch: Batch, counts: Mapping[str, int], loss_scale: Tensor | None) -> None:
        """Put in the next ones, which have the same shape."""
        device = self.counts.device
        for held, new in zip(self.batch, batch.to(device), strict=True):
            if held is not None:
                held.copy_(new)
        self.counts.copy_(loss_divisors(self.loss_names, counts).pin_memory(), non_blocking=True)
        self.loss_scale.fill_(1) if loss_scale is None else self.loss_scale.copy_(loss_scale)


class CudaGraphStep:
    """The losses of a model, and a graph for each shape of a batch that adds up loss and gradients.

    The first batch of a shape is computed as ever, then its work is recorded. A graph reads and writes weights and
    gradients where they lay then: where one of them lies elsewhere now, or has begun or ceased to learn, all is
    recorded anew. Dropout draws what it would without graphs: each replay begins with the seed of its step.
    """

    def __init__(self, model: Model, loss_fn: LossFn, compute: ComputeConfig) -> None:
        self.model, self.loss_fn, self.compute = model, loss_fn, compute
        self.stream = torch.cuda.Stream(compute.device)
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, StaticInputs, Tensor]] = {}
        self.captured_addresses: list[Any] = []
        self.is_enabled = True

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        return self.loss_fn(batch)

    def accumulate_gradients(self, batch: Batch, counts: Mapping[str, int], loss_scale: Tensor | None) -> Tensor:
        """The loss of a micro-batch, whose gradients are added to those that are there."""
        shape = tuple(None if a is None else (a.shape, a.dtype) for a in batch)
        if shape in self.graphs and self.captured_addresses == self.tensor_addresses():
            graph, held, loss = self.graphs[shape]
            held.copy_from(batch, counts, loss_scale)
            graph.replay()
            return loss
        device, names = self.compute.device, sorted(batch.loss_counts)
        own_scale = torch.ones((), device=device) if loss_scale is None else loss_scale.clone()
        held = StaticInputs(batch.to(device), names, loss_divisors(names, counts).to(device), own_scale)
        now = torch.cuda.current_stream(device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            loss = self.forward_backward(held)
        now.wait_stream(self.stream)
        if self.is_enabled:
            self.capture(shape, held)
        return loss

    def forward_backward(self, inputs: StaticInputs) -> Tensor:
        with self.compute.autocast():
            counts = dict(zip(inputs.loss_names, inputs.counts, strict=True))
            loss = torch.stack([part / counts[name] for name, part in self.loss_fn(inputs.batch).items()]).sum()
        (loss * inputs.loss_scale).backward()
        return loss.detach()

    def capture(self, shape: Any, inputs: StaticInputs) -> None:
        """Record what the first batch of a shape did. Where that cannot be, all goes on without."""
        if self.captured_addresses != (places := self.tensor_addresses()):
            self.graphs.clear()
            self.captured_addresses = places
        if len(self.graphs) == MAX_CUDA_GRAPHS:
            return
        pool = next((graph.pool() for graph, _, _ in self.graphs.values()), None) or torch.cuda.graph_pool_handle()
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.compute.device)
        torch.cuda.empty_cache()  # a graph has memory of its own, and what the first batch took is free again
        try:
            # `now` again, where it breaks off: torch leaves the other one on
            with torch.cuda.stream(now), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                loss = self.forward_backward(inputs)
        except RuntimeError as e:
            self.disable(str(e).partition("\n")[0])
            self.clean_up_failed_capture(pool)
            return
        self.graphs[shape] = graph, inputs, loss

    def disable(self, reason: str) -> None:
        """Go on without graphs, and give back what they hold."""
        self.is_enabled = False
        self.graphs.clear()
        warn(f"the steps are not replayed as CUDA graphs from here on: {reason}")

    def clean_up_failed_capture(self, pool: Any) -> None:
        """Undo what a recording that broke off has left: memory that is its own, and a generator that takes all that
        is drawn for part of it.
        """
        device = torch.cuda.current_device()
        with suppress(RuntimeError):  # nothing is left where it broke off for want of memory
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):  # one that does not break off
                torch.zeros((), device=self.compute.device)

    def tensor_addresses(self) -> list[Any]:
        """Where weights and gradients lie, and what learns."""
        parameters = list(self.model.parameters())
        gradients = [0 if p.grad is None else p.grad.data_ptr() for p in parameters]
        return [*gradients, *((p.data_ptr(), p.requires_grad) for p in parameters)]


def loss_divisors(names: list[str], counts: Mapping[str, int]) -> Tensor:
    return torch.tensor([float(max(counts[name], 1)) for name in names])
