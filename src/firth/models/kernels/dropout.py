"""Dropout with cheap random numbers, and without stored masks.

A compiled GPU step spends more time on dropout's random numbers (Philox, one per element) than on everything else that
it does to an element; and a mask kept for the backward pass is a tensor as large as the activation. Instead, each
element's random number is the product of a random odd number of its row and one of its column, modulo 2^32:

    keep[m, n] = row[m] * column[n] >= p * 2^32 (as signed numbers)

Only M + N numbers are drawn and saved for M x N elements, and the backward pass multiplies them again. Multiplying by
an odd number permutes the residues modulo 2^32, so products are as uniform as their factors; a test checks that pairs
of rows and pairs of columns are as independent as truly random ones. The fused kernels (attention,
`fp8/residual_norm.py`) use the same factors and never see a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Dropout(nn.Dropout):
    """`nn.Dropout` by `fast_dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        return fast_dropout(x, self.p) if self.training else x


def fast_dropout(x: Tensor, p: float) -> Tensor:
    """`F.dropout`, with factored masks in compiled GPU steps, and with 16 random bits per element on a CPU.

    On a CPU `F.dropout` draws one number after the other, which takes a fifth of BERT's step.
    """
    if p == 0:
        return x
    if torch.compiler.is_compiling():
        can_factor = x.device.type == "cuda" and x.numel() < 2**31
        return x * factored_dropout_mask(x.shape, p, x.device).to(x.dtype) if can_factor else F.dropout(x, p)
    return F.dropout(x, p) if x.device.type != "cpu" else x * cpu_dropout_mask(x.shape, p).to(x.dtype)


def cpu_dropout_mask(shape: torch.Size, p: float) -> Tensor:
    """Return 0 with probability p and 1 / (1 - p) otherwise, from 16 random bits each: p is rounded to 1/65,536."""
    size, dropped = shape.numel(), round(p * 2**16)
    words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    keep = words.view(torch.int16)[:size] >= dropped - 2**15
    return keep.view(shape) * (2**16 / (2**16 - dropped))


def factored_dropout_mask(shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """Return the same from one random factor per row and per column (see the top of this file).

    Every call draws its own factors: the compiler saves a tensor that several layers share, and recomputes this one.
    """
    return mask_from_factors(random_odd_factors((*shape[:-1], 1), device), random_odd_factors(shape[-1:], device), p)


def mask_from_factors(row_factors: Tensor, column_factors: Tensor, p: float) -> Tensor:
    """Return the dropout mask (..., N) of these row factors (..., 1) and column factors (N,)."""
    return (row_factors * column_factors >= round(p * 2**32) - 2**31).float() * (1 / (1 - p))


def random_odd_factors(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return random odd int32 numbers. 24 bits are drawn; the multiplication spreads them over 32."""
    return (torch.rand(shape, device=device) * 2**24).int() * GOLDEN_RATIO_INT32 | 1


GOLDEN_RATIO_INT32 = 0x9E3779B1 - 2**32  # 2^32 / golden ratio as a signed number (Knuth's multiplicative hashing)
