"""Activation functions, in compiled GPU steps by one exponential each.

GELU, its tanh approximation and SiLU all have the form `x * sigmoid(P(x))` with an odd polynomial P: SiLU with P = x,
GELU-tanh with P = 2 sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks and Gimpel 2016), and exact GELU with a fitted P of
degree 11, within 1.3e-6. So the error function and tanh are not needed, and the derivative reuses the sigmoid s:
`s + x * s (1 - s) P'(x)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GELU_TANH_SLOPE = 1.5957691216057308  # 2 sqrt(2 / pi)
GELU_TANH_CUBIC = 0.044715
SIGMOID_POLYNOMIALS = {  # coefficients of x, x^3, x^5 ...
    # fitted: the largest error of GELU is 1.3e-6, that of its derivative 4e-6
    "gelu": (1.59574586, 0.072729834, -1.14710959e-4, -9.47962912e-5, 5.62496931e-6, -1.14218602e-7),
    "gelu-tanh": (GELU_TANH_SLOPE, GELU_TANH_SLOPE * GELU_TANH_CUBIC),
    "silu": (1.0,),
}
MAX_X_SQUARED = 25.0  # x^2 up to which the fit holds; beyond it the sigmoid is almost 0 or 1 whatever P is


def gelu(x: Tensor) -> Tensor:
    return SigmoidActivation.apply(x, "gelu") if can_use_fast_activation(x) else F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return SigmoidActivation.apply(x, "gelu-tanh") if can_use_fast_activation(x) else F.gelu(x, approximate="tanh")


def can_use_fast_activation(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cuda"


class SigmoidActivation(torch.autograd.Function):
    """`x * sigmoid(P(x))`, by one exponential forward and one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return cast_to_dtype(x * sigmoid_gate(x.float(), name), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        sigmoid, slope = sigmoid_gate_and_slope(x.float(), ctx.name)
        return (dy * (sigmoid + x * slope)).to(x.dtype), None


def cast_to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, if the dtype differs: in torch 2.11 a Function that ends in a cast to its own dtype gets no gradient."""
    return x if x.dtype == dtype else x.to(dtype)


def sigmoid_gate(x: Tensor, name: str) -> Tensor:
    """Return sigmoid(P(x)), the factor by which the activation multiplies x."""
    return 1 / (1 + torch.exp2(x * evaluate_polynomial(log2_coefficients(name), clamped_square(x))))


def sigmoid_gate_and_slope(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return sigmoid(P(x)) and its derivative."""
    sigmoid = sigmoid_gate(x, name)
    return sigmoid, sigmoid * (1 - sigmoid) * evaluate_polynomial(derivative_coefficients(name), clamped_square(x))


def clamped_square(x: Tensor) -> Tensor:
    return (x * x).clamp(max=MAX_X_SQUARED)


def log2_coefficients(name: str) -> tuple[float, ...]:
    """Return the coefficients of -P(x) / x / ln 2: GPUs have an instruction for powers of 2."""
    return tuple(-c / math.log(2) for c in SIGMOID_POLYNOMIALS[name])


def derivative_coefficients(name: str) -> tuple[float, ...]:
    """Return the coefficients of P'(x)."""
    return tuple((2 * k + 1) * c for k, c in enumerate(SIGMOID_POLYNOMIALS[name]))


def evaluate_polynomial(coefficients: Sequence[float], square: Tensor) -> Tensor | float:
    """Return c0 + c1 s + c2 s^2 + ... of s = x^2 (Horner's method)."""
    value: Tensor | float = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        value = value * square + coefficient
    return value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "silu": F.silu,
}
