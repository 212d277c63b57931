"""ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from firth.core.errors import UserError, quote
from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    Rotary,
    SlidingWindow,
    SpanHead,
    TaskHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, has_architecture, linear_rules
from firth.models.hf.settings import (
    ACTIVATION,
    ACTIVATION_FROM_HF,
    ACTIVATION_TO_HF,
    HIDDEN_SIZES,
    Converter,
    HFConfigDict,
    Setting,
    SettingsTable,
)

# that of its language model
MODERNBERT_HEAD_FIELDS: Any = dict(has_pooler=True, activation="gelu", has_norm=True, dropout=0.0)


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


def read_modernbert_rest(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Return the model with its two RoPE bases and the layers that attend globally.

    `transformers` 4 has `global_rope_theta` and `global_attn_every_n_layers`, version 5 `rope_parameters` and
    `layer_types`.
    """
    check_head_activation(hf_config)
    rope = hf_config.get("rope_parameters") or {}
    for kind in (parameters.get("rope_type", "default") for parameters in rope.values()):
        if kind != "default":
            raise UserError(f"config.json: rope_type {quote(kind)} is not supported for ModernBERT; default is.")
    theta = rope.get("full_attention", {}).get("rope_theta", hf_config.get("global_rope_theta", 160000.0))
    local_theta = rope.get("sliding_attention", {}).get("rope_theta", hf_config.get("local_rope_theta", 10000.0))
    length = hf_config.get("max_position_embeddings", 8192)
    window = SlidingWindow(hf_config.get("local_attention", 128), read_global_every(hf_config, config.num_layers))
    return replace(config, position=Rotary(float(theta), length, local_theta=float(local_theta)), window=window)


def check_head_activation(hf_config: HFConfigDict) -> None:
    """Raise a UserError for an LM head with another activation than the blocks."""
    head, blocks = (hf_config.get(f"{part}_activation", "gelu") for part in ("classifier", "hidden"))
    is_lm = has_architecture(hf_config, "ForMaskedLM")
    if is_lm and ACTIVATION_FROM_HF.get(head) != ACTIVATION_FROM_HF.get(blocks):
        raise UserError(
            "config.json: classifier_activation and hidden_activation differ. Firth supports a ModernBERT with an LM "
            "head only with equal values."
        )


def read_global_every(hf_config: HFConfigDict, num_layers: int) -> int:
    """Return n, where every n-th layer from the first attends to the whole text."""
    every, kinds = hf_config.get("global_attn_every_n_layers", 3), hf_config.get("layer_types")
    if kinds is not None:
        full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = full[1] if len(full) > 1 else max(num_layers, 1)
        if full != list(range(0, num_layers, every)):
            raise UserError("config.json: Firth supports layer_types only with full_attention in every n-th layer.")
    return int(every)


def write_modernbert_rest(config: ModelConfig) -> HFConfigDict:
    if not isinstance(config.position, Rotary) or config.window is None:
        raise UserError("transformers has ModernBERT only with Rotary positions and a sliding window.")
    return {
        "classifier_activation": ACTIVATION_TO_HF[config.mlp.activation],
        "max_position_embeddings": config.position.length,
        "global_rope_theta": config.position.theta,
        "local_rope_theta": config.position.local_theta,
        "global_attn_every_n_layers": config.window.global_every,
        "local_attention": config.window.size,
        "decoder_bias": config.head.bias if isinstance(config.head, LMHead) else True,
        "embedding_dropout": config.dropout,
        # the defaults are ids of ModernBERT's own tokenizer, which another vocabulary may not have
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    }


MODERNBERT_DEFAULT = presets.modernbert(22, 768, 12, 1152)
MODERNBERT_SETTINGS = SettingsTable(
    MODERNBERT_DEFAULT,
    (
        *HIDDEN_SIZES,
        Setting("mlp.dim", "intermediate_size"),
        Setting("mlp.activation", "hidden_activation", ACTIVATION),
        Setting("norm.eps", "norm_eps"),
        Setting("norm.bias", "norm_bias"),
        Setting("init.std", "initializer_range"),
        Setting("init.cutoff_factor", "initializer_cutoff_factor"),
        Setting("head.bias", "decoder_bias"),
        Setting("bias", "attention_bias", Converter(from_hf=bool), equal_keys=("mlp_bias", "classifier_bias")),
        Setting("dropout", "mlp_dropout"),
        Setting("attention_dropout", "attention_dropout"),
    ),
    read_modernbert_rest,
    write_modernbert_rest,
)
MODERNBERT_LAYOUT = HFLayout(
    "modernbert",
    modernbert_rules,
    MODERNBERT_SETTINGS,
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
