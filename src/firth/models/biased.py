"""A bias and an activation whose gradients are made in one pass.

Torch's compiler computes the gradient of the activation twice: to write it, and again to add it up for the bias. Here
each tile of it is added up as it is written. The forward pass is a kernel of ours too: it does what the compiler's
would, but is one operation to compile and not twenty, in each layer.

M rows of N numbers, C tiles of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.activation import ACTIVATIONS, below, is_quick, rounded
from firth.models.gated import FEW, KINDS
from firth.models.launch import launch, operation
from firth.models.tiles import triton

if triton is not None:
    import triton.language as tl

    from firth.models.gated import share_in_kernel

ROWS, STEP, COLUMNS, AHEAD = 256, 8, 256, 4  # of a tile, of them at once, how wide it is, and how many come meanwhile
FEW_ROWS = 16  # of a tile in the forward pass


def activated(linear: nn.Module, x: Tensor, activation: str, single: bool = False) -> Tensor:
    """An activation of what a linear map finds; forward by `single` operations, where the compiler is to join them with
    what follows, or to do them again in the backward pass.
    """
    if not (triton is not None and is_quick(x) and activation in KINDS and type(linear) is nn.Linear):
        return ACTIVATIONS[activation](linear(x))
    if linear.bias is None or x.shape[:-1].numel() * linear.out_features > FEW:
        return ACTIVATIONS[activation](linear(x))
    found: Tensor = Biased.apply(F.linear(x, linear.weight), linear.bias, activation, single)
    return found


class Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_N: Tensor, activation: str, single: bool = False) -> Tensor:
        ctx.save_for_backward(x, bias_N)
        ctx.activation = activation
        if not single:
            return biased_forward(x, bias_N, KINDS.index(activation))
        h = x.float() + bias_N.float()
        return rounded(h * below(h, activation), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, bias_N = ctx.saved_tensors
        dx, sums_CN = biased_backward(dy, x, bias_N, KINDS.index(ctx.activation))
        return dx, rounded(sums_CN.sum(0), bias_N.dtype), None, None


@operation("firth::biased_forward")
def biased_forward(x: Tensor, bias: Tensor, kind: int) -> Tensor:
    x = x.contiguous()
    N, M = len(bias), x.numel() // len(bias)
    y = torch.empty_like(x)
    grid = (triton.cdiv(M, FEW_ROWS), triton.cdiv(N, COLUMNS))
    launch(biased_forward_kernel, grid, x, bias, y, M, N, KIND=kind, ROWS=FEW_ROWS, COLUMNS=COLUMNS)
    return y


@operation("firth::biased_backward")
def biased_backward(dy: Tensor, x: Tensor, bias: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """The gradient of what the bias is added to, and its sums over the rows of each tile."""
    dy, x = dy.contiguous(), x.contiguous()
    N, M = len(bias), x.numel() // len(bias)
    dx, sums_CN = torch.empty_like(x), x.new_empty(triton.cdiv(M, ROWS), N, dtype=torch.float32)
    launch(
        biased_backward_kernel, (len(sums_CN), triton.cdiv(N, COLUMNS)), dy, x, bias, dx, sums_CN, M, N, KIND=kind,
        ROWS=ROWS, STEP=STEP, COLUMNS=COLUMNS, AHEAD=AHEAD,
    )  # fmt: skip
    return dx, sums_CN


if triton is not None:

    @triton.jit
    def biased_forward_kernel(x, bias, y, M, N, KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at, inside = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        h += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        below, _ = share_in_kernel(h, KIND)
        tl.store(y + at, (h * below).to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def biased_backward_kernel(
        dy, x, bias, dx, sums, M, N,
        KIND: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
        AHEAD: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros([STEP, COLUMNS], tl.float32)
        for first in tl.range(0, ROWS, STEP, num_stages=AHEAD):
            m = tl.program_id(0) * ROWS + first + tl.arange(0, STEP)
            at, inside = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
            h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
            below, slope = share_in_kernel(h, KIND)
            error = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * (below + h * slope)
            tl.store(dx + at, error.to(dx.dtype.element_ty), mask=inside)
            total += error
        tl.store(sums + tl.program_id(0) * N + n, tl.sum(total, 0), mask=n < N)
