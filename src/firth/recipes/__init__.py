"""Default recipes: functions that return the settings of a training run for a model."""

from firth.recipes.finetuning import (
    finetuning_defaults,
    named_finetuning_defaults,
    preference_defaults,
    with_rate_candidates,
)
from firth.recipes.pretraining import (
    DEFAULT_TOKENIZERS,
    SHAPE_RECIPES,
    choose_batch,
    complete_recipe,
    continued_defaults,
    default_objective,
    default_vocab_size,
    pretraining_recipe,
    scale_rate_to_batch,
    shape_recipe_fields,
    tokenizer_kind,
    update_recipe,
    with_repeated_text,
)

__all__ = [
    "DEFAULT_TOKENIZERS",
    "SHAPE_RECIPES",
    "choose_batch",
    "complete_recipe",
    "continued_defaults",
    "default_objective",
    "default_vocab_size",
    "finetuning_defaults",
    "named_finetuning_defaults",
    "preference_defaults",
    "pretraining_recipe",
    "scale_rate_to_batch",
    "shape_recipe_fields",
    "tokenizer_kind",
    "update_recipe",
    "with_rate_candidates",
    "with_repeated_text",
]
