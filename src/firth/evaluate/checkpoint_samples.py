"""What a model in training makes of a few held-out sentences: a continuation, or words for a blank.

The sentences are chosen once, like those of the report, and are the same for every checkpoint, so that a reader sees
the same text get better. `train/samples.py` says when a checkpoint is sampled, and how long it may take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from firth.evaluate.pretraining_report import (
    NUM_GUESSES,
    SAMPLING,
    Passage,
    completes_by_filling,
    find_passages,
    shorten,
)
from firth.generate.fill import Guess, fill_texts
from firth.generate.loop import iterate_decode_steps
from firth.generate.text import make_prompt_texts
from firth.models import EncoderDecoder, Model
from firth.models.config import ELMoConfig
from firth.tokens import MixedShards, ShardSet
from firth.train.recipe import Recipe
from firth.train.samples import SampleFn


def make_checkpoint_sampler(recipe: Recipe, shards: ShardSet | MixedShards) -> SampleFn | None:
    """Return the function that samples the checkpoints of a run; None for a run without samples.

    A sharded model, the state that a model carries from row to row, and FP8 kernels with their fixed shapes need the
    batches of training: such runs have no samples. ELMo neither writes nor fills.
    """
    needs_batches = recipe.shards_model or recipe.memory or recipe.fp8
    if not recipe.samples or needs_batches or isinstance(recipe.model.recurrent, ELMoConfig):
        return None
    fills = completes_by_filling(recipe)
    passages = find_passages(shards, fills, recipe.model.max_length)[: recipe.samples]
    if not passages:
        return None
    return lambda model, deadline: (fill_passages if fills else continue_passages)(model, passages, deadline)


def continue_passages(model: Model, passages: Sequence[Passage], deadline: float) -> list[dict[str, Any]]:
    """Continue the passages, all in one batch, until the deadline; each has a token at least."""
    prompts = make_prompt_texts(model, [passage.before.rstrip() for passage in passages], SAMPLING)
    steps = iterate_decode_steps(model, [prompt.input_ids for prompt in prompts], SAMPLING)
    decoded = next(steps)
    for _ in steps:  # one object, updated in place
        if time.monotonic() > deadline:
            break
    steps.close()  # leaves the model in the mode that it had
    texts = [prompt.new_text(decoded.token_ids(i)) for i, prompt in enumerate(prompts)]
    return [
        {"before": passage.before, "answer": passage.answer, "text": shorten(text)}
        for passage, text in zip(passages, texts, strict=True)
    ]


def fill_passages(model: Model, passages: Sequence[Passage], deadline: float) -> list[dict[str, Any]]:
    """Fill the blank of each passage: an encoder all in one batch, an encoder-decoder as many as there is time for."""
    texts = [f"{passage.before}[MASK]{passage.after}" for passage in passages]
    is_generated = isinstance(model, EncoderDecoder) or model.config.has_sentinel_prompt
    found = list[Sequence[Guess]]()
    for batch in [[text] for text in texts] if is_generated else [texts]:
        if found and time.monotonic() > deadline:
            break
        found += [blanks[0].guesses for blanks in fill_texts(model, batch, NUM_GUESSES)]
    return [
        {
            **passage._asdict(),
            "guesses": [[shorten(guess.text), round(guess.probability, 4)] for guess in guesses],
        }
        for passage, guesses in zip(passages, found, strict=False)
    ]
