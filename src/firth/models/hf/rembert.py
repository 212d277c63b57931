"""RemBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.core.errors import UserError
from firth.models.config import LMHead, ModelConfig
from firth.models.hf import bert
from firth.models.hf.layout import HFConfigDict, HFLayout, TensorRule, linear_rules


def rembert_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert.bert_embedding_rules(config, "rembert.embeddings")
    yield from linear_rules("embed.widen", "rembert.encoder.embedding_hidden_mapping_in")
    yield from bert.bert_block_rules(config, "rembert.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "cls.predictions.dense")
        yield from linear_rules("head.norm", "cls.predictions.LayerNorm")
        yield TensorRule("head.weight", ("cls.predictions.decoder.weight",))
        yield TensorRule("head.bias", ("cls.predictions.decoder.bias",))


def read_rembert_config(hf_config: HFConfigDict) -> ModelConfig:
    sizes = {"hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608}
    config = bert.read_bert_config(
        {"vocab_size": 250300, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | sizes | hf_config,
        embed_dim=hf_config.get("input_embedding_size", 256),
    )
    return replace(
        config,
        head=LMHead(tied=False, transform=True, bias=True, dim=hf_config.get("output_embedding_size", 1664)),
    )


def write_rembert_config(config: ModelConfig) -> HFConfigDict:
    if config.embed_dim is None:
        raise UserError("RemBERT widens its token vectors whatever their width.")
    return bert.write_bert_config(config) | {
        "input_embedding_size": config.embed_dim,
        "output_embedding_size": getattr(config.head, "dim", None) or config.dim,
        "tie_word_embeddings": False,
    }


REMBERT_LAYOUT = HFLayout(
    "rembert",
    rembert_rules,
    read_rembert_config,
    write_rembert_config,
    lm_architecture="RemBertForMaskedLM",
    task_architectures=bert.bert_task_architectures("RemBert", "rembert.pooler.dense", 0.1, bert.ALBERT_DROPOUT_KEYS),
    pooler="rembert.pooler.dense",
    prefix="rembert.",
    fixed_settings={"is_decoder": False, "tie_word_embeddings": False},
    unused_patterns=("rembert.embeddings.position_ids", "rembert.pooler.*"),
)
