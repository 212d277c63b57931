"""Replay forward and backward of a micro-batch as one CUDA graph.

Python launches kernels one by one; a small model's kernels finish sooner than Python launches the next ones. A CUDA
graph records all kernels of a forward and backward pass once and replays them with a single launch, so the GPU never
waits for the host. A graph is bound to addresses and shapes, hence the rules here:

- one graph per batch shape, at most `MAX_CUDA_GRAPHS`; batches are copied into tensors at fixed addresses;
- gradients are zeroed in place, never freed (`frees_gradients`);
- when a parameter moves, or starts or stops to require a gradient, all graphs are recorded again;
- dropout draws the same numbers as without a graph: torch seeds each replay from the current generator.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firth.core.console import warn
from firth.models import Model
from firth.objectives import Batch
from firth.objectives.batch import to_host_tensor
from firth.train.compute import ComputeConfig
from firth.train.step_runner import LossFn, StepRunner, metric_means

MAX_CUDA_GRAPHS = 16  # batch shapes with a graph; other shapes run without


@dataclass
class StaticInputs:
    """Inputs of a graph at fixed addresses: a batch on the device, the counts that divide its losses, their scale."""

    batch: Batch
    loss_names: list[str]
    counts: Tensor
    loss_scale: Tensor

    def copy_from(self, batch: Batch, counts: Mapping[str, int], loss_scale: Tensor | None) -> None:
        """Copy the next batch, which has the same shape."""
        for held, array in zip(self.batch, batch, strict=True):
            if isinstance(held, Tensor):
                held.copy_(to_host_tensor(array).pin_memory(), non_blocking=True)
        self.counts.copy_(loss_divisors(self.loss_names, counts).pin_memory(), non_blocking=True)
        self.loss_scale.fill_(1) if loss_scale is None else self.loss_scale.copy_(loss_scale)


class StepOutputs(NamedTuple):
    """Outputs of a graph at fixed addresses, which the next replay overwrites."""

    loss: Tensor
    metrics: dict[str, Tensor]


class CudaGraphStep(StepRunner):
    """Run the first batch of a shape eagerly, record it, and replay it for the next ones."""

    frees_gradients = False

    def __init__(self, model: Model, loss_fn: LossFn, compute: ComputeConfig) -> None:
        super().__init__(model, loss_fn, compute)
        self.stream = torch.cuda.Stream(compute.device)
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, StaticInputs, StepOutputs]] = {}
        self.captured_addresses: list[Any] = []
        self.is_enabled = True
        self.parameters = list(model.parameters())  # listing them takes longer than comparing them

    def forward_backward(
        self,
        batch: Batch,
        counts: Mapping[str, int],
        loss_scale: Tensor | None,
        recurrent_state: AbstractContextManager[None] | None = None,
    ) -> Tensor:
        """As in `StepRunner`. Runs with a recurrent state have no graphs (`cuda_graphs_blocker`)."""
        shape = tuple(a if a is None or isinstance(a, str) else (a.shape, a.dtype) for a in batch)
        if shape in self.graphs and self.captured_addresses == self.tensor_addresses():
            graph, held, outputs = self.graphs[shape]
            held.copy_from(batch, counts, loss_scale)
            graph.replay()
            self.add_metrics(outputs.metrics)
            return outputs.loss
        device, names = self.compute.device, sorted(batch.loss_counts)
        own_scale = torch.ones((), device=device) if loss_scale is None else loss_scale.clone()
        held = StaticInputs(batch.to(device), names, loss_divisors(names, counts).to(device), own_scale)
        now = torch.cuda.current_stream(device)
        self.stream.wait_stream(now)
        with torch.cuda.stream(self.stream):
            outputs = self.run(held)
        now.wait_stream(self.stream)
        self.add_metrics(outputs.metrics)
        if self.is_enabled:
            self.capture(shape, held)
        return outputs.loss

    def run(self, inputs: StaticInputs) -> StepOutputs:
        """Forward and backward, by operations that a graph can record."""
        with self.compute.autocast():
            counts = dict(zip(inputs.loss_names, inputs.counts, strict=True))
            parts = self.loss_fn(inputs.batch)
            shares = [part / counts[name].clamp(min=1) for name, part in parts.items() if "/" not in name]
            loss = torch.stack(shares).sum()
        metrics = metric_means(parts, counts)
        (loss * inputs.loss_scale).backward()
        return StepOutputs(loss.detach(), metrics)

    def capture(self, shape: Any, inputs: StaticInputs) -> None:
        """Record the kernels of a batch shape; if that fails, continue without graphs."""
        if self.captured_addresses != (addresses := self.tensor_addresses()):
            self.graphs.clear()
            self.captured_addresses = addresses
        if len(self.graphs) == MAX_CUDA_GRAPHS:
            return
        pool = next((graph.pool() for graph, _, _ in self.graphs.values()), None) or torch.cuda.graph_pool_handle()
        graph, now = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.compute.device)
        torch.cuda.empty_cache()  # a graph has its own memory pool; free what the first batch used
        try:
            # set the stream again: after a failed capture torch leaves the capture stream current
            with torch.cuda.stream(now), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                outputs = self.run(inputs)
        except RuntimeError as e:
            self.disable(str(e).partition("\n")[0])
            clean_up_failed_capture(pool, self.stream, self.compute.device)
            return
        self.graphs[shape] = graph, inputs, outputs

    def disable(self, reason: str) -> None:
        """Continue without graphs, and free their memory."""
        self.is_enabled = False
        self.graphs.clear()
        warn(f"CUDA graphs disabled from here on: {reason}")

    def end_micro_batch(self, index: int, num_micro_batches: int, keep_in_replica: bool) -> None:
        """Graphs add to gradients at fixed addresses; nothing to do."""

    def release_memory(self) -> bool:
        if not self.graphs:  # each holds as much memory as a batch
            return False
        self.disable("memory is short")
        return True

    def tensor_addresses(self) -> list[Any]:
        """Addresses of weights and gradients, and which parameters require one."""
        gradients = [0 if p.grad is None else p.grad.data_ptr() for p in self.parameters]
        return [*gradients, *((p.data_ptr(), p.requires_grad) for p in self.parameters)]


def clean_up_failed_capture(pool: Any, stream: Any, device: torch.device) -> None:
    """Undo a failed capture: release its memory pool, and reset torch's generator, which is still in capture."""
    index = torch.cuda.current_device()
    with suppress(RuntimeError):  # an out-of-memory error has released the pool already
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):  # a successful capture
            torch.zeros((), device=device)


def loss_divisors(names: list[str], counts: Mapping[str, int]) -> Tensor:
    return torch.tensor([float(counts[name]) for name in names])
