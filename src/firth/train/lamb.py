"""LAMB: Adam whose step is relative to the norm of each weight matrix (You et al. 2020, algorithm 2).

With large batches, Adam's one learning rate is too high for some layers and too low for others: what counts is the
length of an update beside the length of the weights. LAMB normalises it, layer by layer. Per step t and matrix W:

1. Adam: M <- b1 M + (1 - b1) G, V <- b2 V + (1 - b2) G^2, both corrected for their start at 0;
2. update U = M / (sqrt(V) + eps) + decay * W;
3. trust ratio: W <- W - lr * (||W|| / ||U||) * U.

So every matrix moves by `lr` times its own norm, whatever its gradient. Biases and norms have no decay and the trust
ratio 1, as in the authors' code. MobileBERT and its teacher were trained with LAMB (Sun et al. 2020, section 4.2).

With FSDP each rank updates its rows, and the norms are added up over the ranks: two numbers per matrix.

The code never reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from firth.train.dtensor import ShardGroup, find_shard_group, to_local


class Lamb(torch.optim.Optimizer):
    """LAMB. `row_splits` gives the row counts of the matrices that a parameter concatenates (query, key, value).

    Each of them has its own trust ratio. A parameter that it does not list is one matrix.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        row_splits: Mapping[Tensor, tuple[int, ...]],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
    ) -> None:
        self.row_splits = row_splits
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameter groups."""
        assert closure is None
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                self.update_group(group, params)

    def update_group(self, group: dict[str, Any], params: list[nn.Parameter]) -> None:
        """Update the parameters of one group."""
        found_inf = getattr(self, "found_inf", None)  # as in torch's AdamW: 1 skips the step, on the device
        weights, shard_group = [to_local(p) for p in params], find_shard_group(params[0])
        updates = self.adam_updates(params, group["betas"], group["eps"], found_inf)
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        row_sizes = [
            shard_group.split_rows(self.row_splits.get(p, (len(p),)))[shard_group.rank] if p.ndim > 1 else []
            for p in params
        ]
        scale_to_weight_norm(
            [rows for weight, sizes in zip(weights, row_sizes, strict=True) if sizes for rows in weight.split(sizes)],
            [rows for update, sizes in zip(updates, row_sizes, strict=True) if sizes for rows in update.split(sizes)],
            shard_group,
        )
        torch._foreach_mul_(updates, group["lr"])
        if found_inf is not None:
            updates = [torch.where(found_inf > 0, 0.0, update) for update in updates]
        torch._foreach_sub_(weights, updates)

    def adam_updates(
        self, params: list[nn.Parameter], betas: tuple[float, float], eps: float, found_inf: Tensor | None
    ) -> list[Tensor]:
        """Advance the moments and return Adam's updates; a skipped step leaves the moments as they are."""
        for p in params:
            if not self.state[p]:
                moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        steps, means, squares = (
            [to_local(self.state[p][key]) for p in params] for key in ("step", "exp_avg", "exp_avg_sq")
        )
        grads = [to_local(p.grad) for p in params if p.grad is not None]
        grad_squares = list(torch._foreach_mul(grads, grads))
        if found_inf is not None:
            grads = [torch.where(found_inf > 0, old, new) for old, new in zip(means, grads, strict=True)]
            grad_squares = [
                torch.where(found_inf > 0, old, new) for old, new in zip(squares, grad_squares, strict=True)
            ]
        for step in steps:
            step += 1 if found_inf is None else 1 - found_inf
        torch._foreach_lerp_(means, grads, 1 - betas[0])
        torch._foreach_lerp_(squares, grad_squares, 1 - betas[1])
        step_N = torch.stack(steps).clamp(min=1)  # 0 where the first step is skipped
        updates = torch._foreach_div(means, list((1 - betas[0] ** step_N).unbind()))
        roots = torch._foreach_sqrt(torch._foreach_div(squares, list((1 - betas[1] ** step_N).unbind())))
        torch._foreach_add_(roots, eps)
        torch._foreach_div_(updates, roots)
        return list(updates)


def scale_to_weight_norm(weights: list[Tensor], updates: list[Tensor], shard_group: ShardGroup) -> None:
    """Give each update the norm of its weights, in place; a norm of 0 on either side leaves it as it is."""
    if not weights:
        return
    weight_N, update_N = shard_group.norms([*weights, *updates]).split(len(weights))
    ratio_N = torch.where((weight_N > 0) & (update_N > 0), weight_N / update_N, 1.0)
    torch._foreach_mul_(updates, list(ratio_N.unbind()))
