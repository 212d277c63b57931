"""Recipes of what learns by counting and guessing neighbours: word2vec, GloVe, n-grams."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import yaml

from firth.core.errors import UserError
from firth.core.files import write_text
from firth.core.serialization import from_dict, to_dict
from firth.static import glove
from firth.static.ngram import check_ngram_order
from firth.train.recipe import read_yaml_mapping, recipe_differences


@dataclass(frozen=True, kw_only=True)
class StaticRecipe:
    """What a run has that learns by counting."""

    output_dir: str = ""
    data: str = ""  # folder of token shards
    tokenizer: str = ""  # fingerprint of the tokenizer that the shards were made with
    seed: int = 0

    def check(self) -> None:
        """Refuse numbers that make no sense before anything is computed."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{f.name} is {value}, and must be a number that is not negative.")


@dataclass(frozen=True, kw_only=True)
class WordVectorRecipe(StaticRecipe):
    """What word2vec and GloVe share, under gensim's names."""

    vector_size: int = 100
    window: int = 5  # words to each side
    min_count: int = 5  # words that occur less often are left out
    epochs: int = 5
    max_steps: int = 0  # in place of epochs; 0: counted from them
    minutes: float = 0.0  # plan the run to end after so many: some steps are timed, then max_steps is fixed
    workers: int = 0  # 0: one for each core. With 1 a run is the same every time, to the last bit
    bigrams: int = 0  # vectors of two words in a row, shared by their hash, for fine-tuning as fastText does; 0: none
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

    epochs: int = 0  # 0: 5, and on a small text as many as make 20 million words, but at most 50
    sg: int = 1  # 1: skip-gram, 0: CBOW
    negative: int = 5  # noise words for each guess; 0: the softmax over all words, for small vocabularies
    ns_exponent: float = 0.75
    sample: float = 1e-3  # the share of the text from which on a word is read less often; 0: all are read
    alpha: float = 0.025
    min_alpha: float = 0.0001
    phrases: int = 0  # how often to join two words that mostly follow each other: new york, then new york times
    threshold: float = 10.0  # how much more often than chance, on gensim's scale
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        super().check()
        if self.sg not in (0, 1):
            raise UserError(f"sg is {self.sg}, and must be 1 (skip-gram) or 0 (CBOW).")
        if self.device == "cuda" and not (self.negative and torch.cuda.is_available()):
            raise UserError("device=cuda is for learning with noise words (negative=5), on a machine with a GPU.")


@dataclass(frozen=True, kw_only=True)
class GloVeRecipe(WordVectorRecipe):
    """Pennington et al. 2014, under the names of its own program where gensim has none."""

    window: int = 15
    epochs: int = 25
    x_max: float = glove.DEFAULT_X_MAX
    alpha: float = glove.DEFAULT_WEIGHTING_EXPONENT  # of the weighting
    eta: float = glove.DEFAULT_ETA
    memory: float = 1.0  # gigabytes for counting

    def check(self) -> None:
        super().check()
        for name in ("x_max", "eta"):
            if not getattr(self, name):
                raise UserError(f"{name} is {getattr(self, name):g}, and must be more than 0.")


@dataclass(frozen=True, kw_only=True)
class NgramRecipe(StaticRecipe):
    """Interpolated Kneser-Ney."""

    order: int = 3
    discount: float = 0.0  # one for all; 0: three for each order, estimated (modified Kneser-Ney)

    def check(self) -> None:
        super().check()
        check_ngram_order(self.order, self.discount)


STATIC_RECIPES: dict[str, type[StaticRecipe]] = {"word2vec": Word2VecRecipe, "glove": GloVeRecipe, "ngram": NgramRecipe}
StaticRecipeT = TypeVar("StaticRecipeT", bound=StaticRecipe)
WordVectorRecipeT = TypeVar("WordVectorRecipeT", bound=WordVectorRecipe)


def merge_static_recipe(folder: Path, recipe: StaticRecipeT, resume: bool) -> StaticRecipeT:
    """The recipe of the run in this folder, stored where it is new; a resumed one that was changed is refused."""
    stored = folder / "recipe.yaml"
    if resume and stored.is_file():
        earlier = from_dict(read_yaml_mapping(stored), type(recipe), str(stored))
        moved: dict[str, Any] = {name: getattr(recipe, name) for name in ("output_dir", "data")}
        if isinstance(recipe, WordVectorRecipe) and isinstance(
            earlier, WordVectorRecipe
        ):  # what was left open is as it was settled
            steps = earlier.max_steps if recipe.minutes or not recipe.max_steps else recipe.max_steps
            settled = {name: getattr(recipe, name) or getattr(earlier, name) for name in ("workers", "epochs")}
            recipe = replace(recipe, **settled, max_steps=steps)
        if changed := recipe_differences(replace(earlier, **moved), recipe):
            raise UserError(
                "A resumed run keeps its recipe, and this one differs: " + "; ".join(changed) + ". "
                "Leave these options as they were, or start a new run."
            )
        return replace(earlier, **moved)
    if isinstance(recipe, WordVectorRecipe) and not recipe.workers:
        recipe = replace(recipe, workers=os.cpu_count() or 1)
    save_static_recipe(recipe, stored)
    return recipe


def save_static_recipe(recipe: StaticRecipe, path: Path) -> None:
    write_text(path, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))
