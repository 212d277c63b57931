"""AdamW, and a fused step for models that train on a bfloat16 replica of float32 master weights.

With `engine.weights=bf16` forward and backward run on a bf16 replica, and its gradients are bf16. Torch's AdamW would
need four passes over memory: cast the gradients to float32, scale them for clipping, update the master weights, copy
these to the replica. One Triton kernel does all of it (Loshchilov & Hutter 2019, algorithm 2):

    g = clip_scale * float32(replica.grad)
    m = beta1 m + (1 - beta1) g
    v = beta2 v + (1 - beta2) g^2
    w = w - lr decay w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    replica = bfloat16(w)

The update is bound by memory: 30 bytes per weight, with the gradient norm's read, instead of 52.

One launch covers all tensors of a parameter group. A `PointerTable` holds the address of every tensor and gives each
program of the kernel its tensor and its offset in it. The clip scale and `found_inf` (1 skips the step) stay on the
device, so that nothing waits for the GPU.

N tensors of a parameter group.
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

ADAMW_BLOCK_ELEMENTS = 2048  # weights per program of the kernel
MASTER_REPLICA_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.bfloat16)  # of master, replica and replica.grad
ALIGNMENT_BYTES = 16  # of every tensor, so that four elements are loaded at once


class AdamW(torch.optim.AdamW):
    """Torch's AdamW; after `use_replica_gradients` the next step is fused and reads the replicas' gradients."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.replicas: Mapping[nn.Parameter, nn.Parameter] = {}
        self.clip_scale = torch.ones(())  # factor of the gradients, below 1 where their norm exceeds the limit
        self.pointer_tables: dict[tuple[int, ...], PointerTable] = {}

    def use_replica_gradients(self, replicas: Mapping[nn.Parameter, nn.Parameter], clip_scale: Tensor) -> None:
        """Take the gradients of the next step from the replicas of these master weights."""
        assert all(p.grad is None for p in replicas), "a master weight has no gradient of its own"
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
        for replica in self.replicas.values():
            replica.grad = None
        self.replicas = {}

    def fused_step(self, group: dict[str, Any], params: Sequence[nn.Parameter]) -> None:
        """Update the parameters of one group in one kernel launch."""
        for p in params:
            if not self.state[p]:  # the initial state of torch's AdamW
                moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        states, found_inf = [self.state[p] for p in params], getattr(self, "found_inf", None)
        found_inf = torch.zeros_like(self.clip_scale) if found_inf is None else found_inf
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        torch._foreach_sub_(steps, [found_inf] * len(steps))
        beta1, beta2 = group["betas"]
        step_N = torch.stack(steps).double()
        corrections_N2 = torch.stack([1 - beta1**step_N, (1 - beta2**step_N).sqrt()], 1).float()
        tensors = [
            (p, self.replicas[p].grad, state["exp_avg"], state["exp_avg_sq"], self.replicas[p])
            for p, state in zip(params, states, strict=True)
        ]
        table = self.pointer_table(tensors)
        launch(
            adamw_kernel, (len(table.block_tensor),), table.addresses, table.sizes, table.block_tensor,
            table.block_offset, corrections_N2, self.clip_scale, found_inf, group["lr"],
            group["lr"] * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, group["eps"],
            BLOCK=ADAMW_BLOCK_ELEMENTS, num_warps=8,
        )  # fmt: skip

    def pointer_table(self, tensors: Sequence[Sequence[Any]]) -> PointerTable:
        """Return the pointer table of these tensors; a new one only where an address has changed."""
        addresses = np.array([[x.data_ptr() for x in row] for row in tensors], np.int64)
        sizes = tuple(p.numel() for p, *_ in tensors)
        key = (int(addresses[0, 0]), *sizes)  # the groups of two layers may have the same sizes
        table = self.pointer_tables.get(key)
        if table is None or not np.array_equal(table.host_addresses, addresses):
            self.pointer_tables[key] = table = PointerTable(addresses, sizes, tensors[0][0].device, table)
        return table


class PointerTable:
    """Device arrays that tell each program of the kernel its tensors and its offset in them.

    `addresses` (N, 5): weight, gradient, first and second moment, replica. `sizes` (N,): elements. `block_tensor` and
    `block_offset`: per program, the row of `addresses` and the first element.
    """

    sizes: Tensor
    block_tensor: Tensor
    block_offset: Tensor

    def __init__(
        self, addresses: np.ndarray, sizes: Sequence[int], device: torch.device, previous: PointerTable | None
    ) -> None:
        self.host_addresses, self.addresses = addresses, to_device_async(torch.from_numpy(addresses), device)
        if previous is not None:
            self.sizes, self.block_tensor = previous.sizes, previous.block_tensor
            self.block_offset = previous.block_offset
            return
        blocks_N = np.array([-(-size // ADAMW_BLOCK_ELEMENTS) for size in sizes])
        tensor = np.repeat(np.arange(len(sizes), dtype=np.int32), blocks_N)
        offset = (np.arange(len(tensor)) - np.repeat(blocks_N.cumsum() - blocks_N, blocks_N)) * ADAMW_BLOCK_ELEMENTS
        self.sizes, self.block_tensor, self.block_offset = (
            to_device_async(torch.from_numpy(x), device)
            for x in (np.array(sizes, np.int64), tensor, offset.astype(np.int64))
        )


def can_step_from_replica(pairs: Mapping[nn.Parameter, nn.Parameter]) -> bool:
    """Whether the fused step applies: fp32 masters and bf16 replicas with gradients, contiguous, aligned, on a GPU."""
    if triton is None or not pairs:
        return False
    for p, replica in pairs.items():
        grad = replica.grad
        if not is_fused_step_device(p.device) or grad is None:
            return False
        if (p.dtype, replica.dtype, grad.dtype) != MASTER_REPLICA_GRAD_DTYPES:
            return False
        if any(not x.is_contiguous() or x.data_ptr() % ALIGNMENT_BYTES for x in (p, replica, grad)):
            return False
    return True


def is_fused_step_device(device: torch.device) -> bool:
    return device.type == "cuda"


if triton is not None:

    @triton.jit
    def adamw_kernel(
        addresses, sizes, block_tensor, block_offset, corrections, clip_scale, found_inf, lr, decay, beta1, less1,
        beta2, less2, eps, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Update one block of one tensor; `less1` and `less2` are 1 - beta1 and 1 - beta2, rounded on the host."""
        if tl.load(found_inf) > 0:
            return
        i = tl.load(block_tensor + tl.program_id(0))
        start = tl.multiple_of(tl.load(block_offset + tl.program_id(0)), BLOCK)
        row, left = addresses + 5 * i, tl.load(sizes + i) - start
        # multiple_of: four elements are 16 bytes of float32 or 8 of bfloat16
        p = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16) + start
        g = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.bfloat16)), 8) + start
        exp_avg = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16) + start
        exp_sq = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(tl.float32)), 16) + start
        replica = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(tl.bfloat16)), 8) + start
        lr_t, root, clip = lr / tl.load(corrections + 2 * i), tl.load(corrections + 2 * i + 1), tl.load(clip_scale)
        if left >= BLOCK:  # without a mask, which would split wide loads
            adamw_update(
                p, g, exp_avg, exp_sq, replica, left, lr_t, root, clip, decay, beta1, less1, beta2, less2, eps, True,
                BLOCK,
            )  # fmt: skip
        else:
            adamw_update(
                p, g, exp_avg, exp_sq, replica, left, lr_t, root, clip, decay, beta1, less1, beta2, less2, eps, False,
                BLOCK,
            )  # fmt: skip

    @triton.jit
    def adamw_update(
        p, g, exp_avg, exp_sq, replica, left, lr_t, root, clip, decay, beta1, less1, beta2, less2, eps,
        FULL: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """`lr_t` is the bias-corrected learning rate, `root` the square root of v's bias correction."""
        offsets = tl.arange(0, BLOCK)
        grad = masked_load(g, offsets, left, FULL).to(tl.float32) * clip
        m = beta1 * masked_load(exp_avg, offsets, left, FULL) + less1 * grad
        v = beta2 * masked_load(exp_sq, offsets, left, FULL) + less2 * grad * grad
        w = masked_load(p, offsets, left, FULL)
        new_w = w - decay * w - lr_t * m / (tl.sqrt(v) / root + eps)
        masked_store(exp_avg, offsets, m, left, FULL)
        masked_store(exp_sq, offsets, v, left, FULL)
        masked_store(p, offsets, new_w, left, FULL)
        masked_store(replica, offsets, new_w.to(tl.bfloat16), left, FULL)

    @triton.jit
    def masked_load(x, offsets, left, FULL: tl.constexpr):
        return tl.load(x + offsets) if FULL else tl.load(x + offsets, mask=offsets < left, other=0.0)

    @triton.jit
    def masked_store(x, offsets, values, left, FULL: tl.constexpr):
        if FULL:
            tl.store(x + offsets, values)
        else:
            tl.store(x + offsets, values, mask=offsets < left)
