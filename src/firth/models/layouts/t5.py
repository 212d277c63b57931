"""T5, 1.0 and 1.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from firth.models.config import MLP, Buckets, FanIn, LMHead, ModelConfig, RMSNorm, Tags
from firth.models.layouts.layout import (
    Answers,
    Layout,
    Rule,
    Settings,
    Tensors,
    activation,
    linear,
    qkv,
    their_activation,
)


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield Rule("embed.tokens.weight", ("shared.weight",))
    sides = ("encoder", config.num_layers, 1), ("decoder", config.decoder_layers, 2)
    for side, layers, last in sides if config.has_decoder else sides[:1]:
        yield Rule(
            f"{side}.score.table.weight", (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",)
        )
        for i in range(layers):
            ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            parts = [("attention", 0, "SelfAttention")] + ([("cross", 1, "EncDecAttention")] if last == 2 else [])
            for name, place, kind in parts:
                at = f"{theirs}.{place}.{kind}"
                yield from qkv(config, f"{ours}.{name}.qkv", f"{at}.q", f"{at}.k", f"{at}.v", bias=False)
                yield from linear(f"{ours}.{name}.out", f"{at}.o", bias=False)
                yield from linear(f"{ours}.{name}_norm", f"{theirs}.{place}.layer_norm", bias=False)
            dense = f"{theirs}.{last}.DenseReluDense"
            ups = (f"{dense}.wi_0", f"{dense}.wi_1") if config.mlp.gated else (f"{dense}.wi",)
            yield from linear(f"{ours}.mlp.up", *ups, bias=False)
            yield from linear(f"{ours}.mlp.down", f"{dense}.wo", bias=False)
            yield from linear(f"{ours}.mlp_norm", f"{theirs}.{last}.layer_norm", bias=False)
        yield from linear(f"{side}.final_norm", f"{side}.final_layer_norm", bias=False)
    if isinstance(config.head, LMHead) and not config.head.tied:
        yield Rule("head.weight", ("lm_head.weight",))


def read(hf: Settings) -> ModelConfig:
    gate, _, kind = hf.get("feed_forward_proj", "relu").rpartition("-")
    dim, heads = hf.get("d_model", 512), hf.get("num_heads", 8)
    head_dim, layers = hf.get("d_kv", 64), hf.get("num_layers", 6)
    decoder_layers = hf.get("num_decoder_layers") or layers
    tied = hf.get("tie_word_embeddings") is not False
    return ModelConfig(
        family="t5",
        shape="encoder-decoder",
        vocab_size=hf.get("vocab_size", 32128),
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        mlp=MLP(
            hf.get("d_ff", 2048),
            "gelu-tanh" if gate and kind == "gelu" else activation(kind),
            gated=gate == "gated",
            dropout=None,
        ),
        position=Buckets(hf.get("relative_attention_num_buckets", 32), hf.get("relative_attention_max_distance", 128)),
        norm=RMSNorm(hf.get("layer_norm_epsilon", 1e-6)),
        head=LMHead(tied=tied, scaled=hf.get("scale_decoder_outputs", tied)),
        init=FanIn(),
        norm_first=True,
        bias=False,
        head_dim=None if head_dim * heads == dim else head_dim,
        num_decoder_layers=None if decoder_layers == layers else decoder_layers,
        dropout=hf.get("dropout_rate", 0.1),
        attention_dropout=hf.get("dropout_rate", 0.1),
    )


def write(c: ModelConfig) -> Settings:
    plain, words = their_activation(c), dict[str, bool]()
    if isinstance(c.head, LMHead):
        words = {"tie_word_embeddings": c.head.tied, "scale_decoder_outputs": c.head.scaled}
    gated = "gated-gelu" if c.mlp.activation == "gelu-tanh" else f"gated-{plain}"
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.dim,
        "d_kv": c.head_size,
        "d_ff": c.mlp.dim,
        "num_layers": c.num_layers,
        "num_decoder_layers": c.decoder_layers,
        "num_heads": c.num_heads,
        "feed_forward_proj": gated if c.mlp.gated else plain,
        "relative_attention_num_buckets": getattr(c.position, "num", None),
        "relative_attention_max_distance": getattr(c.position, "far", None),
        "layer_norm_epsilon": c.norm.eps,
        "dropout_rate": c.dropout,
        **words,
        "is_encoder_decoder": True,
    }


def settle(config: ModelConfig, tensors: Callable[..., Tensors]) -> ModelConfig:
    """With a head of its own where the file has one: `transformers` 5 calls every head of T5 tied."""
    found = tensors("lm_head.weight", "shared.weight")
    if len(found) < 2 or not isinstance(config.head, LMHead):
        return config
    return replace(config, head=replace(config.head, tied=torch.equal(*found.values())))


T5 = Layout(
    "t5",
    rules,
    read,
    write,
    lm="T5ForConditionalGeneration",
    reader="T5EncoderModel",
    answers=(
        Answers(
            "T5ForTokenClassification",
            Tags((), dropout=0.0),
            "classifier",
            settings={"dropout": "classifier_dropout"},
            prefix="transformer.",
        ),
    ),
    twins={"shared.weight": ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")},
    unused=("lm_head.weight", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    settle=settle,
)
