"""Read and check the examples of a fine-tuning, and draw those of each seed."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.console import format_count, say, warn
from firth.core.errors import UserError, did_you_mean, list_names, quote, shorten
from firth.core.files import write_json
from firth.metrics import are_span_tags, find_stray_tags
from firth.tasks.distill import ExtraExample, read_unlabeled
from firth.tasks.embed import select_positive_pairs
from firth.tasks.multitask import qualify_ids, task_of
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.registry import LABEL_TASKS
from firth.tasks.results import checksum_examples
from firth.text import Example, RowNotes, read_labelled
from firth.text.python_docs import PYDOCS_NAME
from firth.tokens.permutation import permute_indices
from firth.train.folder import DATA_NOTES_FILE


@dataclass(frozen=True)
class FinetuneData:
    train: list[Example]
    dev: list[Example]
    notes: tuple[RowNotes, ...] = ()  # per file: changed or skipped rows
    unlabeled: tuple[Example, ...] = ()  # for a teacher to label
    extra: tuple[ExtraExample, ...] = ()  # those, and copies with other words; they follow `train` in all indices


def read_finetune_data(recipe: FinetuneRecipe) -> FinetuneData:
    """Read the examples of a run; those of several tasks have the ids NAME/ID."""
    if not recipe.tasks:
        return read_task_data(recipe)
    train, dev, notes = list[Example](), list[Example](), list[RowNotes]()
    for name, part in recipe.task_recipes().items():
        data = read_task_data(part)
        train += qualify_ids(name, data.train)
        dev += qualify_ids(name, data.dev)
        notes += data.notes
    return FinetuneData(train, dev, tuple(notes))


def read_task_data(recipe: FinetuneRecipe) -> FinetuneData:
    notes = RowNotes(recipe.train), RowNotes(recipe.dev), RowNotes(recipe.unlabeled)
    train = read_labelled(recipe.train, recipe.task, recipe.columns, "train", recipe.encoding, notes=notes[0])
    dev = read_labelled(recipe.dev, recipe.task, recipe.columns, "dev", recipe.encoding, notes=notes[1])
    if recipe.task in LABEL_TASKS:
        check_labels(train, dev, recipe)
    if recipe.task == "tag":
        check_several_tags(train, recipe.train)
    if recipe.task == "regress":
        check_several_scores(train, recipe.train)
        check_several_scores(dev, recipe.dev)
    if recipe.task == "tag" and are_span_tags([e.target for e in train]) != are_span_tags([e.target for e in dev]):
        raise UserError(
            f"{recipe.train} and {recipe.dev} have tags of two kinds: one marks spans (O, B-PER, I-PER), the other "
            "single words (NOUN). Take files with the same tags."
        )
    if recipe.task == "tag" and (stray_tags := find_stray_tags([e.target for e in (*train, *dev)])):
        warn(
            f"{list_names(stray_tags, 5)}: not a span tag, as the other tags are (O, B-PER, I-PER). So words are "
            "scored, and no spans."
        )
    warn_about_overlap(train, dev, recipe)
    if recipe.task == "embed":
        train = select_positive_pairs(train, recipe.train)
    return FinetuneData(train, dev, notes, tuple(read_unlabeled(recipe, notes[2])))


def write_data_notes(folder: Path, notes: Sequence[RowNotes]) -> None:
    """Write every note on the examples; the console shows only the first of each kind."""
    if records := [record for file_notes in notes for record in file_notes.to_records()]:
        write_json(folder / DATA_NOTES_FILE, records)
    if any(file_notes.is_abridged for file_notes in notes):
        say(f"all examples that these notes are about: {folder / DATA_NOTES_FILE}")


def warn_about_overlap(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> None:
    """Warn if the texts of dev examples are also training examples: their score measures memory."""

    def key(e: Example) -> Any:
        return e.texts, e.spans, e.references if recipe.task in ("preference", "reward") else ()  # other answers: new

    known = set(map(key, train))
    repeated = [e for e in dev if key(e) in known]
    if not repeated or recipe.dev == PYDOCS_NAME:  # fewer than 1% of the built-in examples, which nobody can edit
        return
    count, share = f"{len(repeated):,} of {format_count(len(dev), 'example')}", len(repeated) / len(dev)
    remedy = "Take other examples" if share == 1 else f"Remove them from {recipe.train}"
    first = shorten(repeated[0].id)
    warn(
        f"{recipe.dev}: {count} ({share:.1%}) also occur in {recipe.train}, the first as example {first}. "
        f"A score on examples of the training says nothing about unseen ones. {remedy}."
    )


def check_several_tags(train: Sequence[Example], path: str) -> None:
    """Raise if all words have the same tag: there is nothing to learn."""
    tags = {tag for e in train for tag in e.target}
    if len(tags) == 1:
        raise UserError(
            f"{path}: every word has the tag {quote(tags.pop())}; tagging needs two or more. Are the tags in another "
            "column (--columns tags=N)?"
        )


def check_several_scores(examples: Sequence[Example], path: str) -> None:
    """Raise if all scores of several examples are the same: nothing can be learned, and no correlation computed."""
    scores = {e.target for e in examples}
    if len(scores) == 1 < len(examples):
        raise UserError(
            f"{path}: every example has the score {scores.pop():g}; regression needs two or more. Are the scores in "
            "another column (--columns score=NAME)?"
        )


def check_labels(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> None:
    """Raise if dev has a label that train lacks. Warn about labels that only train has, and labels spelled twice."""
    labels = sorted({e.target for e in train})
    spellings = defaultdict[str, list[str]](list)
    for label in labels:
        spellings[unicodedata.normalize("NFC", label).strip().lower()].append(label)
    if twice := [label for same in spellings.values() if len(same) > 1 for label in same]:
        warn(
            f"{recipe.train}: {list_names(map(quote, twice), 10)}: labels that differ in capitals, spaces or forms of "
            "characters alone, each a class of its own. Write each label in one way."
        )
    if len(labels) < 2:
        label = quote(labels[0])
        raise UserError(f"{recipe.train}: every example has the label {label}; classification needs two or more.")
    if recipe.task in ("classify", "pair") and all(is_fraction(label) for label in labels):
        warn(
            f"{recipe.train}: the labels are numbers, as {labels[0]}. Each is a class of its own; "
            "--task regress learns them."
        )
    if joined := [label for label in labels if joins_labels(label, labels)]:
        warn(
            f"{recipe.train}: {list_names(map(quote, joined), 3)}: several labels in one. A text has one label here, "
            "so each mixture is a class of its own. For several labels of a text, train one model per label (yes, no)."
        )
    for e in dev:
        if e.target not in labels:
            name, label = f"{recipe.dev}, example {shorten(e.id)}", quote(e.target)
            near = did_you_mean(str(e.target), map(str, labels))
            if joins_labels(e.target, labels):
                near = "A text has one label here; for several, train one model per label (yes, no)."
            raise UserError(f"{name}: the label {label} does not occur in {recipe.train}. {near}")
    if unseen := [label for label in labels if label not in {e.target for e in dev}]:
        warn(f"{recipe.dev} has no example of {list_names(unseen, 10)}: nothing is known about them.")


def joins_labels(label: str, labels: Sequence[str]) -> bool:
    """Whether a label is several of `labels`, joined.

    >>> [joins_labels(label, ["bill", "praise"]) for label in ("bill; praise", "bill", "bill;other")]
    [True, False, False]
    """
    parts = [part.strip() for part in re.split("[;,|]", label)]
    return len(parts) > 1 and all(part in labels for part in parts)


def is_fraction(label: str) -> bool:
    """Whether a label is a finite decimal number with a point.

    >>> [is_fraction(label) for label in ("1.5", "1", "x", "nan")]
    [True, False, False, False]
    """
    try:
        return "." in label and math.isfinite(float(label))
    except ValueError:
        return False


def check_example_checksums(recipe: FinetuneRecipe, data: FinetuneData, allow_change: bool) -> FinetuneRecipe:
    """Save the checksums of the examples in a new run; compare them in a resumed run."""
    train, dev = checksum_examples([*data.train, *data.unlabeled]), checksum_examples(data.dev)
    if recipe.dev_checksum not in ("", dev):
        raise UserError(
            f"{recipe.dev} has changed since this run began, and all scores of a run must use the same examples. "
            "Restore the file, or start a new run."
        )
    if recipe.train_checksum not in ("", train):
        if not allow_change:
            files = f"{recipe.train} or {recipe.unlabeled}" if recipe.unlabeled else recipe.train
            raise UserError(
                f"{files} has changed since this run began. Restore the file, start a new run, or continue with "
                "the new examples by --allow-change."
            )
        say(f"the run continues with changed training examples: {recipe.train}")
    return replace(recipe, train_checksum=train, dev_checksum=dev)


def select_train_examples(train: Sequence[Example], recipe: FinetuneRecipe, seed: int) -> Sequence[int]:
    """Indices of a seed's training examples: all, or `recipe.shots` drawn for this seed."""
    if not recipe.shots:
        return range(len(train))
    if recipe.tasks:
        return sample_each_task(train, recipe, seed)
    return sample_stratified([sampling_stratum(recipe.task, e) for e in train], recipe.shots, recipe.seed + seed)


def used_indices(recipe: FinetuneRecipe, train: Sequence[Example]) -> list[int]:
    """Return the indices of the training examples that any seed uses."""
    return sorted({i for seed in range(recipe.seeds) for i in select_train_examples(train, recipe, seed)})


def add_extra_indices(indices: Sequence[int], data: FinetuneData) -> list[int]:
    """Add the unlabelled examples, and the copies of these examples."""
    own, n = set(indices), len(data.train)
    return [*indices, *(n + i for i, extra in enumerate(data.extra) if extra.source is None or extra.source in own)]


def sample_each_task(train: Sequence[Example], recipe: FinetuneRecipe, seed: int) -> list[int]:
    """Draw `recipe.shots` examples of every task."""
    chosen: list[int] = []
    for name, part in recipe.task_recipes().items():
        own = [i for i, e in enumerate(train) if task_of(e) == name]
        strata = [sampling_stratum(part.task, train[i]) for i in own]
        chosen += [own[i] for i in sample_stratified(strata, recipe.shots, recipe.seed + seed)]
    return chosen


def sampling_stratum(task: str, example: Example) -> Any:
    """Stratum of an example in few-shot sampling: its label, whether it has an answer, or None."""
    if task == "span-qa":
        return len(example.target) > 0
    return example.target if task in LABEL_TASKS else None


def sample_stratified(strata: Sequence[Any], shots: int, seed: int) -> list[int]:
    """Draw `shots` indices, as evenly over the strata as their sizes allow. The seed fixes the draw.

    With more strata than `shots`, the strata are drawn too.
    """
    by_stratum: dict[Any, list[int]] = defaultdict(list)
    for i in permute_indices(np.arange(len(strata)), len(strata), seed).tolist():
        by_stratum[strata[i]].append(i)
    rounds = zip_longest(*by_stratum.values())  # one of each stratum, then a second of each ...
    return [i for round in rounds for i in round if i is not None][:shots]
