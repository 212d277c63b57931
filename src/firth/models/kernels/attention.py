"""Fused attention: masks as integer key ranges, tiles that are skipped, and the inputs of the Triton kernel.

The kernel (`attention_triton.py`) supports what SDPA's kernels lack: dropout without stored random numbers, a position
bias with a gradient, relative scores per distance, and visibility as a range of integers.

A mask of T x S booleans costs as much memory traffic as the scores that it masks. A `KeyRange` says the same with three
integers per token: every key has an id, and a query sees the ids from `start` to `start + length - 1`. With ids
`document * stride + rank` this covers packed documents, causal, prefix and permutation masks and sliding windows
(`models/attention.py`). The kernel compares ids in registers.

Ranges also tell which tiles matter. A tile of queries and a tile of keys (64 x 64) whose ranges and ids do not overlap
is skipped; one in which every query sees every key needs no comparison. `with_tile_bounds` computes both once per
batch, for all layers, from the minimum and maximum of each tile.

Shapes: B rows, H heads, G heads of keys and values, T queries, S keys, d head size, R distances, W distances of a
band, N tiles of queries, M tiles of keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.kernels.dropout import random_odd_factors
from firth.models.kernels.tiling import TILE_TOKENS, triton
from firth.models.position.relative_attention import RelativeScores

if triton is not None:
    from firth.models.kernels.attention_triton import attention_forward

BAND_WIDTH_MULTIPLE = 8  # distances; matmuls on a GPU are fast for multiples of this


class KeyRange(NamedTuple):
    """Visibility as integers: a query sees the keys with ids `start` to `start + length - 1`. All are int32."""

    key_ids: Tensor  # (B or 1, S)
    start: Tensor  # (B or 1, T)
    length: Tensor | None = None  # (B or 1, T); None: 1
    key_bounds: Tensor | None = None  # (4, B or 1, N) per tile of queries, see `visible_tile_bounds`
    query_bounds: Tensor | None = None  # (4, B or 1, M) per tile of keys

    def at_positions(self, position_BK: Tensor) -> KeyRange:
        """Return the ranges of the queries at these positions only."""
        start, length = (
            None if x is None else x.expand(len(position_BK), -1).gather(1, position_BK) for x in self[1:3]
        )
        assert start is not None
        return KeyRange(self.key_ids, start, length)

    def as_interval(self) -> KeyRange:
        """Return the same with an explicit length, as windows have: global and local layers share compiled code."""
        return self if self.length is not None else self._replace(length=torch.ones_like(self.start))


class KernelMask(NamedTuple):
    """The kernel's visibility arguments for B rows: a boolean mask, or key ranges with tile bounds."""

    mask: Tensor | None = None
    key_ids: Tensor | None = None  # (B, S)
    key_ranges: Tensor | None = None  # (2, B, T): start and length; or (1, B, T): start alone
    key_bounds: Tensor | None = None
    query_bounds: Tensor | None = None


def fused_attention(
    q_BHTd: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    mask: Tensor | None,
    key_range: KeyRange | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float,
    bias_max_distance: int = 0,
) -> Tensor:
    """Return softmax(q k^T * scale + bias) v, (B, H, T, d); 0 for queries that see no key.

    `mask` is (B or 1, 1, T, S), true where a query sees a key; `key_range` takes precedence. `bias` is (1, H, T, S);
    its gradient is accumulated atomically. If a head's bias is one constant for all keys at least `bias_max_distance`
    before the query and another for all as far after it, tiles there load one number. The gradient of such a constant
    is then stored at one element, not spread over all that have it. `is_causal` needs T = S.
    """
    dtype = q_BHTd.dtype
    drop = make_dropout_factors(q_BHTd.shape[:3].numel(), k_BGSd.shape[2], dropout, q_BHTd.device)
    k_BGSd, v_BGSd = k_BGSd.to(dtype), v_BGSd.to(dtype)
    bias = None if bias is None else bias.contiguous()
    visible = make_kernel_mask(mask, key_range, len(q_BHTd))
    options = (0, 0, bias_max_distance, is_causal, dropout, scale)
    y, _ = attention_forward(q_BHTd, k_BGSd, v_BGSd, None, None, visible[0], None, *drop, bias, *visible[1:], *options)
    return y


def fused_qkv_attention(
    x_BTI: Tensor,
    kv_BSI: Tensor,
    num_heads: int,
    mask: Tensor | None,
    key_range: KeyRange | None,
    bias: Tensor | None,
    is_causal: bool,
    dropout: float,
    scale: float,
    bias_max_distance: int = 0,
) -> Tensor:
    """Return (B, T, H x d) from packed tensors, whose gradients are packed too.

    Either both arguments are the same (B, T, 3 x H x d) with queries, keys and values; or `x_BTI` are queries
    (B, T, H x d) and `kv_BSI` keys and values (B, S, 2 x H x d) of another sequence.
    """
    B, T, _ = x_BTI.shape
    visible = make_kernel_mask(mask, key_range, B)
    drop = make_dropout_factors(B * num_heads * T, kv_BSI.shape[1], dropout, x_BTI.device)
    bias = None if bias is None else bias.contiguous()
    options = (num_heads, 0, bias_max_distance, is_causal, dropout, scale)
    y, _ = attention_forward(x_BTI, kv_BSI, kv_BSI, None, None, visible[0], None, *drop, bias, *visible[1:], *options)
    return y


def make_kernel_mask(
    mask: Tensor | None, key_range: KeyRange | None, B: int, needs_all_tiles: bool = False
) -> KernelMask:
    """Expand visibility to B rows. `needs_all_tiles` omits tile bounds: relative scores have gradients everywhere."""
    if key_range is None:
        return KernelMask(mask)
    keys_BS = key_range.key_ids.expand(B, -1).contiguous()
    ranges = [key_range.start] if key_range.length is None else [key_range.start, key_range.length]
    ranges_2BT = torch.stack(ranges).expand(-1, B, -1).contiguous()
    if needs_all_tiles:
        return KernelMask(None, keys_BS, ranges_2BT)
    key_range = with_tile_bounds(key_range)
    assert key_range.key_bounds is not None
    assert key_range.query_bounds is not None
    bounds = (x.expand(-1, B, -1).contiguous() for x in (key_range.key_bounds, key_range.query_bounds))
    return KernelMask(None, keys_BS, ranges_2BT, *bounds)


def with_tile_bounds(key_range: KeyRange) -> KeyRange:
    """Return the same with the bounds of visible and fully visible tiles, from each tile's least and largest ids."""
    if key_range.key_bounds is not None:
        return key_range
    start_BT = key_range.start
    end_BT = start_BT if key_range.length is None else start_BT + key_range.length - 1
    (min_start_BN, max_start_BN), (min_end_BN, max_end_BN) = block_min_max(start_BT), block_min_max(end_BT)
    min_id_BM, max_id_BM = block_min_max(key_range.key_ids)
    any_BNM = (min_id_BM[:, None] <= max_end_BN[:, :, None]) & (min_start_BN[:, :, None] <= max_id_BM[:, None])
    all_BNM = (min_id_BM[:, None] >= max_start_BN[:, :, None]) & (max_id_BM[:, None] <= min_end_BN[:, :, None])
    return key_range._replace(
        key_bounds=visible_tile_bounds(any_BNM, all_BNM, key_range.key_ids.shape[1]),
        query_bounds=visible_tile_bounds(any_BNM.mT, all_BNM.mT, start_BT.shape[1]),
    )


def block_min_max(x_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum (B, N) of each tile; the last tile is padded with its last element."""
    num_padding = -x_BT.shape[1] % TILE_TOKENS
    x_BNI = torch.cat([x_BT, x_BT[:, -1:].expand(-1, num_padding)], 1).unflatten(1, (-1, TILE_TOKENS))
    return x_BNI.amin(2), x_BNI.amax(2)


def visible_tile_bounds(any_visible_BNM: Tensor, all_visible_BNM: Tensor, length: int) -> Tensor:
    """Return (4, B, N), in tokens: start and end of the visible tiles, start and end of the fully visible ones.

    The latter are 0 and 0 if the fully visible tiles are not contiguous.
    """
    start_M = torch.arange(any_visible_BNM.shape[2], dtype=torch.int32, device=any_visible_BNM.device) * TILE_TOKENS
    (start_BN, end_BN), (full_start_BN, full_end_BN) = (
        (torch.where(x, start_M, length).amin(2), torch.where(x, start_M + TILE_TOKENS, 0).amax(2))
        for x in (any_visible_BNM, all_visible_BNM)
    )
    is_contiguous_BN = full_end_BN - full_start_BN == TILE_TOKENS * all_visible_BNM.sum(2)
    full_start_BN, full_end_BN = (torch.where(is_contiguous_BN, x, 0) for x in (full_start_BN, full_end_BN))
    return torch.stack([start_BN, end_BN.clamp(max=length), full_start_BN, full_end_BN.clamp(max=length)]).int()


def make_dropout_factors(
    num_queries: int, S: int, dropout: float, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return random factors per query (B x H x T,) and per key (S,) of the dropout mask, see dropout.py."""
    return (random_odd_factors((num_queries,), device), random_odd_factors((S,), device)) if dropout else (None, None)


def has_nondeterministic_grads(relative_scores: RelativeScores) -> bool:
    """Whether the kernel accumulates gradients atomically: target positions may repeat."""
    return relative_scores.key_factors is not None and relative_scores.query_positions is not None


def fused_relative_attention(
    relative_scores: RelativeScores,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
    mask: Tensor | None,
    key_range: KeyRange | None,
    dropout: float,
    scale: float,
) -> Tensor:
    """`fused_attention` with relative scores per query and distance, and per key and distance."""
    q_BHTd, query_positions = relative_scores.query, relative_scores.query_positions
    T, S, dtype = q_BHTd.shape[2], k_BHSd.shape[2], q_BHTd.dtype
    drop = make_dropout_factors(q_BHTd.shape[:3].numel(), S, dropout, q_BHTd.device)
    q_factors, k_factors = relative_scores.query_factors, relative_scores.key_factors
    if query_positions is None:
        q_rel = None if q_factors is None else banded_matmul(*q_factors, relative_scores.zero_index, S)
        k_rel = None if k_factors is None else banded_matmul(*k_factors, S - 1, T)
    else:
        q_rel, k_rel = (None if x is None else x[0] @ x[1].mT for x in (q_factors, k_factors))
    q_rel, k_rel = (None if x is None else x.to(dtype).contiguous() for x in (q_rel, k_rel))
    k_BHSd, v_BHSd = k_BHSd.to(dtype), v_BHSd.to(dtype)
    visible = make_kernel_mask(mask, key_range, len(q_BHTd), needs_all_tiles=True)
    options = (0, relative_scores.zero_index, 0, False, dropout, scale)
    return attention_forward(
        q_BHTd, k_BHSd, v_BHSd, q_rel, k_rel, visible[0], query_positions, *drop, None, *visible[1:], *options
    )[0]


def banded_matmul(x_BHTd: Tensor, vectors_HRd: Tensor, zero_index: int, S: int) -> Tensor:
    """Return the scores of each tile's positions for the distances that occur in it, (H, N, B, TILE, W).

    A tile of 64 positions needs only W = S + 63 of the R distances, so the tiles are multiplied with bands of the
    vectors. A band begins with the distance from the tile's last position to key 0; its first position's begin at 63.
    """
    B, _, T, _ = x_BHTd.shape
    N, W = -(-T // TILE_TOKENS), -(-(S + TILE_TOKENS - 1) // BAND_WIDTH_MULTIPLE) * BAND_WIDTH_MULTIPLE
    before = N * TILE_TOKENS - 1 - zero_index  # distances of the positions that pad the last tile
    after = max(0, zero_index + W - (TILE_TOKENS - 1) - vectors_HRd.shape[1])
    vectors_HRd = F.pad(vectors_HRd, (0, 0, before, after))
    bands = [vectors_HRd[:, first : first + W] for first in range((N - 1) * TILE_TOKENS, -1, -TILE_TOKENS)]
    x_BHNId = F.pad(x_BHTd, (0, 0, 0, N * TILE_TOKENS - T)).unflatten(2, (N, TILE_TOKENS))
    y_HNMW = x_BHNId.permute(1, 2, 0, 3, 4).flatten(2, 3) @ torch.stack(bands, 1).mT
    return y_HNMW.unflatten(2, (B, TILE_TOKENS))
