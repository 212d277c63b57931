"""The loss of a task that has its own, and the reference's log-likelihoods that preference tuning needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firth.core.console import format_count, quiet, say
from firth.models import Model
from firth.tasks.finetune_job import FinetuneJob, make_finetune_batch_fn
from firth.tasks.preference import (
    SINGLE_ANSWER_LOSS,
    PreferenceLoss,
    PreferenceTask,
    checksum_answers,
    list_answers,
    with_references,
)
from firth.tasks.reward import RewardLoss, RewardTask
from firth.tasks.seed_model import build_seed_model
from firth.train.resume import read_intermediate, write_intermediate
from firth.train.step_runner import LossFn

REFERENCE_FILE = "reference.json"  # of preference tuning


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
    train, dev = list(job.train_items.values()), task.with_mismatched(job.dev_items, job.data.dev)
    answers, file = list_answers([*train, *dev]), job.folder / REFERENCE_FILE
    checksum = checksum_answers(answers)
    stored = read_intermediate(file, ReferenceFile)
    if stored is None or stored.checksum != checksum:
        say(f"computing the log-likelihoods of {format_count(len(answers), 'answer')} under the checkpoint")
        with quiet():
            model = build_seed_model(job, 0).to(job.compute.device)
        size = 2 * job.recipe.per_device_train_batch_size
        logps = task.answer_logps(model, answers, job.compute, size).tolist()
        if job.compute.dist_context.is_main_process:
            write_intermediate(file, {"checksum": checksum, "logps": logps})
    else:
        logps = stored.logps
    items = with_references([*train, *dev], logps)
    return replace(
        job,
        train_items=dict(zip(job.train_items, items[: len(train)], strict=True)),
        dev_items=items[len(train) :],
    )


def make_loss_fn(
    job: FinetuneJob, model: Model, items: Sequence[Any], skips: Sequence[tuple[int, int]] = ()
) -> tuple[LossFn | None, Callable[[int], None] | None]:
    """Return the loss of a task that has its own, and what it does before each step; None for `Model.losses`.

    `skips` are those of the batches (`make_finetune_batch_fn`): what is done before a step is about its examples.
    """
    task = job.task
    if isinstance(task, RewardTask):
        return RewardLoss(model, job.recipe.center_rewards_coefficient), None
    if not isinstance(task, PreferenceTask):
        return None, None
    loss = PreferenceLoss(model, task.preference, job.compute.device)
    if task.preference.loss != SINGLE_ANSWER_LOSS:
        return loss, None
    mismatched = make_finetune_batch_fn(job.recipe, task, items, skips, task.collate_mismatched)
    return loss, lambda step: loss.update_kl(mismatched(step), job.compute)
