"""A decode step with few kernels: one token per row through a stack of blocks, by `kernels/decode_*.py`.

A block is five kernels, and three more with cross-attention:

    norm + qkv, attention, out + residual, norm + up + activation, down + residual

A pre-norm block normalizes at the start of each sublayer. In a post-norm block (GPT, BART) the norm of one sublayer is
computed by the first kernel of the next, which also stores its result: it is the residual there. Where the output of a
sublayer is normalized too (Gemma 2), the residual is added by a kernel of its own.

The cache is (layers, B, G, S, d), keys and values apart, at fixed addresses, so that a CUDA graph can replay the step.

Shapes: B rows, G heads of keys and values, S positions, d head size, D model width, V vocabulary, U source positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from firth.models.attention import Attention
from firth.models.backbone import Stack
from firth.models.block import MLP, Block, RMSNorm
from firth.models.config import Rotary
from firth.models.heads import LMHeadModule
from firth.models.kernels.decode_attention import decode_attention
from firth.models.kernels.decode_linear import (
    DECODE_ACTIVATIONS,
    MAX_NORM_FEATURES,
    NormArgs,
    SplitHeads,
    add_normalized,
    decode_linear,
)
from firth.models.kv_cache import KVCache, can_cache
from firth.models.position.rope import rope_frequencies

MIN_FUSED_HEAD_SIZE, MAX_FUSED_HEAD_SIZE = 16, 256


def can_fuse_decode(stack: Stack) -> bool:
    """Whether fused kernels compute this stack: plain blocks, no LoRA, no FP8, no scores per token pair, one dtype."""
    if not can_cache(stack.config) or stack.memory is not None or stack.convolution is not None:
        return False
    if not stack.config.has_plain_blocks:  # gates and skips
        return False
    if not MIN_FUSED_HEAD_SIZE <= stack.config.head_size <= MAX_FUSED_HEAD_SIZE or not stack.num_layers:
        return False
    if max(stack.config.dim, stack.config.mlp.dim) > MAX_NORM_FEATURES:
        return False
    dtypes = {p.dtype for p in stack.parameters()}
    return len(dtypes) == 1 and all(can_fuse_block(block) for block in stack.layers)


def can_fuse_block(block: nn.Module) -> bool:
    if type(block) is not Block or type(block.mlp) is not MLP or block.mlp.activation not in DECODE_ACTIVATIONS:
        return False
    norms = [block.attention_norm, block.mlp_norm]
    layers: list[nn.Module] = [block.mlp.up, block.mlp.down]
    for attention in attentions_of(block):
        if type(attention) is not Attention or attention.score is not None or attention.qv_bias is not None:
            return False
        layers += [attention.qkv, attention.out]
    if len(attentions_of(block)) > 1:
        norms.append(block.cross_norm)
    norms += [norm for norm in output_norms_of(block) if norm is not None]
    return all(type(layer) is nn.Linear for layer in layers) and all(
        type(norm) in (RMSNorm, nn.LayerNorm, nn.Identity) for norm in norms
    )


def attentions_of(block: Block) -> list[Attention]:
    return [block.attention, *([block.cross] if hasattr(block, "cross") else [])]


def output_norms_of(block: Block) -> list[nn.Module | None]:
    return [block.attention_output_norm, block.cross_output_norm, block.mlp_output_norm]


class FusedDecode:
    """A stack with its KV cache of fixed capacity: `fill` stores prompts, `decode_step` computes one token per row.

    The caller sets `position_B`, the position of each row's new token, before each step.
    """

    def __init__(self, stack: Stack, num_rows: int, capacity: int, source_capacity: int = 0) -> None:
        assert can_fuse_decode(stack), "check can_fuse_decode first"
        config, weight = stack.config, stack.layers[0].attention.qkv.weight
        self.stack, self.capacity, self.source_capacity = stack, capacity, source_capacity
        shape = (stack.num_layers, num_rows, config.kv_heads, capacity, config.head_size)
        self.k, self.v = weight.new_zeros(shape), weight.new_zeros(shape)
        source_shape = (*shape[:3], source_capacity, config.head_size)
        self.source_k, self.source_v = weight.new_zeros(source_shape), weight.new_zeros(source_shape)
        self.position_B = torch.zeros(num_rows, dtype=torch.long, device=weight.device)
        self.source_length_B = torch.ones_like(self.position_B)
        self.bias_HS = None if stack.score is None else stack.score(capacity, 1)[0, :, :, 0].contiguous()
        self.rope_tables = [self.make_rope_table(is_local) for is_local in (False, True)]

    def make_rope_table(self, is_local: bool) -> Tensor | None:
        """(S, d): cosines and sines of every position, in global or in sliding-window layers."""
        config, spec = self.stack.config, self.stack.config.position
        if not isinstance(spec, Rotary):
            return None
        theta = spec.local_theta if is_local and spec.local_theta is not None else spec.theta
        frequencies = rope_frequencies(theta, config.head_size, spec.scaling, self.k.device)
        angle = torch.arange(self.capacity, device=self.k.device)[:, None].float() * frequencies
        return torch.cat([angle.cos(), angle.sin()], 1)

    def fill(
        self, row_N: Tensor, prompt_N: Tensor, cache: KVCache, lengths: Sequence[int], source_lengths: Sequence[int]
    ) -> None:
        """Copy the prompts `prompt_N` of a prefilled cache, of these lengths, into the rows `row_N`."""
        T = max(lengths)
        for i, layer in enumerate(cache.layers):
            self.k[i, row_N, :, :T] = layer.k[prompt_N, :, :T]
            self.v[i, row_N, :, :T] = layer.v[prompt_N, :, :T]
        for i, kv in enumerate(cache.cross_kv):
            if kv is not None:
                U = kv.k.shape[1]
                self.source_k[i, row_N, :, :U] = self.split_heads(kv.k)[prompt_N]
                self.source_v[i, row_N, :, :U] = self.split_heads(kv.v)[prompt_N]
        if self.source_capacity:
            self.source_length_B[row_N] = torch.tensor(source_lengths, device=row_N.device)[prompt_N]

    def split_heads(self, x_BUI: Tensor) -> Tensor:
        return x_BUI.unflatten(-1, (-1, self.stack.config.head_size)).transpose(1, 2)

    def decode_step(self, x_BD: Tensor) -> tuple[Tensor, NormArgs | None]:
        """Return the residual stream (B, D) of the new tokens after all blocks, and the norm that is still due."""
        due: NormArgs | None = None
        for i, block in enumerate(self.stack.layers):
            is_local = self.stack.is_local_layer(i)
            qkv, residual = self.enter(x_BD, due, block.attention_norm, block.attention.qkv)
            window = self.stack.config.window
            y = decode_attention(
                qkv,
                self.k[i],
                self.v[i],
                self.position_B,
                block.attention.scale,
                self.rope_tables[is_local],
                self.bias_HS,
                window.size // 2 if window is not None and is_local else None,
            )
            x_BD, due = self.leave(y, block.attention_norm, block.attention.out, residual, block.attention_output_norm)
            if self.source_capacity:
                queries = block.cross.qkv_sizes[0]
                q, residual = self.enter(x_BD, due, block.cross_norm, block.cross.qkv, queries)
                y = decode_attention(
                    q, self.source_k[i], self.source_v[i], self.source_length_B, block.cross.scale, is_cross=True
                )
                x_BD, due = self.leave(y, block.cross_norm, block.cross.out, residual, block.cross_output_norm)
            mlp = block.mlp
            h, residual = self.enter(
                x_BD, due, block.mlp_norm, mlp.up, activation=mlp.activation, is_gated=mlp.is_gated
            )
            x_BD, due = self.leave(h, block.mlp_norm, mlp.down, residual, block.mlp_output_norm)
        return x_BD, due if self.stack.final_norm is None else NormArgs.of(self.stack.final_norm)

    def enter(
        self,
        x_BD: Tensor,
        due: NormArgs | None,
        own_norm: nn.Module,
        linear: nn.Linear,
        num_outputs: int | None = None,
        activation: str | None = None,
        is_gated: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return a sublayer's first linear layer of the normalized `x_BD`, and the sublayer's residual."""
        bias, norm_first = None if linear.bias is None else linear.bias[:num_outputs], self.stack.config.norm_first
        norm = NormArgs.of(own_norm) if norm_first else due
        weight = linear.weight[:num_outputs]
        return decode_linear(x_BD, weight, bias, norm, activation, is_gated, return_normed=not norm_first)

    def leave(
        self,
        y: Tensor | SplitHeads,
        own_norm: nn.Module,
        linear: nn.Linear,
        residual_BD: Tensor,
        output_norm: nn.Module | None,
    ) -> tuple[Tensor, NormArgs | None]:
        """Return the residual stream after a sublayer's last linear layer, and the norm that is due before the next."""
        norm = None if output_norm is None else NormArgs.of(output_norm)
        x_BD, _ = decode_linear(y, linear.weight, linear.bias, residual_MN=residual_BD if norm is None else None)
        if norm is not None:
            x_BD = add_normalized(residual_BD, x_BD, norm)
        return x_BD, None if self.stack.config.norm_first else NormArgs.of(own_norm)


def fused_logits(x_BD: Tensor, due: NormArgs | None, head: LMHeadModule, embedding: Tensor, logits_BV: Tensor) -> None:
    """Write the logits of the first V tokens into `logits_BV`."""
    V = logits_BV.shape[1]
    if head.dense is not None or head.extra_weight is not None:
        logits_BV.copy_(head(x_BD if due is None else due(x_BD), embedding)[:, :V])
        return
    bias = None if head.bias is None else head.bias[:V]
    decode_linear(x_BD, head.projection_weight(embedding)[:V], bias, due, scale=head.scale, out_MN=logits_BV)
