"""RoBERTa, and XLM-R, which names everything alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.errors import UserError
from firth.models.config import Choices, Classes, Learned, LMHead, ModelConfig
from firth.models.layouts import bert
from firth.models.layouts.layout import Answers, Layout, Rule, Settings, linear


def answers(name: str) -> tuple[Answers, ...]:
    head = Classes((), pooled=True, drop_state=True)
    dense, out, pooler = "classifier.dense", "classifier.out_proj", "roberta.pooler.dense"
    return (
        Answers(f"{name}ForSequenceClassification", head, out, dense, settings=bert.DROPOUT),
        Answers(f"{name}ForMultipleChoice", Choices(pooled=True), "classifier", pooler),
        *bert.word_answers(name),
    )


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.embedding_rules(config, "roberta.embeddings")
    yield from bert.block_rules(config, "roberta.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear("head.dense", "lm_head.dense")
        yield from linear("head.norm", "lm_head.layer_norm")
        yield Rule("head.bias", ("lm_head.bias",))


def read(hf: Settings) -> ModelConfig:
    """Places are counted from the id after that of the padding token."""
    return bert.read(
        {"vocab_size": 50265} | hf,
        position=Learned(hf.get("max_position_embeddings", 512), hf.get("pad_token_id", 1) + 1),
    )


def write(c: ModelConfig) -> Settings:
    if not isinstance(c.position, Learned) or c.position.offset < 1:
        raise UserError("RoBERTa counts its places from the id after that of its padding token.")
    return bert.write(c) | {"pad_token_id": c.position.offset - 1}


ROBERTA = Layout(
    "roberta",
    rules,
    read,
    write,
    lm="RobertaForMaskedLM",
    answers=answers("Roberta"),
    pooler="roberta.pooler.dense",
    prefix="roberta.",
    fixed=bert.FIXED | {"hidden_act": "gelu"},  # its head has GELU whatever the blocks have
    twins={
        "roberta.embeddings.word_embeddings.weight": ("lm_head.decoder.weight",),
        "lm_head.bias": ("lm_head.decoder.bias",),
    },
    unused=("roberta.embeddings.position_ids", "roberta.pooler.*"),
    after_pad=True,
)
XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    lm="XLMRobertaForMaskedLM",
    answers=answers("XLMRoberta"),
)
