"""DeBERTa's mask decoder: absolute places, told only when an answer is due.

B rows, T places, K asked places, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from firth.models.backbone import Stack
from firth.models.config import MaskDecoder, ModelConfig
from firth.models.heads import gather_positions


class EnhancedMaskDecoder(nn.Module):
    """Answers from what the last block reads, asked for with a vector of the absolute place (He et al. 2021, 3.2).

    The last block runs as often as there are layers of the decoder, which share its weights: each asks with what the
    one before has found, the first with the state and the place, and all read the same states. Only the asked places
    ask. Where nothing is asked, the model is what it is without it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.get_extra("decoder")
        assert isinstance(spec, MaskDecoder)
        self.num_layers = spec.num_layers
        self.position_embeddings = nn.Embedding(spec.length, config.dim)

    def forward(self, x_BTD: Tensor, stack: Stack, batch: Any) -> Tensor:
        """(B, K, D), from the vectors that the stack begins with."""
        assert stack.memory is None, "the decoder's layers remember nothing"
        asked_BK, (*_, last) = batch.target_positions, stack.layers
        content_BTD = stack(
            x_BTD, batch.document_ids, batch.attention_rank, token_type_ids=batch.token_type_ids, stop_layer=-1
        )
        sight, _ = stack.attention_specs(
            content_BTD, batch.document_ids, batch.attention_rank, token_type_ids=batch.token_type_ids
        )
        some = sight.at_positions(asked_BK)
        place_BK = asked_BK if batch.position_ids is None else gather_positions(batch.position_ids, asked_BK)
        query_BKD = stack.cast_input(gather_positions(content_BTD, asked_BK) + self.position_embeddings(place_BK))
        keys = last.project_kv(content_BTD)
        for _ in range(self.num_layers):
            query_BKD = last(query_BKD, some, kv_states=keys)
        return stack.apply_final_norm(query_BKD)
