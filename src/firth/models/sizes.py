"""How much a model computes."""

from __future__ import annotations

from itertools import pairwise

from firth.models.config import AWDLSTM, BiLSTM, ELMo, LMHead, ModelConfig, Seq2Seq


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Multiplications and additions of matrix products to read one token in rows of `length`, forward alone.

    Training takes three times as many. The vocabulary is counted at every place. In an encoder-decoder half of the
    tokens are the encoder's.
    """
    if config.recurrent is not None:
        return _recurrent(config) + _words(config)
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


def _recurrent(config: ModelConfig) -> float:
    """All layers of LSTMs, both ways where there are two, and ELMo's spelling, as if every word were new."""
    spec, n, dim = config.recurrent, config.num_layers, config.dim

    def lstm(reads: int, units: int, hands_on: int | None = None) -> float:
        state = hands_on or units
        return 8 * units * (reads + state) + (2 * units * state if hands_on else 0)

    if isinstance(spec, AWDLSTM):
        widths = [dim, *[spec.hidden] * (n - 1), dim]
        return sum(lstm(a, b) for a, b in pairwise(widths))
    if isinstance(spec, BiLSTM):
        return 2 * n * lstm(dim, spec.hidden)
    if isinstance(spec, ELMo):
        found = sum(num for _, num in spec.filters)
        spelled = sum(2 * spec.characters * width * num * (50 - width + 1) for width, num in spec.filters)
        word = spelled + 4 * spec.highways * found**2 + 2 * found * spec.projection
        return word + 2 * n * lstm(spec.projection, spec.hidden, spec.projection)
    assert isinstance(spec, Seq2Seq)
    both = 2 * spec.hidden
    reader = 2 * (lstm(dim, spec.hidden) + (n - 1) * lstm(both, spec.hidden))
    writer = lstm(dim + both * spec.attention, dim) + (config.decoder_layers - 1) * lstm(dim, dim)
    return (reader + writer) / 2


def _words(config: ModelConfig) -> float:
    if not isinstance(config.head, LMHead):
        return 0.0
    transform = 2 * config.dim * config.embed_width if config.head.transform else 0
    return transform + 2 * config.embed_width * config.vocab_size
