"""XLNet's two-stream attention (Yang et al. 2019, section 2.3): the same blocks, run on two inputs.

Permutation language modelling predicts each token from those before it in a random order. The state that predicts a
token must know its position but not the token itself, while the states that later predictions attend to must know
both. So there are two streams with shared weights. The content stream embeds the tokens and sees rank <= its own. The
query stream starts from one learned vector, exists at target positions only, and attends to content of strictly lower
rank. In fine-tuning the content stream is the model.

Shapes: B rows, T positions, K target positions, D model width, E embedding width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from firth.models.attention import AttentionSpec, make_key_range
from firth.models.backbone import Stack
from firth.models.config import ModelConfig
from firth.models.embeddings import InputEmbedding
from firth.models.heads import LABEL_IGNORE_INDEX, gather_positions


class TwoStream(nn.Module):
    """The query stream's initial vector, and the loop over both streams."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(1, 1, config.embed_width))

    def forward(self, embed: InputEmbedding, stack: Stack, batch: Any) -> Tensor:
        """Return the query stream's last hidden states (B, K, D)."""
        target_BK = batch.target_positions
        rank_BT = (
            rank_targets_last(batch.input_ids, target_BK, batch.labels)
            if batch.attention_rank is None
            else batch.attention_rank
        )
        position_BK = target_BK if batch.position_ids is None else gather_positions(batch.position_ids, target_BK)
        token_type_BK = None if batch.token_type_ids is None else gather_positions(batch.token_type_ids, target_BK)
        vector_BKE = self.vector.expand(*target_BK.shape, -1)

        content = stack.cast_input(embed(batch.input_ids, batch.position_ids, batch.token_type_ids))
        content_spec, _ = stack.attention_specs(
            content, batch.document_ids, rank_BT, token_type_ids=batch.token_type_ids
        )
        query_spec = make_query_stream_spec(batch.document_ids, rank_BT, target_BK)
        if content_spec.relative_positions is not None:
            query_spec = query_spec._replace(relative_positions=content_spec.relative_positions.at_positions(target_BK))
        memory = stack.memory
        if memory is not None:
            query_spec = memory.extend_spec(query_spec, content.shape[1])
        query = stack.cast_input(embed.widen(embed.add_positions(vector_BKE, position_BK, token_type_BK)))
        for i, block in enumerate(stack.layers):
            keys = block.project_kv(content if memory is None else memory.extend_states(i, content))
            query = block(query, query_spec, kv_states=keys)
            if i < stack.num_layers - 1:
                content = block(content, content_spec, kv_states=keys)
        return stack.apply_final_norm(query)


def rank_targets_last(input_ids_BT: Tensor, target_positions_BK: Tensor, labels_BK: Tensor | None) -> Tensor:
    """Return ranks (B, T) for batches without: 0, and 1 at targets, so that no target sees another.

    Unused slots, whose label is -100, have some position and hide nothing.
    """
    is_used_BK = torch.ones_like(target_positions_BK) if labels_BK is None else (labels_BK != LABEL_IGNORE_INDEX).long()
    return torch.zeros_like(input_ids_BT).scatter_reduce(1, target_positions_BK, is_used_BK, "amax")


def make_query_stream_spec(
    document_ids_BT: Tensor | None, attention_rank_BT: Tensor, target_positions_BK: Tensor
) -> AttentionSpec:
    """Return the spec of queries at target positions: same document, `rank[j] < rank[i]`, never their own token."""
    mask_BKT = attention_rank_BT[:, None, :] < gather_positions(attention_rank_BT, target_positions_BK)[:, :, None]
    if document_ids_BT is not None:
        mask_BKT = mask_BKT & (
            document_ids_BT[:, None, :] == gather_positions(document_ids_BT, target_positions_BK)[:, :, None]
        )
    key_range = make_key_range(False, document_ids_BT, attention_rank_BT, is_strict=True)
    return AttentionSpec(
        mask=mask_BKT[:, None],
        has_empty_rows=True,
        key_range=None if key_range is None else key_range.at_positions(target_positions_BK),
    )
