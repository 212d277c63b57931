"""The likely cause of a seed that does not beat chance, from its log and its labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from firth.core.console import format_count
from firth.core.errors import quote
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.registry import LABEL_TASKS
from firth.text import Example
from firth.train import read_log

CONSTANT_LABEL_SHARE = 0.9  # of the examples: with more of one label, always predicting it is hard to beat
MIN_LOGGED_LOSSES = 10  # fewer do not show where the loss went
RISE = 1.02  # last losses over first losses: above, the loss rose
FALL = 0.95  # below, the loss was still falling when the run ended
LEARNED = 0.5  # below, the model has learned its training examples
EXPLODED = 2.0  # first losses over the loss of equal odds for all labels: above, the first steps were too long
FEW_STEPS = 200  # the shortest default run


class FailureCause(NamedTuple):
    """A sentence: the likely cause, with its figures, and the remedy; and the options to try, "" for other examples."""

    sentence: str
    options: str


def explain_failed_seed(
    recipe: FinetuneRecipe, train: Sequence[Example], dev: Sequence[Example], seed_folder: Path
) -> FailureCause:
    """Return why a seed does not beat chance."""
    if constant := find_constant_label(recipe, train, dev):
        return constant
    losses = [line["loss"] for line in read_seed_log(seed_folder) if isinstance(line.get("loss"), float)]
    steps = recipe.max_steps
    lower, longer = f"--learning-rate {recipe.learning_rate / 4:.1g}", f"--max-steps {max(4 * steps, FEW_STEPS)}"
    if len(losses) < MIN_LOGGED_LOSSES:
        few = f"{format_count(steps, 'step')} are too few to learn from: give more (--num-train-epochs, --max-steps)"
        return FailureCause(few, longer)
    part = max(len(losses) // 10, 3)
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    course = f"the loss went from {first:.3f} to {last:.3f}"
    labels = list_labels(recipe, train)
    entropy = label_entropy(labels)
    if recipe.task == "tag" and first > EXPLODED * equal_odds_loss(labels):
        entropy = None  # the loss of a CRF is that of a sentence, and no word's
    has_exploded = entropy is not None and last > FALL * entropy and first > EXPLODED * equal_odds_loss(labels)
    if last > RISE * first or has_exploded:
        high = f"{course}: the learning rate of {recipe.learning_rate:g} is too high. Try {lower}"
        return FailureCause(high, lower)
    if last < LEARNED * (first if entropy is None else min(first, entropy)):
        learned = f"{course}, so it learned train, and dev does not follow: too few examples, or other labels in dev"
        return FailureCause(learned, "")
    unrelated = entropy is not None and last > FALL * entropy
    doubt = f", or labels do not follow from the texts: their frequencies alone have {entropy:.3f}" if unrelated else ""
    if steps < FEW_STEPS or last < FALL * first:
        few = f"{course} in {format_count(steps, 'step')}: these are too few{doubt}"
        few += ". Give more (--num-train-epochs, --max-steps)"
        return FailureCause(few, longer)
    if recipe.from_scratch:
        untrained = "the model was not pretrained, and so few examples do not replace that"
        return FailureCause(f"{course}, from random weights: {untrained}", longer)
    if recipe.freeze == "backbone":
        return FailureCause(f"{course}, with a frozen backbone: train all layers (--freeze none)", "--freeze none")
    never = (
        f"{course} and never fell: the learning rate of {recipe.learning_rate:g} does not suit, or the checkpoint was "
        f"hardly pretrained{doubt}. Try {lower} and --learning-rate {recipe.learning_rate * 4:.1g}, then pretrain "
        "longer"
    )
    return FailureCause(never, lower)


def list_labels(recipe: FinetuneRecipe, train: Sequence[Example]) -> list[str]:
    """Return the label of each example, or the tag of each word; of other tasks none."""
    if recipe.task == "tag":
        return [tag for e in train for tag in e.target]
    return [e.target for e in train] if recipe.task in LABEL_TASKS else []


def label_entropy(labels: Sequence[str]) -> float | None:
    """Return the entropy of the labels in nats: the loss of a model that knows their frequencies alone."""
    if not labels:
        return None
    return -sum(n / len(labels) * math.log(n / len(labels)) for n in Counter(labels).values())


def equal_odds_loss(labels: Sequence[str]) -> float:
    """Return the loss in nats of a model that gives all labels the same probability, as a new head nearly does."""
    return math.log(len(set(labels)))


def find_constant_label(
    recipe: FinetuneRecipe, train: Sequence[Example], dev: Sequence[Example]
) -> FailureCause | None:
    """Return the cause if almost all labels are the same; None where they differ or the task has none."""
    if recipe.task not in LABEL_TASKS:
        return None
    if len(labels := {e.target for e in dev}) == 1:
        only = f"{recipe.dev}: every label is {quote(labels.pop())}, so no score shows what the model has learned"
        return FailureCause(f"{only}. Take a file with examples of each label", "")
    for name, examples in ((recipe.train, train), (recipe.dev, dev)):
        label, count = Counter(e.target for e in examples).most_common(1)[0]
        if count >= CONSTANT_LABEL_SHARE * len(examples):
            share, options = count / len(examples), "--metric macro_f1 --class-weights balanced"
            hard = f"{name}: {share:.0%} of the labels are {quote(label)}, which is hard to beat by accuracy"
            return FailureCause(f"{hard}. Try {options}, or other examples", options)
    return None


def read_seed_log(seed_folder: Path) -> list[dict[str, Any]]:
    file = seed_folder / "log.jsonl"
    return read_log(file) if file.is_file() else []
