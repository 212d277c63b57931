"""Relative position scores that depend on the tokens: Shaw, Transformer-XL (with XLNet's segments), DeBERTa.

Each adds to the score `q_t . k_s` products of the query or the key with a vector for the distance s - t:

    Shaw (Shaw et al. 2018, section 3.2)            q_t . a[s - t]                   learned a, clipped distances
    Transformer-XL (Dai et al. 2019, section 3.3)   (q_t + u) . k_s + (q_t + v) . W r[s - t]    sinusoids r
    DeBERTa (He et al. 2021, section 3.1)           q_t . K p[s - t] + k_s . Q p[s - t]         learned p

Done naively this needs a vector for each pair (t, s). But there are only R = T + S - 1 distances: one matmul gives the
products of all queries with all distances, (T, R), and `rel_shift` (Transformer-XL, appendix B) turns that table into
scores (T, S). It shifts row t by t, which is a change of strides and not a gather:

    distances of row t: -(T-1) ... S-1, flattened; dropping the first T - 1 numbers and reading rows of R - 1 instead
    of R moves every row one further to the left than the one before, so column s of row t holds distance s - t.

A layer returns a `RelativeScores`: the factors of these products, not the products. The fused kernel multiplies only
those distances that each tile needs; other kernels take `to_dense`.

Shapes: B rows, T queries, S keys, H heads, d head size, D model width, P position vectors, R distances
-(T - 1) ... S - 1, rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Disentangled, ModelConfig, Shaw, TransformerXL
from firth.models.exporting import is_exporting
from firth.models.kernels.dropout import Dropout

ProjectQK = Callable[[Tensor], tuple[Tensor, Tensor]]  # vectors (P, D) to a layer's queries and keys, both (H, P, d)
RelativeFactors = tuple[Tensor, Tensor]  # (B, H, X, d) and (H, R, d): their product has a score per position, distance
DISTANCE_COUNT_MULTIPLE = 8  # distances; matmuls on a GPU are fast for multiples of this


class RelativePositions(NamedTuple):
    """What a stack computes once per batch for the relative scores of all its layers."""

    vectors: Tensor  # (P, D)
    zero_index: int  # index of distance 0 among the R distances; negative distances come before it
    one_hot: Tensor | None = None  # (R, P) selects the vector of each distance; None: vector r belongs to distance r
    query_positions: Tensor | None = None  # (B, T) positions of the queries; None: 0 ... T - 1
    is_other_segment: Tensor | None = None  # (B, T, S) true where query and key are in different segments

    def at_positions(self, position_BK: Tensor) -> RelativePositions:
        """Return the same for queries at these positions only."""
        other = self.is_other_segment
        other = None if other is None else other.take_along_dim(position_BK[:, :, None], 1)
        return self._replace(query_positions=position_BK, is_other_segment=other)


class RelativeScores(NamedTuple):
    """A layer's scores beside `query . key`, as factors: per query and distance, per key and distance, and dense.

    `key_factors` count distances from the last: distance 0 is at index S - 1, and later queries come first.
    """

    query: Tensor  # (B, H, T, d) multiplied with the keys
    zero_index: int
    query_factors: RelativeFactors | None = None
    key_factors: RelativeFactors | None = None
    query_positions: Tensor | None = None  # (B, T)
    extra_scores: Tensor | None = None  # (B, H, T, S)

    def to_dense(self, S: int) -> Tensor:
        """Return the sum of all terms, (B, H, T, S).

        Compiled code keeps it in float32: the compiler rounds what it saves for the backward pass but not what it
        uses in the forward pass, and the attention weights of the two would differ.
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


def rel_shift(x_BHTR: Tensor, S: int) -> Tensor:
    """Turn scores per distance (..., T, R) into scores per key (..., T, S): [t, s] is row t at distance s - t.

    >>> rel_shift(torch.tensor([[-2, -1, 0, 1, 2], [-2, -1, 0, 1, 2], [-2, -1, 0, 1, 2]]), 3)
    tensor([[ 0,  1,  2],
            [-1,  0,  1],
            [-2, -1,  0]])
    """
    T, R = x_BHTR.shape[-2:]
    if is_exporting():  # an exported graph has one branch for every T
        device = x_BHTR.device
        index_TS = torch.arange(S, device=device)[None] + (T - 1) - torch.arange(T, device=device)[:, None]
        return x_BHTR.gather(-1, index_TS.expand(*x_BHTR.shape[:-1], S))
    if T == 1:
        return x_BHTR[..., :S]
    flat = x_BHTR.flatten(-2)[..., T - 1 : T - 1 + T * (R - 1)]
    return flat.unflatten(-1, (T, R - 1))[..., :S]


def query_relative_scores(x_BHTR: Tensor, S: int, query_positions_BT: Tensor | None, zero_index: int) -> Tensor:
    """Return (B, H, T, S) from the queries' scores per distance."""
    if query_positions_BT is None:
        return rel_shift(x_BHTR, S)
    return x_BHTR.gather(-1, query_to_key_distances(S, query_positions_BT, x_BHTR) + zero_index)


def key_relative_scores(x_BHSR: Tensor, T: int, query_positions_BT: Tensor | None) -> Tensor:
    """Return (B, H, T, S) from the keys' scores per distance, the last distance first."""
    if query_positions_BT is None:
        return rel_shift(x_BHSR, T).mT
    S = x_BHSR.shape[-2]
    return x_BHSR.gather(-1, S - 1 - query_to_key_distances(S, query_positions_BT, x_BHSR).mT).mT


def query_to_key_distances(S: int, query_positions_BT: Tensor, x_BHXR: Tensor) -> Tensor:
    """Return (B, H, T, S): key position minus query position."""
    distance_BTS = torch.arange(S, device=query_positions_BT.device) - query_positions_BT[:, :, None]
    return distance_BTS[:, None].expand(-1, x_BHXR.shape[1], -1, -1)


def backward_distances(T: int, S: int, device: torch.device) -> Tensor:
    """Return (R,): query position minus key position, largest first. S - T keys of a memory precede the queries.

    R is rounded up to a multiple that matmuls on a GPU favour; not in an exported graph, which serves every T.
    """
    R = T + S - 1
    if not is_exporting():
        R = -(-R // DISTANCE_COUNT_MULTIPLE) * DISTANCE_COUNT_MULTIPLE
    return S - T - torch.arange(1 - T, 1 - T + R, device=device)


def split_position_heads(x_PI: Tensor, num_heads: int) -> Tensor:
    """(P, H x d) to (H, P, d)."""
    return x_PI.unflatten(-1, (num_heads, -1)).transpose(0, 1)


# --- Shaw ---------------------------------------------------------------------------------------------------------


class ShawScore(nn.Module):
    """`q_t . a[s - t]`: a learned vector per distance, clipped to `max_distance`, the same in every head."""

    def __init__(self, config: ModelConfig, spec: Shaw) -> None:
        super().__init__()
        self.max_distance = spec.max_distance
        self.vectors = nn.Embedding(2 * spec.max_distance + 1, config.head_size)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        """In cached decoding, `relative_positions` (B or 1, S) are distances back from the one query of each row."""
        if attention_spec.relative_positions is not None:
            index = (self.max_distance - attention_spec.relative_positions).clamp(0, 2 * self.max_distance)
            scores = (q_BHTd @ self.vectors.weight.t()).gather(-1, index[:, None, None].expand(*q_BHTd.shape[:3], -1))
            return RelativeScores(q_BHTd, 0, extra_scores=scores)
        T, S = q_BHTd.shape[2], k_BHSd.shape[2]
        distance_R = S - T - backward_distances(T, S, q_BHTd.device)
        index_R = distance_R.clamp(-self.max_distance, self.max_distance) + self.max_distance
        vectors_HRd = self.vectors(index_R).expand(q_BHTd.shape[1], -1, -1)
        return RelativeScores(q_BHTd, T - 1, (q_BHTd, vectors_HRd))


# --- Transformer-XL -----------------------------------------------------------------------------------------------


class RelativeSinusoids(nn.Module):
    """Transformer-XL's r: sines and cosines of the distance back, for all layers of a stack."""

    def __init__(self, config: ModelConfig, spec: TransformerXL) -> None:
        super().__init__()
        self.spec = spec
        self.drop = Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, S: int, token_type_ids_BT: Tensor | None = None) -> RelativePositions:
        T, D = x_BTD.shape[1:]
        back_R = backward_distances(T, S, x_BTD.device)
        frequencies = 10000 ** (-torch.arange(0, D, 2, device=x_BTD.device) / D)
        angle_RF = back_R[:, None] * frequencies
        vectors_RD = self.drop(torch.cat([angle_RF.sin(), angle_RF.cos()], -1).to(x_BTD.dtype))
        if token_type_ids_BT is None or not self.spec.relative_segments:
            return RelativePositions(vectors_RD, T - 1)
        key_types_BS = F.pad(token_type_ids_BT, (S - T, 0))  # the memory counts as segment 0
        return RelativePositions(
            vectors_RD, T - 1, is_other_segment=token_type_ids_BT[:, :, None] != key_types_BS[:, None, :]
        )


class TransformerXLScore(nn.Module):
    """`(q_t + u) . k_s + (q_t + v) . W r[s - t]`, with u = `key_bias`, v = `distance_bias` and W = `distance`.

    XLNet's segment score (Yang et al. 2019, section 2.5) is `(q_t + b) . g`, with one g for keys of the query's own
    segment and one for other segments. A constant over all keys of a query changes no softmax, so only the difference
    of the two is added, at keys of other segments.
    """

    def __init__(self, config: ModelConfig, spec: TransformerXL) -> None:
        super().__init__()
        H, d = config.num_heads, config.head_size
        self.distance = nn.Linear(config.dim, H * d, bias=False)
        self.key_bias = nn.Parameter(torch.empty(H, d))
        self.distance_bias = nn.Parameter(torch.empty(H, d))
        self.segment_bias = nn.Parameter(torch.empty(H, d)) if spec.relative_segments else None
        self.segments = nn.Parameter(torch.empty(2, H, d)) if spec.relative_segments else None  # same, other

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        relative: RelativePositions = attention_spec.relative_positions
        r_HRd = split_position_heads(self.distance(relative.vectors), q_BHTd.shape[1])
        query_factors = (q_BHTd + self.distance_bias[:, None].to(q_BHTd.dtype), r_HRd)
        segment_scores = None
        if relative.is_other_segment is not None and self.segments is not None and self.segment_bias is not None:
            same_Hd, other_Hd = self.segments
            difference_BHT1 = (q_BHTd + self.segment_bias[:, None]) @ (other_Hd - same_Hd)[:, :, None]
            segment_scores = difference_BHT1 * relative.is_other_segment[:, None].to(difference_BHT1.dtype)
        return RelativeScores(
            q_BHTd + self.key_bias[:, None].to(q_BHTd.dtype),
            relative.zero_index,
            query_factors,
            query_positions=relative.query_positions,
            extra_scores=segment_scores,
        )


# --- DeBERTa ------------------------------------------------------------------------------------------------------


def log_bucket(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return the signed bucket of each distance: exact up to num / 2, then logarithmic; max_distance - 1 is num - 1.

    Buckets are of DeBERTa version 2; the paper has exact distances only.
    """
    middle = num_buckets // 2
    size = distance.abs()
    fraction = torch.log(size.clamp(min=1).float() / middle) / math.log((max_distance - 1) / middle)
    return torch.where(size <= middle, distance, distance.sign() * ((fraction * (middle - 1)).ceil().long() + middle))


class RelativePositionEmbedding(nn.Module):
    """DeBERTa's p: one learned vector per distance or bucket of distances, for all layers of a stack."""

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        self.spec, self.span = spec, spec.num_buckets or spec.max_distance
        self.table = nn.Embedding(2 * self.span, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm.eps) if spec.norm_embeddings else nn.Identity()

    def forward(self, x_BTD: Tensor, S: int, token_type_ids_BT: Tensor | None = None) -> RelativePositions:
        """Use only the rows of the table that T queries and S keys can reach: a bucket is never above its distance.

        An exported graph, which serves every T, uses all of them.
        """
        T, low, high = x_BTD.shape[1], 0, 2 * self.span - 1
        if not is_exporting():
            low, high = max(self.span - T + 1, 0), min(self.span + S - 1, high)
        back_R = backward_distances(T, S, x_BTD.device)
        if self.spec.num_buckets:
            back_R = log_bucket(back_R, self.spec.num_buckets, self.spec.max_distance)
        index_R = (back_R + self.span).clamp(low, high) - low
        vectors_PD = self.norm(self.table.weight[low : high + 1])
        return RelativePositions(vectors_PD, T - 1, F.one_hot(index_R, high + 1 - low).to(x_BTD.dtype))


class DisentangledScore(nn.Module):
    """Content to position `q_t . K p`, and position to content `k_s . Q p` (He et al. 2021, section 3.1).

    The paper's third term, position to position, says nothing about the tokens and is left out there too. Both terms
    use the distance from query to key, as the published models do (the paper reverses it in the second). K and Q are
    projections of their own (`pos_key`, `pos_query`), or those of the content (version 2).
    """

    def __init__(self, config: ModelConfig, spec: Disentangled) -> None:
        super().__init__()
        inner = config.num_heads * config.head_size
        self.pos_query = None if spec.share_projections else nn.Linear(config.dim, inner, bias=config.has_query_bias)
        self.pos_key = None if spec.share_projections else nn.Linear(config.dim, inner, bias=config.has_key_bias)
        self.drop = Dropout(config.dropout)

    def forward(self, q_BHTd: Tensor, k_BHSd: Tensor, attention_spec: Any, project: ProjectQK) -> RelativeScores:
        relative: RelativePositions = attention_spec.relative_positions
        H, S = k_BHSd.shape[1:3]
        vectors_PD, one_hot_RP = self.drop(relative.vectors), relative.one_hot
        assert one_hot_RP is not None
        reversed_RP = one_hot_RP[: relative.zero_index + S].flip(0)
        if self.pos_query is None or self.pos_key is None:
            pos_query_HPd, pos_key_HPd = project(vectors_PD)
        else:
            pos_query_HPd = split_position_heads(self.pos_query(vectors_PD), H)
            pos_key_HPd = split_position_heads(self.pos_key(vectors_PD), H)
        query_factors, key_factors = (q_BHTd, one_hot_RP @ pos_key_HPd), (k_BHSd, reversed_RP @ pos_query_HPd)
        return RelativeScores(q_BHTd, relative.zero_index, query_factors, key_factors, relative.query_positions)


def make_relative_positions(config: ModelConfig) -> nn.Module | None:
    """Return the module with the position vectors that all layers of a stack share, or None."""
    if isinstance(config.position, TransformerXL):
        return RelativeSinusoids(config, config.position)
    return RelativePositionEmbedding(config, config.position) if isinstance(config.position, Disentangled) else None
