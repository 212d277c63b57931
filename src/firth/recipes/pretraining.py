"""Default recipes: what to start from for a model of this family and size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from firth.models import Extra, LMHead, ModelConfig, Verdict, with_extras
from firth.models.config import AWDLSTM, Disentangled, ELMo, FanIn, Generator, MaskDecoder
from firth.objectives import MLM, NAMED, Mixture, Objective, SalientSpans, SpanCorruption
from firth.train import Recipe, override

TOKENIZERS = {"encoder": "wordpiece", "decoder": "byte-bpe", "encoder-decoder": "unigram"}
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
WORDS = {"word": 30000, "char": 2**20}  # how many there are at most, by the kind of tokenizer
OBJECTIVES = {"encoder": "mlm", "decoder": "clm", "encoder-decoder": "span-corruption"}
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


def pretraining(model: ModelConfig, **fields: Any) -> Recipe:
    """A recipe for this model; `fields` are set on top."""
    objective = NAMED[default_objective(model)]
    optim = fields.get("optim") or optimizer(model, fields.get("parallel", "none"))
    model = replace(model, extras=model.extras or usual_extras(model))
    usual = {"optim": optim, "learning_rate": rate(model, optim), "weight_decay": decay(optim), **usual_rows(model)}
    recipe = complete(Recipe(**{"model": model, "objective": objective} | usual | fields))
    return recipe if "warm_start" in fields else replace(recipe, warm_start=first_embeddings(recipe))


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with these fields; rate and decay, unless they are named, are those of the model as they make it."""
    new = override(recipe, changes)
    if "optim" not in changes:
        new = replace(new, optim="adamw" if new.teacher else optimizer(new.model, new.parallel))
    if "warm_start" not in changes:
        new = replace(new, warm_start=first_embeddings(new))
    if "weight_decay" not in changes:
        new = replace(new, weight_decay=decay(new.optim))
    return complete(new if "learning_rate" in changes else replace(new, learning_rate=rate(new.model, new.optim)))


def first_embeddings(recipe: Recipe) -> Literal["none", "ppmi"]:
    """Those that know which tokens keep company: with these every shape learns sooner (docs/results.md).

    Not where a model begins with what another has learned, or reads a mix of texts; for LSTMs it was not tried.
    """
    known = recipe.checkpoint or recipe.teacher or recipe.sources
    return "none" if known or recipe.model.recurrent is not None else "ppmi"


def gentle(model: ModelConfig) -> dict[str, Any]:
    """How a model goes on that has learned already."""
    return {"optim": "adamw", "learning_rate": narrowed(1e-3, model, 0.75)}


def usual_rows(model: ModelConfig) -> dict[str, Any]:
    """How a family that remembers reads: rows that go on from step to step, in AWD-LSTM as long as it learns back."""
    if isinstance(model.recurrent, AWDLSTM):
        return {"order": "stream", "max_seq_length": model.recurrent.bptt}
    return {"order": "stream"} if isinstance(model.recurrent, ELMo) else {}


def usual_extras(model: ModelConfig) -> tuple[Extra, ...]:
    """What the family was pretrained with beside its body, where that is more than an objective asks for."""
    if model.family == "deberta-v3":
        return (Generator(disentangled=True),)
    if model.family in ("deberta", "deberta-v2") and isinstance(model.position, Disentangled):
        return (MaskDecoder(length=model.position.length),)
    return ()


def complete(recipe: Recipe) -> Recipe:
    """The recipe with what its objective needs beside the model's body, and nothing that it would not train.

    The model also learns from it how a text is framed.
    """
    model, needed = recipe.model, recipe.objective.extras
    if isinstance(recipe.objective, MLM) and not needed and model.extra("decoder") is not None:
        needed = ("decoder",)
    if isinstance(model.head, Verdict):  # a published ELECTRA, whose generator is elsewhere
        model = replace(model, head=LMHead(transform=True, bias=True))
    kept = tuple(found for name in needed if (found := model.extra(name)) is not None)
    framed = model.shape == "encoder-decoder" and recipe.objective.framed
    return replace(recipe, model=with_extras(replace(model, extras=kept, framed=framed), needed))


def default_objective(model: ModelConfig) -> str:
    """The name of the objective that the family was published with."""
    return FAMILY_OBJECTIVES.get(model.family, OBJECTIVES[model.shape])


def tokenizer_kind(model: ModelConfig, objective: Objective) -> str:
    """The kind of tokenizer to train for a model: one with sentinels where they are needed, else the family's."""
    if needs_sentinels(objective):
        return "unigram"
    return FAMILY_TOKENIZERS.get(model.family, TOKENIZERS[model.shape])


def needs_sentinels(objective: Objective) -> bool:
    if isinstance(objective, Mixture):
        return any(needs_sentinels(part.objective) for part in objective.parts)
    return isinstance(objective, SpanCorruption | SalientSpans)


def optimizer(model: ModelConfig, parallel: str) -> Literal["adamw", "muon", "adafactor"]:
    """Muon, which learns more than AdamW in the same time, by much where the norm comes first (docs/results.md).

    T5, whose first weights are of another size than those of others, was published with Adafactor, and learns best so.
    Both need whole matrices, and so none of a model in parts; those of LSTMs were not tried.
    """
    if model.recurrent is not None or parallel == "fsdp":
        return "adamw"
    return "adafactor" if isinstance(model.init, FanIn) else "muon"


def rate(model: ModelConfig, optim: str) -> float:
    """The highest rate, found by experiment (docs/results.md): lower for wide models, and where the norm comes after.

    With Muon, whose steps do not grow with a matrix, the width counts less: 8e-3 at 128 and 3.3e-3 at 768 where the
    norm comes first; where it comes after, 4e-3 and 1e-3.
    """
    if model.recurrent is not None:
        return 4e-3 if isinstance(model.recurrent, AWDLSTM) else 2e-3
    if optim == "adafactor":
        return 1e-2
    if optim == "muon":
        highest, power = (8e-3, 0.5) if model.norm_first else (4e-3, 0.75)
    else:
        highest, power = {"encoder": 3e-3, "decoder": 2e-3, "encoder-decoder": 3e-3}[model.shape], 0.75
        highest = highest if model.norm_first else 1e-3
    return narrowed(highest, model, power)


def decay(optim: str) -> float:
    """How fast weights are drawn to zero, as a part of the rate.

    Muon's steps are all of one size, and so its weights grow for as long as nothing holds them, until a fine-tuning
    hardly moves them any more (docs/results.md).
    """
    return 0.2 if optim == "muon" else 0.01


def narrowed(highest: float, model: ModelConfig, power: float) -> float:
    """A rate at a width of 128, as a wider model wants it."""
    return float(f"{highest * (128 / max(model.dim, 128)) ** power:.1e}")


def vocabulary_size(text_bytes: int, kind: str = "") -> int:
    """How many tokens a text of this size can teach: 4,096 for a book, 32,768 for a gigabyte.

    Of words there are as many as ULMFiT had; words that are read by their characters may be as many as they are.
    """
    if kind in WORDS:
        return WORDS[kind]
    for size, below in ((4096, 4e6), (8192, 64e6), (16384, 512e6)):
        if text_bytes < below:
            return size
    return 32768
