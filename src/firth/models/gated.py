"""A gated activation whose gradient is made in one pass.

Gate and value stand side by side in one tensor. Torch's compiler puts their gradients side by side by computing both at
every place of the result and keeping one of them; here each is computed once.

N numbers of a gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.activation import (
    ACTIVATIONS,
    COEFFICIENTS,
    CUBE,
    DENSITY,
    RATE,
    ROOT_HALF,
    STEEP,
    is_quick,
    rounded,
    share,
)  # fmt: skip
from firth.models.tiles import triton

if triton is not None:
    import triton.language as tl

KINDS = {"gelu": 0, "gelu-tanh": 1, "silu": 2}  # that the kernel knows
BLOCK = 1024
FEW = 2**30  # numbers up to which 32 bits say where they are


def gated(x: Tensor, activation: str) -> Tensor:
    """(..., N) from (..., 2 x N): the first half, by its activation, times the second."""
    if triton is not None and is_quick(x) and activation in KINDS and x.numel() <= FEW:
        found: Tensor = Gated.apply(x, KINDS[activation])
        return found
    gate, h = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * h


def by_kind(x: Tensor, kind: int) -> Tensor:
    """The activation of a kind that the kernel knows."""
    return F.silu(x) if kind == KINDS["silu"] else x * share(x.float(), kind == KINDS["gelu-tanh"])[0]


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        gate, h = x.chunk(2, -1)
        return rounded(by_kind(gate, kind) * h, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gated_backward(dy, x, ctx.kind), None


@torch.library.custom_op("firth::gated_backward", mutates_args=())
def gated_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    with torch.cuda.device_of(x):
        gated_kernel[(triton.cdiv(dy.numel(), BLOCK),)](dy, x, dx, dy.numel(), N=dy.shape[-1], KIND=kind, BLOCK=BLOCK)
    return dx


@gated_backward.register_fake
def _(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


if triton is not None:
    A1, A2, A3, A4, A5 = (tl.constexpr(c) for c in COEFFICIENTS)
    SLOW, BELL, TWICE, THIRD = (tl.constexpr(c) for c in (RATE * ROOT_HALF, DENSITY, STEEP, CUBE))

    @triton.jit
    def share_in_kernel(g, KIND: tl.constexpr):
        """What `share` finds, and for SiLU what takes its place."""
        if KIND == 0:
            t = 1.0 / (1.0 + SLOW * tl.abs(g))
            bell = tl.exp(-0.5 * g * g)
            tail = 0.5 * ((((A5 * t + A4) * t + A3) * t + A2) * t + A1) * t * bell
            below = tl.where(g >= 0, 1.0 - tail, tail)
            slope = BELL * bell
        else:
            below = tl.sigmoid(TWICE * (g + THIRD * g * g * g) if KIND == 1 else g)
            slope = below * (1.0 - below)
            if KIND == 1:
                slope *= TWICE * (1.0 + 3.0 * THIRD * g * g)
        return below, slope

    @triton.jit
    def gated_kernel(dy, x, dx, many, N: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, at = i < many, i + i // N * N
        g = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + at + N, mask=inside, other=0.0).to(tl.float32)
        error = tl.load(dy + i, mask=inside, other=0.0).to(tl.float32)
        below, slope = share_in_kernel(g, KIND)
        tl.store(dx + at, (error * h * (below + g * slope)).to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + N, (error * g * below).to(dx.dtype.element_ty), mask=inside)
