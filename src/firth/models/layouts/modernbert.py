"""ModernBERT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.errors import UserError
from firth.models.config import (
    MLP,
    Choices,
    Classes,
    LayerNorm,
    LMHead,
    ModelConfig,
    Normal,
    Rotary,
    Span,
    Tags,
    TaskHead,
    Window,
)
from firth.models.layouts.layout import Answers, Layout, Rule, Settings, activation, linear, their_activation

GLOBAL, LOCAL = 160000.0, 10000.0
HEAD: Any = dict(pooled=True, activation="gelu", normed=True, dropout=0.0)  # that of its language model


def answers(kind: str, head: TaskHead) -> Answers:
    settings = {"activation": "classifier_activation", "dropout": "classifier_dropout"}
    settings |= {"pool": "classifier_pooling"} if hasattr(head, "pool") else {}
    return Answers(f"ModernBertFor{kind}", head, "classifier", "head.dense", "head.norm", settings)


def rules(config: ModelConfig) -> Iterator[Rule]:
    norm_bias = isinstance(config.norm, LayerNorm) and config.norm.bias
    yield Rule("embed.tokens.weight", ("model.embeddings.tok_embeddings.weight",))
    yield from linear("embed.norm", "model.embeddings.norm", bias=norm_bias)
    for i in range(config.num_layers):
        ours, theirs = f"stack.blocks.{i}", f"model.layers.{i}"
        if i:
            yield from linear(f"{ours}.attention_norm", f"{theirs}.attn_norm", bias=norm_bias)
        yield from linear(f"{ours}.attention.qkv", f"{theirs}.attn.Wqkv", bias=config.bias)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attn.Wo", bias=config.bias)
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.mlp_norm", bias=norm_bias)
        yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.Wi", bias=config.bias)
        yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.Wo", bias=config.bias)
    yield from linear("stack.final_norm", "model.final_norm", bias=norm_bias)
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "head.dense", bias=config.bias)
        yield from linear("head.norm", "head.norm", bias=norm_bias)
        if config.head.bias:
            yield Rule("head.bias", ("decoder.bias",))


def read(hf: Settings) -> ModelConfig:
    biases = {bool(hf.get(name, False)) for name in ("attention_bias", "mlp_bias", "classifier_bias")}
    if len(biases) > 1:
        raise UserError("config.json: some of ModernBERT's biases are on, some off; Firth knows it with all or none.")
    rope = hf.get("rope_parameters") or {}
    wide = rope.get("full_attention", {}).get("rope_theta", hf.get("global_rope_theta", GLOBAL))
    near = rope.get("sliding_attention", {}).get("rope_theta", hf.get("local_rope_theta", LOCAL))
    layers = hf.get("num_hidden_layers", 22)
    return ModelConfig(
        family="modernbert",
        shape="encoder",
        vocab_size=hf.get("vocab_size", 50368),
        dim=hf.get("hidden_size", 768),
        num_layers=layers,
        num_heads=hf.get("num_attention_heads", 12),
        mlp=MLP(hf.get("intermediate_size", 1152), activation(hf.get("hidden_activation", "gelu")), gated=True),
        position=Rotary(float(wide), hf.get("max_position_embeddings", 8192), local=float(near)),
        norm=LayerNorm(hf.get("norm_eps", 1e-5), bias=hf.get("norm_bias", False)),
        head=LMHead(transform=True, bias=hf.get("decoder_bias", True)),
        init=Normal(
            hf.get("initializer_range", 0.02), scale_residual=True, cut=hf.get("initializer_cutoff_factor", 2.0)
        ),
        norm_first=True,
        embed_norm=True,
        skip_first_norm=True,
        bias=biases.pop(),
        window=Window(hf.get("local_attention", 128), read_every(hf, layers)),
        dropout=hf.get("mlp_dropout", 0.0),
        attention_dropout=hf.get("attention_dropout", 0.0),
    )


def read_every(hf: Settings, layers: int) -> int:
    """In how many layers there is one that sees all."""
    kinds = hf.get("layer_types")
    every = hf.get("global_attn_every_n_layers", 3)
    if kinds is not None:
        wide = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
        every = wide[1] if len(wide) > 1 else max(layers, 1)
        if wide != list(range(0, layers, every)):
            raise UserError("config.json: layer_types is not 'all is seen in every n-th layer', as Firth knows it.")
    return int(every)


def write(c: ModelConfig) -> Settings:
    assert isinstance(c.position, Rotary)
    assert c.window is not None
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp.dim,
        "hidden_activation": their_activation(c),
        "classifier_activation": their_activation(c),
        "max_position_embeddings": c.position.length,
        "norm_eps": c.norm.eps,
        "norm_bias": getattr(c.norm, "bias", None),
        "initializer_range": getattr(c.init, "std", None),
        "initializer_cutoff_factor": getattr(c.init, "cut", None) or 2.0,  # there is no ModernBERT without
        "global_rope_theta": c.position.base,
        "local_rope_theta": c.position.local,
        "global_attn_every_n_layers": c.window.every,
        "local_attention": c.window.size,
        "attention_bias": c.bias,
        "mlp_bias": c.bias,
        "classifier_bias": c.bias,
        "decoder_bias": c.head.bias if isinstance(c.head, LMHead) else True,
        "embedding_dropout": c.dropout,
        "mlp_dropout": c.dropout,
        "attention_dropout": c.attention_dropout,
        # its defaults are ids of its own tokenizer, which another vocabulary may not have
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")),
    }


MODERNBERT = Layout(
    "modernbert",
    rules,
    read,
    write,
    lm="ModernBertForMaskedLM",
    answers=(
        answers("SequenceClassification", Classes((), **HEAD)),
        answers("MultipleChoice", Choices(**HEAD)),
        answers("TokenClassification", Tags((), **HEAD)),
        answers("QuestionAnswering", Span(**HEAD)),
    ),
    prefix="model.",
    fixed={"tie_word_embeddings": True},
    twins={"model.embeddings.tok_embeddings.weight": ("decoder.weight",)},
)
