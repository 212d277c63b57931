"""The likely cause of a seed that does not beat chance, from its log and its labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from firth.core.console import format_count
from firth.core.errors import quote
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.registry import LABEL_TASKS
from firth.text import Example
from firth.train import read_log

CONSTANT_LABEL_SHARE = 0.95  # of the examples: with more of one label, always predicting it is hard to beat
MIN_LOGGED_LOSSES = 10  # fewer do not show where the loss went
RISE = 1.02  # last losses over first losses: above, the loss rose
FALL = 0.95  # below, the loss was still falling when the run ended
LEARNED = 0.5  # below, the model has learned its training examples
FEW_STEPS = 200  # the shortest default run


def explain_failed_seed(
    recipe: FinetuneRecipe, train: Sequence[Example], dev: Sequence[Example], seed_folder: Path
) -> str:
    """Return one sentence: the likely cause, with its figures, and the remedy."""
    if constant := find_constant_label(recipe, train, dev):
        return constant
    losses = [line["loss"] for line in read_seed_log(seed_folder) if isinstance(line.get("loss"), float)]
    steps = recipe.max_steps
    lower = f"--learning-rate {recipe.learning_rate / 4:.1g}"
    if len(losses) < MIN_LOGGED_LOSSES:
        return f"{format_count(steps, 'step')} are too few to learn from: give more (--num-train-epochs, --max-steps)"
    part = max(len(losses) // 10, 3)
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    course = f"the loss went from {first:.3f} to {last:.3f}"
    if last > RISE * first:
        return f"{course}: the learning rate of {recipe.learning_rate:g} is too high. Try {lower}"
    if last < LEARNED * first:
        return f"{course}, so it learned train, and dev does not follow: too few examples, or other labels in dev"
    if steps < FEW_STEPS or last < FALL * first:
        return (
            f"{course} in {format_count(steps, 'step')}: these are too few. Give more (--num-train-epochs, --max-steps)"
        )
    if recipe.from_scratch:
        return f"{course}, from random weights: the model was not pretrained, and so few examples do not replace that"
    if recipe.freeze == "backbone":
        return f"{course}, with a frozen backbone: train all layers (--freeze none)"
    return (
        f"{course} and never fell: the learning rate of {recipe.learning_rate:g} does not suit, or the checkpoint was "
        f"hardly pretrained. Try {lower} and --learning-rate {recipe.learning_rate * 4:.1g}, then pretrain longer"
    )


def find_constant_label(recipe: FinetuneRecipe, train: Sequence[Example], dev: Sequence[Example]) -> str | None:
    """Return a sentence on labels that are almost all the same; None where they differ or the task has none."""
    if recipe.task not in LABEL_TASKS:
        return None
    for name, examples in ((recipe.train, train), (recipe.dev, dev)):
        label, count = Counter(e.target for e in examples).most_common(1)[0]
        if count >= CONSTANT_LABEL_SHARE * len(examples):
            return (
                f"{name}: {count / len(examples):.0%} of the labels are {quote(label)}, which is hard to beat by "
                "accuracy. Try --metric macro_f1 --class-weights balanced, or other examples"
            )
    return None


def read_seed_log(seed_folder: Path) -> list[dict[str, Any]]:
    file = seed_folder / "log.jsonl"
    return read_log(file) if file.is_file() else []
