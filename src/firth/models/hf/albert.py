"""ALBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.core.errors import UserError
from firth.models import presets
from firth.models.config import LMHead, ModelConfig
from firth.models.hf.bert import ALBERT_DROPOUT_KEYS, BERT_SETTINGS, bert_embedding_rules, bert_task_architectures
from firth.models.hf.layout import HFLayout, TensorRule, linear_rules, qkv_rules
from firth.models.hf.settings import HFConfigDict, Setting, SettingsTable


def albert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "albert.embeddings")
    yield from linear_rules("embed.widen", "albert.encoder.embedding_hidden_mapping_in")
    for i in range(num_groups(config)):
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


def num_groups(config: ModelConfig) -> int:
    """Return how many blocks there are; the layers after each other share one."""
    return -(-config.num_layers // config.num_shared)


def read_groups(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    groups = hf_config.get("num_hidden_groups", 1)
    if config.num_layers % groups:
        raise UserError(
            f"config.json: num_hidden_layers={config.num_layers} is not a multiple of num_hidden_groups={groups}."
        )
    return replace(config, num_shared=config.num_layers // groups)


ALBERT_DEFAULT = presets.albert(12, 4096, 64, num_shared=1)
ALBERT_SETTINGS = SettingsTable(
    ALBERT_DEFAULT,
    (*BERT_SETTINGS, Setting("embed_dim", "embedding_size")),
    read_groups,
    lambda config: {"num_hidden_groups": num_groups(config)},
)
ALBERT_LAYOUT = HFLayout(
    "albert",
    albert_rules,
    ALBERT_SETTINGS,
    lm_architecture="AlbertForMaskedLM",
    task_architectures=bert_task_architectures("Albert", "albert.pooler", 0.1, ALBERT_DROPOUT_KEYS),
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
