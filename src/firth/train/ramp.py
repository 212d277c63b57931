"""Batches that grow and rows that grow over the first part of a run, as a pure function of the step."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from firth.core.errors import UserError
from firth.train.recipe import Recipe

UNPLANNED_RUN_STEPS = 10**6  # steps of a run whose end is not planned yet, to tell which share of it each stage has


class Stage(NamedTuple):
    """From step `first_step` on: `num_micro_batches` micro-batches of `micro_batch_rows` rows of `seq_length` tokens."""

    first_step: int
    seq_length: int
    micro_batch_rows: int
    num_micro_batches: int
    rows_before: int  # rows of this length that earlier stages have read

    @property
    def step_rows(self) -> int:
        return self.micro_batch_rows * self.num_micro_batches


def ramp_stages(recipe: Recipe) -> list[Stage]:
    """The stages of a run in order; one where nothing grows.

    Each doubling takes an equal part of the ramp. Shorter rows come in so many more that a step has as many tokens.
    Smaller batches have fewer micro-batches, and smaller ones only where there is one: so shapes are few.
    """
    steps = recipe.max_steps or UNPLANNED_RUN_STEPS
    shares = (recipe.batch_ramp, recipe.batch_doublings), (recipe.length_ramp, recipe.length_doublings)
    edges = [doubling_steps(share, doublings, steps) for share, doublings in shares]
    found: list[Stage] = []
    for first in sorted({0, *edges[0], *edges[1]}):
        smaller, shorter = (sum(first < edge for edge in known) for known in edges)
        rows, count = split_batch(recipe, smaller)
        length, rows = recipe.max_seq_length >> shorter, rows << shorter
        seen = 0
        for i, old in enumerate(found):
            if old.seq_length == length:
                seen += old.step_rows * ((found[i + 1].first_step if i + 1 < len(found) else first) - old.first_step)
        found.append(Stage(first, length, rows, count, seen))
    return found


def doubling_steps(share: float, doublings: int, steps: int) -> list[int]:
    """The steps at which something doubles: so many, the last one where the ramp ends."""
    return [round(share * steps * (i + 1) / doublings) for i in range(doublings)] if share else []


def split_batch(recipe: Recipe, halvings: int) -> tuple[int, int]:
    """Rows of a micro-batch and how many of them make a step, where the batch is halved so many times."""
    rows, count = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps * recipe.processes
    for _ in range(halvings):
        rows, count = (rows, -(-count // 2)) if count > 1 else (max(1, rows // 2), 1)
    return rows, count


def micro_batches_per_process(stage: Stage, world_size: int) -> int:
    """How many micro-batches one of so many processes makes of its rows: as few as fit, all of one size."""
    rows = stage.step_rows // world_size
    return next(count for count in range(-(-rows // stage.micro_batch_rows), rows + 1) if rows % count == 0)


def check_even_split(recipe: Recipe, world_size: int) -> None:
    """Whether so many processes can share the rows of every step evenly."""
    steps = sorted({stage.step_rows for stage in ramp_stages(recipe)})
    if uneven := [rows for rows in steps if rows % world_size]:
        fit = [str(n) for n in range(1, max(steps) + 1) if all(rows % n == 0 for rows in steps)]
        raise UserError(
            f"{world_size} processes cannot share {uneven[0]} rows of a step evenly, and a run keeps its batch. "
            f"These can: {', '.join(fit[-16:])}."
        )


def stage_at(stages: list[Stage], step: int) -> Stage:
    """The stage that a step is in."""
    return stages[bisect_right([stage.first_step for stage in stages], step) - 1]


def first_row_of_step(stage: Stage, step: int) -> int:
    """Which row, among those of its length, is the first of a step."""
    return stage.rows_before + (step - stage.first_step) * stage.step_rows


def stage_shares(recipe: Recipe) -> list[tuple[Stage, float]]:
    """The stages with the share of the steps that each takes; they add up to 1."""
    steps, found = recipe.max_steps or UNPLANNED_RUN_STEPS, ramp_stages(recipe)
    ends = [stage.first_step for stage in found[1:]] + [max(steps, found[-1].first_step)]
    return [
        (stage, (min(end, steps) - min(stage.first_step, steps)) / steps)
        for stage, end in zip(found, ends, strict=True)
    ]


def mean_batch_rows(recipe: Recipe) -> float:
    """Rows of full length that a step reads on average."""
    full = recipe.max_seq_length
    return sum(share * stage.step_rows * stage.seq_length / full for stage, share in stage_shares(recipe))
