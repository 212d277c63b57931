"""Gated linear units (GLU, Shazeer 2020), `activation(gate) * value`, with a backward kernel.

Gate and value are the two halves of one tensor, from one matmul. For the concatenated gradient, torch's compiler
computes both halves at every element and keeps one of them. This kernel computes each once.

Shapes: N elements of a gate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firth.models.kernels.activation import (
    ACTIVATIONS,
    MAX_X_SQUARED,
    SIGMOID_POLYNOMIALS,
    can_use_fast_activation,
    cast_to_dtype,
    derivative_coefficients,
    log2_coefficients,
    sigmoid_gate,
)
from firth.models.kernels.launch import kernel_op, launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

KERNEL_ACTIVATIONS = list(SIGMOID_POLYNOMIALS)  # kernels take the index of an activation in this list
GLU_BLOCK_ELEMENTS = 1024  # elements per program
MAX_INT32_ELEMENTS = 2**30  # elements up to which kernels index with 32 bits


def gated_activation(x: Tensor, activation: str) -> Tensor:
    """Return (..., N) from (..., 2 x N): the activation of the first half, times the second half."""
    if (
        triton is not None
        and can_use_fast_activation(x)
        and activation in KERNEL_ACTIVATIONS
        and x.numel() <= MAX_INT32_ELEMENTS
    ):
        y: Tensor = GatedActivation.apply(x, activation)
        return y
    gate, h = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * h


class GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, h = x.chunk(2, -1)
        return cast_to_dtype(gate * sigmoid_gate(gate.float(), activation) * h, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return glu_backward(dy, x, KERNEL_ACTIVATIONS.index(ctx.activation)), None


@kernel_op("firth::glu_backward")
def glu_backward(dy: Tensor, x: Tensor, activation_index: int) -> Tensor:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    num = dy.numel()
    launch(
        glu_bwd_kernel,
        (triton.cdiv(num, GLU_BLOCK_ELEMENTS),),
        dy,
        x,
        dx,
        num,
        N=dy.shape[-1],
        ACTIVATION=activation_index,
        BLOCK=GLU_BLOCK_ELEMENTS,
    )
    return dx


if triton is not None:
    GELU_P0, GELU_P1, GELU_P2, GELU_P3, GELU_P4, GELU_P5 = (tl.constexpr(c) for c in log2_coefficients("gelu"))
    GELU_D0, GELU_D1, GELU_D2, GELU_D3, GELU_D4, GELU_D5 = (tl.constexpr(c) for c in derivative_coefficients("gelu"))
    GELU_TANH_P0, GELU_TANH_P1, GELU_TANH_D0, GELU_TANH_D1 = (
        tl.constexpr(c) for c in (*log2_coefficients("gelu-tanh"), *derivative_coefficients("gelu-tanh"))
    )
    SILU_P0, SILU_D0 = (tl.constexpr(c) for c in (*log2_coefficients("silu"), *derivative_coefficients("silu")))
    TL_MAX_X_SQUARED = tl.constexpr(MAX_X_SQUARED)

    @triton.jit
    def sigmoid_gate_in_kernel(g, ACTIVATION: tl.constexpr):
        """`sigmoid_gate_and_slope` of activation.py."""
        s = tl.minimum(g * g, TL_MAX_X_SQUARED)
        if ACTIVATION == 0:
            power = ((((GELU_P5 * s + GELU_P4) * s + GELU_P3) * s + GELU_P2) * s + GELU_P1) * s + GELU_P0
            slope = ((((GELU_D5 * s + GELU_D4) * s + GELU_D3) * s + GELU_D2) * s + GELU_D1) * s + GELU_D0
        elif ACTIVATION == 1:
            power, slope = GELU_TANH_P1 * s + GELU_TANH_P0, GELU_TANH_D1 * s + GELU_TANH_D0
        else:
            power, slope = SILU_P0, SILU_D0
        sigmoid = 1.0 / (1.0 + tl.exp2(g * power))
        return sigmoid, sigmoid * (1.0 - sigmoid) * slope

    @triton.jit
    def glu_bwd_kernel(dy, x, dx, num_elements, N: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside, at = i < num_elements, i + i // N * N
        g = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(x + at + N, mask=inside, other=0.0).to(tl.float32)
        dy_i = tl.load(dy + i, mask=inside, other=0.0).to(tl.float32)
        sigmoid, slope = sigmoid_gate_in_kernel(g, ACTIVATION)
        tl.store(dx + at, (dy_i * h * (sigmoid + g * slope)).to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + N, (dy_i * g * sigmoid).to(dx.dtype.element_ty), mask=inside)
