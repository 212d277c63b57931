"""RemBERT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.errors import UserError
from firth.models.config import LMHead, ModelConfig
from firth.models.layouts import bert
from firth.models.layouts.layout import Layout, Rule, Settings, linear


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.embedding_rules(config, "rembert.embeddings")
    yield from linear("embed.widen", "rembert.encoder.embedding_hidden_mapping_in")
    yield from bert.block_rules(config, "rembert.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "cls.predictions.dense")
        yield from linear("head.norm", "cls.predictions.LayerNorm")
        yield Rule("head.weight", ("cls.predictions.decoder.weight",))
        yield Rule("head.bias", ("cls.predictions.decoder.bias",))


def read(hf: Settings) -> ModelConfig:
    sizes = {"hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608}
    config = bert.read(
        {"vocab_size": 250300, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} | sizes | hf,
        embed_dim=hf.get("input_embedding_size", 256),
    )
    return replace(
        config,
        head=LMHead(tied=False, transform=True, bias=True, dim=hf.get("output_embedding_size", 1664)),
    )


def write(c: ModelConfig) -> Settings:
    if c.embed_dim is None:
        raise UserError("RemBERT widens its token vectors whatever their width.")
    return bert.write(c) | {
        "input_embedding_size": c.embed_dim,
        "output_embedding_size": getattr(c.head, "dim", None) or c.dim,
        "tie_word_embeddings": False,
    }


REMBERT = Layout(
    "rembert",
    rules,
    read,
    write,
    lm="RemBertForMaskedLM",
    answers=bert.answers("RemBert", "rembert.pooler.dense", 0.1, bert.ALBERTS_DROPOUT),
    pooler="rembert.pooler.dense",
    prefix="rembert.",
    fixed={"is_decoder": False, "tie_word_embeddings": False},
    unused=("rembert.embeddings.position_ids", "rembert.pooler.*"),
)
