"""ELECTRA: its body with a verdict on every token, and its generator by itself.

A model that is trained with a generator beside it is written as the body that it is trained for; the generator's
tensors stand in the same file under our own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from firth.models.config import Choices, Classes, Generator, LMHead, ModelConfig, Verdict
from firth.models.layouts import bert
from firth.models.layouts.layout import OWN_EXTRAS, Answers, Layout, Rule, Settings, Tensors, is_a, linear

ANSWERS = (
    Answers(
        "ElectraForSequenceClassification",
        Classes((), pooled=True, activation="gelu", drop_state=True),
        "classifier.out_proj",
        "classifier.dense",
        settings=bert.DROPOUT,
    ),
    Answers(
        "ElectraForMultipleChoice",
        Choices(pooled=True, activation="gelu", dropout=0.1),
        "classifier",
        "sequence_summary.summary",
        settings={"dropout": "summary_last_dropout"},
    ),
    *bert.word_answers("Electra"),
)
SUMMARY: Settings = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from bert.embedding_rules(config, "electra.embeddings")
    if config.embed_dim is not None:
        yield from linear("embed.widen", "electra.embeddings_project")
    yield from bert.block_rules(config, "electra.encoder.layer")
    if config.extra("generator") is not None:
        yield from verdict_rules("extras.generator.verdict")
        yield from linear("head.dense", "extras.generator.head.dense")
        yield from linear("head.norm", "extras.generator.head.norm")
        yield Rule("head.bias", ("extras.generator.head.bias",))
    elif isinstance(config.head, LMHead):
        yield from linear("head.dense", "generator_predictions.dense")
        yield from linear("head.norm", "generator_predictions.LayerNorm")
        yield Rule("head.bias", ("generator_lm_head.bias",))
    elif isinstance(config.head, Verdict):
        yield from verdict_rules("head")


def verdict_rules(ours: str) -> Iterator[Rule]:
    yield from linear(f"{ours}.dense", "discriminator_predictions.dense")
    yield from linear(f"{ours}.out", "discriminator_predictions.dense_prediction")


def read(hf: Settings) -> ModelConfig:
    width, dim = hf.get("embedding_size", 128), hf.get("hidden_size", 256)
    sizes = {"hidden_size": dim, "num_attention_heads": 4, "intermediate_size": 1024}
    config = bert.read(sizes | hf, embed_dim=None if width == dim else width)
    alone = not any(extra.get("kind") == Generator.__name__ for extra in hf.get(OWN_EXTRAS) or [])
    return replace(config, head=Verdict()) if alone and is_a(hf, "ForPreTraining") else config


def write(c: ModelConfig) -> Settings:
    return bert.write(c) | {"embedding_size": c.embed_width}


def settle(config: ModelConfig, tensors: Callable[..., Tensors]) -> ModelConfig:
    """Without the generator where its tensors are gone: `transformers` writes its settings again, and not it."""
    if config.extra("generator") is None or tensors("extras.generator.narrow.weight"):
        return config
    return replace(config, head=Verdict(), extras=())


ELECTRA = Layout(
    "electra",
    rules,
    read,
    write,
    lm="ElectraForMaskedLM",
    answers=ANSWERS,
    verdict="ElectraForPreTraining",
    prefix="electra.",
    fixed=bert.FIXED | SUMMARY | {"hidden_act": "gelu"},  # its heads have GELU whatever the blocks have
    twins={"electra.embeddings.word_embeddings.weight": ("generator_lm_head.weight",)},
    unused=("electra.embeddings.position_ids",),
    settle=settle,
)
