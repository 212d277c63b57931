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

from firth.models.config import Disentangled, FanInInit, ModelConfig, Shaw, TransformerXL
from firth.models.fp8.linear import Float8Linear
from firth.models.fp8.residual_norm import ResidualNormEpilogue
from firth.models.kernels.attention import (
    KeyRange,
    fused_attention,
    fused_qkv_attention,
    fused_relative_attention,
    has_nondeterministic_grads,
    with_tile_bounds,
)
from firth.models.kernels.dropout import fast_dropout
from firth.models.kernels.tiling import has_fused_attention
from firth.models.lora import LoRALinear
from firth.models.position.relative_attention import (
    DisentangledScore,
    RelativeScores,
    ShawScore,
    TransformerXLScore,
    split_position_heads,
)
from firth.models.position.rope import Rope

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


MAX_KEY_RANGE_TOKENS = 2**14  # up to which the numbers of documents and ranks fit together into 32 bits
KEY_ID_DOCUMENT_STRIDE = 2 * MAX_KEY_RANGE_TOKENS


class AttentionSpec(NamedTuple):
    """Who may see whom: `is_causal` alone, or a `mask` (B or 1, 1, T, S) that is true where seeing is allowed."""

    is_causal: bool = False
    mask: Tensor | None = None
    mask_is_causal: bool = False  # all that the mask says is order: it is there because a score had to be masked
    masked_bias: Tensor | None = None  # (B or 1, H, T, S) added to the scores, -inf where the mask forbids
    bias: Tensor | None = None  # (1, H, T, S) the same before the mask, where it is the same for all rows
    bias_max_distance: int = (
        0  # from so many places on, to either side, all of a head have the same bias; 0 if that is never so
    )
    rope: Rope | None = None  # turns queries and keys by their places
    query_rope: Rope | None = None  # the same for queries, where only some places ask
    relative_positions: Any = None  # what the scores of a layer need to know of the row
    has_empty_rows: bool = False
    attentions: list[Tensor] | None = None  # where the weights of attention are kept for someone who wants to see them
    key_range: KeyRange | None = None  # what the mask says, where that can be said by a number for each place
    allow_fused: bool = True  # whether our own kernel may compute it
    update_cache: CacheUpdate | None = (
        None  # takes the keys and values (B, G, T, d) of new places, gives all that are read
    )

    def at_positions(self, position_BK: Tensor, query_rope: Rope | None = None) -> AttentionSpec:
        """The same where only some places of each row ask, with their turn."""
        assert self.masked_bias is None
        assert not self.is_causal
        mask, places = (
            self.mask,
            None if self.relative_positions is None else self.relative_positions.at_positions(position_BK),
        )
        if mask is not None:
            mask = mask.expand(len(position_BK), -1, -1, -1).take_along_dim(position_BK[:, None, :, None], 2)
        reach = None if self.key_range is None else self.key_range.at_positions(position_BK)
        return self._replace(mask=mask, key_range=reach, relative_positions=places, query_rope=query_rope)

    def kernel_args(self, dtype: torch.dtype, dropout: float, scale: float) -> tuple[Any, ...]:
        """What our own kernel takes after queries, keys and values.

        A bias in float16 would have no room for a gradient that is added up in one place.
        """
        bias = self.bias.to(dtype) if self.bias is not None and dtype == torch.bfloat16 else self.bias
        mask = None if self.mask_is_causal else self.mask
        return mask, self.key_range, bias, self.is_causal or self.mask_is_causal, dropout, scale, self.bias_max_distance


class KeyValues(NamedTuple):
    """Keys and values (B, S, G x d) of another sequence, made before."""

    k: Tensor
    v: Tensor


class LocalWindow(NamedTuple):
    """A window: each place sees those of its row that are at most so far away."""

    positions: Tensor  # (T,)
    max_distance: int


def make_attention_spec(
    is_causal: bool,
    document_ids: Tensor | None,
    attention_rank: Tensor | None = None,
    key_document_ids: Tensor | None = None,
    score_bias: Tensor | None = None,
    window: LocalWindow | None = None,
    bias_max_distance: int = 0,
) -> AttentionSpec:
    """Sight from the fields of a batch: the same document, and `rank[j] <= rank[i]`.

    Without `attention_rank` a causal stack reads in order of place. `key_document_ids` are the documents of another sequence
    (cross-attention); without documents everything is one. `window` narrows what is seen. `bias_max_distance` is of the score.
    """
    mask = None
    if document_ids is not None:
        mask = document_ids[:, :, None] == (document_ids if key_document_ids is None else key_document_ids)[:, None, :]
    if window is not None:
        close = (window.positions[:, None] - window.positions[None, :]).abs() <= window.max_distance
        mask = close[None] if mask is None else mask & close
    if attention_rank is not None:
        earlier = attention_rank[:, None, :] <= attention_rank[:, :, None]
        mask = earlier if mask is None else mask & earlier
    elif is_causal and (mask is not None or score_bias is not None):
        like = mask if mask is not None else score_bias
        assert like is not None
        lower = torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).tril()
        mask = lower[None] if mask is None else mask & lower
    bias = score_bias
    if mask is not None:
        mask = mask[:, None]
        if score_bias is not None:
            score_bias = score_bias.masked_fill(~mask, float("-inf"))
    reach = make_key_range(is_causal, document_ids, attention_rank, key_document_ids, window=window)
    if reach is not None and reach.key_ids.is_cuda:
        reach = with_tile_bounds(reach)  # once for all layers
    ordered = is_causal and document_ids is None and attention_rank is None and window is None
    return AttentionSpec(
        ordered and mask is None,
        mask,
        ordered and mask is not None,
        score_bias,
        bias,
        bias_max_distance,
        key_range=reach,
    )


def make_key_range(
    is_causal: bool,
    document_ids_BT: Tensor | None,
    attention_rank_BT: Tensor | None,
    key_document_ids_BS: Tensor | None = None,
    is_strict: bool = False,
    window: LocalWindow | None = None,
) -> KeyRange | None:
    """The same sight in few numbers: a document's places stand together, those of one rank too, and those of a window.

    `is_strict` lets nobody see its own rank.
    """
    like = attention_rank_BT if document_ids_BT is None else document_ids_BT
    like = window.positions[None] if like is None and window is not None else like
    if like is None or like.shape[1] > MAX_KEY_RANGE_TOKENS or (window is not None and attention_rank_BT is not None):
        return None
    base_BT = (
        torch.zeros_like(like, dtype=torch.int32)
        if document_ids_BT is None
        else document_ids_BT.int() * KEY_ID_DOCUMENT_STRIDE
    )
    if key_document_ids_BS is not None:
        return KeyRange(key_document_ids_BS.int() * KEY_ID_DOCUMENT_STRIDE, base_BT)
    if attention_rank_BT is None and window is None and not is_causal:
        return KeyRange(base_BT, base_BT.clone())  # programs want to know that inputs are apart
    place_T = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    order_BT = place_T.expand_as(like) if attention_rank_BT is None else attention_rank_BT.int()
    if window is not None:
        upto = min(window.max_distance, like.shape[1])  # more would be keys of other documents
        size_BT = torch.full_like(base_BT, 1 + upto * (1 if is_causal else 2))
        return KeyRange(base_BT + order_BT, base_BT + order_BT - upto, size_BT)
    return KeyRange(base_BT + order_BT, base_BT, order_BT if is_strict else order_BT + 1)


def select_attention_kernel(
    device: str,
    spec: AttentionSpec,
    dropout: float,
    is_compiling: bool,
    is_relative: bool = False,
    can_fuse: bool = False,
    is_cross: bool = False,
) -> Literal["eager", "sdpa", "fused"]:
    """Which way to compute attention: the fastest that was measured (docs/results.md).

    Our own kernel, where the device can run it: if each row has numbers of its own for each distance and nothing else
    on its scores (`is_relative`), or (`own`) in a compiled step if there is dropout, a bias that all rows share, a
    sight in few numbers, by which it leaves out what is not seen, or keys and values of another sequence (`is_cross`),
    whose gradient it makes in one piece. Other steps would wait longer for it to be compiled than it saves them.

    SDPA takes a fused kernel for all, causal and masked sight, and computes what a mask forbids too.
    Single operations win on a CPU with dropout, for which SDPA has no fused kernel there, and in a compiled GPU step
    where each row has scores of its own, whose gradient SDPA hands back slowly; and only they know the weights that
    someone wants to see.
    """
    if spec.attentions is not None:
        return "eager"
    if is_relative and spec.masked_bias is None:
        return "fused"
    if can_fuse and is_compiling and (dropout or spec.bias is not None or spec.key_range is not None or is_cross):
        return "fused"
    if device == "cpu":
        return "eager" if dropout and not is_compiling else "sdpa"
    own_scores = spec.masked_bias is not None and spec.masked_bias.shape[0] > 1
    return "eager" if own_scores and is_compiling else "sdpa"


def attend(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, spec: AttentionSpec, dropout: float, scale: float) -> Tensor:
    """Softmax attention, by the kernel that suits."""
    way = attention_kernel_for(q_BHTd, k_BGSd, spec, dropout)
    if way == "eager":
        return eager_attention(q_BHTd, k_BGSd, v_BGSd, spec, dropout, scale)
    if way == "fused":
        return fused_attention(q_BHTd, k_BGSd, v_BGSd, *spec.kernel_args(q_BHTd.dtype, dropout, scale))
    bias = spec.mask if spec.masked_bias is None else spec.masked_bias.to(q_BHTd.dtype)
    grouped = q_BHTd.shape[1] != k_BGSd.shape[1]
    if grouped and bias is not None:  # the fused kernels that take a bias do not share heads
        k_BGSd, v_BGSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    y_BHTd = F.scaled_dot_product_attention(
        q_BHTd,
        k_BGSd,
        v_BGSd,
        attn_mask=bias,
        dropout_p=dropout,
        is_causal=spec.is_causal,
        scale=scale,
        enable_gqa=grouped and bias is None,
    )
    return zero_empty_rows(y_BHTd, spec) if spec.has_empty_rows and spec.masked_bias is not None else y_BHTd


def attention_kernel_for(
    q_BHTd: Tensor, k_BGSd: Tensor, spec: AttentionSpec, dropout: float, is_cross: bool = False
) -> Literal["eager", "sdpa", "fused"]:
    own = supports_fused_attention(q_BHTd, k_BGSd, spec)
    return select_attention_kernel(
        q_BHTd.device.type, spec, dropout, torch.compiler.is_compiling(), can_fuse=own, is_cross=is_cross
    )


def supports_fused_attention(q_BHTd: Tensor, k_BGSd: Tensor, spec: AttentionSpec) -> bool:
    """Whether our own kernel can compute it: in 16 bits, and with only a bias on the scores.

    The bias learns by sums that have no order, so a run that is to be deterministic leaves it out.
    """
    if not spec.allow_fused or spec.update_cache is not None or not has_fused_attention(q_BHTd):
        return False
    square = not (spec.is_causal or spec.mask_is_causal) or q_BHTd.shape[2] == k_BGSd.shape[2]
    short = q_BHTd.dtype in (torch.bfloat16, torch.float16)
    in_order = torch.are_deterministic_algorithms_enabled() and spec.bias is not None and spec.bias.requires_grad
    biased = spec.bias is not None and not in_order
    return square and short and (spec.masked_bias is None or biased)


def relative_attention(
    relative_scores: RelativeScores, k_BHSd: Tensor, v_BHSd: Tensor, spec: AttentionSpec, dropout: float, scale: float
) -> Tensor:
    """The same where a layer has scores of its own for each distance: in one kernel where there is one.

    A run that is to be deterministic leaves it out where it has no order.
    """
    q_BHTd, S = relative_scores.query, k_BHSd.shape[2]
    left_out = torch.are_deterministic_algorithms_enabled() and has_nondeterministic_grads(relative_scores)
    alone = spec.allow_fused and relative_scores.extra_scores is None and has_fused_attention(q_BHTd) and not left_out
    if select_attention_kernel(q_BHTd.device.type, spec, dropout, torch.compiler.is_compiling(), alone) == "fused":
        mask = causal_mask(q_BHTd.shape[2], S, q_BHTd.device) if spec.is_causal else spec.mask
        return fused_relative_attention(relative_scores, k_BHSd, v_BHSd, mask, spec.key_range, dropout, scale)
    return attend(q_BHTd, k_BHSd, v_BHSd, add_score_bias(spec, relative_scores.to_dense(S) * scale), dropout, scale)


def eager_attention(
    q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, spec: AttentionSpec, dropout: float, scale: float
) -> Tensor:
    """The same in single operations; whoever sees nobody gets 0 here too."""
    k_BHSd, v_BHSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    scores = (q_BHTd * scale) @ k_BHSd.transpose(-1, -2)
    if spec.masked_bias is not None:
        scores = scores.to(torch.promote_types(scores.dtype, spec.masked_bias.dtype))
        scores += spec.masked_bias
    elif spec.is_causal or spec.mask is not None:
        # added, not filled in: so that nothing is done backward
        allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if spec.mask is None else spec.mask
        scores += scores.new_zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if spec.attentions is not None:
        spec.attentions.append(weights)
    y_BHTd = fast_dropout(weights, dropout) @ v_BHSd
    return y_BHTd if spec.mask is None else zero_empty_rows(y_BHTd, spec)


def zero_empty_rows(y_BHTd: Tensor, spec: AttentionSpec) -> Tensor:
    """Nothing for those who see nobody."""
    assert spec.mask is not None
    return y_BHTd * spec.mask.any(-1, keepdim=True)


def repeat_heads(x_BGSd: Tensor, q_BHTd: Tensor) -> Tensor:
    """Heads of keys or values as often as there are queries that share them."""
    times = q_BHTd.shape[1] // x_BGSd.shape[1]
    return x_BGSd if times == 1 else x_BGSd.repeat_interleave(times, 1)


class Attention(nn.Module):
    """Multi-head attention; who asks (`x`) and what is read (`read`) may be two sequences."""

    allow_fused = True  # whether our own kernel may compute it

    def __init__(self, config: ModelConfig, is_cross: bool = False) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        inner, self.qkv_sizes = self.num_heads * self.head_size, self.projection_sizes(config)
        self.qkv = nn.Linear(
            config.dim, sum(self.qkv_sizes), bias=config.has_key_bias
        )  # query, key, value in one product
        only = config.has_query_bias and not config.has_key_bias
        self.qv_bias = nn.Parameter(torch.zeros(self.qkv_sizes[0] + self.qkv_sizes[2])) if only else None
        self.out = nn.Linear(inner, config.dim, bias=config.has_query_bias)
        self.score = None if is_cross else make_relative_score(config)
        self.dropout = config.attention_dropout
        terms = 3 if isinstance(self.score, DisentangledScore) else 1  # so many are added up (DeBERTa, section 3.1)
        self.scale = 1.0 if isinstance(config.init, FanInInit) else (terms * self.head_size) ** -0.5

    @staticmethod
    def projection_sizes(config: ModelConfig) -> tuple[int, int, int]:
        """How much of `qkv` is queries, keys and values."""
        read = config.kv_heads * config.head_size
        return config.num_heads * config.head_size, read, read

    def forward(
        self,
        x_BTD: Tensor,
        spec: AttentionSpec,
        kv_states_BSD: Tensor | KeyValues | None = None,
        epilogue: ResidualNormEpilogue | None = None,
    ) -> Any:
        """With an `end`, what that gives."""
        out = self.out if epilogue is None else partial(self.out, epilogue=epilogue)
        dropout, spec = self.dropout if self.training else 0.0, spec._replace(allow_fused=self.allow_fused)
        plain_rows = self.score is None and self.kv_heads == self.num_heads
        if kv_states_BSD is None:
            together = self.project_rows(x_BTD)
            heads = self.split_heads(together)
            if plain_rows and attention_kernel_for(heads, heads, spec, dropout) == "fused":
                if spec.rope is not None:
                    together = spec.rope(together, 2 * self.num_heads)
                rest = spec.kernel_args(together.dtype, dropout, self.scale)
                return out(fused_qkv_attention(together, together, self.num_heads, *rest))
            q, k, v = together.split(self.qkv_sizes, -1)
        elif isinstance(kv_states_BSD, KeyValues):
            q, k, v = self.project_rows(x_BTD, 0, self.qkv_sizes[0]), *kv_states_BSD
        else:
            q, both = (
                self.project_rows(x_BTD, 0, self.qkv_sizes[0]),
                self.project_rows(kv_states_BSD, self.qkv_sizes[0]),
            )
            if (
                spec.rope is None
                and plain_rows
                and attention_kernel_for(self.split_heads(q), self.split_heads(both), spec, dropout, is_cross=True)
                == "fused"
            ):
                rest = spec.kernel_args(q.dtype, dropout, self.scale)
                return out(fused_qkv_attention(q, both, self.num_heads, *rest))
            k, v = both.split(self.qkv_sizes[1:], -1)
        if spec.rope is not None:
            q, k = (spec.query_rope or spec.rope)(q), spec.rope(k)
        q, k, v = (self.split_heads(part) for part in (q, k, v))
        if spec.update_cache is not None:
            k, v = spec.update_cache(k, v)
        if self.score is None:
            y = attend(q, k, v, spec, dropout, self.scale)
        else:
            k, v = repeat_heads(k, q), repeat_heads(v, q)
            y = relative_attention(self.score(q, k, spec, self.project_qk), k, v, spec, dropout, self.scale)
        return out(y.transpose(1, 2).flatten(2))

    def project_kv(self, kv_states_BSD: Tensor) -> KeyValues:
        """The keys and values of another sequence."""
        return KeyValues(*self.project_rows(kv_states_BSD, self.qkv_sizes[0]).split(self.qkv_sizes[1:], -1))

    def project_rows(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Queries, keys, values, or several of them: what these rows of `qkv` make of a sequence."""
        bias = self.qkv_bias
        bias = None if bias is None else bias[start:stop]
        if isinstance(self.qkv, Float8Linear):
            return self.qkv.forward_rows(x, bias, start, stop)
        y = F.linear(x, self.qkv.weight[start:stop], bias)
        return y + self.qkv.lora_delta(x, start, stop) if isinstance(self.qkv, LoRALinear) else y

    @property
    def qkv_bias(self) -> Tensor | None:
        """Of query, key and value; 0 for the key where it has none."""
        if self.qv_bias is None:
            return self.qkv.bias
        q, v = self.qv_bias.split(self.qkv_sizes[::2])
        return torch.cat([q, q.new_zeros(self.qkv_sizes[1]), v])

    def project_qk(self, x_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (H, P, d) of vectors that are no tokens, for scores that share these projections."""
        q, k = self.project_rows(x_PD, 0, sum(self.qkv_sizes[:2])).split(self.qkv_sizes[:2], -1)
        q_HPd, k_GPd = split_position_heads(q, self.num_heads), split_position_heads(k, self.kv_heads)
        return q_HPd, k_GPd.repeat_interleave(self.num_heads // self.kv_heads, 0)

    def split_heads(self, x_BTI: Tensor) -> Tensor:
        return x_BTI.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def make_relative_score(config: ModelConfig) -> nn.Module | None:
    """What a layer adds to its scores by itself."""
    if isinstance(config.position, TransformerXL):
        return TransformerXLScore(config, config.position)
    if isinstance(config.position, Disentangled):
        return DisentangledScore(config, config.position)
    return ShawScore(config, config.position) if isinstance(config.position, Shaw) else None


def add_score_bias(spec: AttentionSpec, bias_BHTS: Tensor) -> AttentionSpec:
    """The same sight with more on the scores."""
    if spec.masked_bias is not None:
        return spec._replace(masked_bias=spec.masked_bias + bias_BHTS, bias=None)
    if spec.is_causal:
        T, S = bias_BHTS.shape[-2:]
        spec = spec._replace(is_causal=False, mask=causal_mask(T, S, bias_BHTS.device))
    if spec.mask is not None:
        low = torch.finfo(bias_BHTS.dtype).min if spec.has_empty_rows else float("-inf")
        bias_BHTS = bias_BHTS.masked_fill(~spec.mask, low)
    return spec._replace(masked_bias=bias_BHTS)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(1, 1, T, S): each sees itself and what came before."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril()[None, None]
