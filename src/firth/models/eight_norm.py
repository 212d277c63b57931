"""What comes after a map in blocks that norm their sums: some places are dropped, what was there before is added, and
the sum is normed. Its gradient is made in one pass, which also writes what the map takes of it in 8 bits.

M rows of N numbers, C programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from firth.models.activation import rounded
from firth.models.dropout import Dropout, odd_numbers, stays
from firth.models.eight_rows import HALF, Shape, by_kernel, empty_rows, in_eight, pieces
from firth.models.launch import launch, operation
from firth.models.tiles import triton

if triton is not None:
    import triton.language as tl

    from firth.models.eight_rows import by_eights, largest, put, scale, some

NORMED = Shape(8, 1, 384)


class Ending(NamedTuple):
    """What a map ends with."""

    before: Tensor  # (M, N), what was there
    weight: Tensor
    bias: Tensor
    row: Tensor | None  # (M,), odd numbers: what is dropped depends on their products
    column: Tensor | None  # (N,)
    rate: float
    eps: float
    times: int  # once, or twice: for two readers, whose gradients are then added up by the kernel


def ending(before: Tensor, norm: nn.Module, drop: Dropout, times: int) -> Ending | None:
    """Of a norm that it is made for."""
    if type(norm) is not nn.LayerNorm or norm.bias is None:
        return None
    before, rate = before.reshape(-1, before.shape[-1]), drop.p if drop.training else 0.0
    row, column = (odd_numbers((n,), before.device) if rate else None for n in before.shape)
    return Ending(before, norm.weight, norm.bias, row, column, rate, norm.eps, times)


class Ended(NamedTuple):
    """What the backward pass needs of it."""

    sums: Tensor  # (M, N), what was normed
    mean: Tensor  # (M,)
    spread: Tensor  # (M,), of which it is 1 over
    weight: Tensor
    row: Tensor | None
    column: Tensor | None


def ended(y: Tensor, end: Ending) -> tuple[tuple[Tensor, ...], Ended]:
    """The norm of a sum, in the precision of what was there before."""
    if end.row is not None and end.column is not None:
        y = (y * stays(end.row[:, None], end.column, end.rate)).to(y.dtype)
    sums = end.before + y
    weight, bias = end.weight.float(), end.bias.float()
    found, mean_M1, spread_M1 = torch.native_layer_norm(sums.float(), [len(weight)], weight, bias, end.eps)
    found = rounded(found, end.before.dtype)
    kept = Ended(sums, mean_M1.flatten(), spread_M1.flatten(), end.weight, end.row, end.column)
    return (found, *(found.view_as(found) for _ in range(1, end.times))), kept


@operation("firth::normed_backward")
def normed_backward(
    dy: Tensor,
    more: Tensor | None,
    sums: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor,
    row: Tensor | None,
    column: Tensor | None,
    factor: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradient of a sum; that of the map in it (nothing, where it is the same), the same times a factor for each
    column in 8 bits, with the scales of its rows; and what the rows of each program add up to.
    """
    dy, sums, more = dy.contiguous(), sums.contiguous(), None if more is None else more.contiguous()
    if not by_kernel(dy):
        error = dy.float() if more is None else dy.float() + more.float()
        x = (sums.float() - mean[:, None]) * spread[:, None]
        by_weight = error * weight.float()
        back = by_weight - by_weight.mean(1, keepdim=True) - x * (by_weight * x).mean(1, keepdim=True)
        back = back * spread[:, None]
        to_map = back if row is None or column is None else back * stays(row[:, None], column, rate)
        added = torch.stack([(error * x).sum(0), error.sum(0), to_map.sum(0)])[None]
        apart = to_map.to(HALF) if is_apart(sums, row) else sums.new_empty(0, sums.shape[1], dtype=HALF)
        return back.to(sums.dtype), apart, *in_eight(to_map * factor), added
    (M, N), C = sums.shape, NORMED.programs(len(sums), sums.device)
    back, apart, back8, scale_M, sums_C3N = empty_normed(sums, row, C)
    A, B = pieces(N)
    num_bytes = N * (dy.element_size() * (1 if more is None else 2) + sums.element_size())
    launch(
        normed_backward_kernel, (C,), dy, dy if more is None else more, sums, mean, spread, weight,
        mean if row is None else row, mean if column is None else column, factor, back, apart, back8, scale_M, sums_C3N,
        M, round(rate * 2**32) - 2**31, 1 / (1 - rate), N=N, A=A, B=B, MORE=more is not None, DROPS=row is not None,
        APART=len(apart) > 0, AHEAD=NORMED.stages(num_bytes, dy.device), num_warps=NORMED.warps(N),
    )  # fmt: skip
    return back, apart, back8, scale_M, sums_C3N


def is_apart(sums: Tensor, row: Tensor | None) -> bool:
    """Whether what comes back to the map is another tensor than what comes back to the sum."""
    return row is not None or sums.dtype != HALF


def empty_normed(sums: Tensor, row: Tensor | None, C: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    M, N = sums.shape
    apart = sums.new_empty(M if is_apart(sums, row) else 0, N, dtype=HALF)
    eight, scale_M, _ = empty_rows(sums, N)
    return sums.new_empty(M, N), apart, eight, scale_M, sums.new_empty(C, 3, N, dtype=torch.float32)


def come_back(
    asked: Sequence[Tensor], kept: Ended, rate: float, factor_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """What comes back to the map, as it is and in 8 bits with its scales; its sums; and the gradients of the end."""
    more = asked[1] if len(asked) > 1 else None
    before, apart, eight, scale_M, sums_C3N = normed_backward(asked[0], more, *kept, factor_N, rate)
    of_weight_N, of_bias_N, of_map_N = sums_C3N.sum(0)
    of_norm = rounded(of_weight_N, kept.weight.dtype), rounded(of_bias_N, kept.weight.dtype)
    to_map = apart if is_apart(kept.sums, kept.row) else before
    return to_map, eight, scale_M, of_map_N, (before, *of_norm, None, None, None, None, None)


if triton is not None:

    @triton.jit
    def normed_backward_kernel(
        dy, more, sums, mean, spread, weight, row, column, factor, back, apart, back8, scales, added, M, low, times,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MORE: tl.constexpr,
        DROPS: tl.constexpr, APART: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        a, b = by_eights(A), A + by_eights(B)
        of_weight_a, of_weight_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        of_bias_a, of_bias_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        of_map_a, of_map_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=AHEAD):
            one, one_x = error_of(dy, more, sums, mean, spread, m, a, N, MORE)
            two, two_x = error_of(dy, more, sums, mean, spread, m, b, N, MORE)
            of_weight_a += one * one_x
            of_weight_b += two * two_x
            of_bias_a += one
            of_bias_b += two
            one *= some(weight, 0, a, N, N)
            two *= some(weight, 0, b, N, N)
            level = (tl.sum(one, 0) + tl.sum(two, 0)) / N
            along = (tl.sum(one * one_x, 0) + tl.sum(two * two_x, 0)) / N
            one = (one - level - one_x * along) * tl.load(spread + m)
            two = (two - level - two_x * along) * tl.load(spread + m)
            put(back, m, a, one, N, N)
            put(back, m, b, two, N, N)
            if DROPS:
                one = tl.where(tl.load(row + m) * tl.load(column + a, mask=a < N, other=0) >= low, one * times, 0.0)
                two = tl.where(tl.load(row + m) * tl.load(column + b, mask=b < N, other=0) >= low, two * times, 0.0)
            if APART:
                put(apart, m, a, one, N, N)
                put(apart, m, b, two, N, N)
            of_map_a += one
            of_map_b += two
            one *= some(factor, 0, a, N, N)
            two *= some(factor, 0, b, N, N)
            inverse = scale(scales, m, largest(one, two))
            put(back8, m, a, one * inverse, N, N)
            put(back8, m, b, two * inverse, N, N)
        first = 3 * tl.program_id(0)
        put(added, first, a, of_weight_a, N, N)
        put(added, first, b, of_weight_b, N, N)
        put(added, first + 1, a, of_bias_a, N, N)
        put(added, first + 1, b, of_bias_b, N, N)
        put(added, first + 2, a, of_map_a, N, N)
        put(added, first + 2, b, of_map_b, N, N)

    @triton.jit
    def error_of(dy, more, sums, mean, spread, m, n, N: tl.constexpr, MORE: tl.constexpr):
        """What comes back to some of a row, and what the norm has made of them before its weights."""
        error = some(dy, m, n, N, N)
        if MORE:
            error += some(more, m, n, N, N)
        return error, (some(sums, m, n, N, N) - tl.load(mean + m)) * tl.load(spread + m)
