"""Time the linear layers of a decode step on a GPU: our fused kernels with several tiles, beside cuBLAS.

    python benchmarks/decode_kernels.py [--rows N ...] [--model gpt2|llama] [--tiles]

A CUDA graph calls each layer once for every copy of its weight. The copies are larger than the L2 cache together, as
the layers of a model are. cuBLAS computes the matmul alone, without norm, activation and residual. `--tiles` also tries
other tile sizes than those that the library chooses.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.core.console import say, show_table
from firth.models.kernels import decode_linear as kernels
from firth.models.kernels.decode_linear import NormArgs, Tile, decode_linear

WEIGHT_BYTES = 160 * 2**20  # of all copies of a weight
REPLAYS = 20
MATMUL_TILES = (  # rows, columns, inputs, warps, stages
    (16, 32, 256, 4, 4),
    (32, 32, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (64, 16, 256, 4, 3),
    (64, 32, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (64, 128, 64, 8, 4),
)


class Layer(NamedTuple):
    """N outputs, K inputs, and what is fused with the matmul."""

    N: int
    K: int
    has_norm: bool = False
    activation: str | None = None
    is_gated: bool = False
    has_residual: bool = False


MODELS: dict[str, dict[str, Layer]] = {
    "gpt2": {
        "qkv": Layer(2304, 768, True),
        "out": Layer(768, 768, has_residual=True),
        "up": Layer(3072, 768, True, "gelu-tanh"),
        "down": Layer(768, 3072, has_residual=True),
        "head": Layer(50257, 768, True),
    },
    "llama": {
        "qkv": Layer(1280, 768, True),
        "gate and up": Layer(2048, 768, True, "silu", True),
        "down": Layer(768, 2048, has_residual=True),
    },
}


def candidate_tiles(rows: int, layer: Layer) -> list[Tile]:
    if rows == 1:
        block_k = kernels.gemv_tile(layer.N, layer.K, layer.is_gated, layer.has_norm).block_k
        return [Tile(1, n, block_k, warps, 1) for n in (2, 4, 8, 16) for warps in (2, 4, 8) if n * block_k <= 32768]
    return [Tile(*sizes) for sizes in MATMUL_TILES]


def time_layer(call: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of one call, the median over replays of a graph with one call per copy."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / copies)
    return statistics.median(times)


def measure(rows: int, layer: Layer, tries_tiles: bool) -> list[tuple[str, float]]:
    """Return what was tried and its microseconds; the library's choice first, then cuBLAS, then other tiles."""
    num_outputs = layer.N * (2 if layer.is_gated else 1)
    copies = max(2, WEIGHT_BYTES // (2 * num_outputs * layer.K))
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 8  # noqa: E731
    weights, x, bias = [make(num_outputs, layer.K) for _ in range(copies)], make(rows, layer.K), make(num_outputs)
    norm = NormArgs(make(layer.K), make(layer.K), 1e-5, False) if layer.has_norm else None
    residual: Tensor | None = make(rows, layer.N) if layer.has_residual else None

    def ours(i: int) -> object:
        return decode_linear(x, weights[i], bias, norm, layer.activation, layer.is_gated, residual)

    found = [
        ("chosen", time_layer(ours, copies)),
        ("cuBLAS", time_layer(lambda i: F.linear(x, weights[i], bias), copies)),
    ]
    default = kernels.MAX_PDL_ROWS
    for label, most in (("with", 2**31), ("without", 0)):
        kernels.MAX_PDL_ROWS = most
        found.append((f"chosen, {label} PDL", time_layer(ours, copies)))
    kernels.MAX_PDL_ROWS = default
    name = "gemv_tile" if rows == 1 else "matmul_tile"
    chosen = getattr(kernels, name)
    for tile in candidate_tiles(rows, layer) if tries_tiles else []:
        setattr(kernels, name, lambda *_, tile=tile: tile)
        try:
            found.append((str(tuple(tile)), time_layer(ours, copies)))
        except Exception as error:  # a tile that does not fit into shared memory
            say(f"{tuple(tile)}: {type(error).__name__}")
    setattr(kernels, name, chosen)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64], help="rows of the batch (1 64)")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="whose layers (gpt2)")
    parser.add_argument("--tiles", action="store_true", help="try other tile sizes too")
    args = parser.parse_args(argv)
    for rows in args.rows:
        for name, layer in MODELS[args.model].items():
            found = measure(rows, layer, args.tiles)
            gigabytes = 2e-9 * layer.N * (2 if layer.is_gated else 1) * layer.K
            best = [*found[:3], *sorted(found[3:], key=lambda pair: pair[1])[:4]]
            table = [(what, f"{time:.2f}", f"{gigabytes / time * 1e6:,.0f}") for what, time in best]
            show_table(f"{rows} rows, {name}", ("tile", "us", "GB/s"), table)


if __name__ == "__main__":
    main()
