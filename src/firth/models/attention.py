"""One Attention for all, and the one function that picks the kernel.

B rows, T places that ask, S places that are read, H heads, G heads of keys and values, d numbers per head, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Disentangled, FanIn, ModelConfig, Shaw, TransformerXL
from firth.models.dropout import drop
from firth.models.eight import Linear8
from firth.models.eight_norm import Ending
from firth.models.fused import Reach, attend_at_once, attend_by_distance, attend_packed, has_no_order, in_tiles
from firth.models.lora import Adapted
from firth.models.position import Turn
from firth.models.relative import DisentangledScore, Distances, ShawScore, TransformerXLScore, split
from firth.models.tiles import can_fuse

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


MANY_PLACES = 2**14  # up to which the numbers of documents and ranks fit together into 32 bits
APART = 2 * MANY_PLACES


class Sight(NamedTuple):
    """Who may see whom: `causal` alone, or a `mask` (B or 1, 1, T, S) that is true where seeing is allowed."""

    causal: bool = False
    mask: Tensor | None = None
    ordered: bool = False  # all that the mask says is order: it is there because a score had to be masked
    score: Tensor | None = None  # (B or 1, H, T, S) added to the scores, -inf where the mask forbids
    bias: Tensor | None = None  # (1, H, T, S) the same before the mask, where it is the same for all rows
    far: int = 0  # from so many places on, to either side, all of a head have the same bias; 0 if that is never so
    turn: Turn | None = None  # turns queries and keys by their places
    turn_asking: Turn | None = None  # the same for queries, where only some places ask
    places: Any = None  # what the scores of a layer need to know of the row
    some_see_nobody: bool = False
    seen: list[Tensor] | None = None  # where the weights of attention are kept for someone who wants to see them
    reach: Reach | None = None  # what the mask says, where that can be said by a number for each place
    own: bool = True  # whether our own kernel may compute it
    keep: Keep | None = None  # takes the keys and values (B, G, T, d) of new places, gives all that are read

    def at(self, place_BK: Tensor, turn: Turn | None = None) -> Sight:
        """The same where only some places of each row ask, with their turn."""
        assert self.score is None
        assert not self.causal
        mask, places = self.mask, None if self.places is None else self.places.at(place_BK)
        if mask is not None:
            mask = mask.expand(len(place_BK), -1, -1, -1).take_along_dim(place_BK[:, None, :, None], 2)
        reach = None if self.reach is None else self.reach.at(place_BK)
        return self._replace(mask=mask, reach=reach, places=places, turn_asking=turn)

    def for_kernel(self, dtype: torch.dtype, dropout: float, scale: float) -> tuple[Any, ...]:
        """What our own kernel takes after queries, keys and values.

        A bias in float16 would have no room for a gradient that is added up in one place.
        """
        bias = self.bias.to(dtype) if self.bias is not None and dtype == torch.bfloat16 else self.bias
        mask = None if self.ordered else self.mask
        return mask, self.reach, bias, self.causal or self.ordered, dropout, scale, self.far


class Keys(NamedTuple):
    """Keys and values (B, S, G x d) of another sequence, made before."""

    k: Tensor
    v: Tensor


class Near(NamedTuple):
    """A window: each place sees those of its row that are at most so far away."""

    place: Tensor  # (T,)
    upto: int


def see(
    causal: bool,
    doc: Tensor | None,
    rank: Tensor | None = None,
    read_doc: Tensor | None = None,
    score: Tensor | None = None,
    near: Near | None = None,
    far: int = 0,
) -> Sight:
    """Sight from the fields of a batch: the same document, and `rank[j] <= rank[i]`.

    Without `rank` a causal stack reads in order of place. `read_doc` are the documents of another sequence
    (cross-attention); without documents everything is one. `near` narrows what is seen. `far` is of the score.
    """
    mask = None
    if doc is not None:
        mask = doc[:, :, None] == (doc if read_doc is None else read_doc)[:, None, :]
    if near is not None:
        close = (near.place[:, None] - near.place[None, :]).abs() <= near.upto
        mask = close[None] if mask is None else mask & close
    if rank is not None:
        earlier = rank[:, None, :] <= rank[:, :, None]
        mask = earlier if mask is None else mask & earlier
    elif causal and (mask is not None or score is not None):
        like = mask if mask is not None else score
        assert like is not None
        lower = torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).tril()
        mask = lower[None] if mask is None else mask & lower
    bias = score
    if mask is not None:
        mask = mask[:, None]
        if score is not None:
            score = score.masked_fill(~mask, float("-inf"))
    reach = make_reach(causal, doc, rank, read_doc, near=near)
    if reach is not None and reach.key.is_cuda:
        reach = in_tiles(reach)  # once for all layers
    ordered = causal and doc is None and rank is None and near is None
    return Sight(ordered and mask is None, mask, ordered and mask is not None, score, bias, far, reach=reach)


def make_reach(
    causal: bool,
    doc_BT: Tensor | None,
    rank_BT: Tensor | None,
    read_doc_BS: Tensor | None = None,
    strict: bool = False,
    near: Near | None = None,
) -> Reach | None:
    """The same sight in few numbers: a document's places stand together, those of one rank too, and those of a window.

    `strict` lets nobody see its own rank.
    """
    like = rank_BT if doc_BT is None else doc_BT
    like = near.place[None] if like is None and near is not None else like
    if like is None or like.shape[1] > MANY_PLACES or (near is not None and rank_BT is not None):
        return None
    base_BT = torch.zeros_like(like, dtype=torch.int32) if doc_BT is None else doc_BT.int() * APART
    if read_doc_BS is not None:
        return Reach(read_doc_BS.int() * APART, base_BT)
    if rank_BT is None and near is None and not causal:
        return Reach(base_BT, base_BT.clone())  # programs want to know that inputs are apart
    place_T = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    order_BT = place_T.expand_as(like) if rank_BT is None else rank_BT.int()
    if near is not None:
        upto = min(near.upto, like.shape[1])  # more would be keys of other documents
        size_BT = torch.full_like(base_BT, 1 + upto * (1 if causal else 2))
        return Reach(base_BT + order_BT, base_BT + order_BT - upto, size_BT)
    return Reach(base_BT + order_BT, base_BT, order_BT if strict else order_BT + 1)


def kernel(
    device: str,
    sight: Sight,
    dropout: float,
    compiled: bool,
    by_distance: bool = False,
    own: bool = False,
    across: bool = False,
) -> Literal["plain", "sdpa", "fused"]:
    """Which way to compute attention: the fastest that was measured (docs/results.md).

    Our own kernel, where the device can run it: if each row has numbers of its own for each distance and nothing else
    on its scores (`by_distance`), or (`own`) in a compiled step if there is dropout, a bias that all rows share, a
    sight in few numbers, by which it leaves out what is not seen, or keys and values of another sequence (`across`),
    whose gradient it makes in one piece. Other steps would wait longer for it to be compiled than it saves them.

    SDPA takes a fused kernel for all, causal and masked sight, and computes what a mask forbids too.
    Single operations win on a CPU with dropout, for which SDPA has no fused kernel there, and in a compiled GPU step
    where each row has scores of its own, whose gradient SDPA hands back slowly; and only they know the weights that
    someone wants to see.
    """
    if sight.seen is not None:
        return "plain"
    if by_distance and sight.score is None:
        return "fused"
    if own and compiled and (dropout or sight.bias is not None or sight.reach is not None or across):
        return "fused"
    if device == "cpu":
        return "plain" if dropout and not compiled else "sdpa"
    own_scores = sight.score is not None and sight.score.shape[0] > 1
    return "plain" if own_scores and compiled else "sdpa"


def attend(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, sight: Sight, dropout: float, scale: float) -> Tensor:
    """Softmax attention, by the kernel that suits."""
    way = way_of(q_BHTd, k_BGSd, sight, dropout)
    if way == "plain":
        return plain(q_BHTd, k_BGSd, v_BGSd, sight, dropout, scale)
    if way == "fused":
        return attend_at_once(q_BHTd, k_BGSd, v_BGSd, *sight.for_kernel(q_BHTd.dtype, dropout, scale))
    bias = sight.mask if sight.score is None else sight.score.to(q_BHTd.dtype)
    grouped = q_BHTd.shape[1] != k_BGSd.shape[1]
    if grouped and bias is not None:  # the fused kernels that take a bias do not share heads
        k_BGSd, v_BGSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    y_BHTd = F.scaled_dot_product_attention(
        q_BHTd,
        k_BGSd,
        v_BGSd,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=sight.causal,
        scale=scale,
        enable_gqa=grouped and bias is None,
    )
    return blind(y_BHTd, sight) if sight.some_see_nobody and sight.score is not None else y_BHTd


def way_of(
    q_BHTd: Tensor, k_BGSd: Tensor, sight: Sight, dropout: float, across: bool = False
) -> Literal["plain", "sdpa", "fused"]:
    own = can_do(q_BHTd, k_BGSd, sight)
    return kernel(q_BHTd.device.type, sight, dropout, torch.compiler.is_compiling(), own=own, across=across)


def can_do(q_BHTd: Tensor, k_BGSd: Tensor, sight: Sight) -> bool:
    """Whether our own kernel can compute it: in 16 bits, and with only a bias on the scores.

    The bias learns by sums that have no order, so a run that is to be deterministic leaves it out.
    """
    if not sight.own or sight.keep is not None or not can_fuse(q_BHTd):
        return False
    square = not (sight.causal or sight.ordered) or q_BHTd.shape[2] == k_BGSd.shape[2]
    short = q_BHTd.dtype in (torch.bfloat16, torch.float16)
    in_order = torch.are_deterministic_algorithms_enabled() and sight.bias is not None and sight.bias.requires_grad
    biased = sight.bias is not None and not in_order
    return square and short and (sight.score is None or biased)


def attend_far(scores: Distances, k_BHSd: Tensor, v_BHSd: Tensor, sight: Sight, dropout: float, scale: float) -> Tensor:
    """The same where a layer has scores of its own for each distance: in one kernel where there is one.

    A run that is to be deterministic leaves it out where it has no order.
    """
    q_BHTd, S = scores.query, k_BHSd.shape[2]
    left_out = torch.are_deterministic_algorithms_enabled() and has_no_order(scores)
    alone = sight.own and scores.more is None and can_fuse(q_BHTd) and not left_out
    if kernel(q_BHTd.device.type, sight, dropout, torch.compiler.is_compiling(), alone) == "fused":
        mask = lower_triangle(q_BHTd.shape[2], S, q_BHTd.device) if sight.causal else sight.mask
        return attend_by_distance(scores, k_BHSd, v_BHSd, mask, sight.reach, dropout, scale)
    return attend(q_BHTd, k_BHSd, v_BHSd, add_score(sight, scores.spread(S) * scale), dropout, scale)


def plain(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, sight: Sight, dropout: float, scale: float) -> Tensor:
    """The same in single operations; whoever sees nobody gets 0 here too."""
    k_BHSd, v_BHSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    scores = (q_BHTd * scale) @ k_BHSd.transpose(-1, -2)
    if sight.score is not None:
        scores = scores.to(torch.promote_types(scores.dtype, sight.score.dtype))
        scores += sight.score
    elif sight.causal or sight.mask is not None:
        # added, not filled in: so that nothing is done backward
        allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if sight.mask is None else sight.mask
        scores += scores.new_zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if sight.seen is not None:
        sight.seen.append(weights)
    y_BHTd = drop(weights, dropout) @ v_BHSd
    return y_BHTd if sight.mask is None else blind(y_BHTd, sight)


def blind(y_BHTd: Tensor, sight: Sight) -> Tensor:
    """Nothing for those who see nobody."""
    assert sight.mask is not None
    return y_BHTd * sight.mask.any(-1, keepdim=True)


def repeat_heads(x_BGSd: Tensor, q_BHTd: Tensor) -> Tensor:
    """Heads of keys or values as often as there are queries that share them."""
    times = q_BHTd.shape[1] // x_BGSd.shape[1]
    return x_BGSd if times == 1 else x_BGSd.repeat_interleave(times, 1)


class Attention(nn.Module):
    """Multi-head attention; who asks (`x`) and what is read (`read`) may be two sequences."""

    own = True  # whether our own kernel may compute it

    def __init__(self, config: ModelConfig, cross: bool = False) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        inner, self.sizes = self.num_heads * self.head_size, self.part_sizes(config)
        self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.key_bias)  # query, key, value in one product
        only = config.query_bias and not config.key_bias
        self.qv_bias = nn.Parameter(torch.zeros(self.sizes[0] + self.sizes[2])) if only else None
        self.out = nn.Linear(inner, config.dim, bias=config.query_bias)
        self.score = None if cross else make_score(config)
        self.dropout = config.attention_dropout
        terms = 3 if isinstance(self.score, DisentangledScore) else 1  # so many are added up (DeBERTa, section 3.1)
        self.scale = 1.0 if isinstance(config.init, FanIn) else (terms * self.head_size) ** -0.5

    @staticmethod
    def part_sizes(config: ModelConfig) -> tuple[int, int, int]:
        """How much of `qkv` is queries, keys and values."""
        read = config.kv_heads * config.head_size
        return config.num_heads * config.head_size, read, read

    def forward(
        self, x_BTD: Tensor, sight: Sight, read_BSD: Tensor | Keys | None = None, end: Ending | None = None
    ) -> Any:
        """With an `end`, what that gives."""
        out = self.out if end is None else partial(self.out, end=end)
        dropout, sight = self.dropout if self.training else 0.0, sight._replace(own=self.own)
        plain_rows = self.score is None and self.kv_heads == self.num_heads
        if read_BSD is None:
            together = self.rows(x_BTD)
            heads = self.split(together)
            if plain_rows and way_of(heads, heads, sight, dropout) == "fused":
                if sight.turn is not None:
                    together = sight.turn(together, 2 * self.num_heads)
                rest = sight.for_kernel(together.dtype, dropout, self.scale)
                return out(attend_packed(together, together, self.num_heads, *rest))
            q, k, v = together.split(self.sizes, -1)
        elif isinstance(read_BSD, Keys):
            q, k, v = self.rows(x_BTD, 0, self.sizes[0]), *read_BSD
        else:
            q, both = self.rows(x_BTD, 0, self.sizes[0]), self.rows(read_BSD, self.sizes[0])
            if (
                sight.turn is None
                and plain_rows
                and way_of(self.split(q), self.split(both), sight, dropout, across=True) == "fused"
            ):
                rest = sight.for_kernel(q.dtype, dropout, self.scale)
                return out(attend_packed(q, both, self.num_heads, *rest))
            k, v = both.split(self.sizes[1:], -1)
        if sight.turn is not None:
            q, k = (sight.turn_asking or sight.turn)(q), sight.turn(k)
        q, k, v = (self.split(part) for part in (q, k, v))
        if sight.keep is not None:
            k, v = sight.keep(k, v)
        if self.score is None:
            y = attend(q, k, v, sight, dropout, self.scale)
        else:
            k, v = repeat_heads(k, q), repeat_heads(v, q)
            y = attend_far(self.score(q, k, sight, self.ask_and_read), k, v, sight, dropout, self.scale)
        return out(y.transpose(1, 2).flatten(2))

    def keys_of(self, read_BSD: Tensor) -> Keys:
        """The keys and values of another sequence."""
        return Keys(*self.rows(read_BSD, self.sizes[0]).split(self.sizes[1:], -1))

    def rows(self, x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
        """Queries, keys, values, or several of them: what these rows of `qkv` make of a sequence."""
        bias = self.bias
        bias = None if bias is None else bias[start:end]
        if isinstance(self.qkv, Linear8):
            return self.qkv.part(x, bias, start, end)
        y = F.linear(x, self.qkv.weight[start:end], bias)
        return y + self.qkv.beside(x, start, end) if isinstance(self.qkv, Adapted) else y

    @property
    def bias(self) -> Tensor | None:
        """Of query, key and value; 0 for the key where it has none."""
        if self.qv_bias is None:
            return self.qkv.bias
        q, v = self.qv_bias.split(self.sizes[::2])
        return torch.cat([q, q.new_zeros(self.sizes[1]), v])

    def ask_and_read(self, x_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (H, P, d) of vectors that are no tokens, for scores that share these projections."""
        q, k = self.rows(x_PD, 0, sum(self.sizes[:2])).split(self.sizes[:2], -1)
        q_HPd, k_GPd = split(q, self.num_heads), split(k, self.kv_heads)
        return q_HPd, k_GPd.repeat_interleave(self.num_heads // self.kv_heads, 0)

    def split(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def make_score(config: ModelConfig) -> nn.Module | None:
    """What a layer adds to its scores by itself."""
    if isinstance(config.position, TransformerXL):
        return TransformerXLScore(config, config.position)
    if isinstance(config.position, Disentangled):
        return DisentangledScore(config, config.position)
    return ShawScore(config, config.position) if isinstance(config.position, Shaw) else None


def add_score(sight: Sight, more_BHTS: Tensor) -> Sight:
    """The same sight with more on the scores."""
    if sight.score is not None:
        return sight._replace(score=sight.score + more_BHTS, bias=None)
    if sight.causal:
        T, S = more_BHTS.shape[-2:]
        sight = sight._replace(causal=False, mask=lower_triangle(T, S, more_BHTS.device))
    if sight.mask is not None:
        low = torch.finfo(more_BHTS.dtype).min if sight.some_see_nobody else float("-inf")
        more_BHTS = more_BHTS.masked_fill(~sight.mask, low)
    return sight._replace(score=more_BHTS)


def lower_triangle(T: int, S: int, device: torch.device) -> Tensor:
    """(1, 1, T, S): each sees itself and what came before."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril()[None, None]
