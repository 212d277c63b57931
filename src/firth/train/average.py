"""A running mean of the weights, which is evaluated and kept in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from firth.train.parts import fill, local

SOON = 10  # at the start it forgets sooner, as if it had seen so many steps: the first weights are random


def decay_at(step: int, decay: float) -> float:
    """How much of the mean is kept at step 0, 1, 2 ..."""
    return min(decay, (1 + step) / (SOON + step))


class Average:
    """The exponential moving average of some tensors, which are changed in place by someone else."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        self.current, self.decay = dict(tensors), decay
        self.mean = {name: value.clone() for name, value in self.current.items()}

    @torch.no_grad()
    def update(self, step: int, skipped: Tensor | float = 0.0) -> None:
        """Take in the weights after a step, unless it was `skipped`: 1 or 0, on the device, and never read."""
        new = (1 - decay_at(step, self.decay)) * (1 - skipped)
        mean, current = ([local(value) for value in some.values()] for some in (self.mean, self.current))
        if isinstance(new, Tensor):
            new = new.to(mean[0].device)  # where weights are kept elsewhere than they are computed with
        change = torch._foreach_sub(current, mean)
        torch._foreach_mul_(change, new)
        torch._foreach_add_(mean, change)

    def load(self, mean: Mapping[str, Tensor]) -> None:
        """Go on from a mean that was kept."""
        copy(mean, self.mean)

    def put(self) -> None:
        """Take the mean for good."""
        copy(self.mean, self.current)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the mean in place of the weights for a while."""
        own = {name: value.clone() for name, value in self.current.items()}
        self.put()
        try:
            yield
        finally:
            copy(own, self.current)


@torch.no_grad()
def copy(source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    assert source.keys() == into.keys(), "the same weights"
    for name, value in source.items():
        fill(into[name], value)
