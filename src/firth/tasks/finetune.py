"""A checkpoint and labelled examples to a fine-tuned model, several times over."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.console import count, quiet, say, warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_json, write_results
from firth.metrics import are_chunks, strays
from firth.models import (
    Classes,
    LMHead,
    Model,
    ModelConfig,
    TaskHead,
    framing,
    grow_vocabulary,
    load_model,
    make_model,
    read_config,
    write_model,
)
from firth.models.adapter import write_adapter
from firth.models.lora import add_lora, refuse_lora
from firth.models.weights import check_weights
from firth.objectives import Batch
from firth.tasks.chat import asks_for_the_day
from firth.tasks.embed import Embed, positives, write_sentence_transformer
from firth.tasks.make import OF_LABELS, TASK_FILE, make_task, without_examples
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.results import (
    DIVERGED,
    PREDICTIONS,
    check_baseline,
    check_metric,
    checksum,
    conclude,
    deciding,
    judge,
    write_predictions,
)
from firth.tasks.shapes import TRIED, Counting, Shapes, find_shapes
from firth.tasks.task import Prediction, Task
from firth.text import Example, Notes, read_labelled
from firth.tokens import load_tokenizer
from firth.tokens.rows import mix, permute
from firth.train import Diverged, Machine, Outcome, Run, choose_machine, fit, load_recipe, run_folder, save_recipe
from firth.train.checkpoint import forget_best, last_writes, list_checkpoints
from firth.train.clock import Clock
from firth.train.deterministic import deterministic
from firth.train.folder import NOTES
from firth.train.going_on import longer_skips, pass_over, same_recipe, turn_back
from firth.train.parallel import ALONE, check_device, device_of
from firth.train.pretrain import settle, trial
from firth.train.recipe import differences

EPOCHS, FEW_STEPS = 3.0, 200  # where nothing is said: so many passes, but at least so many steps, as small data need
# What the tensors of a checkpoint depend on, what its answers mean, and what was best so far.
FIXED = (
    *("task", "answer", "from_scratch", "optim", "ema_decay", "layers", "pool", "bilstm", "crf"),
    *("lora_rank", "lora_targets", "metric"),
)
WRITING = ("prefix", "max_target_length", "num_beams", "length_penalty")  # options of answers in words
EVALUATIONS = 10  # per seed, where a run may stop early and --eval-steps does not say
# Steps of a seed from which on a GPU compiles them by itself. An estimate: three or four shapes take a minute or two
# the first time, and a step of BERT-base that is replayed without takes some 10 ms longer than one that is compiled.
WORTH_COMPILING = 10_000


def finetune(
    recipe: FinetuneRecipe,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
) -> dict[str, Any]:
    """Train `recipe.seeds` times; the mean and the deviation are the result, the best model is kept.

    A resumed run keeps its recipe and its examples unless `allow_change`. `rewind` lets the seed that was under way go
    back to a checkpoint so many steps or more before steps that did harm, and pass over the examples up to them.
    """
    with deterministic(recipe.deterministic):
        return run_seeds(recipe, resume or rewind is not None, overwrite, allow_change, rewind)


def run_seeds(
    recipe: FinetuneRecipe, resume: bool, overwrite: bool, allow_change: bool, rewind: int | None
) -> dict[str, Any]:
    """The run itself, from its examples to its results."""
    began = time.monotonic()
    check_device(recipe)
    check_task(recipe)
    config = read_config(recipe.checkpoint)
    stored = Path(recipe.output_dir) / "recipe.yaml"
    earlier = load_recipe(stored, FinetuneRecipe) if resume and stored.is_file() else None
    data = read_data(recipe)
    tokenizer = load_tokenizer(recipe.checkpoint)
    if asks_for_the_day(tokenizer) and not recipe.day:
        recipe = replace(recipe, day=(earlier.day if earlier else "") or date.today().isoformat())
    task = make_task(recipe.task, data.train, tokenizer, config, recipe)
    check_metric(recipe, data.dev)
    check_baseline(recipe, data.dev)
    # what is refused, is refused before anything is written
    if recipe.class_weights == "balanced":
        balanced(task.head(config), [e.target for e in data.train])
    if not recipe.from_scratch:
        check_weights(Path(recipe.checkpoint))

    inputs = [recipe.checkpoint, recipe.train, recipe.dev, recipe.baseline]
    folder = stored.parent
    with run_folder(folder, resume, overwrite, inputs), Clock(folder, resume, began) as clock:
        job = encode(recipe, task, data, choose_machine(compiling(recipe, config, len(data.train))), folder)
        if earlier is not None:
            recipe = same_recipe(earlier, recipe, allow_change, FIXED)
            recipe = same_examples(recipe, data, allow_change)
            changed = bool(differences(replace(earlier, output_dir=recipe.output_dir), recipe))
            say_done(folder, recipe, changed)
            if changed:
                try_again(folder.glob("seed-*"))
            if rewind is not None:
                recipe = go_back(folder, recipe, rewind)
        else:
            changed = False
            recipe = same_examples(settle_seeds(recipe, job, clock.began), data, allow_change)
        save_recipe(recipe, stored)
        write_notes(folder, data.notes)
        job = replace(job, recipe=recipe, changed=changed)
        for sentence in [
            *about_length(config, recipe),
            *about_shots(recipe, data),
            *task.said,
            *about_head(config, task, recipe),
            *about_writing(config, task, recipe),
            *([f"the step is {job.way} for {job.shapes}"] if job.shapes is not None else []),
        ]:
            say(sentence)
        runs = [one_seed(job, seed, resume) for seed in range(recipe.seeds)]
        with last_writes(folder):
            return conclude(recipe, task, data.train, data.dev, runs, folder)


@dataclass(frozen=True)
class Data:
    train: list[Example]
    dev: list[Example]
    notes: tuple[Notes, ...] = ()  # of each file, on what happened to its rows


@dataclass(frozen=True)
class Job:
    """What all seeds share."""

    recipe: FinetuneRecipe
    task: Task
    data: Data
    chosen: list[Sequence[int]]  # by seed: which examples it learns from
    train_items: Mapping[int, Any]
    dev_items: Sequence[Any]
    machine: Machine
    folder: Path
    shapes: Shapes | None = None  # that batches are padded to, where a step is compiled or replayed
    changed: bool = False  # it goes on with another recipe, or other examples, than before

    @property
    def way(self) -> str:
        return "compiled" if self.machine.compile else "replayed as CUDA graphs"

    def predict(self, model: Model) -> list[Prediction]:
        size = 2 * self.recipe.per_device_train_batch_size
        return self.task.settle(self.data.dev, self.task.predict(model, self.dev_items, self.machine, size))


# --- before the first step ------------------------------------------------------------------------------------------


def check_task(recipe: FinetuneRecipe) -> None:
    """Refuse what the checkpoint cannot learn, whatever the examples are, before these are read."""
    config = read_config(recipe.checkpoint)
    if recipe.lora_rank:
        refuse_lora(config)
    recipe.check()
    task = without_examples(recipe.task, load_tokenizer(recipe.checkpoint), config, recipe)
    recipe.on_top(task.head(config))


def read_data(recipe: FinetuneRecipe) -> Data:
    notes = Notes(recipe.train), Notes(recipe.dev)
    train = read_labelled(recipe.train, recipe.task, recipe.columns, "train", recipe.encoding, notes=notes[0])
    dev = read_labelled(recipe.dev, recipe.task, recipe.columns, "dev", recipe.encoding, notes=notes[1])
    if recipe.task in OF_LABELS:
        check_labels(train, dev, recipe)
    if recipe.task == "tag" and are_chunks([e.target for e in train]) != are_chunks([e.target for e in dev]):
        raise UserError(
            f"{recipe.train} and {recipe.dev} have tags of two kinds: one marks stretches (O, B-PER, I-PER), the other "
            "single words (NOUN). Take files with the same tags."
        )
    if recipe.task == "tag" and (odd := strays([e.target for e in (*train, *dev)])):
        warn(
            f"{', '.join(odd[:5])}: no mark of a stretch, as the other tags are (O, B-PER, I-PER). So single words are "
            "scored, and no stretches."
        )
    if same_file(recipe.train, recipe.dev):
        warn(f"{recipe.dev} is what the model learns from: its score says nothing about other examples.")
    return Data(positives(train, recipe.train) if recipe.task == "embed" else train, dev, notes)


def write_notes(folder: Path, notes: Sequence[Notes]) -> None:
    """All examples that the notes on the files are about, of which the screen has named the first."""
    if found := [note for some in notes for note in some.whole()]:
        write_json(folder / NOTES, found)
    if any(some.shortened for some in notes):
        say(f"all examples that these notes are about: {folder / NOTES}")


def same_file(a: str, b: str) -> bool:
    return Path(a).is_file() and Path(b).is_file() and Path(a).samefile(b)


def check_labels(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> None:
    """A label in dev that train does not have is a mistake; one that only train has is said."""
    labels = sorted({e.target for e in train})
    if len(labels) < 2:
        raise UserError(f"{recipe.train}: every example has the label {labels[0]!r}; classification needs two or more.")
    if recipe.task in ("classify", "pair") and all(is_fraction(label) for label in labels):
        warn(
            f"{recipe.train}: the labels are numbers, as {labels[0]}. Each is a class of its own; "
            "--task regress learns them."
        )
    for e in dev:
        if e.target not in labels:
            raise UserError(f"{recipe.dev}, example {e.id}: the label {e.target!r} does not occur in {recipe.train}.")
    if unseen := [label for label in labels if label not in {e.target for e in dev}]:
        more = f" and {len(unseen) - 10} more" if len(unseen) > 10 else ""
        warn(f"{recipe.dev} has no example of {', '.join(unseen[:10])}{more}: nothing is known about them.")


def is_fraction(label: str) -> bool:
    """
    >>> [is_fraction(label) for label in ("1.5", "1", "x", "nan")]
    [True, False, False, False]
    """
    try:
        return "." in label and math.isfinite(float(label))
    except ValueError:
        return False


def encode(recipe: FinetuneRecipe, task: Task, data: Data, machine: Machine, folder: Path) -> Job:
    """The examples as the model reads them: those that some seed learns from, and all that are scored."""
    chosen = [choose(data.train, recipe, seed) for seed in range(recipe.seeds)]
    used = sorted({i for places in chosen for i in places})
    items = dict(zip(used, task.encode([data.train[i] for i in used]), strict=True))
    shapes = trial_shapes(recipe, task, [items[i] for i in chosen[0]]) if machine.compile or machine.graphs else None
    return Job(recipe, task, data, chosen, items, task.encode(data.dev), machine, folder, shapes)


def compiling(recipe: FinetuneRecipe, config: ModelConfig, num_train: int) -> FinetuneRecipe:
    """The recipe, which leaves compiling to the machine only where the run is known to be long enough for it.

    What goes from place to place is not compiled: a program of a chain of tags has a copy of its step for each place.
    Any other step that is not compiled is replayed as CUDA graphs on a GPU, unless layers begin to learn on the way.
    """
    examples = min(recipe.shots or num_train, num_train)
    planned = math.ceil((recipe.num_train_epochs or EPOCHS) * examples / recipe.global_batch)
    long = (recipe.max_steps or planned) >= WORTH_COMPILING and not recipe.minutes
    in_turn = config.recurrent is not None or recipe.crf or recipe.bilstm
    if recipe.compile is None and not recipe.compile_parts and (in_turn or not long):
        recipe = replace(recipe, compile=False)
    if recipe.cuda_graphs is None and recipe.compile is False and device_of(ALONE, recipe).type == "cuda":
        changes = in_turn or recipe.unfreeze_every or recipe.weights == "bf16" or recipe.gradient_checkpointing
        recipe = replace(recipe, cuda_graphs=not changes)
    return recipe


def trial_shapes(recipe: FinetuneRecipe, task: Task, items: Sequence[Any]) -> Shapes:
    """The shapes of a run's batches, from those of its first epoch, or of the beginning of it."""
    batches, accumulated = batch_function(recipe, task, items), recipe.gradient_accumulation_steps
    steps = min(-(-len(items) // recipe.global_batch), -(-TRIED // accumulated))
    return find_shapes((batch for step in range(steps) for batch in batches(step)), task.tokenizer.vocab.pad)


def choose(train: Sequence[Example], recipe: FinetuneRecipe, seed: int) -> Sequence[int]:
    """Which examples a seed learns from: all, or its own few."""
    if not recipe.shots:
        return range(len(train))
    return few([kind_of(recipe.task, e) for e in train], recipe.shots, recipe.seed + seed)


def kind_of(task: str, example: Example) -> Any:
    """Of what few examples are to have as many as of any other: a label, whether there is an answer, or nothing."""
    if task == "span-qa":
        return len(example.target) > 0
    return example.target if task in OF_LABELS else None


def few(kinds: Sequence[Any], shots: int, seed: int) -> list[int]:
    """The places of so many examples, as evenly over their kinds as there are enough of each; drawn by the seed.

    Where there are more kinds than `shots`, which of them come is drawn too.
    """
    by_kind: dict[Any, list[int]] = defaultdict(list)
    for i in permute(np.arange(len(kinds)), len(kinds), seed).tolist():
        by_kind[kinds[i]].append(i)
    rounds = zip_longest(*by_kind.values())  # one of each kind, then another one of each ...
    return [i for round in rounds for i in round if i is not None][:shots]


def settle_seeds(recipe: FinetuneRecipe, job: Job, began: float) -> FinetuneRecipe:
    """Fix the steps of each seed, and the evaluation (once, at the end, unless asked). `minutes` are for all seeds."""
    items = [job.train_items[i] for i in job.chosen[0]]

    def try_out() -> tuple[float, float]:
        def evaluate(model: Model) -> dict[str, float]:
            job.predict(model)
            return {}

        with quiet():
            model, pace = first_model(job, 0), replace(recipe.pace(len(items)), unfreeze_every=0)
        batches = Counting(batch_function(recipe, job.task, items), job.shapes)
        step, evaluation = trial(recipe, job.machine, model, batches, evaluate, pace=pace)
        return step * recipe.seeds, evaluation * recipe.seeds

    epochs, least = recipe.num_train_epochs or EPOCHS, 1 if recipe.num_train_epochs else FEW_STEPS
    evaluations = EVALUATIONS if recipe.early_stopping else 1
    settled = settle(replace(recipe, num_train_epochs=epochs), len(items), try_out, began, evaluations, least)
    return replace(settled, num_train_epochs=recipe.num_train_epochs)


def about_length(config: ModelConfig, recipe: FinetuneRecipe) -> list[str]:
    """That the model cannot read as much as it was told to."""
    limit = config.max_length
    if limit is None or recipe.max_seq_length <= limit:
        return []
    return [f"max_seq_length is {recipe.max_seq_length:,}, and this model has {limit:,} places: {limit:,} are read."]


def about_shots(recipe: FinetuneRecipe, data: Data) -> list[str]:
    """That there are fewer examples than asked for."""
    if recipe.shots <= len(data.train):
        return []
    return [f"shots is {recipe.shots:,}, and {recipe.train} has {count(len(data.train), 'example')}: all are taken."]


def about_writing(config: ModelConfig, task: Task, recipe: FinetuneRecipe) -> list[str]:
    """That options are of no use where a head answers."""
    if isinstance(task.head(config).head, LMHead):
        return []
    given = [name for name in WRITING if getattr(recipe, name) != getattr(FinetuneRecipe, name)]
    return [f"{', '.join(given)}: of answers in words, and here a head answers"] if given else []


def about_head(config: ModelConfig, task: Task, recipe: FinetuneRecipe) -> list[str]:
    """What is new on the model."""
    wanted = task.head(config).head
    if isinstance(wanted, LMHead):
        return []
    if same_answers(config, wanted) and not recipe.from_scratch:
        return [f"the checkpoint's head for {task.name} goes on learning"]
    return [f"a new head for {task.name}" + (f", over {len(task.labels)} classes" if task.labels else "")]


def same_answers(config: ModelConfig, wanted: Any) -> bool:
    """Whether a checkpoint's head answers the same already."""
    return type(config.head) is type(wanted) and getattr(config.head, "names", ()) == getattr(wanted, "names", ())


# --- a run that goes on -----------------------------------------------------------------------------------------------


def same_examples(recipe: FinetuneRecipe, data: Data, allow_change: bool) -> FinetuneRecipe:
    """Note the checksums of the examples when a run begins; when it goes on, compare them."""
    train = compared(recipe.train, data.train, recipe.train_checksum)
    dev = compared(recipe.dev, data.dev, recipe.dev_checksum)
    if recipe.dev_checksum not in ("", dev):
        raise UserError(
            f"{recipe.dev} is not what it was when this run began, and scores of one run are of the same examples. Put "
            "the old ones back, or start a new run."
        )
    if recipe.train_checksum not in ("", train):
        if not allow_change:
            raise UserError(
                f"{recipe.train} is not what it was when this run began: its examples have changed. Put the old ones "
                "back, start a new run, or go on with the new ones by --allow-change."
            )
        say("from here on the run learns from other examples than those that it began with")
    return replace(recipe, train_checksum=train, dev_checksum=dev)


def compared(file: str, examples: Sequence[Example], noted: str) -> str:
    """The checksum of some examples, of as much of them as the run has noted."""
    part, whole = checksum(examples, marks=False), checksum(examples)
    if noted != part:
        return whole
    if part != whole:
        say(f"{file}: this run did not note marked stretches and further references, so changes in them are not seen.")
    return part


def is_done(place: Path) -> bool:
    """Whether a seed has come to its end."""
    return (place / "results.json").is_file() and damage(place / "final") is None


def has_diverged(place: Path) -> bool:
    """Whether a seed has broken on its loss."""
    results = place / "results.json"
    return results.is_file() and DIVERGED in read_json(results)


def try_again(places: Iterable[Path]) -> None:
    """Forget which seeds have broken, so that they go on from their last checkpoints."""
    for place in filter(has_diverged, places):
        (place / "results.json").unlink()


def say_done(folder: Path, recipe: FinetuneRecipe, changed: bool) -> None:
    """That a change comes too late for the seeds that are done."""
    done = [f"seed-{seed}" for seed in range(recipe.seeds) if is_done(folder / f"seed-{seed}")]
    if changed and done:
        say(f"{', '.join(done)}: done already, and left as before the change.")


def go_back(folder: Path, recipe: FinetuneRecipe, steps: int) -> FinetuneRecipe:
    """Let the seed that was under way go back, and pass over the examples of its trouble, which the recipe notes."""
    name = next((f"seed-{seed}" for seed in range(recipe.seeds) if not is_done(folder / f"seed-{seed}")), None)
    if name is None:
        raise UserError(f"{folder} is finished: there is nothing to rewind.")
    start, last = turn_back(folder / name, steps)
    try_again([folder / name])
    recipe = replace(recipe, skips={**recipe.skips, name: longer_skips(recipe.skips.get(name, ()), start, last)})
    save_recipe(recipe, folder / "recipe.yaml")
    pass_over(folder / name, start, last)
    return recipe


def check_goes_on(place: Path, model: Model) -> None:
    """Refuse to go on with a checkpoint whose answers, or whose tokens, mean something else by now."""
    found = next((folder for folder in list_checkpoints(place) if damage(folder) is None), None)
    if found is None:
        return
    if not same_answers(read_config(found), model.config.head):
        raise UserError(f"{found} has learned other labels than there are now: start a new run.")
    if model.tokenizer and load_tokenizer(found).fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{found} has learned other tokens than the checkpoint has now: start a new run.")


# --- one seed -------------------------------------------------------------------------------------------------------


def one_seed(job: Job, seed: int, resume: bool) -> dict[str, Any]:
    """One training; its scores and numbers, or, of one among several, that it broke. On resume that is not repeated."""
    place = job.folder / f"seed-{seed}"
    if resume and has_diverged(place):
        return dict(read_json(place / "results.json"))
    if resume and is_done(place):
        found = dict(read_json(place / "results.json"))
        scores = {name: math.nan if score is None else score for name, score in found["scores"].items()}
        return found | {"scores": scores}
    place.mkdir(exist_ok=True)
    recipe = replace(job.recipe, seed=job.recipe.seed + seed)
    items = [job.train_items[i] for i in job.chosen[seed]]
    with quiet() if seed else nullcontext():  # what the checkpoint lacks is said once
        model, predictions = first_model(job, seed), list[Prediction]()
    if resume and job.changed:
        check_goes_on(place, model)

    def evaluate(model: Model) -> dict[str, float]:
        predictions[:] = job.predict(model)
        return job.task.score(job.data.dev, predictions)

    batches = Counting(batch_function(recipe, job.task, items, recipe.skips.get(place.name, ())), job.shapes)
    run = Run(
        recipe,
        job.machine,
        model,
        batches,
        evaluate,
        place,
        f"seed {seed + 1} of {recipe.seeds}",
        pace=recipe.pace(len(items)),
        judge=partial(judge, deciding(recipe, job.task)) if recipe.load_best else None,
        patience=recipe.early_stopping,
        keeps_last=False,  # the result is written at once, and a seed that is done is never taken up again
    )
    with last_writes(place):
        began = time.monotonic()
        try:
            outcome = fit(run, resume)
        except Diverged as e:
            if recipe.seeds == 1:
                raise
            warn(f"{place.name} ends here, without a score, and the other seeds go on. {e}")
            results = {DIVERGED: str(e), "steps": e.steps, "seconds": time.monotonic() - began}
            write_results(place / "results.json", results)
            return results
        write_predictions(place / PREDICTIONS, job.data.dev, predictions)
        save_seed(recipe, job.task, model, place)
        shapes = {"train": len(batches.seen), "evaluate": getattr(job.task, "num_shapes", None)}
        results = seed_results(outcome, recipe) | {"compiled": job.machine.compile, "shapes": shapes}
        write_results(place / "results.json", results)
    forget_best(place)
    return results


def first_model(job: Job, seed: int) -> Model:
    """The checkpoint's body with the task's head, or its twin with random weights; with LoRA where that is asked."""
    recipe, task = job.recipe, job.task
    torch.manual_seed(recipe.seed + seed)
    config = read_config(recipe.checkpoint)
    wanted = recipe.on_top(task.head(config))
    if recipe.class_weights == "balanced":
        wanted = balanced(wanted, [job.data.train[i].target for i in job.chosen[seed]])
    if recipe.from_scratch:
        model = make_model(wanted)
    else:
        model = load_model(recipe.checkpoint, head=wanted.head, extras=wanted.extras)
        if isinstance(config.head, TaskHead) and not same_answers(config, wanted.head):
            start_anew(model)
    model.tokenizer = task.tokenizer
    if model.ends is not None and isinstance(wanted.head, LMHead):
        learned = framing(wanted, task.tokenizer.vocab).end
        model.ends += () if learned in model.ends else (learned,)
    grow_vocabulary(model, max(config.vocab_size, task.tokenizer.vocab.size))
    if recipe.lora is not None:
        add_lora(model, recipe.lora)
    return model


def start_anew(model: Model) -> None:
    """Forget the answers of another task, which may have had as many."""
    out = getattr(model.head, "out", None)
    if isinstance(out, torch.nn.Linear):
        torch.nn.init.normal_(out.weight, 0.0, getattr(model.config.init, "std", out.in_features**-0.5))
        if out.bias is not None:
            torch.nn.init.zeros_(out.bias)


def balanced(config: ModelConfig, targets: Sequence[str]) -> ModelConfig:
    """Classes that count n / (k * n_c) each, so that rare ones weigh as much as common ones."""
    if not isinstance(config.head, Classes):
        raise UserError("class_weights=balanced is for a head over classes, and this model answers otherwise.")
    count, names = Counter(targets), config.head.names
    weights = tuple(len(targets) / (len(names) * max(count[name], 1)) for name in names)
    return replace(config, head=replace(config.head, weights=weights))


def batch_function(
    recipe: FinetuneRecipe, task: Task, items: Sequence[Any], skips: Sequence[tuple[int, int]] = ()
) -> Callable[[int], list[Batch]]:
    """The micro-batches of a step: the examples in a new order every epoch, as a pure function of the step.

    After a rewind (`skips`) they are those of a later step, so that the examples between are passed over.
    """
    size, n = recipe.per_device_train_batch_size, len(items)

    def pick(index: np.ndarray) -> list[Any]:
        epoch, place = np.divmod(index, n)
        return [items[i] for i in permute(place, n, mix(recipe.seed, epoch))]

    def batches(step: int) -> list[Batch]:
        first = (step + sum(count for start, count in skips if step >= start)) * recipe.global_batch
        starts = range(first, first + recipe.global_batch, size)
        return [task.batch(pick(np.arange(start, start + size))) for start in starts]

    return batches


def save_seed(recipe: FinetuneRecipe, task: Task, model: Model, place: Path) -> None:
    """`final/`, and where LoRA has learned, `adapter/` for peft."""
    if recipe.lora is not None:
        try:
            with whole_folder(place / "adapter") as temporary:
                write_adapter(model, recipe.lora, recipe.checkpoint, temporary)
        except UserError as e:
            say(f"no adapter/: {e}")
    model.tokenizer = task.framed()
    with whole_folder(place / "final") as temporary:
        write_model(model, temporary)
        write_json(temporary / TASK_FILE, task.facts())
        if isinstance(task, Embed):
            write_sentence_transformer(model, task.form.length, temporary)


def seed_results(outcome: Outcome, recipe: FinetuneRecipe) -> dict[str, Any]:
    per_token = outcome.steps * recipe.global_batch / max(outcome.tokens, 1)
    return {
        "scores": outcome.scores,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "loss": outcome.loss,
        "seconds": outcome.seconds,
        "examples_per_second": outcome.tokens_per_second * per_token,
    }
