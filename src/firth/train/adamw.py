"""AdamW, and the same in one kernel for weights that have a twin in bfloat16.

The kernel reads the twin's gradients as they are, moves the exact weights, and writes them, rounded, to the twin: no
copies in float32, and no pass that only cuts gradients. 30 bytes of memory for each weight in place of 52.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firth.models.launch import launch
from firth.models.tiles import triton
from firth.objectives.batch import sent

if triton is not None:
    import triton.language as tl

BLOCK = 2048  # weights that are moved together
DTYPES = (torch.float32, torch.bfloat16, torch.bfloat16)  # of weights, of their twins, and of the twins' gradients
ALIGNED = 16  # bytes: where tensors begin, so that several numbers are read at once


class AdamW(torch.optim.AdamW):
    """Torch's own; after `take`, one step from the gradients of twins."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.twins: Mapping[nn.Parameter, nn.Parameter] = {}
        self.share = torch.ones(())  # of the gradients that counts: less than 1 where they are too long
        self.tables: dict[tuple[int, ...], Table] = {}

    def take(self, twins: Mapping[nn.Parameter, nn.Parameter], share: Tensor) -> None:
        """Let the next step learn from what these have for gradients."""
        assert all(p.grad is None for p in twins), "a weight learns from one gradient"
        self.twins, self.share = twins, share

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.twins:
            super().step(closure)
            return
        for group in self.param_groups:
            ps = [p for p in group["params"] if p in self.twins]
            if ps:
                self.move(group, ps)
        for twin in self.twins.values():
            twin.grad = None
        self.twins = {}

    def move(self, group: dict[str, Any], ps: Sequence[nn.Parameter]) -> None:
        """One step of one group."""
        for p in ps:
            if not self.state[p]:  # as torch begins
                begin = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p)}
                self.state[p] = {**begin, "exp_avg_sq": torch.zeros_like(p)}
        states, bad = [self.state[p] for p in ps], getattr(self, "found_inf", None)
        bad = torch.zeros_like(self.share) if bad is None else bad
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_sub_(steps, [bad] * len(steps))
        beta1, beta2 = group["betas"]
        count_N = torch.stack(steps).double()
        less_N2 = torch.stack([1 - beta1**count_N, (1 - beta2**count_N).sqrt()], 1).float()
        tensors = [
            (p, self.twins[p].grad, state["exp_avg"], state["exp_avg_sq"], self.twins[p])
            for p, state in zip(ps, states, strict=True)
        ]
        table = self.table(tensors)
        launch(
            adamw_kernel, (len(table.owner),), table.addresses, table.sizes, table.owner, table.first, less_N2,
            self.share, bad, group["lr"], group["lr"] * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2,
            group["eps"], BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip

    def table(self, tensors: Sequence[Sequence[Any]]) -> Table:
        """Where everything is; a new one only where something has moved."""
        addresses = np.array([[x.data_ptr() for x in some] for some in tensors], np.int64)
        sizes = tuple(p.numel() for p, *_ in tensors)
        of = (int(addresses[0, 0]), *sizes)  # groups of several layers may be of one size
        known = self.tables.get(of)
        if known is None or not np.array_equal(known.known, addresses):
            self.tables[of] = known = Table(addresses, sizes, tensors[0][0].device, known)
        return known


class Table:
    """The tensors that a kernel works on, and which block of numbers each of its programs has."""

    sizes: Tensor
    owner: Tensor
    first: Tensor

    def __init__(self, addresses: np.ndarray, sizes: Sequence[int], device: torch.device, before: Table | None) -> None:
        self.known, self.addresses = addresses, sent(torch.from_numpy(addresses), device)
        if before is not None:
            self.sizes, self.owner, self.first = before.sizes, before.owner, before.first
            return
        blocks = np.array([-(-size // BLOCK) for size in sizes])
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), blocks)
        first = (np.arange(len(owner)) - np.repeat(blocks.cumsum() - blocks, blocks)) * BLOCK
        self.sizes, self.owner, self.first = (
            sent(torch.from_numpy(x), device) for x in (np.array(sizes, np.int64), owner, first.astype(np.int64))
        )


def can_take(pairs: Mapping[nn.Parameter, nn.Parameter]) -> bool:
    """Whether the kernel can work on these: exact weights and twins with gradients, on a GPU, in whole pieces."""
    if triton is None or not pairs:
        return False
    for p, twin in pairs.items():
        grad = twin.grad
        if not suits(p.device) or grad is None or (p.dtype, twin.dtype, grad.dtype) != DTYPES:
            return False
        if any(not x.is_contiguous() or x.data_ptr() % ALIGNED for x in (p, twin, grad)):
            return False
    return True


def suits(device: torch.device) -> bool:
    return device.type == "cuda"


if triton is not None:

    @triton.jit
    def adamw_kernel(
        addresses, sizes, owner, first, corrections, share, bad, lr, decay, beta1, less1, beta2, less2, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Loshchilov and Hutter 2019, algorithm 2; nothing where a step is bad."""
        if tl.load(bad) > 0:
            return
        i = tl.load(owner + tl.program_id(0))
        begin = tl.multiple_of(tl.load(first + tl.program_id(0)), BLOCK)
        where, left = addresses + 5 * i, tl.load(sizes + i) - begin  # all are read by fours: 16 bytes, or 8
        p = tl.multiple_of(tl.load(where).to(tl.pointer_type(tl.float32)), 16) + begin
        g = tl.multiple_of(tl.load(where + 1).to(tl.pointer_type(tl.bfloat16)), 8) + begin
        mean = tl.multiple_of(tl.load(where + 2).to(tl.pointer_type(tl.float32)), 16) + begin
        square = tl.multiple_of(tl.load(where + 3).to(tl.pointer_type(tl.float32)), 16) + begin
        twin = tl.multiple_of(tl.load(where + 4).to(tl.pointer_type(tl.bfloat16)), 8) + begin
        size, root, much = lr / tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1), tl.load(share)
        if left >= BLOCK:  # a mask would split wide reads
            move(p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, True, BLOCK)
        else:
            move(p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, False, BLOCK)

    @triton.jit
    def move(
        p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, FULL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.arange(0, BLOCK)
        grad = some(g, at, left, FULL).to(tl.float32) * much
        m = beta1 * some(mean, at, left, FULL) + less1 * grad
        v = beta2 * some(square, at, left, FULL) + less2 * grad * grad
        x = some(p, at, left, FULL)
        found = x - decay * x - size * m / (tl.sqrt(v) / root + eps)
        put(mean, at, m, left, FULL)
        put(square, at, v, left, FULL)
        put(p, at, found, left, FULL)
        put(twin, at, found.to(tl.bfloat16), left, FULL)

    @triton.jit
    def some(x, at, left, FULL: tl.constexpr):
        return tl.load(x + at) if FULL else tl.load(x + at, mask=at < left, other=0.0)

    @triton.jit
    def put(x, at, values, left, FULL: tl.constexpr):
        if FULL:
            tl.store(x + at, values)
        else:
            tl.store(x + at, values, mask=at < left)
