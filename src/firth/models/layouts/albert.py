"""ALBERT."""

from __future__ import annotations

from collections.abc import Iterator

from firth.errors import UserError
from firth.models.config import MLP, LMHead, ModelConfig
from firth.models.layouts import bert
from firth.models.layouts.layout import Layout, Rule, Settings, activation, linear, qkv


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.embedding_rules(config, "albert.embeddings")
    yield from linear("embed.widen", "albert.encoder.embedding_hidden_mapping_in")
    for i in range(config.num_layers // config.num_shared):
        ours, theirs = f"stack.blocks.{i}", f"albert.encoder.albert_layer_groups.{i}.albert_layers.0"
        at = f"{theirs}.attention"
        yield from qkv(config, f"{ours}.attention.qkv", f"{at}.query", f"{at}.key", f"{at}.value")
        yield from linear(f"{ours}.attention.out", f"{at}.dense")
        yield from linear(f"{ours}.attention_norm", f"{at}.LayerNorm")
        yield from linear(f"{ours}.mlp.up", f"{theirs}.ffn")
        yield from linear(f"{ours}.mlp.down", f"{theirs}.ffn_output")
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.full_layer_layer_norm")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "predictions.dense")
        yield from linear("head.norm", "predictions.LayerNorm")
        yield Rule("head.bias", ("predictions.bias",))
    if config.extra("pair") is not None:
        yield from linear("extras.pair.pooler", "albert.pooler")
        yield from linear("extras.pair.out", "sop_classifier.classifier")


def read(hf: Settings) -> ModelConfig:
    layers, groups = hf.get("num_hidden_layers", 12), hf.get("num_hidden_groups", 1)
    if layers % groups:
        raise UserError(f"config.json: num_hidden_layers={layers} is not a multiple of num_hidden_groups={groups}.")
    return bert.read(
        {"hidden_size": 4096, "num_attention_heads": 64, "vocab_size": 30000} | hf,
        mlp=MLP(hf.get("intermediate_size", 16384), activation(hf.get("hidden_act", "gelu_new"))),
        embed_dim=hf.get("embedding_size", 128),
        num_shared=layers // groups,
        dropout=hf.get("hidden_dropout_prob", 0.0),
        attention_dropout=hf.get("attention_probs_dropout_prob", 0.0),
    )


def write(c: ModelConfig) -> Settings:
    if c.embed_dim is None:
        raise UserError("ALBERT widens its token vectors whatever their width.")
    return bert.write(c) | {"embedding_size": c.embed_dim, "num_hidden_groups": c.num_layers // c.num_shared}


ALBERT = Layout(
    "albert",
    rules,
    read,
    write,
    lm="AlbertForMaskedLM",
    answers=bert.answers("Albert", "albert.pooler", 0.1, bert.ALBERTS_DROPOUT),
    pooler="albert.pooler",
    pair="AlbertForPreTraining",
    prefix="albert.",
    fixed={"inner_group_num": 1, "position_embedding_type": "absolute", "tie_word_embeddings": True},
    twins={
        "albert.embeddings.word_embeddings.weight": ("predictions.decoder.weight",),
        "predictions.bias": ("predictions.decoder.bias",),
    },
    unused=("albert.embeddings.position_ids", "albert.pooler.*", "sop_classifier.*"),
)
