"""Functions that return a recipe."""

from firth.recipes.finetuning import finetuning, named
from firth.recipes.pretraining import (
    TOKENIZERS,
    changed,
    complete,
    default_objective,
    gentle,
    pretraining,
    tokenizer_kind,
    vocabulary_size,
)

__all__ = [
    "TOKENIZERS",
    "changed",
    "complete",
    "default_objective",
    "finetuning",
    "gentle",
    "named",
    "pretraining",
    "tokenizer_kind",
    "vocabulary_size",
]
