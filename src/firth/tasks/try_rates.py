"""Choose the learning rate of a fine-tuning by short runs on a split of the training examples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from firth.core.console import format_count, quiet, run_series, say, warn
from firth.models import Model
from firth.objectives import Batch
from firth.tasks.finetune_job import FinetuneJob, make_finetune_batch_fn
from firth.tasks.finetune_loss import make_loss_fn
from firth.tasks.rate_trial import (
    RATE_TRIAL_FILE,
    RateTrial,
    choose_rate,
    find_trial_obstacle,
    held_out_batch_size,
    load_trial,
    num_trial_steps,
    split_for_trial,
    trial_rate_factor,
)
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.seed_model import build_seed_model
from firth.tasks.shape_buckets import ShapeCountingBatches
from firth.train import ComputeConfig, Diverged, TrainingRun, fit
from firth.train.step import build_step_runner
from firth.train.step_runner import LossFn, sum_of_means


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
    loss_fn, _ = make_loss_fn(job, model, train_items)

    def evaluate(model: Model) -> dict[str, float]:
        measured[:] = measure_batch_losses(model, held_out_batches, job.compute, loss_fn or model.losses)
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
                loss_fn=loss_fn,
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
def measure_batch_losses(
    model: Model, batches: Sequence[Batch], compute: ComputeConfig, loss_fn: LossFn
) -> list[float]:
    """Return the mean loss of each batch, without dropout."""
    model.eval()
    losses = []
    for batch in batches:
        with compute.autocast():
            losses.append(sum_of_means(loss_fn(batch.to(compute.device)), batch.loss_counts))
    return torch.stack(losses).tolist()
