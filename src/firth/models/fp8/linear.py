"""Linear maps that learn by products in 8 bits, each row with a scale of its own, for GPUs that have instructions.

What is multiplied by weights is in 8 bits, forward and backward; the gradients of weights are products in bfloat16, as
they add up over all places. Two maps with an activation between them are one function, so that what lies between is
written in 8 bits by the kernel that makes it; and so is a map with the norm of a sum after it.

N places, I numbers that are read, O that are written, F between two maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from firth.models.fp8.quantize import (
    BF16,
    FP8_DTYPE,
    quantize_activation,
    quantize_activation_backward,
    quantize_scaled_rows,
)
from firth.models.fp8.residual_norm import (
    ResidualNormEpilogue,
    SavedResidualNorm,
    apply_residual_norm,
    residual_norm_grads,
)
from firth.models.fp8.weight_cache import CachedFloat8Linear
from firth.models.kernels.activation import cast_to_dtype
from firth.models.kernels.glu import KERNEL_ACTIVATIONS

FP8_ALIGNMENT = 16  # what the instructions take is a multiple of this, both ways


class Float8Linear(CachedFloat8Linear):
    """The same layer, which learns in 8 bits; when it is only asked, it is exact."""

    def forward(self, x: Tensor, epilogue: ResidualNormEpilogue | None = None) -> Any:
        """With an `epilogue`, what that gives."""
        return self.forward_rows(x, self.bias, epilogue=epilogue)

    def forward_rows(
        self,
        x: Tensor,
        bias_O: Tensor | None,
        start: int = 0,
        stop: int | None = None,
        epilogue: ResidualNormEpilogue | None = None,
    ) -> Any:
        """What its rows from `start` to `stop` make of `x`, with a bias for each."""
        w_OI = self.weight[start:stop]
        if not self.trains_in_fp8(x) or len(w_OI) % FP8_ALIGNMENT:
            assert epilogue is None, "an end is for a map that learns"
            return F.linear(x, w_OI, bias_O)
        if bias_O is not None and len(w_OI) < len(self.weight):  # torch 2.11's compiler takes a view for all of a bias
            bias_O = bias_O[torch.arange(len(bias_O), device=bias_O.device)]
        return restore_output_shape(
            Float8Matmul.apply(
                flatten_to_rows(x), w_OI, bias_O, *self.quantized_weight(start, stop), *(epilogue or ())
            ),
            x,
            epilogue,
        )

    def trains_in_fp8(self, x: Tensor) -> bool:
        return self.training and x.numel() > 0 and x.shape[:-1].numel() % FP8_ALIGNMENT == 0


def alignment_padding(rows: int, positions: int) -> int:
    """How many more of each row it takes for all of them to suit the instructions."""
    return -positions % (FP8_ALIGNMENT // math.gcd(rows, FP8_ALIGNMENT))


def float8_mlp(
    up: nn.Module,
    down: nn.Module,
    x: Tensor,
    activation: str,
    is_gated: bool,
    epilogue: ResidualNormEpilogue | None = None,
) -> Any | None:
    """`down` of an activation of `up`, if both learn in 8 bits; with an `epilogue`, what that gives."""
    if not (
        isinstance(up, Float8Linear)
        and isinstance(down, Float8Linear)
        and up.trains_in_fp8(x)
        and activation in KERNEL_ACTIVATIONS
    ):
        return None
    if is_gated and up.bias is not None:
        return None
    maps = up.weight, up.bias, *up.quantized_weight(), down.weight, down.bias, *down.quantized_weight()
    return restore_output_shape(
        Float8MLP.apply(flatten_to_rows(x), *maps, KERNEL_ACTIVATIONS.index(activation), is_gated, *(epilogue or ())),
        x,
        epilogue,
    )


def restore_output_shape(outputs: Any, x: Tensor, epilogue: ResidualNormEpilogue | None) -> Any:
    """In the shape of `x`; and, where nothing ends it, in the precision of a linear map of that."""
    if epilogue is None:
        return cast_like_linear(outputs, x)
    return tuple(y.view(*x.shape[:-1], -1) for y in outputs)


def cast_like_linear(y: Tensor, x: Tensor) -> Tensor:
    """In the shape and precision that a linear map of `x` has."""
    half = torch.is_autocast_enabled(x.device.type)
    return cast_to_dtype(y.view(*x.shape[:-1], -1), BF16 if half else x.dtype)


def flatten_to_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Float8Matmul(torch.autograd.Function):
    """A linear map, with or without an end, and the gradients of what it is made of.

    Weights are rounded by rows. The scales of these are multiplied into what comes back before that is rounded, so that
    it meets the same weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        w_OI: Tensor,
        bias_O: Tensor | None,
        w8_OI: Tensor,
        w_scale_O: Tensor,
        w8_IO: Tensor,
        *epilogue: Any,
    ) -> Any:
        x = cast_to_dtype(x_NI, BF16)
        ctx.dtypes = x_NI.dtype, w_OI.dtype, None if bias_O is None else bias_O.dtype
        y = scaled_matmul(*quantize_scaled_rows(x)[:2], w8_OI, w_scale_O, bias_O)
        return apply_epilogue_and_save(ctx, y, epilogue, x, w_scale_O, w8_IO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (x, of_w_O, w8_IO, *kept), (x_dtype, dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        dy_NO, dy8, of_dy, sums_O, of_end = quantize_output_grad(
            ctx, grad_outputs, kept, of_w_O, bias_dtype is not None
        )
        dw_OI = cast_to_dtype(dy_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        of_map = (
            cast_to_dtype(matmul_input_grad(dy8, of_dy, w8_IO), x_dtype),
            dw_OI,
            cast_bias_grad(bias_dtype, sums_O),
            None,
            None,
            None,
        )
        return *of_map, *of_end


class Float8MLP(torch.autograd.Function):
    """Up, an activation of that, and down again, with or without an end.

    What the activation gives is kept in no precision: the pass that makes its gradient makes it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        up_OI: Tensor,
        up_bias_O: Tensor | None,
        up8_OI: Tensor,
        up_scale_O: Tensor,
        up8_IO: Tensor,
        down_IF: Tensor,
        down_bias_I: Tensor | None,
        down8_IF: Tensor,
        down_scale_I: Tensor,
        down8_FI: Tensor,
        activation_index: int,
        is_gated: bool,
        *epilogue: Any,
    ) -> Any:
        x = cast_to_dtype(x_NI, BF16)
        between_NO = scaled_matmul(*quantize_scaled_rows(x)[:2], up8_OI, up_scale_O, None)
        h8, of_h = quantize_activation(between_NO, up_bias_O, activation_index, is_gated)
        biases = (None if bias is None else bias.dtype for bias in (up_bias_O, down_bias_I))
        ctx.rest = x_NI.dtype, up_OI.dtype, *biases, activation_index, is_gated
        y = scaled_matmul(h8, of_h, down8_IF, down_scale_I, down_bias_I)
        return apply_epilogue_and_save(
            ctx, y, epilogue, x, between_NO, up_bias_O, up_scale_O, up8_IO, down_scale_I, down8_FI
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, between_NO, up_bias_O, of_up_O, up8_IO, of_down_I, down8_FI, *kept = ctx.saved_tensors
        x_dtype, dtype, up_bias_dtype, down_bias_dtype, kind, gated = ctx.rest
        dy_NI, dy8, of_dy, sums_I, of_end = quantize_output_grad(
            ctx, grad_outputs, kept, of_down_I, down_bias_dtype is not None
        )
        dh_NF = matmul_input_grad(dy8, of_dy, down8_FI)
        h_NF, error_NO, error8, of_error, sums_CO = quantize_activation_backward(
            dh_NF, between_NO, up_bias_O, of_up_O, kind, gated
        )
        d_up = cast_to_dtype(error_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        d_down = cast_to_dtype(dy_NI.t() @ h_NF, dtype) if ctx.needs_input_grad[6] else None
        of_up = d_up, cast_bias_grad(up_bias_dtype, sums_CO.sum(0)), None, None, None
        of_down = d_down, cast_bias_grad(down_bias_dtype, sums_I), None, None, None
        return (
            cast_to_dtype(matmul_input_grad(error8, of_error, up8_IO), x_dtype),
            *of_up,
            *of_down,
            None,
            None,
            *of_end,
        )


def apply_epilogue_and_save(ctx: Any, y: Tensor, epilogue: tuple[Any, ...], *saved: Tensor | None) -> Any:
    """What a function gives, and keeps for its backward pass."""
    ctx.rate = ResidualNormEpilogue(*epilogue).dropout_p if epilogue else None
    if not epilogue:
        ctx.save_for_backward(*saved)
        return y
    found, kept = apply_residual_norm(y, ResidualNormEpilogue(*epilogue))
    ctx.save_for_backward(*saved, *kept)
    return found


def quantize_output_grad(
    ctx: Any,
    grad_outputs: tuple[Tensor, ...],
    saved_epilogue: Sequence[Tensor],
    column_scale: Tensor,
    needs_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """What comes back to a map, as it is and in 8 bits with its scales; what it adds up to; the gradients of an end."""
    if ctx.rate is None:
        return grad_outputs[0], *quantize_scaled_rows(grad_outputs[0], column_scale, needs_bias_grad), ()
    return residual_norm_grads(grad_outputs, SavedResidualNorm(*saved_epilogue), ctx.rate, column_scale)


def cast_bias_grad(dtype: torch.dtype | None, sums: Tensor | None) -> Tensor | None:
    """What a bias of this precision learns from; nothing where there is none."""
    return None if sums is None or dtype is None else cast_to_dtype(sums, dtype)


def matmul_input_grad(dy8_NO: Tensor, dy_scale_N: Tensor, w8_IO: Tensor) -> Tensor:
    """What comes back through weights whose scales are in it already."""
    return scaled_matmul(dy8_NO, dy_scale_N, w8_IO, dy_scale_N.new_ones(len(w8_IO)), None)


def scaled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Rows of `a` by rows of `b`, and a bias for each of the latter.

    They are added up fast, with fewer bits than float32 has: far more than numbers in 8 bits have.
    """
    if a.device.type == "cpu":  # it has no such instructions, and is asked for trying out alone
        with torch.autocast("cpu", enabled=False):  # float16 would have no room
            y = (a.float() @ b.float().t()) * a_scale[:, None] * b_scale
        return (y if bias is None else y + bias).to(BF16)
    assert a.dtype == b.dtype == FP8_DTYPE
    half = None if bias is None else cast_to_dtype(bias, BF16)
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale[:, None], scale_b=b_scale[None], bias=half, out_dtype=BF16, use_fast_accum=True
    )
