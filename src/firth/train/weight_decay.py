"""Weight decay: how much, in which step, and of which weights.

Decoupled weight decay shrinks a weight beside the update of its gradient (Loshchilov & Hutter 2019):

    w <- (1 - rate * decay) * w - rate * update

Written like this, decay follows the schedule of the learning rate: hardly any in the warm-up and at the end. Weights
settle where decay balances the updates, over about 1 / (rate * decay) steps. `weight_decay_schedule` chooses:

- `learning-rate`: as above.
- `constant`: the same shrinking, peak rate * decay, in every step. Then weights keep shrinking when the rate falls
  (independent weight decay: Wortsman et al. 2023, section 3.2.2).
- `to-zero`: as above, times a line from 1 at the first step to 0 at the last. The last steps, whose updates are small,
  then keep what was learned.

`cautious_weight_decay` leaves out the weights that their update moves away from 0: the decay would work against the
gradient there (Chen et al. 2025, "Cautious Weight Decay", algorithm 1). The fused optimizers do not tell their update,
so it is read from the weights: a copy before the step, the difference after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from firth.train.dtensor import to_local
from firth.train.recipe import TrainingConfig


def weight_decay_factor_at(step: int, training: TrainingConfig, learning_rate: float) -> float:
    """Return the factor of the recipe's weight decay at step 0, 1, 2 ..., which is multiplied by the learning rate.

    >>> rise, last = TrainingConfig(learning_rate=0.1, weight_decay_schedule="constant"), dict(max_steps=4)
    >>> weight_decay_factor_at(0, rise, 0.05), weight_decay_factor_at(0, rise, 0.1)
    (2.0, 1.0)
    >>> fall = TrainingConfig(max_steps=4, weight_decay_schedule="to-zero")
    >>> [weight_decay_factor_at(step, fall, 0.1) for step in range(4)]
    [1.0, 0.75, 0.5, 0.25]
    """
    if training.weight_decay_schedule == "constant":
        return training.learning_rate / learning_rate if learning_rate else 1.0
    if training.weight_decay_schedule == "to-zero" and training.max_steps:
        return max(1 - step / training.max_steps, 0.0)
    return 1.0


def schedule_weight_decay(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the weight decay of each parameter group to the recipe's, times a factor."""
    for group in optimizer.param_groups:
        if "initial_weight_decay" in group:
            group["weight_decay"] = factor * group["initial_weight_decay"]


@torch.no_grad()
def shrink_towards_zero(weights: list[torch.Tensor], before: list[torch.Tensor], amount: float) -> None:
    """Take `amount` times their values `before` from the weights that have moved towards 0 since."""
    for weight, old in zip(weights, before, strict=True):
        weight.sub_(torch.where((weight - old) * old < 0, amount * old, 0.0))


@contextmanager
def cautious_decay(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Decay the weights after the optimizer step inside a `with` block: those that the step has moved towards 0.

    A skipped step has moved none.
    """
    groups = [group for group in optimizer.param_groups if group["weight_decay"]]
    decays = [group["weight_decay"] for group in groups]
    weights = [[to_local(p.detach()) for p in group["params"]] for group in groups]
    before = [[weight.clone() for weight in own] for own in weights]
    for group in groups:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, decay in zip(groups, decays, strict=True):
            group["weight_decay"] = decay
    for group, own, old in zip(groups, weights, before, strict=True):
        shrink_towards_zero(own, old, group["lr"] * group["weight_decay"])
