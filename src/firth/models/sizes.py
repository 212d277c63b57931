"""How much a model computes."""

from __future__ import annotations

from firth.models.config import LMHead, ModelConfig


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Multiplications and additions of matrix products to read one token in rows of `length`, forward alone.

    Training takes three times as many. The vocabulary is counted at every place. In an encoder-decoder half of the
    tokens are the encoder's.
    """
    widen = 2 * config.embed_dim * config.dim if config.embed_dim is not None else 0
    encoder = widen + _layer(config, length) * config.num_layers
    words = _words(config)
    if config.shape != "encoder-decoder":
        return encoder + words
    inner, read = config.num_heads * config.head_size, config.kv_heads * config.head_size
    cross = 2 * config.dim * (inner + 2 * read) + 2 * inner * config.dim + 4 * length * inner
    decoder = widen + (_layer(config, length) + cross) * config.decoder_layers
    return (encoder + decoder + words) / 2


def _layer(config: ModelConfig, length: int) -> float:
    inner, read = config.num_heads * config.head_size, config.kv_heads * config.head_size
    attention = 2 * config.dim * (inner + 2 * read) + 2 * inner * config.dim + 4 * length * inner
    return attention + 2 * config.dim * config.mlp.dim * (3 if config.mlp.gated else 2)


def _words(config: ModelConfig) -> float:
    if not isinstance(config.head, LMHead):
        return 0.0
    transform = 2 * config.dim * config.embed_width if config.head.transform else 0
    return transform + 2 * config.embed_width * config.vocab_size
