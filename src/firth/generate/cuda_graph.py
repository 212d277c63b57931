"""Replay a decode step as a CUDA graph.

A decode step launches hundreds of kernels, each of which works for a few microseconds. Launching them from Python takes
longer than running them. A CUDA graph records the launches once (capture) and repeats them with one call (replay).

Two rules follow. Every tensor keeps its address and shape, so that inputs are copied into the captured ones. And
nothing may depend on the host: no `.item()`, no branch on a value. `KVCache` with `is_static` obeys both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class CudaGraphDecode:
    """A captured `step`: token_B (B,) -> logits (B, V). The next call overwrites the returned logits."""

    def __init__(self, step: Callable[[Tensor], Tensor], token_B: Tensor) -> None:
        self.token_B, current, side = token_B.clone(), torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side), autocast_without_cache():
            step(self.token_B)  # warm-up: the first use of cuBLAS allocates, which a capture forbids
        current.wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with autocast_without_cache(), torch.cuda.graph(self.graph):
            self.logits_BV = step(self.token_B)

    def __call__(self, token_B: Tensor) -> Tensor:
        self.token_B.copy_(token_B)
        self.graph.replay()
        return self.logits_BV


def capture_graph(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that replays `step`, which reads and changes the tensors of `state` in place.

    The step runs once before the capture, to compile its kernels; `state` is restored afterwards.
    """
    graph, current, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
    with restored(state):
        side.wait_stream(current)
        with torch.cuda.stream(side):
            step()
        current.wait_stream(side)
        with torch.cuda.graph(graph):
            step()
    return graph.replay


@contextmanager
def restored(state: Sequence[Tensor]) -> Iterator[None]:
    """Give these tensors their values back at the end."""
    saved = [x.clone() for x in state]
    yield
    for x, before in zip(state, saved, strict=True):
        x.copy_(before)


def autocast_without_cache() -> torch.autocast:
    """Return the current autocast without its weight cache: a graph must not read casts that are freed later."""
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)
