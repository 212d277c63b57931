"""Recipes of the static models: word2vec, GloVe, n-grams."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from firth.core.errors import UserError
from firth.core.files import write_text
from firth.core.serialization import from_dict, to_dict
from firth.static import glove
from firth.static.ngram import check_ngram_order
from firth.train.recipe import read_yaml_mapping, recipe_differences
from firth.train.tracking import TrackerName, check_tracker

MIN_EPOCHS = 5  # default number of epochs
MIN_WORD2VEC_TOKENS, MAX_EPOCHS = 20_000_000, 50  # default of word2vec's epochs: tokens to read in all, and the limit


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class StaticRecipe:
    """Settings that all static models share."""

    output_dir: str = ""
    data: str = ""  # folder of token shards
    tokenizer: str = ""  # fingerprint of the tokenizer that the shards were made with
    seed: int = 0
    report_to: TrackerName = "none"
    push_to_hub: str = ""  # repository of the final model; empty: none
    public: bool = False  # of a new repository

    def check(self) -> None:
        """Reject negative and non-finite numbers before anything is computed."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{f.name} is {value}, and must be a number that is not negative.")
        check_tracker(self.report_to)


@dataclass(frozen=True, kw_only=True)
class WordVectorRecipe(StaticRecipe):
    """Settings of word2vec and GloVe, under gensim's names."""

    vector_size: int = 100
    window: int = 5  # words to each side
    min_count: int = 5  # minimum occurrences of a word; 0: keep all
    epochs: int = 5
    max_steps: int = 0  # replaces epochs; 0: computed from them
    minutes: float = 0.0  # time budget: times some steps, then sets max_steps; 0: none
    workers: int = 0  # threads; 0: one per core; 1: bit-equal runs
    bigrams: int = 0  # hashed bigram vectors for fine-tuning, as in fastText; 0: none
    save_steps: int = 200
    save_total_limit: int = 1

    def check(self) -> None:
        super().check()
        for name in ("vector_size", "window", "epochs", "save_steps"):
            if getattr(self, name) < 1 and not (name == "epochs" and isinstance(self, Word2VecRecipe)):
                raise UserError(f"{name} is {getattr(self, name)}, and must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class Word2VecRecipe(WordVectorRecipe):
    """Mikolov et al. 2013."""

    epochs: int = 0  # 0: 5; on a small text as many as read 20 million tokens, at most 50
    sg: int = 1  # 1: skip-gram, 0: CBOW
    hs: int = 0  # 1: hierarchical softmax instead of noise words
    negative: int = 5  # noise words per prediction; 0: full softmax, for small vocabularies; not read with hs=1
    ns_exponent: float = 0.75
    sample: float = 1e-3  # subsampling threshold, as a share of the text; 0: keep every word
    alpha: float = 0.025
    min_alpha: float = 0.0001
    phrases: int = 0  # passes that join frequent pairs: new_york, then new_york_times; 0: none
    threshold: float = 10.0  # minimum phrase score, on gensim's scale
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def num_noise_words(self) -> int:
        """Noise words per prediction; 0: full or hierarchical softmax."""
        return 0 if self.hs else self.negative

    def check(self) -> None:
        super().check()
        if self.sg not in (0, 1):
            raise UserError(f"sg is {self.sg}, and must be 1 (skip-gram) or 0 (CBOW).")
        if self.hs not in (0, 1):
            raise UserError(f"hs is {self.hs}, and must be 1 (hierarchical softmax) or 0 (noise words).")
        if self.device == "cuda" and not (self.num_noise_words and has_gpu()):
            raise UserError("device=cuda is for learning with noise words (negative=5), on a machine with a GPU.")


@dataclass(frozen=True, kw_only=True)
class GloVeRecipe(WordVectorRecipe):
    """Pennington et al. 2014; settings that gensim lacks have the names of the GloVe program."""

    window: int = 15
    epochs: int = 25
    x_max: float = glove.DEFAULT_X_MAX
    alpha: float = glove.DEFAULT_WEIGHTING_EXPONENT  # exponent of the weighting function
    eta: float = glove.DEFAULT_ETA
    memory: float = 1.0  # GiB for counting co-occurrences

    def check(self) -> None:
        super().check()
        for name in ("x_max", "eta"):
            if not getattr(self, name):
                raise UserError(f"{name} is {getattr(self, name):g}, and must be more than 0.")


@dataclass(frozen=True, kw_only=True)
class NgramRecipe(StaticRecipe):
    """Interpolated Kneser-Ney."""

    order: int = 3
    discount: float = 0.0  # one absolute discount; 0: three per order, estimated (modified Kneser-Ney)

    def check(self) -> None:
        super().check()
        check_ngram_order(self.order, self.discount)


STATIC_RECIPES: dict[str, type[StaticRecipe]] = {"word2vec": Word2VecRecipe, "glove": GloVeRecipe, "ngram": NgramRecipe}
StaticRecipeT = TypeVar("StaticRecipeT", bound=StaticRecipe)
WordVectorRecipeT = TypeVar("WordVectorRecipeT", bound=WordVectorRecipe)


def merge_static_recipe(folder: Path, recipe: StaticRecipeT, resume: bool) -> StaticRecipeT:
    """Return the recipe of the run in this folder and store a new one; a resumed run must keep its settings."""
    stored = folder / "recipe.yaml"
    if resume and stored.is_file():
        earlier = from_dict(read_yaml_mapping(stored), type(recipe), str(stored))
        moved: dict[str, Any] = {
            name: getattr(recipe, name) for name in ("output_dir", "data", "report_to", "push_to_hub", "public")
        }
        # settings that were left open keep the values that the run resolved
        if isinstance(recipe, WordVectorRecipe) and isinstance(earlier, WordVectorRecipe):
            steps = earlier.max_steps if recipe.minutes or not recipe.max_steps else recipe.max_steps
            settled = {name: getattr(recipe, name) or getattr(earlier, name) for name in ("workers", "epochs")}
            recipe = replace(recipe, **settled, max_steps=steps)
        if changed := recipe_differences(replace(earlier, **moved), recipe):
            raise UserError(
                "Cannot resume: these settings differ from the saved recipe: " + "; ".join(changed) + ". "
                "Leave these options as they were, or start a new run."
            )
        return replace(earlier, **moved)
    if isinstance(recipe, WordVectorRecipe) and not recipe.workers:
        recipe = replace(recipe, workers=os.cpu_count() or 1)
    save_static_recipe(recipe, stored)
    return recipe


def save_static_recipe(recipe: StaticRecipe, path: Path) -> None:
    write_text(path, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))


def default_epochs(tokens: int) -> int:
    """Return the default number of epochs: 5, and more for a small text.

    >>> default_epochs(10**9), default_epochs(10**6), default_epochs(10**4)
    (5, 20, 50)
    """
    return min(max(MIN_EPOCHS, -(-MIN_WORD2VEC_TOKENS // max(tokens, 1))), MAX_EPOCHS)
