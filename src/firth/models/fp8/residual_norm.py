"""The end of a post-norm sublayer, `norm(residual + dropout(linear(h)))`, as the epilogue of an FP8 linear layer.

The forward pass is left to torch's compiler, which fuses it. The backward pass is one kernel. It reads the gradients
of the norm's output and the norm's input, once, and from each row in registers it writes

    dx          the gradient of the sum, for the residual
    dx_linear   the same after dropout, for the bf16 weight gradient (not written if it equals dx)
    dx8         the same times the weight's scales in FP8, for the FP8 input gradient
    sums        of the gradients of the norm's weight and bias and of the linear layer's bias

As separate operations these are four kernels that each read dx again. The gradient of LayerNorm's input, with x the
normalized input and g = dy * weight, is `(g - mean(g) - x * mean(g * x)) * rstd`. Dropout stores no mask: whether an
element is dropped depends on the product of a random number per row and one per column (`kernels/dropout.py`).

An output with two readers is returned twice (`num_outputs`). Their gradients then arrive as two tensors, and the
kernel adds them as it reads, instead of autograd with a kernel of its own.

Shapes: M rows of N elements, C programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firth.models.fp8.quantize import (
    BF16,
    RowLaunch,
    allocate_quantized_rows,
    can_use_triton,
    eager_quantize_rowwise,
    split_into_powers_of_two,
)
from firth.models.kernels.activation import cast_to_dtype
from firth.models.kernels.dropout import Dropout, mask_from_factors, random_odd_factors
from firth.models.kernels.launch import kernel_op, launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

    from firth.models.fp8.quantize import contiguous_range, load_columns, max_abs, store_columns, store_row_scale

NORM_BWD_LAUNCH = RowLaunch(8, 1, 384)


class ResidualNormEpilogue(NamedTuple):
    """Inputs of the epilogue, beside the linear layer's output."""

    residual: Tensor  # (M, N)
    weight: Tensor  # (N,), of the norm
    bias: Tensor  # (N,), of the norm
    drop_rows: Tensor | None  # (M,) random odd factors of the dropout mask; None: no dropout
    drop_columns: Tensor | None  # (N,)
    dropout_p: float
    eps: float
    num_outputs: int  # 1, or 2 for two readers whose gradients the kernel adds


def make_residual_norm(
    residual: Tensor, norm: nn.Module, dropout: Dropout, num_outputs: int
) -> ResidualNormEpilogue | None:
    """Return the epilogue, or None for norms that the kernel does not support (all but LayerNorm with a bias)."""
    if type(norm) is not nn.LayerNorm or norm.bias is None:
        return None
    residual, p = residual.reshape(-1, residual.shape[-1]), dropout.p if dropout.training else 0.0
    rows, columns = (random_odd_factors((n,), residual.device) if p else None for n in residual.shape)
    return ResidualNormEpilogue(residual, norm.weight, norm.bias, rows, columns, p, norm.eps, num_outputs)


class SavedResidualNorm(NamedTuple):
    """Tensors saved for the backward pass."""

    norm_input: Tensor  # (M, N)
    mean: Tensor  # (M,)
    rstd: Tensor  # (M,), 1 / standard deviation
    weight: Tensor
    drop_rows: Tensor | None
    drop_columns: Tensor | None


def apply_residual_norm(y: Tensor, epilogue: ResidualNormEpilogue) -> tuple[tuple[Tensor, ...], SavedResidualNorm]:
    """Return `norm(residual + dropout(y))` in the residual's dtype, `num_outputs` times, and what to save."""
    if epilogue.drop_rows is not None and epilogue.drop_columns is not None:
        y = (y * mask_from_factors(epilogue.drop_rows[:, None], epilogue.drop_columns, epilogue.dropout_p)).to(y.dtype)
    x = epilogue.residual + y
    weight, bias = epilogue.weight.float(), epilogue.bias.float()
    normed, mean_M1, rstd_M1 = torch.native_layer_norm(x.float(), [len(weight)], weight, bias, epilogue.eps)
    normed = cast_to_dtype(normed, epilogue.residual.dtype)
    saved = SavedResidualNorm(
        x, mean_M1.flatten(), rstd_M1.flatten(), epilogue.weight, epilogue.drop_rows, epilogue.drop_columns
    )
    return (normed, *(normed.view_as(normed) for _ in range(1, epilogue.num_outputs))), saved


@kernel_op("firth::residual_norm_backward")
def residual_norm_backward(
    dy: Tensor,
    dy_residual: Tensor | None,
    norm_input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    drop_rows: Tensor | None,
    drop_columns: Tensor | None,
    column_scale: Tensor,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dx; dx_linear (empty if it equals dx); dx8 and its row scales; and the partial sums (C, 3, N)."""
    dy = dy.contiguous()
    norm_input = norm_input.contiguous()
    dy_residual = None if dy_residual is None else dy_residual.contiguous()
    if not can_use_triton(dy):
        dy_sum = dy.float() if dy_residual is None else dy.float() + dy_residual.float()
        x = (norm_input.float() - mean[:, None]) * rstd[:, None]
        g = dy_sum * weight.float()
        dx = g - g.mean(1, keepdim=True) - x * (g * x).mean(1, keepdim=True)
        dx = dx * rstd[:, None]
        dx_linear = (
            dx
            if drop_rows is None or drop_columns is None
            else dx * mask_from_factors(drop_rows[:, None], drop_columns, dropout_p)
        )
        sums_13N = torch.stack([(dy_sum * x).sum(0), dy_sum.sum(0), dx_linear.sum(0)])[None]
        separate = (
            dx_linear.to(BF16)
            if needs_separate_grad(norm_input, drop_rows)
            else norm_input.new_empty(0, norm_input.shape[1], dtype=BF16)
        )
        return dx.to(norm_input.dtype), separate, *eager_quantize_rowwise(dx_linear * column_scale), sums_13N
    (M, N), C = norm_input.shape, NORM_BWD_LAUNCH.num_programs(len(norm_input), norm_input.device)
    dx, dx_linear, dx8, scale_M, sums_C3N = allocate_norm_grads(norm_input, drop_rows, C)
    A, B = split_into_powers_of_two(N)
    row_bytes = N * (dy.element_size() * (1 if dy_residual is None else 2) + norm_input.element_size())
    launch(
        residual_norm_bwd_kernel, (C,), dy, dy if dy_residual is None else dy_residual, norm_input, mean, rstd, weight,
        mean if drop_rows is None else drop_rows, mean if drop_columns is None else drop_columns, column_scale,
        dx, dx_linear, dx8, scale_M, sums_C3N, M, round(dropout_p * 2**32) - 2**31, 1 / (1 - dropout_p), N=N, A=A, B=B,
        HAS_DY_RESIDUAL=dy_residual is not None, HAS_DROPOUT=drop_rows is not None, HAS_DX_LINEAR=len(dx_linear) > 0,
        NUM_STAGES=NORM_BWD_LAUNCH.num_stages(row_bytes, dy.device), num_warps=NORM_BWD_LAUNCH.num_warps(N),
    )  # fmt: skip
    return dx, dx_linear, dx8, scale_M, sums_C3N


def needs_separate_grad(norm_input: Tensor, drop_rows: Tensor | None) -> bool:
    """Whether dx_linear differs from dx: by dropout, or because dx is not in bf16."""
    return drop_rows is not None or norm_input.dtype != BF16


def allocate_norm_grads(
    norm_input: Tensor, drop_rows: Tensor | None, C: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    M, N = norm_input.shape
    dx_linear = norm_input.new_empty(M if needs_separate_grad(norm_input, drop_rows) else 0, N, dtype=BF16)
    dx8, scale_M, _ = allocate_quantized_rows(norm_input, N)
    return norm_input.new_empty(M, N), dx_linear, dx8, scale_M, norm_input.new_empty(C, 3, N, dtype=torch.float32)


def residual_norm_grads(
    grad_outputs: Sequence[Tensor], saved: SavedResidualNorm, dropout_p: float, column_scale_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Return dx_linear; dx8 and its row scales; the linear layer's bias gradient; the epilogue's gradients."""
    dy_residual = grad_outputs[1] if len(grad_outputs) > 1 else None
    dx, dx_linear, dx8, scale_M, sums_C3N = residual_norm_backward(
        grad_outputs[0], dy_residual, *saved, column_scale_N, dropout_p
    )
    dweight_N, dbias_N, dbias_linear_N = sums_C3N.sum(0)
    norm_grads = cast_to_dtype(dweight_N, saved.weight.dtype), cast_to_dtype(dbias_N, saved.weight.dtype)
    dx_linear = dx_linear if needs_separate_grad(saved.norm_input, saved.drop_rows) else dx
    return dx_linear, dx8, scale_M, dbias_linear_N, (dx, *norm_grads, None, None, None, None, None)


if triton is not None:

    @triton.jit
    def residual_norm_bwd_kernel(
        dy, dy_residual, norm_input, mean, rstd, weight, drop_rows, drop_columns, column_scale,
        dx, dx_linear, dx8, scales, partial_sums, M, drop_threshold, keep_scale,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HAS_DY_RESIDUAL: tl.constexpr,
        HAS_DROPOUT: tl.constexpr, HAS_DX_LINEAR: tl.constexpr, NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        a, b = contiguous_range(A), A + contiguous_range(B)
        dweight_a, dweight_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        dbias_a, dbias_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        dlinear_bias_a, dlinear_bias_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
            one, one_x = load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, a, N, HAS_DY_RESIDUAL)
            two, two_x = load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, b, N, HAS_DY_RESIDUAL)
            dweight_a += one * one_x
            dweight_b += two * two_x
            dbias_a += one
            dbias_b += two
            one *= load_columns(weight, 0, a, N, N)
            two *= load_columns(weight, 0, b, N, N)
            mean_g = (tl.sum(one, 0) + tl.sum(two, 0)) / N
            mean_gx = (tl.sum(one * one_x, 0) + tl.sum(two * two_x, 0)) / N
            one = (one - mean_g - one_x * mean_gx) * tl.load(rstd + m)
            two = (two - mean_g - two_x * mean_gx) * tl.load(rstd + m)
            store_columns(dx, m, a, one, N, N)
            store_columns(dx, m, b, two, N, N)
            if HAS_DROPOUT:
                one = tl.where(
                    tl.load(drop_rows + m) * tl.load(drop_columns + a, mask=a < N, other=0) >= drop_threshold,
                    one * keep_scale,
                    0.0,
                )
                two = tl.where(
                    tl.load(drop_rows + m) * tl.load(drop_columns + b, mask=b < N, other=0) >= drop_threshold,
                    two * keep_scale,
                    0.0,
                )
            if HAS_DX_LINEAR:
                store_columns(dx_linear, m, a, one, N, N)
                store_columns(dx_linear, m, b, two, N, N)
            dlinear_bias_a += one
            dlinear_bias_b += two
            one *= load_columns(column_scale, 0, a, N, N)
            two *= load_columns(column_scale, 0, b, N, N)
            inverse = store_row_scale(scales, m, max_abs(one, two))
            store_columns(dx8, m, a, one * inverse, N, N)
            store_columns(dx8, m, b, two * inverse, N, N)
        first = 3 * tl.program_id(0)
        store_columns(partial_sums, first, a, dweight_a, N, N)
        store_columns(partial_sums, first, b, dweight_b, N, N)
        store_columns(partial_sums, first + 1, a, dbias_a, N, N)
        store_columns(partial_sums, first + 1, b, dbias_b, N, N)
        store_columns(partial_sums, first + 2, a, dlinear_bias_a, N, N)
        store_columns(partial_sums, first + 2, b, dlinear_bias_b, N, N)

    @triton.jit
    def load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, n, N: tl.constexpr, HAS_DY_RESIDUAL: tl.constexpr):
        """Return the output's gradient and the normalized input of some columns of row m."""
        dy_n = load_columns(dy, m, n, N, N)
        if HAS_DY_RESIDUAL:
            dy_n += load_columns(dy_residual, m, n, N, N)
        return dy_n, (load_columns(norm_input, m, n, N, N) - tl.load(mean + m)) * tl.load(rstd + m)
