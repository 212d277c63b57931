"""Muon: steps of equal length in every direction, for the matrices inside the blocks (Jordan et al. 2024).

N matrices, A rows, B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from firth.models import Stack
from firth.models.attention import Attention
from firth.models.block import MLP

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: singular values come near 1 in five rounds
NEWTON_SCHULZ_STEPS = 5
MIN_MATRIX_NORM = 1e-7
ADAMW_UPDATE_RMS = 0.2  # the root mean square of AdamW's steps, so that its rate fits (Liu et al. 2025, section 2.2)


def hidden_matrices(model: nn.Module) -> dict[Tensor, tuple[int, ...]]:
    """The matrices inside the blocks, with the rows of each of those that one is made of: query, key and value."""
    found: dict[Tensor, tuple[int, ...]] = {}
    for part in (p for stack in model.modules() if isinstance(stack, Stack) for p in stack.blocks.modules()):
        if isinstance(part, Attention):
            found[part.qkv.weight] = part.qkv_sizes
        elif isinstance(part, MLP) and part.is_gated:
            half = part.up.out_features // 2
            found[part.up.weight] = (half, half)
        elif isinstance(part, nn.Linear):
            found.setdefault(part.weight, (part.out_features,))
    return found


class Muon(torch.optim.AdamW):
    """Muon for the groups with `muon`, AdamW for the others: embeddings, heads, norms, biases.

    `row_splits` are the rows of the matrices that a parameter is made of, each of which is made orthogonal by itself.
    Without it a parameter is one matrix. Newton and Schulz iterate in bfloat16 on a GPU, in float32 on a CPU.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        row_splits: Mapping[Tensor, tuple[int, ...]],
        momentum: float,
        dtype: torch.dtype | None = None,
        **adamw_options: Any,
    ) -> None:
        self.row_splits, self.momentum, self.dtype = row_splits, momentum, dtype
        super().__init__(list(groups), **adamw_options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all groups."""
        everything = self.param_groups
        self.param_groups = [group for group in everything if not group.get("muon")]
        try:
            super().step(closure)
        finally:
            self.param_groups = everything
        for group in everything:
            if group.get("muon"):
                self.muon_step(group)

    def muon_step(self, group: dict[str, Any]) -> None:
        """Muon's update of one group; matrices of one shape are made orthogonal together."""
        ps = [p for p in group["params"] if p.grad is not None]
        if not ps:
            return
        found = getattr(self, "found_inf", None)  # as AdamW reads it: 1 where this step is to change nothing
        bad = None if found is None else found > 0
        shrunk = 1 - group["lr"] * group["weight_decay"]
        torch._foreach_mul_(ps, shrunk if bad is None else torch.where(bad, 1.0, shrunk))
        alike: dict[torch.Size, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for p, update in zip(ps, self.nesterov_momentum(ps, bad), strict=True):
            sizes = self.row_splits.get(p, (len(p),))
            for pair in zip(p.split(sizes), update.split(sizes), strict=True):
                alike[pair[0].shape].append(pair)
        for shape, pairs in alike.items():
            parts, updates = zip(*pairs, strict=True)
            dtype = self.dtype or (torch.bfloat16 if parts[0].is_cuda else torch.float32)
            update_NAB = parts[0].new_empty((len(parts), *shape), dtype=dtype)
            torch._foreach_copy_(update_NAB.unbind(), updates)
            tall = shape[0] > shape[1]
            turned_NAB = orthogonalize(update_NAB.mT).mT if tall else orthogonalize(update_NAB)
            turned_NAB = turned_NAB.to(parts[0].dtype, memory_format=torch.contiguous_format)
            turned_NAB = turned_NAB if bad is None else torch.where(bad, 0.0, turned_NAB)
            size = ADAMW_UPDATE_RMS * math.sqrt(max(shape))
            torch._foreach_add_(parts, turned_NAB.unbind(), alpha=-group["lr"] * size)

    def nesterov_momentum(self, params: list[nn.Parameter], found_inf: Tensor | None) -> Sequence[Tensor]:
        """Where parameters are going: their gradients' running means, a step ahead (Nesterov)."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        grads, means = (
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["momentum_buffer"] for p in params],
        )
        if found_inf is None:
            torch._foreach_lerp_(means, grads, 1 - self.momentum)
            return torch._foreach_lerp(grads, means, self.momentum)
        grads = [torch.where(found_inf, mean, grad) for mean, grad in zip(means, grads, strict=True)]
        torch._foreach_lerp_(means, grads, 1 - self.momentum)
        torch._foreach_lerp_(grads, means, self.momentum)
        return grads


def orthogonalize(x_NAB: Tensor) -> Tensor:
    """Matrices with the same singular vectors, and singular values near 1 (Newton and Schulz); A is at most B."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=MIN_MATRIX_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram_NAA = x_NAB @ x_NAB.mT
        mixed_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        x_NAB = torch.baddbmm(x_NAB, mixed_NAA, x_NAB, beta=a)
    return x_NAB
