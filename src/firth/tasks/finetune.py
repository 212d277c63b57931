"""Fine-tune a checkpoint on labelled examples, once per seed.

The order of a run: check the recipe, read and encode the examples, resolve the schedule, train each seed, summarize.
Scores of one fine-tuning vary with head initialization and data order (Dodge et al. 2020, "Fine-Tuning Pretrained
Language Models"). So a run trains `recipe.seeds` models and reports mean and deviation. Batches are a pure function of
seed and step, so a resumed seed sees the same examples.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from firth.core.console import format_count, quiet, run_series, say, warn
from firth.core.errors import UserError, list_names, quote, shorten
from firth.core.files import atomic_folder, find_corruption, read_object, write_json, write_results
from firth.core.hashing import hash_uint64
from firth.core.memory import check_memory
from firth.metrics import are_span_tags, find_stray_tags
from firth.models import (
    ClassificationHead,
    LMHead,
    Model,
    ModelConfig,
    TaskHead,
    grow_vocabulary,
    load_model,
    make_model,
    make_sequence_template,
    read_config,
    write_model,
)
from firth.models.hf.adapter import write_adapter
from firth.models.hf.tensors import find_weight_files
from firth.models.lora import add_lora, check_lora_support
from firth.models.parameters import FLOAT_BYTES
from firth.objectives import Batch
from firth.tasks.chat import template_uses_date
from firth.tasks.embed import EmbeddingTask, select_positive_pairs, write_sentence_transformers_files
from firth.tasks.multitask import MultiTask, make_mixed_sampler, mixing_rates, qualify_ids, split_by_task, task_of
from firth.tasks.preference import PreferenceLoss, PreferenceTask, checksum_answers, list_answers, with_references
from firth.tasks.rate_trial import (
    RATE_TRIAL_FILE,
    TRIAL_SHARE,
    RateTrial,
    choose_rate,
    find_trial_obstacle,
    held_out_batch_size,
    load_trial,
    num_held_out,
    num_trial_steps,
    split_for_trial,
    trial_rate_factor,
)
from firth.tasks.recipe import TASK_FILE, FinetuneRecipe
from firth.tasks.registry import LABEL_TASKS, make_task, make_task_without_examples
from firth.tasks.results import (
    DIVERGED_KEY,
    PREDICTIONS_FILE,
    check_baseline,
    check_metric,
    checksum_examples,
    deciding_metric,
    orient_score,
    summarize_seeds,
    write_predictions,
)
from firth.tasks.shape_buckets import MAX_TRIAL_BATCHES, ShapeBuckets, ShapeCountingBatches, fit_shape_buckets
from firth.tasks.task import Prediction, Task
from firth.text import Example, RowNotes, read_labelled
from firth.text.python_docs import PYDOCS_NAME
from firth.tokens import Tokenizer, load_tokenizer
from firth.tokens.permutation import permute_indices
from firth.train import (
    ComputeConfig,
    Diverged,
    FitResult,
    TrainingRun,
    choose_compute,
    fit,
    load_recipe,
    run_folder,
    save_recipe,
)
from firth.train.checkpoint import explain_disk_errors, list_checkpoints, remove_best
from firth.train.clock import RunClock
from firth.train.compute import limit_threads, set_threads, thread_choices
from firth.train.deterministic import deterministic_mode
from firth.train.distributed import SINGLE_PROCESS, check_device, select_device
from firth.train.folder import DATA_NOTES_FILE
from firth.train.pretrain import resolve_schedule, time_steps
from firth.train.recipe import recipe_differences
from firth.train.resources import ResourceEstimate, check_resources, estimate_resources
from firth.train.resume import extend_skips, merge_recipe, read_results, rewind_checkpoints, truncate_log
from firth.train.step import build_step_runner
from firth.train.step_runner import LossFn, sum_of_means

DEFAULT_FINETUNE_EPOCHS = 3.0  # epochs per seed if the recipe sets no length
MIN_DEFAULT_STEPS = 200  # lower bound of the default length in steps: small data need more epochs
# Fields that a resumed run cannot change: tensors of the checkpoint, labels or the best score depend on them.
FIXED_FINETUNE_FIELDS = (
    *(
        "task",
        "tasks",
        "answer",
        "from_scratch",
        "optim",
        "ema_decay",
        "layers",
        "pool",
        "head_dim",
        "bilstm",
        "word_dim",
        "crf",
    ),
    *("lora_rank", "lora_targets", "lm_loss_weight", "metric"),
)
REFERENCE_FILE = "reference.json"  # of preference tuning
TEXT_ANSWER_FIELDS = ("prefix", "max_target_length", "num_beams", "length_penalty")  # options of generated answers
MAX_STORED_ORDER = 2**20  # examples: up to here the order of an epoch is computed at once
EARLY_STOPPING_EVALUATIONS = 10  # per seed with early stopping. Override: --eval-steps
# Steps per seed from which a GPU run compiles by default. An estimate: compiling three or four shapes takes one or two
# minutes, and an uncompiled CUDA-graph step of BERT-base takes about 10 ms longer than a compiled one.
MIN_STEPS_TO_COMPILE = 10_000


def finetune(
    recipe: FinetuneRecipe,
    resume: bool = False,
    overwrite: bool = False,
    allow_change: bool = False,
    rewind: int | None = None,
) -> dict[str, Any]:
    """Train `recipe.seeds` models, return mean and deviation of their scores, and keep the best model.

    A resumed run keeps its recipe and its examples unless `allow_change`. `rewind` restarts the unfinished seed from a
    checkpoint at least that many steps before the harmful steps, and skips the examples in between.
    """
    with deterministic_mode(recipe.deterministic), limit_threads(recipe.threads):
        return run_seeds(recipe, resume or rewind is not None, overwrite, allow_change, rewind)


def run_seeds(
    recipe: FinetuneRecipe, resume: bool, overwrite: bool, allow_change: bool, rewind: int | None
) -> dict[str, Any]:
    """Run all seeds, from reading the examples to the results."""
    began = time.monotonic()
    check_device(recipe)
    check_task(recipe)
    config = read_config(recipe.checkpoint)
    stored = Path(recipe.output_dir) / "recipe.yaml"
    earlier = load_recipe(stored, FinetuneRecipe) if resume and stored.is_file() else None
    data = read_finetune_data(recipe)
    tokenizer = load_tokenizer(recipe.checkpoint)
    if template_uses_date(tokenizer) and not recipe.day:
        recipe = replace(recipe, day=(earlier.day if earlier else "") or date.today().isoformat())
    task = make_run_task(recipe, data.train, tokenizer, config)
    check_metric(recipe, data.dev, task)
    check_baseline(recipe, data.dev)
    # raise these errors before anything is written
    if recipe.class_weights == "balanced":
        balance_class_weights(task.configure_model(config), [e.target for e in data.train])
    if not recipe.from_scratch:
        find_weight_files(Path(recipe.checkpoint))
    if earlier is None:
        check_resources(estimate_finetuning(recipe, task, config), stored.parent, select_device(SINGLE_PROCESS, recipe))

    inputs = [recipe.checkpoint, *recipe.label_files, recipe.baseline]
    folder = stored.parent
    with run_folder(folder, resume, overwrite, inputs), RunClock(folder, resume, began) as clock:
        job = encode_finetune_data(
            recipe, task, data, choose_compute(resolve_compile_options(recipe, config, len(data.train))), folder
        )
        job = with_reference_logps(job)
        if earlier is not None:
            if recipe.rate_candidates:  # the rate was chosen, or its choice was interrupted
                recipe = replace(recipe, learning_rate=earlier.learning_rate, rate_candidates=earlier.rate_candidates)
            recipe = merge_recipe(earlier, recipe, allow_change, FIXED_FINETUNE_FIELDS)
            recipe = check_example_checksums(recipe, data, allow_change)
            changed = bool(recipe_differences(replace(earlier, output_dir=recipe.output_dir), recipe))
            report_finished_seeds(folder, recipe, changed)
            if changed:
                clear_diverged_seeds(folder.glob("seed-*"))
            if rewind is not None:
                recipe = rewind_seed(folder, recipe, rewind)
        else:
            changed = False
            recipe = check_example_checksums(resolve_seed_schedule(recipe, job, clock.start_time), data, allow_change)
        set_threads(recipe.threads)
        save_recipe(recipe, stored)
        write_data_notes(folder, data.notes)
        job = replace(job, recipe=recipe, recipe_changed=changed)
        for sentence in [
            *describe_length_limit(config, recipe),
            *describe_missing_shots(recipe, data),
            *describe_mixture(recipe, job),
            *task.notices,
            *describe_head(config, task, recipe),
            *describe_unused_answer_options(config, task, recipe),
            *([f"the step is {job.execution_mode} for {job.shape_buckets}"] if job.shape_buckets is not None else []),
        ]:
            say(sentence)
        if recipe.rate_candidates:
            recipe = choose_learning_rate(job)
            save_recipe(recipe, stored)
            job = replace(job, recipe=recipe)
        runs = train_seeds(job, resume)
        with explain_disk_errors(folder):
            return summarize_seeds(recipe, task, data.train, data.dev, runs, folder)


def estimate_finetuning(recipe: FinetuneRecipe, task: Task, config: ModelConfig) -> ResourceEstimate:
    """Estimate what a seed needs. With LoRA or frozen weights, those that are not trained count alone."""
    frozen = recipe.lora_rank or recipe.freeze != "none"
    model_config = recipe.apply_head_options(task.configure_model(config))
    check_memory(
        FLOAT_BYTES * 2 * recipe.lora_rank * config.dim * config.num_layers,
        f"LoRA of rank {recipe.lora_rank:,}",
        "Lower --lora-rank: 8 is usual.",
    )
    return estimate_resources(model_config, recipe, trainable_share=0.0 if frozen else 1.0)


@dataclass(frozen=True)
class FinetuneData:
    train: list[Example]
    dev: list[Example]
    notes: tuple[RowNotes, ...] = ()  # per file: changed or skipped rows


@dataclass(frozen=True)
class FinetuneJob:
    """State that all seeds share."""

    recipe: FinetuneRecipe
    task: Task
    data: FinetuneData
    train_indices: list[Sequence[int]]  # by seed: indices of its training examples
    train_items: Mapping[int, Any]
    dev_items: Sequence[Any]
    compute: ComputeConfig
    folder: Path
    shape_buckets: ShapeBuckets | None = None  # None without compile and CUDA graphs
    recipe_changed: bool = False  # the run resumes with another recipe or other examples

    @property
    def execution_mode(self) -> str:
        return "compiled" if self.compute.compile else "replayed as CUDA graphs"

    def predict_dev(self, model: Model) -> list[Prediction]:
        size = 2 * self.recipe.per_device_train_batch_size
        return self.task.predict(model, self.dev_items, self.compute, size)


# --- before the first step ------------------------------------------------------------------------------------------


def check_task(recipe: FinetuneRecipe) -> None:
    """Raise if the checkpoint does not support the task. Runs before the examples are read."""
    config = read_config(recipe.checkpoint)
    if recipe.lora_rank:
        check_lora_support(config)
    recipe.check()
    tokenizer = load_tokenizer(recipe.checkpoint)
    tasks = {
        name: make_task_without_examples(part.task, tokenizer, config, part)
        for name, part in recipe.task_recipes().items()
    }
    task = MultiTask(tasks) if recipe.tasks else tasks[""]
    recipe.apply_head_options(task.configure_model(config))


def make_run_task(recipe: FinetuneRecipe, train: Sequence[Example], tokenizer: Tokenizer, config: ModelConfig) -> Task:
    """Return the task of a run, or its several tasks as one."""
    if not recipe.tasks:
        return make_task(recipe.task, train, tokenizer, config, recipe)
    own = split_by_task(train)
    parts = recipe.task_recipes()
    return MultiTask({name: make_task(p.task, own[name], tokenizer, config, p) for name, p in parts.items()})


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
    notes = RowNotes(recipe.train), RowNotes(recipe.dev)
    train = read_labelled(recipe.train, recipe.task, recipe.columns, "train", recipe.encoding, notes=notes[0])
    dev = read_labelled(recipe.dev, recipe.task, recipe.columns, "dev", recipe.encoding, notes=notes[1])
    if recipe.task in LABEL_TASKS:
        check_labels(train, dev, recipe)
    if recipe.task == "tag":
        check_several_tags(train, recipe.train)
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
    return FinetuneData(select_positive_pairs(train, recipe.train) if recipe.task == "embed" else train, dev, notes)


def write_data_notes(folder: Path, notes: Sequence[RowNotes]) -> None:
    """Write every note on the examples; the console shows only the first of each kind."""
    if records := [record for file_notes in notes for record in file_notes.to_records()]:
        write_json(folder / DATA_NOTES_FILE, records)
    if any(file_notes.is_abridged for file_notes in notes):
        say(f"all examples that these notes are about: {folder / DATA_NOTES_FILE}")


def warn_about_overlap(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> None:
    """Warn if the texts of dev examples are also training examples: their score measures memory."""
    known = {(e.texts, e.spans) for e in train}
    repeated = [e for e in dev if (e.texts, e.spans) in known]
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


def check_labels(train: Sequence[Example], dev: Sequence[Example], recipe: FinetuneRecipe) -> None:
    """Raise if dev has a label that train lacks. Warn about labels that only train has."""
    labels = sorted({e.target for e in train})
    if len(labels) < 2:
        label = quote(labels[0])
        raise UserError(f"{recipe.train}: every example has the label {label}; classification needs two or more.")
    if recipe.task in ("classify", "pair") and all(is_fraction(label) for label in labels):
        warn(
            f"{recipe.train}: the labels are numbers, as {labels[0]}. Each is a class of its own; "
            "--task regress learns them."
        )
    for e in dev:
        if e.target not in labels:
            name, label = f"{recipe.dev}, example {shorten(e.id)}", quote(e.target)
            raise UserError(f"{name}: the label {label} does not occur in {recipe.train}.")
    if unseen := [label for label in labels if label not in {e.target for e in dev}]:
        warn(f"{recipe.dev} has no example of {list_names(unseen, 10)}: nothing is known about them.")


def is_fraction(label: str) -> bool:
    """Whether a label is a finite decimal number with a point.

    >>> [is_fraction(label) for label in ("1.5", "1", "x", "nan")]
    [True, False, False, False]
    """
    try:
        return "." in label and math.isfinite(float(label))
    except ValueError:
        return False


def encode_finetune_data(
    recipe: FinetuneRecipe, task: Task, data: FinetuneData, compute: ComputeConfig, folder: Path
) -> FinetuneJob:
    """Encode the training examples that any seed uses, and all dev examples."""
    chosen = [select_train_examples(data.train, recipe, seed) for seed in range(recipe.seeds)]
    used = sorted({i for indices in chosen for i in indices})
    items = dict(zip(used, task.encode([data.train[i] for i in used]), strict=True))
    shapes = (
        sample_shape_buckets(recipe, task, [items[i] for i in chosen[0]])
        if compute.compile or compute.cuda_graphs
        else None
    )
    return FinetuneJob(recipe, task, data, chosen, items, task.encode(data.dev), compute, folder, shapes)


@dataclass(frozen=True)
class ReferenceFile:
    """reference.json: log-likelihoods of the answers under the checkpoint, and a checksum of the answers' tokens."""

    checksum: str
    logps: tuple[float, ...]


def with_reference_logps(job: FinetuneJob) -> FinetuneJob:
    """Return the job with the reference's log-likelihoods of all answers (preference tuning).

    They are computed once, before training, and read again on resume.
    """
    task = job.task
    if not isinstance(task, PreferenceTask) or not task.preference.needs_reference:
        return job
    train, dev = list(job.train_items.values()), list(job.dev_items)
    answers, file = list_answers([*train, *dev]), job.folder / REFERENCE_FILE
    checksum = checksum_answers(answers)
    stored = read_results(file, ReferenceFile)
    if stored is None or stored["checksum"] != checksum:
        say(f"computing the log-likelihoods of {format_count(len(answers), 'answer')} under the checkpoint")
        with quiet():
            model = build_seed_model(job, 0).to(job.compute.device)
        size = 2 * job.recipe.per_device_train_batch_size
        logps = task.answer_logps(model, answers, job.compute, size).tolist()
        write_json(file, {"checksum": checksum, "logps": logps})
    else:
        logps = stored["logps"]
    items = with_references([*train, *dev], logps)
    return replace(
        job,
        train_items=dict(zip(job.train_items, items[: len(train)], strict=True)),
        dev_items=items[len(train) :],
    )


def make_loss_fn(
    job: FinetuneJob, model: Model, items: Sequence[Any]
) -> tuple[LossFn | None, Callable[[int], None] | None]:
    """Return the loss of a task that has its own, and what it does before each step; None for `Model.losses`."""
    task = job.task
    if not isinstance(task, PreferenceTask):
        return None, None
    loss = PreferenceLoss(model, task.preference, job.compute.device)
    if task.preference.loss != "kto":
        return loss, None
    mismatched = make_finetune_batch_fn(job.recipe, task, items, collate=task.collate_mismatched)
    return loss, lambda step: loss.update_kl(mismatched(step), job.compute)


def resolve_compile_options(recipe: FinetuneRecipe, config: ModelConfig, num_train_examples: int) -> FinetuneRecipe:
    """Return the recipe with `compile` and `engine.cuda_graphs` resolved; compile only long runs by default.

    Loops over positions (LSTM, CRF) are not compiled: the compiler unrolls them into one copy per position. On a GPU,
    other uncompiled steps are replayed as CUDA graphs, unless layers are unfrozen during training.
    """
    examples = min(recipe.shots or num_train_examples, num_train_examples)
    planned = math.ceil((recipe.num_train_epochs or DEFAULT_FINETUNE_EPOCHS) * examples / recipe.global_batch_size)
    long = (recipe.max_steps or planned) >= MIN_STEPS_TO_COMPILE and not recipe.minutes
    sequential = config.recurrent is not None or recipe.crf or recipe.bilstm
    if recipe.compile is None and not recipe.engine.compile_regions and (sequential or not long):
        recipe = replace(recipe, compile=False)
    on_gpu = select_device(SINGLE_PROCESS, recipe).type == "cuda"
    if recipe.engine.cuda_graphs is None and recipe.compile is False and on_gpu:
        uncapturable = (
            sequential or recipe.unfreeze_every or recipe.engine.weights == "bf16" or recipe.gradient_checkpointing
        )
        recipe = replace(recipe, engine=replace(recipe.engine, cuda_graphs=not uncapturable))
    return recipe


def sample_shape_buckets(recipe: FinetuneRecipe, task: Task, items: Sequence[Any]) -> ShapeBuckets:
    """Fit the shape buckets to the batches of the first epoch, at most `MAX_TRIAL_BATCHES`."""
    batches, accumulated = make_finetune_batch_fn(recipe, task, items), recipe.gradient_accumulation_steps
    steps = min(-(-len(items) // recipe.global_batch_size), -(-MAX_TRIAL_BATCHES // accumulated))
    return fit_shape_buckets((batch for step in range(steps) for batch in batches(step)), task.tokenizer.vocab.pad)


def select_train_examples(train: Sequence[Example], recipe: FinetuneRecipe, seed: int) -> Sequence[int]:
    """Indices of a seed's training examples: all, or `recipe.shots` drawn for this seed."""
    if not recipe.shots:
        return range(len(train))
    if recipe.tasks:
        return sample_each_task(train, recipe, seed)
    return sample_stratified([sampling_stratum(recipe.task, e) for e in train], recipe.shots, recipe.seed + seed)


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


def resolve_seed_schedule(recipe: FinetuneRecipe, job: FinetuneJob, start_time: float) -> FinetuneRecipe:
    """Resolve steps and evaluation interval per seed (default: one, at the end).

    `minutes` cover all seeds and the trials of learning rates.
    """
    items = [job.train_items[i] for i in job.train_indices[0]]

    def measure() -> tuple[float, float]:
        def evaluate(model: Model) -> dict[str, float]:
            job.predict_dev(model)
            return {}

        with quiet():
            model = build_seed_model(job, 0)
        freeze_schedule = replace(recipe.freeze_schedule(len(items)), unfreeze_every=0)
        loss_fn, _ = make_loss_fn(job, model, items)
        batches = ShapeCountingBatches(make_finetune_batch_fn(recipe, job.task, items), job.shape_buckets)
        step, evaluation = time_steps(
            recipe,
            job.compute,
            model,
            batches,
            evaluate,
            loss_fn=loss_fn,
            freeze_schedule=freeze_schedule,
            threads=threads,
        )
        return step, evaluation

    threads = thread_choices(recipe, job.compute) if recipe.minutes else []
    epochs = recipe.num_train_epochs or DEFAULT_FINETUNE_EPOCHS
    min_steps = 1 if recipe.num_train_epochs else MIN_DEFAULT_STEPS
    evaluations = EARLY_STOPPING_EVALUATIONS if recipe.early_stopping else 1
    step_seconds, eval_seconds = measure() if recipe.minutes else (0.0, 0.0)

    has_trials = recipe.rate_candidates and not find_trial_obstacle(recipe, len(items), recipe.max_steps or None)
    num_trials = len(recipe.rate_candidates) if has_trials else 0
    # a held-out batch costs about a third of a step
    held_out_steps = num_trials * num_held_out(len(items)) / recipe.per_device_train_batch_size / 3
    resolved = resolve_schedule(
        replace(recipe, num_train_epochs=epochs),
        len(items),
        lambda: (step_seconds * (recipe.seeds + TRIAL_SHARE * num_trials), eval_seconds * recipe.seeds),
        start_time - held_out_steps * step_seconds,
        evaluations,
        min_steps,
        min_evals=evaluations,
    )
    used = torch.get_num_threads() if threads else recipe.threads
    return replace(resolved, num_train_epochs=recipe.num_train_epochs, threads=used)


def plan_finetuning(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe with the steps and the CPU threads that its minutes allow here, without training anything."""
    start_time, config, data = time.monotonic(), read_config(recipe.checkpoint), read_finetune_data(recipe)
    task = make_run_task(recipe, data.train, load_tokenizer(recipe.checkpoint), config)
    compute = choose_compute(resolve_compile_options(recipe, config, len(data.train)))
    with limit_threads():
        job = encode_finetune_data(recipe, task, data, compute, Path(recipe.output_dir))
        return resolve_seed_schedule(recipe, job, start_time)


def describe_length_limit(config: ModelConfig, recipe: FinetuneRecipe) -> list[str]:
    """Notice: max_seq_length exceeds the model's maximum."""
    limit = config.max_length
    if limit is None or recipe.max_seq_length <= limit:
        return []
    return [f"max_seq_length is {recipe.max_seq_length:,}, and this model has {limit:,} positions: {limit:,} are read."]


def describe_missing_shots(recipe: FinetuneRecipe, data: FinetuneData) -> list[str]:
    """Notice: train has fewer examples than `shots`."""
    if recipe.shots <= len(data.train) or recipe.tasks:
        return []
    return [
        f"shots is {recipe.shots:,}, and {recipe.train} has {format_count(len(data.train), 'example')}: all are taken."
    ]


def describe_mixture(recipe: FinetuneRecipe, job: FinetuneJob) -> list[str]:
    """Notice: how much of the batches each of several tasks has."""
    if not recipe.tasks:
        return []
    counts = Counter(job.train_items[i].task for i in job.train_indices[0])
    rates = mixing_rates(counts, recipe.mix_temperature, recipe.mix_cap)
    return [
        f"{name}: {format_count(counts[name], 'example')}, {100 * rate:.1f}% of the batches"
        for name, rate in rates.items()
    ]


def describe_unused_answer_options(config: ModelConfig, task: Task, recipe: FinetuneRecipe) -> list[str]:
    """Notice: generation options have no effect with a task head."""
    if isinstance(task.configure_model(config).head, LMHead):
        return []
    unused = [name for name in TEXT_ANSWER_FIELDS if getattr(recipe, name) != getattr(FinetuneRecipe, name)]
    return [f"{', '.join(unused)}: unused, since a task head predicts here and generates no text"] if unused else []


def describe_head(config: ModelConfig, task: Task, recipe: FinetuneRecipe) -> list[str]:
    """Notice: whether the head is new or comes from the checkpoint."""
    head = task.configure_model(config).head
    if isinstance(head, LMHead):
        return []
    if has_same_labels(config, head) and not recipe.from_scratch:
        return [f"training continues with the checkpoint's head for {task.name}"]
    return [
        f"a new head for {task.name}"
        + (f", over {format_count(len(task.labels), 'class', 'classes')}" if task.labels else "")
    ]


def has_same_labels(config: ModelConfig, head: Any) -> bool:
    """Whether a checkpoint's head has this type and these labels."""
    return type(config.head) is type(head) and getattr(config.head, "names", ()) == getattr(head, "names", ())


# --- resume ---------------------------------------------------------------------------------------------------------


def check_example_checksums(recipe: FinetuneRecipe, data: FinetuneData, allow_change: bool) -> FinetuneRecipe:
    """Save the checksums of the examples in a new run; compare them in a resumed run."""
    train, dev = checksum_examples(data.train), checksum_examples(data.dev)
    if recipe.dev_checksum not in ("", dev):
        raise UserError(
            f"{recipe.dev} has changed since this run began, and all scores of a run must use the same examples. "
            "Restore the file, or start a new run."
        )
    if recipe.train_checksum not in ("", train):
        if not allow_change:
            raise UserError(
                f"{recipe.train} has changed since this run began. Restore the file, start a new run, or continue with "
                "the new examples by --allow-change."
            )
        say(f"the run continues with changed training examples: {recipe.train}")
    return replace(recipe, train_checksum=train, dev_checksum=dev)


@dataclass(frozen=True)
class SeedResults:
    """The keys of a seed's results.json that are read again."""

    allow_unknown_keys = True

    scores: dict[str, float | None]
    steps: int
    seconds: float
    examples_per_second: float | None
    best_step: int | None = None


@dataclass(frozen=True)
class DivergedResults:
    """results.json of a seed whose loss diverged."""

    allow_unknown_keys = True

    diverged: str
    steps: int
    seconds: float


def is_seed_finished(seed_folder: Path) -> bool:
    """Whether a seed has results and an intact model."""
    return (
        find_corruption(seed_folder / "final") is None
        and read_results(seed_folder / "results.json", SeedResults) is not None
    )


def has_seed_diverged(seed_folder: Path) -> bool:
    """Whether a seed ended because its loss diverged."""
    try:
        return DIVERGED_KEY in read_object(seed_folder / "results.json", DivergedResults)
    except UserError:
        return False


def clear_diverged_seeds(seed_folders: Iterable[Path]) -> None:
    """Delete the results of diverged seeds, so that they resume from their last checkpoints."""
    for seed_folder in filter(has_seed_diverged, seed_folders):
        (seed_folder / "results.json").unlink()


def report_finished_seeds(folder: Path, recipe: FinetuneRecipe, changed: bool) -> None:
    """Say that a changed recipe does not apply to finished seeds."""
    done = [f"seed-{seed}" for seed in range(recipe.seeds) if is_seed_finished(folder / f"seed-{seed}")]
    if changed and done:
        say(f"{', '.join(done)}: done already, and left as before the change.")


def rewind_seed(folder: Path, recipe: FinetuneRecipe, steps: int) -> FinetuneRecipe:
    """Rewind the unfinished seed and save the skipped examples in the recipe."""
    name = next((f"seed-{seed}" for seed in range(recipe.seeds) if not is_seed_finished(folder / f"seed-{seed}")), None)
    if name is None:
        raise UserError(f"{folder} is finished: there is nothing to rewind.")
    start, last = rewind_checkpoints(folder / name, steps)
    clear_diverged_seeds([folder / name])
    recipe = replace(recipe, skips={**recipe.skips, name: extend_skips(recipe.skips.get(name, ()), start, last)})
    save_recipe(recipe, folder / "recipe.yaml")
    truncate_log(folder / name, start, last)
    return recipe


def check_seed_resumable(seed_folder: Path, model: Model) -> None:
    """Raise if the last intact checkpoint has other labels or another tokenizer than the model."""
    checkpoint = next((folder for folder in list_checkpoints(seed_folder) if find_corruption(folder) is None), None)
    if checkpoint is None:
        return
    if not has_same_labels(read_config(checkpoint), model.config.head):
        raise UserError(f"{checkpoint} was trained with other labels than the examples have now: start a new run.")
    if model.tokenizer and load_tokenizer(checkpoint).fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{checkpoint} was trained with another tokenizer than this one: start a new run.")


# --- the learning rate ----------------------------------------------------------------------------------------------


def choose_learning_rate(job: FinetuneJob) -> FinetuneRecipe:
    """Try the candidate rates, unless the run is too short or train too small; return the recipe with the chosen one.

    All seeds share the choice. Only training examples are read. Each finished rate is saved, so that a resumed run
    does not repeat it: trials depend on the recipe alone, never on each other.
    """
    recipe, file, indices = job.recipe, job.folder / RATE_TRIAL_FILE, job.train_indices[0]
    trial = load_trial(file)
    if trial is None or (trial.rates, trial.default) != (recipe.rate_candidates, recipe.learning_rate):
        trial = RateTrial(recipe.rate_candidates, recipe.learning_rate)
    if obstacle := find_trial_obstacle(recipe, len(indices), recipe.max_steps):
        trial = replace(trial, chosen=recipe.learning_rate, reason=obstacle, skipped=True)
        say(f"learning rate {recipe.learning_rate:g}, the default; no others are tried: {obstacle}")
    elif trial.chosen is None:
        trial = try_rates(job, trial, file)
        rate, reason = choose_rate(trial)
        trial = replace(trial, chosen=rate, reason=reason)
        say(f"learning rate {rate:g}: {reason}")
    trial.save(file)
    assert trial.chosen is not None
    return replace(recipe, learning_rate=trial.chosen, rate_candidates=())


def try_rates(job: FinetuneJob, trial: RateTrial, file: Path) -> RateTrial:
    """Train with each rate that is not tried yet and measure the held-out loss; save the trial after each.

    The rates share the loaded model, whose weights are restored, and the runner with its compiled step or CUDA graphs.
    """
    recipe = replace(job.recipe, rate_candidates=())
    train, held_out = split_for_trial(len(job.train_indices[0]), recipe.seed)
    items = [job.train_items[i] for i in job.train_indices[0]]
    steps = num_trial_steps(recipe.max_steps)
    factor = trial_rate_factor(recipe.max_steps)
    trial = replace(trial, steps=steps, factor=factor, train_examples=len(train), held_out_examples=len(held_out))
    rates = ", ".join(f"{rate:g}" for rate in trial.rates)
    say(
        f"learning rate: trying {rates} (times {factor:.1f}, as a trial is short) for {format_count(steps, 'step')} "
        f"each, on {len(train):,} examples of train; the loss on its other {len(held_out):,} decides"
    )
    settings = replace(
        recipe, max_steps=steps, warmup_steps=min(steps // 10, recipe.warmup_steps), eval_steps=steps, ema_decay=0.0
    )
    with quiet():
        model = build_seed_model(job, 0)
    model.to(job.compute.device)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train_items = [items[i] for i in train]
    batches = ShapeCountingBatches(make_finetune_batch_fn(settings, job.task, train_items), job.shape_buckets)
    size = held_out_batch_size(len(held_out), recipe.per_device_train_batch_size)
    starts = range(0, len(held_out) - size + 1, size)
    held_out_batches = [job.task.collate([items[i] for i in held_out[start : start + size]]) for start in starts]
    measured: list[float] = []

    def evaluate(model: Model) -> dict[str, float]:
        measured[:] = measure_batch_losses(model, held_out_batches, job.compute)
        return {}

    runner, began, earlier_seconds = None, time.monotonic(), trial.seconds
    with run_series([1.0] * (len(trial.rates) - len(trial.batch_losses))) as series:
        for rate in trial.rates[len(trial.batch_losses) :]:
            model.load_state_dict(initial)
            run = TrainingRun(
                replace(settings, learning_rate=factor * rate),
                job.compute,
                model,
                batches,
                evaluate,
                None,
                f"learning rate {rate:g}",
                freeze_schedule=recipe.freeze_schedule(len(items)),
                runner=runner,
            )
            runner = run.runner = run.runner or build_step_runner(run)
            try:
                fit(run)
            except Diverged as e:
                measured.clear()
                warn(f"learning rate {rate:g} diverged in its trial. {e}")
            seconds = earlier_seconds + time.monotonic() - began
            trial = replace(trial, batch_losses=(*trial.batch_losses, tuple(measured)), seconds=seconds)
            trial.save(file)
            series.end_run()
    return trial


@torch.no_grad()
def measure_batch_losses(model: Model, batches: Sequence[Batch], compute: ComputeConfig) -> list[float]:
    """Return the mean loss of each batch, without dropout."""
    model.eval()
    losses = []
    for batch in batches:
        with compute.autocast():
            losses.append(sum_of_means(model.losses(batch.to(compute.device)), batch.loss_counts))
    return torch.stack(losses).tolist()


# --- one seed -------------------------------------------------------------------------------------------------------


def train_seeds(job: FinetuneJob, resume: bool) -> list[dict[str, Any]]:
    """Train all seeds and return their results; the time left on the status line is that of all unfinished seeds."""
    folders = [job.folder / f"seed-{seed}" for seed in range(job.recipe.seeds)]
    unfinished = [folder for folder in folders if not (resume and (folder / "results.json").is_file())]
    runs = []
    with run_series([1.0] * len(unfinished)) as series:
        for seed, folder in enumerate(folders):
            runs.append(train_seed(job, seed, resume))
            if folder in unfinished:
                series.end_run()
    return runs


def train_seed(job: FinetuneJob, seed: int, resume: bool) -> dict[str, Any]:
    """Train one seed and return its results. A finished or diverged seed is not trained again on resume."""
    seed_folder = job.folder / f"seed-{seed}"
    if resume and has_seed_diverged(seed_folder):
        return read_object(seed_folder / "results.json")
    if resume and is_seed_finished(seed_folder):
        results = read_object(seed_folder / "results.json", SeedResults)
        scores = {name: math.nan if score is None else score for name, score in results["scores"].items()}
        speed = results["examples_per_second"]
        return results | {"scores": scores, "examples_per_second": math.nan if speed is None else speed}
    seed_folder.mkdir(exist_ok=True)
    recipe = replace(job.recipe, seed=job.recipe.seed + seed)
    items = [job.train_items[i] for i in job.train_indices[seed]]
    with quiet() if seed else nullcontext():  # notices about missing weights appear once
        model, predictions = build_seed_model(job, seed), list[Prediction]()
    if resume and job.recipe_changed:
        check_seed_resumable(seed_folder, model)

    def evaluate(model: Model) -> dict[str, float]:
        predictions[:] = job.predict_dev(model)
        return job.task.score(job.data.dev, predictions)

    batches = ShapeCountingBatches(
        make_finetune_batch_fn(recipe, job.task, items, recipe.skips.get(seed_folder.name, ())), job.shape_buckets
    )
    loss_fn, before_step = make_loss_fn(replace(job, recipe=recipe), model, items)
    run = TrainingRun(
        recipe,
        job.compute,
        model,
        batches,
        evaluate,
        seed_folder,
        f"seed {seed + 1} of {recipe.seeds}",
        loss_fn=loss_fn,
        before_step=before_step,
        freeze_schedule=recipe.freeze_schedule(len(items)),
        score_fn=partial(orient_score, deciding_metric(recipe, job.task)) if recipe.load_best else None,
        patience=recipe.early_stopping,
        save_last=False,  # final/ follows at once, and a finished seed never resumes
    )
    with explain_disk_errors(seed_folder):
        began = time.monotonic()
        try:
            outcome = fit(run, resume)
        except Diverged as e:
            if recipe.seeds == 1:
                raise
            warn(f"{seed_folder.name} diverged and has no score; the other seeds continue. {e}")
            results = {DIVERGED_KEY: str(e), "steps": e.steps, "seconds": time.monotonic() - began}
            write_results(seed_folder / "results.json", results)
            return results
        write_predictions(seed_folder / PREDICTIONS_FILE, job.data.dev, predictions)
        save_seed_model(recipe, job.task, model, seed_folder)
        shapes = {"train": len(batches.seen_shapes), "evaluate": getattr(job.task, "num_shapes", None)}
        results = summarize_seed(outcome, recipe) | {"compiled": job.compute.compile, "shapes": shapes}
        write_results(seed_folder / "results.json", results)
    remove_best(seed_folder)
    return results


def build_seed_model(job: FinetuneJob, seed: int) -> Model:
    """Load the checkpoint's backbone with the task's head, or initialize it randomly; add LoRA if enabled."""
    recipe, task = job.recipe, job.task
    torch.manual_seed(recipe.seed + seed)
    config = read_config(recipe.checkpoint)
    model_config = recipe.apply_head_options(task.configure_model(config))
    if recipe.class_weights == "balanced":
        model_config = balance_class_weights(model_config, [job.data.train[i].target for i in job.train_indices[seed]])
    if recipe.from_scratch:
        model = make_model(model_config)
    else:
        model = load_model(recipe.checkpoint, head=model_config.head, extras=model_config.extras)
        if isinstance(config.head, TaskHead) and not has_same_labels(config, model_config.head):
            reset_head(model)
    model.tokenizer = task.tokenizer
    if model.eos_token_ids is not None and isinstance(model_config.head, LMHead):
        eos_id = make_sequence_template(model_config, task.tokenizer.vocab).eos_id
        model.eos_token_ids += () if eos_id in model.eos_token_ids else (eos_id,)
    grow_vocabulary(model, max(config.vocab_size, task.tokenizer.vocab.size))
    if recipe.lora is not None:
        add_lora(model, model.config, recipe.lora)
    return model


def reset_head(model: Model) -> None:
    """Reinitialize the output layer: another task's head may have the same number of classes."""
    out = getattr(model.head, "out", None)
    if isinstance(out, torch.nn.Linear):
        torch.nn.init.normal_(out.weight, 0.0, getattr(model.config.init, "std", out.in_features**-0.5))
        if out.bias is not None:
            torch.nn.init.zeros_(out.bias)


def balance_class_weights(config: ModelConfig, labels: Sequence[str]) -> ModelConfig:
    """Weight each class by n / (k * n_c), so that rare and frequent classes contribute equally to the loss."""
    if not isinstance(config.head, ClassificationHead):
        raise UserError("class_weights=balanced needs a classification head, and this task has another one.")
    count, names = Counter(labels), config.head.names
    weights = tuple(len(labels) / (len(names) * max(count[name], 1)) for name in names)
    return replace(config, head=replace(config.head, class_weights=weights))


def permute_epoch(n: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the examples in an epoch."""
    return permute_indices(np.arange(n), n, hash_uint64(seed, epoch)).tolist()


def make_finetune_batch_fn(
    recipe: FinetuneRecipe,
    task: Task,
    items: Sequence[Any],
    skips: Sequence[tuple[int, int]] = (),
    collate: Callable[[Sequence[Any]], Batch] | None = None,
) -> Callable[[int], list[Batch]]:
    """Return a function from step to micro-batches. It is pure; each epoch has its own permutation of the examples.

    After a rewind, `skips` (start, count) shift the steps from `start` on, so that the examples in between are skipped.
    """
    size, n = recipe.per_device_train_batch_size, len(items)
    epoch_order = lru_cache(maxsize=2)(partial(permute_epoch, n, recipe.seed))  # a batch may span two epochs
    mixed = make_mixed_sampler(items, recipe.mix_temperature, recipe.mix_cap, recipe.seed) if recipe.tasks else None

    def pick(index: np.ndarray) -> list[Any]:
        if n > MAX_STORED_ORDER:
            epoch, offset = np.divmod(index, n)
            return [items[i] for i in permute_indices(offset, n, hash_uint64(recipe.seed, epoch))]
        return [items[epoch_order(i // n)[i % n]] for i in index.tolist()]

    def batches(step: int) -> list[Batch]:
        first = (step + sum(count for start, count in skips if step >= start)) * recipe.global_batch_size
        starts = range(first, first + recipe.global_batch_size, size)
        return [(collate or task.collate)((mixed or pick)(np.arange(start, start + size))) for start in starts]

    return batches


def save_seed_model(recipe: FinetuneRecipe, task: Task, model: Model, seed_folder: Path) -> None:
    """Write `final/` and, with LoRA, `adapter/` in the format of peft."""
    if recipe.lora is not None:
        try:
            with atomic_folder(seed_folder / "adapter", "adapter") as temporary:
                write_adapter(model, recipe.lora, recipe.checkpoint, temporary)
        except UserError as e:
            say(f"no adapter/: {e}")
    model.tokenizer = task.templated_tokenizer()
    with atomic_folder(seed_folder / "final") as temporary:
        write_model(model, temporary)
        write_json(temporary / TASK_FILE, task.metadata())
        if isinstance(task, EmbeddingTask):
            write_sentence_transformers_files(model, task.template.max_length, temporary)


def summarize_seed(outcome: FitResult, recipe: FinetuneRecipe) -> dict[str, Any]:
    per_token = outcome.steps * recipe.global_batch_size / max(outcome.tokens, 1)
    return {
        "scores": outcome.scores,
        "steps": outcome.steps,
        "best_step": outcome.best_step,
        "loss": outcome.loss,
        "seconds": outcome.seconds,
        "examples_per_second": outcome.tokens_per_second * per_token,
    }
