"""DistilBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from firth.models.config import (
    ClassificationHead,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.bert import BERT_DEFAULT, bert_embedding_rules
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import ACTIVATION, Setting, SettingsTable, sizes

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
    yield from bert_embedding_rules(config, "distilbert.embeddings")
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


# Sinusoids, where a config names them (`sinusoidal_pos_embds`), are only the first values of a learned table.
DISTILBERT_SETTINGS = SettingsTable(
    replace(BERT_DEFAULT, family="distilbert", num_layers=6, num_segments=0),
    (
        *sizes("dim", "n_layers", "n_heads"),
        Setting("mlp.dim", "hidden_dim"),
        Setting("mlp.activation", "activation", ACTIVATION),
        Setting("position.length", "max_position_embeddings"),
        Setting("init.std", "initializer_range"),
        Setting("dropout", "dropout"),
        Setting("attention_dropout", "attention_dropout"),
    ),
)
DISTILBERT_LAYOUT = HFLayout(
    "distilbert",
    distilbert_rules,
    DISTILBERT_SETTINGS,
    lm_architecture="DistilBertForMaskedLM",
    task_architectures=DISTILBERT_TASK_ARCHITECTURES,
    prefix="distilbert.",
    fixed_settings={"tie_word_embeddings": True},
    aliases={"distilbert.embeddings.word_embeddings.weight": ("vocab_projector.weight",)},
    unused_patterns=("distilbert.embeddings.position_ids",),
)
