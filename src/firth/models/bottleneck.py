"""MobileBERT's block: a bottleneck around attention and stacked MLPs (Sun et al. 2020, sections 3.1 to 3.3).

A deep and thin model is small, but hard to train. MobileBERT keeps the states between blocks wide (512) and makes only
the inside of each block narrow (128):

    x (wide) -> input -> attention -> MLP x num_mlps -> output -> + x (wide)

Attention and MLPs have residuals inside, like every post-norm block; the output layer adds to the wide states. The
teacher IB-BERT has the same states between blocks and 1,024 features inside, an inverted bottleneck. So each layer of
the student can imitate the same layer of the teacher (`distill.py`).

Where attention reads is a choice of its own (`BottleneckConfig.attention_input`). MobileBERT's queries and keys come
from a second narrow layer, values from the wide states.

Shapes: B rows, T queries, S keys, D model width, N width inside the block.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from firth.models.attention import AttentionSpec, KeyValues, attend
from firth.models.block import MLP, make_norm
from firth.models.config import ModelConfig
from firth.models.kernels.dropout import Dropout
from firth.models.regional_compile import compilable_region


class NormedLinear(nn.Module):
    """A linear layer from the states between blocks into a block, and a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.block_dim, bias=config.bias)
        self.norm = make_norm(config, config.block_dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.dense(x))
        return y


class BottleneckAttention(nn.Module):
    """Multi-head attention whose values may be read from another tensor than its queries and keys."""

    allow_fused = True  # whether the fused kernel may be selected
    score = None  # no relative scores

    def __init__(self, config: ModelConfig, qk_dim: int, value_dim: int) -> None:
        super().__init__()
        inner, self.head_size = config.num_heads * config.head_size, config.head_size
        self.query = nn.Linear(qk_dim, inner, bias=config.has_query_bias)
        self.key = nn.Linear(qk_dim, inner, bias=config.has_key_bias)
        self.value = nn.Linear(value_dim, inner, bias=config.has_query_bias)
        self.out = nn.Linear(inner, config.block_dim, bias=config.has_query_bias)
        self.dropout, self.scale = config.attention_dropout, config.head_size**-0.5

    def forward(self, q_BTX: Tensor, k_BSX: Tensor, v_BSX: Tensor, spec: AttentionSpec) -> Tensor:
        """Return (B, T, N)."""
        q, k, v = self.query(q_BTX), self.key(k_BSX), self.value(v_BSX)
        if spec.rope is not None:
            q, k = (spec.query_rope or spec.rope)(q), spec.rope(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for x in (q, k, v))
        spec, dropout = spec._replace(allow_fused=self.allow_fused), self.dropout if self.training else 0.0
        y: Tensor = self.out(attend(q, k, v, spec, dropout, self.scale).transpose(1, 2).flatten(2))
        return y


class BottleneckBlock(nn.Module):
    """Into the block, attention, MLPs, out of the block. Dropout is at the output alone, as published."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.bottleneck is not None
        spec, inside = config.bottleneck, replace(config, dim=config.block_dim, bottleneck=None)
        self.input = NormedLinear(config)
        self.qk_input = NormedLinear(config) if spec.attention_input == "shared-qk" else None
        self.reads_wide = spec.attention_input == "wide"
        self.values_wide = spec.attention_input != "narrow"
        qk_dim, value_dim = (config.dim if wide else spec.dim for wide in (self.reads_wide, self.values_wide))
        self.attention = BottleneckAttention(config, qk_dim, value_dim)
        self.attention_norm = make_norm(inside)
        self.mlps = nn.ModuleList(MLP(inside) for _ in range(spec.num_mlps))
        self.mlp_norms = nn.ModuleList(make_norm(inside) for _ in range(spec.num_mlps))
        self.output = nn.Linear(spec.dim, config.dim, bias=config.bias)
        self.output_norm = make_norm(config)
        self.drop = Dropout(config.dropout)

    @compilable_region
    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        encoder_hidden_states: Tensor | KeyValues | None = None,
        cross_spec: AttentionSpec | None = None,
        kv_states: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, D). Attention reads keys and values from `kv_states` (default: `x`)."""
        dtype, inside = x.dtype, self.input(x)
        q, k, v = self.attention_inputs(x, inside, kv_states)
        y = self.attention_norm(inside + self.attention(q, k, v, spec)).to(dtype)
        for mlp, norm in zip(self.mlps, self.mlp_norms, strict=True):
            y = norm(y + mlp(y)).to(dtype)
        z: Tensor = self.output_norm(x + self.drop(self.output(y))).to(dtype)
        return z

    def attention_inputs(self, x: Tensor, inside: Tensor, kv_states: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return what queries, keys and values are projected from; `inside` is `input(x)`."""
        wide = x if kv_states is None else kv_states
        narrow = inside if kv_states is None or self.values_wide else self.input(wide)
        value = wide if self.values_wide else narrow
        if self.reads_wide:
            return x, wide, value
        if self.qk_input is None:
            return inside, narrow, value
        q = self.qk_input(x)
        return q, q if kv_states is None else self.qk_input(wide), value
