"""ELECTRA: its body with a verdict on every token, and its generator by itself.

A model that is trained with a generator beside it is written as the body that it is trained for; the generator's
tensors stand in the same file under our own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.models.config import (
    ClassificationHead,
    DiscriminatorHead,
    GeneratorConfig,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
)
from firth.models.hf import bert
from firth.models.hf.layout import (
    EXTRAS_KEY,
    HFConfigDict,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    Tensors,
    has_architecture,
    linear_rules,
)

ELECTRA_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "ElectraForSequenceClassification",
        ClassificationHead((), has_pooler=True, activation="gelu", dropout_before_pooler=True),
        "classifier.out_proj",
        "classifier.dense",
        settings=bert.BERT_DROPOUT_KEYS,
    ),
    TaskArchitecture(
        "ElectraForMultipleChoice",
        MultipleChoiceHead(has_pooler=True, activation="gelu", dropout=0.1),
        "classifier",
        "sequence_summary.summary",
        settings={"dropout": "summary_last_dropout"},
    ),
    *bert.token_task_architectures("Electra"),
)
ELECTRA_SUMMARY_SETTINGS: HFConfigDict = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
}


def electra_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert.bert_embedding_rules(config, "electra.embeddings")
    if config.embed_dim is not None:
        yield from linear_rules("embed.widen", "electra.embeddings_project")
    yield from bert.bert_block_rules(config, "electra.encoder.layer")
    if config.get_extra("generator") is not None:
        yield from discriminator_rules("extras.generator.discriminator_head")
        yield from linear_rules("head.dense", "extras.generator.head.dense")
        yield from linear_rules("head.norm", "extras.generator.head.norm")
        yield TensorRule("head.bias", ("extras.generator.head.bias",))
    elif isinstance(config.head, LMHead):
        yield from linear_rules("head.dense", "generator_predictions.dense")
        yield from linear_rules("head.norm", "generator_predictions.LayerNorm")
        yield TensorRule("head.bias", ("generator_lm_head.bias",))
    elif isinstance(config.head, DiscriminatorHead):
        yield from discriminator_rules("head")


def discriminator_rules(firth_prefix: str) -> Iterator[TensorRule]:
    yield from linear_rules(f"{firth_prefix}.dense", "discriminator_predictions.dense")
    yield from linear_rules(f"{firth_prefix}.out", "discriminator_predictions.dense_prediction")


def read_electra_config(hf_config: HFConfigDict) -> ModelConfig:
    width, dim = hf_config.get("embedding_size", 128), hf_config.get("hidden_size", 256)
    sizes = {"hidden_size": dim, "num_attention_heads": 4, "intermediate_size": 1024}
    config = bert.read_bert_config(sizes | hf_config, embed_dim=None if width == dim else width)
    alone = not any(extra.get("kind") == GeneratorConfig.__name__ for extra in hf_config.get(EXTRAS_KEY) or [])
    return (
        replace(config, head=DiscriminatorHead()) if alone and has_architecture(hf_config, "ForPreTraining") else config
    )


def write_electra_config(config: ModelConfig) -> HFConfigDict:
    return bert.write_bert_config(config) | {"embedding_size": config.embed_width}


def drop_missing_generator(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """Without the generator where its tensors are gone: `transformers` writes its settings again, and not it."""
    if config.get_extra("generator") is None or read_tensors("extras.generator.narrow.weight"):
        return config
    return replace(config, head=DiscriminatorHead(), extras=())


ELECTRA_LAYOUT = HFLayout(
    "electra",
    electra_rules,
    read_electra_config,
    write_electra_config,
    lm_architecture="ElectraForMaskedLM",
    task_architectures=ELECTRA_TASK_ARCHITECTURES,
    discriminator_architecture="ElectraForPreTraining",
    prefix="electra.",
    fixed_settings=bert.BERT_FIXED_SETTINGS
    | ELECTRA_SUMMARY_SETTINGS
    | {"hidden_act": "gelu"},  # its heads have GELU whatever the blocks have
    aliases={"electra.embeddings.word_embeddings.weight": ("generator_lm_head.weight",)},
    unused_patterns=("electra.embeddings.position_ids",),
    refine_config=drop_missing_generator,
)
