"""RoBERTa, and XLM-R, which names everything alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.core.errors import UserError
from firth.models.config import ClassificationHead, LearnedPosition, LMHead, ModelConfig, MultipleChoiceHead
from firth.models.hf.bert import (
    BERT_DEFAULT,
    BERT_DROPOUT_KEYS,
    BERT_FIXED_SETTINGS,
    BERT_SETTINGS,
    bert_block_rules,
    bert_embedding_rules,
    token_task_architectures,
)
from firth.models.hf.layout import HFLayout, TaskArchitecture, TensorRule, linear_rules
from firth.models.hf.settings import Converter, Setting, SettingsTable


def roberta_task_architectures(name: str) -> tuple[TaskArchitecture, ...]:
    head = ClassificationHead((), has_pooler=True, dropout_before_pooler=True)
    dense, out, pooler = "classifier.dense", "classifier.out_proj", "roberta.pooler.dense"
    return (
        TaskArchitecture(f"{name}ForSequenceClassification", head, out, dense, settings=BERT_DROPOUT_KEYS),
        TaskArchitecture(f"{name}ForMultipleChoice", MultipleChoiceHead(has_pooler=True), "classifier", pooler),
        *token_task_architectures(name),
    )


def roberta_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "roberta.embeddings")
    yield from bert_block_rules(config, "roberta.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "lm_head.dense")
        yield from linear_rules("head.norm", "lm_head.layer_norm")
        yield TensorRule("head.bias", ("lm_head.bias",))


def pad_from_offset(offset: int) -> int:
    """Return the padding token's id; RoBERTa counts positions from the id after it."""
    if offset < 1:
        raise UserError(f"RoBERTa counts positions from its padding id + 1, and model.position.offset is {offset}.")
    return offset - 1


ROBERTA_DEFAULT = replace(BERT_DEFAULT, family="roberta", vocab_size=50265, position=LearnedPosition(512, 2))
ROBERTA_SETTINGS = (
    *BERT_SETTINGS,
    Setting("position.offset", "pad_token_id", Converter(lambda pad_id: pad_id + 1, pad_from_offset)),
)
ROBERTA_LAYOUT = HFLayout(
    "roberta",
    roberta_rules,
    SettingsTable(ROBERTA_DEFAULT, ROBERTA_SETTINGS),
    lm_architecture="RobertaForMaskedLM",
    task_architectures=roberta_task_architectures("Roberta"),
    pooler="roberta.pooler.dense",
    prefix="roberta.",
    fixed_settings=BERT_FIXED_SETTINGS | {"hidden_act": "gelu"},  # its head has GELU whatever the blocks have
    aliases={
        "roberta.embeddings.word_embeddings.weight": ("lm_head.decoder.weight",),
        "lm_head.bias": ("lm_head.decoder.bias",),
    },
    unused_patterns=("roberta.embeddings.position_ids", "roberta.pooler.*"),
    positions_follow_pad=True,
)
XLM_ROBERTA_LAYOUT = replace(
    ROBERTA_LAYOUT,
    model_type="xlm-roberta",
    lm_architecture="XLMRobertaForMaskedLM",
    task_architectures=roberta_task_architectures("XLMRoberta"),
)
