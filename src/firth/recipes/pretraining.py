"""Default recipes: what to start from for a model of this family and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from firth.models import DiscriminatorHead, Extra, LMHead, ModelConfig, with_extras
from firth.models.config import AWDLSTMConfig, Disentangled, ELMoConfig, FanInInit, GeneratorConfig, MaskDecoder
from firth.objectives import MLM, OBJECTIVES, Mixture, Objective, SalientSpanCorruption, SpanCorruption
from firth.train import Recipe, apply_overrides

DEFAULT_TOKENIZERS = {"encoder": "wordpiece", "decoder": "byte-bpe", "encoder-decoder": "unigram"}
FAMILY_TOKENIZERS = {
    "roberta": "byte-bpe",
    "xlm-roberta": "unigram",
    "afriberta": "unigram",
    "rembert": "unigram",
    "deberta": "byte-bpe",
    "deberta-v2": "unigram",
    "deberta-v3": "unigram",
    "xlnet": "unigram",
    "bart": "byte-bpe",
    "t5": "unigram",
    "ulmfit": "word",
    "elmo": "char",
    "bilstm": "word",
}
MAX_WORDS_BY_KIND = {"word": 30000, "char": 2**20}  # how many there are at most, by the kind of tokenizer
DEFAULT_OBJECTIVES = {"encoder": "mlm", "decoder": "clm", "encoder-decoder": "span-corruption"}
FAMILY_OBJECTIVES = {  # of families that were published with another one than their shape suggests
    "spanbert": "span",
    "albert": "sop",
    "electra": "rtd",
    "xlnet": "permutation-lm",
    "deberta-v3": "rtd",
    "unilm": "unilm",
    "bart": "bart",
    "elmo": "bilm",
}


def pretraining_recipe(model: ModelConfig, **fields: Any) -> Recipe:
    """A recipe for this model; `fields` are set on top."""
    objective = OBJECTIVES[default_objective(model)]
    optim = fields.get("optim") or default_optimizer(model, fields.get("parallel", "none"))
    model = replace(model, extras=model.extras or default_extras(model))
    usual = {
        "optim": optim,
        "learning_rate": default_learning_rate(model, optim),
        "weight_decay": default_weight_decay(optim),
        **default_row_fields(model),
    }
    recipe = complete_recipe(Recipe(**{"model": model, "objective": objective} | usual | fields))
    return recipe if "warm_start" in fields else replace(recipe, warm_start=default_warm_start(recipe))


def update_recipe(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with these fields; rate and decay, unless they are named, are those of the model as they make it."""
    new = apply_overrides(recipe, changes)
    if "optim" not in changes:
        new = replace(new, optim="adamw" if new.teacher else default_optimizer(new.model, new.parallel))
    if "warm_start" not in changes:
        new = replace(new, warm_start=default_warm_start(new))
    if "weight_decay" not in changes:
        new = replace(new, weight_decay=default_weight_decay(new.optim))
    return complete_recipe(
        new if "learning_rate" in changes else replace(new, learning_rate=default_learning_rate(new.model, new.optim))
    )


def default_warm_start(recipe: Recipe) -> Literal["none", "ppmi"]:
    """Those that know which tokens keep company: with these every shape learns sooner (docs/results.md).

    Not where a model begins with what another has learned, or reads a mix of texts; for LSTMs it was not tried.
    """
    known = recipe.checkpoint or recipe.teacher or recipe.sources
    return "none" if known or recipe.model.recurrent is not None else "ppmi"


def continued_defaults(model: ModelConfig) -> dict[str, Any]:
    """How a model goes on that has learned already."""
    return {"optim": "adamw", "learning_rate": scale_rate_to_width(1e-3, model, 0.75)}


def default_row_fields(model: ModelConfig) -> dict[str, Any]:
    """How a family that remembers reads: rows that go on from step to step, in AWD-LSTM as long as it learns back."""
    if isinstance(model.recurrent, AWDLSTMConfig):
        return {"order": "stream", "max_seq_length": model.recurrent.bptt}
    return {"order": "stream"} if isinstance(model.recurrent, ELMoConfig) else {}


def default_extras(model: ModelConfig) -> tuple[Extra, ...]:
    """What the family was pretrained with beside its body, where that is more than an objective asks for."""
    if model.family == "deberta-v3":
        return (GeneratorConfig(disentangle_embeddings=True),)
    if model.family in ("deberta", "deberta-v2") and isinstance(model.position, Disentangled):
        return (MaskDecoder(length=model.position.length),)
    return ()


def complete_recipe(recipe: Recipe) -> Recipe:
    """The recipe with what its objective needs beside the model's body, and nothing that it would not train.

    The model also learns from it how a text is framed.
    """
    model, needed = recipe.model, recipe.objective.extras
    if isinstance(recipe.objective, MLM) and not needed and model.get_extra("decoder") is not None:
        needed = ("decoder",)
    if isinstance(model.head, DiscriminatorHead):  # a published ELECTRA, whose generator is elsewhere
        model = replace(model, head=LMHead(transform=True, bias=True))
    kept = tuple(found for name in needed if (found := model.get_extra(name)) is not None)
    framed = model.architecture == "encoder-decoder" and recipe.objective.adds_bos
    return replace(recipe, model=with_extras(replace(model, extras=kept, adds_bos=framed), needed))


def default_objective(model: ModelConfig) -> str:
    """The name of the objective that the family was published with."""
    return FAMILY_OBJECTIVES.get(model.family, DEFAULT_OBJECTIVES[model.architecture])


def tokenizer_kind(model: ModelConfig, objective: Objective) -> str:
    """The kind of tokenizer to train for a model: one with sentinels where they are needed, else the family's."""
    if needs_sentinels(objective):
        return "unigram"
    return FAMILY_TOKENIZERS.get(model.family, DEFAULT_TOKENIZERS[model.architecture])


def needs_sentinels(objective: Objective) -> bool:
    if isinstance(objective, Mixture):
        return any(needs_sentinels(part.objective) for part in objective.parts)
    return isinstance(objective, SpanCorruption | SalientSpanCorruption)


def default_optimizer(model: ModelConfig, parallel: str) -> Literal["adamw", "muon", "adafactor"]:
    """Muon, which learns more than AdamW in the same time, by much where the norm comes first (docs/results.md).

    T5, whose first weights are of another size than those of others, was published with Adafactor, and learns best so.
    Both need whole matrices, and so none of a model in parts; those of LSTMs were not tried.
    """
    if model.recurrent is not None or parallel == "fsdp":
        return "adamw"
    return "adafactor" if isinstance(model.init, FanInInit) else "muon"


def default_learning_rate(model: ModelConfig, optim: str) -> float:
    """The highest rate, found by experiment (docs/results.md): lower for wide models, and where the norm comes after.

    With Muon, whose steps do not grow with a matrix, the width counts less: 8e-3 at 128 and 3.3e-3 at 768 where the
    norm comes first; where it comes after, 4e-3 and 1e-3.
    """
    if model.recurrent is not None:
        return 4e-3 if isinstance(model.recurrent, AWDLSTMConfig) else 2e-3
    if optim == "adafactor":
        return 1e-2
    if optim == "muon":
        highest, power = (8e-3, 0.5) if model.norm_first else (4e-3, 0.75)
    else:
        highest, power = {"encoder": 3e-3, "decoder": 2e-3, "encoder-decoder": 3e-3}[model.architecture], 0.75
        highest = highest if model.norm_first else 1e-3
    return scale_rate_to_width(highest, model, power)


def default_weight_decay(optim: str) -> float:
    """How fast weights are drawn to zero, as a part of the rate.

    Muon's steps are all of one size, and so its weights grow for as long as nothing holds them, until a fine-tuning
    hardly moves them any more (docs/results.md).
    """
    return 0.2 if optim == "muon" else 0.01


def scale_rate_to_width(peak: float, model: ModelConfig, power: float) -> float:
    """A rate at a width of 128, as a wider model wants it."""
    return float(f"{peak * (128 / max(model.dim, 128)) ** power:.1e}")


def default_vocab_size(text_bytes: int, kind: str = "") -> int:
    """How many tokens a text of this size can teach: 4,096 for a book, 32,768 for a gigabyte.

    Of words there are as many as ULMFiT had; words that are read by their characters may be as many as they are.
    """
    if kind in MAX_WORDS_BY_KIND:
        return MAX_WORDS_BY_KIND[kind]
    for size, below in ((4096, 4e6), (8192, 64e6), (16384, 512e6)):
        if text_bytes < below:
            return size
    return 32768
