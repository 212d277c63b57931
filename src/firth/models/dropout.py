"""Dropout, with random numbers that are cheap on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.p) if self.training else x


def drop(x: Tensor, rate: float) -> Tensor:
    """`F.dropout`. On a CPU that draws one number after the other, a fifth of BERT's step: there we draw our own."""
    if rate == 0:
        return x
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, rate)
    return x * noise(x.shape, rate).to(x.dtype)


def noise(shape: torch.Size, rate: float) -> Tensor:
    """0 at the rate and 1 / (1 - rate) elsewhere, by 16 random bits each: the rate is exact to 1/65,536."""
    size, dropped = shape.numel(), round(rate * 2**16)
    words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    kept = words.view(torch.int16)[:size] >= dropped - 2**15
    return kept.view(shape) * (2**16 / (2**16 - dropped))
