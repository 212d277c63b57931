"""The command that does what a plan says, to paste: every planned setting is an option of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.core.console import program
from firth.lab.check_commands import reading_options
from firth.lab.planner import PlannedRun
from firth.models import get_preset
from firth.objectives import MaskedNextToken
from firth.recipes.pretraining import DROPOUT_FIELDS
from firth.text import Corpus

PLANNED_OPTIONS = ("max_seq_length", "global_batch_tokens", "learning_rate", "save_steps")


def write_command(
    run: PlannedRun,
    sources: list[str | Path],
    corpus: Corpus | None,
    tokenizer_path: str | Path | None,
    vocab_size: int,
    lowercase: bool,
    given: Mapping[str, Any],
) -> str:
    """Return the command line of `firth pretrain` for a planned run.

    `given` are the options that the plan was made with; a text that is not tokenized yet gets its vocabulary size.
    """
    recipe = run.recipe
    words = [*program(), "pretrain", run.name]
    for source in sources:
        words += ["--data", str(source)]
    words += ["--output-dir", "run"]
    planned = {name: getattr(recipe, name) for name in PLANNED_OPTIONS if getattr(recipe, name)}
    length = {"minutes": recipe.minutes} if recipe.minutes else {"max_steps": recipe.max_steps}
    if not recipe.minutes and not recipe.max_steps:
        length = {"num_train_epochs": recipe.num_train_epochs}
    if tokenizer_path is not None:
        words += ["--tokenizer", str(tokenizer_path)]
    elif corpus is not None:
        words += ["--vocab-size", str(vocab_size), *["--lowercase"] * lowercase]
    for name, value in {**given, **planned, **length}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    words += reading_options(corpus, ()) if corpus is not None else []
    return shlex.join([*words, *(f"{name}={value:g}" for name, value in passes_settings(run).items())])


def passes_settings(run: PlannedRun) -> dict[str, float]:
    """Return what the passes over the text have chosen, where it is not the default of the model and the objective."""
    objective, own = run.recipe.objective, get_preset(run.name)
    found = {f"model.{name}": (getattr(own, name), getattr(run.recipe.model, name)) for name in DROPOUT_FIELDS}
    if isinstance(objective, MaskedNextToken):
        found["objective.masked_share"] = (type(objective)().masked_share, objective.masked_share)
    return {name: planned for name, (usual, planned) in found.items() if planned != usual}
