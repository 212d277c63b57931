"""Tokens to vectors that know their place.

B rows, T places, E width of the token vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import AWDLSTM, Learned, ModelConfig, Sinusoid
from firth.models.dropout import Dropout, drop
from firth.models.programs import part

PRIME = 1_000_003  # spreads the hashes of two tokens


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sine and cosine of the place, side by side, each pair slower than the one before."""
    turns = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * turns
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].float()


class Placing(nn.Module):
    """What token vectors learn before the first block: their place and their segment or language, added; a norm."""

    waves: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.add_places(config)

    def add_places(self, config: ModelConfig) -> None:
        width, position = config.embed_width, config.position
        self.places = nn.Embedding(config.num_places, width) if config.num_places else None
        self.offset = position.offset if isinstance(position, Learned) else 0
        waves = sinusoids(position.length, width) if isinstance(position, Sinusoid) else None
        self.register_buffer("waves", waves)
        self.segments = nn.Embedding(config.num_segments, width) if config.num_segments else None
        self.languages = nn.Embedding(config.num_languages, width) if config.num_languages else None
        self.norm = make_norm(config, width) if config.embed_norm else None
        self.drop = Dropout(config.dropout)

    @part
    def place(self, x_BTE: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """Tell vectors where they stand. Places are counted from 0; a segment may be a language."""
        if position is None:
            position = torch.arange(x_BTE.shape[1], device=x_BTE.device)
        if self.places is not None:
            x_BTE = x_BTE + self.places(position + self.offset)
        if self.waves is not None:
            x_BTE = x_BTE + self.waves[position]
        if self.segments is not None:
            one = segment is None or self.segments.num_embeddings == 1  # RoBERTa has one for all
            x_BTE = x_BTE + (self.segments.weight[0] if one else self.segments(segment))
        if self.languages is not None and segment is not None:  # a text of no named language has no vector
            x_BTE = x_BTE + self.languages(segment)
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        return self.drop(x_BTE)


class Embedding(Placing):
    """Tokens as vectors that know their place; where they are narrower than the model, then widened."""

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.tokens = nn.Embedding(config.vocab_size, config.embed_width)  # before all, as first weights are drawn
        self.add_places(config)
        self.bigrams = nn.Embedding(config.bigrams, config.embed_width) if config.bigrams else None
        self.scale = config.dim**0.5 if config.embed_scaled else 1.0
        self.word_drop = config.recurrent.word_drop if isinstance(config.recurrent, AWDLSTM) else 0.0
        self.widen = nn.Linear(config.embed_width, config.dim) if config.embed_dim is not None else nn.Identity()

    def forward(
        self,
        tokens: Tensor,
        position: Tensor | None = None,
        segment: Tensor | None = None,
        placing: Placing | None = None,
    ) -> Tensor:
        """`placing` is another's, where a decoder has places and a norm of its own (BART)."""
        return self.widen((placing or self).place(self.vectors_of(tokens), position, segment))

    def vectors(self, tokens: Tensor, position: Tensor | None = None, segment: Tensor | None = None) -> Tensor:
        """(B, T, E): before they are widened."""
        x_BTE = self.vectors_of(tokens)
        return self.place(
            x_BTE if self.bigrams is None else x_BTE + self.vectors_of_two(tokens, position), position, segment
        )

    def vectors_of_two(self, tokens: Tensor, position: Tensor | None) -> Tensor:
        """(B, T, E): each token together with the one before it, by their hash; nothing for the first of a text."""
        assert self.bigrams is not None
        place_BT = (
            torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if position is None else position
        )
        two_BT = (tokens.roll(1, 1) * PRIME + tokens) % self.bigrams.num_embeddings
        return self.bigrams(two_BT) * (place_BT > 0)[..., None]

    def vectors_of(self, tokens: Tensor) -> Tensor:
        """(B, T, E): the tokens alone."""
        x_BTE = self.tokens(tokens)
        if self.word_drop and self.training:  # a word is there or not, wherever it stands in these rows
            x_BTE = x_BTE * drop(x_BTE.new_ones(self.tokens.num_embeddings), self.word_drop)[tokens][..., None]
        return x_BTE if self.scale == 1.0 else x_BTE * self.scale
