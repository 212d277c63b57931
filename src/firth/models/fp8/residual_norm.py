"""What comes after a map in blocks that norm their sums: some places are dropped, what was there before is added, and
the sum is normed. Its gradient is made in one pass, which also writes what the map takes of it in 8 bits.

M rows of N numbers, C programs.
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
    quantize_rowwise,
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
    """What a map ends with."""

    residual: Tensor  # (M, N), what was there
    weight: Tensor
    bias: Tensor
    drop_rows: Tensor | None  # (M,), odd numbers: what is dropped depends on their products
    drop_columns: Tensor | None  # (N,)
    dropout_p: float
    eps: float
    num_outputs: int  # once, or twice: for two readers, whose gradients are then added up by the kernel


def make_residual_norm(
    residual: Tensor, norm: nn.Module, dropout: Dropout, num_outputs: int
) -> ResidualNormEpilogue | None:
    """Of a norm that it is made for."""
    if type(norm) is not nn.LayerNorm or norm.bias is None:
        return None
    residual, rate = residual.reshape(-1, residual.shape[-1]), dropout.p if dropout.training else 0.0
    row, column = (random_odd_factors((n,), residual.device) if rate else None for n in residual.shape)
    return ResidualNormEpilogue(residual, norm.weight, norm.bias, row, column, rate, norm.eps, num_outputs)


class SavedResidualNorm(NamedTuple):
    """What the backward pass needs of it."""

    norm_input: Tensor  # (M, N), what was normed
    mean: Tensor  # (M,)
    rstd: Tensor  # (M,), of which it is 1 over
    weight: Tensor
    drop_rows: Tensor | None
    drop_columns: Tensor | None


def apply_residual_norm(y: Tensor, epilogue: ResidualNormEpilogue) -> tuple[tuple[Tensor, ...], SavedResidualNorm]:
    """The norm of a sum, in the precision of what was there before."""
    if epilogue.drop_rows is not None and epilogue.drop_columns is not None:
        y = (y * mask_from_factors(epilogue.drop_rows[:, None], epilogue.drop_columns, epilogue.dropout_p)).to(y.dtype)
    sums = epilogue.residual + y
    weight, bias = epilogue.weight.float(), epilogue.bias.float()
    found, mean_M1, spread_M1 = torch.native_layer_norm(sums.float(), [len(weight)], weight, bias, epilogue.eps)
    found = cast_to_dtype(found, epilogue.residual.dtype)
    kept = SavedResidualNorm(
        sums, mean_M1.flatten(), spread_M1.flatten(), epilogue.weight, epilogue.drop_rows, epilogue.drop_columns
    )
    return (found, *(found.view_as(found) for _ in range(1, epilogue.num_outputs))), kept


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
    """The gradient of a sum; that of the map in it (nothing, where it is the same), the same times a factor for each
    column in 8 bits, with the scales of its rows; and what the rows of each program add up to.
    """
    dy, norm_input, dy_residual = (
        dy.contiguous(),
        norm_input.contiguous(),
        None if dy_residual is None else dy_residual.contiguous(),
    )
    if not can_use_triton(dy):
        error = dy.float() if dy_residual is None else dy.float() + dy_residual.float()
        x = (norm_input.float() - mean[:, None]) * rstd[:, None]
        by_weight = error * weight.float()
        back = by_weight - by_weight.mean(1, keepdim=True) - x * (by_weight * x).mean(1, keepdim=True)
        back = back * rstd[:, None]
        to_map = (
            back
            if drop_rows is None or drop_columns is None
            else back * mask_from_factors(drop_rows[:, None], drop_columns, dropout_p)
        )
        added = torch.stack([(error * x).sum(0), error.sum(0), to_map.sum(0)])[None]
        apart = (
            to_map.to(BF16)
            if needs_separate_grad(norm_input, drop_rows)
            else norm_input.new_empty(0, norm_input.shape[1], dtype=BF16)
        )
        return back.to(norm_input.dtype), apart, *quantize_rowwise(to_map * column_scale), added
    (M, N), C = norm_input.shape, NORM_BWD_LAUNCH.num_programs(len(norm_input), norm_input.device)
    back, apart, back8, scale_M, sums_C3N = allocate_norm_grads(norm_input, drop_rows, C)
    A, B = split_into_powers_of_two(N)
    num_bytes = N * (dy.element_size() * (1 if dy_residual is None else 2) + norm_input.element_size())
    launch(
        residual_norm_bwd_kernel, (C,), dy, dy if dy_residual is None else dy_residual, norm_input, mean, rstd, weight,
        mean if drop_rows is None else drop_rows, mean if drop_columns is None else drop_columns, column_scale, back, apart, back8, scale_M, sums_C3N,
        M, round(dropout_p * 2**32) - 2**31, 1 / (1 - dropout_p), N=N, A=A, B=B, HAS_DY_RESIDUAL=dy_residual is not None, HAS_DROPOUT=drop_rows is not None,
        HAS_DX_LINEAR=len(apart) > 0, NUM_STAGES=NORM_BWD_LAUNCH.num_stages(num_bytes, dy.device), num_warps=NORM_BWD_LAUNCH.num_warps(N),
    )  # fmt: skip
    return back, apart, back8, scale_M, sums_C3N


def needs_separate_grad(norm_input: Tensor, drop_rows: Tensor | None) -> bool:
    """Whether what comes back to the map is another tensor than what comes back to the sum."""
    return drop_rows is not None or norm_input.dtype != BF16


def allocate_norm_grads(
    norm_input: Tensor, drop_rows: Tensor | None, C: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    M, N = norm_input.shape
    apart = norm_input.new_empty(M if needs_separate_grad(norm_input, drop_rows) else 0, N, dtype=BF16)
    eight, scale_M, _ = allocate_quantized_rows(norm_input, N)
    return norm_input.new_empty(M, N), apart, eight, scale_M, norm_input.new_empty(C, 3, N, dtype=torch.float32)


def residual_norm_grads(
    grad_outputs: Sequence[Tensor], saved: SavedResidualNorm, dropout_p: float, column_scale_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """What comes back to the map, as it is and in 8 bits with its scales; its sums; and the gradients of the end."""
    more = grad_outputs[1] if len(grad_outputs) > 1 else None
    before, apart, eight, scale_M, sums_C3N = residual_norm_backward(
        grad_outputs[0], more, *saved, column_scale_N, dropout_p
    )
    of_weight_N, of_bias_N, of_map_N = sums_C3N.sum(0)
    of_norm = cast_to_dtype(of_weight_N, saved.weight.dtype), cast_to_dtype(of_bias_N, saved.weight.dtype)
    to_map = apart if needs_separate_grad(saved.norm_input, saved.drop_rows) else before
    return to_map, eight, scale_M, of_map_N, (before, *of_norm, None, None, None, None, None)


if triton is not None:

    @triton.jit
    def residual_norm_bwd_kernel(
        dy, dy_residual, norm_input, mean, rstd, weight, drop_rows, drop_columns, column_scale, dx, dx_linear, dx8, scales, partial_sums, M, drop_threshold, keep_scale,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HAS_DY_RESIDUAL: tl.constexpr,
        HAS_DROPOUT: tl.constexpr, HAS_DX_LINEAR: tl.constexpr, NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        a, b = contiguous_range(A), A + contiguous_range(B)
        of_weight_a, of_weight_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        of_bias_a, of_bias_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        of_map_a, of_map_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
            one, one_x = load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, a, N, HAS_DY_RESIDUAL)
            two, two_x = load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, b, N, HAS_DY_RESIDUAL)
            of_weight_a += one * one_x
            of_weight_b += two * two_x
            of_bias_a += one
            of_bias_b += two
            one *= load_columns(weight, 0, a, N, N)
            two *= load_columns(weight, 0, b, N, N)
            level = (tl.sum(one, 0) + tl.sum(two, 0)) / N
            along = (tl.sum(one * one_x, 0) + tl.sum(two * two_x, 0)) / N
            one = (one - level - one_x * along) * tl.load(rstd + m)
            two = (two - level - two_x * along) * tl.load(rstd + m)
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
            of_map_a += one
            of_map_b += two
            one *= load_columns(column_scale, 0, a, N, N)
            two *= load_columns(column_scale, 0, b, N, N)
            inverse = store_row_scale(scales, m, max_abs(one, two))
            store_columns(dx8, m, a, one * inverse, N, N)
            store_columns(dx8, m, b, two * inverse, N, N)
        first = 3 * tl.program_id(0)
        store_columns(partial_sums, first, a, of_weight_a, N, N)
        store_columns(partial_sums, first, b, of_weight_b, N, N)
        store_columns(partial_sums, first + 1, a, of_bias_a, N, N)
        store_columns(partial_sums, first + 1, b, of_bias_b, N, N)
        store_columns(partial_sums, first + 2, a, of_map_a, N, N)
        store_columns(partial_sums, first + 2, b, of_map_b, N, N)

    @triton.jit
    def load_norm_grad(dy, dy_residual, norm_input, mean, rstd, m, n, N: tl.constexpr, HAS_DY_RESIDUAL: tl.constexpr):
        """What comes back to some of a row, and what the norm has made of them before its weights."""
        error = load_columns(dy, m, n, N, N)
        if HAS_DY_RESIDUAL:
            error += load_columns(dy_residual, m, n, N, N)
        return error, (load_columns(norm_input, m, n, N, N) - tl.load(mean + m)) * tl.load(rstd + m)
