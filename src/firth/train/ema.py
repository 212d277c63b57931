"""A running mean of the weights, which is evaluated and kept in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from firth.train.dtensor import copy_into, to_local

EMA_WARMUP_STEPS = 10  # at the start it forgets sooner, as if it had seen so many steps: the first weights are random


def ema_decay_at(step: int, decay: float) -> float:
    """How much of the mean is kept at step 0, 1, 2 ..."""
    return min(decay, (1 + step) / (EMA_WARMUP_STEPS + step))


class WeightEMA:
    """The exponential moving average of some tensors, which are changed in place by someone else."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.current, self.decay = dict(tensors), decay
        self.averages = {name: value.clone() for name, value in self.current.items()}

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor | float = 0.0) -> None:
        """Take in the weights after a step, unless it was `skipped`: 1 or 0, on the device, and never read."""
        new = (1 - ema_decay_at(step, self.decay)) * (1 - skipped)
        mean, current = ([to_local(value) for value in some.values()] for some in (self.averages, self.current))
        if isinstance(new, Tensor):
            new = new.to(mean[0].device)  # where weights are kept elsewhere than they are computed with
        change = torch._foreach_sub(current, mean)
        torch._foreach_mul_(change, new)
        torch._foreach_add_(mean, change)

    def load_state(self, mean: Mapping[str, Tensor]) -> None:
        """Go on from a mean that was kept."""
        copy_tensors(mean, self.averages)

    def apply(self) -> None:
        """Take the mean for good."""
        copy_tensors(self.averages, self.current)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Have the mean in place of the weights for a while."""
        own = {name: value.clone() for name, value in self.current.items()}
        self.apply()
        try:
            yield
        finally:
            copy_tensors(own, self.current)


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    assert source.keys() == target.keys(), "the same weights"
    for name, value in source.items():
        copy_into(target[name], value)
