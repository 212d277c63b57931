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

With FSDP each rank updates its rows of a matrix. Only sums over rows are shared: row and column means, the norms of W
and U. An all-reduce of A + B + 1 numbers per A x B matrix and one of a single number replace the gathered matrix. R and
C are kept whole on every rank.

N slices of one shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from firth.train.dtensor import ShardGroup, find_shard_group, to_local

SQUARED_GRAD_EPS = 1e-30  # epsilon 1: added to squared gradients
MIN_PARAM_RMS = 1e-3  # epsilon 2: lower bound of RMS(W), so that weights near 0 still change
CLIP_THRESHOLD_RMS = 1.0  # d: largest RMS of an update
DECAY_EXPONENT = -0.8  # the newest gradient has weight t ** DECAY_EXPONENT
MAX_FUSED_ELEMENTS = 2**26  # elements stacked in one update at most: bounds the temporary memory


class AdafactorSlice(NamedTuple):
    """One matrix of a parameter that may concatenate several, or a whole vector."""

    weight: Tensor  # with FSDP the rows of this rank, as `grad`
    grad: Tensor
    step: Tensor  # () the number of this step, from 1
    second_moments: list[Tensor]  # [row means, column means] of squared gradients; [all of them] for a vector
    shape: torch.Size  # of the whole slice
    rows: slice  # that `weight` has of it


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
            trained = [p for p in group["params"] if p.grad is not None]
            shard_group = find_shard_group(trained[0]) if trained else ShardGroup()
            by_shape: dict[torch.Size, list[AdafactorSlice]] = defaultdict(list)
            for p in trained:
                for part in self.iter_slices(p, found_inf, shard_group):
                    by_shape[part.shape].append(part)
            for shape, parts in by_shape.items():
                limit = max(MAX_FUSED_ELEMENTS * shard_group.size // shape.numel(), 1)
                for first in range(0, len(parts), limit):
                    some = parts[first : first + limit]
                    if shard_group.group is None:
                        update_slices(some, group["lr"], group["weight_decay"], found_inf)
                    else:
                        update_sharded_slices(some, group["lr"], group["weight_decay"], found_inf, shard_group)

    def iter_slices(
        self, p: nn.Parameter, found_inf: Tensor | None, shard_group: ShardGroup
    ) -> Iterator[AdafactorSlice]:
        """Advance the step of a parameter and yield its matrices, or the vector that it is."""
        assert p.grad is not None
        state, sizes = self.state[p], self.row_splits.get(p, (len(p),)) if p.ndim else ()
        if not state:
            state.update(init_adafactor_state(p, sizes))
        state["step"] += 1 if found_inf is None else 1 - found_inf
        weight, grad = to_local(p), to_local(p.grad)
        if p.ndim < 2:
            rows = shard_group.local_rows(len(p)) if p.ndim else slice(None)
            yield AdafactorSlice(weight, grad, state["step"], [to_local(state["exp_avg_sq"])], p.shape, rows)
            return
        rows_by_rank = shard_group.split_rows(sizes)
        own = rows_by_rank[shard_group.rank]
        columns = zip(
            weight.split(own), grad.split(own), state["exp_avg_sq_row"].split(sizes), state["exp_avg_sq_col"],
            zip(*rows_by_rank, strict=True), strict=True,
        )  # fmt: skip
        for weight_rows, grad_rows, row, col, counts in columns:
            first = sum(counts[: shard_group.rank])
            rows = slice(first, first + len(weight_rows))
            shape = torch.Size((len(row), *p.shape[1:]))
            yield AdafactorSlice(weight_rows, grad_rows, state["step"], [row, col], shape, rows)


def init_adafactor_state(p: nn.Parameter, row_splits: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the zero state of a parameter: row means over the last dimension, column means over the one before it."""
    state = {"step": torch.zeros((), device=p.device)}
    if p.ndim < 2:
        return state | {"exp_avg_sq": torch.zeros_like(p)}
    assert len(row_splits) == 1 or p.ndim == 2, "only a matrix concatenates several"
    columns = p.shape[1:] if p.ndim == 2 else (len(p), *p.shape[1:-2], p.shape[-1])
    return (
        state
        | {  # whole on every rank, where p is sharded
            "exp_avg_sq_row": torch.zeros(p.shape[:-1], device=p.device, dtype=p.dtype),
            "exp_avg_sq_col": torch.zeros((len(row_splits), *columns), device=p.device, dtype=p.dtype),
        }
    )


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


def update_sharded_slices(
    slices: list[AdafactorSlice],
    lr: float | Tensor,
    weight_decay: float,
    found_inf: Tensor | None,
    shard_group: ShardGroup,
) -> None:
    """Update the rows of this rank of N weights of one shape, as `update_slices` does with whole ones."""
    newest_N = torch.stack([part.step for part in slices]) ** DECAY_EXPONENT
    grads = [part.grad for part in slices]
    if found_inf is not None:
        newest_N, lr, *grads = (torch.where(found_inf > 0, 0.0, x) for x in (newest_N, lr, *grads))
    moments = [mean_squares(part, grad) for part, grad in zip(slices, grads, strict=True)]
    if len(slices[0].shape) > 1:
        sums = shard_group.all_reduce(torch.cat([x.flatten() for new in moments for x in new]))
        sizes = [x.numel() for new in moments for x in new]
        parts = iter(sums.split(sizes))
        moments = [[next(parts).view_as(x) for x in new] for new in moments]
    updates = []
    for part, grad, new, newest in zip(slices, grads, moments, newest_N.unbind(), strict=True):
        for mean, x in zip(part.second_moments, new, strict=True):
            mean.lerp_(x, newest.to(x.dtype))
        update = grad * inverse_root(part)
        updates.append(torch.nan_to_num(update) if isinstance(lr, Tensor) else update)
    root = slices[0].shape.numel() ** 0.5
    weights = [part.weight for part in slices]
    weight_N, update_N = shard_group.norms([*weights, *updates]).split(len(slices))
    rate_N = lr * (weight_N / root).clamp(min=MIN_PARAM_RMS)
    scale_N = rate_N / (update_N / (root * CLIP_THRESHOLD_RMS)).clamp(min=1.0)
    torch._foreach_mul_(updates, list(scale_N.unbind()))
    if weight_decay:
        torch._foreach_add_(updates, torch._foreach_mul(weights, list((weight_decay * rate_N).unbind())))
    torch._foreach_sub_(weights, updates)


def mean_squares(part: AdafactorSlice, grad: Tensor) -> list[Tensor]:
    """Return this rank's share of the squared gradient's row and column means; the ranks' shares add up to them.

    A vector keeps all squares, of its own elements. A tensor of more dimensions is a list of matrices, each whole on
    one rank.
    """
    square = grad.square() + SQUARED_GRAD_EPS
    if grad.ndim < 2:
        return [square]
    row = square.new_zeros(part.shape[:-1])
    row[part.rows] = square.mean(-1)
    if grad.ndim == 2:
        return [row, square.sum(0) / part.shape[0]]
    col = square.new_zeros(part.second_moments[1].shape)
    col[part.rows] = square.mean(-2)
    return [row, col]


def inverse_root(part: AdafactorSlice) -> Tensor:
    """Return 1 / sqrt(second moment) of this rank's elements."""
    if part.weight.ndim < 2:
        return part.second_moments[0].rsqrt()
    row, col = part.second_moments
    by_row = (row / row.mean(-1, keepdim=True)).rsqrt()[part.rows].unsqueeze(-1)
    return by_row * (col if part.weight.ndim == 2 else col[part.rows]).unsqueeze(-2).rsqrt()


def update_running_means(means: list[Tensor], new: Tensor, weight_N: Tensor) -> Tensor:
    """Move the running means towards `new` by `weight_N`, in place, and return them stacked."""
    stacked = torch.stack(means).lerp_(new, expand_per_tensor(weight_N, new))
    torch._foreach_copy_(means, list(stacked))
    return stacked


def expand_per_tensor(x_N: Tensor, like: Tensor) -> Tensor:
    """View one scalar per tensor, (N,), so that it broadcasts over (N, ...)."""
    return x_N.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
