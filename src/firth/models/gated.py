"""A gated activation whose gradient is made in one pass.

Gate and value stand side by side in one tensor. Torch's compiler puts their gradients side by side by computing both at
every place of the result and keeping one of them; here each is computed once.

N numbers of a gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firth.models.activation import ACTIVATIONS, ODD, SQUARE, below, is_quick, powers, rounded, slopes
from firth.models.launch import launch, operation
from firth.models.tiles import triton

if triton is not None:
    import triton.language as tl

KINDS = list(ODD)  # that the kernel knows
BLOCK = 1024
FEW = 2**30  # numbers up to which 32 bits say where they are


def gated(x: Tensor, activation: str) -> Tensor:
    """(..., N) from (..., 2 x N): the first half, by its activation, times the second."""
    if triton is not None and is_quick(x) and activation in KINDS and x.numel() <= FEW:
        found: Tensor = Gated.apply(x, activation)
        return found
    gate, h = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * h


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, h = x.chunk(2, -1)
        return rounded(gate * below(gate.float(), activation) * h, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gated_backward(dy, x, KINDS.index(ctx.activation)), None


@operation("firth::gated_backward")
def gated_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    num = dy.numel()
    launch(gated_kernel, (triton.cdiv(num, BLOCK),), dy, x, dx, num, N=dy.shape[-1], KIND=kind, BLOCK=BLOCK)
    return dx


if triton is not None:
    A0, A1, A2, A3, A4, A5 = (tl.constexpr(c) for c in powers("gelu"))
    B0, B1, B2, B3, B4, B5 = (tl.constexpr(c) for c in slopes("gelu"))
    C0, C1, D0, D1 = (tl.constexpr(c) for c in (*powers("gelu-tanh"), *slopes("gelu-tanh")))
    E0, F0 = (tl.constexpr(c) for c in (*powers("silu"), *slopes("silu")))
    FAR = tl.constexpr(SQUARE)

    @triton.jit
    def share_in_kernel(g, KIND: tl.constexpr):
        """What `share` finds."""
        s = tl.minimum(g * g, FAR)
        if KIND == 0:
            power = ((((A5 * s + A4) * s + A3) * s + A2) * s + A1) * s + A0
            slope = ((((B5 * s + B4) * s + B3) * s + B2) * s + B1) * s + B0
        elif KIND == 1:
            power, slope = C1 * s + C0, D1 * s + D0
        else:
            power, slope = E0, F0
        below = 1.0 / (1.0 + tl.exp2(g * power))
        return below, below * (1.0 - below) * slope

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
