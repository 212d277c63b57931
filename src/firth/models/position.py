"""How a model knows where a token stands.

Two doors so far: `embed` (a vector added to the embedding) is a plain table in `stack.py`; `score` (a number added
to the attention scores) is here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from firth.models.config import Buckets


def bucket(distance: Tensor, num: int, far: int, both_ways: bool) -> Tensor:
    """The bucket of a relative distance (place read minus place that asks).

    Near distances have a bucket each, further ones share logarithmically, all beyond `far` share the last
    (Raffel et al. 2020, section 2.1). `both_ways` gives half of the buckets to what comes after.
    """
    side = torch.zeros_like(distance)
    if both_ways:
        num //= 2
        side = (distance > 0).long() * num
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num // 2
    shared = torch.log(distance.clamp(min=1).float() / exact) / math.log(far / exact) * (num - exact)
    return side + torch.where(distance < exact, distance, (exact + shared.long()).clamp(max=num - 1))


class BucketScore(nn.Module):
    """One number per head and bucket, shared by all layers of a stack."""

    def __init__(self, spec: Buckets, num_heads: int, both_ways: bool) -> None:
        super().__init__()
        self.spec, self.both_ways = spec, both_ways
        self.table = nn.Embedding(spec.num, num_heads)

    def forward(self, length: int) -> Tensor:
        """(1, heads, length, length). Packed documents do not see each other, so places in the row will do."""
        place = torch.arange(length, device=self.table.weight.device)
        distance = place[None, :] - place[:, None]
        return self.table(bucket(distance, self.spec.num, self.spec.far, self.both_ways)).permute(2, 0, 1)[None]
