"""What a head reads in place of the last states: a mixture of all layers, and an LSTM each way over it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from firth.models.config import FeatureEncoderConfig, ModelConfig
from firth.models.kernels.dropout import Dropout
from firth.models.recurrent.lstm import BiLSTMStack
from firth.models.scalar_mix import ScalarMix


class FeatureEncoder(nn.Module):
    """Learned with the head, above a body that may stay as it is (ELMo, section 3.3)."""

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
        """(B, T, answer width) from the states of all layers."""
        x_BTD = self.drop(all_hidden_states[-1] if self.mix is None else self.mix(all_hidden_states))
        return x_BTD if self.lstm is None else self.drop(self.lstm(x_BTD, document_ids))
