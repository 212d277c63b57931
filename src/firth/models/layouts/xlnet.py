"""XLNet, without and with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.models.config import (
    MLP,
    Choices,
    Classes,
    LayerNorm,
    LMHead,
    ModelConfig,
    Normal,
    Query,
    Span,
    Tags,
    TransformerXL,
)
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    activation,
    linear,
    their_activation,
)

POOLED: Any = dict(pooled=True, pool="last", dropout=0.1)
SUMMARY, OUT, DROPOUT = "sequence_summary.summary", "logits_proj", {"dropout": "summary_last_dropout"}
ANSWERS = (
    Answers("XLNetForSequenceClassification", Classes((), **POOLED), OUT, SUMMARY, settings=DROPOUT),
    Answers("XLNetForMultipleChoice", Choices(**POOLED), OUT, SUMMARY, settings=DROPOUT),
    Answers("XLNetForTokenClassification", Tags((), dropout=0.0), "classifier"),
    Answers("XLNetForQuestionAnsweringSimple", Span(dropout=0.0), "qa_outputs"),
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("transformer.word_embedding.weight",))
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"transformer.layer.{i}"
        yield from attention_rules(f"{ours}.attention", f"{theirs}.rel_attn", config.num_heads)
        yield from linear(f"{ours}.attention_norm", f"{theirs}.rel_attn.layer_norm")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.ff.layer_1")
        yield from linear(f"{ours}.mlp.down", f"{theirs}.ff.layer_2")
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.ff.layer_norm")
    if config.extra("query") is not None:
        yield Rule("extras.query.vector", ("transformer.mask_emb",))
    if isinstance(config.head, LMHead):
        yield Rule("head.bias", ("lm_loss.bias",))


def attention_rules(ours: str, theirs: str, num_heads: int) -> Iterator[Rule]:
    """Their matrices are (D, H, d), from the width of the model to heads, the one back from heads too."""
    yield Rule(f"{ours}.qkv.weight", (f"{theirs}.q", f"{theirs}.k", f"{theirs}.v"), turned=True, heads=num_heads)
    yield Rule(f"{ours}.out.weight", (f"{theirs}.o",), heads=num_heads)
    yield Rule(f"{ours}.score.distance.weight", (f"{theirs}.r",), turned=True, heads=num_heads)
    yield Rule(f"{ours}.score.key_bias", (f"{theirs}.r_w_bias",))
    yield Rule(f"{ours}.score.distance_bias", (f"{theirs}.r_r_bias",))
    yield Rule(f"{ours}.score.segment_bias", (f"{theirs}.r_s_bias",))
    yield Rule(f"{ours}.score.segments", (f"{theirs}.seg_embed",))


def read(hf: Settings) -> ModelConfig:
    return ModelConfig(
        family="xlnet",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 32000),
        dim=hf.get("d_model", 1024),
        num_layers=hf.get("n_layer", 24),
        num_heads=hf.get("n_head", 16),
        mlp=MLP(hf.get("d_inner", 4096), activation(hf.get("ff_activation", "gelu")), dropout=None),
        position=TransformerXL(segments=True),
        norm=LayerNorm(hf.get("layer_norm_eps", 1e-12)),
        head=LMHead(bias=True),
        init=Normal(hf.get("initializer_range", 0.02)),
        attention_bias="none",
        dropout=hf.get("dropout", 0.1),
        attention_dropout=hf.get("dropout", 0.1),
        extras=(Query(),),
    )


def write(c: ModelConfig) -> Settings:
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.dim,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "d_inner": c.mlp.dim,
        "ff_activation": their_activation(c),
        "layer_norm_eps": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "dropout": c.dropout,
        "mem_len": None,
    }


XLNET = Layout(
    "xlnet",
    rules,
    read,
    write,
    lm="XLNetLMHeadModel",
    answers=ANSWERS,
    prefix="transformer.",
    fixed={
        "attn_type": "bi",
        "bi_data": False,
        "clamp_len": -1,
        "same_length": False,
        "untie_r": True,
        "summary_type": "last",
        "summary_use_proj": True,
        "summary_activation": "tanh",
        "tie_word_embeddings": True,
    },
    twins={"transformer.word_embedding.weight": ("lm_loss.weight",)},
    unused=("transformer.mask_emb", "lm_loss.bias"),
)
