"""The number of parameters of a model, from its config alone.

Building a model without allocating it (torch's device "meta") counts too, but takes torch's seconds to load and more
for large models. The formulas here repeat the modules: an (in, out) linear layer has in * out weights and `out` biases.
`tests/models/test_parameters.py` compares every preset with the model that is built.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from firth.core.errors import UserError
from firth.core.files import format_bytes
from firth.core.memory import check_memory
from firth.models.config import (
    GENERATOR_HEAD,
    AWDLSTMConfig,
    BiLSTMConfig,
    BottleneckConfig,
    DetectorConfig,
    Disentangled,
    ELMoConfig,
    FeatureEncoderConfig,
    GeneratorConfig,
    LayerNormConfig,
    LMHead,
    MaskDecoder,
    ModelConfig,
    MultiTaskHead,
    NoNormConfig,
    QueryStream,
    RMSNormConfig,
    Seq2SeqConfig,
    Shaw,
    SinusoidalPosition,
    SpanBoundaryHead,
    T5Bias,
    TaskHeadBase,
    TransformerXL,
    lm_head_width,
    make_generator_model_config,
)
from firth.tokens.characters import NUM_CHAR_IDS

FLOAT_BYTES = 4
MAX_MODEL_BYTES = 2**50  # 1 PiB; beyond 2^63 torch has no shapes without memory either


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of a model with this config."""
    if not isinstance(config.head, LMHead) or any(
        not isinstance(e, DetectorConfig | GeneratorConfig | QueryStream) for e in config.extras
    ):
        return _count_built(config)
    spec, detector = config.get_extra("generator"), config.get_extra("detector")
    total = count_backbone_parameters(config)
    if config.get_extra("query") is not None:
        total += config.embed_width
    if spec is None and detector is None:
        return total + _lm_head(config, config.head)
    small = make_generator_model_config(config)
    total += _linear(config.embed_width, small.dim) + _stack(small, small.num_layers)  # the generator
    total += _linear(config.dim, config.dim) + _linear(config.dim, 1)  # the discriminator's head
    if detector is not None:
        return total + _lm_head(config, config.head) + _lm_head(small, GENERATOR_HEAD)
    assert isinstance(spec, GeneratorConfig)
    delta = config.vocab_size * config.embed_width if spec.disentangle_embeddings else 0
    return total + _lm_head(small, config.head) + delta


def count_backbone_parameters(config: ModelConfig) -> int:
    """Return the number of parameters without heads and extras; a formula for every model, in microseconds."""
    return _embeddings(config) + _stacks(config)


def check_model_memory(config: ModelConfig, allocate: bool = True) -> None:
    """Raise a UserError for a model that does not fit into memory, before any of it is allocated.

    Without `allocate` (torch's device "meta") only a model is refused that no machine can hold.
    """
    count = count_backbone_parameters(config) + _heads_at_least(config)
    what, fix = f"A model of {count:,} parameters", "Choose a smaller model (`firth models`)."
    if allocate:
        check_memory(FLOAT_BYTES * count, what, fix)
    elif FLOAT_BYTES * count > MAX_MODEL_BYTES:
        raise UserError(f"{what} takes {format_bytes(FLOAT_BYTES * count)}, more than any machine has. {fix}")


def _heads_at_least(config: ModelConfig) -> int:
    """About how many numbers the head, extras and sinusoidal positions have: whatever a config can make large."""
    if isinstance(config.head, MultiTaskHead):
        return sum(_heads_at_least(replace(config, head=own.head)) for own in config.head.heads)
    head, total = config.head, 0
    if isinstance(head, LMHead):
        total += _lm_head(config, head)
    if isinstance(head, TaskHeadBase):
        num_outputs, inputs = len(getattr(head, "names", "1")), getattr(head, "num_marked", 1) * config.head_input_dim
        total += _linear(inputs, head.pooler_dim or config.dim) if head.has_pooler else _linear(inputs, num_outputs)
        total += (head.pooler_dim or 0) * num_outputs + num_outputs**2 * getattr(head, "crf", False)
    for extra in config.extras:
        if isinstance(extra, SpanBoundaryHead | MaskDecoder):
            total += config.dim * (extra.max_span_length if isinstance(extra, SpanBoundaryHead) else extra.length)
        elif isinstance(extra, FeatureEncoderConfig):
            total += 2 * _lstm(config.dim + extra.word_dim, extra.bilstm_hidden_size)
            total += config.vocab_size * extra.word_dim
    if isinstance(config.position, SinusoidalPosition):
        total += 4 * config.position.length * config.input_width  # it is computed in float64
    return total


def _count_built(config: ModelConfig) -> int:
    """Count a model with a task head, or with a module that no preset has, by building it."""
    import torch

    from firth.models.model import make_model

    with torch.device("meta"):
        return make_model(config).num_parameters


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _norm(config: ModelConfig, dim: int) -> int:
    has_bias = isinstance(config.norm, NoNormConfig) or (isinstance(config.norm, LayerNormConfig) and config.norm.bias)
    return dim * (2 if has_bias else 1)


def _embeddings(config: ModelConfig) -> int:
    if isinstance(config.recurrent, ELMoConfig):
        return _char_cnn(config.recurrent)
    tokens = (config.vocab_size + config.num_bigram_buckets) * config.embed_width
    positions = _positions(config)
    if config.embed_trigrams:
        return tokens + positions + _linear(3 * config.embed_width, config.dim)
    return tokens + positions + (0 if config.embed_dim is None else _linear(config.embed_width, config.dim))


def _positions(config: ModelConfig) -> int:
    """Position, segment and language embeddings, and their norm."""
    rows = config.num_position_embeddings + config.num_segments + config.num_languages
    return rows * config.input_width + (_norm(config, config.input_width) if config.embed_norm else 0)


def _stacks(config: ModelConfig) -> int:
    if config.recurrent is not None:
        return _recurrent(config)
    if not config.has_decoder:
        return _stack(config, config.num_layers)
    decoder = _positions(config) + _stack(config, config.decoder_layers, has_cross_attention=True)
    if config.share_stacks:
        decoder -= -(-config.decoder_layers // config.num_shared) * _block(config)
    return _stack(config, config.num_layers) + decoder


def _stack(config: ModelConfig, num_layers: int, has_cross_attention: bool = False) -> int:
    num_blocks = -(-num_layers // config.num_shared)
    block = _block(config) if config.bottleneck is None else _bottleneck_block(config, config.bottleneck)
    if has_cross_attention:
        block += _attention(config) + _norm(config, config.dim)
    total = num_blocks * block
    if num_blocks and config.skip_first_norm and config.bottleneck is None:
        total -= _norm(config, config.dim)
    if config.norm_first:
        total += _norm(config, config.dim)
    total += num_blocks * _norm(config, config.dim) * (2 + has_cross_attention) * config.norm_outputs
    total += num_blocks * config.num_heads * config.dim * config.attention_gate
    total += max(num_blocks - 1, 0) * (2 * config.value_residual) + max(num_blocks - 1, 0) // 2 * config.unet_skips
    if isinstance(config.position, T5Bias):
        total += config.position.num_buckets * config.num_heads
    if isinstance(config.position, Disentangled):
        spec = config.position
        total += 2 * (spec.num_buckets or spec.max_distance) * config.dim
        total += 2 * config.dim if spec.norm_embeddings else 0
    if config.convolution is not None:
        total += _linear(config.convolution.kernel_size * config.dim, config.dim) + 2 * config.dim
    return total


def _block(config: ModelConfig) -> int:
    scores = _relative_scores(config)
    return _attention(config) + scores + _mlp(config, config.dim) + 2 * _norm(config, config.dim)


def _attention(config: ModelConfig) -> int:
    inner, read = config.num_heads * config.head_size, config.kv_heads * config.head_size
    qkv = _linear(config.dim, inner + 2 * read, config.has_key_bias)
    if config.has_query_bias and not config.has_key_bias:
        qkv += inner + read
    return qkv + _linear(inner, config.dim, config.has_query_bias)


def _relative_scores(config: ModelConfig) -> int:
    """Parameters by which a layer scores distances."""
    spec, inner = config.position, config.num_heads * config.head_size
    if isinstance(spec, TransformerXL):
        return config.dim * inner + inner * (5 if spec.relative_segments else 2)
    if isinstance(spec, Disentangled) and not spec.share_projections:
        return sum(_linear(config.dim, inner, bias) for bias in (config.has_query_bias, config.has_key_bias))
    return (2 * spec.max_distance + 1) * config.head_size if isinstance(spec, Shaw) else 0


def _mlp(config: ModelConfig, dim: int) -> int:
    gates = 2 if config.mlp.gated else 1
    return _linear(dim, gates * config.mlp.dim, config.bias) + _linear(config.mlp.dim, dim, config.bias)


def _bottleneck_block(config: ModelConfig, spec: BottleneckConfig) -> int:
    inner, norm = config.num_heads * config.head_size, _norm(config, spec.dim)
    num_inputs = 2 if spec.attention_input == "shared-qk" else 1
    inputs = num_inputs * (_linear(config.dim, spec.dim, config.bias) + norm)
    qk, value = (
        config.dim if wide else spec.dim for wide in (spec.attention_input == "wide", spec.attention_input != "narrow")
    )
    attention = sum(
        _linear(a, b, bias)
        for a, b, bias in (
            (qk, inner, config.has_query_bias),
            (qk, inner, config.has_key_bias),
            (value, inner, config.has_query_bias),
            (inner, spec.dim, config.has_query_bias),
        )
    )
    mlps = spec.num_mlps * (_mlp(config, spec.dim) + norm)
    output = _linear(spec.dim, config.dim, config.bias) + _norm(config, config.dim)
    return inputs + attention + norm + mlps + output


def _lm_head(config: ModelConfig, spec: LMHead) -> int:
    width = lm_head_width(config, spec)
    total = 0
    if spec.transform:
        total += _linear(config.dim, width, config.bias)
        total += width if isinstance(config.norm, RMSNormConfig) else 2 * width
        if isinstance(config.norm, LayerNormConfig) and not config.norm.bias:
            total -= width
    if not spec.tied:
        total += config.vocab_size * width
    if spec.extends_embeddings:
        total += config.vocab_size * (width - config.embed_width)
    return total + (config.vocab_size if spec.bias else 0)


def _lstm(inputs: int, hidden_size: int, proj_size: int = 0) -> int:
    """One direction: four gates with two biases each, as torch's LSTM has them, and a projection of the state."""
    state = proj_size or hidden_size
    return 4 * hidden_size * (inputs + state + 2) + hidden_size * proj_size


def _char_cnn(spec: ELMoConfig) -> int:
    features = sum(num for _, num in spec.filters)
    filters = sum(_linear(spec.char_dim * width, num) for width, num in spec.filters)
    highways = 2 * spec.num_highways * _linear(features, features)
    return NUM_CHAR_IDS * spec.char_dim + filters + highways + _linear(features, spec.proj_size)


def _recurrent(config: ModelConfig) -> int:
    spec, n, dim = config.recurrent, config.num_layers, config.dim
    if isinstance(spec, AWDLSTMConfig):
        return sum(_lstm(a, b) for a, b in pairwise([dim, *[spec.hidden_size] * (n - 1), dim]))
    if isinstance(spec, ELMoConfig):
        return 2 * n * _lstm(spec.proj_size, spec.hidden_size, spec.proj_size)
    assert isinstance(spec, BiLSTMConfig | Seq2SeqConfig)
    both = 2 * spec.hidden_size
    encoder = 2 * sum(_lstm(width, spec.hidden_size) for width in [dim, *[both] * (n - 1)])
    if isinstance(spec, BiLSTMConfig):
        return encoder
    layers = config.decoder_layers
    decoder = _positions(config) + layers * (2 * _linear(both, dim) + _lstm(dim, dim))
    if spec.attention and layers:  # the first layer reads the context of Bahdanau's attention too
        decoder += 4 * dim * both + _linear(dim, dim) + both * dim + dim
    return encoder + decoder
