"""Batch-size and sequence-length warm-up, as a pure function of the step.

Early in training the gradient noise is small relative to the gradient, so a small batch wastes fewer tokens. Short
sequences make early steps cheaper: attention costs grow with the square of the length. Both start small and double
until the ramp ends. A stage is a span of steps with constant shapes.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from firth.core.errors import UserError
from firth.train.recipe import Recipe

UNPLANNED_RUN_STEPS = 10**6  # stand-in for max_steps before it is planned; only shares of it are used


class Stage(NamedTuple):
    """Steps from `first_step`: `num_micro_batches` micro-batches of `micro_batch_rows` rows of `seq_length` tokens."""

    first_step: int
    seq_length: int
    micro_batch_rows: int
    num_micro_batches: int
    rows_before: int  # rows of this length that earlier stages read

    @property
    def step_rows(self) -> int:
        return self.micro_batch_rows * self.num_micro_batches


def ramp_stages(recipe: Recipe) -> list[Stage]:
    """Return the stages of a run in order; one stage where neither ramp is set.

    Doublings are evenly spaced. Shorter rows are proportionally more, so that a step keeps its number of tokens. A
    smaller batch has fewer micro-batches first, then a smaller micro-batch: each new shape costs a compilation.
    """
    steps = recipe.max_steps or UNPLANNED_RUN_STEPS
    shares = (recipe.batch_ramp, recipe.batch_doublings), (recipe.length_ramp, recipe.length_doublings)
    edges = [doubling_steps(share, doublings, steps) for share, doublings in shares]
    stages: list[Stage] = []
    for first in sorted({0, *edges[0], *edges[1]}):
        smaller, shorter = (sum(first < edge for edge in doublings) for doublings in edges)
        rows, count = split_batch(recipe, smaller)
        length, rows = recipe.max_seq_length >> shorter, rows << shorter
        rows_before = 0
        for i, earlier in enumerate(stages):
            if earlier.seq_length == length:
                rows_before += earlier.step_rows * (
                    (stages[i + 1].first_step if i + 1 < len(stages) else first) - earlier.first_step
                )
        stages.append(Stage(first, length, rows, count, rows_before))
    return stages


def doubling_steps(share: float, doublings: int, steps: int) -> list[int]:
    """Return the steps of the doublings; the last one ends the ramp, a `share` of all steps."""
    return [round(share * steps * (i + 1) / doublings) for i in range(doublings)] if share else []


def split_batch(recipe: Recipe, halvings: int) -> tuple[int, int]:
    """Return (rows per micro-batch, micro-batches per step) after this number of halvings of the batch."""
    rows, count = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps * recipe.processes
    for _ in range(halvings):
        rows, count = (rows, -(-count // 2)) if count > 1 else (max(1, rows // 2), 1)
    return rows, count


def micro_batches_per_process(stage: Stage, world_size: int) -> int:
    """Return the number of equal micro-batches per process: the fewest that fit `micro_batch_rows`."""
    rows = stage.step_rows // world_size
    return next(count for count in range(-(-rows // stage.micro_batch_rows), rows + 1) if rows % count == 0)


def check_even_split(recipe: Recipe, world_size: int) -> None:
    """Raise unless `world_size` divides the rows of every step."""
    steps = sorted({stage.step_rows for stage in ramp_stages(recipe)})
    if uneven := [rows for rows in steps if rows % world_size]:
        fit = [str(n) for n in range(1, max(steps) + 1) if all(rows % n == 0 for rows in steps)]
        raise UserError(
            f"{world_size} processes cannot share {uneven[0]} rows of a step evenly, and a run keeps its batch. "
            f"These can: {', '.join(fit[-16:])}."
        )


def stage_at(stages: list[Stage], step: int) -> Stage:
    """Return the stage of a step."""
    return stages[bisect_right([stage.first_step for stage in stages], step) - 1]


def first_row_of_step(stage: Stage, step: int) -> int:
    """Return the index of a step's first row among all rows of its length."""
    return stage.rows_before + (step - stage.first_step) * stage.step_rows


def stage_shares(recipe: Recipe) -> list[tuple[Stage, float]]:
    """Return each stage with its share of the steps; the shares sum to 1."""
    steps, stages = recipe.max_steps or UNPLANNED_RUN_STEPS, ramp_stages(recipe)
    ends = [stage.first_step for stage in stages[1:]] + [max(steps, stages[-1].first_step)]
    return [
        (stage, (min(end, steps) - min(stage.first_step, steps)) / steps)
        for stage, end in zip(stages, ends, strict=True)
    ]


def mean_batch_rows(recipe: Recipe) -> float:
    """Return the mean rows per step, in rows of full length."""
    full = recipe.max_seq_length
    return sum(share * stage.step_rows * stage.seq_length / full for stage, share in stage_shares(recipe))
