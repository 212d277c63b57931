"""XLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    LearnedPosition,
    LMHead,
    ModelConfig,
    NormalInit,
    SinusoidalPosition,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import Converter, HFConfigDict, Setting, SettingsTable, sizes

XLM_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "XLMForSequenceClassification",
        ClassificationHead((), bias=True, dropout=0.1),
        "sequence_summary.summary",
        settings={"dropout": "summary_first_dropout"},
    ),
    TaskArchitecture("XLMForTokenClassification", TokenClassificationHead(()), "classifier"),
    TaskArchitecture("XLMForQuestionAnsweringSimple", SpanHead(dropout=0.0), "qa_outputs"),
)


def xlm_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", ("transformer.embeddings.weight",))
    position_name = (
        "embed.sinusoids" if isinstance(config.position, SinusoidalPosition) else "embed.position_embeddings.weight"
    )
    yield TensorRule(position_name, ("transformer.position_embeddings.weight",))
    if config.num_languages:
        yield TensorRule("embed.languages.weight", ("transformer.lang_embeddings.weight",))
    yield from linear_rules("embed.norm", "transformer.layer_norm_emb")
    for i in range(config.num_layers):
        ours, attention = f"stack.blocks.{i}", f"transformer.attentions.{i}"
        yield from qkv_rules(
            config, f"{ours}.attention.qkv", f"{attention}.q_lin", f"{attention}.k_lin", f"{attention}.v_lin"
        )
        yield from linear_rules(f"{ours}.attention.out", f"{attention}.out_lin")
        yield from linear_rules(f"{ours}.attention_norm", f"transformer.layer_norm1.{i}")
        yield from linear_rules(f"{ours}.mlp.up", f"transformer.ffns.{i}.lin1")
        yield from linear_rules(f"{ours}.mlp.down", f"transformer.ffns.{i}.lin2")
        yield from linear_rules(f"{ours}.mlp_norm", f"transformer.layer_norm2.{i}")
    if isinstance(config.head, LMHead):
        yield TensorRule("head.bias", ("pred_layer.proj.bias",))


def read_xlm_rest(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Return the model with its positions, languages (embeddings only for several) and spread of the embeddings."""
    length = hf_config.get("max_position_embeddings", 512)
    languages = hf_config.get("n_langs", 1) if hf_config.get("use_lang_emb", True) else 1
    std, embed_std = hf_config.get("init_std", 0.02), hf_config.get("embed_init_std", 2048**-0.5)
    return replace(
        config,
        vocab_size=hf_config.get("vocab_size") or hf_config.get("n_words", 30145),  # the name in old files
        mlp=replace(config.mlp, dim=4 * config.dim),
        position=SinusoidalPosition(length) if hf_config.get("sinusoidal_embeddings") else LearnedPosition(length),
        init=NormalInit(std, embed_std=None if embed_std == std else embed_std),
        num_languages=languages if languages > 1 else 0,
    )


def write_xlm_rest(config: ModelConfig) -> HFConfigDict:
    std = getattr(config.init, "std", None)
    return {
        "sinusoidal_embeddings": isinstance(config.position, SinusoidalPosition),
        "max_position_embeddings": config.max_length,
        "init_std": std,
        "embed_init_std": getattr(config.init, "embed_std", None) or std,
        "n_langs": max(config.num_languages, 1),
        "use_lang_emb": config.num_languages > 0,
    }


XLM_DEFAULT = presets.xlm(12, 2048, 16, 30145)
XLM_ACTIVATION = Converter(lambda gelu: "gelu" if gelu else "relu", {"gelu": True, "relu": False}.__getitem__)
XLM_SETTINGS = SettingsTable(
    XLM_DEFAULT,
    (
        *sizes("emb_dim", "n_layers", "n_heads"),
        Setting("mlp.activation", "gelu_activation", XLM_ACTIVATION),
        Setting("norm.eps", "layer_norm_eps"),
        Setting("dropout", "dropout"),
        Setting("attention_dropout", "attention_dropout"),
    ),
    read_xlm_rest,
    write_xlm_rest,
)
XLM_LAYOUT = HFLayout(
    "xlm",
    xlm_rules,
    XLM_SETTINGS,
    lm_architecture="XLMWithLMHeadModel",
    task_architectures=XLM_TASK_ARCHITECTURES,
    prefix="transformer.",
    fixed_settings={
        "causal": False,
        "is_encoder": True,
        "asm": False,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": None,
        "summary_proj_to_labels": True,
        "tie_word_embeddings": True,
    },
    aliases={"transformer.embeddings.weight": ("pred_layer.proj.weight",)},
    unused_patterns=("transformer.position_ids",),
)
