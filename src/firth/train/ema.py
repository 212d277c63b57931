"""Exponential moving average (EMA) of the weights, which is evaluated and saved in place of the weights.

    average <- d * average + (1 - d) * weights, after every step

Averaging cancels the noise of the last steps, much as a decayed learning rate does (Polyak & Juditsky 1992). It costs
one float32 copy of the weights and one pass over them per step. The average of d = 0.999 spans about 1,000 steps. Early
on d is smaller, min(d, (1 + step) / (10 + step)): else the random initial weights would stay in the average.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from firth.train.dtensor import copy_into, to_local

EMA_WARMUP_STEPS = 10  # larger values lengthen the phase of small decay at the start


def ema_decay_at(step: int, decay: float) -> float:
    """Return the decay of step 0, 1, 2 ..., warmed up."""
    return min(decay, (1 + step) / (EMA_WARMUP_STEPS + step))


class WeightEMA:
    """The EMA of named tensors, which the optimizer changes in place."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.current, self.decay = dict(tensors), decay
        self.averages = {name: value.clone() for name, value in self.current.items()}

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor | float = 0.0) -> None:
        """Average in the weights after a step; `skipped` 1 leaves the average as it is and stays on the device."""
        weight = (1 - ema_decay_at(step, self.decay)) * (1 - skipped)
        averages, current = ([to_local(t) for t in tensors.values()] for tensors in (self.averages, self.current))
        if isinstance(weight, Tensor):
            weight = weight.to(averages[0].device)  # the CPU, where weights are offloaded
        change = torch._foreach_sub(current, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)

    def load_state(self, averages: Mapping[str, Tensor]) -> None:
        """Resume from the averages of a checkpoint."""
        copy_tensors(averages, self.averages)

    def apply(self) -> None:
        """Replace the weights by their averages."""
        copy_tensors(self.averages, self.current)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Replace the weights by their averages inside a `with` block."""
        weights = {name: value.clone() for name, value in self.current.items()}
        self.apply()
        try:
            yield
        finally:
            copy_tensors(weights, self.current)


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    assert source.keys() == target.keys(), "both have the same names"
    for name, value in source.items():
        copy_into(target[name], value)
