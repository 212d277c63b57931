"""DistilBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models.config import (
    ClassificationHead,
    LayerNormConfig,
    LearnedPosition,
    LMHead,
    MLPConfig,
    ModelConfig,
    MultipleChoiceHead,
    NormalInit,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf import bert
from firth.models.hf.layout import (
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    activation_from_hf,
    activation_to_hf,
    linear_rules,
    qkv_rules,
)

DISTILBERT_DROPOUT_KEYS = {"dropout": "seq_classif_dropout"}
DISTILBERT_POOLER_FIELDS: Any = dict(has_pooler=True, activation="relu", dropout=0.2)
DISTILBERT_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "DistilBertForSequenceClassification",
        ClassificationHead((), **DISTILBERT_POOLER_FIELDS),
        "classifier",
        "pre_classifier",
        settings=DISTILBERT_DROPOUT_KEYS,
    ),
    TaskArchitecture(
        "DistilBertForMultipleChoice",
        MultipleChoiceHead(**DISTILBERT_POOLER_FIELDS),
        "classifier",
        "pre_classifier",
        settings=DISTILBERT_DROPOUT_KEYS,
    ),
    TaskArchitecture("DistilBertForTokenClassification", TokenClassificationHead(()), "classifier"),
    TaskArchitecture(
        "DistilBertForQuestionAnswering", SpanHead(dropout=0.1), "qa_outputs", settings={"dropout": "qa_dropout"}
    ),
)


def distilbert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert.bert_embedding_rules(config, "distilbert.embeddings")
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"distilbert.transformer.layer.{i}"
        at = f"{theirs}.attention"
        yield from qkv_rules(config, f"{ours}.attention.qkv", f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin")
        yield from linear_rules(f"{ours}.attention.out", f"{at}.out_lin")
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.ffn.lin1")
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.ffn.lin2")
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.output_layer_norm")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "vocab_transform")
        yield from linear_rules("head.norm", "vocab_layer_norm")
        yield TensorRule("head.bias", ("vocab_projector.bias",))


def read_distilbert_config(hf_config: HFConfigDict) -> ModelConfig:
    """Sinusoids, where a config names them, are only what its table of places began with."""
    return ModelConfig(
        family="distilbert",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size", 30522),
        dim=hf_config.get("dim", 768),
        num_layers=hf_config.get("n_layers", 6),
        num_heads=hf_config.get("n_heads", 12),
        mlp=MLPConfig(hf_config.get("hidden_dim", 3072), activation_from_hf(hf_config.get("activation", "gelu"))),
        position=LearnedPosition(hf_config.get("max_position_embeddings", 512)),
        norm=LayerNormConfig(1e-12),
        head=LMHead(transform=True, bias=True),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        embed_norm=True,
        dropout=hf_config.get("dropout", 0.1),
        attention_dropout=hf_config.get("attention_dropout", 0.1),
    )


def write_distilbert_config(config: ModelConfig) -> HFConfigDict:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.dim,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "hidden_dim": config.mlp.dim,
        "activation": activation_to_hf(config),
        "max_position_embeddings": getattr(config.position, "length", None),
        "initializer_range": getattr(config.init, "std", None),
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


DISTILBERT_LAYOUT = HFLayout(
    "distilbert",
    distilbert_rules,
    read_distilbert_config,
    write_distilbert_config,
    lm_architecture="DistilBertForMaskedLM",
    task_architectures=DISTILBERT_TASK_ARCHITECTURES,
    prefix="distilbert.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={"distilbert.embeddings.word_embeddings.weight": ("vocab_projector.weight",)},
    unused_patterns=("distilbert.embeddings.position_ids",),
)
