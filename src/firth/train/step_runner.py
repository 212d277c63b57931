"""Forward and backward of one micro-batch: the part of a training step that can be executed in several ways.

A step (`train/step.py`) is always the same: for each micro-batch compute the loss and add its gradients, then clip,
then update. How a micro-batch is executed differs, and each way is a `StepRunner`:

- `StepRunner`: call the loss function (compiled or not) and `backward()`.
- `CudaGraphStep` (`train/cuda_graphs.py`): replay forward and backward as one CUDA graph.
- `BF16Replica` (`train/bf16_replica.py`): run a bf16 copy of the model; the model keeps the fp32 master weights.

The step calls the methods below in this order and knows nothing else about its runner:
`begin_step`, then for each micro-batch `forward_backward` and `end_micro_batch`, then `pending_gradients` (to clip),
`end_step` after the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from firth.models import Model
from firth.objectives import Batch
from firth.train.compute import ComputeConfig

# A batch -> sums of losses by the name of the count that divides each, and sums to log by NAME/COUNT (`Model.losses`).
LossFn = Callable[[Any], dict[str, Tensor]]


class StepRunner:
    """Run a loss function eagerly or compiled, and leave the gradients in `model`."""

    frees_gradients = True  # set gradients to None after an update; a CUDA graph needs them at fixed addresses

    def __init__(self, model: Model, loss_fn: LossFn, compute: ComputeConfig) -> None:
        self.model, self.loss_fn, self.compute = model, loss_fn, compute
        self.metric_names: list[str] = []
        self.metrics = torch.empty(0, device=compute.device)  # of the step so far, one for each name

    @property
    def compute_model(self) -> Model:
        """The model whose weights forward and backward read."""
        return self.model

    def begin_step(self) -> None:
        """Prepare for the micro-batches of a step."""

    def forward_backward(
        self,
        batch: Batch,
        counts: Mapping[str, int],
        loss_scale: Tensor | None,
        recurrent_state: AbstractContextManager[None] | None = None,
    ) -> Tensor:
        """Add the gradients of a micro-batch; return its share of the step's loss.

        `counts` are the targets of the whole step. The forward pass runs inside `recurrent_state`.
        """
        if self.compute.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with self.compute.autocast(), recurrent_state or nullcontext():
            parts = self.loss_fn(batch.to(self.compute.device))
            loss = sum_of_means(parts, counts)
        self.add_metrics(metric_means(parts, counts))
        (loss if loss_scale is None else loss * loss_scale).backward()
        return loss.detach()

    def add_metrics(self, means: Mapping[str, Tensor]) -> None:
        """Add a micro-batch's share of the metrics, on the device. All micro-batches have the same ones."""
        if means:
            added = torch.stack(list(means.values()))
            self.metrics = self.metrics + added if self.metric_names else added
            self.metric_names = list(means)

    def reset_metrics(self) -> None:
        self.metric_names, self.metrics = [], self.metrics[:0]

    def end_micro_batch(self, index: int, num_micro_batches: int, keep_in_replica: bool) -> None:
        """Make the gradients so far survive the next micro-batch.

        A compiled step that torch replays as a CUDA graph overwrites its gradients: copy the first ones.
        """
        if self.compute.cuda_graphs and index == 0 and num_micro_batches > 1:
            for p in self.model.parameters():
                if p.grad is not None:
                    p.grad = p.grad.clone()

    def pending_gradients(self) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
        """Map parameters to replica parameters whose gradients are not yet in the model."""
        return {}

    def end_step(self, replica_updated: bool) -> None:
        """Note an optimizer update, which may have written to the replica too."""

    def release_memory(self) -> bool:
        """Free memory that the runner holds, after an out-of-memory error; return whether there was any."""
        return False

    def zero_gradients(self) -> None:
        """Drop all gradients, so that their memory is free."""
        for model in {self.model, self.compute_model}:
            model.zero_grad(set_to_none=True)


def sum_of_means(parts: Mapping[str, Any], counts: Mapping[str, int]) -> Any:
    """Divide each part of a loss by its own count and add them up."""
    return sum(part / max(counts[name], 1) for name, part in parts.items() if "/" not in name)


def metric_means(parts: Mapping[str, Any], divisors: Mapping[str, Any]) -> dict[str, Any]:
    """Divide each figure NAME/COUNT by the divisor of its count; return them by NAME.

    Of tensors, a figure of nothing is 0 / 0 = NaN, which no log shows.
    """
    names = {name: name.rpartition("/") for name in parts if "/" in name}
    return {metric: parts[name] / divisors[count] for name, (metric, _, count) in names.items()}
