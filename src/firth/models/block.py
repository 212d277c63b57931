"""One block for all: attention, cross-attention, MLP, each inside its residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from firth.models import config as c
from firth.models.attention import Attention, Keys, Sight
from firth.models.biased import activated
from firth.models.dropout import Dropout
from firth.models.eight import Linear8, two_maps
from firth.models.eight_norm import Ending, ending
from firth.models.gated import gated
from firth.models.programs import part


def make_norm(config: c.ModelConfig, dim: int | None = None) -> nn.Module:
    """A norm over `dim` numbers, the model's width unless said."""
    if isinstance(config.norm, c.RMSNorm):
        return RMSNorm(dim or config.dim, eps=config.norm.eps)
    return nn.LayerNorm(dim or config.dim, eps=config.norm.eps, bias=config.norm.bias)


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))  # as autocast has it for the other norm


class MLP(nn.Module):
    lean = False  # whether activations are to be computed again in the backward pass, where a compiler can

    def __init__(self, config: c.ModelConfig) -> None:
        super().__init__()
        spec = config.mlp
        self.gated, self.activation = spec.gated, spec.activation
        self.up = nn.Linear(config.dim, (2 if spec.gated else 1) * spec.dim, bias=config.bias)
        self.down = nn.Linear(spec.dim, config.dim, bias=config.bias)
        self.drop = Dropout(config.mlp_dropout)

    def forward(self, x: Tensor, end: Ending | None = None) -> Any:
        """With an `end`, what that gives."""
        drops = bool(self.training and self.drop.p)
        if not drops:
            y = two_maps(self.up, self.down, x, self.activation, self.gated, end)
            if y is not None:
                return y
        if self.gated:
            h = gated(self.up(x), self.activation)
        else:
            h = activated(self.up, x, self.activation, single=drops or self.lean)
        return self.down(self.drop(h)) if end is None else self.down(self.drop(h), end)


class Block(nn.Module):
    """Attention, then (in a decoder that reads an encoder) cross-attention, then MLP."""

    def __init__(self, config: c.ModelConfig, cross: bool = False, first: bool = False) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = nn.Identity() if first and config.skip_first_norm else make_norm(config)
        if cross:
            self.cross = Attention(config, cross=True)
            self.cross_norm = make_norm(config)
        self.mlp = MLP(config)
        self.mlp_norm = make_norm(config)
        self.norm_first = config.norm_first
        self.drop = Dropout(config.dropout)

    @part
    def forward(
        self,
        x: Tensor,
        sight: Sight,
        read: Tensor | Keys | None = None,
        read_sight: Sight | None = None,
        content: Tensor | Keys | None = None,
        before: Tensor | None = None,
        times: int = 1,
    ) -> Any:
        """`read` is another sequence, for cross-attention. `content` is what attention reads where that is not `x`.

        Both may be given as their keys, made before. `before` is `x` again for the residual, and what comes out is
        given twice for the next block where `times` is 2: see `around`.
        """
        if isinstance(content, Tensor) and self.norm_first:
            content = cast(Tensor, self.attention_norm(content))
        attend = lambda h, *end: self.attention(h, sight, content, *end)  # noqa: E731
        before = x if before is None else before
        x, before = self.around(x, before, self.attention_norm, self.attention.out, attend)
        if read is not None:
            across = lambda h, *end: self.cross(h, read_sight, read, *end)  # noqa: E731
            x, before = self.around(x, before, self.cross_norm, self.cross.out, across)
        found = self.around(x, before, self.mlp_norm, self.mlp.down, self.mlp, times)
        return found[0] if times == 1 else found

    def keys_of(self, content: Tensor) -> Keys:
        """The keys and values of what attention reads."""
        return self.attention.keys_of(self.attention_norm(content) if self.norm_first else content)

    def in_pairs(self, x: Tensor) -> bool:
        """Whether the next block gains by having its input twice."""
        return not self.norm_first and isinstance(self.mlp.down, Linear8) and self.mlp.down.learns(x)

    def around(
        self, x: Tensor, before: Tensor, norm: nn.Module, last: nn.Module, part: Callable[..., Any], times: int = 2
    ) -> tuple[Tensor, ...]:
        """What a part, whose `last` map is this, makes of `x`, inside its residual.

        `before` is `x` again, for the residual; what comes out is given so too, for `times` readers. (Their gradients
        then come back apart, to a kernel that adds them up itself.)
        """
        if self.norm_first:
            y: Tensor = before + self.drop(part(norm(x)))
            return y, y
        end = ending(before, norm, self.drop, times) if isinstance(last, Linear8) and last.learns(x) else None
        if end is not None:
            found: tuple[Tensor, ...] = part(x, end)
            return found
        y = norm(before + self.drop(part(x)))
        y = y.to(x.dtype)
        return y, y
