"""BERT; also the layout of SpanBERT, UniLM and LaBSE."""

from __future__ import annotations

from collections.abc import Iterator

from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import ACTIVATION, HIDDEN_SIZES, Converter, HFConfigDict, Setting, SettingsTable

BERT_DROPOUT_KEYS = {"dropout": "classifier_dropout"}
ALBERT_DROPOUT_KEYS = {"dropout": "classifier_dropout_prob"}  # of ALBERT and RemBERT, whose backbones have no dropout


def token_task_architectures(
    name: str, dropout: float | None = None, settings: dict[str, str] = BERT_DROPOUT_KEYS
) -> tuple[TaskArchitecture, ...]:
    """Return the token-level architectures that BERT and its relatives share."""
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
    """Return the task architectures of BERT and of families with the same names."""
    classes = ClassificationHead((), has_pooler=True, dropout=dropout)
    choices = MultipleChoiceHead(has_pooler=True, dropout=dropout)
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


BERT_DEFAULT = presets.bert(12, 768, 12)
BERT_BLOCK_SETTINGS = (
    *HIDDEN_SIZES,
    Setting("mlp.dim", "intermediate_size"),
    Setting("mlp.activation", "hidden_act", ACTIVATION),
    Setting("norm.eps", "layer_norm_eps"),
    Setting("init.std", "initializer_range"),
    Setting("dropout", "hidden_dropout_prob"),
    Setting("attention_dropout", "attention_probs_dropout_prob"),
)
BERT_SETTINGS = (
    *BERT_BLOCK_SETTINGS,
    Setting("position.length", "max_position_embeddings"),
    # `transformers` has no BERT without token types
    Setting("num_segments", "type_vocab_size", Converter(from_hf=lambda n: n or 2)),
)
BERT_FIXED_SETTINGS: HFConfigDict = {
    "is_decoder": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
BERT_LAYOUT = HFLayout(
    "bert",
    bert_rules,
    SettingsTable(BERT_DEFAULT, BERT_SETTINGS),
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
