"""`firth plan`: the size of a model, and its settings, for a text, a budget and this machine.

The held-out loss falls with the size of a model and with the tokens that it reads (`expected_loss.py`). In a given
time a larger model reads less: its steps are slower. So for each shape of a ladder the planner asks how many tokens fit
into the budget, what loss is expected after them, and takes the lowest; of almost equal ones the smallest. The same
rule answers a budget of passes or tokens, where time does not count.

1. *Speed.* The seconds of a step are a line: seconds that do not depend on rows (the optimizer), and seconds per row. A
   matrix product estimates it for every shape. Then steps of the best shape and of its neighbours are timed, and the
   others are corrected by the ratio of the two, until the best one and its neighbours are timed.
2. *Memory.* The bytes are a line too, from two traced steps (`train/batch_size.py`). On a CPU they are a part of what
   the process takes (`plan_memory.py`).
3. *Settings.* Global batch and learning rate follow the rules of `recipes/pretraining.py`, at the speed of (1).

A run with `minutes` keeps its time whatever is planned here: it times its own steps, and plans again while it works
(`train/replan.py`). So an error of (1) changes the size that is chosen, not the end of the run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch

from firth.core.console import format_count, format_duration, quiet, say
from firth.core.errors import UserError
from firth.core.files import format_bytes
from firth.core.memory import peak_memory_bytes, process_memory_bytes, reset_peak_memory, return_freed_memory
from firth.lab.expected_loss import ExpectedLoss, RunSize, find_law, read_loss_table
from firth.lab.plan_memory import (
    ALLOCATED_RATIO,
    KEPT_BYTES,
    LATER_LIBRARY_BYTES,
    ProcessMemory,
    allocated_bytes,
    allocated_ratio,
    counting_bytes,
    examining_bytes,
)
from firth.lab.plan_text import TextFacts
from firth.models import ModelConfig, count_parameters, flops_per_token
from firth.models.presets import SHAPE_LADDER, shaped_model
from firth.objectives.registry import describe_objective, held_out_objective, name_objective
from firth.recipes import choose_batch, scale_rate_to_batch, with_repeated_text
from firth.tokens import ShardSet
from firth.train.batch_size import (
    CPU_MICRO_BATCH_TOKENS,
    CPU_USABLE_SHARE,
    GPU_USABLE_SHARE,
    MemoryTrial,
    fit_line,
    global_batch_rows,
    largest_divisor,
    rows_that_fit,
)
from firth.train.compute import choose_compute, choose_threads, limit_threads, thread_choices
from firth.train.dataloader import make_held_out_dataset
from firth.train.distributed import SINGLE_PROCESS, select_device
from firth.train.held_out import make_evaluation
from firth.train.pretrain import MIN_USEFUL_STEPS, time_pretraining
from firth.train.recipe import Recipe
from firth.train.replan import affordable_steps, limit_evaluations, seconds_to_train
from firth.train.resources import available_memory, estimate_resources, measure_flops
from firth.train.schedule import EVALS_PER_PRETRAINING, describe_short_plan
from firth.train.step import train_step

SAME_LOSS_TOLERANCE = 0.01  # relative difference below which the smaller model is taken
# Parameters per token of text: GPT-BERT of 119M learns well from 14M tokens (Charpentier & Samuel 2024).
MAX_PARAMETERS_PER_TOKEN = 10
MAX_EXTRAPOLATION = 4.0  # times the largest measured model, where no time limits the size
MAX_PREPARE_SHARE = 0.25  # of the minutes of a run, for its text, above which the plan says so
MIN_RUN_STEPS = 50  # steps below which a size is not planned: the rate has hardly warmed up
MAX_TIMED_SHAPES = {"cpu": 5, "cuda": 3}  # on a GPU each is compiled first, up to a minute
TIMED_TOKENS, MIN_TIMED_TOKENS = 2048, 256  # tokens of the smaller of two timed steps; the second for slow models
MAX_TIMING_SECONDS, MAX_TIMING_SHARE = 20.0, 0.02  # of one size, about, and of the minutes: else with shorter steps
LARGER_STEP = 4  # times as many rows has the larger of two timed steps: a micro-batch of 8,192 tokens
TIMING_STEPS = 22  # as long as the smaller step, in all: traced and timed ones
MIN_MEASURED_TOKENS = 4096  # of a step that shows what the process takes for its tensors
TIMED_STEPS = 2  # of each of the two; their mean counts, as in the run
SELF_TIMING_STEPS = 6  # that a run with minutes on a CPU takes before its first one, beside CPU_START_SECONDS
ACTIVATION_BYTES = 64  # per layer, unit of width and token, where no step is traced: 16 numbers in float32
GPU_STEP_SECONDS = 2e-3  # at least, of a step that is not timed: optimizer and launches
GPU_LOADER_TOKENS = 4e6  # tokens per second that one process makes batches of (docs/results.md)
GPU_START_SECONDS = 30.0  # from the command to the first step: libraries, compiling, first embeddings (docs/history.md)
CPU_START_SECONDS = 8.0
SAVE_SECONDS = 300.0  # at most between two checkpoints
SAVES_PER_RUN = 10  # at most
LONG_RUN_SECONDS = 86400.0  # a longer run is warned about
MISFIT_LOSS_RATIO = 1.05  # a preset whose expected loss is higher than the best one's by this factor is warned about,
MISFIT_SIZE_RATIO = 3.0  # if it has as many times more or fewer parameters: the law misses its own runs by up to 3%


class StepCosts(NamedTuple):
    """Seconds and bytes of a step on this machine, as lines over its rows."""

    fixed_seconds: float
    row_seconds: float
    fixed_bytes: float
    row_bytes: float
    is_timed: bool
    eval_row_seconds: float = 0.0  # 0: not measured
    allocated_ratio: float = ALLOCATED_RATIO  # on a CPU: what a step takes of the process, over its tensors

    def step_seconds(self, rows: int) -> float:
        return self.fixed_seconds + self.row_seconds * rows

    def eval_seconds(self, rows: int) -> float:
        """Seconds of an evaluation. A forward pass is a third of a step, and the accuracy computes logits again."""
        return (self.eval_row_seconds or self.row_seconds / 3) * rows


@dataclass(frozen=True)
class PlannedRun:
    """One size with its settings, and what is expected of it."""

    name: str
    recipe: Recipe
    parameters: int
    costs: StepCosts
    steps: int
    passes: float
    tokens_read: float
    seconds: float
    memory_bytes: int
    loss: float
    extrapolations: dict[str, str] = field(default_factory=dict)
    unigram_entropy: float = math.inf  # of the text: the loss of token frequencies, above which no run should end

    @property
    def expected_loss(self) -> float:
        """Return the loss to show. Sizes are compared by `loss`, which tells them apart above that bound too."""
        return min(self.loss, self.unigram_entropy)

    @property
    def tokens_per_second(self) -> float:
        rows = global_batch_rows(self.recipe, self.recipe.processes)
        return rows * self.recipe.max_seq_length / self.costs.step_seconds(rows)

    def to_dict(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "model": self.name,
            "family": recipe.model.family,
            "parameters": self.parameters,
            "layers": recipe.model.num_layers,
            "width": recipe.model.dim,
            "vocab_size": recipe.model.vocab_size,
            "row_length": recipe.max_seq_length,
            "global_batch_tokens": recipe.global_batch_tokens,
            "learning_rate": recipe.learning_rate,
            "lr_scheduler_type": recipe.lr_scheduler_type,
            "optim": recipe.optim,
            "objective": name_objective(recipe.objective),
            "mask_rate": recipe.objective.mask_rate_at(0.0),
            "mask_rate_end": recipe.objective.mask_rate_at(1.0),
            "masked_share": getattr(recipe.objective, "masked_share", None),
            "steps": self.steps,
            "passes": self.passes,
            "tokens_read": self.tokens_read,
            "save_steps": recipe.save_steps,
            "tokens_per_second": self.tokens_per_second,
            "is_timed": self.costs.is_timed,
            "seconds": self.seconds,
            "memory_bytes": self.memory_bytes,
            "expected_loss": self.expected_loss,
            "extrapolations": self.extrapolations,
        }


@dataclass(frozen=True)
class RunPlan:
    """The chosen run, and the sizes before and after it."""

    chosen: PlannedRun
    smaller: PlannedRun | None
    larger: PlannedRun | None
    text: TextFacts
    device: str
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text._asdict(),
            "device": self.device,
            "chosen": self.chosen.to_dict(),
            "smaller": self.smaller.to_dict() if self.smaller else None,
            "larger": self.larger.to_dict() if self.larger else None,
        }

    def describe(self) -> list[str]:
        """Return the plan in a few lines."""
        run, recipe, text = self.chosen, self.chosen.recipe, self.text
        facts = run.to_dict()
        about = "about " if text.is_estimated else ""
        warmup = f"{recipe.warmup_steps:,} steps" if recipe.warmup_steps >= 0 else "10%"
        rate = f", {format_mask_rate(facts)}" if facts["mask_rate"] else ""
        sizes = [
            f"{word} {other.name}: {other.expected_loss:.2f}"
            for word, other in (("smaller", self.smaller), ("larger", self.larger))
            if other is not None
        ]
        speed = f"{run.tokens_per_second:,.0f} tokens/s{'' if run.costs.is_timed else ' (estimated)'}"
        words = [
            f"{run.name} ({recipe.model.family}), {run.parameters / 1e6:,.1f}M parameters",
            f"for {about}{text.tokens:,} tokens in {format_count(text.documents, 'document')} on {self.device}",
        ]
        length = [
            f"{format_count(run.steps, 'step')} of {recipe.global_batch_tokens:,} tokens",
            f"{run.passes:.1f} passes",
            f"{format_duration(run.seconds)} at {speed}",
            f"{format_bytes(run.memory_bytes)} of memory",
        ]
        settings = [
            f"{facts['objective']}{rate}",
            f"vocabulary {recipe.model.vocab_size:,}",
            f"rows of {recipe.max_seq_length}",
            f"{recipe.optim} at {recipe.learning_rate:g}",
            f"{recipe.lr_scheduler_type} after {warmup} warm-up",
            *([f"dropout {recipe.model.dropout:g}"] if recipe.model.dropout else []),
            f"a checkpoint every {format_count(recipe.save_steps, 'step')}",
        ]
        loss = f"expected held-out loss {run.expected_loss:.2f}" + (f" ({'; '.join(sizes)})" if sizes else "")
        if run.extrapolations:
            others = ", ".join(name for name in run.extrapolations if name != "law")
            why = f"other {others} than measured" if others else "few runs were measured"
            loss += f", a rough guess: {why} (`firth plan` says more)"
        return [f"plan: {line}" for line in (*map(", ".join, (words, length, settings)), loss)]


class Planner:
    """Plans runs of one text on one machine.

    `make_recipe` returns the recipe of a model with what the user has set. `keeps` names what must not be chosen:
    "batch", "rate", "dropout", "masked_share", "save_steps". `tokens` is a budget in tokens; minutes, steps and epochs
    are in the recipe.
    """

    def __init__(
        self,
        make_recipe: Callable[[ModelConfig], Recipe],
        shards: ShardSet,
        text: TextFacts,
        *,
        tokens: float = 0.0,
        keeps: Sequence[str] = (),
        num_devices: int = 1,
        elapsed_seconds: float = 0.0,
        table: dict[str, ExpectedLoss] | None = None,
    ) -> None:
        self.make_recipe, self.shards, self.text = make_recipe, shards, text
        self.tokens, self.keeps, self.num_devices = tokens, keeps, num_devices
        self.table = table or read_loss_table()
        self.elapsed_seconds = elapsed_seconds
        self.costs: dict[str, StepCosts] = {}  # timed
        self.estimates: dict[str, StepCosts] = {}
        self.corrections: dict[int, float] = {}  # by width: timed seconds per row over estimated ones
        self.flops = 0.0  # of a matrix product, measured once
        self.threads_chosen = False
        self.library_bytes = 0  # of a process on a CPU, measured once

    # --- costs

    def device(self, recipe: Recipe) -> torch.device:
        return select_device(SINGLE_PROCESS, recipe)

    def estimate_costs(self, name: str, recipe: Recipe) -> StepCosts:
        """Return the costs from the number of operations and of parameters alone."""
        if name in self.estimates:
            return self.estimates[name]
        device, length = self.device(recipe), recipe.max_seq_length
        self.flops = self.flops or measure_flops(device)
        row_seconds = 3 * flops_per_token(recipe.model, length) * length / self.flops
        fixed_seconds = 0.0
        if device.type == "cuda":
            row_seconds, fixed_seconds = max(row_seconds, length / GPU_LOADER_TOKENS), GPU_STEP_SECONDS
        row_bytes = ACTIVATION_BYTES * recipe.model.dim * recipe.model.num_layers * length
        self.estimates[name] = StepCosts(
            fixed_seconds, row_seconds / self.num_devices, self.fixed_bytes(recipe), row_bytes, False
        )
        return self.estimates[name]

    def fixed_bytes(self, recipe: Recipe, with_gradients: bool = True) -> int:
        """Return the bytes of weights, gradients and optimizer state, and of a checkpoint that is being written."""
        resources = estimate_resources(recipe.model, replace(recipe, per_device_train_batch_size=1))
        gradients = 0 if with_gradients else resources.memory_bytes - resources.checkpoint_bytes
        return resources.needed_memory(self.device(recipe)) - gradients

    def timed_rows(self, name: str, recipe: Recipe) -> int:
        """Return the rows of the smaller of two timed steps: fewer for slow models."""
        seconds = TIMING_STEPS * TIMED_TOKENS / recipe.max_seq_length * self.costs_of(name, recipe).row_seconds
        limit = min(MAX_TIMING_SECONDS, MAX_TIMING_SHARE * 60 * (recipe.minutes or math.inf))
        tokens = TIMED_TOKENS * min(1.0, limit / seconds)
        return max(1, round(max(tokens, MIN_TIMED_TOKENS) / recipe.max_seq_length))

    def time_costs(self, name: str, recipe: Recipe) -> StepCosts:
        """Return the costs from traced and timed steps of a few rows."""
        device = self.device(recipe)
        trial, rows = MemoryTrial(recipe, self.shards, device), self.timed_rows(name, recipe)
        if device.type == "cuda":
            fixed_bytes, row_bytes = fit_line(rows, trial.peak_bytes(rows), trial.peak_bytes(2 * rows))
            del trial
            torch.cuda.empty_cache()
            costs = StepCosts(0.0, 0.0, fixed_bytes, row_bytes, True)
            return costs._replace(row_seconds=self.time_compiled_row(recipe, costs) / self.num_devices)
        large = LARGER_STEP * rows
        step_bytes, row_bytes = fit_line(rows, trial.traced_bytes(rows), trial.traced_bytes(large), LARGER_STEP)
        if not self.threads_chosen:
            with quiet():
                choose_threads(thread_choices(recipe, choose_compute(recipe)), lambda: time_rows(trial, rows))
            self.threads_chosen = True
        trial.optimizer.zero_grad(set_to_none=True)
        return_freed_memory()
        counts_peak, before = reset_peak_memory(), process_memory_bytes()
        resources = estimate_resources(trial.recipe.model, trial.recipe)
        self.library_bytes = self.library_bytes or before - resources.checkpoint_bytes  # weights, optimizer state
        fixed, row_seconds = fit_time(rows, *(time_rows(trial, n) for n in (rows, large)))
        seconds = row_seconds, time_evaluation(trial, self.shards, large)
        row_seconds, eval_row_seconds = (one / self.num_devices for one in seconds)
        fixed_bytes = step_bytes + self.fixed_bytes(recipe, with_gradients=False)
        ratio = ALLOCATED_RATIO
        if counts_peak and large * recipe.max_seq_length >= MIN_MEASURED_TOKENS:
            ratio = allocated_ratio(peak_memory_bytes() - before, step_bytes + large * row_bytes)
        return StepCosts(fixed, row_seconds, fixed_bytes, row_bytes, True, eval_row_seconds, ratio)

    def time_compiled_row(self, recipe: Recipe, costs: StepCosts) -> float:
        """Return the seconds of a step over its rows on one GPU, compiled as the run will be."""
        step_rows = max(1, global_batch_rows(recipe, recipe.processes) // self.num_devices)
        rows = self.micro_batch_rows(recipe, costs, step_rows * self.num_devices)
        whole = replace(
            recipe,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=step_rows // rows,
            global_batch_tokens=0,
            processes=1,
            data=str(self.shards.folder),
        )
        with quiet():
            return time_pretraining(whole)[0] / step_rows

    def costs_of(self, name: str, recipe: Recipe) -> StepCosts:
        """Return timed costs, or estimated ones, corrected by the timed shape whose width is nearest."""
        if name in self.costs:
            return self.costs[name]
        costs, dim = self.estimate_costs(name, recipe), recipe.model.dim
        if not self.corrections:
            return costs
        nearest = min(self.corrections, key=lambda width: abs(math.log(width / dim)))
        return costs._replace(row_seconds=costs.row_seconds * self.corrections[nearest])

    # --- one size

    def plan_run(self, name: str, model: ModelConfig) -> PlannedRun:
        """Return the settings of a model, and what is expected of it."""
        recipe = self.make_recipe(model)
        costs, text = self.costs_of(name, recipe), self.text
        recipe = self.with_batch(recipe, costs)
        rows = global_batch_rows(recipe, recipe.processes)
        steps, seconds = self.count_steps(recipe, costs, rows)
        passes = steps * rows / text.rows
        recipe = with_repeated_text(recipe, passes, text.tokens, self.keeps)
        if "save_steps" not in self.keeps:
            recipe = replace(recipe, save_steps=choose_save_steps(steps, costs.step_seconds(rows)))
        if self.tokens and not recipe.minutes:
            recipe = replace(recipe, max_steps=steps)
        parameters, law = count_parameters(recipe.model), self.law(recipe)
        tokens_read = passes * text.tokens
        size = RunSize(parameters, tokens_read, text.tokens, text.unigram_entropy, recipe.model.vocab_size)
        found = law.extrapolations(size)
        if describe_objective(held_out_objective(recipe.objective))["name"] != law.objective:
            is_same_type = name_objective(held_out_objective(recipe.objective)) == law.objective
            found["objective"] = f"{law.objective} was measured{' with its default settings' * is_same_type}"
        if recipe.model.family != law.family:
            found["family"] = f"{law.family} was measured, not {recipe.model.family}"
        memory = costs.fixed_bytes + costs.row_bytes * self.micro_batch_rows(recipe, costs, rows)
        if self.device(recipe).type == "cpu":
            memory = self.process_memory(recipe, costs, memory).peak
        return PlannedRun(
            name,
            recipe,
            parameters,
            costs,
            steps,
            passes,
            tokens_read,
            seconds,
            round(memory),
            law.loss(size),
            found,
            text.unigram_entropy,
        )

    def process_memory(self, recipe: Recipe, costs: StepCosts, tensor_bytes: float) -> ProcessMemory:
        """Return the memory of a run on a CPU whose weights, optimizer state and largest step are `tensor_bytes`."""
        state, tokens, parameters = self.fixed_bytes(recipe, False), self.text.tokens, count_parameters(recipe.model)
        return ProcessMemory(
            libraries=(self.library_bytes or process_memory_bytes()) + KEPT_BYTES,
            tokenizing=max(0.0, self.text.prepare_bytes - LATER_LIBRARY_BYTES),
            counting=counting_bytes(tokens) if recipe.warm_start == "ppmi" else 0.0,
            training=state + allocated_bytes(tensor_bytes - state, costs.allocated_ratio),
            examining=examining_bytes(tokens, parameters),
        )

    def law(self, recipe: Recipe) -> ExpectedLoss:
        objective = describe_objective(held_out_objective(recipe.objective))["name"]
        return find_law(self.table, recipe.model.architecture, objective, self.device(recipe).type)

    def with_batch(self, recipe: Recipe, costs: StepCosts) -> Recipe:
        """Return the recipe with its global batch, and the learning rate that follows from it."""
        if "batch" not in self.keeps:
            # speed and batch depend on each other: the optimizer's part of a step shrinks with the batch
            for _ in range(2):
                rows = global_batch_rows(recipe, recipe.processes)
                speed = rows * recipe.max_seq_length / costs.step_seconds(rows)
                read: dict[str, Any] = {"tokens_read": self.tokens or recipe.num_train_epochs * self.text.tokens}
                if recipe.minutes:
                    read = {"tokens_read": max(self.seconds_left(recipe, costs, rows), 1.0) * speed}
                elif recipe.max_steps:
                    read = {"max_steps": recipe.max_steps}
                on_gpu = self.device(recipe).type == "cuda"
                choice = choose_batch(
                    recipe.model, recipe.max_seq_length, self.text.tokens, on_gpu, self.num_devices, **read
                )
                recipe = replace(recipe, global_batch_tokens=choice.tokens)
        if "rate" not in self.keeps and recipe.global_batch_tokens:
            rate = scale_rate_to_batch(recipe.learning_rate, recipe.model, recipe.global_batch_tokens)
            recipe = replace(recipe, learning_rate=rate)
        return recipe

    def seconds_used(self, recipe: Recipe, costs: StepCosts, rows: int) -> float:
        """Return the seconds from the command to the first step: a run with `minutes` times some steps itself."""
        start = GPU_START_SECONDS
        if self.device(recipe).type == "cpu":
            start = CPU_START_SECONDS + SELF_TIMING_STEPS * costs.step_seconds(rows) * bool(recipe.minutes)
        return self.elapsed_seconds + self.text.prepare_seconds + start

    def seconds_left(self, recipe: Recipe, costs: StepCosts, rows: int) -> float:
        """Return the seconds of `minutes` for steps and evaluations."""
        return seconds_to_train(recipe.minutes, self.seconds_used(recipe, costs, rows))

    def count_steps(self, recipe: Recipe, costs: StepCosts, rows: int) -> tuple[int, float]:
        """Return the steps of a run, and its seconds from the command to its end."""
        step_seconds, eval_seconds = costs.step_seconds(rows), costs.eval_seconds(recipe.eval_rows)
        if recipe.minutes:
            left = self.seconds_left(recipe, costs, rows)
            num_evals = limit_evaluations(EVALS_PER_PRETRAINING, left, eval_seconds)
            steps = max(1, affordable_steps(left, step_seconds, eval_seconds, num_evals, recipe.eval_steps))
            steps = min(steps, recipe.max_steps or steps)
        elif self.tokens:
            num_evals, steps = EVALS_PER_PRETRAINING, max(1, round(self.tokens / (rows * recipe.max_seq_length)))
        else:
            num_evals = EVALS_PER_PRETRAINING
            steps = recipe.max_steps or math.ceil(recipe.num_train_epochs * self.text.rows / rows)
        if recipe.eval_steps:
            num_evals = math.ceil(steps / recipe.eval_steps)
        training = steps * step_seconds + num_evals * eval_seconds
        return steps, self.seconds_used(recipe, costs, rows) + training

    def micro_batch_rows(self, recipe: Recipe, costs: StepCosts, rows: int) -> int:
        """Return the rows that a device computes at once, as `resolve_batch_size` will choose them."""
        if recipe.per_device_train_batch_size:
            return recipe.per_device_train_batch_size
        device, device_rows = self.device(recipe), max(1, rows // self.num_devices)
        share = GPU_USABLE_SHARE if device.type == "cuda" else CPU_USABLE_SHARE
        free = available_memory(device)
        limit = rows_that_fit(costs.fixed_bytes, costs.row_bytes, share * free) if free else device_rows
        if device.type == "cpu":
            limit = min(limit, CPU_MICRO_BATCH_TOKENS // recipe.max_seq_length)
        return largest_divisor(device_rows, limit)

    # --- the choice

    def plan(self, architecture: str, times_steps: bool = True) -> RunPlan:
        """Return the best size of the ladder with its neighbours; with `times_steps`, all three are timed."""
        models = {f"{architecture}-{n}x{dim}": shaped_model(architecture, n, dim) for n, dim in SHAPE_LADDER}
        names = list(models)
        with limit_threads():
            while True:
                runs = self.fitting_runs(models)
                chosen = self.choose(runs)
                index = names.index(chosen.name)
                around = [name for name in names[max(index - 1, 0) : index + 2] if name in runs]
                untimed = [name for name in (chosen.name, *around) if name not in self.costs]
                most = MAX_TIMED_SHAPES[self.device(chosen.recipe).type]
                if not times_steps or not untimed or len(self.costs) >= most:
                    break
                self.time_size(untimed[0], runs[untimed[0]])
        others = {names.index(name) - index: runs[name] for name in around}
        notes = self.notes(chosen)
        return RunPlan(chosen, others.get(-1), others.get(1), self.text, name_device(chosen.recipe), notes)

    def plan_named(self, name: str, model: ModelConfig) -> RunPlan:
        """Return the plan of a named model, beside the best size of the ladder, smaller or larger."""
        with limit_threads():
            self.time_size(name, self.plan_run(name, model))
            run = self.plan_run(name, model)
        notes = [*self.notes(run), *filter(None, [describe_misfit(run.recipe, self, name)])]
        best = self.plan(model.architecture).chosen if self.ladder_suits_tokens(model.architecture) else None
        is_smaller = best is not None and best.parameters < run.parameters
        smaller, larger = (best, None) if is_smaller else (None, best)
        return RunPlan(run, smaller, larger, self.text, name_device(run.recipe), notes)

    def ladder_suits_tokens(self, architecture: str) -> bool:
        """Whether the ladder's models can read these tokens: T5Gemma needs sentinels, and BART's tokenizer has none."""
        recipe = self.make_recipe(shaped_model(architecture, *SHAPE_LADDER[0]))
        try:
            recipe.objective.build_template(self.shards.tokenizer.vocab)
        except UserError:
            return False
        return True

    def notes(self, run: PlannedRun) -> list[str]:
        """Return what a person should know before starting this run."""
        found, recipe = list[str](), run.recipe
        if not recipe.minutes and run.seconds > LONG_RUN_SECONDS:
            found.append(f"this takes {format_duration(run.seconds)} on this machine: --minutes limits the time")
        if recipe.minutes and run.steps < min(MIN_USEFUL_STEPS, recipe.max_steps or MIN_USEFUL_STEPS):
            step_seconds = run.costs.step_seconds(global_batch_rows(recipe, recipe.processes))
            found.append(describe_short_plan(run.steps, run.passes, step_seconds, MIN_USEFUL_STEPS))
        if recipe.minutes and self.text.prepare_seconds > MAX_PREPARE_SHARE * 60 * recipe.minutes:
            found.append(
                f"tokenizing the text takes about {format_duration(self.text.prepare_seconds)} of the "
                f"{format_duration(60 * recipe.minutes)}: `firth prepare` does it once, for all runs"
            )
        return found

    def time_size(self, name: str, run: PlannedRun) -> None:
        """Time the steps of a size, and keep the ratio to the estimate."""
        compiled = ", compiled" if self.device(run.recipe).type == "cuda" else ""
        say(f"timing some steps of {name} ({run.parameters / 1e6:,.1f}M parameters{compiled})")
        self.costs[name] = costs = self.time_costs(name, run.recipe)
        estimated = self.estimate_costs(name, run.recipe)
        self.corrections[run.recipe.model.dim] = costs.row_seconds / estimated.row_seconds

    def fitting_runs(self, models: Mapping[str, ModelConfig]) -> dict[str, PlannedRun]:
        """Return the sizes that fit into memory and suit the text; the smallest always suits it."""
        runs, least = dict[str, PlannedRun](), ""
        for name, model in models.items():
            recipe = self.make_recipe(model)
            parameters = count_parameters(recipe.model)
            if runs and parameters > self.max_parameters(recipe):
                break
            run = self.plan_run(name, model)
            device = self.device(recipe)
            free, held = available_memory(device), process_memory_bytes() if device.type == "cpu" else 0
            if free and run.memory_bytes - held > free:
                needed = format_bytes(run.memory_bytes - held)  # beyond what this process holds already
                least = least or f"{name} takes {needed}, and {format_bytes(free)} are free"
                break
            if runs and recipe.minutes and run.steps < MIN_RUN_STEPS and not run.costs.is_timed:
                break
            runs[name] = run
        if not runs:
            raise UserError(f"No size fits into memory: {least}. End other programs, or shorten --max-seq-length.")
        return runs

    def max_parameters(self, recipe: Recipe) -> float:
        """Return the largest size for this text, and for a run that no time limits."""
        largest = float(MAX_PARAMETERS_PER_TOKEN * self.text.tokens)
        if not recipe.minutes:
            largest = min(largest, MAX_EXTRAPOLATION * self.law(recipe).fit.parameters_range[1])
        return largest

    def choose(self, runs: Mapping[str, PlannedRun]) -> PlannedRun:
        """Return the smallest run whose expected loss is almost the lowest."""
        lowest = min(run.loss for run in runs.values())
        return next(run for run in runs.values() if run.loss <= (1 + SAME_LOSS_TOLERANCE) * lowest)


# --- helpers


def time_rows(trial: MemoryTrial, rows: int) -> float:
    """Return the seconds of a step of this many rows: the mean of a few. The trial has made steps before."""
    batch = trial.make_batch(rows)

    def timed() -> float:
        start = time.monotonic()
        train_step(trial.run, trial.runner, trial.optimizer, [batch], 0, 0.0).item()
        return time.monotonic() - start

    return fmean(timed() for _ in range(TIMED_STEPS))


def time_evaluation(trial: MemoryTrial, shards: ShardSet, rows: int) -> float:
    """Evaluate up to this many held-out rows, as the run will after steps of so many; return the seconds of a row."""
    recipe = replace(trial.recipe, per_device_train_batch_size=rows, eval_rows=rows)
    held_out = make_held_out_dataset(recipe, shards)
    if held_out is None:
        return 0.0
    evaluate = make_evaluation(recipe, held_out, shards.tokenizer, trial.run.compute)
    start = time.monotonic()
    evaluate(trial.model)
    return (time.monotonic() - start) / min(rows, held_out.num_rows)


def fit_time(rows: int, small: float, large: float) -> tuple[float, float]:
    """Return the seconds without any row, and those of a row, from steps of `rows` and of `LARGER_STEP` times as many.

    Where a disturbance made the larger step the faster one, the line starts at 0.

    >>> fit_time(8, 0.5, 1.7), fit_time(8, 0.5, 0.4)
    ((0.1, 0.05), (0.0, 0.0125))
    """
    row_seconds = (large - small) / ((LARGER_STEP - 1) * rows)
    if row_seconds <= 0 or small < row_seconds * rows:
        return 0.0, large / (LARGER_STEP * rows)
    return round(small - row_seconds * rows, 9), round(row_seconds, 9)


def choose_save_steps(steps: int, step_seconds: float) -> int:
    """Return the steps between checkpoints: a tenth of the run, at most five minutes.

    >>> choose_save_steps(1000, 0.1), choose_save_steps(100_000, 0.1), choose_save_steps(3, 0.1)
    (100, 3000, 1)
    """
    return max(1, min(math.ceil(steps / SAVES_PER_RUN), round(SAVE_SECONDS / step_seconds)))


def plan_column(run: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a planned run, by the name of their row."""
    rate = f", {format_mask_rate(run)}" if run["mask_rate"] else ""
    return {
        "model": run["model"],
        "parameters": f"{run['parameters'] / 1e6:,.1f}M",
        "objective": f"{run['objective']}{rate}",
        "vocabulary, row length": f"{run['vocab_size']:,}, {run['row_length']}",
        "global batch": f"{run['global_batch_tokens']:,} tokens",
        "optimizer, rate, schedule": f"{run['optim']}, {run['learning_rate']:g}, {run['lr_scheduler_type']}",
        "steps": f"{run['steps']:,}",
        "passes": f"{run['passes']:.1f}",
        "checkpoint every": format_count(run["save_steps"], "step"),
        "tokens per second": f"{run['tokens_per_second']:,.0f}" + ("" if run["is_timed"] else " (estimated)"),
        "time": format_duration(run["seconds"]),
        "peak memory": format_bytes(run["memory_bytes"]),
        "expected held-out loss": f"{run['expected_loss']:.2f}",
    }


def format_mask_rate(run: Mapping[str, Any]) -> str:
    """
    >>> format_mask_rate({"mask_rate": 0.3, "mask_rate_end": 0.15, "masked_share": 0.75})
    '75% masked rows, mask rate 30% to 15%'
    >>> format_mask_rate({"mask_rate": 0.15})
    'mask rate 15%'
    """
    end, share = run.get("mask_rate_end"), run.get("masked_share")
    rows = "" if share is None else f"{share:.0%} masked rows, "
    return f"{rows}mask rate {run['mask_rate']:.0%}" + (f" to {end:.0%}" if end is not None else "")


def name_device(recipe: Recipe) -> str:
    with quiet():
        return str(choose_compute(recipe))


def describe_misfit(recipe: Recipe, planner: Planner, name: str = "") -> str:
    """Return what to say of a named model that is much too large or small for text and time; empty where it suits."""
    if not planner.ladder_suits_tokens(recipe.model.architecture):
        return ""
    own = planner.plan_run(name, recipe.model)
    best = planner.plan(recipe.model.architecture, times_steps=False).chosen
    size_ratio = max(own.parameters / best.parameters, best.parameters / own.parameters)
    if own.expected_loss < MISFIT_LOSS_RATIO * best.expected_loss or size_ratio < MISFIT_SIZE_RATIO:
        return ""
    if recipe.minutes:
        budget = f"{recipe.minutes:g} minutes"
    elif recipe.max_steps or planner.tokens:
        budget = f"{own.tokens_read / 1e6:,.3g}M tokens to read"
    else:
        budget = f"{format_count(round(own.passes), 'pass', 'passes')} over them"
    an = "an" if recipe.model.architecture.startswith("e") else "a"
    better = f"{an} {recipe.model.architecture} of {best.parameters / 1e6:,.3g}M ({best.name})"
    price = (
        "" if recipe.minutes or best.seconds < 2 * own.seconds else f" in {best.seconds / own.seconds:.0f}x the time"
    )
    return (
        f"{own.parameters / 1e6:,.3g}M parameters for {planner.text.tokens / 1e6:,.3g}M tokens and "
        f"{budget}: {better} is expected to reach {best.expected_loss:.2f} instead of {own.expected_loss:.2f}{price}; "
        "`firth plan` shows the choice"
    )
