"""The command `models`: the presets and the static models."""

from __future__ import annotations

from typing import Any

from firth.commands.results import ModelList
from firth.core.errors import UserError, did_you_mean, quote
from firth.models import FAMILY_DESCRIPTIONS, PRESETS, count_parameters, flops_per_token
from firth.recipes import default_objective

# Name, objective, number of parameters (which depends on the text) and purpose.
STATIC_MODELS = (
    ("word2vec", "skip-gram or CBOW", "2 x 100 for each word", "single words: fast, similar words, analogies"),
    ("glove", "counts of pairs", "100 for each word", "single words, from the co-occurrence counts of a whole text"),
    ("ngram", "counts of n-grams", "2 for each n-gram", "a baseline for perplexity; generation"),
)


def models(name: str = "") -> ModelList:
    """The presets, or those with `name` in their name or family, or of this architecture: parameters and purpose.

    `flops_per_token` is the forward pass in a row of 512 tokens; training takes three times as many. word2vec, GloVe
    and n-gram models look words up. Their parameters depend on the text: they are None, and `size` describes them.
    """
    static: list[dict[str, Any]] = [
        {
            "name": name,
            "family": name,
            "architecture": "no layers",
            "parameters": None,
            "size": size,
            "flops_per_token": 0,
            "objective": objective,
            "good_for": good_for,
        }
        for name, objective, size, good_for in STATIC_MODELS
    ]
    presets: list[dict[str, Any]] = [
        {
            "name": name,
            "family": config.family,
            "architecture": config.architecture,
            "parameters": count_parameters(config),
            "flops_per_token": flops_per_token(config, 512),
            "objective": default_objective(config),
            "good_for": FAMILY_DESCRIPTIONS[config.family],
        }
        for name, config in PRESETS.items()
    ]
    every = presets + static
    part = name.lower()
    found = [m for m in every if part in m["name"] or part in m["family"] or part == m["architecture"]]
    if not found:
        raise UserError(f"No preset has {quote(name)} in its name. {did_you_mean(name, [m['name'] for m in every])}")
    return ModelList(found)
