"""Adafactor as T5 uses it: Adam with factored second moments and updates relative to the weights.

Adam stores a second moment per weight. Adafactor (Shazeer & Stern 2018) stores only the running means R of the squared
gradient's rows and C of its columns: A + B numbers for an A x B matrix in place of A * B. Their outer product over the
mean of R is the best rank-1 estimate of the matrix (section 3; least generalised KL divergence). Per step t:

1. second moments: weight of the newest gradient t^-0.8, so no bias correction is needed (section 7.2);
2. update U = G / sqrt(R C^T / mean(R)); vectors keep their whole second moment;
3. update clipping: divide U by max(1, RMS(U) / 1.0), since stale second moments give updates that are too large
   (section 6);
4. relative step size: W <- W - lr * max(RMS(W), 1e-3) * U (section 8). Without momentum, as in algorithms 4 and 5.

Optimizer state is well under 1% of AdamW's. The code never reads a value back from the device. It stacks matrices of
one shape: a model has many small ones, and on a GPU the kernel launches would dominate.

N slices of one shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SQUARED_GRAD_EPS = 1e-30  # epsilon 1: added to squared gradients
MIN_PARAM_RMS = 1e-3  # epsilon 2: lower bound of RMS(W), so that weights near 0 still change
CLIP_THRESHOLD_RMS = 1.0  # d: largest RMS of an update
DECAY_EXPONENT = -0.8  # the newest gradient has weight t ** DECAY_EXPONENT
MAX_FUSED_ELEMENTS = 2**26  # elements stacked in one update at most: bounds the temporary memory


class AdafactorSlice(NamedTuple):
    """One matrix of a parameter that may concatenate several, or a whole vector."""

    weight: Tensor
    grad: Tensor
    step: Tensor  # () the number of this step, from 1
    second_moments: list[Tensor]  # [row means, column means] of squared gradients; [all of them] for a vector


class Adafactor(torch.optim.Optimizer):
    """Adafactor whose learning rate is relative to the RMS of each weight matrix.

    `row_splits` gives the row counts of the matrices that a parameter concatenates (query, key, value). Each has its
    own RMS and column moments. A parameter that it does not list is one matrix.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], row_splits: Mapping[Tensor, tuple[int, ...]]) -> None:
        self.row_splits = row_splits
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameter groups."""
        assert closure is None
        found_inf = getattr(self, "found_inf", None)  # as in torch's AdamW: 1 skips the step, on the device
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[AdafactorSlice]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    for part in self.iter_slices(p, p.grad, found_inf):
                        by_shape[part.weight.shape].append(part)
            for shape, parts in by_shape.items():
                limit = max(MAX_FUSED_ELEMENTS // shape.numel(), 1)
                for first in range(0, len(parts), limit):
                    update_slices(parts[first : first + limit], group["lr"], group["weight_decay"], found_inf)

    def iter_slices(self, p: nn.Parameter, grad: Tensor, found_inf: Tensor | None) -> Iterator[AdafactorSlice]:
        """Advance the step of a parameter and yield its matrices, or the vector that it is."""
        state, sizes = self.state[p], self.row_splits.get(p, (len(p),)) if p.ndim else ()
        if not state:
            state.update(init_adafactor_state(p, sizes))
        state["step"] += 1 if found_inf is None else 1 - found_inf
        if p.ndim < 2:
            yield AdafactorSlice(p, grad, state["step"], [state["exp_avg_sq"]])
            return
        rows = (x.split(sizes) for x in (p, grad, state["exp_avg_sq_row"]))
        for weight, grad_slice, row, col in zip(*rows, state["exp_avg_sq_col"], strict=True):
            yield AdafactorSlice(weight, grad_slice, state["step"], [row, col])


def init_adafactor_state(p: nn.Parameter, row_splits: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the zero state of a parameter: row means over the last dimension, column means over the one before it."""
    state = {"step": p.new_zeros((), dtype=torch.float32)}
    if p.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(p)}
    assert len(row_splits) == 1 or p.ndim == 2, "only a matrix concatenates several"
    columns = p.shape[1:] if p.ndim == 2 else (len(p), *p.shape[1:-2], p.shape[-1])
    return state | {
        "exp_avg_sq_row": p.new_zeros(p.shape[:-1]),
        "exp_avg_sq_col": p.new_zeros(len(row_splits), *columns),
    }


def update_slices(
    slices: list[AdafactorSlice], lr: float | Tensor, weight_decay: float, found_inf: Tensor | None
) -> None:
    """Update N weights of one shape: factored second moments, clipping, relative step size."""
    weights, grads = [part.weight for part in slices], torch.stack([part.grad for part in slices])
    newest_N = torch.stack([part.step for part in slices]) ** DECAY_EXPONENT
    if found_inf is not None:
        newest_N, lr, grads = (torch.where(found_inf > 0, 0.0, x) for x in (newest_N, lr, grads))
    square = grads.square() + SQUARED_GRAD_EPS
    new_moments = [square] if weights[0].ndim < 2 else [square.mean(-1), square.mean(-2)]
    means = [
        update_running_means([part.second_moments[i] for part in slices], new, newest_N)
        for i, new in enumerate(new_moments)
    ]
    if len(means) == 1:
        update = grads * means[0].rsqrt()
    else:
        row, col = means
        by_row = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
        update = grads * by_row * col.unsqueeze(-2).rsqrt()
    update = torch.nan_to_num(update) if isinstance(lr, Tensor) else update  # 0 / 0 where the first step is skipped
    root = weights[0].numel() ** 0.5  # RMS = norm / root
    clip_N = (update.view(len(slices), -1).norm(dim=1) / (root * CLIP_THRESHOLD_RMS)).clamp(min=1.0)
    rate_N = lr * (torch.stack(torch._foreach_norm(weights)) / root).clamp(min=MIN_PARAM_RMS)
    update *= expand_per_tensor(rate_N / clip_N, update)
    if weight_decay:
        update += torch.stack(weights) * expand_per_tensor(weight_decay * rate_N, update)
    torch._foreach_sub_(weights, list(update))


def update_running_means(means: list[Tensor], new: Tensor, weight_N: Tensor) -> Tensor:
    """Move the running means towards `new` by `weight_N`, in place, and return them stacked."""
    stacked = torch.stack(means).lerp_(new, expand_per_tensor(weight_N, new))
    torch._foreach_copy_(means, list(stacked))
    return stacked


def expand_per_tensor(x_N: Tensor, like: Tensor) -> Tensor:
    """View one scalar per tensor, (N,), so that it broadcasts over (N, ...)."""
    return x_N.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
