"""Numbers in 8 bits, each row with a scale of its own: by torch's compiler where it makes the numbers in one pass, and
by kernels where rows are long, or come out of kernels.

M rows of N numbers, C programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from firth.models.kernels.activation import sigmoid_gate_and_slope
from firth.models.kernels.glu import KERNEL_ACTIVATIONS
from firth.models.kernels.launch import kernel_op, launch
from firth.models.kernels.tiling import num_multiprocessors, shared_memory_bytes, triton

if triton is not None:
    import triton.language as tl

    from firth.models.kernels.glu import sigmoid_gate_in_kernel

FP8_DTYPE, BF16 = torch.float8_e4m3fn, torch.bfloat16
FP8_MAX = 448.0  # the largest of its numbers
MIN_ROW_AMAX = 1e-30  # rows of 0 stay so
MAX_COMPILED_ROW_SIZE = 1024  # numbers of a row up to which torch's compiler reads it once
RESERVED_SHARED_BYTES = 8192  # bytes of shared memory that are for other things than rows


class RowLaunch(NamedTuple):
    """How a kernel goes through rows: so many programs at once on a processor, which share the rows evenly, the next of
    theirs read meanwhile, and a warp for so many numbers of each.
    """

    programs_per_sm: int
    max_stages: int
    elements_per_warp: int

    def num_programs(self, M: int, device: torch.device) -> int:
        return min(M, self.programs_per_sm * num_multiprocessors(device))

    def num_warps(self, N: int) -> int:
        return min(32, 1 << (-(-N // self.elements_per_warp) - 1).bit_length())

    def num_stages(self, row_bytes: int, device: torch.device) -> int:
        """How many rows are on their way, if there is room for those that are read ahead."""
        room = shared_memory_bytes(device.index or 0) - RESERVED_SHARED_BYTES if device.type == "cuda" else row_bytes
        return max(1, min(self.max_stages, room // row_bytes + 1))


QUANTIZE_LAUNCH, ACTIVATION_LAUNCH, ACTIVATION_BWD_LAUNCH = (
    RowLaunch(10, 1, 2304),
    RowLaunch(16, 3, 768),
    RowLaunch(8, 3, 384),
)


def quantize_scaled_rows(
    x: Tensor, column_scale_N: Tensor | None = None, needs_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`x`, each column times a factor, in 8 bits; the scales of its rows; and, where asked for, what `x` adds up to."""
    if can_use_triton(x) and (x.shape[1] > MAX_COMPILED_ROW_SIZE or not torch.compiler.is_compiling()):
        x8, scale_M, sums_CN = quantize_rows_triton(x, column_scale_N, needs_sums)
        return x8, scale_M, sums_CN.sum(0) if needs_sums else None
    y = x.float() if column_scale_N is None else x.float() * column_scale_N
    return *quantize_rowwise(y), x.float().sum(0) if needs_sums else None


def quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    scale_M = x.abs().amax(1).clamp(min=MIN_ROW_AMAX) / FP8_MAX
    return (x * (1 / scale_M)[:, None]).to(FP8_DTYPE), scale_M


def can_use_triton(x: Tensor) -> bool:
    return triton is not None and x.device.type == "cuda"


@kernel_op("firth::quantize_rows")
def quantize_rows_triton(x: Tensor, column_scale_N: Tensor | None, needs_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    (M, N), C = x.shape, QUANTIZE_LAUNCH.num_programs(len(x), x.device)
    x8, scale_M, sums_CN = allocate_quantized_rows(x, N, C if needs_sums else 0)
    A, B = split_into_powers_of_two(N)
    launch(
        quantize_rows_kernel, (C,), x, x if column_scale_N is None else column_scale_N, x8, scale_M, sums_CN, M, N=N, A=A, B=B,
        HAS_COLUMN_SCALE=column_scale_N is not None, NEEDS_SUMS=needs_sums, NUM_STAGES=QUANTIZE_LAUNCH.num_stages(8 * N, x.device), num_warps=QUANTIZE_LAUNCH.num_warps(N),
    )  # fmt: skip
    return x8, scale_M, sums_CN


@kernel_op("firth::quantize_activation")
def quantize_activation(x: Tensor, bias: Tensor | None, activation_index: int, is_gated: bool) -> tuple[Tensor, Tensor]:
    """An activation of `x` with its bias, in 8 bits; with a gate, of its first half, times the second."""
    if not can_use_triton(x):
        return quantize_rowwise(eager_activation(x, bias, activation_index, is_gated)[0])
    x = x.contiguous()
    M, N = len(x), x.shape[1] // (1 + is_gated)
    y8, scale_M, _ = allocate_quantized_rows(x, N)
    A, B = split_into_powers_of_two(N)
    launch(
        quantize_activation_kernel, (ACTIVATION_LAUNCH.num_programs(M, x.device),), x, x if bias is None else bias, y8, scale_M, M, N=N, A=A,
        B=B, ACTIVATION=activation_index, IS_GATED=is_gated, HAS_BIAS=bias is not None, NUM_STAGES=ACTIVATION_LAUNCH.num_stages(8 * N, x.device),
        num_warps=ACTIVATION_LAUNCH.num_warps(N),
    )  # fmt: skip
    return y8, scale_M


@kernel_op("firth::quantize_activation_backward")
def quantize_activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, column_scale: Tensor, activation_index: int, is_gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The activation again; the gradient of `x`, as it is and (times a factor for each column) in 8 bits with its
    scales; and, with a bias, what it adds up to in each program.
    """
    if not can_use_triton(x):
        y, (below, slope), gate, value = eager_activation(x, bias, activation_index, is_gated)
        error = dy.float() * (below + gate * slope)
        if value is not None:
            error = torch.cat([error * value, dy.float() * gate * below], 1)
        sums = error.sum(0, keepdim=True) if bias is not None else x.new_empty(0, x.shape[1], dtype=torch.float32)
        return y.to(dy.dtype), error.to(x.dtype), *quantize_rowwise(error * column_scale), sums
    dy, x = dy.contiguous(), x.contiguous()
    (M, N), C = dy.shape, ACTIVATION_BWD_LAUNCH.num_programs(len(dy), dy.device)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dx8, scale_M, sums_CN = allocate_quantized_rows(x, x.shape[1], 0 if bias is None else C)
    A, B = split_into_powers_of_two(N)
    row = N * dy.element_size() + x.shape[1] * (x.element_size() + 4) + (0 if bias is None else N * 4)
    launch(
        quantize_activation_bwd_kernel, (C,), dy, x, x if bias is None else bias, column_scale, y, dx, dx8, scale_M, sums_CN, M,
        N=N, A=A, B=B, ACTIVATION=activation_index, IS_GATED=is_gated, HAS_BIAS=bias is not None, NUM_STAGES=ACTIVATION_BWD_LAUNCH.num_stages(row, x.device),
        num_warps=ACTIVATION_BWD_LAUNCH.num_warps(N),
    )  # fmt: skip
    return y, dx, dx8, scale_M, sums_CN


def eager_activation(
    x: Tensor, bias: Tensor | None, activation_index: int, is_gated: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """By single operations: what is found, its share with the slope of that, the gate, and the value that it is for."""
    h = x.float() if bias is None else x.float() + bias.float()
    gate, value = h.chunk(2, 1) if is_gated else (h, None)
    found = sigmoid_gate_and_slope(gate, KERNEL_ACTIVATIONS[activation_index])
    y = gate * found[0]
    return y if value is None else y * value, found, gate, value


def allocate_quantized_rows(x: Tensor, width: int, C: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Room for rows in 8 bits, for their scales, and for the sums of so many programs."""
    sums_CN = x.new_empty(C, width, dtype=torch.float32)
    return x.new_empty(len(x), width, dtype=FP8_DTYPE), x.new_empty(len(x), dtype=torch.float32), sums_CN


def split_into_powers_of_two(N: int) -> tuple[int, int]:
    """Two powers of two that cover N, exactly if they can: what a kernel has of a row."""
    first = 1 << ((N - 1).bit_length() - 1)
    return first, 1 << (N - first - 1).bit_length()


if triton is not None:
    TL_FP8_MAX, TL_MIN_ROW_AMAX = tl.constexpr(FP8_MAX), tl.constexpr(MIN_ROW_AMAX)

    @triton.jit
    def quantize_rows_kernel(
        x, column_scale, x8, scales, sums, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, HAS_COLUMN_SCALE: tl.constexpr,
        NEEDS_SUMS: tl.constexpr, NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        a, b = contiguous_range(A), A + contiguous_range(B)
        total_a, total_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
            one, two = load_columns(x, m, a, N, N), load_columns(x, m, b, N, N)
            if NEEDS_SUMS:
                total_a += one
                total_b += two
            if HAS_COLUMN_SCALE:
                one *= load_columns(column_scale, 0, a, N, N)
                two *= load_columns(column_scale, 0, b, N, N)
            inverse = store_row_scale(scales, m, max_abs(one, two))
            store_columns(x8, m, a, one * inverse, N, N)
            store_columns(x8, m, b, two * inverse, N, N)
        if NEEDS_SUMS:
            store_columns(sums, tl.program_id(0), a, total_a, N, N)
            store_columns(sums, tl.program_id(0), b, total_b, N, N)

    @triton.jit
    def quantize_activation_kernel(
        x, bias, y8, scales, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ACTIVATION: tl.constexpr,
        IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        a, b = contiguous_range(A), A + contiguous_range(B)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
            one = activation_row(x, bias, m, a, N, ACTIVATION, IS_GATED, HAS_BIAS)
            two = activation_row(x, bias, m, b, N, ACTIVATION, IS_GATED, HAS_BIAS)
            inverse = store_row_scale(scales, m, max_abs(one, two))
            store_columns(y8, m, a, one * inverse, N, N)
            store_columns(y8, m, b, two * inverse, N, N)

    @triton.jit
    def quantize_activation_bwd_kernel(
        dy, x, bias, column_scale, y, dx, dx8, scales, sums, M,
        N: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ACTIVATION: tl.constexpr,
        IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_STAGES: tl.constexpr,
    ):  # fmt: skip
        W: tl.constexpr = 2 * N if IS_GATED else N
        a, b = contiguous_range(A), A + contiguous_range(B)
        total_a, total_b = tl.zeros([A], tl.float32), tl.zeros([B], tl.float32)
        for m in tl.range(tl.program_id(0), M, tl.num_programs(0), num_stages=NUM_STAGES):
            one, one_value = activation_row_grad(dy, x, bias, y, dx, m, a, N, ACTIVATION, IS_GATED, HAS_BIAS)
            two, two_value = activation_row_grad(dy, x, bias, y, dx, m, b, N, ACTIVATION, IS_GATED, HAS_BIAS)
            if HAS_BIAS:
                total_a += one
                total_b += two
            one *= load_columns(column_scale, 0, a, N, N)
            two *= load_columns(column_scale, 0, b, N, N)
            most = max_abs(one, two)
            if IS_GATED:
                one_value *= load_columns(column_scale + N, 0, a, N, N)
                two_value *= load_columns(column_scale + N, 0, b, N, N)
                most = tl.maximum(most, max_abs(one_value, two_value))
            inverse = store_row_scale(scales, m, most)
            store_columns(dx8, m, a, one * inverse, N, W)
            store_columns(dx8, m, b, two * inverse, N, W)
            if IS_GATED:
                store_columns(dx8 + N, m, a, one_value * inverse, N, W)
                store_columns(dx8 + N, m, b, two_value * inverse, N, W)
        if HAS_BIAS:
            store_columns(sums, tl.program_id(0), a, total_a, N, N)
            store_columns(sums, tl.program_id(0), b, total_b, N, N)

    @triton.jit
    def activation_row_grad(
        dy, x, bias, y, dx, m, n, N: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr
    ):  # fmt: skip
        """The gradients of gate and value (without a gate, of `x`, twice), which are written, as is what they make."""
        W: tl.constexpr = 2 * N if IS_GATED else N
        gate, error = load_columns(x, m, n, N, W), load_columns(dy, m, n, N, N)
        if HAS_BIAS:
            gate += load_columns(bias, 0, n, N, N)
        below, slope = sigmoid_gate_in_kernel(gate, ACTIVATION)
        found, of_gate = gate * below, error * (below + gate * slope)
        of_value = of_gate
        if IS_GATED:
            value = load_columns(x + N, m, n, N, W)
            of_gate, of_value = of_gate * value, error * found
            found *= value
            store_columns(dx + N, m, n, of_value, N, W)
        store_columns(y, m, n, found, N, N)
        store_columns(dx, m, n, of_gate, N, W)
        return of_gate, of_value

    @triton.jit
    def activation_row(
        x, bias, m, n, N: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr
    ):
        W: tl.constexpr = 2 * N if IS_GATED else N
        gate = load_columns(x, m, n, N, W)
        if HAS_BIAS:
            gate += load_columns(bias, 0, n, N, N)
        below, _ = sigmoid_gate_in_kernel(gate, ACTIVATION)
        found = gate * below
        if IS_GATED:
            found *= load_columns(x + N, m, n, N, W)
        return found

    @triton.jit
    def contiguous_range(SIZE: tl.constexpr):
        """Places of which a thread has eight neighbours, whatever their precision: else they would change threads."""
        return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE), 8), 8)

    @triton.jit
    def load_columns(x, m, n, N: tl.constexpr, WIDTH: tl.constexpr):
        """Of a row of this width, those of the first N columns that are asked for."""
        return tl.load(x + tl.cast(m, tl.int64) * WIDTH + n, mask=n < N, other=0.0).to(tl.float32)

    @triton.jit
    def store_columns(x, m, n, values, N: tl.constexpr, WIDTH: tl.constexpr):
        tl.store(x + tl.cast(m, tl.int64) * WIDTH + n, values.to(x.dtype.element_ty), mask=n < N)

    @triton.jit
    def max_abs(one, two):
        return tl.maximum(tl.max(tl.abs(one), 0), tl.max(tl.abs(two), 0))

    @triton.jit
    def store_row_scale(scales, m, amax):
        """What a row is multiplied by for 8 bits, from the largest of it; what undoes it is written."""
        amax = tl.maximum(amax, TL_MIN_ROW_AMAX)
        tl.store(scales + m, amax / TL_FP8_MAX)
        return TL_FP8_MAX / amax
