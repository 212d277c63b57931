"""DeBERTa, version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    Disentangled,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.models.hf.bert import BERT_BLOCK_SETTINGS
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules
from firth.models.hf.settings import HFConfigDict, Setting, SettingsTable, set_field

DEBERTA_POOLER_FIELDS: Any = dict(has_pooler=True, activation="gelu")
DEBERTA_HEAD_KEYS = {"activation": "pooler_hidden_act", "dropout": "cls_dropout"}


def deberta_task_architectures(name: str) -> tuple[TaskArchitecture, ...]:
    pooler, out = "pooler.dense", "classifier"
    return (
        TaskArchitecture(
            f"{name}ForSequenceClassification",
            ClassificationHead((), **DEBERTA_POOLER_FIELDS),
            out,
            pooler,
            settings=DEBERTA_HEAD_KEYS,
        ),
        TaskArchitecture(
            f"{name}ForMultipleChoice",
            MultipleChoiceHead(**DEBERTA_POOLER_FIELDS),
            out,
            pooler,
            settings=DEBERTA_HEAD_KEYS,
        ),
        TaskArchitecture(f"{name}ForTokenClassification", TokenClassificationHead(()), out),
        TaskArchitecture(f"{name}ForQuestionAnswering", SpanHead(dropout=0.0), "qa_outputs"),
    )


def deberta_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from deberta_shared_rules(config)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}.attention", f"deberta.encoder.layer.{i}.attention.self"
        yield TensorRule(f"{ours}.qkv.weight", (f"{theirs}.in_proj.weight",), interleaved_heads=config.num_heads)
        yield TensorRule(f"{ours}.qv_bias", (f"{theirs}.q_bias", f"{theirs}.v_bias"))
        yield from linear_rules(f"{ours}.score.pos_query", f"{theirs}.pos_q_proj")
        yield from linear_rules(f"{ours}.score.pos_key", f"{theirs}.pos_proj", bias=False)


def deberta_shared_rules(config: ModelConfig) -> Iterator[TensorRule]:
    """Yield the rules that all versions share: everything but the inside of attention."""
    embeddings, encoder = "deberta.embeddings", "deberta.encoder"
    yield TensorRule("embed.tokens.weight", (f"{embeddings}.word_embeddings.weight",))
    if config.num_position_embeddings:
        yield TensorRule("embed.position_embeddings.weight", (f"{embeddings}.position_embeddings.weight",))
    if config.num_segments:
        yield TensorRule("embed.segments.weight", (f"{embeddings}.token_type_embeddings.weight",))
    yield from linear_rules("embed.norm", f"{embeddings}.LayerNorm")
    yield TensorRule("stack.shared.table.weight", (f"{encoder}.rel_embeddings.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"{encoder}.layer.{i}"
        yield from linear_rules(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear_rules(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "cls.predictions.transform.dense")
        yield from linear_rules("head.norm", "cls.predictions.transform.LayerNorm")
        yield TensorRule("head.bias", ("cls.predictions.bias",))


def read_deberta_rest(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Check that attention is disentangled in both directions; let `max_relative_positions` default to the length."""
    kinds = hf_config.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not hf_config.get("relative_attention") or {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise UserError(
            "config.json: Firth supports DeBERTa only with relative_attention and with pos_att_type c2p and p2c."
        )
    if hf_config.get("embedding_size", hf_config.get("hidden_size")) != hf_config.get("hidden_size"):
        raise UserError("config.json: Firth supports DeBERTa only with embedding_size equal to hidden_size.")
    position = config.position
    assert isinstance(position, Disentangled)
    return config if position.max_distance > 0 else set_field(config, "position.max_distance", position.length)


DEBERTA_DEFAULT = presets.deberta(12, 768, 12, position=Disentangled(512, 512, absolute_embeddings=True))
DEBERTA_SETTINGS = SettingsTable(
    DEBERTA_DEFAULT,
    (
        *BERT_BLOCK_SETTINGS,
        Setting("num_segments", "type_vocab_size"),
        Setting("position.length", "max_position_embeddings"),
        Setting("position.max_distance", "max_relative_positions", default=-1),
        Setting("position.absolute_embeddings", "position_biased_input"),
    ),
    read_deberta_rest,
    lambda config: {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "pooler_hidden_size": config.dim,
        "pooler_hidden_act": DEBERTA_POOLER_FIELDS["activation"],
        "legacy": True,
    },
)


DEBERTA_FIXED_SETTINGS: HFConfigDict = {"talking_head": False, "pooler_dropout": 0, "tie_word_embeddings": True}
DEBERTA_ALIASES = {
    "deberta.embeddings.word_embeddings.weight": ("cls.predictions.decoder.weight",),
    "cls.predictions.bias": ("cls.predictions.decoder.bias", "lm_predictions.lm_head.bias"),
    "cls.predictions.transform.dense.weight": ("lm_predictions.lm_head.dense.weight",),
    "cls.predictions.transform.dense.bias": ("lm_predictions.lm_head.dense.bias",),
    "cls.predictions.transform.LayerNorm.weight": ("lm_predictions.lm_head.LayerNorm.weight",),
    "cls.predictions.transform.LayerNorm.bias": ("lm_predictions.lm_head.LayerNorm.bias",),
}
DEBERTA_UNUSED_PATTERNS = (
    "deberta.embeddings.position_ids",
    "deberta.embeddings.position_embeddings.weight",
    "pooler.*",
    "classifier.*",
    "mask_predictions.*",
    "lm_predictions.*",
    "cls.*",
)
DEBERTA_LAYOUT = HFLayout(
    "deberta",
    deberta_rules,
    DEBERTA_SETTINGS,
    lm_architecture="DebertaForMaskedLM",
    task_architectures=tuple(
        one for one in deberta_task_architectures("Deberta") if not isinstance(one.head, MultipleChoiceHead)
    ),  # version 1 has no multiple choice
    prefix="deberta.",
    fixed_settings=DEBERTA_FIXED_SETTINGS,
    aliases=DEBERTA_ALIASES,
    unused_patterns=DEBERTA_UNUSED_PATTERNS,
)
