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

from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import triton
from firth.objectives.batch import to_device_async

if triton is not None:
    import triton.language as tl

ADAMW_BLOCK_ELEMENTS = 2048  # weights that are moved together
MASTER_REPLICA_GRAD_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.bfloat16,
)  # of weights, of their twins, and of the twins' gradients
ALIGNMENT_BYTES = 16  # bytes: where tensors begin, so that several numbers are read at once


class AdamW(torch.optim.AdamW):
    """Torch's own; after `use_replica_gradients`, one step from the gradients of twins."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.replicas: Mapping[nn.Parameter, nn.Parameter] = {}
        self.clip_scale = torch.ones(())  # of the gradients that counts: less than 1 where they are too long
        self.pointer_tables: dict[tuple[int, ...], PointerTable] = {}

    def use_replica_gradients(self, replicas: Mapping[nn.Parameter, nn.Parameter], clip_scale: Tensor) -> None:
        """Let the next step learn from what these have for gradients."""
        assert all(p.grad is None for p in replicas), "a weight learns from one gradient"
        self.replicas, self.clip_scale = replicas, clip_scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.replicas:
            super().step(closure)
            return
        for group in self.param_groups:
            ps = [p for p in group["params"] if p in self.replicas]
            if ps:
                self.fused_step(group, ps)
        for twin in self.replicas.values():
            twin.grad = None
        self.replicas = {}

    def fused_step(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """One step of one group."""
        for p in params:
            if not self.state[p]:  # as torch begins
                begin = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p)}
                self.state[p] = {**begin, "exp_avg_sq": torch.zeros_like(p)}
        states, bad = [self.state[p] for p in params], getattr(self, "found_inf", None)
        bad = torch.zeros_like(self.clip_scale) if bad is None else bad
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_sub_(steps, [bad] * len(steps))
        beta1, beta2 = group["betas"]
        count_N = torch.stack(steps).double()
        less_N2 = torch.stack([1 - beta1**count_N, (1 - beta2**count_N).sqrt()], 1).float()
        tensors = [
            (p, self.replicas[p].grad, state["exp_avg"], state["exp_avg_sq"], self.replicas[p])
            for p, state in zip(params, states, strict=True)
        ]
        table = self.pointer_table(tensors)
        launch(
            adamw_kernel, (len(table.block_tensor),), table.addresses, table.sizes, table.block_tensor, table.block_offset, less_N2,
            self.clip_scale, bad, group["lr"], group["lr"] * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2,
            group["eps"], BLOCK=ADAMW_BLOCK_ELEMENTS, num_warps=8,
        )  # fmt: skip

    def pointer_table(self, tensors: Sequence[Sequence[Any]]) -> PointerTable:
        """Where everything is; a new one only where something has moved."""
        addresses = np.array([[x.data_ptr() for x in some] for some in tensors], np.int64)
        sizes = tuple(p.numel() for p, *_ in tensors)
        of = (int(addresses[0, 0]), *sizes)  # groups of several layers may be of one size
        known = self.pointer_tables.get(of)
        if known is None or not np.array_equal(known.host_addresses, addresses):
            self.pointer_tables[of] = known = PointerTable(addresses, sizes, tensors[0][0].device, known)
        return known


class PointerTable:
    """The tensors that a kernel works on, and which block of numbers each of its programs has."""

    sizes: Tensor
    block_tensor: Tensor
    block_offset: Tensor

    def __init__(
        self, addresses: np.ndarray, sizes: Sequence[int], device: torch.device, previous: PointerTable | None
    ) -> None:
        self.host_addresses, self.addresses = addresses, to_device_async(torch.from_numpy(addresses), device)
        if previous is not None:
            self.sizes, self.block_tensor, self.block_offset = (
                previous.sizes,
                previous.block_tensor,
                previous.block_offset,
            )
            return
        blocks = np.array([-(-size // ADAMW_BLOCK_ELEMENTS) for size in sizes])
        owner = np.repeat(np.arange(len(sizes), dtype=np.int32), blocks)
        first = (np.arange(len(owner)) - np.repeat(blocks.cumsum() - blocks, blocks)) * ADAMW_BLOCK_ELEMENTS
        self.sizes, self.block_tensor, self.block_offset = (
            to_device_async(torch.from_numpy(x), device)
            for x in (np.array(sizes, np.int64), owner, first.astype(np.int64))
        )


def can_step_from_replica(pairs: Mapping[nn.Parameter, nn.Parameter]) -> bool:
    """Whether the kernel can work on these: exact weights and twins with gradients, on a GPU, in whole pieces."""
    if triton is None or not pairs:
        return False
    for p, twin in pairs.items():
        grad = twin.grad
        if (
            not is_fused_step_device(p.device)
            or grad is None
            or (p.dtype, twin.dtype, grad.dtype) != MASTER_REPLICA_GRAD_DTYPES
        ):
            return False
        if any(not x.is_contiguous() or x.data_ptr() % ALIGNMENT_BYTES for x in (p, twin, grad)):
            return False
    return True


def is_fused_step_device(device: torch.device) -> bool:
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
            adamw_update(
                p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, True, BLOCK
            )
        else:
            adamw_update(
                p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, False, BLOCK
            )

    @triton.jit
    def adamw_update(
        p, g, mean, square, twin, left, size, root, much, decay, beta1, less1, beta2, less2, eps, FULL: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        at = tl.arange(0, BLOCK)
        grad = masked_load(g, at, left, FULL).to(tl.float32) * much
        m = beta1 * masked_load(mean, at, left, FULL) + less1 * grad
        v = beta2 * masked_load(square, at, left, FULL) + less2 * grad * grad
        x = masked_load(p, at, left, FULL)
        found = x - decay * x - size * m / (tl.sqrt(v) / root + eps)
        masked_store(mean, at, m, left, FULL)
        masked_store(square, at, v, left, FULL)
        masked_store(p, at, found, left, FULL)
        masked_store(twin, at, found.to(tl.bfloat16), left, FULL)

    @triton.jit
    def masked_load(x, at, left, FULL: tl.constexpr):
        return tl.load(x + at) if FULL else tl.load(x + at, mask=at < left, other=0.0)

    @triton.jit
    def masked_store(x, at, values, left, FULL: tl.constexpr):
        if FULL:
            tl.store(x + at, values)
        else:
            tl.store(x + at, values, mask=at < left)
