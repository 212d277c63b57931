"""ELECTRA: the discriminator, and the generator as a model of its own.

A model with a generator extra is written as `ElectraForPreTraining`, its discriminator. The generator's tensors are in
the same file, under our own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.models import presets
from firth.models.config import (
    ClassificationHead,
    DiscriminatorHead,
    GeneratorConfig,
    LMHead,
    ModelConfig,
    MultipleChoiceHead,
)
from firth.models.hf.bert import (
    BERT_DROPOUT_KEYS,
    BERT_FIXED_SETTINGS,
    BERT_SETTINGS,
    bert_block_rules,
    bert_embedding_rules,
    token_task_architectures,
)
from firth.models.hf.layout import (
    EXTRAS_KEY,
    HFLayout,
    TaskArchitecture,
    TensorRule,
    Tensors,
    has_architecture,
    linear_rules,
)
from firth.models.hf.settings import HFConfigDict, Setting, SettingsTable

ELECTRA_TASK_ARCHITECTURES = (
    TaskArchitecture(
        "ElectraForSequenceClassification",
        ClassificationHead((), has_pooler=True, activation="gelu", dropout_before_pooler=True),
        "classifier.out_proj",
        "classifier.dense",
        settings=BERT_DROPOUT_KEYS,
    ),
    TaskArchitecture(
        "ElectraForMultipleChoice",
        MultipleChoiceHead(has_pooler=True, activation="gelu", dropout=0.1),
        "classifier",
        "sequence_summary.summary",
        settings={"dropout": "summary_last_dropout"},
    ),
    *token_task_architectures("Electra"),
)
ELECTRA_SUMMARY_SETTINGS: HFConfigDict = {
    "summary_type": "first",
    "summary_use_proj": True,
    "summary_activation": "gelu",
}


def electra_rules(config: ModelConfig) -> Iterator[TensorRule]:
    yield from bert_embedding_rules(config, "electra.embeddings")
    if config.embed_dim is not None:
        yield from linear_rules("embed.widen", "electra.embeddings_project")
    yield from bert_block_rules(config, "electra.encoder.layer")
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


def read_discriminator(hf_config: HFConfigDict, config: ModelConfig) -> ModelConfig:
    """Return the model with the discriminator's head, where the file names it and has no generator beside it."""
    has_generator = any(extra.get("kind") == GeneratorConfig.__name__ for extra in hf_config.get(EXTRAS_KEY) or [])
    if has_generator or not has_architecture(hf_config, "ForPreTraining"):
        return config
    return replace(config, head=DiscriminatorHead())


ELECTRA_DEFAULT = presets.electra(12, 256, 4)
ELECTRA_SETTINGS = SettingsTable(
    ELECTRA_DEFAULT, (*BERT_SETTINGS, Setting("embed_width", "embedding_size")), read_discriminator
)


def drop_missing_generator(config: ModelConfig, read_tensors: Callable[..., Tensors]) -> ModelConfig:
    """Drop the generator where its tensors are missing: `transformers` saves its settings but not its weights."""
    if config.get_extra("generator") is None or read_tensors("extras.generator.narrow.weight"):
        return config
    return replace(config, head=DiscriminatorHead(), extras=())


ELECTRA_LAYOUT = HFLayout(
    "electra",
    electra_rules,
    ELECTRA_SETTINGS,
    lm_architecture="ElectraForMaskedLM",
    task_architectures=ELECTRA_TASK_ARCHITECTURES,
    discriminator_architecture="ElectraForPreTraining",
    prefix="electra.",
    fixed_settings=BERT_FIXED_SETTINGS
    | ELECTRA_SUMMARY_SETTINGS
    | {"hidden_act": "gelu"},  # its heads have GELU whatever the blocks have
    aliases={"electra.embeddings.word_embeddings.weight": ("generator_lm_head.weight",)},
    unused_patterns=("electra.embeddings.position_ids",),
    refine_config=drop_missing_generator,
)
