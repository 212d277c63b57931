"""GPT-2, and what GPT-3 is written as."""

from __future__ import annotations

from collections.abc import Iterator

from firth.models.config import MLP, Classes, LayerNorm, Learned, LMHead, ModelConfig, Normal, Span, Tags
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    activation,
    linear,
    their_activation,
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("transformer.wte.weight",))
    yield Rule("embed.places.weight", ("transformer.wpe.weight",))
    yield from block_rules(config)
    yield from linear("stack.final_norm", "transformer.ln_f")


def block_rules(config: ModelConfig) -> Iterator[Rule]:
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"transformer.h.{i}"
        yield from linear(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from linear(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", turned=True)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", turned=True)
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", turned=True)
        yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", turned=True)


def read(hf: Settings) -> ModelConfig:
    dim = hf.get("n_embd", 768)
    return ModelConfig(
        family="gpt2",
        shape="decoder",
        vocab_size=hf.get("vocab_size", 50257),
        dim=dim,
        num_layers=hf.get("n_layer", 12),
        num_heads=hf.get("n_head", 12),
        mlp=MLP(hf.get("n_inner") or 4 * dim, activation(hf.get("activation_function", "gelu_new"))),
        position=Learned(hf.get("n_positions", 1024)),
        norm=LayerNorm(hf.get("layer_norm_epsilon", 1e-5)),
        head=LMHead(),
        init=Normal(hf.get("initializer_range", 0.02), scale_residual=True),
        norm_first=True,
        dropout=hf.get("resid_pdrop", 0.1),
        attention_dropout=hf.get("attn_pdrop", 0.1),
    )


def write(c: ModelConfig) -> Settings:
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.dim,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_inner": c.mlp.dim,
        "activation_function": their_activation(c),
        "n_positions": getattr(c.position, "length", None),
        "layer_norm_epsilon": c.norm.eps,
        "initializer_range": getattr(c.init, "std", None),
        "embd_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "attn_pdrop": c.attention_dropout,
    }


GPT2 = Layout(
    "gpt2",
    rules,
    read,
    write,
    lm="GPT2LMHeadModel",
    answers=(
        Answers("GPT2ForSequenceClassification", Classes((), pool="last", dropout=0.0), "score"),
        Answers(
            "GPT2ForTokenClassification",
            Tags((), dropout=0.1),
            "classifier",
            settings={"dropout": "classifier_dropout"},
        ),
        Answers("GPT2ForQuestionAnswering", Span(dropout=0.0), "qa_outputs"),
    ),
    prefix="transformer.",
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
    twins={"transformer.wte.weight": ("lm_head.weight",)},
    unused=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
)
