"""Attention by our own kernel, with what others lack: cheap dropout, a bias that learns, numbers by distance.

The kernel is in `kernels.py`; here is what it is given. It needs no mask where a `Reach` says who sees whom, and then
goes only through tiles in which something is seen.

B rows, H heads, T places that ask, S places that are read, d numbers per head, R distances, W of them in a table, N and
M blocks of places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models.dropout import odd_numbers
from firth.models.relative import Distances
from firth.models.tiles import BLOCK, triton

if triton is not None:
    from firth.models.kernels import forward

ROUND = 8  # numbers for distances come in multiples of this, which suits matrix products


class Reach(NamedTuple):
    """Who sees whom: each that is read has a number, and each that asks sees so many of these, from a lowest one on."""

    key: Tensor  # (B or 1, S), all of 32 bits
    low: Tensor  # (B or 1, T)
    size: Tensor | None = None  # the one number alone, where it is not said
    # of each tile that asks, between which places it sees anything, and between which tiles it sees all
    seen: Tensor | None = None  # (4, B or 1, T / BLOCK)
    seeing: Tensor | None = None  # (4, B or 1, S / BLOCK): the same of those who see each tile that is read

    def at(self, place_BK: Tensor) -> Reach:
        """The same for those who ask at some places only."""
        low, size = (None if x is None else x.expand(len(place_BK), -1).gather(1, place_BK) for x in self[1:3])
        assert low is not None
        return Reach(self.key, low, size)

    def as_interval(self) -> Reach:
        """The same with a size, as windows have one: layers of both kinds can share a program then."""
        return self if self.size is not None else self._replace(size=torch.ones_like(self.low))


class Who(NamedTuple):
    """What the kernels take of this, for B rows: a mask, or a reach with the tiles that are worth a look."""

    mask: Tensor | None = None
    keys: Tensor | None = None  # (B, S)
    reach: Tensor | None = None  # (2, B, T): the lowest key that is seen, and how many from there on; or (1, B, T)
    seen: Tensor | None = None
    seeing: Tensor | None = None


def attend_at_once(
    q_BHTd: Tensor,
    k_BGSd: Tensor,
    v_BGSd: Tensor,
    mask: Tensor | None,
    reach: Reach | None,
    bias: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
    far: int = 0,
) -> Tensor:
    """Softmax attention (B, H, T, d), and 0 for those who see nobody. Several heads may share keys and values.

    `mask` is (B or 1, 1, T, S), true for seeing; `reach` says the same by few numbers, and is taken where it is given.
    `bias` (1, H, T, S) is added to the scores, and its gradient is added up as it comes. If it is a number of each head
    for all that is at least `far` places before, and another for all that is so far after, that saves work;
    each number then gets its whole gradient, though not each place its own. `causal` is for as many places that ask as
    are read.
    """
    dtype = q_BHTd.dtype
    drop = to_drop(q_BHTd.shape[:3].numel(), k_BGSd.shape[2], dropout, q_BHTd.device)
    k_BGSd, v_BGSd = k_BGSd.to(dtype), v_BGSd.to(dtype)
    bias = None if bias is None else bias.contiguous()
    who = seen_by(mask, reach, len(q_BHTd))
    numbers = (0, 0, far, causal, dropout, scale)
    return forward(q_BHTd, k_BGSd, v_BGSd, None, None, who[0], None, *drop, bias, *who[1:], *numbers)[0]


def attend_packed(
    x_BTI: Tensor,
    read_BSI: Tensor,
    heads: int,
    mask: Tensor | None,
    reach: Reach | None,
    bias: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
    far: int = 0,
) -> Tensor:
    """The same, of what has one gradient: queries, keys and values in one tensor, given twice; or queries, and keys and
    values of another sequence side by side. (B, T, H x d)
    """
    B, T, _ = x_BTI.shape
    who, drop = seen_by(mask, reach, B), to_drop(B * heads * T, read_BSI.shape[1], dropout, x_BTI.device)
    bias = None if bias is None else bias.contiguous()
    numbers = (heads, 0, far, causal, dropout, scale)
    return forward(x_BTI, read_BSI, read_BSI, None, None, who[0], None, *drop, bias, *who[1:], *numbers)[0]


def seen_by(mask: Tensor | None, reach: Reach | None, B: int, tables: bool = False) -> Who:
    """`tables` need all tiles, as each of them has a gradient there."""
    if reach is None:
        return Who(mask)
    keys_BS = reach.key.expand(B, -1).contiguous()
    said = [reach.low] if reach.size is None else [reach.low, reach.size]
    numbers = torch.stack(said).expand(-1, B, -1).contiguous()
    if tables:
        return Who(None, keys_BS, numbers)
    reach = in_tiles(reach)
    assert reach.seen is not None
    assert reach.seeing is not None
    seen, seeing = (x.expand(-1, B, -1).contiguous() for x in (reach.seen, reach.seeing))
    return Who(None, keys_BS, numbers, seen, seeing)


def in_tiles(reach: Reach) -> Reach:
    """The same, and what it means for tiles: those whose keys and what others see of them are apart do not meet."""
    if reach.seen is not None:
        return reach
    low_BT, high_BT = reach.low, reach.low if reach.size is None else reach.low + reach.size - 1
    (least_BN, lowest_BN), (highest_BN, most_BN) = edges(low_BT), edges(high_BT)
    first_BM, last_BM = edges(reach.key)
    meet_BNM = (first_BM[:, None] <= most_BN[:, :, None]) & (least_BN[:, :, None] <= last_BM[:, None])
    all_BNM = (first_BM[:, None] >= lowest_BN[:, :, None]) & (last_BM[:, None] <= highest_BN[:, :, None])
    seen = between(meet_BNM, all_BNM, reach.key.shape[1])
    return reach._replace(seen=seen, seeing=between(meet_BNM.mT, all_BNM.mT, reach.low.shape[1]))


def edges(x_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most of each block of places; the last one is filled up with its last place."""
    more = -x_BT.shape[1] % BLOCK
    x_BNI = torch.cat([x_BT, x_BT[:, -1:].expand(-1, more)], 1).unflatten(1, (-1, BLOCK))
    return x_BNI.amin(2), x_BNI.amax(2)


def between(meet_BNM: Tensor, all_BNM: Tensor, length: int) -> Tensor:
    """(4, B, N): where the first block begins that each meets, and where the last one ends (nowhere without any); the
    same of those of which it meets all, where nothing else is between them.
    """
    at_M = torch.arange(meet_BNM.shape[2], dtype=torch.int32, device=meet_BNM.device) * BLOCK
    (first_BN, end_BN), (begin_BN, stop_BN) = (
        (torch.where(x, at_M, length).amin(2), torch.where(x, at_M + BLOCK, 0).amax(2)) for x in (meet_BNM, all_BNM)
    )
    one_BN = stop_BN - begin_BN == BLOCK * all_BNM.sum(2)
    begin_BN, stop_BN = (torch.where(one_BN, x, 0) for x in (begin_BN, stop_BN))
    return torch.stack([first_BN, end_BN.clamp(max=length), begin_BN, stop_BN.clamp(max=length)]).int()


def to_drop(asking: int, S: int, dropout: float, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of those who ask (B x H x T) and of what is read (S), whose products say what is dropped."""
    return (odd_numbers((asking,), device), odd_numbers((S,), device)) if dropout else (None, None)


def has_no_order(scores: Distances) -> bool:
    """Whether the kernel adds up gradients as they come: those of asked places, some of which may be one."""
    return scores.read is not None and scores.asked is not None


def attend_by_distance(
    scores: Distances,
    k_BHSd: Tensor,
    v_BHSd: Tensor,
    mask: Tensor | None,
    reach: Reach | None,
    dropout: float,
    scale: float,
) -> Tensor:
    """The same with a number for each distance."""
    q_BHTd, asked = scores.query, scores.asked
    T, S, dtype = q_BHTd.shape[2], k_BHSd.shape[2], q_BHTd.dtype
    drop = to_drop(q_BHTd.shape[:3].numel(), S, dropout, q_BHTd.device)
    if asked is None:
        ask = None if scores.ask is None else in_bands(*scores.ask, scores.zero, S)
        read = None if scores.read is None else in_bands(*scores.read, S - 1, T)
    else:
        ask, read = (None if x is None else x[0] @ x[1].mT for x in (scores.ask, scores.read))
    ask, read = (None if x is None else x.to(dtype).contiguous() for x in (ask, read))
    k_BHSd, v_BHSd = k_BHSd.to(dtype), v_BHSd.to(dtype)
    who = seen_by(mask, reach, len(q_BHTd), tables=True)
    numbers = (0, scores.zero, 0, False, dropout, scale)
    return forward(q_BHTd, k_BHSd, v_BHSd, ask, read, who[0], asked, *drop, None, *who[1:], *numbers)[0]


def in_bands(x_BHTd: Tensor, vectors_HRd: Tensor, zero: int, S: int) -> Tensor:
    """Products with the vectors of the distances to S places, only of those that occur: (H, N, B, BLOCK, W).

    Those at N x BLOCK places are taken together by blocks. The W distances of a block begin with that from its last
    place to the first of the S; so those of its first place begin at BLOCK - 1.
    """
    B, _, T, _ = x_BHTd.shape
    N, W = -(-T // BLOCK), -(-(S + BLOCK - 1) // ROUND) * ROUND
    before = N * BLOCK - 1 - zero  # so many more distances than there are vectors: those of places that fill a block
    after = max(0, zero + W - (BLOCK - 1) - vectors_HRd.shape[1])
    vectors_HRd = F.pad(vectors_HRd, (0, 0, before, after))
    bands = [vectors_HRd[:, first : first + W] for first in range((N - 1) * BLOCK, -1, -BLOCK)]
    x_BHNId = F.pad(x_BHTd, (0, 0, 0, N * BLOCK - T)).unflatten(2, (N, BLOCK))
    y_HNMW = x_BHNId.permute(1, 2, 0, 3, 4).flatten(2, 3) @ torch.stack(bands, 1).mT
    return y_HNMW.unflatten(2, (B, BLOCK))
