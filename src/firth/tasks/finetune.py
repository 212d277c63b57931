"""A checkpoint and labelled examples to a fine-tuned model, several times over."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.console import say, warn
from firth.errors import UserError, nearest
from firth.files import damage, read_json, whole_folder, write_json, write_text
from firth.metrics import score, summarise
from firth.models import Model, load_model, make_model, read_config, write_model
from firth.objectives import Batch
from firth.tasks.classify import Classify
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.task import Prediction, Task
from firth.tasks.text_to_text import LabelWords, TextToText
from firth.text import Example, read_labelled
from firth.tokens import load_tokenizer
from firth.tokens.rows import mix, permute
from firth.train import Machine, Run, choose_machine, fit, load_recipe, run_folder, save_recipe
from firth.train.pretrain import same_recipe, settle, trial

TASKS = ("classify", "text-to-text")
TASK_FILE = "task.json"
FEW_STEPS = 200  # small data need many passes: a run takes at least so many steps


def finetune(recipe: FinetuneRecipe, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train `recipe.seeds` times; the mean and the deviation are the result, the best model is kept."""
    began = time.monotonic()
    recipe.check()
    if recipe.task not in TASKS:
        raise UserError(f"Unknown task {recipe.task!r}. {nearest(recipe.task, TASKS)}")
    config = read_config(recipe.checkpoint)
    train = read_labelled(recipe.train, recipe.task, recipe.columns, "train", recipe.encoding)
    dev = read_labelled(recipe.dev, recipe.task, recipe.columns, "dev", recipe.encoding)
    labels = check_labels(train, dev, recipe) if recipe.task == "classify" else None
    tokenizer = load_tokenizer(recipe.checkpoint)
    task = make_task(recipe.task, labels, tokenizer, config, recipe.max_seq_length, recipe.max_target_length)

    inputs = [recipe.checkpoint, recipe.train, recipe.dev]
    with run_folder(Path(recipe.output_dir), resume, overwrite, inputs) as folder:
        stored = folder / "recipe.yaml"
        machine = choose_machine(recipe)
        chosen = [choose(train, recipe, seed) for seed in range(recipe.seeds)]
        used = sorted({i for places in chosen for i in places})
        train_items = dict(zip(used, task.encode([train[i] for i in used]), strict=True))
        dev_items = task.encode(dev)
        if resume and stored.is_file():
            recipe = same_recipe(load_recipe(stored, FinetuneRecipe), recipe)
        else:
            first = [train_items[i] for i in chosen[0]]
            recipe = settle_seeds(recipe, task, first, dev_items, machine, began)
            save_recipe(recipe, stored)
        for sentence in task.cut:
            say(sentence)
        if labels is not None and config.shape != "encoder-decoder":
            say(f"a new head over {len(labels)} classes")
        scores = []
        for seed, places in enumerate(chosen):
            items = [train_items[i] for i in places]
            scores.append(one_seed(recipe, seed, task, items, dev, dev_items, machine, folder, resume))
        return conclude(recipe, task.metric, scores, folder)


def check_labels(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> tuple[str, ...]:
    """The labels of train in order; one in dev that train does not have is a mistake."""
    labels = tuple(sorted({e.target for e in train}))
    if len(labels) < 2:
        raise UserError(f"{recipe.train}: every example has the label {labels[0]!r}; classification needs two or more.")
    for e in dev:
        if e.target not in labels:
            raise UserError(f"{recipe.dev}, example {e.id}: the label {e.target!r} does not occur in {recipe.train}.")
    return labels


def choose(train: Sequence[Example], recipe: FinetuneRecipe, seed: int) -> Sequence[int]:
    """Which examples a seed learns from: all, or its own few."""
    return few(train, recipe.shots, recipe.seed + seed) if recipe.shots else range(len(train))


def make_task(
    name: str, labels: Sequence[str] | None, tokenizer: Any, config: Any, length: int, target_length: int
) -> Task:
    """The task for this architecture: a head where there is one stack, words where there are two."""
    if name == "text-to-text":
        return TextToText(tokenizer, config, length, target_length)
    assert labels is not None
    if config.shape == "encoder-decoder":
        return LabelWords(labels, tokenizer, config, length, target_length)
    return Classify(labels, tokenizer, config, length)


def settle_seeds(
    recipe: FinetuneRecipe,
    task: Task,
    items: Sequence[Any],
    dev_items: Sequence[Any],
    machine: Machine,
    began: float,
) -> FinetuneRecipe:
    """Fix the steps of each seed, and the evaluation (once, at the end, unless asked). `minutes` are for all seeds."""

    def try_out() -> tuple[float, float]:
        batches = batch_function(recipe, task, items)

        def evaluate(model: Model) -> dict[str, float]:
            task.predict(model, dev_items, machine, 2 * recipe.per_device_train_batch_size)
            return {}

        step, evaluation = trial(recipe, machine, first_model(recipe, task), batches, evaluate)
        return step * recipe.seeds, evaluation * recipe.seeds

    return settle(recipe, len(items), try_out, began, evaluations=1, least=FEW_STEPS)


def one_seed(
    recipe: FinetuneRecipe,
    seed: int,
    task: Task,
    items: Sequence[Any],
    dev: Sequence[Example],
    dev_items: Sequence[Any],
    machine: Machine,
    folder: Path,
    resume: bool,
) -> dict[str, float]:
    """One training; its scores. Done ones are not done again on resume."""
    place = folder / f"seed-{seed}"
    if resume and (place / "results.json").is_file() and damage(place / "final") is None:
        return dict(read_json(place / "results.json"))
    place.mkdir(exist_ok=True)
    recipe = replace(recipe, seed=recipe.seed + seed)
    model = first_model(recipe, task)
    predictions: list[Prediction] = []

    def evaluate(model: Model) -> dict[str, float]:
        predictions[:] = task.predict(model, dev_items, machine, 2 * recipe.per_device_train_batch_size)
        return score(recipe.task, [p.prediction for p in predictions], [e.target for e in dev])

    batches = batch_function(recipe, task, items)
    outcome = fit(Run(recipe, machine, model, batches, evaluate, place, f"seed {seed + 1} of {recipe.seeds}"), resume)
    write_predictions(place / "predictions.jsonl", dev, predictions)
    with whole_folder(place / "final") as temporary:
        write_model(model, temporary)
        write_json(temporary / TASK_FILE, task.facts() | {"max_seq_length": recipe.max_seq_length})
    write_json(place / "results.json", outcome.scores)
    return outcome.scores


def first_model(recipe: FinetuneRecipe, task: Task) -> Model:
    """The checkpoint's body with the task's head, or its twin with random weights."""
    torch.manual_seed(recipe.seed)
    config = read_config(recipe.checkpoint)
    head = task.head(config)
    if not recipe.from_scratch:
        return load_model(recipe.checkpoint, head=head)
    model = make_model(replace(config, head=head, extras=()))
    model.tokenizer = load_tokenizer(recipe.checkpoint)
    return model


def batch_function(recipe: FinetuneRecipe, task: Task, items: Sequence[Any]) -> Callable[[int], list[Batch]]:
    """The micro-batches of a step: the examples in a new order every epoch, as a pure function of the step."""
    size, n = recipe.per_device_train_batch_size, len(items)

    def pick(index: np.ndarray) -> list[Any]:
        epoch, place = np.divmod(index, n)
        return [items[i] for i in permute(place, n, mix(recipe.seed, epoch))]

    def batches(step: int) -> list[Batch]:
        first = step * recipe.global_batch
        starts = range(first, first + recipe.global_batch, size)
        return [task.batch(pick(np.arange(start, start + size))) for start in starts]

    return batches


def few(examples: Sequence[Example], shots: int, seed: int) -> list[int]:
    """The places of so many examples, as evenly over the labels as there are enough of each; drawn by the seed.

    Where there are more labels than `shots`, which labels come is drawn too.
    """
    by_label: dict[str, list[int]] = defaultdict(list)
    for i in permute(np.arange(len(examples)), len(examples), seed).tolist():
        by_label[examples[i].target].append(i)
    rounds = zip_longest(*by_label.values())  # one of each label, then another one of each ...
    return [i for round in rounds for i in round if i is not None][:shots]


def write_predictions(path: Path, examples: Sequence[Example], predictions: Sequence[Prediction]) -> None:
    """One object per example, in order."""
    lines = []
    for e, p in zip(examples, predictions, strict=True):
        line: dict[str, Any] = {"id": e.id, "prediction": p.prediction, "reference": e.target}
        lines.append(json.dumps(line | ({"scores": p.scores} if p.scores else {}), ensure_ascii=False))
    write_text(path, "\n".join(lines) + "\n")


def conclude(recipe: FinetuneRecipe, metric: str, scores: list[dict[str, float]], folder: Path) -> dict[str, Any]:
    """Mean and deviation over the seeds; the best seed's model and predictions become the run's."""
    best = max(range(len(scores)), key=lambda i: scores[i][metric])
    chosen = folder / f"seed-{best}"
    with whole_folder(folder / "final") as temporary:
        for file in (chosen / "final").iterdir():
            if file.name != "manifest.json":
                (temporary / file.name).write_bytes(file.read_bytes())
    write_text(folder / "predictions.jsonl", (chosen / "predictions.jsonl").read_text(encoding="utf-8"))
    mean, std = summarise([s[metric] for s in scores])
    if math.isnan(mean):
        warn(f"{metric} is not a number in some seed.")
    results = {
        "output_dir": str(folder),
        "task": recipe.task,
        "metric": metric,
        "mean": mean,
        "std": std,
        "seeds": [s[metric] for s in scores],
        **{name: summarise([s[name] for s in scores])[0] for name in scores[0]},
        "from_scratch": recipe.from_scratch,
        "best_seed": best,
        "predictions": str(folder / "predictions.jsonl"),
    }
    write_json(folder / "results.json", results)
    return results
