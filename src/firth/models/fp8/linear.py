"""FP8 linear layers: matmuls of 8-bit floats with one scale per row (Micikevicius et al. 2022).

An FP8 matmul runs at twice the speed of bf16 on Ada and Hopper GPUs and reads half the bytes. E4M3 has 4 exponent and
3 mantissa bits: values up to 448, relative rounding errors up to 1/16. So a tensor is divided by a scale, such that its
largest element becomes 448, and the result is multiplied by the scales of both factors. One scale per row (of tokens,
of output features) keeps an outlier from flattening more than its own row; `quantize.py` explains the rounding.

A linear layer y = x W^T has three matmuls. Two are in FP8, one stays in bf16:

    forward          y  = x W^T      FP8: x by rows of tokens, W by rows of outputs
    input gradient   dx = dy W       FP8: dy by rows of tokens, W as it was rounded in the forward pass
    weight gradient  dW = dy^T x     bf16: it sums over all tokens, and its rounding errors would go into the weights

In the input gradient the sum runs over the outputs, along which W's scales vary, and a matmul can only scale what it
does not sum over. So dy is multiplied by W's scales before it is quantized, and W enters with scale 1: both passes use
the same FP8 weights. Gradients are E4M3 too, where the paper uses E5M2: with a scale per row, precision is worth more
than range.

`torch._scaled_mm` multiplies, with the scales, bias and cast to bf16 in its epilogue. What remains is the cost of
quantizing, a pass over each activation that can take longer than the matmul saves. So quantizing is fused with the
kernel that produces a tensor: `Float8MLPFunction` quantizes the activation between two layers as it computes it, an
epilogue (`residual_norm.py`) quantizes the gradient of a post-norm residual, and `weight_cache.py` quantizes all
weights once per step. Embeddings, heads, norms, attention scores and everything in evaluation are not in FP8.

Shapes: N tokens, I input features, O output features, F features between two layers.
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
    quantize_rowwise,
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

FP8_ALIGNMENT = 16  # elements: `torch._scaled_mm` needs all sizes to be multiples of this


class Float8Linear(CachedFloat8Linear):
    """`nn.Linear` that trains in FP8. In evaluation, and for unaligned sizes, it is `nn.Linear`."""

    def forward(self, x: Tensor, epilogue: ResidualNormEpilogue | None = None) -> Any:
        """Return (..., O), or with an `epilogue` the tuple of its outputs."""
        return self.forward_rows(x, self.bias, epilogue=epilogue)

    def forward_rows(
        self,
        x: Tensor,
        bias_O: Tensor | None,
        start: int = 0,
        stop: int | None = None,
        epilogue: ResidualNormEpilogue | None = None,
    ) -> Any:
        """Return the outputs of the weight's rows `start` to `stop`, with their biases."""
        w_OI = self.weight[start:stop]
        if not self.trains_in_fp8(x) or len(w_OI) % FP8_ALIGNMENT:
            assert epilogue is None, "an epilogue needs a layer that trains in FP8"
            return F.linear(x, w_OI, bias_O)
        # torch 2.11's compiler mistakes a view of a bias for the whole
        if bias_O is not None and len(w_OI) < len(self.weight):
            bias_O = bias_O[torch.arange(len(bias_O), device=bias_O.device)]
        return restore_output_shape(
            Float8Matmul.apply(
                flatten_to_rows(x), w_OI, bias_O, *self.quantized_weight(start, stop), *(epilogue or ())
            ),
            x,
            epilogue,
        )

    def trains_in_fp8(self, x: Tensor) -> bool:
        """Whether this input is multiplied in FP8: in training, if the number of tokens is aligned."""
        return self.training and x.numel() > 0 and x.shape[:-1].numel() % FP8_ALIGNMENT == 0


def alignment_padding(rows: int, positions: int) -> int:
    """Return how many positions to add to each row so that rows x positions is aligned."""
    return -positions % (FP8_ALIGNMENT // math.gcd(rows, FP8_ALIGNMENT))


def float8_mlp(
    up: nn.Module,
    down: nn.Module,
    x: Tensor,
    activation: str,
    is_gated: bool,
    epilogue: ResidualNormEpilogue | None = None,
) -> Any | None:
    """Return `down(activation(up(x)))` as one function, or None if not both layers can train in FP8 here.

    With an `epilogue`, return the tuple of its outputs.
    """
    if not (
        isinstance(up, Float8Linear)
        and isinstance(down, Float8Linear)
        and up.trains_in_fp8(x)
        and activation in KERNEL_ACTIVATIONS
    ):
        return None
    if is_gated and up.bias is not None:
        return None
    weights = up.weight, up.bias, *up.quantized_weight(), down.weight, down.bias, *down.quantized_weight()
    return restore_output_shape(
        Float8MLPFunction.apply(
            flatten_to_rows(x), *weights, KERNEL_ACTIVATIONS.index(activation), is_gated, *(epilogue or ())
        ),
        x,
        epilogue,
    )


def restore_output_shape(outputs: Any, x: Tensor, epilogue: ResidualNormEpilogue | None) -> Any:
    """Restore the leading shape of `x`; without an epilogue, also the dtype that `nn.Linear` returns."""
    if epilogue is None:
        return cast_like_linear(outputs, x)
    return tuple(y.view(*x.shape[:-1], -1) for y in outputs)


def cast_like_linear(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` in the shape and dtype that `nn.Linear` gives for `x`."""
    dtype = BF16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    return cast_to_dtype(y.view(*x.shape[:-1], -1), dtype)


def flatten_to_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Float8Matmul(torch.autograd.Function):
    """A linear layer, with or without an epilogue. Saves x in bf16 and the transposed FP8 weight."""

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
        y = scaled_matmul(*quantize_rowwise(x)[:2], w8_OI, w_scale_O, bias_O)
        return apply_epilogue_and_save(ctx, y, epilogue, x, w_scale_O, w8_IO)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (x, w_scale_O, w8_IO, *saved_epilogue), (x_dtype, dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        dy_NO, dy8, dy_scale, dbias_O, epilogue_grads = quantize_output_grad(
            ctx, grad_outputs, saved_epilogue, w_scale_O, bias_dtype is not None
        )
        dw_OI = cast_to_dtype(dy_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        dx_NI = cast_to_dtype(matmul_input_grad(dy8, dy_scale, w8_IO), x_dtype)
        return dx_NI, dw_OI, cast_bias_grad(bias_dtype, dbias_O), None, None, None, *epilogue_grads


class Float8MLPFunction(torch.autograd.Function):
    """`down(activation(up(x)))`, with or without an epilogue.

    The activation's output exists in FP8 only and is not saved: the kernel of its backward pass computes it again.
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
        h_NO = scaled_matmul(*quantize_rowwise(x)[:2], up8_OI, up_scale_O, None)
        y8, y_scale = quantize_activation(h_NO, up_bias_O, activation_index, is_gated)
        bias_dtypes = (None if bias is None else bias.dtype for bias in (up_bias_O, down_bias_I))
        ctx.rest = x_NI.dtype, up_OI.dtype, *bias_dtypes, activation_index, is_gated
        y = scaled_matmul(y8, y_scale, down8_IF, down_scale_I, down_bias_I)
        return apply_epilogue_and_save(ctx, y, epilogue, x, h_NO, up_bias_O, up_scale_O, up8_IO, down_scale_I, down8_FI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, h_NO, up_bias_O, up_scale_O, up8_IO, down_scale_I, down8_FI, *saved_epilogue = ctx.saved_tensors
        x_dtype, dtype, up_bias_dtype, down_bias_dtype, activation_index, is_gated = ctx.rest
        dy_NI, dy8, dy_scale, d_down_bias_I, epilogue_grads = quantize_output_grad(
            ctx, grad_outputs, saved_epilogue, down_scale_I, down_bias_dtype is not None
        )
        d_activation_NF = matmul_input_grad(dy8, dy_scale, down8_FI)
        activation_NF, dh_NO, dh8, dh_scale, d_up_bias_CO = quantize_activation_backward(
            d_activation_NF, h_NO, up_bias_O, up_scale_O, activation_index, is_gated
        )
        d_up = cast_to_dtype(dh_NO.t() @ x, dtype) if ctx.needs_input_grad[1] else None
        d_down = cast_to_dtype(dy_NI.t() @ activation_NF, dtype) if ctx.needs_input_grad[6] else None
        up_grads = d_up, cast_bias_grad(up_bias_dtype, d_up_bias_CO.sum(0)), None, None, None
        down_grads = d_down, cast_bias_grad(down_bias_dtype, d_down_bias_I), None, None, None
        dx_NI = cast_to_dtype(matmul_input_grad(dh8, dh_scale, up8_IO), x_dtype)
        return dx_NI, *up_grads, *down_grads, None, None, *epilogue_grads


def apply_epilogue_and_save(ctx: Any, y: Tensor, epilogue: tuple[Any, ...], *saved: Tensor | None) -> Any:
    """Return a function's outputs from its matmul `y`, and save what its backward pass needs."""
    ctx.dropout_p = ResidualNormEpilogue(*epilogue).dropout_p if epilogue else None
    if not epilogue:
        ctx.save_for_backward(*saved)
        return y
    outputs, saved_norm = apply_residual_norm(y, ResidualNormEpilogue(*epilogue))
    ctx.save_for_backward(*saved, *saved_norm)
    return outputs


def quantize_output_grad(
    ctx: Any,
    grad_outputs: tuple[Tensor, ...],
    saved_epilogue: Sequence[Tensor],
    column_scale: Tensor,
    needs_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[Tensor | None, ...]]:
    """Return dy of a matmul in bf16; dy times `column_scale` in FP8 and its row scales; the bias gradient; the
    gradients of the epilogue's inputs.
    """
    if ctx.dropout_p is None:
        return grad_outputs[0], *quantize_rowwise(grad_outputs[0], column_scale, needs_bias_grad), ()
    return residual_norm_grads(grad_outputs, SavedResidualNorm(*saved_epilogue), ctx.dropout_p, column_scale)


def cast_bias_grad(dtype: torch.dtype | None, sums: Tensor | None) -> Tensor | None:
    """Return the bias gradient in the bias's dtype, or None if there is no bias."""
    return None if sums is None or dtype is None else cast_to_dtype(sums, dtype)


def matmul_input_grad(dy8_NO: Tensor, dy_scale_N: Tensor, w8_IO: Tensor) -> Tensor:
    """Return dx (N, I). `dy8` already includes the weight's scales."""
    return scaled_matmul(dy8_NO, dy_scale_N, w8_IO, dy_scale_N.new_ones(len(w8_IO)), None)


def scaled_matmul(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return `a @ b.t() + bias` in bf16, from FP8 rows and their scales.

    Fast accumulation keeps fewer bits than float32, but many more than FP8 inputs have.
    """
    if a.device.type == "cpu":  # emulated, for tests
        with torch.autocast("cpu", enabled=False):  # float16 would overflow
            y = (a.float() @ b.float().t()) * a_scale[:, None] * b_scale
        return (y if bias is None else y + bias).to(BF16)
    assert a.dtype == b.dtype == FP8_DTYPE
    bias = None if bias is None else cast_to_dtype(bias, BF16)
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale[:, None], scale_b=b_scale[None], bias=bias, out_dtype=BF16, use_fast_accum=True
    )
