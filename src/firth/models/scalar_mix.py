"""One vector per token from the states of all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ScalarMix(nn.Module):
    """A weighted mean of layers, with weights by softmax, times one number (ELMo, section 3.2).

    At the start all layers count the same. `do_layer_norm` first puts each layer through a norm without weights.
    """

    def __init__(self, num_layers: int, do_layer_norm: bool = False) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))
        self.gamma = nn.Parameter(torch.ones(()))
        self.do_layer_norm = do_layer_norm

    def forward(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """`hidden_states` are the hidden states of a call, (B, T, D) each; the mixture has the same shape."""
        assert len(hidden_states) == len(self.weights), "one weight for each layer"
        if self.do_layer_norm:
            hidden_states = [nn.functional.layer_norm(x, x.shape[-1:]) for x in hidden_states]
        share = self.weights.softmax(0)
        return self.gamma * torch.stack([w * x for w, x in zip(share, hidden_states, strict=True)]).sum(0)
