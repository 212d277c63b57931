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
from firth.models.kernels.dropout import Dropout
from firth.models.position.rope import rel_shift

# Queries and keys that a layer makes of vectors (P, D), both (H, P, d)
ProjectQK = Callable[[Tensor], tuple[Tensor, Tensor]]
DISTANCE_COUNT_MULTIPLE = 8  # distances come in multiples of this


class RelativePositions(NamedTuple):
    """What a stack tells the scores of its layers about a row."""

    vectors: Tensor  # (P, D)
    zero_index: int  # which of the R distances is 0; the ones before it are to places before
    one_hot: Tensor | None = None  # (R, P) 1 where a distance has a vector, else 0; without it, in order
    query_positions: Tensor | None = None  # (B, T) where those that ask stand, if not one at each place
    is_other_segment: Tensor | None = None  # (B, T, S) true where what is read is in another segment

    def at_positions(self, position_BK: Tensor) -> RelativePositions:
        """The same for those who ask at some places only."""
        other = (
            None if self.is_other_segment is None else self.is_other_segment.take_along_dim(position_BK[:, :, None], 1)
        )
        return self._replace(query_positions=position_BK, is_other_segment=other)


RelativeFactors = tuple[Tensor, Tensor]  # (B, H, X, d) with (H, R, d): for each place a number for each distance


class RelativeScores(NamedTuple):
    """What a layer's scores are made of, beside `query . key`: numbers for each distance, and more.

    `ask` are those that who asks has, `read` those that what is read has, in which distance 0 is at S - 1 and places
    further on come first. They are given as what is to be multiplied, so that a kernel can take what it needs.
    """

    query: Tensor  # (B, H, T, d) what is compared with the keys
    zero_index: int
    query_factors: RelativeFactors | None = None
    key_factors: RelativeFactors | None = None
    query_positions: Tensor | None = None  # (B, T)
    extra_scores: Tensor | None = None  # (B, H, T, S)

    def to_dense(self, S: int) -> Tensor:
        """All of it as one number for each pair of places, (B, H, T, S).

        In 32 bits where a program is compiled: it would not round where it goes on with a number, but where it keeps
        it for the backward pass, and weights of attention would not be the same in both.
        """
        parts = [] if self.extra_scores is None else [self.extra_scores]
        if self.query_factors is not None:
            x_BHTd, vectors_HRd = self.query_factors
            parts.append(query_relative_scores(x_BHTd @ vectors_HRd.mT, S, self.query_positions, self.zero_index))
        if self.key_factors is not None:
            x_BHSd, vectors_HRd = self.key_factors
            parts.append(key_relative_scores(x_BHSd @ vectors_HRd.mT, self.query.shape[2], self.query_positions))
        if torch.compiler.is_compiling():
            parts = [part.float() for part in parts]
        return sum(parts[1:], start=parts[0])


def query_relative_scores(x_BHTR: Tensor, S: int, query_positions_BT: Tensor | None, zero_index: int) -> Tensor:
    """(B, H, T, S), from what those that ask have for each distance."""
    if query_positions_BT is None:
        return rel_shift(x_BHTR, S)
    return x_BHTR.gather(-1, query_to_key_distances(S, query_positions_BT, x_BHTR) + zero_index)


def key_relative_scores(x_BHSR: Tensor, T: int, query_positions_BT: Tensor | None) -> Tensor:
    """(B, H, T, S), from what those that are read have for each distance, the last distance first."""
    if query_positions_BT is None:
        return rel_shift(x_BHSR, T).mT
    S = x_BHSR.shape[-2]
    return x_BHSR.gather(-1, S - 1 - query_to_key_distances(S, query_positions_BT, x_BHSR).mT).mT


def query_to_key_distances(S: int, query_positions_BT: Tensor, x_BHXR: Tensor) -> Tensor:
    """(B, H, T, S): how far after each place that asks what is read stands."""
    distance_BTS = torch.arange(S, device=query_positions_BT.device) - query_positions_BT[:, :, None]
    return distance_BTS[:, None].expand(-1, x_BHXR.shape[1], -1, -1)


def backward_distances(T: int, S: int, device: torch.device) -> Tensor:
    """(R,): from each that asks back to what is read, which begins S - T places before those that ask.

    A few more distances than there are, so that the products with them suit a GPU.
    """
    R = -(-(T + S - 1) // DISTANCE_COUNT_MULTIPLE) * DISTANCE_COUNT_MULTIPLE
    return S - T - torch.arange(1 - T, 1 - T + R, device=device)


def split_position_heads(x_PI: Tensor, num_heads: int) -> Tensor:
    """(P, H x d) to (H, P, d)."""
    return x_PI.unflatten(-1, (num_heads, -1)).transpose(0, 1)


# --- Shaw ---------------------------------------------------------------------------------------------------------


class ShawScore(nn.Module):
    """The query compared with a vector per distance, the same in every head."""

    def __init__(self, config: ModelConfig, spec: Shaw) -> None:
        super().__init__()
        self.max_distance = spec.max_distance
        self.vectors = nn.Embedding(2 * spec.max_distance + 1, config.head_size)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        """`attention_spec.places` (B or 1, S), if given, is how far back each is that is read; one place of a row asks then."""
        if attention_spec.relative_positions is not None:
            number = (self.max_distance - attention_spec.relative_positions).clamp(0, 2 * self.max_distance)[
                :, None, None
            ]
            by_distance = q_BHTd @ self.vectors.weight.t()
            return RelativeScores(q_BHTd, 0, extra_scores=by_distance.gather(-1, number.expand(*q_BHTd.shape[:3], -1)))
        T, S = q_BHTd.shape[2], k_BHSd.shape[2]
        back_R = backward_distances(T, S, q_BHTd.device)
        number_R = (S - T - back_R).clamp(-self.max_distance, self.max_distance) + self.max_distance
        vectors_HRd = self.vectors(number_R).expand(q_BHTd.shape[1], -1, -1)
        return RelativeScores(q_BHTd, T - 1, (q_BHTd, vectors_HRd))


# --- Transformer-XL -----------------------------------------------------------------------------------------------


class RelativeSinusoids(nn.Module):
    """Sines and cosines of how far back each distance leads, at falling frequencies (Dai et al. 2019, section 3.3)."""

    def __init__(self, config: ModelConfig, spec: TransformerXL) -> None:
        super().__init__()
        self.spec = spec
        self.drop = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, S: int, token_type_ids_BT: Tensor | None = None) -> RelativePositions:
        T, D = x_BTD.shape[1:]
        back_R = backward_distances(T, S, x_BTD.device)
        turns = 10000 ** (-torch.arange(0, D, 2, device=x_BTD.device) / D)
        angle_RF = back_R[:, None] * turns
        vectors_RD = self.drop(torch.cat([angle_RF.sin(), angle_RF.cos()], -1).to(x_BTD.dtype))
        if token_type_ids_BT is None or not self.spec.relative_segments:
            return RelativePositions(vectors_RD, T - 1)
        whole_BS = F.pad(token_type_ids_BT, (S - T, 0))  # what is remembered counts as segment 0
        return RelativePositions(
            vectors_RD, T - 1, is_other_segment=token_type_ids_BT[:, :, None] != whole_BS[:, None, :]
        )


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
        self.segment_bias = nn.Parameter(torch.empty(H, d)) if spec.relative_segments else None
        self.segments = nn.Parameter(torch.empty(2, H, d)) if spec.relative_segments else None  # the same, another

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        places: RelativePositions = attention_spec.relative_positions
        r_HRd = split_position_heads(self.distance(places.vectors), q_BHTd.shape[1])
        ask = (q_BHTd + self.distance_bias[:, None].to(q_BHTd.dtype), r_HRd)
        more = None
        if places.is_other_segment is not None and self.segments is not None and self.segment_bias is not None:
            same_Hd, other_Hd = self.segments
            differ_BHT1 = (q_BHTd + self.segment_bias[:, None]) @ (other_Hd - same_Hd)[:, :, None]
            more = differ_BHT1 * places.is_other_segment[:, None].to(differ_BHT1.dtype)
        query = q_BHTd + self.key_bias[:, None].to(q_BHTd.dtype)
        return RelativeScores(query, places.zero_index, ask, query_positions=places.query_positions, extra_scores=more)


# --- DeBERTa ------------------------------------------------------------------------------------------------------


def log_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Distances up to num / 2 as they are, further ones closer and closer, so that `max_distance` - 1 becomes num - 1.

    As in version 2 of DeBERTa; the paper has only the exact ones.
    """
    middle = num_buckets // 2
    size = distance.abs()
    share = torch.log(size.clamp(min=1).float() / middle) / math.log((max_distance - 1) / middle)
    return torch.where(size <= middle, distance, distance.sign() * ((share * (middle - 1)).ceil().long() + middle))


class RelativePositionEmbedding(nn.Module):
    """One vector per distance or bucket of distances, for all layers of a stack."""

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        self.spec, self.span = spec, spec.num_buckets or spec.max_distance
        self.table = nn.Embedding(2 * self.span, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm.eps) if spec.norm_embeddings else nn.Identity()

    def forward(self, x_BTD: Tensor, S: int, token_type_ids_BT: Tensor | None = None) -> RelativePositions:
        """Only the rows of the table that can be meant are taken: a bucket's number is never above its distance."""
        T, last = x_BTD.shape[1], 2 * self.span - 1
        low, high = max(self.span - T + 1, 0), min(self.span + S - 1, last)
        back_R = backward_distances(T, S, x_BTD.device)
        if self.spec.num_buckets:
            back_R = log_bucket(back_R, self.spec.num_buckets, self.spec.max_distance)
        number_R = (back_R + self.span).clamp(low, high) - low
        vectors_PD = self.norm(self.table.weight[low : high + 1])
        return RelativePositions(vectors_PD, T - 1, F.one_hot(number_R, high + 1 - low).to(x_BTD.dtype))


class DisentangledScore(nn.Module):
    """Content against distance, and distance against content (He et al. 2021, section 3.1, the last two of its terms).

    Both count the distance from who asks to what is read, as the published models do (the paper turns it round in
    the second). Vectors of distances have projections of their own, or share those of content.
    """

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        inner = config.num_heads * config.head_size
        self.pos_query = None if spec.share_projections else nn.Linear(config.dim, inner, bias=config.has_query_bias)
        self.pos_key = None if spec.share_projections else nn.Linear(config.dim, inner, bias=config.has_key_bias)
        self.drop = Dropout(config.dropout)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        places: RelativePositions = attention_spec.relative_positions
        H, S = k_BHSd.shape[1:3]
        vectors_PD, choice_RP = self.drop(places.vectors), places.one_hot
        assert choice_RP is not None
        turned_RP = choice_RP[: places.zero_index + S].flip(0)
        if self.pos_query is None or self.pos_key is None:
            ask_HPd, read_HPd = project(vectors_PD)
        else:
            ask_HPd, read_HPd = (
                split_position_heads(self.pos_query(vectors_PD), H),
                split_position_heads(self.pos_key(vectors_PD), H),
            )
        ask, read = (q_BHTd, choice_RP @ read_HPd), (k_BHSd, turned_RP @ ask_HPd)
        return RelativeScores(q_BHTd, places.zero_index, ask, read, places.query_positions)


def make_relative_positions(config: ModelConfig) -> nn.Module | None:
    """What a stack computes once for the scores of all its layers."""
    if isinstance(config.position, TransformerXL):
        return RelativeSinusoids(config, config.position)
    return RelativePositionEmbedding(config, config.position) if isinstance(config.position, Disentangled) else None
