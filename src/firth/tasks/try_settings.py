"""Run a search (`search.py`): train its settings on a split of train, rung by rung, and keep the best one."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from firth.core.console import run_series, say
from firth.core.errors import UserError
from firth.tasks.finetune_job import DEFAULT_FINETUNE_EPOCHS, FinetuneJob
from firth.tasks.finetune_schedule import EARLY_STOPPING_EVALUATIONS, MIN_DEFAULT_STEPS
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.results import deciding_metric, is_lower_better, score_with_error
from firth.tasks.search import SEARCH_FILE, Search, SearchTrial, find_search_obstacle, plan_search, run_halving
from firth.tasks.trial_runs import TrialRuns
from firth.train.resume import read_intermediate


def check_search(recipe: FinetuneRecipe, num_examples: int) -> None:
    """Raise if train is too small or the run too short for a search. Runs before anything is written."""
    examples, steps = min(recipe.shots or num_examples, num_examples), recipe.max_steps or None
    if not steps and not recipe.minutes:
        planned = math.ceil((recipe.num_train_epochs or DEFAULT_FINETUNE_EPOCHS) * examples / recipe.global_batch_size)
        steps = planned if recipe.num_train_epochs else max(planned, MIN_DEFAULT_STEPS)
    if obstacle := find_search_obstacle(examples, steps):
        raise UserError(f"search={recipe.search}: {obstacle}.")


def search_settings(job: FinetuneJob) -> FinetuneRecipe:
    """Choose a setting by successive halving (`search.py`); return the recipe with it.

    All seeds share the choice. Each finished trial is saved, and a resumed run does not repeat it.
    """
    recipe, file, began = job.recipe, job.folder / SEARCH_FILE, time.monotonic()
    metric = deciding_metric(recipe, job.task)
    search = plan_search(recipe, job.num_labelled, metric, is_lower_better(metric))
    if obstacle := find_search_obstacle(job.num_labelled, recipe.max_steps):
        raise UserError(f"search={recipe.search}: {obstacle}.")
    stored = read_intermediate(file, Search)
    if stored is not None and search.same_plan(stored):
        search = replace(search, trials=stored.trials)
    for sentence in search.describe_plan(recipe):
        say(sentence)
    costs = [cost for rung in search.planned_costs() for cost in rung]
    runs: TrialRuns | None = None

    def begin_rung(search: Search, rung: int) -> None:
        say(search.describe_rung(rung))

    def try_setting(search: Search, rung: int, index: int) -> SearchTrial:
        nonlocal runs, began
        runs = runs or TrialRuns(job)
        setting = search.settings[index].apply(recipe, search.shares[rung])
        is_last = rung == search.num_rungs - 1
        losses, predictions = runs.run(setting, f"rung {rung + 1} of {search.num_rungs}, setting {index + 1}", is_last)
        trial = SearchTrial(
            rung, index, setting.max_steps, setting.max_steps * setting.global_batch_size, tuple(losses)
        )
        if predictions:
            score, error = score_with_error(job.task, metric, runs.held_out_examples, predictions)
            trial = replace(trial, score=score, score_error=error)
        series.end_run()
        seconds, began = time.monotonic() - began, time.monotonic()
        return replace(trial, seconds=seconds)

    with run_series(costs[len(search.trials) :]) as series:
        search = run_halving(search, try_setting, lambda search: search.save(file), begin_rung)
    search.save(file)
    assert search.chosen is not None
    say(f"setting {search.chosen + 1} is chosen: {search.describe_setting(search.chosen)}; {search.reason}")
    chosen = search.settings[search.chosen].apply(recipe)
    evaluations = EARLY_STOPPING_EVALUATIONS if recipe.early_stopping else 1
    return replace(chosen, eval_steps=recipe.eval_steps or math.ceil(chosen.max_steps / evaluations))
