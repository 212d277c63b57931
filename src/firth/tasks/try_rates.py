"""Choose the learning rate of a fine-tuning by short runs on a split of the training examples."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from firth.core.console import format_count, run_series, say
from firth.tasks.finetune_job import FinetuneJob
from firth.tasks.rate_trial import (
    RATE_TRIAL_FILE,
    RateTrial,
    checksum_trial_recipe,
    choose_rate,
    find_trial_obstacle,
    load_trial,
    num_trial_steps,
    trial_rate_factor,
)
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.trial_runs import TrialRuns


def choose_learning_rate(job: FinetuneJob) -> FinetuneRecipe:
    """Try the candidate rates, unless the run is too short or train too small; return the recipe with the chosen one.

    All seeds share the choice. Only training examples are read. Each finished rate is saved, so that a resumed run
    does not repeat it: trials depend on the recipe alone, never on each other.
    """
    recipe, file = job.recipe, job.folder / RATE_TRIAL_FILE
    planned = RateTrial(recipe.rate_candidates, recipe.learning_rate, checksum_trial_recipe(recipe))
    stored = load_trial(file)
    trial = stored if stored is not None and planned.same_plan(stored) else planned
    if obstacle := find_trial_obstacle(recipe, job.num_labelled, recipe.max_steps):
        trial = replace(trial, chosen=recipe.learning_rate, reason=obstacle, skipped=True)
        say(f"learning rate {recipe.learning_rate:g}, the default; no others are tried: {obstacle}")
    elif trial.chosen is None:
        trial = try_rates(job, trial, file)
        rate, reason = choose_rate(trial)
        trial = replace(trial, chosen=rate, reason=reason)
        say(f"learning rate {rate:g}: {reason}")
    if job.compute.dist_context.is_main_process:
        trial.save(file)
    assert trial.chosen is not None
    return replace(recipe, learning_rate=trial.chosen, rate_candidates=())


def try_rates(job: FinetuneJob, trial: RateTrial, file: Path) -> RateTrial:
    """Train with each rate that is not tried yet and measure the held-out loss; save the trial after each."""
    recipe = replace(job.recipe, rate_candidates=())
    steps = num_trial_steps(recipe.max_steps)
    factor = trial_rate_factor(recipe.max_steps)
    runs = TrialRuns(job)
    counts = len(runs.train), len(runs.held_out)
    trial = replace(trial, steps=steps, factor=factor, train_examples=counts[0], held_out_examples=counts[1])
    rates = ", ".join(f"{rate:g}" for rate in trial.rates)
    say(
        f"learning rate: trying {rates} (times {factor:.1f}, as a trial is short) for {format_count(steps, 'step')} "
        f"each, on {counts[0]:,} examples of train; the loss on its other {counts[1]:,} decides"
    )
    warmup = min(steps // 10, recipe.warmup_steps)
    settings = replace(recipe, max_steps=steps, warmup_steps=warmup, ema_decay=0.0, tail_average=0.0)
    began, earlier_seconds = time.monotonic(), trial.seconds
    with run_series([1.0] * (len(trial.rates) - len(trial.batch_losses))) as series:
        for rate in trial.rates[len(trial.batch_losses) :]:
            losses, _ = runs.run(replace(settings, learning_rate=factor * rate), f"learning rate {rate:g}")
            seconds = earlier_seconds + time.monotonic() - began
            trial = replace(trial, batch_losses=(*trial.batch_losses, tuple(losses)), seconds=seconds)
            if job.compute.dist_context.is_main_process:
                trial.save(file)
            series.end_run()
    return trial
