"""FLOPs of a model."""

from __future__ import annotations

from itertools import pairwise

from firth.models.config import (
    AWDLSTMConfig,
    BiLSTMConfig,
    BottleneckConfig,
    ELMoConfig,
    LMHead,
    ModelConfig,
    Seq2SeqConfig,
    lm_head_width,
)


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the matmul FLOPs of the forward pass per token, in rows of `length`; an addition and a product are two.

    Training takes three times as many. The LM head is counted at every position. In an encoder-decoder half of the
    tokens are the encoder's.
    """
    if config.recurrent is not None:
        return _recurrent_flops(config) + _lm_head_flops(config)
    widen = 2 * config.embed_dim * config.dim if config.embed_dim is not None else 0
    widen = 3 * 2 * config.embed_width * config.dim if config.embed_trigrams else widen
    encoder = widen + _layer_flops(config, length) * config.num_layers
    words = _lm_head_flops(config)
    if config.architecture != "encoder-decoder":
        return encoder + words
    inner, read = config.num_heads * config.head_size, config.kv_heads * config.head_size
    cross = 2 * config.dim * (inner + 2 * read) + 2 * inner * config.dim + 4 * length * inner
    decoder = widen + (_layer_flops(config, length) + cross) * config.decoder_layers
    return (encoder + decoder + words) / 2


def _layer_flops(config: ModelConfig, length: int) -> float:
    inner, read = config.num_heads * config.head_size, config.kv_heads * config.head_size
    mlp = 2 * config.block_dim * config.mlp.dim * (3 if config.mlp.gated else 2)
    if config.bottleneck is not None:
        return (
            _bottleneck_flops(config, config.bottleneck, inner) + 4 * length * inner + config.bottleneck.num_mlps * mlp
        )
    return 2 * config.dim * (inner + 2 * read) + 2 * inner * config.dim + 4 * length * inner + mlp


def _bottleneck_flops(config: ModelConfig, spec: BottleneckConfig, inner: int) -> float:
    """Return the FLOPs of the layers into the block and out of it, and of attention's projections."""
    reads = spec.attention_input
    borders = 2 * config.dim * spec.dim * (3 if reads == "shared-qk" else 2)
    qk, value = (config.dim if wide else spec.dim for wide in (reads == "wide", reads != "narrow"))
    return borders + 2 * inner * (2 * qk + value + spec.dim)


def _recurrent_flops(config: ModelConfig) -> float:
    """Return the FLOPs of all LSTM layers and directions, and of ELMo's character CNN (every word new)."""
    spec, n, dim = config.recurrent, config.num_layers, config.dim

    def lstm(input_size: int, hidden_size: int, proj_size: int | None = None) -> float:
        state_size = proj_size or hidden_size
        gates = 8 * hidden_size * (input_size + state_size)
        return gates + (2 * hidden_size * state_size if proj_size else 0)

    if isinstance(spec, AWDLSTMConfig):
        widths = [dim, *[spec.hidden_size] * (n - 1), dim]
        return sum(lstm(a, b) for a, b in pairwise(widths))
    if isinstance(spec, BiLSTMConfig):
        return 2 * n * lstm(dim, spec.hidden_size)
    if isinstance(spec, ELMoConfig):
        channels = sum(num for _, num in spec.filters)
        char_cnn = sum(2 * spec.char_dim * width * num * (50 - width + 1) for width, num in spec.filters)
        embedding = char_cnn + 4 * spec.num_highways * channels**2 + 2 * channels * spec.proj_size
        return embedding + 2 * n * lstm(spec.proj_size, spec.hidden_size, spec.proj_size)
    assert isinstance(spec, Seq2SeqConfig)
    both = 2 * spec.hidden_size
    reader = 2 * (lstm(dim, spec.hidden_size) + (n - 1) * lstm(both, spec.hidden_size))
    writer = lstm(dim + both * spec.attention, dim) + (config.decoder_layers - 1) * lstm(dim, dim)
    return (reader + writer) / 2


def _lm_head_flops(config: ModelConfig) -> float:
    if not isinstance(config.head, LMHead):
        return 0.0
    # ELMo has logits in both directions, each from half of the states.
    width = config.dim if isinstance(config.recurrent, ELMoConfig) else lm_head_width(config, config.head)
    transform = 2 * config.dim * width if config.head.transform else 0
    return transform + 2 * width * config.vocab_size
