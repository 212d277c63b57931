"""Features for a task head over a frozen backbone: a mixture of all layers, then a biLSTM (ELMo, section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from firth.models.config import FeatureEncoderConfig, ModelConfig
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.lstm import BiLSTMStack
from firth.models.scalar_mix import ScalarMix


class FeatureEncoder(nn.Module):
    """ScalarMix and biLSTM that are trained with the head; the backbone may stay frozen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.get_extra("features")
        assert isinstance(spec, FeatureEncoderConfig)
        self.mix = ScalarMix(config.num_layers + 1) if spec.mix_layers else None
        self.lstm = (
            BiLSTMStack(config, 1, config.dim, spec.bilstm_hidden_size, 0.0) if spec.bilstm_hidden_size else None
        )
        self.drop = Dropout(spec.dropout)

    def forward(self, all_hidden_states: Sequence[Tensor], document_ids: Tensor | None) -> Tensor:
        """Return (B, T, `ModelConfig.head_input_dim`) from the hidden states of all layers."""
        x_BTD = self.drop(all_hidden_states[-1] if self.mix is None else self.mix(all_hidden_states))
        return x_BTD if self.lstm is None else self.drop(self.lstm(x_BTD, document_ids))
