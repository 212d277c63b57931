"""BERT, and what SpanBERT, UniLM and LaBSE are written as."""

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

BERT_DROPOUT_KEYS = {"dropout": "classifier_dropout"}
ALBERT_DROPOUT_KEYS = {"dropout": "classifier_dropout_prob"}  # in ALBERT and RemBERT, whose bodies have none


def token_task_architectures(
    name: str, dropout: float | None = None, settings: dict[str, str] = BERT_DROPOUT_KEYS
) -> tuple[TaskArchitecture, ...]:
    """The heads over all places, which BERT and its relatives have alike."""
    return (
        TaskArchitecture(
            f"{name}ForTokenClassification",
            TokenClassificationHead((), dropout=dropout),
            "classifier",
            settings=settings,
        ),
        TaskArchitecture(f"{name}ForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs"),
    )


def bert_task_architectures(
    name: str, pooler: str, dropout: float | None = None, settings: dict[str, str] = BERT_DROPOUT_KEYS
) -> tuple[TaskArchitecture, ...]:
    """The heads of BERT and of those that name theirs alike."""
    classes, choices = (
        ClassificationHead((), has_pooler=True, dropout=dropout),
        MultipleChoiceHead(has_pooler=True, dropout=dropout),
    )
    return (
        TaskArchitecture(f"{name}ForSequenceClassification", classes, "classifier", pooler, settings=settings),
        TaskArchitecture(f"{name}ForMultipleChoice", choices, "classifier", pooler, settings=settings),
        *token_task_architectures(name, dropout, settings),
    )


def bert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "bert.embeddings")
    yield from bert_block_rules(config, "bert.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "cls.predictions.transform.dense")
        yield from linear_rules("head.norm", "cls.predictions.transform.LayerNorm")
        yield TensorRule("head.bias", ("cls.predictions.bias",))
    if config.get_extra("pair") is not None:
        yield from linear_rules("extras.pair.pooler", "bert.pooler.dense")
        yield from linear_rules("extras.pair.out", "cls.seq_relationship")


def bert_embedding_rules(config: ModelConfig, hf_prefix: str) -> Iterator[TensorRule]:
    yield TensorRule("embed.tokens.weight", (f"{hf_prefix}.word_embeddings.weight",))
    yield TensorRule("embed.position_embeddings.weight", (f"{hf_prefix}.position_embeddings.weight",))
    if config.num_segments:
        yield TensorRule("embed.segments.weight", (f"{hf_prefix}.token_type_embeddings.weight",))
    yield from linear_rules("embed.norm", f"{hf_prefix}.LayerNorm")


def bert_block_rules(config: ModelConfig, hf_prefix: str) -> Iterator[TensorRule]:
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"{hf_prefix}.{i}"
        self_ = f"{theirs}.attention.self"
        yield from qkv_rules(config, f"{ours}.attention.qkv", f"{self_}.query", f"{self_}.key", f"{self_}.value")
        yield from linear_rules(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")


def read_bert_config(hf_config: HFConfigDict, **changes: Any) -> ModelConfig:
    """`changes` are what the relatives of BERT have otherwise."""
    fields: dict[str, Any] = dict(
        family="bert",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size", 30522),
        dim=hf_config.get("hidden_size", 768),
        num_layers=hf_config.get("num_hidden_layers", 12),
        num_heads=hf_config.get("num_attention_heads", 12),
        mlp=MLPConfig(
            hf_config.get("intermediate_size", 3072), activation_from_hf(hf_config.get("hidden_act", "gelu"))
        ),
        position=LearnedPosition(hf_config.get("max_position_embeddings", 512)),
        norm=LayerNormConfig(hf_config.get("layer_norm_eps", 1e-12)),
        head=LMHead(transform=True, bias=True),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        embed_norm=True,
        num_segments=hf_config.get("type_vocab_size") or 2,  # `transformers` has no BERT without segments
        dropout=hf_config.get("hidden_dropout_prob", 0.1),
        attention_dropout=hf_config.get("attention_probs_dropout_prob", 0.1),
    )
    return ModelConfig(**fields | changes)


def write_bert_config(config: ModelConfig) -> HFConfigDict:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp.dim,
        "hidden_act": activation_to_hf(config),
        "max_position_embeddings": getattr(config.position, "length", None),
        "layer_norm_eps": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "type_vocab_size": config.num_segments,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


BERT_FIXED_SETTINGS: HFConfigDict = {
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
BERT_LAYOUT = HFLayout(
    "bert",
    bert_rules,
    read_bert_config,
    write_bert_config,
    lm_architecture="BertForMaskedLM",
    task_architectures=bert_task_architectures("Bert", "bert.pooler.dense"),
    pooler="bert.pooler.dense",
    pair_architecture="BertForPreTraining",
    prefix="bert.",
    fixed_settings=BERT_FIXED_SETTINGS,
    aliases={
        "bert.embeddings.word_embeddings.weight": ("cls.predictions.decoder.weight",),
        "cls.predictions.bias": ("cls.predictions.decoder.bias",),
    },
    unused_patterns=("bert.embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*"),
)
