"""How many steps a run takes: from steps, epochs or minutes; for minutes some steps are timed on a disposable model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from firth.core.console import format_count, format_duration, say, warn
from firth.models import Model, TransferLoss
from firth.objectives import Batch
from firth.train.compute import ComputeConfig, choose_threads
from firth.train.optim import make_optimizer
from firth.train.recipe import FreezeSchedule, TrainingConfig
from firth.train.replan import affordable_steps, limit_evaluations
from firth.train.step import RecurrentStateDict, TrainingRun, build_step_runner, train_step
from firth.train.step_runner import LossFn

ScheduledRecipeT = TypeVar("ScheduledRecipeT", bound=TrainingConfig)
GOLDEN_RATIO = 0.6180339887  # multiples of it, modulo 1, cover a run evenly from the first few on
EVALS_PER_PRETRAINING = 10  # evaluations per run without --eval-steps
SLOW_STEP_SECONDS = 0.5


def resolve_schedule(
    recipe: ScheduledRecipeT,
    num_rows: int,
    measure: Callable[[], tuple[float, float]],
    start_time: float,
    num_evals: int = EVALS_PER_PRETRAINING,
    min_steps: int = 1,
    step_rows: float | None = None,
    min_evals: int = 1,
    min_useful_steps: int = 0,
) -> ScheduledRecipeT:
    """Resolve the unset fields: number of steps (from minutes or epochs), warm-up, evaluation interval.

    `measure` returns the seconds of a step and of an evaluation. `step_rows` is the mean number of rows per step.
    """
    steps, step_rows = recipe.max_steps, step_rows or recipe.global_batch_size
    if recipe.minutes:
        step_seconds, evaluation_seconds = measure()
        left = 60 * recipe.minutes - (time.monotonic() - start_time)
        num_evals = max(min_evals, limit_evaluations(num_evals, left, evaluation_seconds))
        steps = affordable_steps(left, step_seconds, evaluation_seconds, num_evals, recipe.eval_steps)
        if steps < 1:
            warn(f"{format_duration(60 * recipe.minutes)} is too short for one step: running one step.")
            steps = 1
        if recipe.max_steps:
            steps = min(steps, recipe.max_steps)
        say(
            f"{step_seconds:.3f}s a step: {format_count(steps, 'step takes', 'steps take')} "
            f"{format_duration(steps * step_seconds)}"
        )
        if steps < min(min_useful_steps, recipe.max_steps or min_useful_steps):
            warn(describe_short_plan(steps, steps * step_rows / num_rows, step_seconds, min_useful_steps))
    elif not steps:
        steps = math.ceil(recipe.num_train_epochs * num_rows / step_rows)
        if steps < min_steps:
            reason = f"num_train_epochs={recipe.num_train_epochs:g} makes {format_count(steps, 'step')}"
            say(f"{reason}, which is few: {min_steps:,} are taken instead")
            steps = min_steps
    if recipe.warmup_steps >= steps:
        warn(
            f"warmup_steps is {recipe.warmup_steps:,} of {format_count(steps, 'step')}: "
            "the learning rate does not reach its peak."
        )
    return replace(
        recipe,
        max_steps=steps,
        warmup_steps=steps // 10 if recipe.warmup_steps < 0 else recipe.warmup_steps,
        eval_steps=recipe.eval_steps or max(1, math.ceil(steps / num_evals)),
    )


def describe_short_plan(steps: int, epochs: float, step_seconds: float, min_useful_steps: int) -> str:
    """Say that a plan is too short to learn from, and how many minutes would do."""
    read = f"{100 * epochs:.0f}% of the text" if epochs < 1 else f"the text {epochs:.1f} times"
    minutes = math.ceil((min_useful_steps - steps) * step_seconds / 60)
    return (
        f"{format_count(steps, 'step reads', 'steps read')} {read}: expect little. With "
        f"{format_count(minutes, 'more minute', 'more minutes')} (--minutes) the run makes {min_useful_steps} steps."
    )


def time_steps(
    training: TrainingConfig,
    compute: ComputeConfig,
    model: Model,
    batch_fn: Callable[[int], Sequence[Batch]],
    evaluate: Callable[[Model], dict[str, float]] | None,
    loss_fn: LossFn | None = None,
    seconds: float = 4.0,
    freeze_schedule: FreezeSchedule | None = None,
    wait_ready: Callable[[], object] | None = None,
    threads: Sequence[int] = (),
) -> tuple[float, float]:
    """Return the seconds of a step and of an evaluation, measured on a disposable model.

    `wait_ready` blocks until background work has ended, which would distort the timing. Of several numbers of CPU
    `threads` the fastest is set.
    """
    dist_context = compute.dist_context
    dist_context.prepare_model(model, training, compute)
    run = TrainingRun(training, compute, model, batch_fn, loss_fn=loss_fn)
    if isinstance(loss_fn, TransferLoss):  # its stages differ in cost
        run.before_step = lambda step: loss_fn.set_progress(step * GOLDEN_RATIO % 1)
    runner = build_step_runner(run)
    optimizer, recurrent_state = make_optimizer(model, training, freeze_schedule), RecurrentStateDict()

    def timed(steps: Sequence[int]) -> float:
        start = time.monotonic()
        for step in steps:
            total = train_step(run, runner, optimizer, batch_fn(step), step, 0.0, recurrent_state)
        total.item()
        return dist_context.broadcast(time.monotonic() - start)

    # Slow steps are timed briefly: the run plans again, and timing must not take its minutes.
    is_slow = timed(range(1)) > SLOW_STEP_SECONDS and compute.device.type == "cpu" and not compute.compile
    if not is_slow:
        timed(range(1, 3))
    if wait_ready is not None:
        wait_ready()
    trials = range(3, 4) if is_slow else range(3, 6)
    choose_threads(threads, lambda: timed(trials[:2]) / len(trials[:2]), turns=1 if is_slow else 2)
    one = timed(trials) / len(trials)
    count = max(1 if is_slow else 3, min(200, int(seconds / one)))
    step_seconds = timed(range(6, 6 + count)) / count
    start = time.monotonic()
    if evaluate is not None:
        evaluate(model)
    return step_seconds, time.monotonic() - start
