"""Position biases: a number per head and distance that is added to the attention scores, whatever the tokens are.

T5 (Raffel et al. 2020, section 2.1) learns the numbers. Near distances have a bucket each, farther ones share buckets
whose width grows logarithmically, and all beyond `max_distance` share the last: 32 buckets cover distances up to 128,
and any longer context still has a bias. One table serves all layers.

ALiBi (Press et al. 2022, section 3) learns nothing: the bias is `-slope * distance`, with a geometric series of slopes
over the heads. Heads with steep slopes attend nearby, heads with flat slopes far away, and training on short contexts
extends to longer ones.

Biases that also depend on the tokens (Shaw, Transformer-XL, DeBERTa) are in `relative_attention.py`.

Shapes: B rows, T queries, S keys, H heads, R distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from firth.models.config import ALiBi, ModelConfig, T5Bias
from firth.models.position.relative_attention import rel_shift


def t5_bucket(distance: Tensor, num_buckets: int, max_distance: int, is_bidirectional: bool) -> Tensor:
    """Return the bucket of each distance (key position minus query position).

    `is_bidirectional` gives half of the buckets to keys after the query. Otherwise later keys, which a causal mask
    hides, count as distance 0.
    """
    side = torch.zeros_like(distance)
    if is_bidirectional:
        num_buckets //= 2
        side = (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2  # the first half of the buckets holds one distance each
    log_bucket = (
        torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    )
    return side + torch.where(distance < exact, distance, (exact + log_bucket.long()).clamp(max=num_buckets - 1))


class T5BiasTable(nn.Module):
    """One learned number per head and bucket, shared by all layers of a stack."""

    def __init__(self, spec: T5Bias, num_heads: int, is_bidirectional: bool) -> None:
        super().__init__()
        self.spec, self.is_bidirectional, self.max_distance = spec, is_bidirectional, spec.max_distance
        self.table = nn.Embedding(spec.num_buckets, num_heads)

    def forward(self, T: int, S: int) -> Tensor:
        """Return (1, H, T, S).

        Each of the R distances is looked up once, not each of the T x S pairs: the table's gradient is then a sum
        along diagonals, in a fixed order.
        """
        distance_R = torch.arange(1 - T, S, device=self.table.weight.device)
        bias_RH = self.table(
            t5_bucket(distance_R, self.spec.num_buckets, self.spec.max_distance, self.is_bidirectional)
        )
        return rel_shift(bias_RH.t()[None, :, None].expand(-1, -1, T, -1), S)


class AlibiBias(nn.Module):
    """`-slope * distance`, with one slope per head."""

    slopes: Tensor
    max_distance = 0  # the bias is constant from no distance on

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.empty(num_heads), persistent=False)
        self.reset_slopes()

    def reset_slopes(self) -> None:
        """Compute the slopes, which are neither trained nor saved."""
        self.slopes.copy_(torch.tensor(alibi_slopes(len(self.slopes))))

    def forward(self, T: int, S: int) -> Tensor:
        """Return (1, H, T, S)."""
        return (-distance_matrix(T, S, self.slopes.device).abs() * self.slopes[:, None, None])[None]


def distance_matrix(T: int, S: int, device: torch.device) -> Tensor:
    """Return (T, S): key position minus query position."""
    return torch.arange(S, device=device)[None, :] - torch.arange(T, device=device)[:, None]


def alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8/H), 2^(-16/H), ..., 2^-8. If H is no power of two, fill up with every other slope of the next one.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + (alibi_slopes(2 * power)[0::2][: num_heads - power] if power < num_heads else [])


def make_position_bias(config: ModelConfig, is_causal: bool) -> T5BiasTable | AlibiBias | None:
    """Return the bias that all layers of a stack add to their scores, or None if the model has none."""
    if isinstance(config.position, T5Bias):
        return T5BiasTable(config.position, config.num_heads, is_bidirectional=not is_causal)
    return AlibiBias(config.num_heads) if isinstance(config.position, ALiBi) else None
