"""From the global batch to micro-batches that fit into memory.

The *global batch* is the tokens of one optimizer step, over all devices. It decides what the model learns: a larger
batch has less gradient noise and makes fewer steps of the same text (McCandlish et al. 2018, section 2). It is set in
tokens (`Recipe.global_batch_tokens`), chosen by `recipes/pretraining.py` and kept for the whole run.

The *micro-batch* is the rows that a device computes at once. It decides memory and speed alone: gradients of all
micro-batches of a step are added up, so any split of the global batch gives the same gradient (`train/step.py`).

    global batch = micro-batch * gradient accumulation * processes

`resolve_batch_size` finds the micro-batch of a new run, the largest power of two of rows that fits. Memory is a line:
bytes that do not depend on rows, and bytes per row. A GPU's allocator gives both from two small steps. On a CPU they
give the activations that autograd saves, and 8,192 tokens are the limit: more are hardly faster there.
The split is recorded in recipe.yaml, because sums of another split are rounded differently: a resumed run repeats it.
Another number of processes, or running out of memory, splits the same rows further.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import torch

from firth.core.console import format_count, quiet, say
from firth.core.errors import UserError
from firth.core.files import format_bytes
from firth.models import make_model
from firth.objectives import Batch
from firth.tokens import MixedShards, ShardSet
from firth.train.compute import choose_compute
from firth.train.dataloader import make_batch, make_row_dataset
from firth.train.distributed import DistContext, select_device
from firth.train.live_memory import LiveMemory
from firth.train.optim import make_optimizer
from firth.train.recipe import Recipe
from firth.train.resources import available_memory, estimate_resources
from firth.train.step import (
    RecurrentStateDict,
    TrainingRun,
    build_step_runner,
    compute_gradients,
    train_step,
)

DEFAULT_BATCH_TOKENS = 4096  # tokens of a step where nobody has chosen
CPU_MICRO_BATCH_TOKENS = 8192  # tokens: more are hardly faster on CPUs (docs/results.md)
UNMEASURED_MICRO_BATCH_TOKENS = 4096  # tokens, where small steps cannot be measured: FSDP, a teacher
GPU_TRIAL_TOKENS, CPU_TRIAL_TOKENS = 2048, 256  # tokens of the smaller of two traced steps
GPU_USABLE_SHARE = 0.8  # of the free memory; the rest is for fragments, workspaces and CUDA graphs
CPU_USABLE_SHARE = 0.5  # of the free memory, which other programs share


def resolve_batch_size(recipe: Recipe, shards: ShardSet | MixedShards, dist_context: DistContext) -> Recipe:
    """Return the recipe with the micro-batch and the accumulation that make its global batch."""
    recipe, rows = split_global_batch(recipe, recipe.processes), global_batch_rows(recipe, recipe.processes)
    length, tokens = recipe.max_seq_length, recipe.global_batch_tokens
    if tokens not in (0, rows * length):
        say(f"global batch: {rows * length:,} tokens instead of {tokens:,}: whole rows of {length} on each device")
    if not recipe.per_device_train_batch_size:
        device_rows = rows // recipe.processes
        limit, reason = find_row_limit(recipe, shards, dist_context, device_rows)
        rows = largest_divisor(device_rows, limit)
        recipe = replace(recipe, per_device_train_batch_size=rows, gradient_accumulation_steps=device_rows // rows)
        say(describe_split(recipe, reason))
    recipe.check_ramps()
    return recipe


def global_batch_rows(recipe: Recipe, world_size: int) -> int:
    """Return the rows of a step: as many whole rows as the tokens make, shared evenly by the processes.

    A recipe whose rows are given has those.
    """
    if recipe.per_device_train_batch_size and not recipe.global_batch_tokens:
        return recipe.global_batch_size
    tokens = recipe.global_batch_tokens or DEFAULT_BATCH_TOKENS
    return max(1, tokens // (recipe.max_seq_length * world_size)) * world_size


def split_global_batch(recipe: Recipe, world_size: int) -> Recipe:
    """Return the recipe with the given one of rows and accumulation, and the other one that makes the global batch.

    Where neither is given, rows stay 0: memory decides.
    """
    rows, accumulation = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    if rows and not recipe.global_batch_tokens:
        return recipe
    device_rows = global_batch_rows(recipe, world_size) // world_size
    if not rows and accumulation == 1:
        return recipe
    given = rows * accumulation if rows and accumulation > 1 else rows or accumulation
    if device_rows % given or (rows and accumulation > 1 and device_rows != given):
        fit = [str(n) for n in range(1, device_rows + 1) if device_rows % n == 0]
        raise UserError(
            f"A global batch of {recipe.global_batch_tokens or DEFAULT_BATCH_TOKENS:,} tokens is "
            f"{format_count(device_rows, 'row')} of {recipe.max_seq_length} per device, which "
            f"per_device_train_batch_size={rows or 'auto'} and gradient_accumulation_steps={accumulation} do not make. "
            f"Leave one of the three out. Numbers that divide it: {', '.join(fit[-16:])}."
        )
    if rows:
        return replace(recipe, gradient_accumulation_steps=device_rows // rows)
    return replace(recipe, per_device_train_batch_size=device_rows // accumulation)


def whole_batch_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with its global batch as one micro-batch: the same rows, for previews and estimates."""
    if recipe.per_device_train_batch_size and not recipe.global_batch_tokens:
        return recipe
    rows = global_batch_rows(recipe, recipe.processes)
    return replace(
        recipe,
        per_device_train_batch_size=rows // recipe.processes,
        gradient_accumulation_steps=1,
        global_batch_tokens=0,
    )


def largest_divisor(rows: int, limit: int) -> int:
    """Return the largest divisor of `rows` that is at most `limit`.

    >>> largest_divisor(256, 100), largest_divisor(24, 24), largest_divisor(7, 3)
    (64, 24, 1)
    """
    return next(n for n in range(min(rows, max(limit, 1)), 0, -1) if rows % n == 0)


def describe_split(recipe: Recipe, reason: str) -> str:
    rows, count = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    devices = f" on each of {recipe.processes} devices" if recipe.processes > 1 else ""
    micro_batches = format_count(count, "micro-batch", "micro-batches")
    return f"a step computes {micro_batches} of {format_count(rows, 'row')}{devices}: {reason}"


# --- memory ---------------------------------------------------------------------------------------------------------


def find_row_limit(
    recipe: Recipe, shards: ShardSet | MixedShards, dist_context: DistContext, device_rows: int
) -> tuple[int, str]:
    """Return how many rows a device can compute at once, and why."""
    device, length = select_device(dist_context, recipe), recipe.max_seq_length
    if recipe.shards_model or recipe.teacher or recipe.memory:
        blocker = (
            f"--parallel {recipe.parallel}" if recipe.shards_model else "a teacher" if recipe.teacher else "a memory"
        )
        return UNMEASURED_MICRO_BATCH_TOKENS // length, f"memory is not measured with {blocker}"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, trial_rows = torch.cuda.mem_get_info(device)[0], max(1, GPU_TRIAL_TOKENS // length)
        trial = MemoryTrial(recipe, shards, device)
        fixed, per_row = fit_line(trial_rows, trial.peak_bytes(trial_rows), trial.peak_bytes(2 * trial_rows))
        limit = rows_that_fit(fixed, per_row, GPU_USABLE_SHARE * free)
    else:
        free, trial_rows = available_memory(device), max(1, CPU_TRIAL_TOKENS // length)
        trial = MemoryTrial(recipe, shards, device)
        fixed, per_row = fit_line(trial_rows, trial.saved_bytes(trial_rows), trial.saved_bytes(2 * trial_rows))
        fixed += estimate_resources(recipe.model, trial.recipe).needed_memory(device)
        limit = rows_that_fit(fixed, per_row, CPU_USABLE_SHARE * free) if free else device_rows
        limit = min(limit, CPU_MICRO_BATCH_TOKENS // length)
    del trial
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed = format_bytes(round(fixed + per_row * largest_divisor(device_rows, limit)))
    return (
        limit,
        f"about {needed} of {format_bytes(free)} free memory, from two traced steps",
    )


def fit_line(trial_rows: int, small: int, large: int, factor: int = 2) -> tuple[float, float]:
    """Return the bytes without any row, and those of a row, from steps of `trial_rows` and of `factor` times as many.

    Weights, gradients and optimizer state do not depend on rows; activations are proportional to them.

    >>> fit_line(16, 5_000, 8_200)
    (1800.0, 200.0)
    """
    per_row = max((large - small) / ((factor - 1) * trial_rows), 1.0)
    return max(small - per_row * trial_rows, 0.0), per_row


def rows_that_fit(fixed: float, per_row: float, usable: float) -> int:
    """Return the largest power of two of rows that fit into `usable` bytes; at least 1.

    >>> rows_that_fit(1800, 200, 10_000), rows_that_fit(1800, 200, 1_000)
    (32, 1)
    """
    fitting = int((usable - fixed) / max(per_row, 1.0))
    return 1 << (fitting.bit_length() - 1) if fitting > 0 else 1


class MemoryTrial:
    """Steps of a few rows on a model of their own, whose memory is measured.

    The step is not compiled: that takes a minute for each number of rows, and a compiled step needs less memory.
    """

    def __init__(self, recipe: Recipe, shards: ShardSet | MixedShards, device: torch.device) -> None:
        self.recipe, self.vocab = replace(whole_batch_recipe(recipe), compile=False), shards.tokenizer.vocab
        with quiet():  # the run itself says how it computes
            compute = replace(choose_compute(self.recipe), device=device, cuda_graphs=False, compile_regions=False)
        self.dataset = make_row_dataset(self.recipe, shards, held_out=False)
        self.model = make_model(recipe.model).to(device)
        self.model.tokenizer = shards.tokenizer  # ELMo reads the letters of its words
        self.run = TrainingRun(self.recipe, compute, self.model, batch_fn=lambda step: [])
        self.runner, self.optimizer = build_step_runner(self.run), make_optimizer(self.model, self.recipe)

    def make_batch(self, rows: int) -> Batch:
        return make_batch(self.recipe, self.dataset, np.arange(rows), self.vocab, step=0)

    def peak_bytes(self, rows: int) -> int:
        """Return the most that a step allocates on the GPU: weights, gradients, optimizer state, activations."""
        device, batch = self.run.compute.device, self.make_batch(rows)
        for _ in range(2):  # the first step allocates the optimizer state
            torch.cuda.reset_peak_memory_stats(device)
            train_step(self.run, self.runner, self.optimizer, [batch], 0, 0.0)
            torch.cuda.synchronize(device)
        average = 4 * self.model.num_parameters if self.recipe.averages_weights else 0
        return int(torch.cuda.max_memory_allocated(device)) + average

    def saved_bytes(self, rows: int) -> int:
        """Return the bytes that autograd saves for the backward pass, without parameters: the activations."""
        found = {p.untyped_storage().data_ptr(): 0 for p in self.model.parameters()}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), storage.nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            compute_gradients(self.run, self.runner, [self.make_batch(rows)], 0, RecurrentStateDict())
        return sum(found.values())

    def traced_bytes(self, rows: int) -> int:
        """Return the most that a step adds to weights and optimizer state on a CPU: gradients, activations, buffers."""
        batch = self.make_batch(rows)
        if not self.optimizer.state:  # the first step allocates it
            train_step(self.run, self.runner, self.optimizer, [batch], 0, 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        states = (value for state in self.optimizer.state.values() for value in state.values())
        existing = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        with LiveMemory(existing) as live:
            train_step(self.run, self.runner, self.optimizer, [batch], 0, 0.0)
        return live.peak_bytes
