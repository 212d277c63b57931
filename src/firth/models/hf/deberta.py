"""DeBERTa, version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.models.config import (
    ClassificationHead,
    Disentangled,
    LayerNormConfig,
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
)

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
    """All but the inside of attention, which every version has alike."""
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


def read_deberta_config(hf_config: HFConfigDict, **changes: Any) -> ModelConfig:
    """`changes` are what version 2 has otherwise."""
    check_deberta_attention(hf_config)
    fields: dict[str, Any] = dict(
        family="deberta",
        architecture="encoder",
        vocab_size=hf_config.get("vocab_size", 50265),
        dim=hf_config.get("hidden_size", 768),
        num_layers=hf_config.get("num_hidden_layers", 12),
        num_heads=hf_config.get("num_attention_heads", 12),
        mlp=MLPConfig(
            hf_config.get("intermediate_size", 3072), activation_from_hf(hf_config.get("hidden_act", "gelu"))
        ),
        position=read_deberta_position(hf_config),
        norm=LayerNormConfig(hf_config.get("layer_norm_eps", 1e-7)),
        head=LMHead(transform=True, bias=True),
        init=NormalInit(hf_config.get("initializer_range", 0.02)),
        embed_norm=True,
        attention_bias="no-key",
        num_segments=hf_config.get("type_vocab_size", 0),
        dropout=hf_config.get("hidden_dropout_prob", 0.1),
        attention_dropout=hf_config.get("attention_probs_dropout_prob", 0.1),
    )
    return ModelConfig(**fields | changes)


def check_deberta_attention(hf_config: HFConfigDict) -> None:
    """Refuse what is not disentangled in both ways."""
    kinds = hf_config.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not hf_config.get("relative_attention") or {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise UserError("config.json: Firth knows DeBERTa only with relative_attention and pos_att_type c2p and p2c.")
    if hf_config.get("embedding_size", hf_config.get("hidden_size")) != hf_config.get("hidden_size"):
        raise UserError("config.json: Firth knows DeBERTa only with an embedding_size that is its hidden_size.")


def read_deberta_position(hf_config: HFConfigDict) -> Disentangled:
    length, far = hf_config.get("max_position_embeddings", 512), hf_config.get("max_relative_positions", -1)
    return Disentangled(length if far < 1 else far, length, hf_config.get("position_biased_input", True))


def write_deberta_config(config: ModelConfig) -> HFConfigDict:
    position = config.position
    if not isinstance(position, Disentangled):
        raise UserError("transformers has no DeBERTa with other places.")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp.dim,
        "hidden_act": activation_to_hf(config),
        "layer_norm_eps": config.norm.eps,
        "initializer_range": getattr(config.init, "std", None),
        "type_vocab_size": config.num_segments,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_position_embeddings": position.length,
        "max_relative_positions": position.max_distance,
        "position_biased_input": position.absolute_embeddings,
        "pooler_hidden_size": config.dim,
        "pooler_hidden_act": DEBERTA_POOLER_FIELDS["activation"],
        "legacy": True,
    }


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
    read_deberta_config,
    write_deberta_config,
    lm_architecture="DebertaForMaskedLM",
    task_architectures=tuple(
        one for one in deberta_task_architectures("Deberta") if not isinstance(one.head, MultipleChoiceHead)
    ),  # version 1 has none
    prefix="deberta.",
    fixed_settings=DEBERTA_FIXED_SETTINGS,
    aliases=DEBERTA_ALIASES,
    unused_patterns=DEBERTA_UNUSED_PATTERNS,
)
