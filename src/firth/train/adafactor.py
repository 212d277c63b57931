"""Adafactor as T5 uses it: second moments by rows and columns, steps in proportion to the weights.

Shazeer and Stern 2018, algorithms 4 and 5, without momentum. Nothing of it is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

LEAST_SQUARE = 1e-30  # section 6: added to squared gradients
LEAST_SCALE = 1e-3  # a weight as good as 0 still moves
LONGEST = 1.0  # the longest update, as a root mean square
FORGETTING = -0.8  # the share of the newest gradient is the step to this power


class Adafactor(torch.optim.Optimizer):
    """The rate of a group is relative: it counts as often as the root mean square of the weights that it moves.

    `sizes` are the rows of the matrices that a parameter is made of, each of which has a scale and columns of its own.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], sizes: Mapping[Tensor, tuple[int, ...]]) -> None:
        self.sizes = sizes
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all groups."""
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, group["lr"], group["weight_decay"])

    def move(self, p: nn.Parameter, grad: Tensor, lr: float | Tensor, weight_decay: float) -> None:
        state, sizes = self.state[p], self.sizes.get(p, (len(p),)) if p.ndim else ()
        if not state:
            state.update(begin(p, sizes))
        bad = getattr(self, "found_inf", None)  # as AdamW reads it: 1 where this step is to change nothing
        if bad is None:
            state["step"] += 1
            newest = state["step"] ** FORGETTING
        else:
            state["step"] += 1 - bad
            newest = torch.where(bad > 0, 0.0, state["step"] ** FORGETTING)
            lr, grad = torch.where(bad > 0, 0.0, lr), torch.where(bad > 0, 0.0, grad)
        if p.ndim < 2:
            mean = state["exp_avg_sq"].lerp_(grad.square() + LEAST_SQUARE, newest)
            shift(p, grad * mean.rsqrt(), lr, weight_decay)
            return
        first = 0
        for i, size in enumerate(sizes):
            rows = slice(first, first + size)
            square = grad[rows].square() + LEAST_SQUARE
            row = state["exp_avg_sq_row"][rows].lerp_(square.mean(-1), newest)
            col = state["exp_avg_sq_col"][i].lerp_(square.mean(-2), newest)
            by_row = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            shift(p[rows], grad[rows] * by_row * col.unsqueeze(-2).rsqrt(), lr, weight_decay)
            first += size


def begin(p: nn.Parameter, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """What is known of a parameter before the first step."""
    state = {"step": p.new_zeros((), dtype=torch.float32)}
    if p.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(p)}
    assert len(sizes) == 1 or p.ndim == 2, "only matrices are made of several"
    columns = p.shape[1:] if p.ndim == 2 else (len(p), *p.shape[1:-2], p.shape[-1])
    return state | {"exp_avg_sq_row": p.new_zeros(p.shape[:-1]), "exp_avg_sq_col": p.new_zeros(len(sizes), *columns)}


def shift(part: Tensor, update: Tensor, lr: float | Tensor, weight_decay: float) -> None:
    """Move some weights in proportion to their size; updates that are too long are cut."""
    rate = lr * root_mean_square(part).clamp(min=LEAST_SCALE)
    update = torch.nan_to_num(update) if isinstance(lr, Tensor) else update  # 0 / 0, where a bad step was the first
    update = update / (root_mean_square(update) / LONGEST).clamp(min=1.0)
    part.sub_(part * (weight_decay * rate)).sub_(update * rate)


def root_mean_square(x: Tensor) -> Tensor:
    return x.norm() / x.numel() ** 0.5
