"""DeBERTa's enhanced mask decoder (He et al. 2021, section 3.2): absolute positions enter before the prediction only.

Shapes: B rows, T positions, K target positions, D model width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from firth.models.backbone import Stack
from firth.models.config import MaskDecoder, ModelConfig
from firth.models.heads import gather_positions


class EnhancedMaskDecoder(nn.Module):
    """Predict masked tokens with the last block, whose queries get absolute position embeddings.

    All layers of the decoder share the last block's weights and attend to the same hidden states. The first layer's
    queries are hidden state plus position embedding, at target positions only; each later layer's are the output of the
    layer before. Without targets (fine-tuning), the model runs without the decoder.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.get_extra("decoder")
        assert isinstance(spec, MaskDecoder)
        self.num_layers = spec.num_layers
        self.position_embeddings = nn.Embedding(spec.length, config.dim)

    def forward(self, x_BTD: Tensor, stack: Stack, batch: Any) -> Tensor:
        """Return (B, K, D) from the embeddings (B, T, D)."""
        assert stack.memory is None, "the mask decoder does not support memory"
        target_BK, (*_, last) = batch.target_positions, stack.layers
        content_BTD = stack(
            x_BTD, batch.document_ids, batch.attention_rank, token_type_ids=batch.token_type_ids, stop_layer=-1
        )
        spec, _ = stack.attention_specs(
            content_BTD, batch.document_ids, batch.attention_rank, token_type_ids=batch.token_type_ids
        )
        spec = spec.at_positions(target_BK)
        position_BK = target_BK if batch.position_ids is None else gather_positions(batch.position_ids, target_BK)
        query_BKD = stack.cast_input(gather_positions(content_BTD, target_BK) + self.position_embeddings(position_BK))
        keys = last.project_kv(content_BTD)
        for _ in range(self.num_layers):
            query_BKD = last(query_BKD, spec, kv_states=keys)
        return stack.apply_final_norm(query_BKD)
