"""Fine-tuning in several processes, which torchrun starts: data parallelism with a whole model in each (DDP).

Every process reads all examples and takes its part of each batch; gradients are summed (`train/distributed.py`). So a
step is that of one process with the same global batch. Rank 0 predicts the dev examples and computes the scores, as one
process does, while the others wait; it alone writes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.serialization import from_dict, to_dict
from firth.tasks.recipe import FinetuneRecipe
from firth.train.launch_env import read_launch_env

if TYPE_CHECKING:
    from firth.train.distributed import DistContext


def join_processes(recipe: FinetuneRecipe) -> tuple[FinetuneRecipe, DistContext]:
    """Connect the processes of a fine-tuning; return the recipe with `parallel` and `processes` resolved."""
    if recipe.shards_model:
        raise UserError(f"--parallel {recipe.parallel} is for pretraining: fine-tune with --parallel ddp.")
    from firth.train.launch import init_distributed  # loads torch, which the command line does without

    context = init_distributed(recipe)
    if context.world_size > 1:
        for name, value in {"--search": recipe.search, "--teacher": recipe.teacher}.items():
            if value:
                raise UserError(f"{name} runs in one process: start it without torchrun.")
        if recipe.parallel == "auto":
            say(f"--parallel ddp: each of {context.world_size} processes has the whole model")
    recipe = replace(recipe, parallel="none" if context.world_size == 1 else "ddp", processes=context.world_size)
    return recipe, context


def share_recipe(context: DistContext, recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Return the recipe of rank 0: days and timings differ between processes."""
    if context.world_size == 1:
        return recipe
    return from_dict(context.broadcast(to_dict(recipe)), FinetuneRecipe, "recipe")


def share_default_batch(recipe: FinetuneRecipe) -> FinetuneRecipe:
    """Divide a batch that nobody has set among the processes, so that a step stays that of one process.

    The default learning rate is that of the default batch.
    """
    launch = read_launch_env()
    if launch is None or launch.world_size == 1:
        return recipe
    size, count = recipe.per_device_train_batch_size, launch.world_size
    if size % count:
        raise UserError(
            f"The default batch of {format_count(size, 'example')} cannot be shared by {count} processes. Set "
            "--per-device-train-batch-size; the global batch is that times the processes."
        )
    say(f"global batch: {format_count(size, 'example')}, {size // count} in each of {count} processes")
    return replace(recipe, per_device_train_batch_size=size // count)


def micro_batch_size(recipe: FinetuneRecipe, world_size: int) -> int:
    """Return the examples of a micro-batch: the most that divide a process's part of the global batch evenly.

    A run that resumes with another number of processes keeps its global batch.
    """
    size, total = recipe.per_device_train_batch_size, recipe.global_batch_size
    if total % world_size:
        fit = [str(n) for n in range(1, total + 1) if total % n == 0]
        raise UserError(
            f"{world_size} processes cannot share {format_count(total, 'example')} of a step evenly, and a run keeps "
            f"its batch. These can: {', '.join(fit[-16:])}."
        )
    local = total // world_size
    found = next(n for n in range(min(size, local), 0, -1) if local % n == 0)
    if found != size and recipe.task == "embed":
        raise UserError(
            f"embed contrasts the {size} texts of a micro-batch, and {world_size} processes would have {found}: resume "
            f"with {recipe.processes}."
        )
    return found
