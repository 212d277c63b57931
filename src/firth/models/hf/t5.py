"""T5, 1.0 and 1.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from firth.core.errors import UserError
from firth.models import presets
from firth.models.config import ClassificationHead, LMHead, ModelConfig, SpanHead, TokenClassificationHead
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, Tensors, linear_rules, qkv_rules
from firth.models.hf.settings import (
    ACTIVATION_TO_HF,
    Converter,
    HFConfigDict,
    Setting,
    SettingsTable,
    activation_from_hf,
    sizes,
)


def t5_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("shared.weight",))
    sides = ("encoder", config.num_layers, 1), ("decoder", config.decoder_layers, 2)
    for side, layers, last in sides if config.has_decoder else sides[:1]:
        yield TensorRule(
            f"{side}.score.table.weight", (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)
        )
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            parts = [("attention", 0, "SelfAttention")] + ([("cross", 1, "EncDecAttention")] if last == 2 else [])
            for name, index, kind in parts:
                at = f"{theirs}.{index}.{kind}"
                yield from qkv_rules(config, f"{ours}.{name}.qkv", f"{at}.q", f"{at}.k", f"{at}.v", bias=False)
                yield from linear_rules(f"{ours}.{name}.out", f"{at}.o", bias=False)
                yield from linear_rules(f"{ours}.{name}_norm", f"{theirs}.{index}.layer_norm", bias=False)
            dense = f"{theirs}.{last}.DenseReluDense"
            ups = (f"{dense}.wi_0", f"{dense}.wi_1") if config.mlp.gated else (f"{dense}.wi",)
            yield from linear_rules(f"{ours}.mlp.up", *ups, bias=False)
            yield from linear_rules(f"{ours}.mlp.down", f"{dense}.wo", bias=False)
            yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.{last}.layer_norm", bias=False)
        yield from linear_rules(f"{side}.final_norm", f"{side}.final_layer_norm", bias=False)
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield TensorRule("head.weight", ("lm_head.weight",))


T5_DEFAULT = presets.t5(6, 512, 8, 2048)


def read_t5_rest(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Return the model with `feed_forward_proj` as activation and gate, and with the scale of its head.

    "gated-gelu" is the tanh approximation, "gelu" the exact function. Only a tied head scales the hidden states.
    """
    gate, _, name = hf_config.get("feed_forward_proj", "relu").rpartition("-")
    activation: Any = "gelu-tanh" if gate and name == "gelu" else activation_from_hf(name)
    is_same = hf_config.get("is_gated_act", gate == "gated") == (gate == "gated")
    if not is_same or activation_from_hf(hf_config.get("dense_act_fn", ACTIVATION_TO_HF[activation])) != activation:
        raise UserError("config.json: feed_forward_proj says another MLP than dense_act_fn and is_gated_act.")
    assert isinstance(config.head, LMHead)
    scale = hf_config.get("scale_decoder_outputs", config.head.tied)
    return replace(
        config,
        mlp=replace(config.mlp, activation=activation, gated=gate == "gated"),
        head=replace(config.head, scale_hidden_states=scale),
    )


def write_t5_rest(config: ModelConfig) -> HFConfigDict:
    activation = ACTIVATION_TO_HF[config.mlp.activation]
    gated = "gated-gelu" if config.mlp.activation == "gelu-tanh" else f"gated-{activation}"
    return {"feed_forward_proj": gated if config.mlp.gated else activation, "is_encoder_decoder": True}


T5_SETTINGS = SettingsTable(
    T5_DEFAULT,
    (
        *sizes("d_model", "num_layers", "num_heads"),
        Setting("decoder_layers", "num_decoder_layers", Converter(from_hf=lambda n: n or None), default=None),
        Setting("head_size", "d_kv", default=64),
        Setting("mlp.dim", "d_ff"),
        Setting("position.num_buckets", "relative_attention_num_buckets"),
        Setting("position.max_distance", "relative_attention_max_distance"),
        Setting("norm.eps", "layer_norm_epsilon"),
        Setting("attention_dropout", "dropout_rate"),
        Setting("dropout", "dropout_rate"),
        Setting("head.tied", "tie_word_embeddings", Converter(from_hf=lambda tied: tied is not False)),
        Setting("head.scale_hidden_states", "scale_decoder_outputs"),
    ),
    read_t5_rest,
    write_t5_rest,
)


def detect_t5_tied_head(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """Untie the head where the file has a different one: `transformers` 5 writes every T5 head as tied."""
    tensors = read_tensors("lm_head.weight", "shared.weight")
    if len(tensors) < 2 or not isinstance(config.head, LMHead):
        return config
    lm_head, embeddings = tensors.values()
    return replace(config, head=replace(config.head, tied=lm_head.equal(embeddings)))


T5_LAYOUT = HFLayout(
    "t5",
    t5_rules,
    T5_SETTINGS,
    lm_architecture="T5ForConditionalGeneration",
    encoder_architecture="T5EncoderModel",
    task_architectures=(
        TaskArchitecture(
            "T5ForSequenceClassification",
            ClassificationHead((), pool="last", has_pooler=True, dropout=0.0, dropout_before_pooler=True),
            "classification_head.out_proj",
            "classification_head.dense",
            settings={"dropout": "classifier_dropout"},
            prefix="transformer.",
        ),
        TaskArchitecture("T5ForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs"),
        TaskArchitecture(
            "T5ForTokenClassification",
            TokenClassificationHead((), dropout=0.0),
            "classifier",
            settings={"dropout": "classifier_dropout"},
            prefix="transformer.",
        ),
    ),
    aliases={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")},
    unused_patterns=("lm_head.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    refine_config=detect_t5_tied_head,
)
