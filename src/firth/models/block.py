"""One block for all: attention, cross-attention, MLP, each inside its residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from firth.models import config as c
from firth.models.attention import Attention, AttentionSpec, KeyValues
from firth.models.fp8.linear import Float8Linear, float8_mlp
from firth.models.fp8.residual_norm import ResidualNormEpilogue, make_residual_norm
from firth.models.kernels.bias_act import linear_activation
from firth.models.kernels.dropout import Dropout
from firth.models.kernels.glu import gated_activation
from firth.models.regional_compile import compilable_region


def make_norm(config: c.ModelConfig, dim: int | None = None) -> nn.Module:
    """A norm over `dim` numbers, the model's width unless said."""
    if isinstance(config.norm, c.RMSNormConfig):
        return RMSNorm(dim or config.dim, eps=config.norm.eps)
    return nn.LayerNorm(dim or config.dim, eps=config.norm.eps, bias=config.norm.bias)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # as autocast has it for the other norm


class MLP(nn.Module):
    recompute = False  # whether activations are to be computed again in the backward pass, where a compiler can

    def __init__(self, config: c.ModelConfig) -> None:
        super().__init__()
        spec = config.mlp
        self.is_gated, self.activation = spec.gated, spec.activation
        self.up = nn.Linear(config.dim, (2 if spec.gated else 1) * spec.dim, bias=config.bias)
        self.down = nn.Linear(spec.dim, config.dim, bias=config.bias)
        self.drop = Dropout(config.mlp_dropout)

    def forward(self, x: Tensor, epilogue: ResidualNormEpilogue | None = None) -> Any:
        """With an `epilogue`, what that gives."""
        drops = bool(self.training and self.drop.p)
        if not drops:
            y = float8_mlp(self.up, self.down, x, self.activation, self.is_gated, epilogue)
            if y is not None:
                return y
        if self.is_gated:
            h = gated_activation(self.up(x), self.activation)
        else:
            h = linear_activation(self.up, x, self.activation, is_eager=drops or self.recompute)
        return self.down(self.drop(h)) if epilogue is None else self.down(self.drop(h), epilogue)


class Block(nn.Module):
    """Attention, then (in a decoder that reads an encoder) cross-attention, then MLP."""

    def __init__(self, config: c.ModelConfig, has_cross_attention: bool = False, is_first: bool = False) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.Identity() if is_first and config.skip_first_norm else make_norm(config)
        if has_cross_attention:
            self.cross = Attention(config, is_cross=True)
            self.cross_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_norm = make_norm(config)
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
        residual: Tensor | None = None,
        num_outputs: int = 1,
    ) -> Any:
        """`encoder_hidden_states` is another sequence, for cross-attention. `kv_states` is what attention reads where that is not `x`.

        Both may be given as their keys, made before. `residual` is `x` again for the residual, and what comes out is
        given twice for the next block where `num_outputs` is 2: see `apply_residual`.
        """
        if isinstance(kv_states, Tensor) and self.norm_first:
            kv_states = cast(Tensor, self.attention_norm(kv_states))
        attend = lambda h, *end: self.attention(h, spec, kv_states, *end)  # noqa: E731
        residual = x if residual is None else residual
        x, residual = self.apply_residual(x, residual, self.attention_norm, self.attention.out, attend)
        if encoder_hidden_states is not None:
            across = lambda h, *end: self.cross(h, cross_spec, encoder_hidden_states, *end)  # noqa: E731
            x, residual = self.apply_residual(x, residual, self.cross_norm, self.cross.out, across)
        found = self.apply_residual(x, residual, self.mlp_norm, self.mlp.down, self.mlp, num_outputs)
        return found[0] if num_outputs == 1 else found

    def project_kv(self, kv_states: Tensor) -> KeyValues:
        """The keys and values of what attention reads."""
        return self.attention.project_kv(self.attention_norm(kv_states) if self.norm_first else kv_states)

    def benefits_from_two_outputs(self, x: Tensor) -> bool:
        """Whether the next block gains by having its input twice."""
        return not self.norm_first and isinstance(self.mlp.down, Float8Linear) and self.mlp.down.trains_in_fp8(x)

    def apply_residual(
        self,
        x: Tensor,
        residual: Tensor,
        norm: nn.Module,
        last_linear: nn.Module,
        sublayer: Callable[..., Any],
        num_outputs: int = 2,
    ) -> tuple[Tensor, ...]:
        """What a part, whose `last_linear` map is this, makes of `x`, inside its residual.

        `residual` is `x` again, for the residual; what comes out is given so too, for `num_outputs` readers. (Their gradients
        then come back apart, to a kernel that adds them up itself.)
        """
        if self.norm_first:
            y: Tensor = residual + self.drop(sublayer(norm(x)))
            return y, y
        end = (
            make_residual_norm(residual, norm, self.drop, num_outputs)
            if isinstance(last_linear, Float8Linear) and last_linear.trains_in_fp8(x)
            else None
        )
        if end is not None:
            found: tuple[Tensor, ...] = sublayer(x, end)
            return found
        y = norm(residual + self.drop(sublayer(x)))
        y = y.to(x.dtype)
        return y, y
