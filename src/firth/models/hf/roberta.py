"""RoBERTa, and XLM-R, which names everything alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from firth.core.errors import UserError
from firth.models.config import ClassificationHead, LearnedPosition, LMHead, ModelConfig, MultipleChoiceHead
from firth.models.hf import bert
from firth.models.hf.layout import HFConfigDict, HFLayout, TaskArchitecture, TensorRule, linear_rules


def roberta_task_architectures(name: str) -> tuple[TaskArchitecture, ...]:
    head = ClassificationHead((), has_pooler=True, dropout_before_pooler=True)
    dense, out, pooler = "classifier.dense", "classifier.out_proj", "roberta.pooler.dense"
    return (
        TaskArchitecture(f"{name}ForSequenceClassification", head, out, dense, settings=bert.BERT_DROPOUT_KEYS),
        TaskArchitecture(f"{name}ForMultipleChoice", MultipleChoiceHead(has_pooler=True), "classifier", pooler),
        *bert.token_task_architectures(name),
    )


def roberta_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert.bert_embedding_rules(config, "roberta.embeddings")
    yield from bert.bert_block_rules(config, "roberta.encoder.layer")
    if isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "lm_head.dense")
        yield from linear_rules("head.norm", "lm_head.layer_norm")
        yield TensorRule("head.bias", ("lm_head.bias",))


def read_roberta_config(hf_config: HFConfigDict) -> ModelConfig:
    """Places are counted from the id after that of the padding token."""
    return bert.read_bert_config(
        {"vocab_size": 50265} | hf_config,
        position=LearnedPosition(hf_config.get("max_position_embeddings", 512), hf_config.get("pad_token_id", 1) + 1),
    )


def write_roberta_config(config: ModelConfig) -> HFConfigDict:
    if not isinstance(config.position, LearnedPosition) or config.position.offset < 1:
        raise UserError("RoBERTa counts its places from the id after that of its padding token.")
    return bert.write_bert_config(config) | {"pad_token_id": config.position.offset - 1}


ROBERTA_LAYOUT = HFLayout(
    "roberta",
    roberta_rules,
    read_roberta_config,
    write_roberta_config,
    lm_architecture="RobertaForMaskedLM",
    task_architectures=roberta_task_architectures("Roberta"),
    pooler="roberta.pooler.dense",
    prefix="roberta.",
    fixed_settings=bert.BERT_FIXED_SETTINGS | {"hidden_act": "gelu"},  # its head has GELU whatever the blocks have
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
