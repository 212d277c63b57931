"""The transformer block: attention, cross-attention and MLP, each with its residual.

Pre-norm (GPT-2, Llama, T5) computes `x + sublayer(norm(x))`, post-norm (BERT, and Vaswani et al. 2017) computes
`norm(x + sublayer(x))`, Gemma 2 computes `x + norm(sublayer(norm(x)))`. Everything else that differs between
architectures is inside the sublayers. FP8 training replaces the classes of this file by those of `fp8/block.py`.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from firth.models import config as c
from firth.models.attention import Attention, AttentionSpec, KeyValues
from firth.models.kernels.bias_act import linear_activation
from firth.models.kernels.dropout import Dropout
from firth.models.kernels.glu import gated_activation
from firth.models.regional_compile import compilable_region


def make_norm(config: c.ModelConfig, dim: int | None = None) -> nn.Module:
    """Return the configured norm over `dim` features (default: the model's width)."""
    if isinstance(config.norm, c.RMSNormConfig):
        return RMSNorm(dim or config.dim, eps=config.norm.eps)
    if isinstance(config.norm, c.NoNormConfig):
        return NoNorm(dim or config.dim)
    return nn.LayerNorm(dim or config.dim, eps=config.norm.eps, bias=config.norm.bias)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in the precision of its weight: autocast runs LayerNorm in float32, but not RMSNorm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class NoNorm(nn.Module):
    """`x * weight + bias`: LayerNorm without its mean and variance (MobileBERT, section 3.3)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class MLP(nn.Module):
    """`down(activation(up(x)))`, or with a gate `down(activation(gate(x)) * up(x))` (GLU, Shazeer 2020)."""

    recompute = False  # let the compiler recompute the activation in the backward pass instead of saving it

    def __init__(self, config: c.ModelConfig) -> None:
        super().__init__()
        spec = config.mlp
        self.is_gated, self.activation = spec.gated, spec.activation
        self.up = nn.Linear(config.dim, (2 if spec.gated else 1) * spec.dim, bias=config.bias)
        self.down = nn.Linear(spec.dim, config.dim, bias=config.bias)
        self.drop = Dropout(config.mlp_dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.drop(self.expand(x)))
        return y

    def expand(self, x: Tensor) -> Tensor:
        """Return the activation of the up projection, (..., `spec.dim`)."""
        if self.is_gated:
            return gated_activation(self.up(x), self.activation)
        is_eager = bool(self.training and self.drop.p) or self.recompute
        return linear_activation(self.up, x, self.activation, is_eager=is_eager)


def norm_output(norm: nn.Module | None, y: Tensor, x: Tensor) -> Tensor:
    """Return the output of a sublayer, with a norm where there is one, in the precision of the residual stream `x`."""
    return y if norm is None else cast(Tensor, norm(y)).to(x.dtype)


class Block(nn.Module):
    """Attention, then (in the decoder of an encoder-decoder) cross-attention, then MLP."""

    def __init__(self, config: c.ModelConfig, has_cross_attention: bool = False, is_first: bool = False) -> None:
        super().__init__()
        self.attention = Attention(config, is_first=is_first)
        self.attention_norm = nn.Identity() if is_first and config.skip_first_norm else make_norm(config)
        if has_cross_attention:
            self.cross = Attention(config, is_cross=True)
            self.cross_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_norm = make_norm(config)
        self.attention_output_norm = make_norm(config) if config.norm_outputs else None
        self.cross_output_norm = make_norm(config) if config.norm_outputs and has_cross_attention else None
        self.mlp_output_norm = make_norm(config) if config.norm_outputs else None
        self.norm_first = config.norm_first
        self.drop = Dropout(config.dropout)

    @compilable_region
    def forward(
        self,
        x: Tensor,
        spec: AttentionSpec,
        encoder_hidden_states: Tensor | KeyValues | None = None,
        cross_spec: AttentionSpec | None = None,
        kv_states: Tensor | KeyValues | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, D) after this block.

        Cross-attention reads `encoder_hidden_states`. Self-attention reads `kv_states` (default: `x`). Both may also
        be given as keys and values that are already projected.
        """
        if self.norm_first:
            if isinstance(kv_states, Tensor):
                kv_states = cast(Tensor, self.attention_norm(kv_states))
            y = self.attention(self.attention_norm(x), spec, kv_states)
            x = x + self.drop(norm_output(self.attention_output_norm, y, x))
            if encoder_hidden_states is not None:
                y = self.cross(self.cross_norm(x), cross_spec, encoder_hidden_states)
                x = x + self.drop(norm_output(self.cross_output_norm, y, x))
            return x + self.drop(norm_output(self.mlp_output_norm, self.mlp(self.mlp_norm(x)), x))

        dtype = x.dtype  # autocast runs norms in float32: the residual stream keeps its own precision
        x = self.attention_norm(x + self.drop(self.attention(x, spec, kv_states))).to(dtype)
        if encoder_hidden_states is not None:
            x = self.cross_norm(x + self.drop(self.cross(x, cross_spec, encoder_hidden_states))).to(dtype)
        return cast(Tensor, self.mlp_norm(x + self.drop(self.mlp(x))).to(dtype))

    def project_kv(self, kv_states: Tensor) -> KeyValues:
        """Return the keys and values that attention makes of `kv_states` (B, S, D)."""
        return self.attention.project_kv(self.attention_norm(kv_states) if self.norm_first else kv_states)
