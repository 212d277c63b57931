"""DistilBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models.config import MLP, Choices, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal, Span, Tags
from firth.models.layouts import bert
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    activation,
    linear,
    qkv,
    their_activation,
)

DROPOUT = {"dropout": "seq_classif_dropout"}
POOLED: Any = dict(pooled=True, activation="relu", dropout=0.2)
ANSWERS = (
    Answers(
        "DistilBertForSequenceClassification", Classes((), **POOLED), "classifier", "pre_classifier", settings=DROPOUT
    ),
    Answers("DistilBertForMultipleChoice", Choices(**POOLED), "classifier", "pre_classifier", settings=DROPOUT),
    Answers("DistilBertForTokenClassification", Tags(()), "classifier"),
    Answers("DistilBertForQuestionAnswering", Span(dropout=0.1), "qa_outputs", settings={"dropout": "qa_dropout"}),
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.embedding_rules(config, "distilbert.embeddings")
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"distilbert.transformer.layer.{i}"
        at = f"{theirs}.attention"
        yield from qkv(config, f"{ours}.attention.qkv", f"{at}.q_lin", f"{at}.k_lin", f"{at}.v_lin")
        yield from linear(f"{ours}.attention.out", f"{at}.out_lin")
        yield from linear(f"{ours}.attention_norm", f"{theirs}.sa_layer_norm")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.ffn.lin1")
        yield from linear(f"{ours}.mlp.down", f"{theirs}.ffn.lin2")
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.output_layer_norm")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "vocab_transform")
        yield from linear("head.norm", "vocab_layer_norm")
        yield Rule("head.bias", ("vocab_projector.bias",))


def read(hf: Settings) -> ModelConfig:
    """Sinusoids, where a config names them, are only what its table of places began with."""
    return ModelConfig(
        family="distilbert",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 30522),
        dim=hf.get("dim", 768),
        num_layers=hf.get("n_layers", 6),
        num_heads=hf.get("n_heads", 12),
        mlp=MLP(hf.get("hidden_dim", 3072), activation(hf.get("activation", "gelu"))),
        position=Learned(hf.get("max_position_embeddings", 512)),
        norm=LayerNorm(1e-12),
        head=LMHead(transform=True, bias=True),
        init=Normal(hf.get("initializer_range", 0.02)),
        embed_norm=True,
        dropout=hf.get("dropout", 0.1),
        attention_dropout=hf.get("attention_dropout", 0.1),
    )


def write(c: ModelConfig) -> Settings:
    return {
        "vocab_size": c.vocab_size,
        "dim": c.dim,
        "n_layers": c.num_layers,
        "n_heads": c.num_heads,
        "hidden_dim": c.mlp.dim,
        "activation": their_activation(c),
        "max_position_embeddings": getattr(c.position, "length", None),
        "initializer_range": getattr(c.init, "std", None),
        "dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
    }


DISTILBERT = Layout(
    "distilbert",
    rules,
    read,
    write,
    lm="DistilBertForMaskedLM",
    answers=ANSWERS,
    prefix="distilbert.",
    fixed={"tie_word_embeddings": True},
    twins={"distilbert.embeddings.word_embeddings.weight": ("vocab_projector.weight",)},
    unused=("distilbert.embeddings.position_ids",),
)
