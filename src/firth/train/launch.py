"""Join the processes that torchrun started into one run."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.files import format_bytes
from firth.train.deterministic import CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES
from firth.train.distributed import (
    SINGLE_PROCESS,
    DDPContext,
    DistContext,
    check_device,
    init_groups,
    select_device,
)
from firth.train.launch_env import LaunchEnv, read_launch_env, require_single_process, silence_other_ranks
from firth.train.recipe import Recipe, TrainingConfig
from firth.train.resources import available_memory, estimate_resources

DDP_MEMORY_SHARE = 0.5  # of a device's memory, for weights, gradients and optimizer state; the rest is for activations


def init_distributed(training: TrainingConfig) -> DistContext:
    """Connect all processes of a run; impossible settings are refused before.

    With `parallel=auto` the model may not be known yet: the context serves for collectives until `choose_parallel`.
    """
    launch, strategy = read_launch_env(), training.parallel
    check_device(training)
    if strategy == "auto":
        strategy = "none" if launch is None or launch.world_size == 1 else "ddp"
    if strategy == "none":
        require_single_process("Leave --parallel none out, or start one process.")
        return SINGLE_PROCESS
    if launch is None:
        raise UserError(
            f"--parallel {strategy} is for several processes, which torchrun starts, one for each GPU: "
            f"torchrun --nproc-per-node 2 -m firth pretrain ... --parallel {strategy}"
        )
    if torch.cuda.is_available() and launch.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{launch.local_world_size} processes were started on this machine, and it has "
            f"{format_count(torch.cuda.device_count(), 'GPU')}: torchrun --nproc-per-node {torch.cuda.device_count()}"
        )
    shard_size = choose_shard_size(training, launch) if strategy == "hsdp" else 0
    silence_other_ranks()
    if training.deterministic:  # must be set before CUDA starts
        os.environ.setdefault(CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES[0])
    groups = init_groups(launch)
    if strategy == "ddp":
        return DDPContext(*groups)
    from firth.train.fsdp import FSDPContext  # imported late: it takes a second

    return FSDPContext(*groups, shard_size=shard_size)


def choose_shard_size(training: TrainingConfig, launch: LaunchEnv) -> int:
    """Return how many processes hold a model together with HSDP: the given number, or those of one machine."""
    size = training.shard_size or launch.local_world_size
    if launch.world_size % size:
        fit = ", ".join(str(n) for n in range(1, launch.world_size + 1) if launch.world_size % n == 0)
        raise UserError(
            f"--parallel hsdp: {format_count(launch.world_size, 'process', 'processes')} cannot be divided into groups "
            f"of {size}. Set --shard-size to one of {fit}."
        )
    return size


def choose_parallel(recipe: Recipe) -> Recipe:
    """Resolve `parallel=auto` and say so: `ddp` where the model leaves room for activations, else `fsdp`.

    The device with the least memory decides. On CPUs the processes of a machine share its memory.
    """
    if recipe.parallel != "auto":
        return recipe
    context = init_distributed(recipe)
    if not isinstance(context, DDPContext):
        return replace(recipe, parallel="none")
    device = select_device(context, recipe)
    sharing = 1 if device.type == "cuda" else context.launch_env.local_world_size
    memory = -context.all_reduce_max(-available_memory(device) // sharing)
    needed = estimate_resources(recipe.model, recipe).memory_bytes
    fits, blocker = not memory or needed <= DDP_MEMORY_SHARE * memory, ""
    try:
        replace(recipe, parallel="fsdp").check_parallel()
    except UserError as e:
        blocker = f" {e}"
    chosen = replace(recipe, parallel="ddp" if fits or blocker else "fsdp")
    share = f"{format_bytes(needed)} of the {format_bytes(memory)}" if memory else format_bytes(needed)
    say(
        f"--parallel {chosen.parallel}: weights, gradients and optimizer state take {share} that each of "
        f"{context.world_size} processes has{'' if fits else '.' + blocker}"
    )
    chosen.check_parallel()
    return chosen
