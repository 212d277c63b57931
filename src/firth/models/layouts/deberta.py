"""DeBERTa, version 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.errors import UserError
from firth.models.config import MLP, Choices, Classes, Disentangled, LayerNorm, LMHead, ModelConfig, Normal, Span, Tags
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    activation,
    linear,
    their_activation,
)

POOLED: Any = dict(pooled=True, activation="gelu")
SETTINGS = {"activation": "pooler_hidden_act", "dropout": "cls_dropout"}


def answers(name: str) -> tuple[Answers, ...]:
    pooler, out = "pooler.dense", "classifier"
    return (
        Answers(f"{name}ForSequenceClassification", Classes((), **POOLED), out, pooler, settings=SETTINGS),
        Answers(f"{name}ForMultipleChoice", Choices(**POOLED), out, pooler, settings=SETTINGS),
        Answers(f"{name}ForTokenClassification", Tags(()), out),
        Answers(f"{name}ForQuestionAnswering", Span(dropout=0.0), "qa_outputs"),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}.attention", f"deberta.encoder.layer.{i}.attention.self"
        yield Rule(f"{ours}.qkv.weight", (f"{theirs}.in_proj.weight",), woven=config.num_heads)
        yield Rule(f"{ours}.qv_bias", (f"{theirs}.q_bias", f"{theirs}.v_bias"))
        yield from linear(f"{ours}.score.ask", f"{theirs}.pos_q_proj")
        yield from linear(f"{ours}.score.read", f"{theirs}.pos_proj", bias=False)


def outer_rules(config: ModelConfig) -> Iterator[Rule]:
    """All but the inside of attention, which every version has alike."""
    embeddings, encoder = "deberta.embeddings", "deberta.encoder"
    yield Rule("embed.tokens.weight", (f"{embeddings}.word_embeddings.weight",))
    if config.num_places:
        yield Rule("embed.places.weight", (f"{embeddings}.position_embeddings.weight",))
    if config.num_segments:
        yield Rule("embed.segments.weight", (f"{embeddings}.token_type_embeddings.weight",))
    yield from linear("embed.norm", f"{embeddings}.LayerNorm")
    yield Rule("stack.shared.table.weight", (f"{encoder}.rel_embeddings.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"{encoder}.layer.{i}"
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "cls.predictions.transform.dense")
        yield from linear("head.norm", "cls.predictions.transform.LayerNorm")
        yield Rule("head.bias", ("cls.predictions.bias",))


def read(hf: Settings, **changes: Any) -> ModelConfig:
    """`changes` are what version 2 has otherwise."""
    check_attention(hf)
    fields: dict[str, Any] = dict(
        family="deberta",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 50265),
        dim=hf.get("hidden_size", 768),
        num_layers=hf.get("num_hidden_layers", 12),
        num_heads=hf.get("num_attention_heads", 12),
        mlp=MLP(hf.get("intermediate_size", 3072), activation(hf.get("hidden_act", "gelu"))),
        position=read_position(hf),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-7)),
        head=LMHead(transform=True, bias=True),
        init=Normal(hf.get("initializer_range", 0.02)),
        embed_norm=True,
        attention_bias="no-key",
        num_segments=hf.get("type_vocab_size", 0),
        dropout=hf.get("hidden_dropout_prob", 0.1),
        attention_dropout=hf.get("attention_probs_dropout_prob", 0.1),
    )
    return ModelConfig(**fields | changes)


def check_attention(hf: Settings) -> None:
    """Refuse what is not disentangled in both ways."""
    kinds = hf.get("pos_att_type") or []
    kinds = kinds.lower().split("|") if isinstance(kinds, str) else kinds
    if not hf.get("relative_attention") or {kind.strip() for kind in kinds} != {"c2p", "p2c"}:
        raise UserError("config.json: Firth knows DeBERTa only with relative_attention and pos_att_type c2p and p2c.")
    if hf.get("embedding_size", hf.get("hidden_size")) != hf.get("hidden_size"):
        raise UserError("config.json: Firth knows DeBERTa only with an embedding_size that is its hidden_size.")


def read_position(hf: Settings) -> Disentangled:
    length, far = hf.get("max_position_embeddings", 512), hf.get("max_relative_positions", -1)
    return Disentangled(length if far < 1 else far, length, hf.get("position_biased_input", True))


def write(c: ModelConfig) -> Settings:
    position = c.position
    if not isinstance(position, Disentangled):
        raise UserError("transformers has no DeBERTa with other places.")
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp.dim,
        "hidden_act": their_activation(c),
        "layer_norm_eps": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "type_vocab_size": c.num_segments,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_position_embeddings": position.length,
        "max_relative_positions": position.far,
        "position_biased_input": position.absolute,
        "pooler_hidden_size": c.dim,
        "pooler_hidden_act": POOLED["activation"],
        "legacy": True,
    }


FIXED: Settings = {"talking_head": False, "pooler_dropout": 0, "tie_word_embeddings": True}
TWINS = {
    "deberta.embeddings.word_embeddings.weight": ("cls.predictions.decoder.weight",),
    "cls.predictions.bias": ("cls.predictions.decoder.bias", "lm_predictions.lm_head.bias"),
    "cls.predictions.transform.dense.weight": ("lm_predictions.lm_head.dense.weight",),
    "cls.predictions.transform.dense.bias": ("lm_predictions.lm_head.dense.bias",),
    "cls.predictions.transform.LayerNorm.weight": ("lm_predictions.lm_head.LayerNorm.weight",),
    "cls.predictions.transform.LayerNorm.bias": ("lm_predictions.lm_head.LayerNorm.bias",),
}
UNUSED = (
    "deberta.embeddings.position_ids",
    "deberta.embeddings.position_embeddings.weight",
    "pooler.*",
    "classifier.*",
    "mask_predictions.*",
    "lm_predictions.*",
    "cls.*",
)
DEBERTA = Layout(
    "deberta",
    rules,
    read,
    write,
    lm="DebertaForMaskedLM",
    answers=tuple(one for one in answers("Deberta") if not isinstance(one.head, Choices)),  # version 1 has none
    prefix="deberta.",
    fixed=FIXED,
    twins=TWINS,
    unused=UNUSED,
)
