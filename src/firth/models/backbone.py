"""The stack of blocks: embeddings to hidden states.

Shapes: B rows, T positions, S positions of the encoder's sequence, K target positions, D model width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from firth.models.attention import AttentionSpec, LocalWindow, make_attention_spec
from firth.models.block import Block, make_norm
from firth.models.bottleneck import BottleneckBlock
from firth.models.config import ModelConfig, T5Bias, TransformerXL
from firth.models.convolution import ConvolutionLayer
from firth.models.heads import gather_positions
from firth.models.kernels.dropout import Dropout
from firth.models.position.bias import make_position_bias
from firth.models.position.relative_attention import make_relative_positions
from firth.models.position.rope import make_rope
from firth.models.position.xl_memory import XLMemory
from firth.models.regional_compile import compilable_region


class Stack(nn.Module):
    """Blocks over one sequence, causal or bidirectional, optionally with cross-attention to another sequence."""

    memory: XLMemory | None = None  # hidden states of the preceding text (Transformer-XL)
    activation_checkpointing = False  # recompute each block in the backward pass instead of saving its activations
    last_layer_targets_only = False  # compute the last layer only at target positions, where that is possible
    residual_dtype = torch.float32  # precision of the hidden states between blocks, if autocast computes in it

    def __init__(self, config: ModelConfig, num_layers: int, is_causal: bool, cross_attention: bool = False) -> None:
        super().__init__()
        self.config, self.is_causal = config, is_causal
        self.num_layers, self.num_shared = num_layers, config.num_shared
        num_blocks = -(-num_layers // self.num_shared)
        self.blocks = nn.ModuleList(
            Block(config, cross_attention, is_first=i == 0) if config.bottleneck is None else BottleneckBlock(config)
            for i in range(num_blocks)
        )
        self.final_norm = make_norm(config) if config.norm_first else None
        # U-Net skips: weights of the outputs of blocks 0, 1, ... in the inputs of blocks n-1, n-2, ...
        num_skips = max(num_layers - 1, 0) // 2 if config.unet_skips else 0
        self.skip_weights = nn.Parameter(torch.zeros(num_skips)) if num_skips else None
        self.score = make_position_bias(config, is_causal)
        self.shared = make_relative_positions(config)
        self.convolution = ConvolutionLayer(config, config.convolution) if config.convolution is not None else None
        has_final_dropout = isinstance(config.position, T5Bias | TransformerXL)  # as T5 and XLNet have it
        self.drop = Dropout(config.dropout if has_final_dropout else 0.0)

    def forward(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        attention_rank: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_document_ids: Tensor | None = None,
        all_hidden_states: list[Tensor] | None = None,
        position_ids: Tensor | None = None,
        attentions: list[Tensor] | None = None,
        token_type_ids: Tensor | None = None,
        stop_layer: int | None = None,
        cross_attentions: list[Tensor] | None = None,
        cross_document_ids: Tensor | None = None,
        target_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states (B, T, D), or (B, K, D) with `target_positions` (B, K).

        The lists `all_hidden_states`, `attentions` and `cross_attentions` collect one tensor per layer. `stop_layer`
        ends the stack before that layer, without the final norm. `cross_document_ids` (B, T) name the encoder document
        that each position attends to (default: `document_ids`). `target_positions` need `can_compute_targets_only`.
        """
        x = embedded = self.cast_input(x)
        global_spec, local_spec = self.attention_specs(
            x, document_ids, attention_rank, position_ids, attentions, token_type_ids
        )
        cross_document_ids = document_ids if cross_document_ids is None else cross_document_ids
        cross_spec = (
            make_attention_spec(False, cross_document_ids, key_document_ids=encoder_document_ids)
            if encoder_document_ids is not None
            else AttentionSpec()
        )
        cross_spec = cross_spec._replace(attentions=cross_attentions)
        global_spec, local_spec = self.with_first_values(x, (global_spec, local_spec))
        layers = self.layers[:stop_layer]
        skips: list[Tensor] = []
        for i, block in enumerate(layers):
            if all_hidden_states is not None:
                all_hidden_states.append(x)
            x = self.add_skip(i, x, skips)
            kv_states = self.memory.extend_states(i, x) if self.memory is not None else None
            spec = local_spec if self.is_local_layer(i) else global_spec
            if target_positions is not None and i == self.num_layers - 1:
                positions = self.pad_target_positions(target_positions)
                ids = (
                    positions if position_ids is None else position_ids.expand(len(positions), -1).gather(1, positions)
                )
                rope = make_rope(self.config, ids, embedded, is_local=self.is_local_layer(i))
                x, kv_states = self.gather_targets(x, positions)
                spec = spec.at_positions(positions, rope)
            is_read_once = i + 1 < len(layers) and all_hidden_states is None
            x = self.run_block(block, x, spec, encoder_hidden_states, cross_spec, kv_states, is_read_once)
            self.keep_skip(i, x, skips)
            if i == 0 and self.convolution is not None:
                x = self.convolution(embedded, x, document_ids)
        x = x if target_positions is None else x[:, : target_positions.shape[1]]
        x = x if stop_layer is not None else self.apply_final_norm(x)
        if all_hidden_states is not None:
            all_hidden_states.append(x)
        return x

    def with_first_values(self, x: Tensor, specs: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
        """Return the specs with the values that the first layer makes of `x`, where later layers add them."""
        if not (self.config.value_residual and self.num_layers):
            return specs
        first = self.layers[0]
        values = first.attention.project_values(first.attention_norm(x))
        return tuple(spec._replace(first_values=values) for spec in specs)

    def keep_skip(self, layer: int, x: Tensor, skips: list[Tensor]) -> None:
        """Keep the output of a block that a later one reads."""
        if self.skip_weights is not None and layer < len(self.skip_weights):
            skips.append(x)

    def add_skip(self, layer: int, x: Tensor, skips: list[Tensor]) -> Tensor:
        """Return the input of a block: `x`, and the weighted output of its counterpart in the first half."""
        counterpart = self.num_layers - 1 - layer
        if self.skip_weights is None or counterpart >= len(self.skip_weights):
            return x
        return x + (self.skip_weights[counterpart] * skips[counterpart]).to(x.dtype)

    def can_compute_targets_only(self, target_positions: Tensor, T: int) -> bool:
        """Whether the last layer may compute only these positions; their queries still attend to all T.

        Not with causal masks, position biases, recurrence or layer drop; and not if more than half are targets, where
        the gathers cost more than they save.
        """
        if not (self.last_layer_targets_only and self.num_layers and 0 < 2 * target_positions.shape[1] <= T):
            return False
        has_bias = self.score is not None or self.shared is not None or self.layers[-1].attention.score is not None
        needs_all = self.memory is not None or self.convolution is not None or self.config.layer_drop > 0
        return not (self.is_causal or has_bias or needs_all)

    def pad_target_positions(self, target_positions_BK: Tensor) -> Tensor:
        """Return the positions that the last layer computes. FP8 adds some for alignment."""
        return target_positions_BK.long()

    def gather_targets(self, x: Tensor, positions_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last block's input at target positions (B, K, D), and the states (B, T, D) it attends to."""
        return gather_positions(x, positions_BK), x

    def cast_input(self, x: Tensor) -> Tensor:
        """Cast the first block's input under autocast: to float32, or to autocast's dtype if `residual_dtype` is it."""
        kind = x.device.type
        is_fp32 = self.num_layers and self.layers[0].attention.out.weight.dtype == torch.float32
        if not is_fp32 or kind == "meta" or not torch.is_autocast_enabled(kind):
            return x
        return x.to(self.residual_dtype if torch.get_autocast_dtype(kind) == self.residual_dtype else torch.float32)

    def attention_specs(
        self,
        x: Tensor,
        document_ids: Tensor | None,
        attention_rank: Tensor | None,
        position_ids: Tensor | None = None,
        attentions: list[Tensor] | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[AttentionSpec, AttentionSpec]:
        """Return the specs of global layers and of sliding-window layers; without a window both are the same."""
        T, window = x.shape[1], self.config.window
        bias, max_distance = (None, 0) if self.score is None else (self.score(T, T), self.score.max_distance)
        num_cached = self.memory.num_cached if self.memory is not None else 0
        relative = self.shared(x, T + num_cached, token_type_ids) if self.shared is not None else None
        global_spec = make_attention_spec(
            self.is_causal, document_ids, attention_rank, score_bias=bias, bias_max_distance=max_distance
        )._replace(attentions=attentions, relative_positions=relative)
        if self.memory is not None:
            assert relative is not None, "memory needs relative positions: absolute ones do not say how far back it is"
            global_spec = self.memory.extend_spec(global_spec, T)
        global_spec = global_spec._replace(rope=make_rope(self.config, position_ids, x))
        if window is None:
            return global_spec, global_spec
        assert self.memory is None, "memory does not support sliding windows"
        if global_spec.key_range is not None:
            global_spec = global_spec._replace(key_range=global_spec.key_range.as_interval())
        if window.size // 2 >= T - 1:  # the window reaches all of the row
            return global_spec, global_spec._replace(rope=make_rope(self.config, position_ids, x, is_local=True))
        near = LocalWindow(torch.arange(T, device=x.device), window.size // 2)
        local_spec = make_attention_spec(
            self.is_causal, document_ids, attention_rank, score_bias=bias, window=near, bias_max_distance=max_distance
        )
        return global_spec, local_spec._replace(
            rope=make_rope(self.config, position_ids, x, is_local=True),
            attentions=attentions,
            relative_positions=relative,
        )

    def is_local_layer(self, layer: int) -> bool:
        return self.config.window is not None and layer % self.config.window.global_every != 0

    def run_block(
        self,
        block: Block,
        x: Tensor,
        spec: AttentionSpec,
        encoder_hidden_states: Tensor | None,
        cross_spec: AttentionSpec,
        kv_states: Tensor | None,
        is_read_once: bool,
    ) -> Any:
        """Return a block's output. `is_read_once`: only the next block reads it (FP8 blocks make use of that)."""
        return self.drop_layer(x, self.call_block(block, x, spec, encoder_hidden_states, cross_spec, kv_states))

    def call_block(self, block: Block, *inputs: Any) -> Any:
        if self.activation_checkpointing and self.training:
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def drop_layer(self, x: Tensor, y: Tensor) -> Tensor:
        """Skip a block at random in training (LayerDrop, Fan et al. 2020)."""
        if not (self.training and self.config.layer_drop):
            return y
        return torch.where(torch.rand((), device=x.device) < self.config.layer_drop, x, y)

    @property
    def layers(self) -> list[Block]:
        """The blocks in order of execution; with shared layers (ALBERT) a block occurs more than once."""
        return [cast(Block, self.blocks[i // self.num_shared]) for i in range(self.num_layers)]

    @compilable_region
    def apply_final_norm(self, x: Tensor) -> Tensor:
        return self.drop(x if self.final_norm is None else self.final_norm(x))
