"""Functions that return a recipe."""

from firth.recipes.finetuning import finetuning
from firth.recipes.pretraining import TOKENIZERS, pretraining, vocabulary_size

__all__ = ["TOKENIZERS", "finetuning", "pretraining", "vocabulary_size"]
