"""ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LMHead,
    MLPConfig,
    ModelConfig,
    MultipleChoiceHead,
    NormalInit,
    Rotary,
    SlidingWindow,
    SpanHead,
    TaskHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
)

MODERNBERT_GLOBAL_THETA, MODERNBERT_LOCAL_THETA = 160000.0, 10000.0
MODERNBERT_HEAD_FIELDS: Any = dict(
    has_pooler=True, activation="gelu", has_norm=True, dropout=0.0
)  # that of its language model


def modernbert_task_architecture(suffix: str, head: TaskHead) -> TaskArchitecture:
    settings = {"activation": "classifier_activation", "dropout": "classifier_dropout"}
    settings |= {"pool": "classifier_pooling"} if hasattr(head, "pool") else {}
    return TaskArchitecture(f"ModernBertFor{suffix}", head, "classifier", "head.dense", "head.norm", settings)


def modernbert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    norm_bias = isinstance(config.norm, LayerNormConfig) and config.norm.bias
    yield TensorRule("embed.tokens.weight", ("model.embeddings.tok_embeddings.weight",))
    yield from linear_rules("embed.norm", "model.embeddings.norm", bias=norm_bias)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"model.layers.{i}"
        if i:
            yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.attn_norm", bias=norm_bias)
        yield from linear_rules(f"{ours}.attention.qkv", f"{theirs}.attn.Wqkv", bias=config.bias)
        yield from linear_rules(f"{ours}.attention.out", f"{theirs}.attn.Wo", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.mlp_norm", bias=norm_bias)
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.mlp.Wi", bias=config.bias)
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.mlp.Wo", bias=config.bias)
    yield from linear_rules("stack.final_norm", "model.final_norm", bias=norm_bias)
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "head.dense", bias=config.bias)
        yield from linear_rules("head.norm", "head.norm", bias=norm_bias)
        if config.head.bias:
            yield TensorRule("head.bias", ("decoder.bias",))


def read_modernbert_config(hf_config: HFConfigDict) -> ModelConfig:
    biases = {bool(hf_config.get(name, False)) for name in ("attention_bias", "mlp_bias", "classifier_bias")}
    if len(biases) > 1:
        raise UserError("config.json: some of ModernBERT's biases are on, some off; Firth knows it with all or none.")
    rope = hf_config.get("rope_parameters") or {}
    wide = rope.get("full_attention", {}).get("rope_theta", hf_config.get("global_rope_theta", MODERNBERT_GLOBAL_THETA))
    near = rope.get("sliding_attention", {}).get(
        "rope_theta", hf_config.get("local_rope_theta", MODERNBERT_LOCAL_THETA)
    )
    layers = hf_config.get("num_hidden_layers", 22)
    return ModelConfig(
        family="modernbert",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size", 50368),
        dim=hf_config.get("hidden_size", 768),
        num_layers=layers,
        num_heads=hf_config.get("num_attention_heads", 12),
        mlp=MLPConfig(
            hf_config.get("intermediate_size", 1152),
            activation_from_hf(hf_config.get("hidden_activation", "gelu")),
            gated=True,
        ),
        position=Rotary(float(wide), hf_config.get("max_position_embeddings", 8192), local_theta=float(near)),
        norm=LayerNormConfig(hf_config.get("norm_eps", 1e-5), bias=hf_config.get("norm_bias", False)),
        head=LMHead(transform=True, bias=hf_config.get("decoder_bias", True)),
        init=NormalInit(
            hf_config.get("initializer_range", 0.02),
            scale_residual=True,
            cutoff_factor=hf_config.get("initializer_cutoff_factor", 2.0),
        ),
        norm_first=True,
        embed_norm=True,
        skip_first_norm=True,
        bias=biases.pop(),
        window=SlidingWindow(hf_config.get("local_attention", 128), read_global_every(hf_config, layers)),
        dropout=hf_config.get("mlp_dropout", 0.0),
        attention_dropout=hf_config.get("attention_dropout", 0.0),
    )


def read_global_every(hf_config: HFConfigDict, layers: int) -> int:
    """In how many layers there is one that sees all."""
    kinds = hf_config.get("layer_types")
    every = hf_config.get("global_attn_every_n_layers", 3)
    if kinds is not None:
        wide = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = wide[1] if len(wide) > 1 else max(layers, 1)
        if wide != list(range(0, layers, every)):
            raise UserError("config.json: layer_types is not 'all is seen in every n-th layer', as Firth knows it.")
    return int(every)


def write_modernbert_config(config: ModelConfig) -> HFConfigDict:
    assert isinstance(config.position, Rotary)
    assert config.window is not None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp.dim,
        "hidden_activation": activation_to_hf(config),
        "classifier_activation": activation_to_hf(config),
        "max_position_embeddings": config.position.length,
        "norm_eps": config.norm.eps,
        "norm_bias": getattr(config.norm, "bias", None),
        "initializer_range": getattr(config.init, "std", None),
        "initializer_cutoff_factor": getattr(config.init, "cutoff_factor", None)
        or 2.0,  # there is no ModernBERT without
        "global_rope_theta": config.position.theta,
        "local_rope_theta": config.position.local_theta,
        "global_attn_every_n_layers": config.window.global_every,
        "local_attention": config.window.size,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "classifier_bias": config.bias,
        "decoder_bias": config.head.bias if isinstance(config.head, LMHead) else True,
        "embedding_dropout": config.dropout,
        "mlp_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        # its defaults are ids of its own tokenizer, which another vocabulary may not have
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    }


MODERNBERT_LAYOUT = HFLayout(
    "modernbert",
    modernbert_rules,
    read_modernbert_config,
    write_modernbert_config,
    lm_architecture="ModernBertForMaskedLM",
    task_architectures=(
        modernbert_task_architecture("SequenceClassification", ClassificationHead((), **MODERNBERT_HEAD_FIELDS)),
        modernbert_task_architecture("MultipleChoice", MultipleChoiceHead(**MODERNBERT_HEAD_FIELDS)),
        modernbert_task_architecture("TokenClassification", TokenClassificationHead((), **MODERNBERT_HEAD_FIELDS)),
        modernbert_task_architecture("QuestionAnswering", SpanHead(**MODERNBERT_HEAD_FIELDS)),
    ),
    prefix="model.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={"model.embeddings.tok_embeddings.weight": ("decoder.weight",)},
)
