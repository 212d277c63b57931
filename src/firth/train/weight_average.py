"""Averages of the weights, which are evaluated and saved in place of the weights.

The weights of single steps are noisy: each step follows the gradient of one batch. A mean over many steps cancels the
noise, much as a decayed learning rate does (Polyak & Juditsky 1992).

- `WeightEMA`, exponential: average <- d * average + (1 - d) * weights, after every step. The average of d = 0.999 spans
  about 1,000 steps. Early on d is smaller, min(d, (1 + step) / (10 + step)): else the random initial weights would stay
  in the average.
- `TailAverage`, uniform: the mean of the weights after each of the last steps, a share of the run. It forgets all
  earlier steps, and its span follows the length of the run. Tail averaging has the best rate for least squares (Jain et
  al. 2018); the mean of the latest checkpoints of a language model reaches a loss that the run itself has thousands of
  steps later (LAWA: Kaddour 2022). It gains most where the learning rate is still high: with `constant`, or with `wsd`
  without its decay.

Either costs one float32 copy of the weights, and one pass over them per averaged step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from firth.train.dtensor import copy_into, to_local
from firth.train.recipe import TrainingConfig

EMA_WARMUP_STEPS = 10  # larger values lengthen the phase of small decay at the start


def ema_decay_at(step: int, decay: float) -> float:
    """Return the decay of step 0, 1, 2 ..., warmed up."""
    return min(decay, (1 + step) / (EMA_WARMUP_STEPS + step))


def first_averaged_step(training: TrainingConfig) -> int:
    """Return the first step, from 0, after which a tail average takes the weights; the last step always counts."""
    return min(math.ceil((1 - training.tail_average) * training.max_steps), max(training.max_steps - 1, 0))


class WeightAverage:
    """An average of named tensors, which the optimizer changes in place."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.current = dict(tensors)
        self.averages = {name: value.clone() for name, value in self.current.items()}
        self.count = 0  # steps that are averaged; 0: none yet

    def update(self, step: int, training: TrainingConfig, skipped: Tensor | float = 0.0) -> None:
        """Average in the weights after a step; `skipped` 1 says that they have not changed, and stays on the device."""
        raise NotImplementedError

    @torch.no_grad()
    def mix(self, weight: Tensor | float) -> None:
        """Move the averages towards the weights, by this share of the way."""
        averages, current = ([to_local(t) for t in tensors.values()] for tensors in (self.averages, self.current))
        if isinstance(weight, Tensor):
            weight = weight.to(averages[0].device)  # the CPU, where weights are offloaded
        change = torch._foreach_sub(current, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)

    def load_state(self, averages: Mapping[str, Tensor], count: int = 0) -> None:
        """Resume from the averages of a checkpoint."""
        self.count = count
        copy_tensors(averages, self.averages)

    def apply(self) -> None:
        """Replace the weights by their averages."""
        if self.count:
            copy_tensors(self.averages, self.current)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Replace the weights by their averages inside a `with` block."""
        weights = {name: value.clone() for name, value in self.current.items()} if self.count else {}
        self.apply()
        try:
            yield
        finally:
            if weights:
                copy_tensors(weights, self.current)


class WeightEMA(WeightAverage):
    """The exponential moving average. It starts with the first step."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float) -> None:
        super().__init__(tensors)
        self.decay = decay

    def update(self, step: int, training: TrainingConfig, skipped: Tensor | float = 0.0) -> None:
        """Average in the weights; a skipped step leaves the average as it is."""
        self.count += 1
        self.mix((1 - ema_decay_at(step, self.decay)) * (1 - skipped))


class TailAverage(WeightAverage):
    """The mean of the weights after each of the last steps. A skipped step counts the same weights once more."""

    def update(self, step: int, training: TrainingConfig, skipped: Tensor | float = 0.0) -> None:
        """Average in the weights from the first averaged step on.

        A run that is planned again while it works may put that step behind this one: the average then starts anew.
        """
        if step < first_averaged_step(training):
            self.count = 0
            return
        self.count += 1
        if self.count == 1:  # a copy: rounding must not depend on what the average was before
            copy_tensors(self.current, self.averages)
        else:
            self.mix(1 / self.count)


def make_weight_average(tensors: Mapping[str, Tensor], training: TrainingConfig) -> WeightAverage | None:
    """Return the average that a recipe keeps; None without one."""
    if training.ema_decay:
        return WeightEMA(tensors, training.ema_decay)
    return TailAverage(tensors) if training.tail_average else None


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    assert source.keys() == target.keys(), "both have the same names"
    for name, value in source.items():
        copy_into(target[name], value)
