"""A step on a GPU, recorded once and played again: what it costs to start its many small kernels is paid once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraphDecode:
    """A CUDA graph of `step`, whose tensors stay where they are and whose shapes never change.

    Playing it reads and writes the tensors that `step` knows as they are then. The logits that it gives are overwritten
    by the next call.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], token_B: Tensor) -> None:
        self.token_B, now, aside = token_B.clone(), torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(now)
        with torch.cuda.stream(aside), autocast_without_cache():
            step(self.token_B)  # libraries that are used for the first time cannot be recorded
        now.wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with autocast_without_cache(), torch.cuda.graph(self.graph):
            self.logits_BV = step(self.token_B)

    def __call__(self, token_B: Tensor) -> Tensor:
        self.token_B.copy_(token_B)
        self.graph.replay()
        return self.logits_BV


def autocast_without_cache() -> torch.autocast:
    """The precision as it is, without weights cast once and kept: a graph must not read them after they are gone."""
    on, kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    return torch.autocast("cuda", dtype=kind, enabled=on, cache_enabled=False)
