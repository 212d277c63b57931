"""RemBERT."""

from __future__ import annotations

from collections.abc import Iterator

from firth.models import presets
from firth.models.config import LMHead, ModelConfig
from firth.models.hf.bert import (
    ALBERT_DROPOUT_KEYS,
    BERT_SETTINGS,
    bert_block_rules,
    bert_embedding_rules,
    bert_task_architectures,
)
from firth.models.hf.layout import HFLayout, TensorRule, linear_rules
from firth.models.hf.settings import Setting, SettingsTable, set_field


def rembert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "rembert.embeddings")
    yield from linear_rules("embed.widen", "rembert.encoder.embedding_hidden_mapping_in")
    yield from bert_block_rules(config, "rembert.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "cls.predictions.dense")
        yield from linear_rules("head.norm", "cls.predictions.LayerNorm")
        yield TensorRule("head.weight", ("cls.predictions.decoder.weight",))
        yield TensorRule("head.bias", ("cls.predictions.decoder.bias",))


REMBERT_DEFAULT = presets.rembert(32, 1152, 18)
REMBERT_SETTINGS = SettingsTable(
    REMBERT_DEFAULT,
    (*BERT_SETTINGS, Setting("embed_dim", "input_embedding_size")),
    lambda hf_config, config: set_field(config, "head.dim", hf_config.get("output_embedding_size", 1664)),
    lambda config: {
        "output_embedding_size": getattr(config.head, "dim", None) or config.dim,
        "tie_word_embeddings": False,
    },
)
REMBERT_LAYOUT = HFLayout(
    "rembert",
    rembert_rules,
    REMBERT_SETTINGS,
    lm_architecture="RemBertForMaskedLM",
    task_architectures=bert_task_architectures("RemBert", "rembert.pooler.dense", 0.1, ALBERT_DROPOUT_KEYS),
    pooler="rembert.pooler.dense",
    prefix="rembert.",
    fixed_settings={"is_decoder": False, "tie_word_embeddings": False},
    unused_patterns=("rembert.embeddings.position_ids", "rembert.pooler.*"),
)
