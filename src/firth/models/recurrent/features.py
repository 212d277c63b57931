"""What a head reads in place of the last states: a mixture of all layers, and an LSTM each way over it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from firth.models.config import Features, ModelConfig
from firth.models.dropout import Dropout
from firth.models.mix import ScalarMix
from firth.models.recurrent.lstm import TwoWays


class FeatureReader(nn.Module):
    """Learned with the head, above a body that may stay as it is (ELMo, section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = config.extra("features")
        assert isinstance(spec, Features)
        self.mix = ScalarMix(config.num_layers + 1) if spec.mix else None
        self.lstm = TwoWays(config, 1, config.dim, spec.bilstm, 0.0) if spec.bilstm else None
        self.drop = Dropout(spec.dropout)

    def forward(self, states: Sequence[Tensor], doc: Tensor | None) -> Tensor:
        """(B, T, answer width) from the states of all layers."""
        x_BTD = self.drop(states[-1] if self.mix is None else self.mix(states))
        return x_BTD if self.lstm is None else self.drop(self.lstm(x_BTD, doc))
