"""Transformer blocks that train in FP8: `convert_to_fp8` replaces the classes of a model's modules by these.

A post-norm sublayer ends in `norm(residual + dropout(linear(h)))`. Run one by one, the backward pass of these writes
the gradient of the sum, reads it to quantize it, and reads it again to add it to the gradient of the next reader.
Here the linear layer takes dropout, residual and norm as its epilogue, and one kernel does their backward pass
(`fp8/residual_norm.py`). Two things follow for the block:

- A sublayer's output has two readers: the next linear layer, and the next residual. Each gets an output of its own
  (`num_outputs=2`), so that their gradients arrive separately and that one kernel adds them.
- From block to block the pair (x, residual) is passed on, where nothing else reads the hidden states and the step is
  compiled as a whole.

Pre-norm blocks have no norm after the sum. They run as in `models/block.py`, with FP8 linear layers. Every module
falls back to its base class for inputs that FP8 does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.attention import Attention, AttentionSpec, KeyValues
from firth.models.backbone import Stack
from firth.models.block import MLP, Block
from firth.models.fp8.linear import Float8Linear, alignment_padding, float8_mlp
from firth.models.fp8.residual_norm import ResidualNormEpilogue, make_residual_norm
from firth.models.heads import gather_positions
from firth.models.regional_compile import compilable_region


class Float8Attention(Attention):
    """Attention with FP8 projections; scores and softmax stay in bf16."""

    def forward(
        self,
        x_BTD: Tensor,
        spec: AttentionSpec,
        kv_states_BSD: Tensor | KeyValues | None = None,
        epilogue: ResidualNormEpilogue | None = None,
    ) -> Any:
        """Return (B, T, D), or with an `epilogue` the tuple of its outputs."""
        return call_linear(self.out, self.head_outputs(x_BTD, spec, kv_states_BSD), epilogue)

    def project_rows(self, x: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        if not isinstance(self.qkv, Float8Linear):
            return super().project_rows(x, start, stop)
        bias = self.qkv_bias
        y: Tensor = self.qkv.forward_rows(x, None if bias is None else bias[start:stop], start, stop)
        return y


class Float8MLP(MLP):
    """An MLP whose two linear layers and activation are one function, where there is no dropout between them."""

    def forward(self, x: Tensor, epilogue: ResidualNormEpilogue | None = None) -> Any:
        """Return (..., D), or with an `epilogue` the tuple of its outputs."""
        if not (self.training and self.drop.p):
            y = float8_mlp(self.up, self.down, x, self.activation, self.is_gated, epilogue)
            if y is not None:
                return y
        return call_linear(self.down, self.drop(self.expand(x)), epilogue)


def call_linear(linear: nn.Module, x: Tensor, epilogue: ResidualNormEpilogue | None) -> Any:
    return linear(x) if epilogue is None else linear(x, epilogue)


class Float8Block(Block):
    """A block whose post-norm residuals are epilogues of FP8 linear layers."""

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
        """Return the hidden states (B, T, D), or with `num_outputs=2` a pair of equal ones, for two readers.

        `residual` (default: `x`) equals `x`, with a gradient of its own.
        """
        if self.norm_first:
            assert residual is None
            assert num_outputs == 1
            return super().forward(x, spec, encoder_hidden_states, cross_spec, kv_states)
        attend = lambda h, *epilogue: self.attention(h, spec, kv_states, *epilogue)  # noqa: E731
        residual = x if residual is None else residual
        x, residual = self.add_and_norm(x, residual, self.attention_norm, self.attention.out, attend)
        if encoder_hidden_states is not None:
            cross = lambda h, *epilogue: self.cross(h, cross_spec, encoder_hidden_states, *epilogue)  # noqa: E731
            x, residual = self.add_and_norm(x, residual, self.cross_norm, self.cross.out, cross)
        outputs = self.add_and_norm(x, residual, self.mlp_norm, self.mlp.down, self.mlp, num_outputs)
        return outputs[0] if num_outputs == 1 else outputs

    def add_and_norm(
        self,
        x: Tensor,
        residual: Tensor,
        norm: nn.Module,
        last_linear: nn.Module,
        sublayer: Callable[..., Any],
        num_outputs: int = 2,
    ) -> tuple[Tensor, ...]:
        """Return `norm(residual + dropout(sublayer(x)))`, `num_outputs` times; `last_linear` ends the sublayer."""
        epilogue = (
            make_residual_norm(residual, norm, self.drop, num_outputs)
            if isinstance(last_linear, Float8Linear) and last_linear.trains_in_fp8(x)
            else None
        )
        if epilogue is not None:
            outputs: tuple[Tensor, ...] = sublayer(x, epilogue)
            return outputs
        y = norm(residual + self.drop(sublayer(x)))
        y = y.to(x.dtype)
        return y, y

    def has_epilogue(self, x: Tensor) -> bool:
        """Whether the block's last residual is an epilogue: then a second output saves adding up gradients."""
        return not self.norm_first and isinstance(self.mlp.down, Float8Linear) and self.mlp.down.trains_in_fp8(x)


class ResidualPair(NamedTuple):
    """A block's two equal outputs: `x` for the next block's linear layer, `residual` for its residual."""

    x: Tensor
    residual: Tensor


class Float8Stack(Stack):
    """A stack that passes pairs from block to block where it can. Its loop is `Stack.forward`."""

    def run_block(
        self,
        block: Block,
        x: Tensor | ResidualPair,
        spec: AttentionSpec,
        encoder_hidden_states: Tensor | None,
        cross_spec: AttentionSpec,
        kv_states: Tensor | None,
        is_read_once: bool,
    ) -> Any:
        """Return a `ResidualPair` where only the next block reads the output, otherwise a tensor."""
        x, residual = x if isinstance(x, ResidualPair) else (x, None)
        inputs = (x, spec, encoder_hidden_states, cross_spec, kv_states, residual)
        if is_read_once and self.can_pair(block, x):
            return ResidualPair(*self.call_block(block, *inputs, 2))
        return self.drop_layer(x, self.call_block(block, *inputs))

    def can_pair(self, block: Block, x: Tensor) -> bool:
        """Whether a block may return a pair: nothing between the blocks reads it, and a compiler sees both blocks."""
        is_direct = self.memory is None and self.convolution is None and not self.config.layer_drop
        return is_direct and torch.compiler.is_compiling() and isinstance(block, Float8Block) and block.has_epilogue(x)

    def pad_target_positions(self, target_positions_BK: Tensor) -> Tensor:
        """Repeat position 0 until the number of positions is a multiple that FP8 matmuls take."""
        positions_BK = super().pad_target_positions(target_positions_BK)
        if not isinstance(self.layers[-1].mlp.down, Float8Linear):
            return positions_BK
        return F.pad(positions_BK, (0, alignment_padding(*positions_BK.shape)))

    def gather_targets(self, x: Tensor | ResidualPair, positions_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Gather from the residual of a pair: its `x` is read by the keys and values already."""
        if isinstance(x, ResidualPair):
            return gather_positions(x.residual, positions_BK), x.x
        return super().gather_targets(x, positions_BK)
