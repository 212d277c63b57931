"""Multi-head attention, its masks, and the one function that selects the kernel.

Visibility is one integer per token, `attention_rank`. Query i attends to key j if both are in the same document and
`rank[j] <= rank[i]`. For a document of six tokens this gives

    bidirectional (BERT)            0 0 0 0 0 0    every token sees every token
    causal (GPT)                    0 1 2 3 4 5    every token sees itself and earlier ones
    prefix (prefix LM), 3 given     0 0 0 1 2 3    the prefix sees itself, the rest is causal
    permutation (XLNet)             3 0 4 1 5 2    every token sees itself and those predicted before it

XLNet's query stream predicts the token at its own position and must not see it: it uses the strict `rank[j] < rank[i]`.
Packed documents need no extra rule, and a sliding window only narrows what is visible (`LocalWindow`).

The rule has two forms here. `make_attention_spec` writes it as a boolean mask (B, 1, T, S) for SDPA and eager
attention. `make_key_range` writes it as integer ranges: a key's id is `document * stride + rank`, and a query sees the
ids from `start` to `start + length - 1`. The fused kernel (`kernels/attention.py`) compares these ids, skips tiles in
which nothing is visible, and never reads the T x S mask; a compiled step that uses it does not compute the mask at all.

Shapes: B rows, T queries, S keys, H heads, G heads of keys and values (G < H: grouped-query attention), d head size,
D model width, K target positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.config import Disentangled, FanInInit, ModelConfig, Shaw, TransformerXL
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

CacheUpdate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # new keys and values -> all that are attended to
AttentionKernel = Literal["eager", "sdpa", "fused"]

MAX_KEY_RANGE_TOKENS = 2**14  # tokens per row: document * stride + rank fits into 32 bits up to here
KEY_ID_DOCUMENT_STRIDE = 2 * MAX_KEY_RANGE_TOKENS  # 2x: a window may extend one row length past its document


class AttentionSpec(NamedTuple):
    """Which keys each query sees (`is_causal`, `mask`, or neither: all keys), and what is added to its scores."""

    is_causal: bool = False
    mask: Tensor | None = None  # (B or 1, 1, T, S), true where a query sees a key
    mask_is_causal: bool = False  # the mask is exactly the causal one: it exists because `masked_bias` needs it
    masked_bias: Tensor | None = None  # (B or 1, H, T, S) added to the scores, -inf where the mask is false
    bias: Tensor | None = None  # (1, H, T, S) the same before masking, where all rows share it
    bias_max_distance: int = 0  # the bias is the same for all |i - j| >= this (T5's last bucket); 0: no such distance
    rope: Rope | None = None  # rotates keys, and queries too if `query_rope` is None
    query_rope: Rope | None = None  # rotates queries that are at target positions only
    relative_positions: Any = None  # the row's input to the layers' relative scores, see position/
    has_empty_rows: bool = False  # some queries may see no key: their output is 0
    attentions: list[Tensor] | None = None  # collects attention weights (B, H, T, S) for inspection
    key_range: KeyRange | None = None  # the mask as integer ranges, where it has this form
    allow_fused: bool = True  # whether the fused kernel may be selected
    first_values: Tensor | None = None  # (B, S, G x d) the first layer's values, where later layers add them
    update_cache: CacheUpdate | None = None  # stores new keys and values (B, G, T, d), returns all cached ones

    def at_positions(self, position_BK: Tensor, query_rope: Rope | None = None) -> AttentionSpec:
        """Return the spec for queries at these positions only; they still see all S keys."""
        assert self.masked_bias is None
        assert not self.is_causal
        mask, relative = self.mask, self.relative_positions
        relative = None if relative is None else relative.at_positions(position_BK)
        if mask is not None:
            mask = mask.expand(len(position_BK), -1, -1, -1).take_along_dim(position_BK[:, None, :, None], 2)
        key_range = None if self.key_range is None else self.key_range.at_positions(position_BK)
        return self._replace(mask=mask, key_range=key_range, relative_positions=relative, query_rope=query_rope)

    def kernel_args(self, dtype: torch.dtype, dropout: float, scale: float) -> tuple[Any, ...]:
        """Return the fused kernel's arguments after queries, keys and values.

        With float16 inputs the bias stays in float32: its accumulated gradient would overflow float16.
        """
        bias = self.bias.to(dtype) if self.bias is not None and dtype == torch.bfloat16 else self.bias
        mask = None if self.mask_is_causal else self.mask
        return mask, self.key_range, bias, self.is_causal or self.mask_is_causal, dropout, scale, self.bias_max_distance


class KeyValues(NamedTuple):
    """Projected keys and values (B, S, G x d)."""

    k: Tensor
    v: Tensor


class LocalWindow(NamedTuple):
    """Sliding-window attention: a query sees keys of its row at most `max_distance` positions away."""

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
    """Return the spec for a batch: same document, and `rank[j] <= rank[i]`.

    Without `attention_rank`, a causal stack uses positions as ranks and any other stack is bidirectional. Without
    `document_ids` a row is one document. `key_document_ids` are those of the encoder's sequence (cross-attention).
    """
    mask = None
    if document_ids is not None:
        mask = document_ids[:, :, None] == (document_ids if key_document_ids is None else key_document_ids)[:, None, :]
    if window is not None:
        near = (window.positions[:, None] - window.positions[None, :]).abs() <= window.max_distance
        mask = near[None] if mask is None else mask & near
    if attention_rank is not None:
        earlier = attention_rank[:, None, :] <= attention_rank[:, :, None]
        mask = earlier if mask is None else mask & earlier
    elif is_causal and (mask is not None or score_bias is not None):
        scores_like = mask if mask is not None else score_bias
        assert scores_like is not None
        causal = torch.ones(scores_like.shape[-2:], dtype=torch.bool, device=scores_like.device).tril()
        mask = causal[None] if mask is None else mask & causal
    bias = score_bias
    if mask is not None:
        mask = mask[:, None]
        if score_bias is not None:
            score_bias = score_bias.masked_fill(~mask, float("-inf"))
    key_range = make_key_range(is_causal, document_ids, attention_rank, key_document_ids, window=window)
    # Eager predictions use SDPA, which has no tiles.
    needs_bounds = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if key_range is not None and key_range.key_ids.is_cuda and needs_bounds:
        key_range = with_tile_bounds(key_range)  # once for all layers
    is_exactly_causal = is_causal and document_ids is None and attention_rank is None and window is None
    return AttentionSpec(
        is_exactly_causal and mask is None,
        mask,
        is_exactly_causal and mask is not None,
        score_bias,
        bias,
        bias_max_distance,
        key_range=key_range,
    )


def make_key_range(
    is_causal: bool,
    document_ids_BT: Tensor | None,
    attention_rank_BT: Tensor | None,
    key_document_ids_BS: Tensor | None = None,
    is_strict: bool = False,
    window: LocalWindow | None = None,
) -> KeyRange | None:
    """Return the same visibility as ranges of key ids `document * stride + rank`, or None where it has no such form.

    `is_strict` hides a query's own rank (XLNet's query stream). A window over ranks that are not positions is no range.
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
        return KeyRange(key_document_ids_BS.int() * KEY_ID_DOCUMENT_STRIDE, base_BT)  # ranges of one id: a document
    if attention_rank_BT is None and window is None and not is_causal:
        return KeyRange(base_BT, base_BT.clone())  # compiled graphs need inputs that do not alias
    position_T = torch.arange(like.shape[1], dtype=torch.int32, device=like.device)
    rank_BT = position_T.expand_as(like) if attention_rank_BT is None else attention_rank_BT.int()
    if window is not None:
        distance = min(window.max_distance, like.shape[1])  # a larger one would reach the ids of other documents
        length_BT = torch.full_like(base_BT, 1 + distance * (1 if is_causal else 2))
        return KeyRange(base_BT + rank_BT, base_BT + rank_BT - distance, length_BT)
    return KeyRange(base_BT + rank_BT, base_BT, rank_BT if is_strict else rank_BT + 1)


def select_attention_kernel(
    device: str,
    spec: AttentionSpec,
    dropout: float,
    is_compiling: bool,
    can_fuse_relative: bool = False,
    can_fuse: bool = False,
    is_cross: bool = False,
) -> AttentionKernel:
    """Return the kernel that was measured to be fastest (docs/results.md).

    "fused", our Triton kernel: for relative scores per distance with nothing else added (`can_fuse_relative`); and,
    where it supports the inputs (`can_fuse`), in compiled steps with dropout, a bias shared by all rows, integer key
    ranges (it skips invisible tiles), or cross-attention (`is_cross`: one gradient tensor for keys and values). An
    uncompiled run would wait longer for Triton's compiler than the kernel saves.

    "sdpa", `F.scaled_dot_product_attention`: for everything else. It does not skip masked tiles.

    "eager", matmul, softmax, matmul: on a CPU with dropout, where SDPA is not fused; in compiled GPU steps with a bias
    per row, whose gradient SDPA returns slowly; and to return attention weights, which no other kernel has.
    """
    if spec.attentions is not None:
        return "eager"
    if can_fuse_relative and spec.masked_bias is None:
        return "fused"
    if can_fuse and is_compiling and (dropout or spec.bias is not None or spec.key_range is not None or is_cross):
        return "fused"
    if device == "cpu":
        return "eager" if dropout and not is_compiling else "sdpa"
    bias_per_row = spec.masked_bias is not None and spec.masked_bias.shape[0] > 1
    return "eager" if bias_per_row and is_compiling else "sdpa"


def attend(q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, spec: AttentionSpec, dropout: float, scale: float) -> Tensor:
    """Return softmax(q k^T * scale + bias) v, (B, H, T, d), by the selected kernel."""
    kernel = attention_kernel_for(q_BHTd, k_BGSd, spec, dropout)
    if kernel == "eager":
        return eager_attention(q_BHTd, k_BGSd, v_BGSd, spec, dropout, scale)
    if kernel == "fused":
        return fused_attention(q_BHTd, k_BGSd, v_BGSd, *spec.kernel_args(q_BHTd.dtype, dropout, scale))
    attn_mask = spec.mask if spec.masked_bias is None else spec.masked_bias.to(q_BHTd.dtype)
    grouped = q_BHTd.shape[1] != k_BGSd.shape[1]
    if grouped and attn_mask is not None:  # SDPA's kernels that take a mask have no grouped-query attention
        k_BGSd, v_BGSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    y_BHTd = F.scaled_dot_product_attention(
        q_BHTd,
        k_BGSd,
        v_BGSd,
        attn_mask=attn_mask,
        dropout_p=dropout,
        is_causal=spec.is_causal,
        scale=scale,
        enable_gqa=grouped and attn_mask is None,
    )
    # SDPA returns 0 for a row whose boolean mask is all false, but a uniform average where a finite bias masks the row.
    return zero_empty_rows(y_BHTd, spec) if spec.has_empty_rows and spec.masked_bias is not None else y_BHTd


def attention_kernel_for(
    q_BHTd: Tensor, k_BGSd: Tensor, spec: AttentionSpec, dropout: float, is_cross: bool = False
) -> AttentionKernel:
    return select_attention_kernel(
        q_BHTd.device.type,
        spec,
        dropout,
        torch.compiler.is_compiling(),
        can_fuse=supports_fused_attention(q_BHTd, k_BGSd, spec),
        is_cross=is_cross,
    )


def supports_fused_attention(q_BHTd: Tensor, k_BGSd: Tensor, spec: AttentionSpec) -> bool:
    """Whether the fused kernel computes this: 16-bit inputs, no bias per row, no KV cache.

    The kernel accumulates a bias's gradient atomically, so deterministic runs do not use it for a trained bias.
    """
    if not spec.allow_fused or spec.update_cache is not None or not has_fused_attention(q_BHTd):
        return False
    fits_causal = not (spec.is_causal or spec.mask_is_causal) or q_BHTd.shape[2] == k_BGSd.shape[2]
    is_16_bit = q_BHTd.dtype in (torch.bfloat16, torch.float16)
    is_trained_bias = spec.bias is not None and spec.bias.requires_grad
    needs_deterministic_grad = torch.are_deterministic_algorithms_enabled() and is_trained_bias
    has_shared_bias = spec.bias is not None and not needs_deterministic_grad
    return fits_causal and is_16_bit and (spec.masked_bias is None or has_shared_bias)


def relative_attention(
    relative_scores: RelativeScores, k_BHSd: Tensor, v_BHSd: Tensor, spec: AttentionSpec, dropout: float, scale: float
) -> Tensor:
    """`attend` with a layer's relative scores: fused where possible, otherwise with a dense bias (B, H, T, S).

    Deterministic runs do not use the kernel where it accumulates gradients atomically.
    """
    q_BHTd, S = relative_scores.query, k_BHSd.shape[2]
    forbids_kernel = torch.are_deterministic_algorithms_enabled() and has_nondeterministic_grads(relative_scores)
    can_fuse_relative = (
        spec.allow_fused and relative_scores.extra_scores is None and has_fused_attention(q_BHTd) and not forbids_kernel
    )
    if (
        select_attention_kernel(q_BHTd.device.type, spec, dropout, torch.compiler.is_compiling(), can_fuse_relative)
        == "fused"
    ):
        mask = causal_mask(q_BHTd.shape[2], S, q_BHTd.device) if spec.is_causal else spec.mask
        return fused_relative_attention(relative_scores, k_BHSd, v_BHSd, mask, spec.key_range, dropout, scale)
    return attend(q_BHTd, k_BHSd, v_BHSd, add_score_bias(spec, relative_scores.to_dense(S) * scale), dropout, scale)


def eager_attention(
    q_BHTd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, spec: AttentionSpec, dropout: float, scale: float
) -> Tensor:
    """`attend` by matmul, softmax and matmul; queries that see no key return 0."""
    k_BHSd, v_BHSd = repeat_heads(k_BGSd, q_BHTd), repeat_heads(v_BGSd, q_BHTd)
    scores = (q_BHTd * scale) @ k_BHSd.transpose(-1, -2)
    if spec.masked_bias is not None:
        scores = scores.to(torch.promote_types(scores.dtype, spec.masked_bias.dtype))
        scores += spec.masked_bias
    elif spec.is_causal or spec.mask is not None:
        # added, not filled: the backward pass of an added constant costs nothing
        allowed = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril() if spec.mask is None else spec.mask
        scores += scores.new_zeros(allowed.shape).masked_fill_(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if spec.attentions is not None:
        spec.attentions.append(weights)
    y_BHTd = fast_dropout(weights, dropout) @ v_BHSd
    return y_BHTd if spec.mask is None else zero_empty_rows(y_BHTd, spec)


def zero_empty_rows(y_BHTd: Tensor, spec: AttentionSpec) -> Tensor:
    """Set the output of queries that see no key to 0."""
    assert spec.mask is not None
    return y_BHTd * spec.mask.any(-1, keepdim=True)


def repeat_heads(x_BGSd: Tensor, q_BHTd: Tensor) -> Tensor:
    """Return (B, H, S, d): each head of keys or values once per query head that shares it."""
    group_size = q_BHTd.shape[1] // x_BGSd.shape[1]
    return x_BGSd if group_size == 1 else x_BGSd.repeat_interleave(group_size, 1)


class Attention(nn.Module):
    """Multi-head self-attention, or cross-attention from `x` to `kv_states`.

    `gate` (H, D) multiplies the output of each head by 2 sigmoid(gate x), from the input x of the layer (Qiu et al.
    2025): a head can leave a token alone. `value_mix` (a, b) makes the values a v + b v_1, with those of the first
    layer (Zhou et al. 2024): deep layers keep access to the tokens. Both start neutral, as plain attention.
    """

    allow_fused = True  # whether the fused kernel may be selected

    def __init__(self, config: ModelConfig, is_cross: bool = False, is_first: bool = False) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_size = config.num_heads, config.kv_heads, config.head_size
        inner, self.qkv_sizes = self.num_heads * self.head_size, self.projection_sizes(config)
        self.qkv = nn.Linear(config.dim, sum(self.qkv_sizes), bias=config.has_key_bias)  # one matmul for all three
        has_qv_bias = config.has_query_bias and not config.has_key_bias
        self.qv_bias = nn.Parameter(torch.zeros(self.qkv_sizes[0] + self.qkv_sizes[2])) if has_qv_bias else None
        self.out = nn.Linear(inner, config.dim, bias=config.has_query_bias)
        self.score = None if is_cross else make_relative_score(config)
        has_gate, mixes_values = config.attention_gate and not is_cross, config.value_residual and not is_cross
        self.gate = nn.Parameter(torch.zeros(self.num_heads, config.dim)) if has_gate else None
        self.value_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if mixes_values and not is_first else None
        self.dropout = config.attention_dropout
        num_terms = 3 if isinstance(self.score, DisentangledScore) else 1  # terms of a score (DeBERTa, section 3.1)
        # T5 folds 1/sqrt(d) into the initialisation of the query projection
        self.scale = 1.0 if isinstance(config.init, FanInInit) else (num_terms * self.head_size) ** -0.5

    @staticmethod
    def projection_sizes(config: ModelConfig) -> tuple[int, int, int]:
        """Return the rows of `qkv.weight` that are queries, keys and values."""
        kv_size = config.kv_heads * config.head_size
        return config.num_heads * config.head_size, kv_size, kv_size

    def forward(self, x_BTD: Tensor, spec: AttentionSpec, kv_states_BSD: Tensor | KeyValues | None = None) -> Tensor:
        """Return (B, T, D)."""
        y: Tensor = self.out(self.head_outputs(x_BTD, spec, kv_states_BSD))
        return y

    def head_outputs(
        self, x_BTD: Tensor, spec: AttentionSpec, kv_states_BSD: Tensor | KeyValues | None = None
    ) -> Tensor:
        """Return the attention-weighted values (B, T, H x d), gated, before the output projection."""
        y = self.weighted_values(x_BTD, spec, kv_states_BSD)
        if self.gate is None:
            return y
        gate_BTH = 2 * torch.sigmoid(F.linear(x_BTD, self.gate))
        return (y.unflatten(-1, (self.num_heads, -1)) * gate_BTH.to(y.dtype)[..., None]).flatten(-2)

    def weighted_values(
        self, x_BTD: Tensor, spec: AttentionSpec, kv_states_BSD: Tensor | KeyValues | None = None
    ) -> Tensor:
        """Return the attention-weighted values (B, T, H x d).

        The fused kernel reads queries, keys and values from the one tensor that `qkv` wrote, and writes their
        gradients into one tensor: neither is split or concatenated.
        """
        dropout, spec = self.dropout if self.training else 0.0, spec._replace(allow_fused=self.allow_fused)
        can_pack = self.score is None and self.kv_heads == self.num_heads and self.value_mix is None
        if kv_states_BSD is None:
            qkv = self.project_rows(x_BTD)
            heads = self.split_heads(qkv)
            if can_pack and attention_kernel_for(heads, heads, spec, dropout) == "fused":
                if spec.rope is not None:
                    qkv = spec.rope(qkv, 2 * self.num_heads)
                return fused_qkv_attention(qkv, qkv, self.num_heads, *spec.kernel_args(qkv.dtype, dropout, self.scale))
            q, k, v = qkv.split(self.qkv_sizes, -1)
        elif isinstance(kv_states_BSD, KeyValues):
            q, k, v = self.project_rows(x_BTD, 0, self.qkv_sizes[0]), *kv_states_BSD
        else:
            q = self.project_rows(x_BTD, 0, self.qkv_sizes[0])
            kv = self.project_rows(kv_states_BSD, self.qkv_sizes[0])
            if (
                spec.rope is None
                and can_pack
                and attention_kernel_for(self.split_heads(q), self.split_heads(kv), spec, dropout, is_cross=True)
                == "fused"
            ):
                return fused_qkv_attention(q, kv, self.num_heads, *spec.kernel_args(q.dtype, dropout, self.scale))
            k, v = kv.split(self.qkv_sizes[1:], -1)
        if self.value_mix is not None:
            assert spec.first_values is not None, "the stack sets it"
            v = self.value_mix[0] * v + self.value_mix[1] * spec.first_values
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
        return y.transpose(1, 2).flatten(2)

    def project_values(self, x_BTD: Tensor) -> Tensor:
        """Return the values (B, T, G x d)."""
        return self.project_rows(x_BTD, sum(self.qkv_sizes[:2]))

    def project_kv(self, kv_states_BSD: Tensor) -> KeyValues:
        """Return the keys and values of another sequence."""
        return KeyValues(*self.project_rows(kv_states_BSD, self.qkv_sizes[0]).split(self.qkv_sizes[1:], -1))

    def project_rows(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `qkv(x)[..., start:stop]`, computed by these rows of the weight alone."""
        weight, bias = self.qkv.weight, self.qkv_bias
        if start or stop is not None:  # ONNX quantizes a whole weight, not a slice of it
            weight, bias = weight[start:stop], None if bias is None else bias[start:stop]
        y = F.linear(x, weight, bias)
        return y + self.qkv.lora_delta(x, start, stop) if isinstance(self.qkv, LoRALinear) else y

    @property
    def qkv_bias(self) -> Tensor | None:
        """The bias of `qkv`; with biases for queries and values only, 0 for keys."""
        if self.qv_bias is None:
            return self.qkv.bias
        q, v = self.qv_bias.split(self.qkv_sizes[::2])
        return torch.cat([q, q.new_zeros(self.qkv_sizes[1]), v])

    def project_qk(self, x_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys (H, P, d) of position vectors, for scores that share these projections."""
        q, k = self.project_rows(x_PD, 0, sum(self.qkv_sizes[:2])).split(self.qkv_sizes[:2], -1)
        q_HPd, k_GPd = split_position_heads(q, self.num_heads), split_position_heads(k, self.kv_heads)
        return q_HPd, k_GPd.repeat_interleave(self.num_heads // self.kv_heads, 0)

    def split_heads(self, x_BTI: Tensor) -> Tensor:
        """(B, T, H x d) to (B, H, T, d)."""
        return x_BTI.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


def make_relative_score(config: ModelConfig) -> nn.Module | None:
    """Return the module with a layer's relative scores, or None where the architecture has none."""
    if isinstance(config.position, TransformerXL):
        return TransformerXLScore(config, config.position)
    if isinstance(config.position, Disentangled):
        return DisentangledScore(config, config.position)
    return ShawScore(config, config.position) if isinstance(config.position, Shaw) else None


def add_score_bias(spec: AttentionSpec, bias_BHTS: Tensor) -> AttentionSpec:
    """Return the spec with another bias on the scores."""
    if spec.masked_bias is not None:
        return spec._replace(masked_bias=spec.masked_bias + bias_BHTS, bias=None)
    if spec.is_causal:
        T, S = bias_BHTS.shape[-2:]
        spec = spec._replace(is_causal=False, mask=causal_mask(T, S, bias_BHTS.device))
    if spec.mask is not None:
        # softmax of a row that is -inf everywhere is NaN
        low = torch.finfo(bias_BHTS.dtype).min if spec.has_empty_rows else float("-inf")
        bias_BHTS = bias_BHTS.masked_fill(~spec.mask, low)
    return spec._replace(masked_bias=bias_BHTS)


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """(1, 1, T, S), true where the key is at the query's position or before it."""
    return torch.ones(T, S, dtype=torch.bool, device=device).tril()[None, None]
