"""Linear layers of a decode step: norm, matmul, bias, activation and residual in one kernel.

A decode step computes one token per row, so that every matmul has as many rows as the batch: 1 to about 100. It reads
each weight once and computes little with it (memory-bound). GPT-2's 250 MB in bfloat16 take 60 microseconds at 4 TB/s,
but a step of one kernel per operation has 300 kernels, and each costs 2 to 3 microseconds however little it does. So
the operations around a matmul belong into its kernel:

    y = residual + activation(norm(x) @ weight.T + bias)

Every program computes some columns of y and needs all of x: it normalizes x itself, from the cache. That repeats a few
thousand operations per program, and saves a kernel. Results are rounded where the separate operations would round.

Two kernels: one row is a matrix-vector product, by multiplications and a sum; more rows use tensor cores.

Post-norm blocks (BART) add the normalized input to the output, so that `return_normed` returns norm(x) as well. Where
attention was split over its keys (`decode_attention.py`), x is combined from the parts while it is loaded.

Shapes: M rows, K inputs, N outputs, P parts of the keys, H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.glu import KERNEL_ACTIVATIONS
from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

    from firth.models.kernels.glu import sigmoid_gate_in_kernel

DECODE_ACTIVATIONS = [*KERNEL_ACTIVATIONS, "relu"]  # kernels take the index of an activation in this list
MAX_NORM_FEATURES = 16384  # features of a row that one program normalizes
GEMV_TARGET_PROGRAMS = 192  # programs of a matrix-vector product, at least, where it has enough columns
MATMUL_TARGET_PROGRAMS = 128  # programs of a matmul, at least, where it has enough columns


class NormArgs(NamedTuple):
    """A norm over the features of x: LayerNorm, or RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool

    @classmethod
    def of(cls, norm: nn.Module) -> NormArgs | None:
        """Return the arguments of a norm module; None for the identity."""
        if isinstance(norm, nn.RMSNorm):
            assert norm.eps is not None
            return cls(norm.weight, None, norm.eps, True)
        if isinstance(norm, nn.LayerNorm):
            return cls(norm.weight, norm.bias, norm.eps, False)
        assert isinstance(norm, nn.Identity)
        return None

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class SplitHeads(NamedTuple):
    """The outputs of attention over P parts of the keys, and the log of each part's sum of exponentials."""

    y: Tensor  # (P, M, K) float32
    lse: Tensor  # (P, M, H) float32

    def combine(self, dtype: torch.dtype) -> Tensor:
        """Return (M, K): the parts weighted by their share of the softmax."""
        P, M, K = self.y.shape
        share_PMH = self.lse.softmax(0)
        y = self.y.view(P, M, share_PMH.shape[2], -1) * share_PMH[..., None]
        return y.sum(0).view(M, K).to(dtype)


def decode_linear(
    x: Tensor | SplitHeads,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    norm: NormArgs | None = None,
    activation: str | None = None,
    is_gated: bool = False,
    residual_MN: Tensor | None = None,
    scale: float = 1.0,
    return_normed: bool = False,
    out_MN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `residual + activation(scale * norm(x) @ weight.T + bias)` (M, N), and norm(x) if `return_normed`, else x.

    `is_gated`: the first half of the outputs are gates, `activation(gate) * value`, and N is half as large. `out_MN`
    receives the result.
    """
    if isinstance(x, SplitHeads) and x.y.shape[1] > 1:
        x = x.combine(weight_NK.dtype)
    first = x.y if isinstance(x, SplitHeads) else x
    if triton is None or not uses_decode_kernels(first):
        x = x.combine(weight_NK.dtype) if isinstance(x, SplitHeads) else x
        y_MN, normed = decode_linear_reference(
            x, weight_NK, bias_N, norm, activation, is_gated, residual_MN, scale, return_normed
        )
        return (y_MN if out_MN is None else out_MN.copy_(y_MN)), normed
    M, K = first.shape[-2:]
    N = len(weight_NK) // 2 if is_gated else len(weight_NK)
    y_MN = torch.empty(M, N, dtype=weight_NK.dtype, device=weight_NK.device) if out_MN is None else out_MN
    normed = torch.empty_like(first) if return_normed and norm is not None else first
    tile = gemv_tile(N, K, is_gated) if M == 1 else matmul_tile(M, N, K)
    # Triton wants a tensor for every pointer: `first` stands for those that a kernel does not read.
    arguments = (
        first,
        x.lse if isinstance(x, SplitHeads) else first,
        first if norm is None else norm.weight,
        first if norm is None or norm.bias is None else norm.bias,
        weight_NK,
        first if bias_N is None else bias_N,
        first if residual_MN is None else residual_MN,
        y_MN,
        normed,
        0.0 if norm is None else norm.eps,
        scale,
        M,
        N,
    )
    constants = dict(
        K=K,
        NORM=0 if norm is None else 1 if norm.is_rms else 2,
        HAS_NORM_BIAS=norm is not None and norm.bias is not None,
        HAS_BIAS=bias_N is not None,
        HAS_RESIDUAL=residual_MN is not None,
        ACTIVATION=-1 if activation is None else DECODE_ACTIVATIONS.index(activation),
        IS_GATED=is_gated,
        STORE_NORMED=return_normed and norm is not None,
        IS_EVEN_K=K % tile.block_k == 0,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if M == 1:
        parts, _, num_heads = x.lse.shape if isinstance(x, SplitHeads) else (0, 1, 1)
        launch(
            decode_gemv_kernel, (triton.cdiv(N, tile.block_n),), *arguments,
            PARTS=parts, NUM_HEADS=num_heads, ALL_K=triton.next_power_of_2(K), **constants,
        )  # fmt: skip
    else:
        grid = (triton.cdiv(N, tile.block_n), triton.cdiv(M, tile.block_m))
        launch(
            decode_matmul_kernel, grid, *arguments,
            BLOCK_M=tile.block_m, IS_FP32=weight_NK.dtype == torch.float32, **constants,
        )  # fmt: skip
    return y_MN, normed


def uses_decode_kernels(x: Tensor) -> bool:
    """Whether the kernels run on this device. The tests also run them in Triton's interpreter."""
    return x.is_cuda


class Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def gemv_tile(N: int, K: int, is_gated: bool) -> Tile:
    """Columns per program: as many as leave work for every multiprocessor, at most 32."""
    block_n = 32
    while block_n > 4 and N // block_n < GEMV_TARGET_PROGRAMS:
        block_n //= 2
    if is_gated:
        block_n = max(4, block_n // 2)
    return Tile(1, block_n, largest_block(K, 512), 4, 1)


def matmul_tile(M: int, N: int, K: int) -> Tile:
    """Few columns per program where N is small; rows are then spread over programs as well."""
    block_m = 16 if M <= 16 else 32 if M <= 32 else 64
    block_n = 128
    while block_n > 16 and -(-N // block_n) * -(-M // block_m) < MATMUL_TARGET_PROGRAMS:
        block_n //= 2
    while block_m > 16 and -(-N // block_n) * -(-M // block_m) < MATMUL_TARGET_PROGRAMS * 2 // 3:
        block_m //= 2
    return Tile(block_m, block_n, largest_block(K, 128 if block_n < 128 else 64), 4, 3)


def largest_block(K: int, limit: int) -> int:
    """Return the largest power of two up to `limit` that divides K, at least 32."""
    return max(32, min(limit, K & -K))


def decode_linear_reference(
    x_MK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm: NormArgs | None,
    activation: str | None,
    is_gated: bool,
    residual_MN: Tensor | None,
    scale: float,
    return_normed: bool,
) -> tuple[Tensor, Tensor]:
    """`decode_linear` by one operation after another."""
    normed_MK = x_MK if norm is None else norm(x_MK)
    y = F.linear(normed_MK if scale == 1.0 else normed_MK * scale, weight_NK, bias_N)
    if is_gated:
        gate, y = y.chunk(2, -1)
        assert activation is not None
        y = ACTIVATIONS[activation](gate) * y
    elif activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual_MN is None else residual_MN + y, normed_MK if return_normed else x_MK


if triton is not None:

    @triton.jit
    def activate(h, ACTIVATION: tl.constexpr):
        if ACTIVATION == 3:
            return tl.maximum(h, 0.0)
        sigmoid, _ = sigmoid_gate_in_kernel(h, ACTIVATION)
        return h * sigmoid

    @triton.jit
    def finish(acc, value, dtype: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr):
        """The activation of the matmul's result, or gate times value; rounded as separate operations round."""
        h = acc.to(dtype).to(tl.float32)
        if ACTIVATION >= 0:
            h = activate(h, ACTIVATION).to(dtype).to(tl.float32)
        if IS_GATED:
            h = (h * value.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        return h

    @triton.jit
    def decode_gemv_kernel(
        x, lse, norm_weight, norm_bias, weight, bias, residual, y, normed, eps, scale, M, N,
        K: tl.constexpr, NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, STORE_NORMED: tl.constexpr,
        IS_EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
        NUM_HEADS: tl.constexpr, ALL_K: tl.constexpr,
    ):  # fmt: skip
        """One row. A program computes BLOCK_N columns, BLOCK_K inputs at a time, and sums over inputs at the end."""
        dtype: tl.constexpr = y.dtype.element_ty
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = n < N
        row_at = n.to(tl.int64)[:, None] * K
        mean, rstd = 0.0, 1.0
        if NORM:
            all_k = tl.arange(0, ALL_K)
            row = tl.load(x + all_k, mask=all_k < K, other=0.0).to(tl.float32)
            if NORM == 2:
                mean = tl.sum(row, 0) / K
            centered = tl.where(all_k < K, row - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centered * centered, 0) / K + eps)
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        acc_value = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside_k = k < K
            inside = inside_n[:, None] if IS_EVEN_K else inside_n[:, None] & inside_k[None, :]
            w = tl.load(weight + row_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
            if PARTS:
                part = tl.arange(0, PARTS)[:, None]
                lse_part = tl.load(
                    lse + part * NUM_HEADS + (k // (K // NUM_HEADS))[None, :], mask=inside_k[None, :], other=0.0
                )
                share = tl.exp(lse_part - tl.max(lse_part, 0)[None, :])
                y_part = tl.load(x + part * K + k[None, :], mask=inside_k[None, :], other=0.0)
                x_k = tl.sum(y_part * share, 0) / tl.sum(share, 0)
                x_k = x_k.to(dtype).to(tl.float32)
            else:
                x_k = tl.load(x + k, mask=inside_k, other=0.0).to(tl.float32)
            if NORM:
                x_k = (x_k - mean) * rstd * tl.load(norm_weight + k, mask=inside_k, other=0.0).to(tl.float32)
                if HAS_NORM_BIAS:
                    x_k += tl.load(norm_bias + k, mask=inside_k, other=0.0).to(tl.float32)
                x_k = x_k.to(dtype)
                if STORE_NORMED:
                    tl.store(normed + k, x_k, mask=inside_k & (tl.program_id(0) == 0))
                x_k = x_k.to(tl.float32)
            acc += w * x_k[None, :]
            if IS_GATED:
                w = tl.load(weight + N.to(tl.int64) * K + row_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
                acc_value += w * x_k[None, :]
        h, value = tl.sum(acc, 1) * scale, tl.sum(acc_value, 1) * scale
        if HAS_BIAS:
            h += tl.load(bias + n, mask=inside_n, other=0.0).to(tl.float32)
            if IS_GATED:
                value += tl.load(bias + N + n, mask=inside_n, other=0.0).to(tl.float32)
        h = finish(h, value, dtype, ACTIVATION, IS_GATED)
        if HAS_RESIDUAL:
            h += tl.load(residual + n, mask=inside_n, other=0.0).to(tl.float32)
        tl.store(y + n, h.to(dtype), mask=inside_n)

    @triton.jit
    def decode_matmul_kernel(
        x, lse, norm_weight, norm_bias, weight, bias, residual, y, normed, eps, scale, M, N,
        K: tl.constexpr, NORM: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr,
        HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_GATED: tl.constexpr, STORE_NORMED: tl.constexpr,
        IS_EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
        IS_FP32: tl.constexpr,
    ):  # fmt: skip
        """Several rows. A program computes a tile of BLOCK_M rows and BLOCK_N columns."""
        dtype: tl.constexpr = y.dtype.element_ty
        precision: tl.constexpr = "ieee" if IS_FP32 else "tf32"
        m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_m, inside_n = (m < M)[:, None], (n < N)[None, :]
        x_at = m.to(tl.int64)[:, None] * K
        w_at = n.to(tl.int64)[None, :] * K
        mean = tl.zeros([BLOCK_M], tl.float32)
        rstd = tl.full([BLOCK_M], 1.0, tl.float32)
        if NORM:
            total, squares = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
            for start in range(0, K, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                mask = inside_m if IS_EVEN_K else inside_m & (k < K)[None, :]
                tile = tl.load(x + x_at + k[None, :], mask=mask, other=0.0).to(tl.float32)
                total += tl.sum(tile, 1)
                squares += tl.sum(tile * tile, 1)
            if NORM == 2:
                mean = total / K
            rstd = tl.rsqrt(tl.maximum(squares / K - mean * mean, 0.0) + eps)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside_k = k < K
            x_mask = inside_m if IS_EVEN_K else inside_m & inside_k[None, :]
            w_mask = inside_n if IS_EVEN_K else inside_n & inside_k[:, None]
            x_tile = tl.load(x + x_at + k[None, :], mask=x_mask, other=0.0)
            w_tile = tl.load(weight + w_at + k[:, None], mask=w_mask, other=0.0)
            if NORM:
                gain = tl.load(norm_weight + k, mask=inside_k, other=0.0).to(tl.float32)
                scaled = (x_tile.to(tl.float32) - mean[:, None]) * rstd[:, None] * gain[None, :]
                if HAS_NORM_BIAS:
                    scaled += tl.load(norm_bias + k, mask=inside_k, other=0.0).to(tl.float32)[None, :]
                x_tile = scaled.to(dtype)
                if STORE_NORMED:
                    tl.store(normed + x_at + k[None, :], x_tile, mask=x_mask & (tl.program_id(0) == 0))
            acc = tl.dot(x_tile, w_tile, acc, input_precision=precision)
            if IS_GATED:
                v_tile = tl.load(weight + N.to(tl.int64) * K + w_at + k[:, None], mask=w_mask, other=0.0)
                acc_value = tl.dot(x_tile, v_tile, acc_value, input_precision=precision)
        acc *= scale
        acc_value *= scale
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            if IS_GATED:
                acc_value += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        h = finish(acc, acc_value, dtype, ACTIVATION, IS_GATED)
        at, inside = m.to(tl.int64)[:, None] * N + n[None, :], inside_m & inside_n
        if HAS_RESIDUAL:
            h += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + at, h.to(dtype), mask=inside)
