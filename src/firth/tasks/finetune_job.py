"""What all seeds of a fine-tuning share: encoded examples, their batches, how a step is executed.

Batches are a pure function of seed and step, so a resumed seed sees the same examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.models import Model, ModelConfig
from firth.objectives import Batch
from firth.tasks.distill import with_soft_labels
from firth.tasks.finetune_data import FinetuneData, add_extra_indices, select_train_examples, used_indices
from firth.tasks.head_task import HeadTask
from firth.tasks.lm import LanguageModelingTask
from firth.tasks.multitask import MultiTask, make_mixed_sampler
from firth.tasks.processes import micro_batch_size
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.reward import RewardTask
from firth.tasks.shape_buckets import MAX_TRIAL_BATCHES, ShapeBuckets, fit_shape_buckets
from firth.tasks.task import Prediction, Task
from firth.text import Example
from firth.tokens.permutation import permute_indices
from firth.train import ComputeConfig
from firth.train.distributed import SINGLE_PROCESS, DistContext, select_device
from firth.train.findings import Finding

DEFAULT_FINETUNE_EPOCHS = 3.0  # epochs per seed if the recipe sets no length
MAX_STORED_ORDER = 2**20  # examples: up to here the order of an epoch is computed at once
# Steps per seed from which a GPU run compiles by default. An estimate: compiling three or four shapes takes one or two
# minutes, and an uncompiled CUDA-graph step of BERT-base takes about 10 ms longer than a compiled one.
MIN_STEPS_TO_COMPILE = 10_000


@dataclass(frozen=True)
class FinetuneJob:
    """State that all seeds share."""

    recipe: FinetuneRecipe
    task: Task
    data: FinetuneData
    train_indices: list[Sequence[int]]  # by seed: indices of its training examples
    train_items: Mapping[int, Any]
    dev_items: Sequence[Any]
    compute: ComputeConfig
    folder: Path
    shape_buckets: ShapeBuckets | None = None  # None without compile and CUDA graphs
    recipe_changed: bool = False  # the run resumes with another recipe or other examples
    reported: dict[str, Finding] = field(default_factory=dict)  # what the doctor has said about the seeds, by rule

    @property
    def execution_mode(self) -> str:
        return "compiled" if self.compute.compile else "replayed as CUDA graphs"

    @property
    def num_labelled(self) -> int:
        """Number of training examples of the first seed with labels; those that a teacher labels follow them."""
        return sum(i < len(self.data.train) for i in self.train_indices[0])

    def predict_dev(self, model: Model) -> list[Prediction]:
        size = 2 * self.recipe.per_device_train_batch_size
        return self.task.predict(model, self.dev_items, self.compute, size)


def encode_finetune_data(
    recipe: FinetuneRecipe, task: Task, data: FinetuneData, compute: ComputeConfig, folder: Path
) -> FinetuneJob:
    """Encode the training examples that any seed uses, and all dev examples."""
    chosen = [select_train_examples(data.train, recipe, seed) for seed in range(recipe.seeds)]
    used = used_indices(recipe, data.train)
    encoded = list(encode_file(task, [data.train[i] for i in used], recipe.train))
    if recipe.teacher:
        assert isinstance(task, HeadTask), "check_distillation"
        extra = [example for _, example in data.extra]
        encoded += task.encode(extra)
        encoded = with_soft_labels(recipe, task, [*(data.train[i] for i in used), *extra], encoded, compute, folder)
        chosen = [add_extra_indices(own, data) for own in chosen]
    items = dict(zip([*used, *range(len(data.train), len(data.train) + len(data.extra))], encoded, strict=True))
    shapes = (
        sample_shape_buckets(recipe, task, [items[i] for i in chosen[0]])
        if compute.compile or compute.cuda_graphs
        else None
    )
    dev = encode_file(task, data.dev, recipe.dev)
    return FinetuneJob(recipe, task, data, chosen, items, dev, compute, folder, shapes)


def encode_file(task: Task, examples: Sequence[Example], file: str) -> Sequence[Any]:
    """Encode the examples of a file, which errors and notices name."""
    if isinstance(task, LanguageModelingTask | RewardTask):
        task.file = file
    try:
        return task.encode(examples)
    except UserError as e:
        raise UserError(f"{file}: {e}") from None


def with_recipe(job: FinetuneJob, recipe: FinetuneRecipe) -> FinetuneJob:
    """Return the job with a chosen recipe; another batch size has other shapes."""
    shapes = job.shape_buckets
    if shapes is not None and recipe.global_batch_size != job.recipe.global_batch_size:
        shapes = sample_shape_buckets(recipe, job.task, [job.train_items[i] for i in job.train_indices[0]])
    return replace(job, recipe=recipe, shape_buckets=shapes)


def sample_shape_buckets(recipe: FinetuneRecipe, task: Task, items: Sequence[Any]) -> ShapeBuckets:
    """Fit the shape buckets to the batches of the first epoch, at most `MAX_TRIAL_BATCHES`."""
    batches, accumulated = make_finetune_batch_fn(recipe, task, items), recipe.gradient_accumulation_steps
    steps = min(-(-len(items) // recipe.global_batch_size), -(-MAX_TRIAL_BATCHES // accumulated))
    return fit_shape_buckets((batch for step in range(steps) for batch in batches(step)), task.tokenizer.vocab.pad)


def permute_epoch(n: int, seed: int, epoch: int) -> list[int]:
    """Return the order of the examples in an epoch."""
    return permute_indices(np.arange(n), n, hash_uint64(seed, epoch)).tolist()


def make_finetune_batch_fn(
    recipe: FinetuneRecipe,
    task: Task,
    items: Sequence[Any],
    skips: Sequence[tuple[int, int]] = (),
    collate: Callable[[Sequence[Any]], Batch] | None = None,
    dist_context: DistContext = SINGLE_PROCESS,
) -> Callable[[int], list[Batch]]:
    """Return a function from step to micro-batches. It is pure; each epoch has its own permutation of the examples.

    Rank r of `dist_context` has the r-th part of each global batch. After a rewind, `skips` (start, count) shift the
    steps from `start` on, so that the examples in between are skipped.
    """
    size, n = micro_batch_size(recipe, dist_context.world_size), len(items)
    epoch_order = lru_cache(maxsize=2)(partial(permute_epoch, n, recipe.seed))  # a batch may span two epochs
    mixed = None
    if isinstance(task, MultiTask):
        run_length = recipe.global_batch_size if task.has_heads else 1
        mixed = make_mixed_sampler(
            items, recipe.mix_temperature, recipe.mix_cap, recipe.seed, recipe.mix_weights, run_length
        )

    def pick(index: np.ndarray) -> list[Any]:
        if n > MAX_STORED_ORDER:
            epoch, offset = np.divmod(index, n)
            return [items[i] for i in permute_indices(offset, n, hash_uint64(recipe.seed, epoch))]
        return [items[epoch_order(i // n)[i % n]] for i in index.tolist()]

    def batches(step: int) -> list[Batch]:
        first = (step + sum(count for start, count in skips if step >= start)) * recipe.global_batch_size
        local = dist_context.local_rows(recipe.global_batch_size)
        starts = range(first + local.start, first + local.stop, size)
        return [(collate or task.collate)((mixed or pick)(np.arange(start, start + size))) for start in starts]

    return batches


def resolve_compile_options(
    recipe: FinetuneRecipe, task: Task, config: ModelConfig, num_train_examples: int
) -> FinetuneRecipe:
    """Return the recipe with `compile` and `engine.cuda_graphs` resolved; compile only long runs by default.

    Loops over positions (LSTM, CRF) are not compiled: the compiler unrolls them into one copy per position. On a GPU,
    other uncompiled steps are replayed as CUDA graphs, unless layers are unfrozen during training.
    """
    examples = min(recipe.shots or num_train_examples, num_train_examples)
    planned = math.ceil((recipe.num_train_epochs or DEFAULT_FINETUNE_EPOCHS) * examples / recipe.global_batch_size)
    long = (recipe.max_steps or planned) >= MIN_STEPS_TO_COMPILE and not recipe.minutes
    sequential = config.recurrent is not None or recipe.crf or recipe.bilstm
    if recipe.compile is None and not recipe.engine.compile_regions and (sequential or not long):
        recipe = replace(recipe, compile=False)
    on_gpu = select_device(SINGLE_PROCESS, recipe).type == "cuda"
    # a graph keeps the gradients of heads that a step does not use at 0, and the optimizer would move them
    has_several_heads = isinstance(task, MultiTask) and task.has_heads
    if recipe.engine.cuda_graphs is None and recipe.compile is False and on_gpu:
        uncapturable = (
            sequential
            or has_several_heads
            or recipe.unfreeze_every
            or recipe.engine.weights == "bf16"
            or recipe.gradient_checkpointing
        )
        recipe = replace(recipe, engine=replace(recipe.engine, cuda_graphs=not uncapturable))
    return recipe
