"""Steps and evaluations of each seed; `minutes` cover all seeds and the trials before them."""

from __future__ import annotations

from dataclasses import replace

import torch

from firth.core.console import quiet
from firth.models import Model
from firth.tasks.finetune_job import DEFAULT_FINETUNE_EPOCHS, FinetuneJob, make_finetune_batch_fn
from firth.tasks.finetune_loss import make_loss_fn
from firth.tasks.rate_trial import TRIAL_SHARE, find_trial_obstacle, num_held_out
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.search import plan_search
from firth.tasks.seed_model import build_seed_model
from firth.tasks.shape_buckets import ShapeCountingBatches
from firth.train.compute import thread_choices
from firth.train.schedule import resolve_schedule, time_steps

MIN_DEFAULT_STEPS = 200  # lower bound of the default length in steps: small data need more epochs
EARLY_STOPPING_EVALUATIONS = 10  # per seed with early stopping. Override: --eval-steps


def resolve_seed_schedule(recipe: FinetuneRecipe, job: FinetuneJob, start_time: float) -> FinetuneRecipe:
    """Resolve steps and evaluation interval per seed (default: one, at the end).

    `minutes` cover all seeds and the trials before them.
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
        batches = ShapeCountingBatches(
            make_finetune_batch_fn(recipe, job.task, items, dist_context=job.compute.dist_context), job.shape_buckets
        )
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

    num_trials, trial_cost = count_trials(recipe, job.num_labelled)
    # a held-out batch costs about a third of a step
    held_out_steps = num_trials * num_held_out(job.num_labelled) / recipe.per_device_train_batch_size / 3
    resolved = resolve_schedule(
        replace(recipe, num_train_epochs=epochs),
        len(items),
        lambda: (step_seconds * (recipe.seeds + trial_cost), eval_seconds * recipe.seeds),
        start_time - held_out_steps * step_seconds,
        evaluations,
        min_steps,
        min_evals=evaluations,
    )
    used = torch.get_num_threads() if threads else recipe.threads
    resolved = replace(resolved, num_train_epochs=recipe.num_train_epochs, threads=used)
    return replace(resolved, eval_steps=recipe.eval_steps) if recipe.search_fields else resolved  # of the chosen length


def count_trials(recipe: FinetuneRecipe, num_examples: int) -> tuple[int, float]:
    """Return how many trials come before the seeds, and their steps over those of a seed."""
    if recipe.search_fields:
        search = plan_search(recipe, num_examples)
        return sum(map(len, search.planned_costs())), search.cost
    if not recipe.rate_candidates or find_trial_obstacle(recipe, num_examples, recipe.max_steps or None):
        return 0, 0.0
    return len(recipe.rate_candidates), TRIAL_SHARE * len(recipe.rate_candidates)
