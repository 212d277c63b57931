"""Join the processes that torchrun started into one run."""

from __future__ import annotations

import os

import torch

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.train.deterministic import CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES
from firth.train.distributed import (
    SINGLE_PROCESS,
    DDPContext,
    DistContext,
    check_device,
    init_groups,
)
from firth.train.launch_env import read_launch_env, require_single_process, silence_other_ranks
from firth.train.recipe import TrainingConfig


def init_distributed(training: TrainingConfig) -> DistContext:
    """Connect all processes of a run; impossible settings are refused before."""
    launch, strategy = read_launch_env(), training.parallel
    check_device(training)
    if strategy == "none":
        require_single_process(
            "Pass --parallel ddp (each has the whole model) or --parallel fsdp (each has a part of it)."
        )
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
    silence_other_ranks()
    if training.deterministic:  # must be set before CUDA starts
        os.environ.setdefault(CUBLAS_WORKSPACE_ENV, DETERMINISTIC_WORKSPACES[0])
    groups = init_groups(launch)
    if strategy == "ddp":
        return DDPContext(*groups)
    from firth.train.fsdp import FSDPContext  # imported late: it takes a second

    return FSDPContext(*groups)
