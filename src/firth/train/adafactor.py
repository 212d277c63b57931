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

SQUARED_GRAD_EPS = 1e-30  # section 6: added to squared gradients
MIN_PARAM_RMS = 1e-3  # a weight as good as 0 still moves
CLIP_THRESHOLD_RMS = 1.0  # the longest update, as a root mean square
DECAY_EXPONENT = -0.8  # the share of the newest gradient is the step to this power
MAX_FUSED_ELEMENTS = 2**26  # weights that are moved together at most, for the sake of memory


class AdafactorSlice(NamedTuple):
    """A matrix that a parameter is made of, or a whole vector."""

    weight: Tensor
    grad: Tensor
    step: Tensor  # how many there were, with this one
    second_moments: list[Tensor]  # of squared gradients: by rows and columns, or of a vector as it is


class Adafactor(torch.optim.Optimizer):
    """The rate of a group is relative: it counts as often as the root mean square of the weights that it moves.

    `row_splits` are the rows of the matrices that a parameter is made of, each of which has a scale and columns of its own.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], row_splits: Mapping[Tensor, tuple[int, ...]]) -> None:
        self.row_splits = row_splits
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all groups."""
        assert closure is None
        bad = getattr(self, "found_inf", None)  # as AdamW reads it: 1 where this step is to change nothing
        for group in self.param_groups:
            alike: dict[torch.Size, list[AdafactorSlice]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    for part in self.iter_slices(p, p.grad, bad):
                        alike[part.weight.shape].append(part)
            for shape, parts in alike.items():
                most = max(MAX_FUSED_ELEMENTS // shape.numel(), 1)
                for first in range(0, len(parts), most):
                    update_slices(parts[first : first + most], group["lr"], group["weight_decay"], bad)

    def iter_slices(self, p: nn.Parameter, grad: Tensor, found_inf: Tensor | None) -> Iterator[AdafactorSlice]:
        """What a parameter is made of; this is one step more for it."""
        state, sizes = self.state[p], self.row_splits.get(p, (len(p),)) if p.ndim else ()
        if not state:
            state.update(init_adafactor_state(p, sizes))
        state["step"] += 1 if found_inf is None else 1 - found_inf
        if p.ndim < 2:
            yield AdafactorSlice(p, grad, state["step"], [state["exp_avg_sq"]])
            return
        rows = (x.split(sizes) for x in (p, grad, state["exp_avg_sq_row"]))
        for weight, its_grad, row, col in zip(*rows, state["exp_avg_sq_col"], strict=True):
            yield AdafactorSlice(weight, its_grad, state["step"], [row, col])


def init_adafactor_state(p: nn.Parameter, row_splits: tuple[int, ...]) -> dict[str, Tensor]:
    """What is known of a parameter before the first step."""
    state = {"step": p.new_zeros((), dtype=torch.float32)}
    if p.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(p)}
    assert len(row_splits) == 1 or p.ndim == 2, "only matrices are made of several"
    columns = p.shape[1:] if p.ndim == 2 else (len(p), *p.shape[1:-2], p.shape[-1])
    return state | {
        "exp_avg_sq_row": p.new_zeros(p.shape[:-1]),
        "exp_avg_sq_col": p.new_zeros(len(row_splits), *columns),
    }


def update_slices(
    slices: list[AdafactorSlice], lr: float | Tensor, weight_decay: float, found_inf: Tensor | None
) -> None:
    """Move N weights of one shape, each in proportion to its size; updates that are too long are cut."""
    weights, grads = [part.weight for part in slices], torch.stack([part.grad for part in slices])
    newest_N = torch.stack([part.step for part in slices]) ** DECAY_EXPONENT
    if found_inf is not None:
        newest_N, lr, grads = (torch.where(found_inf > 0, 0.0, x) for x in (newest_N, lr, grads))
    square = grads.square() + SQUARED_GRAD_EPS
    seen = [square] if weights[0].ndim < 2 else [square.mean(-1), square.mean(-2)]
    means = [
        update_running_means([part.second_moments[i] for part in slices], new, newest_N) for i, new in enumerate(seen)
    ]
    if len(means) == 1:
        update = grads * means[0].rsqrt()
    else:
        row, col = means
        by_row = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
        update = grads * by_row * col.unsqueeze(-2).rsqrt()
    update = torch.nan_to_num(update) if isinstance(lr, Tensor) else update  # 0 / 0, where a bad step was the first
    root = weights[0].numel() ** 0.5
    cut_N = (update.view(len(slices), -1).norm(dim=1) / (root * CLIP_THRESHOLD_RMS)).clamp(min=1.0)
    rate_N = lr * (torch.stack(torch._foreach_norm(weights)) / root).clamp(min=MIN_PARAM_RMS)
    update *= expand_per_tensor(rate_N / cut_N, update)
    if weight_decay:
        update += torch.stack(weights) * expand_per_tensor(weight_decay * rate_N, update)
    torch._foreach_sub_(weights, list(update))


def update_running_means(means: list[Tensor], new: Tensor, weight_N: Tensor) -> Tensor:
    """Running means with this share of what is new, which also are what is known from now on."""
    found = torch.stack(means).lerp_(new, expand_per_tensor(weight_N, new))
    torch._foreach_copy_(means, list(found))
    return found


def expand_per_tensor(x_N: Tensor, like: Tensor) -> Tensor:
    """Numbers, one for each of N tensors, as they are multiplied with those."""
    return x_N.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
