"""Adafactor as T5 uses it: second moments by rows and columns, steps in proportion to the weights.

Shazeer and Stern 2018, algorithms 4 and 5, without momentum. Nothing of it is read back from the device, and what has
one shape is moved together: a model has many matrices, and each operation costs a GPU as long as its launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LEAST_SQUARE = 1e-30  # section 6: added to squared gradients
LEAST_SCALE = 1e-3  # a weight as good as 0 still moves
LONGEST = 1.0  # the longest update, as a root mean square
FORGETTING = -0.8  # the share of the newest gradient is the step to this power
AT_ONCE = 2**26  # weights that are moved together at most, for the sake of memory


class Part(NamedTuple):
    """A matrix that a parameter is made of, or a whole vector."""

    weight: Tensor
    grad: Tensor
    step: Tensor  # how many there were, with this one
    means: list[Tensor]  # of squared gradients: by rows and columns, or of a vector as it is


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
        bad = getattr(self, "found_inf", None)  # as AdamW reads it: 1 where this step is to change nothing
        for group in self.param_groups:
            alike: dict[torch.Size, list[Part]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    for part in self.parts(p, p.grad, bad):
                        alike[part.weight.shape].append(part)
            for shape, parts in alike.items():
                most = max(AT_ONCE // shape.numel(), 1)
                for first in range(0, len(parts), most):
                    move(parts[first : first + most], group["lr"], group["weight_decay"], bad)

    def parts(self, p: nn.Parameter, grad: Tensor, bad: Tensor | None) -> Iterator[Part]:
        """What a parameter is made of; this is one step more for it."""
        state, sizes = self.state[p], self.sizes.get(p, (len(p),)) if p.ndim else ()
        if not state:
            state.update(begin(p, sizes))
        state["step"] += 1 if bad is None else 1 - bad
        if p.ndim < 2:
            yield Part(p, grad, state["step"], [state["exp_avg_sq"]])
            return
        rows = (x.split(sizes) for x in (p, grad, state["exp_avg_sq_row"]))
        for weight, its_grad, row, col in zip(*rows, state["exp_avg_sq_col"], strict=True):
            yield Part(weight, its_grad, state["step"], [row, col])


def begin(p: nn.Parameter, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    """What is known of a parameter before the first step."""
    state = {"step": p.new_zeros((), dtype=torch.float32)}
    if p.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(p)}
    assert len(sizes) == 1 or p.ndim == 2, "only matrices are made of several"
    columns = p.shape[1:] if p.ndim == 2 else (len(p), *p.shape[1:-2], p.shape[-1])
    return state | {"exp_avg_sq_row": p.new_zeros(p.shape[:-1]), "exp_avg_sq_col": p.new_zeros(len(sizes), *columns)}


def move(parts: list[Part], lr: float | Tensor, weight_decay: float, bad: Tensor | None) -> None:
    """Move N weights of one shape, each in proportion to its size; updates that are too long are cut."""
    weights, grads = [part.weight for part in parts], torch.stack([part.grad for part in parts])
    newest_N = torch.stack([part.step for part in parts]) ** FORGETTING
    if bad is not None:
        newest_N, lr, grads = (torch.where(bad > 0, 0.0, x) for x in (newest_N, lr, grads))
    square = grads.square() + LEAST_SQUARE
    seen = [square] if weights[0].ndim < 2 else [square.mean(-1), square.mean(-2)]
    means = [remember([part.means[i] for part in parts], new, newest_N) for i, new in enumerate(seen)]
    if len(means) == 1:
        update = grads * means[0].rsqrt()
    else:
        row, col = means
        by_row = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
        update = grads * by_row * col.unsqueeze(-2).rsqrt()
    update = torch.nan_to_num(update) if isinstance(lr, Tensor) else update  # 0 / 0, where a bad step was the first
    root = weights[0].numel() ** 0.5
    cut_N = (update.view(len(parts), -1).norm(dim=1) / (root * LONGEST)).clamp(min=1.0)
    rate_N = lr * (torch.stack(torch._foreach_norm(weights)) / root).clamp(min=LEAST_SCALE)
    update *= of_each(rate_N / cut_N, update)
    if weight_decay:
        update += torch.stack(weights) * of_each(weight_decay * rate_N, update)
    torch._foreach_sub_(weights, list(update))


def remember(means: list[Tensor], new: Tensor, share_N: Tensor) -> Tensor:
    """Running means with this share of what is new, which also are what is known from now on."""
    found = torch.stack(means).lerp_(new, of_each(share_N, new))
    torch._foreach_copy_(means, list(found))
    return found


def of_each(x_N: Tensor, like: Tensor) -> Tensor:
    """Numbers, one for each of N tensors, as they are multiplied with those."""
    return x_N.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
