"""FP8 copies of the weights, quantized once per step by one kernel for all layers.

Weights change once per step, but a step may have many micro-batches, and each layer would quantize its weight with a
kernel of its own. Within `cache_fp8_weights` every layer holds its weight in FP8 twice: as rows (O, I) for the forward
pass, and transposed (I, O) for the input gradient, because `torch._scaled_mm` needs both operands contiguous along
the dimension that it sums over. Both have the same values and share the scales of the rows. That is 2 bytes per weight.

Shapes: O output features, I input features (M and N in the kernel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from firth.models.fp8.quantize import FP8_DTYPE, can_use_triton, eager_quantize_rowwise
from firth.models.kernels.launch import launch
from firth.models.kernels.tiling import triton

if triton is not None:
    import triton.language as tl

    from firth.models.fp8.quantize import TL_FP8_MAX, TL_MIN_ROW_AMAX

WEIGHT_TILE_SIZE = 64  # rows of a program, and columns that it processes at once


class QuantizedWeight(NamedTuple):
    """A weight in FP8 with one scale per row, and its transpose."""

    data: Tensor  # (O, I)
    scale: Tensor  # (O,)
    data_t: Tensor  # (I, O)

    def slice_rows(self, start: int, stop: int | None) -> QuantizedWeight:
        """Return rows `start` to `stop`."""
        if start == 0 and stop is None:
            return self
        return QuantizedWeight(self.data[start:stop], self.scale[start:stop], self.data_t[:, start:stop].contiguous())


class CachedFloat8Linear(nn.Linear):
    """A linear layer that may hold its weight in FP8 while that does not change."""

    fp8_buffer: QuantizedWeight | None = None  # allocated once
    fp8_cache: QuantizedWeight | None = None  # the buffer, while it is valid

    def __getstate__(self) -> dict[str, Any]:
        """Leave the FP8 copies out: a copy of the layer has weights of its own."""
        return {name: value for name, value in self.__dict__.items() if name not in ("fp8_buffer", "fp8_cache")}

    def quantized_weight(self, start: int = 0, stop: int | None = None) -> QuantizedWeight:
        """Return rows `start` to `stop` of the weight in FP8, from the cache if there is one."""
        if self.fp8_cache is not None:
            return self.fp8_cache.slice_rows(start, stop)
        w8, scale_O = eager_quantize_rowwise(self.weight[start:stop].detach().float())
        return QuantizedWeight(w8, scale_O, w8.t().contiguous())


@contextmanager
def cache_fp8_weights(model: nn.Module) -> Iterator[None]:
    """Hold all FP8 layers' weights quantized. The weights must not change inside this context."""
    layers = [m for m in model.modules() if isinstance(m, CachedFloat8Linear)]
    for layer in layers:
        w = layer.weight
        if layer.fp8_buffer is None or layer.fp8_buffer.data.device != w.device:
            layer.fp8_buffer = QuantizedWeight(
                torch.empty_like(w, dtype=FP8_DTYPE),
                w.new_empty(len(w), dtype=torch.float32),
                w.new_empty(*reversed(w.shape), dtype=FP8_DTYPE),
            )
    update_fp8_weights(layers)
    for layer in layers:
        layer.fp8_cache = layer.fp8_buffer
    try:
        yield
    finally:
        for layer in layers:
            layer.fp8_cache = None


@torch.no_grad()
def update_fp8_weights(layers: Sequence[CachedFloat8Linear]) -> None:
    """Quantize the weights of all layers into their buffers."""
    for dtype in {layer.weight.dtype for layer in layers}:
        same_dtype = [layer for layer in layers if layer.weight.dtype == dtype]
        if can_use_triton(same_dtype[0].weight) and dtype in (torch.float32, torch.bfloat16):
            update_fp8_weights_triton(same_dtype)
            continue
        for layer in same_dtype:
            assert layer.fp8_buffer is not None
            w8, scale_O = eager_quantize_rowwise(layer.weight.float())
            for buffer, value in zip(layer.fp8_buffer, (w8, scale_O, w8.t()), strict=True):
                buffer.copy_(value)


def update_fp8_weights_triton(layers: Sequence[CachedFloat8Linear]) -> None:
    addresses = tuple(
        (x.weight.data_ptr(), *(t.data_ptr() for t in x.fp8_buffer)) for x in layers if x.fp8_buffer is not None
    )
    first = layers[0].weight
    assert all(x.weight.is_contiguous() for x in layers)
    table = make_pointer_table(addresses, tuple(tuple(x.weight.shape) for x in layers), first.device)
    launch(
        quantize_weights_kernel, (len(table[-1]),), *table, IS_BF16=first.dtype == torch.bfloat16, TILE=WEIGHT_TILE_SIZE
    )


@lru_cache(maxsize=8)  # addresses stay the same from step to step
def make_pointer_table(
    addresses: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Return the tensors' addresses, the weights' shapes, and each program's first row and layer."""
    programs = [-(-rows // WEIGHT_TILE_SIZE) for rows, _ in shapes]
    owner = np.repeat(np.arange(len(shapes), dtype=np.int32), programs)
    first = np.concatenate([np.arange(n, dtype=np.int32) * WEIGHT_TILE_SIZE for n in programs])
    arrays = np.array(addresses, np.int64), np.array(shapes, np.int32), first, owner
    return tuple(torch.from_numpy(x).to(device) for x in arrays)


if triton is not None:

    @triton.jit
    def quantize_weights_kernel(addresses, sizes, first_row, owner, IS_BF16: tl.constexpr, TILE: tl.constexpr):
        """Quantize TILE rows of one layer: one pass for the scales, one that writes the rows and their transpose."""
        layer = tl.load(owner + tl.program_id(0))
        M, N = tl.multiple_of(tl.load(sizes + 2 * layer), 16), tl.multiple_of(tl.load(sizes + 2 * layer + 1), 16)
        pointers = addresses + 4 * layer
        w = tl.multiple_of(tl.load(pointers).to(tl.pointer_type(tl.bfloat16 if IS_BF16 else tl.float32)), 16)
        rows = tl.multiple_of(tl.load(pointers + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
        scales = tl.load(pointers + 2).to(tl.pointer_type(tl.float32))
        columns = tl.multiple_of(tl.load(pointers + 3).to(tl.pointer_type(tl.float8e4nv)), 16)
        m = tl.multiple_of(tl.load(first_row + tl.program_id(0)), TILE) + tl.arange(0, TILE)
        amax = tl.zeros([TILE], tl.float32)
        for begin in range(0, N, TILE):
            amax = tl.maximum(amax, tl.max(tl.abs(load_weight_tile(w, m, begin, M, N, TILE)), 1))
        amax = tl.maximum(amax, TL_MIN_ROW_AMAX)
        tl.store(scales + m, amax / TL_FP8_MAX, mask=m < M)
        inverse = TL_FP8_MAX / amax
        for begin in range(0, N, TILE):
            x8 = (load_weight_tile(w, m, begin, M, N, TILE) * inverse[:, None]).to(tl.float8e4nv)
            n = begin + tl.arange(0, TILE)
            at, inside = rows + m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
            tl.store(at, x8, mask=inside)
            x8 = tl.load(at, mask=inside)  # transposing the packed FP8 registers directly gives wrong values
            tl.store(columns + n[:, None] * M + m[None, :], tl.trans(x8), mask=(n < N)[:, None] & (m < M)[None, :])

    @triton.jit
    def load_weight_tile(w, m, begin, M, N, TILE: tl.constexpr):
        n = begin + tl.arange(0, TILE)
        x = tl.load(w + m[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        return x.to(tl.float32)
