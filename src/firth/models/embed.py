"""Tokens to vectors that know their place.

B rows, T places, E width of the token vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import Learned, ModelConfig
from firth.models.dropout import Dropout


class Embedding(nn.Module):
    """Token, place and segment vectors, added; where they are narrower than the model, then widened."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.embed_width
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.places = nn.Embedding(config.position.length, width) if isinstance(config.position, Learned) else None
        self.segments = nn.Embedding(config.num_segments, width) if config.num_segments else None
        self.norm = make_norm(config, width) if config.embed_norm else None
        self.drop = Dropout(config.dropout)
        self.widen = nn.Linear(width, config.dim) if config.embed_dim is not None else nn.Identity()

    def forward(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        return self.widen(self.vectors(tokens, position, segment))

    def vectors(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """(B, T, E): before they are widened."""
        return self.place(self.tokens(tokens), position, segment)

    def place(self, x_BTE: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """Tell vectors where they stand."""
        if self.places is not None:
            if position is None:
                position = torch.arange(x_BTE.shape[1], device=x_BTE.device)
            x_BTE = x_BTE + self.places(position)
        if self.segments is not None:
            one = segment is None or self.segments.num_embeddings == 1  # RoBERTa has one for all
            x_BTE = x_BTE + (self.segments.weight[0] if one else self.segments(segment))
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        return self.drop(x_BTE)
