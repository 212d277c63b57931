"""Scores by distance and content: those of Shaw, of Transformer-XL, with XLNet's segments, and of DeBERTa.

B rows, T places that ask, S places that are read, H heads, d numbers per head, D width, P vectors of distances,
R distances: -(T - 1), ..., S - 1, and some more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Disentangled, ModelConfig, Shaw, TransformerXL
from firth.models.dropout import Dropout
from firth.models.position import skew

# Queries and keys that a layer makes of vectors (P, D), both (H, P, d)
Project = Callable[[Tensor], tuple[Tensor, Tensor]]
ROUND = 8  # distances come in multiples of this


class Places(NamedTuple):
    """What a stack tells the scores of its layers about a row."""

    vectors: Tensor  # (P, D)
    zero: int  # which of the R distances is 0; the ones before it are to places before
    choice: Tensor | None = None  # (R, P) 1 where a distance has a vector, else 0; without it, in order
    asked: Tensor | None = None  # (B, T) where those that ask stand, if not one at each place
    other: Tensor | None = None  # (B, T, S) true where what is read is in another segment

    def at(self, place_BK: Tensor) -> Places:
        """The same for those who ask at some places only."""
        other = None if self.other is None else self.other.take_along_dim(place_BK[:, :, None], 1)
        return self._replace(asked=place_BK, other=other)


Products = tuple[Tensor, Tensor]  # (B, H, X, d) with (H, R, d): for each place a number for each distance


class Distances(NamedTuple):
    """What a layer's scores are made of, beside `query . key`: numbers for each distance, and more.

    `ask` are those that who asks has, `read` those that what is read has, in which distance 0 is at S - 1 and places
    further on come first. They are given as what is to be multiplied, so that a kernel can take what it needs.
    """

    query: Tensor  # (B, H, T, d) what is compared with the keys
    zero: int
    ask: Products | None = None
    read: Products | None = None
    asked: Tensor | None = None  # (B, T)
    more: Tensor | None = None  # (B, H, T, S)

    def spread(self, S: int) -> Tensor:
        """All of it as one number for each pair of places, (B, H, T, S).

        In 32 bits where a program is compiled: it would not round where it goes on with a number, but where it keeps
        it for the backward pass, and weights of attention would not be the same in both.
        """
        parts = [] if self.more is None else [self.more]
        if self.ask is not None:
            x_BHTd, vectors_HRd = self.ask
            parts.append(by_asking(x_BHTd @ vectors_HRd.mT, S, self.asked, self.zero))
        if self.read is not None:
            x_BHSd, vectors_HRd = self.read
            parts.append(by_reading(x_BHSd @ vectors_HRd.mT, self.query.shape[2], self.asked))
        if torch.compiler.is_compiling():
            parts = [part.float() for part in parts]
        return sum(parts[1:], start=parts[0])


def by_asking(x_BHTR: Tensor, S: int, asked_BT: Tensor | None, zero: int) -> Tensor:
    """(B, H, T, S), from what those that ask have for each distance."""
    if asked_BT is None:
        return skew(x_BHTR, S)
    return x_BHTR.gather(-1, how_far(S, asked_BT, x_BHTR) + zero)


def by_reading(x_BHSR: Tensor, T: int, asked_BT: Tensor | None) -> Tensor:
    """(B, H, T, S), from what those that are read have for each distance, the last distance first."""
    if asked_BT is None:
        return skew(x_BHSR, T).mT
    S = x_BHSR.shape[-2]
    return x_BHSR.gather(-1, S - 1 - how_far(S, asked_BT, x_BHSR).mT).mT


def how_far(S: int, asked_BT: Tensor, x_BHXR: Tensor) -> Tensor:
    """(B, H, T, S): how far after each place that asks what is read stands."""
    distance_BTS = torch.arange(S, device=asked_BT.device) - asked_BT[:, :, None]
    return distance_BTS[:, None].expand(-1, x_BHXR.shape[1], -1, -1)


def how_far_back(T: int, S: int, device: torch.device) -> Tensor:
    """(R,): from each that asks back to what is read, which begins S - T places before those that ask.

    A few more distances than there are, so that the products with them suit a GPU.
    """
    R = -(-(T + S - 1) // ROUND) * ROUND
    return S - T - torch.arange(1 - T, 1 - T + R, device=device)


def split(x_PI: Tensor, num_heads: int) -> Tensor:
    """(P, H x d) to (H, P, d)."""
    return x_PI.unflatten(-1, (num_heads, -1)).transpose(0, 1)


# --- Shaw ---------------------------------------------------------------------------------------------------------


class ShawScore(nn.Module):
    """The query compared with a vector per distance, the same in every head."""

    def __init__(self, config: ModelConfig, spec: Shaw) -> None:
        super().__init__()
        self.far = spec.far
        self.vectors = nn.Embedding(2 * spec.far + 1, config.head_size)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, sight: Any, project: Project) -> Distances:
        """`sight.places` (B or 1, S), if given, is how far back each is that is read; one place of a row asks then."""
        if sight.places is not None:
            number = (self.far - sight.places).clamp(0, 2 * self.far)[:, None, None]
            by_distance = q_BHTd @ self.vectors.weight.t()
            return Distances(q_BHTd, 0, more=by_distance.gather(-1, number.expand(*q_BHTd.shape[:3], -1)))
        T, S = q_BHTd.shape[2], k_BHSd.shape[2]
        back_R = how_far_back(T, S, q_BHTd.device)
        number_R = (S - T - back_R).clamp(-self.far, self.far) + self.far
        vectors_HRd = self.vectors(number_R).expand(q_BHTd.shape[1], -1, -1)
        return Distances(q_BHTd, T - 1, (q_BHTd, vectors_HRd))


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
            return Places(vectors_RD, T - 1)
        whole_BS = F.pad(segment_BT, (S - T, 0))  # what is remembered counts as segment 0
        return Places(vectors_RD, T - 1, other=segment_BT[:, :, None] != whole_BS[:, None, :])


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

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, sight: Any, project: Project) -> Distances:
        places: Places = sight.places
        r_HRd = split(self.distance(places.vectors), q_BHTd.shape[1])
        ask = (q_BHTd + self.distance_bias[:, None].to(q_BHTd.dtype), r_HRd)
        more = None
        if places.other is not None and self.segments is not None and self.segment_bias is not None:
            same_Hd, other_Hd = self.segments
            differ_BHT1 = (q_BHTd + self.segment_bias[:, None]) @ (other_Hd - same_Hd)[:, :, None]
            more = differ_BHT1 * places.other[:, None].to(differ_BHT1.dtype)
        query = q_BHTd + self.key_bias[:, None].to(q_BHTd.dtype)
        return Distances(query, places.zero, ask, asked=places.asked, more=more)


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
        number_R = (back_R + self.span).clamp(low, high) - low
        vectors_PD = self.norm(self.table.weight[low : high + 1])
        return Places(vectors_PD, T - 1, F.one_hot(number_R, high + 1 - low).to(x_BTD.dtype))


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

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, sight: Any, project: Project) -> Distances:
        places: Places = sight.places
        H, S = k_BHSd.shape[1:3]
        vectors_PD, choice_RP = self.drop(places.vectors), places.choice
        assert choice_RP is not None
        turned_RP = choice_RP[: places.zero + S].flip(0)
        if self.ask is None or self.read is None:
            ask_HPd, read_HPd = project(vectors_PD)
        else:
            ask_HPd, read_HPd = split(self.ask(vectors_PD), H), split(self.read(vectors_PD), H)
        ask, read = (q_BHTd, choice_RP @ read_HPd), (k_BHSd, turned_RP @ ask_HPd)
        return Distances(q_BHTd, places.zero, ask, read, places.asked)


def make_shared(config: ModelConfig) -> nn.Module | None:
    """What a stack computes once for the scores of all its layers."""
    if isinstance(config.position, TransformerXL):
        return Sines(config, config.position)
    return DistanceVectors(config, config.position) if isinstance(config.position, Disentangled) else None
