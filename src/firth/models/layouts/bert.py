"""BERT, and what SpanBERT, UniLM and LaBSE are written as."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models.config import MLP, Choices, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal, Span, Tags
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

DROPOUT = {"dropout": "classifier_dropout"}
ALBERTS_DROPOUT = {"dropout": "classifier_dropout_prob"}  # in ALBERT and RemBERT, whose bodies have none


def word_answers(name: str, dropout: float | None = None, settings: dict[str, str] = DROPOUT) -> tuple[Answers, ...]:
    """The heads over all places, which BERT and its relatives have alike."""
    return (
        Answers(f"{name}ForTokenClassification", Tags((), dropout=dropout), "classifier", settings=settings),
        Answers(f"{name}ForQuestionAnswering", Span(dropout=0.0), "qa_outputs"),
    )


def answers(
    name: str, pooler: str, dropout: float | None = None, settings: dict[str, str] = DROPOUT
) -> tuple[Answers, ...]:
    """The heads of BERT and of those that name theirs alike."""
    classes, choices = Classes((), pooled=True, dropout=dropout), Choices(pooled=True, dropout=dropout)
    return (
        Answers(f"{name}ForSequenceClassification", classes, "classifier", pooler, settings=settings),
        Answers(f"{name}ForMultipleChoice", choices, "classifier", pooler, settings=settings),
        *word_answers(name, dropout, settings),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from embedding_rules(config, "bert.embeddings")
    yield from block_rules(config, "bert.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "cls.predictions.transform.dense")
        yield from linear("head.norm", "cls.predictions.transform.LayerNorm")
        yield Rule("head.bias", ("cls.predictions.bias",))
    if config.extra("pair") is not None:
        yield from linear("extras.pair.pooler", "bert.pooler.dense")
        yield from linear("extras.pair.out", "cls.seq_relationship")


def embedding_rules(config: ModelConfig, theirs: str) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", (f"{theirs}.word_embeddings.weight",))
    yield Rule("embed.places.weight", (f"{theirs}.position_embeddings.weight",))
    if config.num_segments:
        yield Rule("embed.segments.weight", (f"{theirs}.token_type_embeddings.weight",))
    yield from linear("embed.norm", f"{theirs}.LayerNorm")


def block_rules(config: ModelConfig, layers: str) -> Iterator[Rule]:
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"{layers}.{i}"
        self_ = f"{theirs}.attention.self"
        yield from qkv(config, f"{ours}.attention.qkv", f"{self_}.query", f"{self_}.key", f"{self_}.value")
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")


def read(hf: Settings, **changes: Any) -> ModelConfig:
    """`changes` are what the relatives of BERT have otherwise."""
    fields: dict[str, Any] = dict(
        family="bert",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 30522),
        dim=hf.get("hidden_size", 768),
        num_layers=hf.get("num_hidden_layers", 12),
        num_heads=hf.get("num_attention_heads", 12),
        mlp=MLP(hf.get("intermediate_size", 3072), activation(hf.get("hidden_act", "gelu"))),
        position=Learned(hf.get("max_position_embeddings", 512)),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-12)),
        head=LMHead(transform=True, bias=True),
        init=Normal(hf.get("initializer_range", 0.02)),
        embed_norm=True,
        num_segments=hf.get("type_vocab_size") or 2,  # `transformers` has no BERT without segments
        dropout=hf.get("hidden_dropout_prob", 0.1),
        attention_dropout=hf.get("attention_probs_dropout_prob", 0.1),
    )
    return ModelConfig(**fields | changes)


def write(c: ModelConfig) -> Settings:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp.dim,
        "hidden_act": their_activation(c),
        "max_position_embeddings": getattr(c.position, "length", None),
        "layer_norm_eps": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "type_vocab_size": c.num_segments,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
    }


FIXED: Settings = {"is_decoder": False, "position_embedding_type": "absolute", "tie_word_embeddings": True}
BERT = Layout(
    "bert",
    rules,
    read,
    write,
    lm="BertForMaskedLM",
    answers=answers("Bert", "bert.pooler.dense"),
    pooler="bert.pooler.dense",
    pair="BertForPreTraining",
    prefix="bert.",
    fixed=FIXED,
    twins={
        "bert.embeddings.word_embeddings.weight": ("cls.predictions.decoder.weight",),
        "cls.predictions.bias": ("cls.predictions.decoder.bias",),
    },
    unused=("bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*"),
)
