"""Activations. In a compiled step on a GPU some take fewer operations: x times the logistic function of an odd
polynomial of x, which for GELU is within 1.3e-6 of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GELU_TANH_SLOPE, GELU_TANH_CUBIC = (
    1.5957691216057308,
    0.044715,
)  # 2 sqrt(2 / pi), and what GELU's authors add for x to the third power
SIGMOID_POLYNOMIALS = {  # what x, x^3, x^5 ... are multiplied by
    # fitted: x times the share of a normal distribution below x is met within 1.3e-6, and its slope within 4e-6
    "gelu": (1.59574586, 0.072729834, -1.14710959e-4, -9.47962912e-5, 5.62496931e-6, -1.14218602e-7),
    "gelu-tanh": (GELU_TANH_SLOPE, GELU_TANH_SLOPE * GELU_TANH_CUBIC),
    "silu": (1.0,),
}
MAX_X_SQUARED = 25.0  # of x, up to which the polynomials are so; beyond it their shape does not matter


def gelu(x: Tensor) -> Tensor:
    return SigmoidActivation.apply(x, "gelu") if can_use_fast_activation(x) else F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return SigmoidActivation.apply(x, "gelu-tanh") if can_use_fast_activation(x) else F.gelu(x, approximate="tanh")


def can_use_fast_activation(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cuda"


class SigmoidActivation(torch.autograd.Function):
    """x times a share of it, by one exponential forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return cast_to_dtype(x * sigmoid_gate(x.float(), name), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        part, slope = sigmoid_gate_and_slope(x.float(), ctx.name)
        return (dy * (part + x * slope)).to(x.dtype), None


def cast_to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers. (In torch 2.11, a function whose last cast changes nothing gets no gradient.)"""
    return x if x.dtype == dtype else x.to(dtype)


def sigmoid_gate(x: Tensor, name: str) -> Tensor:
    """How much of x an activation lets through: its share."""
    return 1 / (1 + torch.exp2(x * evaluate_polynomial(log2_coefficients(name), clamped_square(x))))


def sigmoid_gate_and_slope(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The same, and how fast that grows."""
    part = sigmoid_gate(x, name)
    return part, part * (1 - part) * evaluate_polynomial(derivative_coefficients(name), clamped_square(x))


def clamped_square(x: Tensor) -> Tensor:
    return (x * x).clamp(max=MAX_X_SQUARED)


def log2_coefficients(name: str) -> tuple[float, ...]:
    """The polynomial, over x, as a power of 2 needs it: powers of 2 are what a GPU has."""
    return tuple(-c / math.log(2) for c in SIGMOID_POLYNOMIALS[name])


def derivative_coefficients(name: str) -> tuple[float, ...]:
    """Its own slope."""
    return tuple((2 * k + 1) * c for k, c in enumerate(SIGMOID_POLYNOMIALS[name]))


def evaluate_polynomial(coefficients: Sequence[float], square: Tensor) -> Tensor | float:
    found: Tensor | float = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        found = found * square + coefficient
    return found


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
}
