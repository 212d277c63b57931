"""ScalarMix: one vector per token from the hidden states of all layers (Peters et al. 2018, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """gamma * sum_j softmax(w)_j h_j over the layers j, with w and gamma trained (ELMo, equation 1).

    All layers start with the same weight. `do_layer_norm` normalises each layer first, without affine parameters.
    """

    def __init__(self, num_layers: int, do_layer_norm: bool = False) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))
        self.do_layer_norm = do_layer_norm

    def forward(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return the mixture (B, T, D) of the hidden states of all layers, (B, T, D) each."""
        assert len(hidden_states) == len(self.weights), "one weight for each layer"
        if self.do_layer_norm:
            hidden_states = [nn.functional.layer_norm(x, x.shape[-1:]) for x in hidden_states]
        share = self.weights.softmax(0)
        return self.gamma * torch.stack([w * x for w, x in zip(share, hidden_states, strict=True)]).sum(0)
