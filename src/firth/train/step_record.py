"""What a launched step leaves for the log: its loss is read later, while the device computes the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from firth.train.compute import ComputeConfig
from firth.train.guard import StepOutcome
from firth.train.log import TextProgress


class StepRecord(NamedTuple):
    """A step that has been launched; `read_values` waits for its outcome and its metrics."""

    step: int
    tokens: int
    targets: int
    learning_rate: float
    data_hash: int
    read_values: Callable[[], list[float]]
    metric_names: list[str]
    weight_names: list[str]
    is_logged: bool
    text_progress: TextProgress | None = None
    mask_rate: float | None = None

    def read(self) -> tuple[StepOutcome, dict[str, float], dict[str, float]]:
        """Return loss, gradient norm and skip flag; losses and accuracies that the loss consists of; weights."""
        values, size = self.read_values(), len(StepOutcome._fields)
        end = size + len(self.metric_names)
        named = zip(self.metric_names, values[size:end], strict=True)
        metrics = {name: value for name, value in named if math.isfinite(value)}  # NaN: the mean of nothing
        return StepOutcome(*values[:size]), metrics, dict(zip(self.weight_names, values[end:], strict=True))

    def log_entry(
        self, outcome: StepOutcome, metrics: Mapping[str, float], weights: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the line of log.jsonl. Equal `data` in two logs means that both runs read the same batches so far."""
        numbers = {
            "loss": outcome.loss,
            **metrics,
            "learning_rate": self.learning_rate,
            "tokens": self.tokens,
            "targets": self.targets,
            **(self.text_progress._asdict() if self.text_progress else {}),
            **({} if self.mask_rate is None else {"mask_rate": self.mask_rate}),
            "grad_norm": outcome.grad_norm,
            **weights,
        }
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        skipped = {"skipped": outcome.skip_reason} if outcome.was_skipped else {}
        return {"step": self.step, **finite, "data": f"{self.data_hash:08x}", **skipped}


def read_async(values: torch.Tensor) -> Callable[[], Any]:
    """Start copying `values` to the host; the returned function waits for this copy and returns a list.

    The event marks this point of the CUDA stream, so the wait does not include work launched later.
    """
    if not values.is_cuda:
        return values.tolist
    host_copy, done = torch.empty(values.shape, dtype=values.dtype, pin_memory=True), torch.cuda.Event()
    host_copy.copy_(values, non_blocking=True)
    done.record()

    def read() -> Any:
        done.synchronize()
        return host_copy.tolist()

    return read


def defers_loss_reads(compute: ComputeConfig) -> bool:
    """Whether losses are read one step late. A GPU runs asynchronously and would idle while the host reads."""
    return compute.device.type == "cuda"
