"""KV cache: keys and values of the text so far, so that a new token costs one position and not the whole row.

`prefill` computes the prompts at once and stores their keys and values; `decode_step` computes one token per row. The
cache is preallocated, and key s of a row is at index s. Rows of different lengths are padded on the right: new tokens
overwrite the padding, which no token of a prompt has attended to.

Shapes: B rows, T positions of the prompts, S positions in all, H heads, G heads of keys and values, d head size, D
model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.attention import AttentionSpec, CacheUpdate, KeyValues, make_attention_spec
from firth.models.backbone import Stack
from firth.models.block import Block
from firth.models.config import Disentangled, ModelConfig, Shaw, TransformerXL
from firth.models.position.rope import make_rope


def can_cache(config: ModelConfig) -> bool:
    """Whether the keys and values of earlier tokens stay the same when a token is appended, which is embedded alone."""
    if config.num_bigram_buckets:  # a token's embedding depends on the one before it
        return False
    return config.recurrent is None and not isinstance(config.position, TransformerXL | Disentangled)


class LayerKVCache:
    """The keys and values of one layer, (B, G, S, d)."""

    k: Tensor
    v: Tensor

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prefill(self, k_BGTd: Tensor, v_BGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Store the prompts' keys and values; attention uses them directly."""
        B, G, T, d = k_BGTd.shape
        self.k, self.v = k_BGTd.new_zeros(B, G, self.cache.size, d), v_BGTd.new_zeros(B, G, self.cache.size, d)
        self.k[:, :, :T], self.v[:, :, :T] = k_BGTd, v_BGTd
        return k_BGTd, v_BGTd

    def append(self, k_BGTd: Tensor, v_BGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next positions of each row, one unless all rows have the same length, and return all."""
        width, position_B, T = self.cache.max_row_length, self.cache.next_position_B, k_BGTd.shape[2]
        if self.cache.has_equal_lengths:
            self.k[:, :, width : width + T], self.v[:, :, width : width + T] = k_BGTd, v_BGTd
        else:
            assert T == 1
            row_B = torch.arange(len(position_B), device=position_B.device)
            self.k[row_B, :, position_B], self.v[row_B, :, position_B] = k_BGTd[:, :, 0], v_BGTd[:, :, 0]
        S = self.cache.num_keys(T)
        return self.k[:, :, :S], self.v[:, :, :S]

    def grow(self, size: int) -> None:
        self.k, self.v = (F.pad(x, (0, 0, 0, size - x.shape[2])) for x in (self.k, self.v))


class KVCache:
    """The cache of one stack, with `size` positions allocated until it must `grow`.

    With `is_static` every step attends to all `size` positions, those not written yet masked: shapes stay the same,
    and a CUDA graph can replay the step. Otherwise it attends to those that some row has reached.
    """

    def __init__(self, stack: Stack, size: int, is_static: bool = False) -> None:
        assert can_cache(stack.config), "check can_cache first"
        assert stack.memory is None, "a stack with XL memory cannot use a KV cache"
        self.stack, self.size, self.is_static = stack, size, is_static
        self.layers = [LayerKVCache(self) for _ in stack.layers]
        self.cross_kv: list[KeyValues | None] = [None for _ in stack.layers]
        self.cross_spec = AttentionSpec()

    def num_keys(self, num_new: int) -> int:
        """Return the number of keys that `num_new` new tokens of each row attend to."""
        return self.size if self.is_static else self.max_row_length + num_new

    def prefill(
        self,
        x_BTD: Tensor,
        lengths: Sequence[int],
        encoder_hidden_states: Tensor | None = None,
        encoder_document_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_rank: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (B, T, D) of prompts of these lengths.

        `document_ids` (-1: padding) and `attention_rank` say what a prompt attends to. Default: causal attention.
        """
        B, self.max_row_length = x_BTD.shape[:2]  # the longest row's length
        self.has_equal_lengths = len(set(lengths)) == 1 and not self.is_static
        self.next_position_B = torch.tensor(lengths, device=x_BTD.device)  # position of the next token
        self.distance_bias = self.bias_by_distance()
        if encoder_hidden_states is not None:
            self.cross_kv = [project_cross_kv(block, encoder_hidden_states) for block in self.stack.layers]
        if encoder_document_ids is not None:
            self.cross_spec = make_attention_spec(
                False, encoder_document_ids.new_zeros(B, 1), key_document_ids=encoder_document_ids
            )._replace(key_range=None)
        specs = self.stack.attention_specs(x_BTD, document_ids, attention_rank)
        return self.run_blocks(x_BTD, specs, [layer.prefill for layer in self.layers])

    def decode_step(self, x_BTD: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) of each row's next T tokens; call `advance` afterwards.

        T is 1, unless all rows have the same length (speculative decoding).
        """
        return self.run_blocks(x_BTD, self.decode_specs(x_BTD), [layer.append for layer in self.layers])

    def advance(self, num_positions: int = 1) -> None:
        """Move on to the next position; -1 moves back."""
        self.next_position_B += num_positions
        self.max_row_length += num_positions

    def grow(self, size: int) -> None:
        """Allocate more positions, in new tensors."""
        self.size = size
        self.distance_bias = self.bias_by_distance()
        for layer in self.layers:
            layer.grow(size)

    def reorder(self, row_B: Tensor, same_source: bool = False) -> None:
        """Continue with these rows (beam search). `same_source`: their encoder inputs stay the same."""
        for layer in self.layers:
            layer.k, layer.v = (select_rows(x, row_B, self.max_row_length) for x in (layer.k, layer.v))
        self.next_position_B = select_rows(self.next_position_B, row_B)
        if same_source:
            return
        self.cross_kv = [
            None if keys is None else KeyValues(*(select_rows(x, row_B) for x in keys)) for keys in self.cross_kv
        ]
        if self.cross_spec.mask is not None:
            self.cross_spec = self.cross_spec._replace(mask=select_rows(self.cross_spec.mask, row_B))

    def run_blocks(
        self, x: Tensor, specs: tuple[AttentionSpec, AttentionSpec], cache_updates: Sequence[CacheUpdate]
    ) -> Tensor:
        x = self.stack.cast_input(x)
        skips: list[Tensor] = []
        specs_with_values = self.stack.with_first_values(x, specs)
        for i, (block, update) in enumerate(zip(self.stack.layers, cache_updates, strict=True)):
            spec = specs_with_values[self.stack.is_local_layer(i)]
            x = self.stack.add_skip(i, x, skips)
            x = block(x, spec._replace(update_cache=update), self.cross_kv[i], self.cross_spec)
            self.stack.keep_skip(i, x, skips)
        return self.stack.apply_final_norm(x)

    def decode_specs(self, x_BTD: Tensor) -> tuple[AttentionSpec, AttentionSpec]:
        """Return the specs of each row's new tokens, in global and in sliding-window layers."""
        config, T = self.stack.config, x_BTD.shape[1]
        position_B = self.next_position_B[:1] if self.has_equal_lengths else self.next_position_B
        position_BT = position_B[:, None] + torch.arange(T, device=x_BTD.device)
        key_S = torch.arange(self.num_keys(T), device=x_BTD.device)
        distance_BTS = position_BT[:, :, None] - key_S  # from the token to key s
        # later keys are padding or not written yet
        written_BTS = None if self.has_equal_lengths and T == 1 else distance_BTS >= 0
        bias = None if self.distance_bias is None else self.distance_bias[:, distance_BTS.clamp(min=0)].transpose(0, 1)
        relative = None
        if isinstance(config.position, Shaw):
            assert T == 1, "Shaw's positions are those of one token"
            relative = distance_BTS[:, 0]

        def make_spec(visible_BTS: Tensor | None, is_local: bool) -> AttentionSpec:
            mask = None if visible_BTS is None else visible_BTS[:, None]
            masked = bias if mask is None or bias is None else bias.masked_fill(~mask, float("-inf"))
            return AttentionSpec(
                mask=mask,
                masked_bias=masked,
                relative_positions=relative,
                rope=make_rope(config, position_BT, x_BTD, is_local),
            )

        global_spec = make_spec(written_BTS, is_local=False)
        if config.window is None:
            return global_spec, global_spec
        near_BTS = distance_BTS <= config.window.size // 2
        return global_spec, make_spec(near_BTS if written_BTS is None else near_BTS & written_BTS, is_local=True)

    def bias_by_distance(self) -> Tensor | None:
        """Return (H, S): the position bias of keys 0, 1, ... positions back, or None."""
        return None if self.stack.score is None else self.stack.score(self.size, 1)[0, :, :, 0]


def project_cross_kv(block: nn.Module, encoder_hidden_states_BSD: Tensor) -> KeyValues:
    assert isinstance(block, Block)
    return block.cross.project_kv(encoder_hidden_states_BSD)


def select_rows(x: Tensor, row_B: Tensor, width: int | None = None) -> Tensor:
    """Return these rows: in place if their number stays; only the first `width` positions are in use."""
    if len(row_B) != len(x):
        return x[row_B]
    used = x if width is None else x[:, :, :width]
    used.copy_(used[row_B])
    return x
