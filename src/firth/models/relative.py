"""Scores by distance and content: those of Transformer-XL, with XLNet's segments, and those of DeBERTa.

B rows, T places that ask, S places that are read, H heads, d numbers per head, D width, R = T + S - 1 distances,
P vectors of distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Disentangled, ModelConfig, TransformerXL
from firth.models.dropout import Dropout
from firth.models.position import skew

# Queries and keys that a layer makes of vectors (P, D), both (H, P, d)
Project = Callable[[Tensor], tuple[Tensor, Tensor]]


class Places(NamedTuple):
    """What a stack tells the scores of its layers about a row."""

    vectors: Tensor  # (P, D)
    number: Tensor | None = None  # (R,) which vector the distances -(T - 1), ..., S - 1 have; without it, in order
    asked: Tensor | None = None  # (B, T) where those that ask stand, if not one at each place
    other: Tensor | None = None  # (B, T, S) true where what is read is in another segment


def by_asking(x_BHTR: Tensor, S: int, asked_BT: Tensor | None) -> Tensor:
    """(B, H, T, S), from what those that ask have for each distance."""
    if asked_BT is None:
        return skew(x_BHTR, S)
    return x_BHTR.gather(-1, which_distance(x_BHTR, S, asked_BT))


def by_reading(x_BHSR: Tensor, T: int, asked_BT: Tensor | None) -> Tensor:
    """(B, H, T, S), from what those that are read have for each distance, the last distance first."""
    if asked_BT is None:
        return skew(x_BHSR, T).mT
    S, R = x_BHSR.shape[-2:]
    return x_BHSR.gather(-1, R - 1 - which_distance(x_BHSR, S, asked_BT).mT).mT


def which_distance(x_BHXR: Tensor, S: int, asked_BT: Tensor) -> Tensor:
    """(B, H, T, S): the number of the distance from each place that asks to each that is read."""
    first = S - x_BHXR.shape[-1]  # the lowest distance
    distance_BTS = torch.arange(S, device=asked_BT.device) - asked_BT[:, :, None]
    return (distance_BTS - first)[:, None].expand(-1, x_BHXR.shape[1], -1, -1)


def how_far_back(T: int, S: int, device: torch.device) -> Tensor:
    """(R,): from each that asks back to what is read, which begins S - T places before those that ask."""
    return S - T - torch.arange(1 - T, S, device=device)


def split(x_PI: Tensor, num_heads: int) -> Tensor:
    """(P, H x d) to (H, P, d)."""
    return x_PI.unflatten(-1, (num_heads, -1)).transpose(0, 1)


# --- Transformer-XL -----------------------------------------------------------------------------------------------


class Sines(nn.Module):
    """Sines and cosines of how far back each distance leads, at falling frequencies (Dai et al. 2019, section 3.3)."""

    def __init__(self, config: ModelConfig, spec: TransformerXL) -> None:
        super().__init__()
        self.spec = spec
        self.drop = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, S: int, segment_BT: Tensor | None = None) -> Places:
        T, D = x_BTD.shape[1:]
        back_R = how_far_back(T, S, x_BTD.device)
        turns = 10000 ** (-torch.arange(0, D, 2, device=x_BTD.device) / D)
        angle_RF = back_R[:, None] * turns
        vectors_RD = self.drop(torch.cat([angle_RF.sin(), angle_RF.cos()], -1).to(x_BTD.dtype))
        if segment_BT is None or not self.spec.segments:
            return Places(vectors_RD)
        whole_BS = F.pad(segment_BT, (S - T, 0))  # what is remembered counts as segment 0
        return Places(vectors_RD, other=segment_BT[:, :, None] != whole_BS[:, None, :])


class TransformerXLScore(nn.Module):
    """Content against distance, and what key, distance and segment count for by themselves (the same section).

    `key_bias` and `distance_bias` are the paper's u and v. The segment's score is XLNet's (section 2.5). All that one
    who asks adds to all of its scores alike is left out: softmax does not see it.
    """

    def __init__(self, config: ModelConfig, spec: TransformerXL) -> None:
        super().__init__()
        H, d = config.num_heads, config.head_size
        self.distance = nn.Linear(config.dim, H * d, bias=False)
        self.key_bias = nn.Parameter(torch.empty(H, d))
        self.distance_bias = nn.Parameter(torch.empty(H, d))
        self.segment_bias = nn.Parameter(torch.empty(H, d)) if spec.segments else None
        self.segments = nn.Parameter(torch.empty(2, H, d)) if spec.segments else None  # the same, another

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, sight: Any, project: Project) -> Tensor:
        places: Places = sight.places
        H, S = k_BHSd.shape[1:3]
        r_HRd = split(self.distance(places.vectors), H)
        score = by_asking((q_BHTd + self.distance_bias[:, None]) @ r_HRd.mT, S, places.asked)
        score = score + (k_BHSd @ self.key_bias[:, :, None]).mT
        if places.other is not None and self.segments is not None and self.segment_bias is not None:
            same_Hd, other_Hd = self.segments
            differ_BHT1 = (q_BHTd + self.segment_bias[:, None]) @ (other_Hd - same_Hd)[:, :, None]
            score = score + differ_BHT1 * places.other[:, None].to(score.dtype)
        return score


# --- DeBERTa ------------------------------------------------------------------------------------------------------


def log_bucket(distance: Tensor, num: int, far: int) -> Tensor:
    """Distances up to num / 2 as they are, further ones closer and closer, so that `far` - 1 becomes num - 1.

    As in version 2 of DeBERTa; the paper has only the exact ones.
    """
    middle = num // 2
    size = distance.abs()
    share = torch.log(size.clamp(min=1).float() / middle) / math.log((far - 1) / middle)
    return torch.where(size <= middle, distance, distance.sign() * ((share * (middle - 1)).ceil().long() + middle))


class DistanceVectors(nn.Module):
    """One vector per distance or bucket of distances, for all layers of a stack."""

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        self.spec, self.span = spec, spec.buckets or spec.far
        self.table = nn.Embedding(2 * self.span, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm.eps) if spec.normed else nn.Identity()

    def forward(self, x_BTD: Tensor, S: int, segment_BT: Tensor | None = None) -> Places:
        """Only the rows of the table that can be meant are taken: a bucket's number is never above its distance."""
        T, last = x_BTD.shape[1], 2 * self.span - 1
        low, high = max(self.span - T + 1, 0), min(self.span + S - 1, last)
        back_R = how_far_back(T, S, x_BTD.device)
        if self.spec.buckets:
            back_R = log_bucket(back_R, self.spec.buckets, self.spec.far)
        number_R = (back_R + self.span).clamp(0, last) - low
        return Places(self.norm(self.table.weight[low : high + 1]), number_R)


class DisentangledScore(nn.Module):
    """Content against distance, and distance against content (He et al. 2021, section 3.1, the last two of its terms).

    Both count the distance from who asks to what is read, as the published models do (the paper turns it round in
    the second). Vectors of distances have projections of their own, or share those of content.
    """

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        inner = config.num_heads * config.head_size
        self.ask = None if spec.shared else nn.Linear(config.dim, inner, bias=config.query_bias)
        self.read = None if spec.shared else nn.Linear(config.dim, inner, bias=config.key_bias)
        self.drop = Dropout(config.dropout)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, sight: Any, project: Project) -> Tensor:
        places: Places = sight.places
        H, (T, S) = q_BHTd.shape[1], (q_BHTd.shape[2], k_BHSd.shape[2])
        vectors_PD, number_R = self.drop(places.vectors), places.number
        assert number_R is not None
        if self.ask is None or self.read is None:
            ask_HPd, read_HPd = project(vectors_PD)
        else:
            ask_HPd, read_HPd = split(self.ask(vectors_PD), H), split(self.read(vectors_PD), H)
        to_place = q_BHTd @ read_HPd[:, number_R].mT
        from_place = k_BHSd @ ask_HPd[:, number_R.flip(0)].mT
        return by_asking(to_place, S, places.asked) + by_reading(from_place, T, places.asked)


def make_shared(config: ModelConfig) -> nn.Module | None:
    """What a stack computes once for the scores of all its layers."""
    if isinstance(config.position, TransformerXL):
        return Sines(config, config.position)
    return DistanceVectors(config, config.position) if isinstance(config.position, Disentangled) else None
