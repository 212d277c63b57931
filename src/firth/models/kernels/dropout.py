"""Dropout, with random numbers that are cheap on a CPU and in a compiled step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return fast_dropout(x, self.p) if self.training else x


def fast_dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout`. On a CPU that draws one number after the other, a fifth of BERT's step: there we draw our own.

    In a compiled step on a GPU its numbers take longer than all else that a layer does to each element: there they are
    products of few, and made again in the backward pass.
    """
    if p == 0:
        return x
    if torch.compiler.is_compiling():
        cheap = x.device.type == "cuda" and x.numel() < 2**31
        return x * factored_dropout_mask(x.shape, p, x.device).to(x.dtype) if cheap else F.dropout(x, p)
    return F.dropout(x, p) if x.device.type != "cpu" else x * cpu_dropout_mask(x.shape, p).to(x.dtype)


def cpu_dropout_mask(shape: torch.Size, p: float) -> Tensor:
    """0 at the rate and 1 / (1 - rate) elsewhere, by 16 random bits each: the rate is exact to 1/65,536."""
    size, dropped = shape.numel(), round(p * 2**16)
    words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    kept = words.view(torch.int16)[:size] >= dropped - 2**15
    return kept.view(shape) * (2**16 / (2**16 - dropped))


def factored_dropout_mask(shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """The same as `cpu_dropout_mask`, by a random number for each row times one for each column, both odd, modulo 2^32.

    Rows, and columns, are as independent of each other as random ones (a test counts). Nothing but small tensors is
    shared by the parts of a model that drop: what is shared would be kept for the backward pass, and the rest is made
    again there.
    """
    return mask_from_factors(random_odd_factors((*shape[:-1], 1), device), random_odd_factors(shape[-1:], device), p)


def mask_from_factors(row_factors: Tensor, column_factors: Tensor, p: float) -> Tensor:
    """What each place of these rows (..., 1) and columns is multiplied by."""
    return (row_factors * column_factors >= round(p * 2**32) - 2**31).float() * (1 / (1 - p))


def random_odd_factors(shape: Sequence[int], device: torch.device) -> Tensor:
    """Random odd numbers of 32 bits, 24 of which are drawn."""
    return (torch.rand(shape, device=device) * 2**24).int() * GOLDEN_RATIO_INT32 | 1


GOLDEN_RATIO_INT32 = 0x9E3779B1 - 2**32  # the golden ratio as 32 bits, the first of which is a sign
