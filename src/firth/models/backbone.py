"""Blocks one after the other."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from firth.models.attention import AttentionSpec, LocalWindow, make_attention_spec
from firth.models.block import Block, make_norm
from firth.models.config import ModelConfig, T5Bias, TransformerXL
from firth.models.convolution import ConvolutionLayer
from firth.models.fp8.linear import Float8Linear, alignment_padding
from firth.models.heads import gather_positions
from firth.models.kernels.dropout import Dropout
from firth.models.position.relative_attention import make_relative_positions
from firth.models.position.rope import make_position_bias, make_rope
from firth.models.position.xl_memory import XLMemory
from firth.models.regional_compile import compilable_region


class Stack(nn.Module):
    """Blocks over one sequence, `is_causal` or not, that may read another one (`cross_attention`)."""

    memory: XLMemory | None = None  # of the text before, where there is one
    activation_checkpointing = (
        False  # compute the blocks again in the backward pass, and keep nothing of them until then
    )
    last_layer_targets_only = False  # whether the last layer may compute what is asked alone
    residual_dtype = torch.float32  # what goes from block to block, where autocast computes in that

    def __init__(self, config: ModelConfig, num_layers: int, is_causal: bool, cross_attention: bool = False) -> None:
        super().__init__()
        self.config, self.is_causal = config, is_causal
        self.num_layers, self.num_shared = num_layers, config.num_shared
        blocks = -(-num_layers // self.num_shared)
        self.blocks = nn.ModuleList(Block(config, cross_attention, is_first=i == 0) for i in range(blocks))
        self.final_norm = make_norm(config) if config.norm_first else None
        self.score = make_position_bias(config, is_causal)
        self.shared = make_relative_positions(config)
        self.convolution = ConvolutionLayer(config, config.convolution) if config.convolution is not None else None
        last = isinstance(config.position, T5Bias | TransformerXL)  # T5 and XLNet have a last dropout
        self.drop = Dropout(config.dropout if last else 0.0)

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
        """The last states. Those of every layer are added to `all_hidden_states`, where that is given.

        The weights of attention are added to `attentions`, those of attention to the other sequence to `cross_attentions`.
        `stop_layer` leaves out the layers from there on, and what comes after them. `cross_document_ids` are the documents of the other
        sequence that each place reads, where they are not those of the same numbers. The last states of `target_positions` places
        (B, K) alone are computed where these are given, which `can_compute_targets_only` allows.
        """
        x = self.cast_input(x)
        wide, narrow = self.attention_specs(x, document_ids, attention_rank, position_ids, attentions, token_type_ids)
        cross_document_ids = document_ids if cross_document_ids is None else cross_document_ids
        read_sight = (
            make_attention_spec(False, cross_document_ids, key_document_ids=encoder_document_ids)
            if encoder_document_ids is not None
            else AttentionSpec()
        )
        read_sight = read_sight._replace(attentions=cross_attentions)
        embedded = before = x
        layers = self.layers[:stop_layer]
        for i, block in enumerate(layers):
            if all_hidden_states is not None:
                all_hidden_states.append(x)
            content = self.memory.extend_states(i, x) if self.memory is not None else None
            sight = narrow if self.is_local_layer(i) else wide
            if target_positions is not None and i == self.num_layers - 1:
                at = self.pad_target_positions(block, target_positions)
                place = at if position_ids is None else position_ids.expand_as(x[..., 0]).gather(1, at)
                turn = make_rope(self.config, place, x, is_local=self.is_local_layer(i))
                x, sight, content = gather_positions(before, at), sight.at_positions(at, turn), x
                before = x
            times = 2 if i + 1 < len(layers) and all_hidden_states is None and self.returns_pairs(block, x) else 1
            found = self.run_block(
                block, x, sight, encoder_hidden_states, read_sight, content, None if before is x else before, times
            )
            x, before = found if times == 2 else (found, found)
            if i == 0 and self.convolution is not None:
                x = before = self.convolution(embedded, x, document_ids)
        x = x if target_positions is None else x[:, : target_positions.shape[1]]
        x = x if stop_layer is not None else self.apply_final_norm(x)
        if all_hidden_states is not None:
            all_hidden_states.append(x)
        return x

    def can_compute_targets_only(self, target_positions: Tensor, T: int) -> bool:
        """Whether the last layer can be computed for these places alone, and may be: they still read all T.

        Not where its scores depend on who stands where in a row; and for most of them it would not pay.
        """
        if not (self.last_layer_targets_only and self.num_layers and 0 < 2 * target_positions.shape[1] <= T):
            return False
        scores = self.score is not None or self.shared is not None or self.layers[-1].attention.score is not None
        other = self.memory is not None or self.convolution is not None or self.config.layer_drop > 0
        return not (self.is_causal or scores or other)

    def pad_target_positions(self, block: Block, target_positions_BK: Tensor) -> Tensor:
        """Those that are asked, and the first one again as often as products in 8 bits need it."""
        target_positions_BK = target_positions_BK.long()
        if not isinstance(block.mlp.down, Float8Linear):
            return target_positions_BK
        return F.pad(target_positions_BK, (0, alignment_padding(*target_positions_BK.shape)))

    def cast_input(self, x: Tensor) -> Tensor:
        """What the first block takes: under autocast float32, or what its products are in where `residual_dtype` says so."""
        kind = x.device.type
        exact = self.num_layers and self.layers[0].mlp.down.weight.dtype == torch.float32
        if not exact or kind == "meta" or not torch.is_autocast_enabled(kind):
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
        """Who sees whom: in most layers, and in those with a window."""
        T, window = x.shape[1], self.config.window
        score, far = (None, 0) if self.score is None else (self.score(T, T), self.score.max_distance)
        remembered = self.memory.num_cached if self.memory is not None else 0
        places = self.shared(x, T + remembered, token_type_ids) if self.shared is not None else None
        wide = make_attention_spec(
            self.is_causal, document_ids, attention_rank, score_bias=score, bias_max_distance=far
        )._replace(attentions=attentions, relative_positions=places)
        if self.memory is not None:
            assert places is not None, "only a stack that counts distances can tell how far back its memory is"
            wide = self.memory.extend_spec(wide, T)
        wide = wide._replace(rope=make_rope(self.config, position_ids, x))
        if window is None:
            return wide, wide
        assert self.memory is None, "a window does not know how far back its memory is"
        wide = wide if wide.key_range is None else wide._replace(key_range=wide.key_range.as_interval())
        near = LocalWindow(torch.arange(T, device=x.device), window.size // 2)
        narrow = make_attention_spec(
            self.is_causal, document_ids, attention_rank, score_bias=score, window=near, bias_max_distance=far
        )
        return wide, narrow._replace(
            rope=make_rope(self.config, position_ids, x, is_local=True),
            attentions=attentions,
            relative_positions=places,
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
        kv_states: Tensor | None = None,
        before: Tensor | None = None,
        times: int = 1,
    ) -> Any:
        """One block; in training it may be left out at random, or computed again later."""
        if self.activation_checkpointing and self.training:
            y = checkpoint(
                block, x, spec, encoder_hidden_states, cross_spec, kv_states, before, times, use_reentrant=False
            )
        else:
            y = block(x, spec, encoder_hidden_states, cross_spec, kv_states, before, times)
        if not (self.training and self.config.layer_drop):
            return y
        return torch.where(torch.rand((), device=x.device) < self.config.layer_drop, x, y)

    def returns_pairs(self, block: Block, x: Tensor) -> bool:
        """Whether a block gives its states twice; not where anybody but the next block reads them."""
        alone = self.memory is None and self.convolution is None and not self.config.layer_drop
        return alone and torch.compiler.is_compiling() and block.benefits_from_two_outputs(x)

    @property
    def layers(self) -> list[Block]:
        """The blocks in the order in which they run; layers that share one run it again."""
        return [cast(Block, self.blocks[i // self.num_shared]) for i in range(self.num_layers)]

    @compilable_region
    def apply_final_norm(self, x: Tensor) -> Tensor:
        return self.drop(x if self.final_norm is None else self.final_norm(x))
