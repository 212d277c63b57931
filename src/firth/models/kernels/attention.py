"""Attention by our own kernel, with what others lack: cheap dropout, a bias that learns, numbers by distance.

The kernel is in `kernels.py`; here is what it is given. It needs no mask where a `KeyRange` says who sees whom, and then
goes only through tiles in which something is seen.

B rows, H heads, T places that ask, S places that are read, d numbers per head, R distances, W of them in a table, N and
M blocks of places.
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

BAND_WIDTH_MULTIPLE = 8  # numbers for distances come in multiples of this, which suits matrix products


class KeyRange(NamedTuple):
    """Who sees whom: each that is read has a number, and each that asks sees so many of these, from a lowest one on."""

    key_ids: Tensor  # (B or 1, S), all of 32 bits
    start: Tensor  # (B or 1, T)
    length: Tensor | None = None  # the one number alone, where it is not said
    # of each tile that asks, between which places it sees anything, and between which tiles it sees all
    key_bounds: Tensor | None = None  # (4, B or 1, T / BLOCK)
    query_bounds: Tensor | None = None  # (4, B or 1, S / BLOCK): the same of those who see each tile that is read

    def at_positions(self, position_BK: Tensor) -> KeyRange:
        """The same for those who ask at some places only."""
        low, size = (None if x is None else x.expand(len(position_BK), -1).gather(1, position_BK) for x in self[1:3])
        assert low is not None
        return KeyRange(self.key_ids, low, size)

    def as_interval(self) -> KeyRange:
        """The same with a size, as windows have one: layers of both kinds can share a program then."""
        return self if self.length is not None else self._replace(length=torch.ones_like(self.start))


class KernelMask(NamedTuple):
    """What the kernels take of this, for B rows: a mask, or a reach with the tiles that are worth a look."""

    mask: Tensor | None = None
    key_ids: Tensor | None = None  # (B, S)
    key_ranges: Tensor | None = None  # (2, B, T): the lowest key that is seen, and how many from there on; or (1, B, T)
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
    """Softmax attention (B, H, T, d), and 0 for those who see nobody. Several heads may share keys and values.

    `mask` is (B or 1, 1, T, S), true for seeing; `reach` says the same by few numbers, and is taken where it is given.
    `bias` (1, H, T, S) is added to the scores, and its gradient is added up as it comes. If it is a number of each head
    for all that is at least `bias_max_distance` places before, and another for all that is so far after, that saves work;
    each number then gets its whole gradient, though not each place its own. `is_causal` is for as many places that ask as
    are read.
    """
    dtype = q_BHTd.dtype
    drop = make_dropout_factors(q_BHTd.shape[:3].numel(), k_BGSd.shape[2], dropout, q_BHTd.device)
    k_BGSd, v_BGSd = k_BGSd.to(dtype), v_BGSd.to(dtype)
    bias = None if bias is None else bias.contiguous()
    who = make_kernel_mask(mask, key_range, len(q_BHTd))
    numbers = (0, 0, bias_max_distance, is_causal, dropout, scale)
    return attention_forward(q_BHTd, k_BGSd, v_BGSd, None, None, who[0], None, *drop, bias, *who[1:], *numbers)[0]


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
    """The same, of what has one gradient: queries, keys and values in one tensor, given twice; or queries, and keys and
    values of another sequence side by side. (B, T, H x d)
    """
    B, T, _ = x_BTI.shape
    who, drop = (
        make_kernel_mask(mask, key_range, B),
        make_dropout_factors(B * num_heads * T, kv_BSI.shape[1], dropout, x_BTI.device),
    )
    bias = None if bias is None else bias.contiguous()
    numbers = (num_heads, 0, bias_max_distance, is_causal, dropout, scale)
    return attention_forward(x_BTI, kv_BSI, kv_BSI, None, None, who[0], None, *drop, bias, *who[1:], *numbers)[0]


def make_kernel_mask(
    mask: Tensor | None, key_range: KeyRange | None, B: int, needs_all_tiles: bool = False
) -> KernelMask:
    """`needs_all_tiles` need all tiles, as each of them has a gradient there."""
    if key_range is None:
        return KernelMask(mask)
    keys_BS = key_range.key_ids.expand(B, -1).contiguous()
    said = [key_range.start] if key_range.length is None else [key_range.start, key_range.length]
    numbers = torch.stack(said).expand(-1, B, -1).contiguous()
    if needs_all_tiles:
        return KernelMask(None, keys_BS, numbers)
    key_range = with_tile_bounds(key_range)
    assert key_range.key_bounds is not None
    assert key_range.query_bounds is not None
    seen, seeing = (x.expand(-1, B, -1).contiguous() for x in (key_range.key_bounds, key_range.query_bounds))
    return KernelMask(None, keys_BS, numbers, seen, seeing)


def with_tile_bounds(key_range: KeyRange) -> KeyRange:
    """The same, and what it means for tiles: those whose keys and what others see of them are apart do not meet."""
    if key_range.key_bounds is not None:
        return key_range
    low_BT, high_BT = (
        key_range.start,
        key_range.start if key_range.length is None else key_range.start + key_range.length - 1,
    )
    (least_BN, lowest_BN), (highest_BN, most_BN) = block_min_max(low_BT), block_min_max(high_BT)
    first_BM, last_BM = block_min_max(key_range.key_ids)
    meet_BNM = (first_BM[:, None] <= most_BN[:, :, None]) & (least_BN[:, :, None] <= last_BM[:, None])
    all_BNM = (first_BM[:, None] >= lowest_BN[:, :, None]) & (last_BM[:, None] <= highest_BN[:, :, None])
    seen = visible_tile_bounds(meet_BNM, all_BNM, key_range.key_ids.shape[1])
    return key_range._replace(
        key_bounds=seen, query_bounds=visible_tile_bounds(meet_BNM.mT, all_BNM.mT, key_range.start.shape[1])
    )


def block_min_max(x_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most of each block of places; the last one is filled up with its last place."""
    more = -x_BT.shape[1] % TILE_TOKENS
    x_BNI = torch.cat([x_BT, x_BT[:, -1:].expand(-1, more)], 1).unflatten(1, (-1, TILE_TOKENS))
    return x_BNI.amin(2), x_BNI.amax(2)


def visible_tile_bounds(any_visible_BNM: Tensor, all_visible_BNM: Tensor, length: int) -> Tensor:
    """(4, B, N): where the first block begins that each meets, and where the last one ends (nowhere without any); the
    same of those of which it meets all, where nothing else is between them.
    """
    at_M = torch.arange(any_visible_BNM.shape[2], dtype=torch.int32, device=any_visible_BNM.device) * TILE_TOKENS
    (first_BN, end_BN), (begin_BN, stop_BN) = (
        (torch.where(x, at_M, length).amin(2), torch.where(x, at_M + TILE_TOKENS, 0).amax(2))
        for x in (any_visible_BNM, all_visible_BNM)
    )
    one_BN = stop_BN - begin_BN == TILE_TOKENS * all_visible_BNM.sum(2)
    begin_BN, stop_BN = (torch.where(one_BN, x, 0) for x in (begin_BN, stop_BN))
    return torch.stack([first_BN, end_BN.clamp(max=length), begin_BN, stop_BN.clamp(max=length)]).int()


def make_dropout_factors(
    num_queries: int, S: int, dropout: float, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of those who ask (B x H x T) and of what is read (S), whose products say what is dropped."""
    return (random_odd_factors((num_queries,), device), random_odd_factors((S,), device)) if dropout else (None, None)


def has_nondeterministic_grads(relative_scores: RelativeScores) -> bool:
    """Whether the kernel adds up gradients as they come: those of asked places, some of which may be one."""
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
    """The same with a number for each distance."""
    q_BHTd, asked = relative_scores.query, relative_scores.query_positions
    T, S, dtype = q_BHTd.shape[2], k_BHSd.shape[2], q_BHTd.dtype
    drop = make_dropout_factors(q_BHTd.shape[:3].numel(), S, dropout, q_BHTd.device)
    if asked is None:
        ask = (
            None
            if relative_scores.query_factors is None
            else banded_matmul(*relative_scores.query_factors, relative_scores.zero_index, S)
        )
        read = None if relative_scores.key_factors is None else banded_matmul(*relative_scores.key_factors, S - 1, T)
    else:
        ask, read = (
            None if x is None else x[0] @ x[1].mT for x in (relative_scores.query_factors, relative_scores.key_factors)
        )
    ask, read = (None if x is None else x.to(dtype).contiguous() for x in (ask, read))
    k_BHSd, v_BHSd = k_BHSd.to(dtype), v_BHSd.to(dtype)
    who = make_kernel_mask(mask, key_range, len(q_BHTd), needs_all_tiles=True)
    numbers = (0, relative_scores.zero_index, 0, False, dropout, scale)
    return attention_forward(q_BHTd, k_BHSd, v_BHSd, ask, read, who[0], asked, *drop, None, *who[1:], *numbers)[0]


def banded_matmul(x_BHTd: Tensor, vectors_HRd: Tensor, zero_index: int, S: int) -> Tensor:
    """Products with the vectors of the distances to S places, only of those that occur: (H, N, B, BLOCK, W).

    Those at N x BLOCK places are taken together by blocks. The W distances of a block begin with that from its last
    place to the first of the S; so those of its first place begin at BLOCK - 1.
    """
    B, _, T, _ = x_BHTd.shape
    N, W = -(-T // TILE_TOKENS), -(-(S + TILE_TOKENS - 1) // BAND_WIDTH_MULTIPLE) * BAND_WIDTH_MULTIPLE
    before = (
        N * TILE_TOKENS - 1 - zero_index
    )  # so many more distances than there are vectors: those of places that fill a block
    after = max(0, zero_index + W - (TILE_TOKENS - 1) - vectors_HRd.shape[1])
    vectors_HRd = F.pad(vectors_HRd, (0, 0, before, after))
    bands = [vectors_HRd[:, first : first + W] for first in range((N - 1) * TILE_TOKENS, -1, -TILE_TOKENS)]
    x_BHNId = F.pad(x_BHTd, (0, 0, 0, N * TILE_TOKENS - T)).unflatten(2, (N, TILE_TOKENS))
    y_HNMW = x_BHNId.permute(1, 2, 0, 3, 4).flatten(2, 3) @ torch.stack(bands, 1).mT
    return y_HNMW.unflatten(2, (B, TILE_TOKENS))
