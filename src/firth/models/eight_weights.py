"""The weights of many layers in 8 bits, by rows and by columns, in one kernel: once for a step, and not for each batch.

O rows of I weights (M of N in the kernel).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from firth.models.eight_rows import EIGHT, by_kernel, in_eight
from firth.models.launch import launch
from firth.models.tiles import triton

if triton is not None:
    import triton.language as tl

    from firth.models.eight_rows import BOTTOM, TOP

TILE = 64  # rows of a program, and weights of each that it has at once


class Weights8(NamedTuple):
    """Each row has its scale. (What comes back through the same weights meets them by columns.)"""

    rows: Tensor  # (O, I)
    scale: Tensor  # (O,)
    columns: Tensor  # (I, O)

    def part(self, start: int, end: int | None) -> Weights8:
        """Some of the rows."""
        if start == 0 and end is None:
            return self
        return Weights8(self.rows[start:end], self.scale[start:end], self.columns[:, start:end].contiguous())


class Holds8(nn.Linear):
    """A layer that may hold its weights in 8 bits while they do not change."""

    room: Weights8 | None = None
    held: Weights8 | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies have weights of their own."""
        return {name: value for name, value in self.__dict__.items() if name not in ("room", "held")}

    def weights(self, start: int = 0, end: int | None = None) -> Weights8:
        if self.held is not None:
            return self.held.part(start, end)
        w8, scale_O = in_eight(self.weight[start:end].detach().float())
        return Weights8(w8, scale_O, w8.t().contiguous())


@contextmanager
def weights_held(model: nn.Module) -> Iterator[None]:
    """Let its layers hold their weights as they are now. Whoever changes them does so outside of this."""
    layers = [m for m in model.modules() if isinstance(m, Holds8)]
    for layer in layers:
        w = layer.weight
        if layer.room is None or layer.room.rows.device != w.device:
            columns = w.new_empty(*reversed(w.shape), dtype=EIGHT)
            layer.room = Weights8(torch.empty_like(w, dtype=EIGHT), w.new_empty(len(w), dtype=torch.float32), columns)
    write(layers)
    for layer in layers:
        layer.held = layer.room
    try:
        yield
    finally:
        for layer in layers:
            layer.held = None


@torch.no_grad()
def write(layers: Sequence[Holds8]) -> None:
    for dtype in {layer.weight.dtype for layer in layers}:
        some = [layer for layer in layers if layer.weight.dtype == dtype]
        if by_kernel(some[0].weight) and dtype in (torch.float32, torch.bfloat16):
            write_at_once(some)
            continue
        for layer in some:
            assert layer.room is not None
            w8, scale_O = in_eight(layer.weight.float())
            for to, found in zip(layer.room, (w8, scale_O, w8.t()), strict=True):
                to.copy_(found)


def write_at_once(layers: Sequence[Holds8]) -> None:
    where = tuple((x.weight.data_ptr(), *(t.data_ptr() for t in x.room)) for x in layers if x.room is not None)
    first = layers[0].weight
    assert all(x.weight.is_contiguous() for x in layers)
    table = make_table(where, tuple(tuple(x.weight.shape) for x in layers), first.device)
    launch(weights_kernel, (len(table[-1]),), *table, HALF=first.dtype == torch.bfloat16, TILE=TILE)


@lru_cache(maxsize=8)  # a model is where it is, step after step
def make_table(
    where: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, ...]:
    """Where everything is, its sizes, and which rows of which layer each program has."""
    programs = [-(-rows // TILE) for rows, _ in shapes]
    owner = np.repeat(np.arange(len(shapes), dtype=np.int32), programs)
    first = np.concatenate([np.arange(n, dtype=np.int32) * TILE for n in programs])
    found = np.array(where, np.int64), np.array(shapes, np.int32), first, owner
    return tuple(torch.from_numpy(x).to(device) for x in found)


if triton is not None:

    @triton.jit
    def weights_kernel(addresses, sizes, first, owner, HALF: tl.constexpr, TILE: tl.constexpr):
        mine = tl.load(owner + tl.program_id(0))
        M, N = tl.multiple_of(tl.load(sizes + 2 * mine), 16), tl.multiple_of(tl.load(sizes + 2 * mine + 1), 16)
        where = addresses + 4 * mine
        w = tl.multiple_of(tl.load(where).to(tl.pointer_type(tl.bfloat16 if HALF else tl.float32)), 16)
        rows = tl.multiple_of(tl.load(where + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
        scales = tl.load(where + 2).to(tl.pointer_type(tl.float32))
        columns = tl.multiple_of(tl.load(where + 3).to(tl.pointer_type(tl.float8e4nv)), 16)
        m = tl.multiple_of(tl.load(first + tl.program_id(0)), TILE) + tl.arange(0, TILE)
        most = tl.zeros([TILE], tl.float32)
        for begin in range(0, N, TILE):
            most = tl.maximum(most, tl.max(tl.abs(tile(w, m, begin, M, N, TILE)), 1))
        most = tl.maximum(most, BOTTOM)
        tl.store(scales + m, most / TOP, mask=m < M)
        inverse = TOP / most
        for begin in range(0, N, TILE):
            x8 = (tile(w, m, begin, M, N, TILE) * inverse[:, None]).to(tl.float8e4nv)
            n = begin + tl.arange(0, TILE)
            at, inside = rows + m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
            tl.store(at, x8, mask=inside)
            x8 = tl.load(at, mask=inside)  # turned as they were rounded, two to a register, some would come out wrong
            tl.store(columns + n[:, None] * M + m[None, :], tl.trans(x8), mask=(n < N)[:, None] & (m < M)[None, :])

    @triton.jit
    def tile(w, m, begin, M, N, TILE: tl.constexpr):
        n = begin + tl.arange(0, TILE)
        x = tl.load(w + m[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        return x.to(tl.float32)
