"""Input embeddings: tokens, plus positions and segments where the architecture adds them.

Shapes: B rows, T positions, E embedding width, D model width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firth.models.block import make_norm
from firth.models.config import AWDLSTMConfig, LearnedPosition, ModelConfig, SinusoidalPosition
from firth.models.kernels.dropout import Dropout, fast_dropout
from firth.models.regional_compile import compilable_region

BIGRAM_HASH_PRIME = 1_000_003  # multiplier of the previous token's id in a bigram's hash


def sinusoids(length: int, width: int) -> Tensor:
    """Return (length, width): sines and cosines of the position at falling frequencies (Vaswani et al. 2017, 3.5)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].float()


class PositionEmbedding(nn.Module):
    """Position and segment or language embeddings, added to token embeddings; then norm and dropout."""

    sinusoids: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.build_tables(config)

    def build_tables(self, config: ModelConfig) -> None:
        width, position = config.input_width, config.position
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
        """Return (B, T, E). `position_ids` default to 0 ... T - 1; `token_type_ids` are segments or languages."""
        if position_ids is None:
            position_ids = torch.arange(x_BTE.shape[1], device=x_BTE.device)
        if self.position_embeddings is not None:
            x_BTE = x_BTE + self.position_embeddings(position_ids + self.offset)
        if self.sinusoids is not None:
            x_BTE = x_BTE + self.sinusoids[position_ids]
        if self.segments is not None:
            is_constant = token_type_ids is None or self.segments.num_embeddings == 1  # RoBERTa has one segment
            x_BTE = x_BTE + (self.segments.weight[0] if is_constant else self.segments(token_type_ids))
        if self.languages is not None and token_type_ids is not None:  # without a language nothing is added
            x_BTE = x_BTE + self.languages(token_type_ids)
        if self.norm is not None:
            x_BTE = self.norm(x_BTE)
        return self.drop(x_BTE)


class TrigramProjection(nn.Linear):
    """Project each token's embedding together with those of its neighbours: a convolution over 3 tokens.

    Small embeddings make a small model; the neighbours make up for it (MobileBERT, Sun et al. 2020, section 3.4). A
    neighbour outside of the document is 0.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(3 * config.embed_width, config.dim)

    def forward(self, x_BTE: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Return (B, T, D). Without `document_ids` a row is one document, padding included, as in `transformers`."""
        after, before = x_BTE[:, 1:], x_BTE[:, :-1]
        if document_ids is not None:
            same = (document_ids[:, 1:] == document_ids[:, :-1])[..., None]
            after, before = after * same, before * same
        return super().forward(torch.cat([F.pad(after, (0, 0, 0, 1)), x_BTE, F.pad(before, (0, 0, 1, 0))], -1))


class InputEmbedding(PositionEmbedding):
    """Token embeddings with positions; projected to D where E is smaller (ALBERT, ELECTRA).

    Trigrams are projected to D before positions are added (MobileBERT).
    """

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        # first: initialization draws weights in this order
        self.tokens = nn.Embedding(config.vocab_size, config.embed_width)
        self.build_tables(config)
        self.bigrams = (
            nn.Embedding(config.num_bigram_buckets, config.embed_width) if config.num_bigram_buckets else None
        )
        self.scale = config.dim**0.5 if config.scale_embedding else 1.0
        self.word_drop = config.recurrent.word_drop if isinstance(config.recurrent, AWDLSTMConfig) else 0.0
        self.trigrams = TrigramProjection(config) if config.embed_trigrams else None
        widens = config.embed_dim is not None and self.trigrams is None
        self.widen = nn.Linear(config.embed_width, config.dim) if widens else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_embedding: PositionEmbedding | None = None,
    ) -> Tensor:
        """Return (B, T, D). A decoder may pass a `position_embedding` of its own, with its own norm (BART)."""
        assert self.trigrams is None, "they need `embed_unprojected`, which knows the documents"
        return self.widen(
            (position_embedding or self).add_positions(self.embed_tokens(input_ids), position_ids, token_type_ids)
        )

    def embed_unprojected(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return (B, T, E), before the projection, with bigrams; trigrams are (B, T, D) already."""
        x_BTE = self.embed_tokens(input_ids)
        if self.trigrams is not None:
            x_BTE = self.trigrams(x_BTE, document_ids)
        return self.add_positions(
            x_BTE if self.bigrams is None else x_BTE + self.embed_bigrams(input_ids, position_ids),
            position_ids,
            token_type_ids,
        )

    def embed_bigrams(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return (B, T, E): hashed embeddings of each token and the one before it; 0 for a text's first token."""
        assert self.bigrams is not None
        position_BT = (
            torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            if position_ids is None
            else position_ids
        )
        bucket_BT = (input_ids.roll(1, 1) * BIGRAM_HASH_PRIME + input_ids) % self.bigrams.num_embeddings
        return self.bigrams(bucket_BT) * (position_BT > 0)[..., None]

    def embed_tokens(self, input_ids: Tensor) -> Tensor:
        """Return the token embeddings (B, T, E)."""
        x_BTE = self.tokens(input_ids)
        if self.word_drop and self.training:  # embedding dropout: drops a token everywhere in the batch (AWD-LSTM)
            x_BTE = (
                x_BTE * fast_dropout(x_BTE.new_ones(self.tokens.num_embeddings), self.word_drop)[input_ids][..., None]
            )
        return x_BTE if self.scale == 1.0 else x_BTE * self.scale
