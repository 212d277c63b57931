"""`activation(x + bias)` with one kernel for both gradients.

Torch's compiler computes the activation's gradient twice: to store dx, and again to sum it for the bias. This kernel
sums each tile as it stores it. The forward pass is a kernel too: it is no faster than the compiler's, but it is one op
to compile per layer instead of twenty.

Shapes: M rows of N elements, C tiles of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.kernels.activation import ACTIVATIONS, can_use_fast_activation, cast_to_dtype, sigmoid_gate
from firth.models.kernels.glu import KERNEL_ACTIVATIONS, MAX_INT32_ELEMENTS
from firth.models.kernels.launch import kernel_op, launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

    from firth.models.kernels.glu import sigmoid_gate_in_kernel

BIAS_ACT_COLUMNS = 256  # columns of a tile
BIAS_ACT_FWD_ROWS = 16  # rows of a forward tile
BIAS_ACT_BWD_ROWS = 256  # rows of a backward tile
BIAS_ACT_BWD_STEP_ROWS = 8  # rows of it that are processed at once
BIAS_ACT_BWD_STAGES = 4  # such steps that are loaded ahead


def linear_activation(linear: nn.Module, x: Tensor, activation: str, is_eager: bool = False) -> Tensor:
    """Return `activation(linear(x))`.

    `is_eager` writes the forward pass in torch ops, which the compiler can fuse with what follows, or recompute.
    """
    if not (
        triton is not None
        and can_use_fast_activation(x)
        and activation in KERNEL_ACTIVATIONS
        and type(linear) is nn.Linear
    ):
        return ACTIVATIONS[activation](linear(x))
    if linear.bias is None or x.shape[:-1].numel() * linear.out_features > MAX_INT32_ELEMENTS:
        return ACTIVATIONS[activation](linear(x))
    y: Tensor = BiasActivation.apply(F.linear(x, linear.weight), linear.bias, activation, is_eager)
    return y


class BiasActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_N: Tensor, activation: str, is_eager: bool = False) -> Tensor:
        ctx.save_for_backward(x, bias_N)
        ctx.activation = activation
        if not is_eager:
            return bias_act_forward(x, bias_N, KERNEL_ACTIVATIONS.index(activation))
        h = x.float() + bias_N.float()
        return cast_to_dtype(h * sigmoid_gate(h, activation), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, bias_N = ctx.saved_tensors
        dx, sums_CN = bias_act_backward(dy, x, bias_N, KERNEL_ACTIVATIONS.index(ctx.activation))
        return dx, cast_to_dtype(sums_CN.sum(0), bias_N.dtype), None, None


@kernel_op("firth::bias_act_forward")
def bias_act_forward(x: Tensor, bias: Tensor, activation_index: int) -> Tensor:
    x = x.contiguous()
    N, M = len(bias), x.numel() // len(bias)
    y = torch.empty_like(x)
    grid = (triton.cdiv(M, BIAS_ACT_FWD_ROWS), triton.cdiv(N, BIAS_ACT_COLUMNS))
    launch(
        bias_act_fwd_kernel,
        grid,
        x,
        bias,
        y,
        M,
        N,
        ACTIVATION=activation_index,
        ROWS=BIAS_ACT_FWD_ROWS,
        COLUMNS=BIAS_ACT_COLUMNS,
    )
    return y


@kernel_op("firth::bias_act_backward")
def bias_act_backward(dy: Tensor, x: Tensor, bias: Tensor, activation_index: int) -> tuple[Tensor, Tensor]:
    """Return dx, and its sums (C, N) over the rows of each tile."""
    dy, x = dy.contiguous(), x.contiguous()
    N, M = len(bias), x.numel() // len(bias)
    dx, sums_CN = torch.empty_like(x), x.new_empty(triton.cdiv(M, BIAS_ACT_BWD_ROWS), N, dtype=torch.float32)
    launch(
        bias_act_bwd_kernel, (len(sums_CN), triton.cdiv(N, BIAS_ACT_COLUMNS)), dy, x, bias, dx, sums_CN, M, N,
        ACTIVATION=activation_index, ROWS=BIAS_ACT_BWD_ROWS, STEP_ROWS=BIAS_ACT_BWD_STEP_ROWS,
        COLUMNS=BIAS_ACT_COLUMNS, NUM_STAGES=BIAS_ACT_BWD_STAGES,
    )  # fmt: skip
    return dx, sums_CN


if triton is not None:

    @triton.jit
    def bias_act_fwd_kernel(x, bias, y, M, N, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        m, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        at, inside = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
        h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        h += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        sigmoid, _ = sigmoid_gate_in_kernel(h, ACTIVATION)
        tl.store(y + at, (h * sigmoid).to(y.dtype.element_ty), mask=inside)

    @triton.jit
    def bias_act_bwd_kernel(
        dy, x, bias, dx, sums, M, N,
        ACTIVATION: tl.constexpr, ROWS: tl.constexpr, STEP_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
        NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        total = tl.zeros([STEP_ROWS, COLUMNS], tl.float32)
        for first in tl.range(0, ROWS, STEP_ROWS, num_stages=NUM_STAGES):
            m = tl.program_id(0) * ROWS + first + tl.arange(0, STEP_ROWS)
            at, inside = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
            h = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
            sigmoid, slope = sigmoid_gate_in_kernel(h, ACTIVATION)
            dx_tile = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * (sigmoid + h * slope)
            tl.store(dx + at, dx_tile.to(dx.dtype.element_ty), mask=inside)
            total += dx_tile
        tl.store(sums + tl.program_id(0) * N + n, tl.sum(total, 0), mask=n < N)
