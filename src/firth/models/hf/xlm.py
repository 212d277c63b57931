"""XLM."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    NormalInit,
    SinusoidalPosition,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFConfigDict, HFLayout, TaskArchitecture, TensorRule, linear_rules, qkv_rules

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
    places = (
        "embed.sinusoids" if isinstance(config.position, SinusoidalPosition) else "embed.position_embeddings.weight"
    )
    yield TensorRule(places, ("transformer.position_embeddings.weight",))
    if config.num_languages:
        yield TensorRule("embed.languages.weight", ("transformer.lang_embeddings.weight",))
    yield from linear_rules("embed.norm", "transformer.layer_norm_emb")
    for i in range(config.num_layers):
        ours, at = f"stack.blocks.{i}", f"transformer.attentions.{i}"
        yield from qkv_rules(config, f"{ours}.attention.qkv", f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin")
        yield from linear_rules(f"{ours}.attention.out", f"{at}.out_lin")
        yield from linear_rules(f"{ours}.attention_norm", f"transformer.layer_norm1.{i}")
        yield from linear_rules(f"{ours}.mlp.up", f"transformer.ffns.{i}.lin1")
        yield from linear_rules(f"{ours}.mlp.down", f"transformer.ffns.{i}.lin2")
        yield from linear_rules(f"{ours}.mlp_norm", f"transformer.layer_norm2.{i}")
    if isinstance(config.head, LMHead):
        yield TensorRule("head.bias", ("pred_layer.proj.bias",))


def read_xlm_config(hf_config: HFConfigDict) -> ModelConfig:
    """Languages have vectors only where there are several."""
    dim, length = hf_config.get("emb_dim", 2048), hf_config.get("max_position_embeddings", 512)
    languages = hf_config.get("n_langs", 1) if hf_config.get("use_lang_emb", True) else 1
    std, embed_std = hf_config.get("init_std", 0.02), hf_config.get("embed_init_std", 2048**-0.5)
    return ModelConfig(
        family="xlm",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size") or hf_config.get("n_words", 30145),  # its old name
        dim=dim,
        num_layers=hf_config.get("n_layers", 12),
        num_heads=hf_config.get("n_heads", 16),
        mlp=MLPConfig(4 * dim, "gelu" if hf_config.get("gelu_activation", True) else "relu"),
        position=SinusoidalPosition(length) if hf_config.get("sinusoidal_embeddings") else LearnedPosition(length),
        norm=LayerNormConfig(hf_config.get("layer_norm_eps", 1e-12)),
        head=LMHead(bias=True),
        init=NormalInit(std, embed_std=None if embed_std == std else embed_std),
        embed_norm=True,
        num_languages=languages if languages > 1 else 0,
        dropout=hf_config.get("dropout", 0.1),
        attention_dropout=hf_config.get("attention_dropout", 0.1),
    )


def write_xlm_config(config: ModelConfig) -> HFConfigDict:
    if config.mlp.activation not in ("gelu", "relu"):
        raise UserError(f"transformers has no XLM with the activation {config.mlp.activation}.")
    return {
        "vocab_size": config.vocab_size,
        "emb_dim": config.dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "gelu_activation": config.mlp.activation == "gelu",
        "sinusoidal_embeddings": isinstance(config.position, SinusoidalPosition),
        "max_position_embeddings": config.max_length,
        "layer_norm_eps": config.norm.eps,
        "init_std": getattr(config.init, "std", None),
        "embed_init_std": getattr(config.init, "embed_std", None) or getattr(config.init, "std", None),
        "n_langs": max(config.num_languages, 1),
        "use_lang_emb": config.num_languages > 0,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


XLM_LAYOUT = HFLayout(
    "xlm",
    xlm_rules,
    read_xlm_config,
    write_xlm_config,
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
