"""`--minutes`: from seconds to steps, before the first step and again while the run works.

A plan from a few timed steps is wrong as soon as other programs start or stop. So a run plans again after 5% of its
steps, at the speed of its own steps, and after 25, 50 and 75%. Exact resume stays: the loop saves a checkpoint first,
then the new plan goes into `recipe.yaml`. So a resumed run has the plan of every step that it repeats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from firth.core.console import format_count, say
from firth.train.recipe import TrainingConfig

REPLAN_SHARES = (0.05, 0.25, 0.5, 0.75)  # of the steps
WARMUP_STEPS = 3  # the first steps compile and warm caches: they are not timed
MIN_TIMED_STEPS = 5  # fewer say too little about the speed
REPLAN_TOLERANCE = 0.05  # a plan that is off by less is kept
MIN_TRAINING_SHARE = 0.5  # of `minutes`: a text that takes longer to prepare delays the end of the run
MAX_EVAL_TIME_SHARE = 0.1  # of the time left, for evaluations at an interval that the user has not set


def seconds_to_train(minutes: float, elapsed_seconds: float) -> float:
    """Return the seconds that are left to train: what the preparation has not used, and no less than half of all.

    >>> seconds_to_train(2, 20.0), seconds_to_train(2, 110.0)
    (100.0, 60.0)
    """
    return max(60 * minutes - elapsed_seconds, 60 * minutes * MIN_TRAINING_SHARE)


def limit_evaluations(num_evals: int, seconds_left: float, eval_seconds: float) -> int:
    """Return how many of the evaluations fit into their share of the time; one at the end always stays.

    >>> limit_evaluations(10, 60, 1.0), limit_evaluations(10, 97, 3.4), limit_evaluations(10, 97, 20.0)
    (6, 2, 1)
    """
    affordable = int(MAX_EVAL_TIME_SHARE * seconds_left / max(eval_seconds, 1e-9))
    return max(1, min(num_evals, affordable))


def affordable_steps(
    seconds_left: float, step_seconds: float, eval_seconds: float, num_evals: int, eval_steps: int = 0
) -> int:
    """Return the steps that fit, beside `num_evals` evaluations, or one after every `eval_steps` and one at the end."""
    if eval_steps:
        return int((seconds_left - eval_seconds) / (step_seconds + eval_seconds / eval_steps))
    return int((seconds_left - num_evals * eval_seconds) / step_seconds)


class Replan:
    """Plans the remaining steps of a run with `minutes` again.

    `requested` is the recipe before its schedule was resolved: what the user has set stays. `deadline` is a time of
    time.monotonic. The loop calls `propose` after every step, and `adopt` after it has saved a checkpoint.
    """

    def __init__(
        self, requested: TrainingConfig, deadline: float, eval_seconds: float, record: Callable[[Any], None]
    ) -> None:
        self.requested, self.deadline, self.record = requested, deadline, record
        self.eval_seconds, self.seconds_in_evals = eval_seconds, 0.0
        self.mark: tuple[int, float] | None = None  # step and time from which the speed is measured

    def time_evaluations(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Return `evaluate` with a clock: its seconds do not count as those of steps."""

        def timed(*args: Any) -> Any:
            start = time.monotonic()
            scores = evaluate(*args)
            self.eval_seconds = time.monotonic() - start
            self.seconds_in_evals += self.eval_seconds
            return scores

        return timed

    def is_due(self, step: int, max_steps: int) -> bool:
        """Whether to plan again after this step. The speed is measured from the end of the warm-up on."""
        if self.mark is None and step >= WARMUP_STEPS:
            self.mark, self.seconds_in_evals = (step, time.monotonic()), 0.0
        due = {max(math.ceil(share * max_steps), WARMUP_STEPS + MIN_TIMED_STEPS) for share in REPLAN_SHARES}
        return self.mark is not None and step in due and self.mark[0] + MIN_TIMED_STEPS <= step < max_steps

    def evaluations_left(self, step: int, planned: TrainingConfig) -> int:
        """Return the evaluations after this step, as many as planned unless they take too long."""
        num_evals = math.ceil((planned.max_steps - step) / planned.eval_steps)
        return limit_evaluations(num_evals, self.deadline - time.monotonic(), self.eval_seconds)

    def propose(self, step: int, planned: TrainingConfig) -> int | None:
        """Return the steps that fit into the time left; None where the plan stays."""
        assert self.mark is not None, "is_due comes first"
        now = time.monotonic()
        step_seconds = (now - self.mark[1] - self.seconds_in_evals) / (step - self.mark[0])
        self.mark, self.seconds_in_evals = (step, now), 0.0
        if step_seconds <= 0:
            return None
        num_evals, interval = self.evaluations_left(step, planned), self.requested.eval_steps
        more = affordable_steps(self.deadline - now, step_seconds, self.eval_seconds, num_evals, interval)
        steps = step + max(more, 1)
        steps = min(steps, self.requested.max_steps) if self.requested.max_steps else steps
        change = abs(steps - planned.max_steps) / (planned.max_steps - step)
        return steps if change > REPLAN_TOLERANCE else None

    def adopt(self, step: int, planned: TrainingConfig, steps: int) -> TrainingConfig:
        """Return the recipe with the new number of steps, and record it."""
        fields: dict[str, Any] = {"max_steps": steps}
        if self.requested.warmup_steps < 0 and step < planned.warmup_steps:
            fields["warmup_steps"] = steps // 10
        if not self.requested.eval_steps:
            fields["eval_steps"] = max(1, math.ceil((steps - step) / self.evaluations_left(step, planned)))
        speed = "slower" if steps < planned.max_steps else "faster"
        say(
            f"steps are {speed} than planned: {format_count(steps, 'step')} instead of {planned.max_steps:,}, so that "
            "the run ends on time"
        )
        recipe = replace(planned, **fields)
        self.record(recipe)
        return recipe
