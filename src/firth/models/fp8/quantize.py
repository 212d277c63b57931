"""Quantize to FP8 with one scale per row, alone or fused with an activation and its backward pass.

E4M3 floats (Micikevicius et al. 2022, section 3) have a sign, 4 exponent bits and 3 mantissa bits: magnitudes from
2^-9 (the smallest subnormal) to 448. Quantizing a row has two steps: find its largest magnitude (amax), then divide
and round:

    scale = amax(|row|) / 448        float32, saved for the matmul that multiplies it back in
    row8  = round(row / scale)       to the nearest E4M3 number

The scale is computed from the row itself ("dynamic" scaling), so nothing ever overflows and no history of amax values
is kept. The cost is that a row must be complete before its first element can be written. The kernels therefore hold a
whole row in registers: one program reads it once, finds amax, and writes it in FP8. Rows of a width that is no power
of two are held as two parts, A + B >= N, because Triton's tensors have power-of-two sizes. In the kernels `a` and `b`
are the column indices of the two parts, and `x_a`, `x_b` their elements.

Two things are fused with quantizing, since the row is in registers anyway. `column_scale` (N,) multiplies the columns
first: for dx = dy W these are the row scales of W, which the matmul cannot apply (see `linear.py`). The column sums of
an output gradient are the gradient of the bias.

Torch's compiler fuses amax and rounding with whatever computes the row, but only while it fits one of its blocks; for
rows longer than `MAX_COMPILED_ROW_SIZE` it reads the row twice, and these kernels are faster.

Shapes: M rows of N elements, C Triton programs. A program sums the columns over its own rows; the caller adds up the C
partial sums.
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
FP8_MAX = 448.0  # largest finite E4M3 number
MIN_ROW_AMAX = 1e-30  # keeps the scale of an all-zero row positive
MAX_COMPILED_ROW_SIZE = 1024  # elements of a row up to which torch's compiler reads it once
RESERVED_SHARED_BYTES = 8192  # bytes of shared memory that are not for prefetched rows


class RowLaunch(NamedTuple):
    """Launch parameters of a persistent kernel: its programs share the rows evenly and prefetch their next ones."""

    programs_per_sm: int
    max_stages: int  # rows that are loaded ahead, at most
    elements_per_warp: int  # elements of a row per warp

    def num_programs(self, M: int, device: torch.device) -> int:
        return min(M, self.programs_per_sm * num_multiprocessors(device))

    def num_warps(self, N: int) -> int:
        return min(32, 1 << (-(-N // self.elements_per_warp) - 1).bit_length())

    def num_stages(self, row_bytes: int, device: torch.device) -> int:
        """Return how many rows are in flight, limited by the shared memory that prefetched rows take."""
        free = shared_memory_bytes(device.index or 0) - RESERVED_SHARED_BYTES if device.type == "cuda" else row_bytes
        return max(1, min(self.max_stages, free // row_bytes + 1))


QUANTIZE_LAUNCH = RowLaunch(10, 1, 2304)
ACTIVATION_LAUNCH = RowLaunch(16, 3, 768)
ACTIVATION_BWD_LAUNCH = RowLaunch(8, 3, 384)


def quantize_rowwise(
    x: Tensor, column_scale_N: Tensor | None = None, needs_sums: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `x * column_scale` in FP8, its row scales (M,), and with `needs_sums` the column sums of `x` (N,).

    If `x` is an output gradient, the sums are the gradient of the bias.
    """
    if can_use_triton(x) and (x.shape[1] > MAX_COMPILED_ROW_SIZE or not torch.compiler.is_compiling()):
        x8, scale_M, sums_CN = quantize_rows_triton(x, column_scale_N, needs_sums)
        return x8, scale_M, sums_CN.sum(0) if needs_sums else None
    y = x.float() if column_scale_N is None else x.float() * column_scale_N
    return *eager_quantize_rowwise(y), x.float().sum(0) if needs_sums else None


def eager_quantize_rowwise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` (M, N) in FP8 and its row scales (M,), by eager operations."""
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
        quantize_rows_kernel, (C,), x, x if column_scale_N is None else column_scale_N, x8, scale_M, sums_CN, M,
        N=N, A=A, B=B, HAS_COLUMN_SCALE=column_scale_N is not None, NEEDS_SUMS=needs_sums,
        NUM_STAGES=QUANTIZE_LAUNCH.num_stages(8 * N, x.device), num_warps=QUANTIZE_LAUNCH.num_warps(N),
    )  # fmt: skip
    return x8, scale_M, sums_CN


@kernel_op("firth::quantize_activation")
def quantize_activation(x: Tensor, bias: Tensor | None, activation_index: int, is_gated: bool) -> tuple[Tensor, Tensor]:
    """Return `activation(x + bias)` in FP8 and its row scales; gated: activation(x[:, :N]) * x[:, N:]."""
    if not can_use_triton(x):
        return eager_quantize_rowwise(eager_activation(x, bias, activation_index, is_gated)[0])
    x = x.contiguous()
    M, N = len(x), x.shape[1] // (1 + is_gated)
    y8, scale_M, _ = allocate_quantized_rows(x, N)
    A, B = split_into_powers_of_two(N)
    launch(
        quantize_activation_kernel, (ACTIVATION_LAUNCH.num_programs(M, x.device),),
        x, x if bias is None else bias, y8, scale_M, M,
        N=N, A=A, B=B, ACTIVATION=activation_index, IS_GATED=is_gated, HAS_BIAS=bias is not None,
        NUM_STAGES=ACTIVATION_LAUNCH.num_stages(8 * N, x.device), num_warps=ACTIVATION_LAUNCH.num_warps(N),
    )  # fmt: skip
    return y8, scale_M


@kernel_op("firth::quantize_activation_backward")
def quantize_activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, column_scale: Tensor, activation_index: int, is_gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the recomputed activation y; dx; `dx * column_scale` in FP8 and its row scales; and with a bias the
    partial sums (C, N) of its gradient.
    """
    if not can_use_triton(x):
        y, (sigmoid, slope), gate, value = eager_activation(x, bias, activation_index, is_gated)
        dx = dy.float() * (sigmoid + gate * slope)
        if value is not None:
            dx = torch.cat([dx * value, dy.float() * gate * sigmoid], 1)
        sums = dx.sum(0, keepdim=True) if bias is not None else x.new_empty(0, x.shape[1], dtype=torch.float32)
        return y.to(dy.dtype), dx.to(x.dtype), *eager_quantize_rowwise(dx * column_scale), sums
    dy, x = dy.contiguous(), x.contiguous()
    (M, N), C = dy.shape, ACTIVATION_BWD_LAUNCH.num_programs(len(dy), dy.device)
    y, dx = torch.empty_like(dy), torch.empty_like(x)
    dx8, scale_M, sums_CN = allocate_quantized_rows(x, x.shape[1], 0 if bias is None else C)
    A, B = split_into_powers_of_two(N)
    row_bytes = N * dy.element_size() + x.shape[1] * (x.element_size() + 4) + (0 if bias is None else N * 4)
    launch(
        quantize_activation_bwd_kernel, (C,),
        dy, x, x if bias is None else bias, column_scale, y, dx, dx8, scale_M, sums_CN, M,
        N=N, A=A, B=B, ACTIVATION=activation_index, IS_GATED=is_gated, HAS_BIAS=bias is not None,
        NUM_STAGES=ACTIVATION_BWD_LAUNCH.num_stages(row_bytes, x.device), num_warps=ACTIVATION_BWD_LAUNCH.num_warps(N),
    )  # fmt: skip
    return y, dx, dx8, scale_M, sums_CN


def eager_activation(
    x: Tensor, bias: Tensor | None, activation_index: int, is_gated: bool
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor | None]:
    """Return the activation, (s, s'), the gate, and the value that it gates (or None).

    Each activation is gate * s(gate) with s(x) = sigmoid(P(x)): for SiLU P(x) = x, for GELU s is close to the normal
    CDF (`kernels/activation.py`).
    """
    h = x.float() if bias is None else x.float() + bias.float()
    gate, value = h.chunk(2, 1) if is_gated else (h, None)
    factors = sigmoid_gate_and_slope(gate, KERNEL_ACTIVATIONS[activation_index])
    y = gate * factors[0]
    return y if value is None else y * value, factors, gate, value


def allocate_quantized_rows(x: Tensor, width: int, C: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty FP8 rows (M, `width`), row scales (M,) and partial sums (C, `width`)."""
    sums_CN = x.new_empty(C, width, dtype=torch.float32)
    return x.new_empty(len(x), width, dtype=FP8_DTYPE), x.new_empty(len(x), dtype=torch.float32), sums_CN


def split_into_powers_of_two(N: int) -> tuple[int, int]:
    """Return powers of two A and B with A + B >= N, the smallest such: the two parts of a row in a kernel."""
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
            x_a, x_b = load_columns(x, m, a, N, N), load_columns(x, m, b, N, N)
            if NEEDS_SUMS:
                total_a += x_a
                total_b += x_b
            if HAS_COLUMN_SCALE:
                x_a *= load_columns(column_scale, 0, a, N, N)
                x_b *= load_columns(column_scale, 0, b, N, N)
            inverse = store_row_scale(scales, m, max_abs(x_a, x_b))
            store_columns(x8, m, a, x_a * inverse, N, N)
            store_columns(x8, m, b, x_b * inverse, N, N)
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
            x_a = activation_row(x, bias, m, a, N, ACTIVATION, IS_GATED, HAS_BIAS)
            x_b = activation_row(x, bias, m, b, N, ACTIVATION, IS_GATED, HAS_BIAS)
            inverse = store_row_scale(scales, m, max_abs(x_a, x_b))
            store_columns(y8, m, a, x_a * inverse, N, N)
            store_columns(y8, m, b, x_b * inverse, N, N)

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
            x_a, value_a = activation_row_grad(dy, x, bias, y, dx, m, a, N, ACTIVATION, IS_GATED, HAS_BIAS)
            x_b, value_b = activation_row_grad(dy, x, bias, y, dx, m, b, N, ACTIVATION, IS_GATED, HAS_BIAS)
            if HAS_BIAS:
                total_a += x_a
                total_b += x_b
            x_a *= load_columns(column_scale, 0, a, N, N)
            x_b *= load_columns(column_scale, 0, b, N, N)
            amax = max_abs(x_a, x_b)
            if IS_GATED:
                value_a *= load_columns(column_scale + N, 0, a, N, N)
                value_b *= load_columns(column_scale + N, 0, b, N, N)
                amax = tl.maximum(amax, max_abs(value_a, value_b))
            inverse = store_row_scale(scales, m, amax)
            store_columns(dx8, m, a, x_a * inverse, N, W)
            store_columns(dx8, m, b, x_b * inverse, N, W)
            if IS_GATED:
                store_columns(dx8 + N, m, a, value_a * inverse, N, W)
                store_columns(dx8 + N, m, b, value_b * inverse, N, W)
        if HAS_BIAS:
            store_columns(sums, tl.program_id(0), a, total_a, N, N)
            store_columns(sums, tl.program_id(0), b, total_b, N, N)

    @triton.jit
    def activation_row_grad(
        dy, x, bias, y, dx, m, n,
        N: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ):  # fmt: skip
        """Store y and dx of some columns; return the gradients of gate and value (ungated: of `x`, twice)."""
        W: tl.constexpr = 2 * N if IS_GATED else N
        gate, dy_n = load_columns(x, m, n, N, W), load_columns(dy, m, n, N, N)
        if HAS_BIAS:
            gate += load_columns(bias, 0, n, N, N)
        sigmoid, slope = sigmoid_gate_in_kernel(gate, ACTIVATION)
        y_n, dgate = gate * sigmoid, dy_n * (sigmoid + gate * slope)
        dvalue = dgate
        if IS_GATED:
            value = load_columns(x + N, m, n, N, W)
            dgate, dvalue = dgate * value, dy_n * y_n
            y_n *= value
            store_columns(dx + N, m, n, dvalue, N, W)
        store_columns(y, m, n, y_n, N, N)
        store_columns(dx, m, n, dgate, N, W)
        return dgate, dvalue

    @triton.jit
    def activation_row(
        x, bias, m, n, N: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr
    ):
        W: tl.constexpr = 2 * N if IS_GATED else N
        gate = load_columns(x, m, n, N, W)
        if HAS_BIAS:
            gate += load_columns(bias, 0, n, N, N)
        sigmoid, _ = sigmoid_gate_in_kernel(gate, ACTIVATION)
        y = gate * sigmoid
        if IS_GATED:
            y *= load_columns(x + N, m, n, N, W)
        return y

    @triton.jit
    def contiguous_range(SIZE: tl.constexpr):
        """Indices of which each thread owns eight neighbours, whatever the dtype: no exchange between threads."""
        return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE), 8), 8)

    @triton.jit
    def load_columns(x, m, n, N: tl.constexpr, WIDTH: tl.constexpr):
        """Load columns n < N of row m, in float32; rows are WIDTH apart."""
        return tl.load(x + tl.cast(m, tl.int64) * WIDTH + n, mask=n < N, other=0.0).to(tl.float32)

    @triton.jit
    def store_columns(x, m, n, values, N: tl.constexpr, WIDTH: tl.constexpr):
        tl.store(x + tl.cast(m, tl.int64) * WIDTH + n, values.to(x.dtype.element_ty), mask=n < N)

    @triton.jit
    def max_abs(x_a, x_b):
        return tl.maximum(tl.max(tl.abs(x_a), 0), tl.max(tl.abs(x_b), 0))

    @triton.jit
    def store_row_scale(scales, m, amax):
        """Store a row's scale, and return its inverse."""
        amax = tl.maximum(amax, TL_MIN_ROW_AMAX)
        tl.store(scales + m, amax / TL_FP8_MAX)
        return TL_FP8_MAX / amax
