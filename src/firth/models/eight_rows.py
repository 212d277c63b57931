"""Numbers in 8 bits, each row with a scale of its own: by torch's compiler where it makes the numbers in one pass, and
by kernels where rows are long, or come out of kernels.

M rows of N numbers, C programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from firth.models.activation import share
from firth.models.gated import KINDS
from firth.models.launch import launch, operation
from firth.models.tiles import processors, shared_memory, triton

if triton is not None:
    import triton.language as tl

    from firth.models.gated import share_in_kernel

EIGHT, HALF = torch.float8_e4m3fn, torch.bfloat16
MOST = 448.0  # the largest of its numbers
LEAST = 1e-30  # rows of 0 stay so
SHORT = 1024  # numbers of a row up to which torch's compiler reads it once
BESIDE = 8192  # bytes of shared memory that are for other things than rows


class Shape(NamedTuple):
    """How a kernel goes through rows: so many programs at once on a processor, which share the rows evenly, the next of
    theirs read meanwhile, and a warp for so many numbers of each.
    """

    each: int
    ahead: int
    width: int

    def programs(self, M: int, device: torch.device) -> int:
        return min(M, self.each * processors(device))

    def warps(self, N: int) -> int:
        return min(32, 1 << (-(-N // self.width) - 1).bit_length())

    def stages(self, num_bytes: int, device: torch.device) -> int:
        """How many rows are on their way, if there is room for those that are read ahead."""
        room = shared_memory(device.index or 0) - BESIDE if device.type == "cuda" else num_bytes
        return max(1, min(self.ahead, room // num_bytes + 1))


ROWS, ACTIVATED, BACKWARD = Shape(10, 1, 2304), Shape(16, 3, 768), Shape(8, 3, 384)


def rows(x: Tensor, factor_N: Tensor | None = None, sums: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """`x`, each column times a factor, in 8 bits; the scales of its rows; and, where asked for, what `x` adds up to."""
    if by_kernel(x) and (x.shape[1] > SHORT or not torch.compiler.is_compiling()):
        x8, scale_M, sums_CN = rows_in_eight(x, factor_N, sums)
        return x8, scale_M, sums_CN.sum(0) if sums else None
    y = x.float() if factor_N is None else x.float() * factor_N
    return *in_eight(y), x.float().sum(0) if sums else None


def in_eight(x: Tensor) -> tuple[Tensor, Tensor]:
    scale_M = x.abs().amax(1).clamp(min=LEAST) / MOST
    return (x * (1 / scale_M)[:, None]).to(EIGHT), scale_M


def by_kernel(x: Tensor) -> bool:
    return triton is not None and x.device.type == "cuda"


@operation("firth::rows_in_eight")
def rows_in_eight(x: Tensor, factor_N: Tensor | None, sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    (M, N), C = x.shape, ROWS.programs(len(x), x.device)
    x8, scale_M, sums_CN = empty_rows(x, N, C if sums else 0)
    A, B = pieces(N)
    launch(
        rows_kernel, (C,), x, x if factor_N is None else factor_N, x8, scale_M, sums_CN, M, N=N, A=A, B=B,
        FACTOR=factor_N is not None, SUMS=sums, AHEAD=ROWS.stages(8 * N, x.device), num_warps=ROWS.warps(N),
    )  # fmt: skip
    return x8, scale_M, sums_CN


@operation("firth::activated_rows")
def activated_rows(x: Tensor, bias: Tensor | None, kind: int, gated: bool) -> tuple[Tensor, Tensor]:
    """An activation of `x` with its bias, in 8 bits; with a gate, of its first half, times the second."""
    if not by_kernel(x):
        return in_eight(activation_of(x, bias, kind, gated)[0])
    x = x.contiguous()
    M, N = len(x), x.shape[1] // (1 + gated)
    y8, scale_M, _ = empty_rows(x, N)
    A, B = pieces(N)
    launch(
        activated_kernel, (ACTIVATED.programs(M, x.device),), x, x if bias is None else bias, y8, scale_M, M, N=N, A=A,
        B=B, KIND=kind, GATED=gated, BIAS=bias is not None, AHEAD=ACTIVATED.stages(8 * N, x.device),
        num_warps=ACTIVATED.warps(N),
    )  # fmt: skip
    return y8, scale_M


@operation("firth::activated_rows_backward")
def activated_rows_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, factor: Tensor, kind: int, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The activation again; the gradient of `x`, as it is and (times a factor for each column) in 8 bits with its
    scales; and, with a bias, what it adds up to in each program.
    """
    if not by_kernel(x):
        y, (below, slope), gate, value = activation_of(x, bias, kind, gated)
        error = dy.float() * (below + gate * slope)
        if value is not None:
            error = torch.cat([error * value, dy.float() * gate * below], 1)
        sums = error.sum(0, keepdim=True) if bias is not None else x.new_empty(0, x.shape[1], dtype=torch.float32)
        return y.to(dy.dtype), error.to(x.dtype), *in_eight(error * factor), sums
    dy, x = dy.contiguous(), x.contiguous()
    (M, N), C = dy.shape, BACKWARD.programs(len(dy), dy.device)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dx8, scale_M, sums_CN = empty_rows(x, x.shape[1], 0 if bias is None else C)
    A, B = pieces(N)
    row = N * dy.element_size() + x.shape[1] * (x.element_size() + 4) + (0 if bias is None else N * 4)
    launch(
        activated_backward_kernel, (C,), dy, x, x if bias is None else bias, factor, y, dx, dx8, scale_M, sums_CN, M,
        N=N, A=A, B=B, KIND=kind, GATED=gated, BIAS=bias is not None, AHEAD=BACKWARD.stages(row, x.device),
        num_warps=BACKWARD.warps(N),
    )  # fmt: skip
    return y, dx, dx8, scale_M, sums_CN


def activation_of(
    x: Tensor, bias: Tensor | None, kind: int, gated: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """By single operations: what is found, its share with the slope of that, the gate, and the value that it is for."""
    h = x.float() if bias is None else x.float() + bias.float()
    gate, value = h.chunk(2, 1) if gated else (h, None)
    found = share(gate, KINDS[kind])
    y = gate * found[0]
    return y if value is None else y * value, found, gate, value


def empty_rows(x: Tensor, width: int, C: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Room for rows in 8 bits, for their scales, and for the sums of so many programs."""
    sums_CN = x.new_empty(C, width, dtype=torch.float32)
    return x.new_empty(len(x), width, dtype=EIGHT), x.new_empty(len(x), dtype=torch.float32), sums_CN


def pieces(N: int) -> tuple[int, int]:
    """Two powers of two that cover N, exactly if they can: what a kernel has of a row."""
    first = 1 << ((N - 1).bit_length() - 1)
    return first, 1 << (N - first - 1).bit_length()


if triton is not None:
    TOP, BOTTOM = tl.constexpr(MOST), tl.constexpr(LEAST)

    @triton.jit
    def rows_kernel(
        x, factor, x8, scales, sums, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FACTOR: tl.constexpr,
        SUMS: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        a, b = by_eights(A), A + by_eights(B)
        total_a, total_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=AHEAD):
            one, two = some(x, m, a, N, N), some(x, m, b, N, N)
            if SUMS:
                total_a += one
                total_b += two
            if FACTOR:
                one *= some(factor, 0, a, N, N)
                two *= some(factor, 0, b, N, N)
            inverse = scale(scales, m, largest(one, two))
            put(x8, m, a, one * inverse, N, N)
            put(x8, m, b, two * inverse, N, N)
        if SUMS:
            put(sums, tl.program_id(0), a, total_a, N, N)
            put(sums, tl.program_id(0), b, total_b, N, N)

    @triton.jit
    def activated_kernel(
        x, bias, y8, scales, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr,
        GATED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        a, b = by_eights(A), A + by_eights(B)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=AHEAD):
            one = activated(x, bias, m, a, N, KIND, GATED, BIAS)
            two = activated(x, bias, m, b, N, KIND, GATED, BIAS)
            inverse = scale(scales, m, largest(one, two))
            put(y8, m, a, one * inverse, N, N)
            put(y8, m, b, two * inverse, N, N)

    @triton.jit
    def activated_backward_kernel(
        dy, x, bias, factor, y, dx, dx8, scales, sums, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr,
        GATED: tl.constexpr, BIAS: tl.constexpr, AHEAD: tl.constexpr,
    ):  # fmt: skip
        W: tl.constexpr = 2 * N if GATED else N
        a, b = by_eights(A), A + by_eights(B)
        total_a, total_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=AHEAD):
            one, one_value = errors(dy, x, bias, y, dx, m, a, N, KIND, GATED, BIAS)
            two, two_value = errors(dy, x, bias, y, dx, m, b, N, KIND, GATED, BIAS)
            if BIAS:
                total_a += one
                total_b += two
            one *= some(factor, 0, a, N, N)
            two *= some(factor, 0, b, N, N)
            most = largest(one, two)
            if GATED:
                one_value *= some(factor + N, 0, a, N, N)
                two_value *= some(factor + N, 0, b, N, N)
                most = tl.maximum(most, largest(one_value, two_value))
            inverse = scale(scales, m, most)
            put(dx8, m, a, one * inverse, N, W)
            put(dx8, m, b, two * inverse, N, W)
            if GATED:
                put(dx8 + N, m, a, one_value * inverse, N, W)
                put(dx8 + N, m, b, two_value * inverse, N, W)
        if BIAS:
            put(sums, tl.program_id(0), a, total_a, N, N)
            put(sums, tl.program_id(0), b, total_b, N, N)

    @triton.jit
    def errors(
        dy, x, bias, y, dx, m, n, N: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr
    ):  # fmt: skip
        """The gradients of gate and value (without a gate, of `x`, twice), which are written, as is what they make."""
        W: tl.constexpr = 2 * N if GATED else N
        gate, error = some(x, m, n, N, W), some(dy, m, n, N, N)
        if BIAS:
            gate += some(bias, 0, n, N, N)
        below, slope = share_in_kernel(gate, KIND)
        found, of_gate = gate * below, error * (below + gate * slope)
        of_value = of_gate
        if GATED:
            value = some(x + N, m, n, N, W)
            of_gate, of_value = of_gate * value, error * found
            found *= value
            put(dx + N, m, n, of_value, N, W)
        put(y, m, n, found, N, N)
        put(dx, m, n, of_gate, N, W)
        return of_gate, of_value

    @triton.jit
    def activated(x, bias, m, n, N: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr):
        W: tl.constexpr = 2 * N if GATED else N
        gate = some(x, m, n, N, W)
        if BIAS:
            gate += some(bias, 0, n, N, N)
        below, _ = share_in_kernel(gate, KIND)
        found = gate * below
        if GATED:
            found *= some(x + N, m, n, N, W)
        return found

    @triton.jit
    def by_eights(SIZE: tl.constexpr):
        """Places of which a thread has eight neighbours, whatever their precision: else they would change threads."""
        return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE), 8), 8)

    @triton.jit
    def some(x, m, n, N: tl.constexpr, WIDTH: tl.constexpr):
        """Of a row of this width, those of the first N columns that are asked for."""
        return tl.load(x + tl.cast(m, tl.int64) * WIDTH + n, mask=n < N, other=0.0).to(tl.float32)

    @triton.jit
    def put(x, m, n, values, N: tl.constexpr, WIDTH: tl.constexpr):
        tl.store(x + tl.cast(m, tl.int64) * WIDTH + n, values.to(x.dtype.element_ty), mask=n < N)

    @triton.jit
    def largest(one, two):
        return tl.maximum(tl.max(tl.abs(one), 0), tl.max(tl.abs(two), 0))

    @triton.jit
    def scale(scales, m, most):
        """What a row is multiplied by for 8 bits, from the largest of it; what undoes it is written."""
        most = tl.maximum(most, BOTTOM)
        tl.store(scales + m, most / TOP)
        return TOP / most
