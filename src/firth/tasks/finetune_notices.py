"""What a fine-tuning says before its first step."""

from __future__ import annotations

from collections import Counter

from firth.core.console import format_count
from firth.models import LMHead, ModelConfig, MultiTaskHead
from firth.tasks.chain import describe_start
from firth.tasks.finetune_data import FinetuneData
from firth.tasks.finetune_job import FinetuneJob
from firth.tasks.multitask import MultiTask, mixing_rates
from firth.tasks.preference import DEFAULT_LOSS, PreferenceTask
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.seed_model import keeps_head
from firth.tasks.task import Task

TEXT_ANSWER_FIELDS = ("prefix", "max_target_length", "num_beams", "length_penalty")  # options of generated answers


def describe_job(job: FinetuneJob, config: ModelConfig) -> list[str]:
    """Return all notices about a run."""
    recipe, task = job.recipe, job.task
    return [
        *describe_length_limit(config, recipe),
        *describe_missing_shots(recipe, job.data),
        *describe_preference_loss(recipe, task),
        *describe_mixture(recipe, job),
        *describe_teacher(recipe, job),
        *task.notices,
        *describe_start(config, recipe),
        *describe_head(config, task, recipe),
        *describe_unused_answer_options(config, task, recipe),
        *([f"the step is {job.execution_mode} for {job.shape_buckets}"] if job.shape_buckets is not None else []),
    ]


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


def describe_preference_loss(recipe: FinetuneRecipe, task: Task) -> list[str]:
    """Notice: the examples have chosen another loss than the default."""
    if not isinstance(task, PreferenceTask) or recipe.preference_loss or task.preference.loss == DEFAULT_LOSS:
        return []
    return [f"some rows have one answer and its label: the loss is {task.preference.loss} (--preference-loss)"]


def describe_mixture(recipe: FinetuneRecipe, job: FinetuneJob) -> list[str]:
    """Notice: how much of the batches each of several tasks has."""
    if not recipe.tasks:
        return []
    counts = Counter(job.train_items[i].task for i in job.train_indices[0])
    rates = mixing_rates(counts, recipe.mix_temperature, recipe.mix_cap, recipe.mix_weights)
    part = "steps" if isinstance(job.task, MultiTask) and job.task.has_heads else "batches"
    return [
        f"{name}: {format_count(counts[name], 'example')}, {100 * rate:.1f}% of the {part}"
        for name, rate in rates.items()
    ]


def describe_teacher(recipe: FinetuneRecipe, job: FinetuneJob) -> list[str]:
    """Notice: what a student learns from."""
    if not recipe.teacher:
        return []
    copies = sum(extra.source is not None for extra in job.data.extra)
    texts = [
        format_count(job.num_labelled, "labelled example"),
        *([format_count(len(job.data.unlabeled), "unlabelled example")] if job.data.unlabeled else []),
        *([format_count(copies, "copy", "copies") + " with other words"] if copies else []),
    ]
    alpha = recipe.distill_alpha
    shares = f"{alpha:g} of the loss is the teacher's predictions, {1 - alpha:g} the labels"
    return [f"the student learns from {', '.join(texts)}: {shares}"]


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
    if keeps_head(recipe, config, head):
        return [f"training continues with the checkpoint's head for {task.name}"]
    if isinstance(head, MultiTaskHead):
        return [f"new heads for {', '.join(own.name for own in head.heads)}, over one shared {config.architecture}"]
    return [
        f"a new head for {task.name}"
        + (f", over {format_count(len(task.labels), 'class', 'classes')}" if task.labels else "")
    ]
