"""Tokens to vectors that know their place.

B rows, T places, E width of the token vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import AWDLSTMConfig, LearnedPosition, ModelConfig, SinusoidalPosition
from firth.models.kernels.dropout import Dropout, fast_dropout
from firth.models.regional_compile import compilable_region

BIGRAM_HASH_PRIME = 1_000_003  # spreads the hashes of two tokens


def sinusoids(length: int, width: int) -> Tensor:
    """(length, width): sine and cosine of the place, side by side, each pair slower than the one before."""
    turns = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * turns
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].float()


class PositionEmbedding(nn.Module):
    """What token vectors learn before the first block: their place and their segment or language, added; a norm."""

    sinusoids: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.build_tables(config)

    def build_tables(self, config: ModelConfig) -> None:
        width, position = config.embed_width, config.position
        self.position_embeddings = (
            nn.Embedding(config.num_position_embeddings, width) if config.num_position_embeddings else None
        )
        self.offset = position.offset if isinstance(position, LearnedPosition) else 0
        sinusoid_table = sinusoids(position.length, width) if isinstance(position, SinusoidalPosition) else None
        self.register_buffer("sinusoids", sinusoid_table)
        self.segments = nn.Embedding(config.num_segments, width) if config.num_segments else None
        self.languages = nn.Embedding(config.num_languages, width) if config.num_languages else None
        self.norm = make_norm(config, width) if config.embed_norm else None
        self.drop = Dropout(config.dropout)

    @compilable_region
    def add_positions(
        self, x_BTE: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Tell vectors where they stand. Places are counted from 0; a segment may be a language."""
        if position_ids is None:
            position_ids = torch.arange(x_BTE.shape[1], device=x_BTE.device)
        if self.position_embeddings is not None:
            x_BTE = x_BTE + self.position_embeddings(position_ids + self.offset)
        if self.sinusoids is not None:
            x_BTE = x_BTE + self.sinusoids[position_ids]
        if self.segments is not None:
            one = token_type_ids is None or self.segments.num_embeddings == 1  # RoBERTa has one for all
            x_BTE = x_BTE + (self.segments.weight[0] if one else self.segments(token_type_ids))
        if self.languages is not None and token_type_ids is not None:  # a text of no named language has no vector
            x_BTE = x_BTE + self.languages(token_type_ids)
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        return self.drop(x_BTE)


class InputEmbedding(PositionEmbedding):
    """Tokens as vectors that know their place; where they are narrower than the model, then widened."""

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.tokens = nn.Embedding(config.vocab_size, config.embed_width)  # before all, as first weights are drawn
        self.build_tables(config)
        self.bigrams = (
            nn.Embedding(config.num_bigram_buckets, config.embed_width) if config.num_bigram_buckets else None
        )
        self.scale = config.dim**0.5 if config.scale_embedding else 1.0
        self.word_drop = config.recurrent.word_drop if isinstance(config.recurrent, AWDLSTMConfig) else 0.0
        self.widen = nn.Linear(config.embed_width, config.dim) if config.embed_dim is not None else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_embedding: PositionEmbedding | None = None,
    ) -> Tensor:
        """`position_embedding` is another's, where a decoder has places and a norm of its own (BART)."""
        return self.widen(
            (position_embedding or self).add_positions(self.embed_tokens(input_ids), position_ids, token_type_ids)
        )

    def embed_unprojected(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """(B, T, E): before they are widened."""
        x_BTE = self.embed_tokens(input_ids)
        return self.add_positions(
            x_BTE if self.bigrams is None else x_BTE + self.embed_bigrams(input_ids, position_ids),
            position_ids,
            token_type_ids,
        )

    def embed_bigrams(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """(B, T, E): each token together with the one before it, by their hash; nothing for the first of a text."""
        assert self.bigrams is not None
        place_BT = (
            torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            if position_ids is None
            else position_ids
        )
        two_BT = (input_ids.roll(1, 1) * BIGRAM_HASH_PRIME + input_ids) % self.bigrams.num_embeddings
        return self.bigrams(two_BT) * (place_BT > 0)[..., None]

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """(B, T, E): the tokens alone."""
        x_BTE = self.tokens(input_ids)
        if self.word_drop and self.training:  # a word is there or not, wherever it stands in these rows
            x_BTE = (
                x_BTE * fast_dropout(x_BTE.new_ones(self.tokens.num_embeddings), self.word_drop)[input_ids][..., None]
            )
        return x_BTE if self.scale == 1.0 else x_BTE * self.scale
