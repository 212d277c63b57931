"""XLNet: the same blocks driven twice.

B rows, T places, K asked places, D model width, E width of the token vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from firth.models.attention import AttentionSpec, make_key_range
from firth.models.backbone import Stack
from firth.models.config import ModelConfig
from firth.models.embeddings import InputEmbedding
from firth.models.heads import gather_positions


class TwoStream(nn.Module):
    """Answers at places whose tokens are not seen (Yang et al. 2019, section 2.3).

    The content stream reads as always. The query stream begins with one learned vector and its place, for the asked
    places alone, and reads the content of those that come earlier in the order of prediction.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(1, 1, config.embed_width))

    def forward(self, embed: InputEmbedding, stack: Stack, batch: Any) -> Tensor:
        """The query stream's last states (B, K, D)."""
        asked_BK = batch.target_positions
        rank_BT = rank_targets_last(batch.input_ids, asked_BK) if batch.attention_rank is None else batch.attention_rank
        position_BK = asked_BK if batch.position_ids is None else gather_positions(batch.position_ids, asked_BK)
        segment_BK = None if batch.token_type_ids is None else gather_positions(batch.token_type_ids, asked_BK)
        vector_BKE = self.vector.expand(*asked_BK.shape, -1)

        content = stack.cast_input(embed(batch.input_ids, batch.position_ids, batch.token_type_ids))
        upto, _ = stack.attention_specs(content, batch.document_ids, rank_BT, token_type_ids=batch.token_type_ids)
        earlier = make_query_stream_spec(batch.document_ids, rank_BT, asked_BK)
        if upto.relative_positions is not None:
            earlier = earlier._replace(relative_positions=upto.relative_positions.at_positions(asked_BK))
        memory = stack.memory
        if memory is not None:
            earlier = memory.extend_spec(earlier, content.shape[1])
        query = stack.cast_input(embed.widen(embed.add_positions(vector_BKE, position_BK, segment_BK)))
        for i, block in enumerate(stack.layers):
            keys = block.project_kv(content if memory is None else memory.extend_states(i, content))
            query = block(query, earlier, kv_states=keys)
            if i < stack.num_layers - 1:
                content = block(content, upto, kv_states=keys)
        return stack.apply_final_norm(query)


def rank_targets_last(input_ids_BT: Tensor, target_positions_BK: Tensor) -> Tensor:
    """The order where none is given: all that is asked comes after all that is not, so each is guessed by itself."""
    return torch.zeros_like(input_ids_BT).scatter(1, target_positions_BK, 1)


def make_query_stream_spec(
    document_ids_BT: Tensor | None, attention_rank_BT: Tensor, target_positions_BK: Tensor
) -> AttentionSpec:
    """Who asks at some places sees those of its document with a lower rank, and so never its own token."""
    mask_BKT = attention_rank_BT[:, None, :] < gather_positions(attention_rank_BT, target_positions_BK)[:, :, None]
    if document_ids_BT is not None:
        mask_BKT = mask_BKT & (
            document_ids_BT[:, None, :] == gather_positions(document_ids_BT, target_positions_BK)[:, :, None]
        )
    reach = make_key_range(False, document_ids_BT, attention_rank_BT, is_strict=True)
    return AttentionSpec(
        mask=mask_BKT[:, None],
        has_empty_rows=True,
        key_range=None if reach is None else reach.at_positions(target_positions_BK),
    )
