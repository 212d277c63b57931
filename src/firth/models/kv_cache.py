"""What a decoder remembers of the text so far, so that a new token costs one place and not the whole row.

Keys and values stand in tensors that have room, each at the place of its token, and are written place by place. Rows
of different length are padded on the right: what is written on replaces the padding, which nothing has seen.

B rows, T places of the prompts, S places in all, H heads, G heads of keys and values, d numbers per head, D width.
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
    """Whether a new place leaves the keys, values and scores of those before as they are, place by place."""
    return config.recurrent is None and not isinstance(config.position, TransformerXL | Disentangled)


class LayerKVCache:
    """The keys and values of one layer, (B, G, S, d)."""

    k: Tensor
    v: Tensor

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def prefill(self, k_BGTd: Tensor, v_BGTd: Tensor) -> tuple[Tensor, Tensor]:
        """Keep those of the prompts, which read each other as ever."""
        B, G, T, d = k_BGTd.shape
        self.k, self.v = k_BGTd.new_zeros(B, G, self.cache.size, d), v_BGTd.new_zeros(B, G, self.cache.size, d)
        self.k[:, :, :T], self.v[:, :, :T] = k_BGTd, v_BGTd
        return k_BGTd, v_BGTd

    def append(self, k_BG1d: Tensor, v_BG1d: Tensor) -> tuple[Tensor, Tensor]:
        """Write one more place of each row, and read all of them."""
        width, place_B = self.cache.max_row_length, self.cache.next_position_B
        if self.cache.has_equal_lengths:
            self.k[:, :, width : width + 1], self.v[:, :, width : width + 1] = k_BG1d, v_BG1d
        else:
            row_B = torch.arange(len(place_B), device=place_B.device)
            self.k[row_B, :, place_B], self.v[row_B, :, place_B] = k_BG1d[:, :, 0], v_BG1d[:, :, 0]
        S = self.cache.num_keys
        return self.k[:, :, :S], self.v[:, :, :S]

    def grow(self, size: int) -> None:
        self.k, self.v = (F.pad(x, (0, 0, 0, size - x.shape[2])) for x in (self.k, self.v))


class KVCache:
    """The memory of one stack for rows that are read on, one token at a time.

    `size` is the number of places there is room for, until they `grow`. With `is_static` all of them are read at every
    step, those not written yet unseen, so that no shape changes and a GPU can replay the step (CUDA graphs); else only
    those that some row has reached.
    """

    def __init__(self, stack: Stack, size: int, is_static: bool = False) -> None:
        assert can_cache(stack.config), "the caller asks that first"
        assert stack.memory is None, "a stack has one memory or the other"
        self.stack, self.size, self.is_static = stack, size, is_static
        self.layers = [LayerKVCache(self) for _ in stack.layers]
        self.cross_kv: list[KeyValues | None] = [None for _ in stack.layers]
        self.cross_spec = AttentionSpec()

    @property
    def num_keys(self) -> int:
        return self.size if self.is_static else self.max_row_length + 1

    def prefill(
        self,
        x_BTD: Tensor,
        lengths: Sequence[int],
        encoder_hidden_states: Tensor | None = None,
        encoder_document_ids: Tensor | None = None,
    ) -> Tensor:
        """The states (B, T, D) of prompts of these lengths. `encoder_hidden_states` is the sequence that the stack reads too."""
        B, self.max_row_length = x_BTD.shape[:2]  # of the longest row
        self.has_equal_lengths = len(set(lengths)) == 1 and not self.is_static
        self.next_position_B = torch.tensor(lengths, device=x_BTD.device)  # where the next token stands
        self.distance_bias = self.bias_by_distance()
        if encoder_hidden_states is not None:
            self.cross_kv = [project_cross_kv(block, encoder_hidden_states) for block in self.stack.layers]
        if encoder_document_ids is not None:
            self.cross_spec = make_attention_spec(
                False, encoder_document_ids.new_zeros(B, 1), key_document_ids=encoder_document_ids
            )._replace(key_range=None)
        sights = self.stack.attention_specs(x_BTD, None, None)
        return self.run_blocks(x_BTD, sights, [layer.prefill for layer in self.layers])

    def decode_step(self, x_B1D: Tensor) -> Tensor:
        """The states (B, 1, D) of the next token of each row; `advance` follows."""
        return self.run_blocks(x_B1D, self.decode_specs(x_B1D), [layer.append for layer in self.layers])

    def advance(self) -> None:
        """Go to the next place."""
        self.next_position_B += 1
        self.max_row_length += 1

    def grow(self, size: int) -> None:
        """Make room for more places. All tensors are others then."""
        self.size = size
        self.distance_bias = self.bias_by_distance()
        for layer in self.layers:
            layer.grow(size)

    def reorder(self, row_B: Tensor, same_source: bool = False) -> None:
        """Go on with these rows; with `check_same_source` they only change with others that read the same."""
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
        for i, (block, keep) in enumerate(zip(self.stack.layers, cache_updates, strict=True)):
            sight = specs[self.stack.is_local_layer(i)]
            x = block(x, sight._replace(update_cache=keep), self.cross_kv[i], self.cross_spec)
        return self.stack.apply_final_norm(x)

    def decode_specs(self, x_B1D: Tensor) -> tuple[AttentionSpec, AttentionSpec]:
        """What the new place of each row sees: in most layers, and in those with a window."""
        config, place_B = (
            self.stack.config,
            self.next_position_B[:1] if self.has_equal_lengths else self.next_position_B,
        )
        back_BS = place_B[:, None] - torch.arange(self.num_keys, device=x_B1D.device)
        written_BS = None if self.has_equal_lengths else back_BS >= 0
        score = (
            None
            if self.distance_bias is None
            else self.distance_bias[:, back_BS.clamp(min=0)].transpose(0, 1)[:, :, None]
        )
        places = back_BS if isinstance(config.position, Shaw) else None

        def sight(seen_BS: Tensor | None, local: bool) -> AttentionSpec:
            mask = None if seen_BS is None else seen_BS[:, None, None]
            masked = score if mask is None or score is None else score.masked_fill(~mask, float("-inf"))
            return AttentionSpec(
                mask=mask,
                masked_bias=masked,
                relative_positions=places,
                rope=make_rope(config, place_B[:, None], x_B1D, local),
            )

        wide = sight(written_BS, local=False)
        if config.window is None:
            return wide, wide
        near_BS = back_BS <= config.window.size // 2
        return wide, sight(near_BS if written_BS is None else near_BS & written_BS, local=True)

    def bias_by_distance(self) -> Tensor | None:
        """(H, S): what the stack adds to the scores of what is so many places back."""
        return None if self.stack.score is None else self.stack.score(self.size, 1)[0, :, :, 0]


def project_cross_kv(block: nn.Module, encoder_hidden_states_BSD: Tensor) -> KeyValues:
    assert isinstance(block, Block)
    return block.cross.project_kv(encoder_hidden_states_BSD)


def select_rows(x: Tensor, row_B: Tensor, width: int | None = None) -> Tensor:
    """Rows of a tensor: in place where there are as many as before. Nothing stands past `max_row_length` places."""
    if len(row_B) != len(x):
        return x[row_B]
    some = x if width is None else x[:, :, :width]
    some.copy_(some[row_B])
    return x
