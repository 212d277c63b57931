"""ALBERT."""

from __future__ import annotations

from collections.abc import Iterator

from firth.core.errors import UserError
from firth.models.config import LMHead, MLPConfig, ModelConfig
from firth.models.hf import bert
from firth.models.hf.layout import HFConfigDict, HFLayout, TensorRule, activation_from_hf, linear_rules, qkv_rules


def albert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert.bert_embedding_rules(config, "albert.embeddings")
    yield from linear_rules("embed.widen", "albert.encoder.embedding_hidden_mapping_in")
    for i in range(config.num_layers // config.num_shared):
        ours, theirs = f"stack.blocks.{i}", f"albert.encoder.albert_layer_groups.{i}.albert_layers.0"
        at = f"{theirs}.attention"
        yield from qkv_rules(config, f"{ours}.attention.qkv", f"{at}.query", f"{at}.key", f"{at}.value")
        yield from linear_rules(f"{ours}.attention.out", f"{at}.dense")
        yield from linear_rules(f"{ours}.attention_norm", f"{at}.LayerNorm")
        yield from linear_rules(f"{ours}.mlp.up", f"{theirs}.ffn")
        yield from linear_rules(f"{ours}.mlp.down", f"{theirs}.ffn_output")
        yield from linear_rules(f"{ours}.mlp_norm", f"{theirs}.full_layer_layer_norm")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "predictions.dense")
        yield from linear_rules("head.norm", "predictions.LayerNorm")
        yield TensorRule("head.bias", ("predictions.bias",))
    if config.get_extra("pair") is not None:
        yield from linear_rules("extras.pair.pooler", "albert.pooler")
        yield from linear_rules("extras.pair.out", "sop_classifier.classifier")


def read_albert_config(hf_config: HFConfigDict) -> ModelConfig:
    layers, groups = hf_config.get("num_hidden_layers", 12), hf_config.get("num_hidden_groups", 1)
    if layers % groups:
        raise UserError(f"config.json: num_hidden_layers={layers} is not a multiple of num_hidden_groups={groups}.")
    return bert.read_bert_config(
        {"hidden_size": 4096, "num_attention_heads": 64, "vocab_size": 30000} | hf_config,
        mlp=MLPConfig(
            hf_config.get("intermediate_size", 16384), activation_from_hf(hf_config.get("hidden_act", "gelu_new"))
        ),
        embed_dim=hf_config.get("embedding_size", 128),
        num_shared=layers // groups,
        dropout=hf_config.get("hidden_dropout_prob", 0.0),
        attention_dropout=hf_config.get("attention_probs_dropout_prob", 0.0),
    )


def write_albert_config(config: ModelConfig) -> HFConfigDict:
    if config.embed_dim is None:
        raise UserError("ALBERT widens its token vectors whatever their width.")
    return bert.write_bert_config(config) | {
        "embedding_size": config.embed_dim,
        "num_hidden_groups": config.num_layers // config.num_shared,
    }


ALBERT_LAYOUT = HFLayout(
    "albert",
    albert_rules,
    read_albert_config,
    write_albert_config,
    lm_architecture="AlbertForMaskedLM",
    task_architectures=bert.bert_task_architectures("Albert", "albert.pooler", 0.1, bert.ALBERT_DROPOUT_KEYS),
    pooler="albert.pooler",
    pair_architecture="AlbertForPreTraining",
    prefix="albert.",
    fixed_settings={"inner_group_num": 1, "position_embedding_type": "absolute", "tie_word_embeddings": True},
    aliases={
        "albert.embeddings.word_embeddings.weight": ("predictions.decoder.weight",),
        "predictions.bias": ("predictions.decoder.bias",),
    },
    unused_patterns=("albert.embeddings.position_ids", "albert.pooler.*", "sop_classifier.*"),
)
