"""Parameter groups, the optimizers, and the rate as a pure function of the step."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from firth.core.errors import UserError
from firth.train.adafactor import Adafactor
from firth.train.adamw import AdamW
from firth.train.muon import Muon, hidden_matrices
from firth.train.recipe import TrainingConfig
from firth.train.unfreeze import FreezeSchedule, parameter_depths, trainable_parameters

SLANTED_TRIANGLE_RATIO = 32  # a slanted triangle begins and ends at this part of the highest rate (ULMFiT's ratio)


def make_optimizer(
    model: nn.Module, training: TrainingConfig, freeze_schedule: FreezeSchedule | None = None
) -> torch.optim.Optimizer:
    """The optimizer of a recipe, for what learns from the first step on."""
    groups = make_param_groups(model, training, freeze_schedule or FreezeSchedule(), 0, set())
    if not groups:
        raise UserError("Nothing is left to learn: this model has no head of its own. Freeze less.")
    if training.optim == "adafactor":
        return Adafactor(groups, hidden_matrices(model))
    adam: dict[str, Any] = dict(
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
        fused=True,
    )
    if training.optim == "muon":
        return Muon(groups, hidden_matrices(model), training.muon_momentum, **adam)
    return AdamW(groups, **adam)


def add_unfrozen_groups(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    training: TrainingConfig,
    freeze_schedule: FreezeSchedule,
    step: int,
) -> None:
    """Take in what learns from this step on; after a resume, from any step before it."""
    if not freeze_schedule.unfreeze_every:
        return
    known = {p for group in optimizer.param_groups for p in group["params"]}
    for group in make_param_groups(model, training, freeze_schedule, step, known):
        optimizer.add_param_group(group)


def make_param_groups(
    model: nn.Module, training: TrainingConfig, freeze_schedule: FreezeSchedule, step: int, assigned: set[nn.Parameter]
) -> list[dict[str, Any]]:
    """What learns at a step beside what is `assigned`, grouped by its rate: matrices and embeddings are decayed, biases
    and norms left alone; Muon's matrices stand by themselves. What does not learn needs no gradient from here on.
    """
    learning, top = trainable_parameters(model, freeze_schedule, step), max(parameter_depths(model).values())
    hidden = hidden_matrices(model) if training.optim == "muon" else {}
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        p.requires_grad_(name in learning)
        if name in learning and p not in assigned:
            scale = freeze_schedule.layer_decay ** (top - learning[name])
            groups[scale, training.weight_decay if p.ndim >= 2 else 0.0, p in hidden].append(p)
    ordered = sorted(groups.items(), key=lambda item: (item[0][2], -item[0][0], item[1][0].ndim < 2))
    faster = muon_lr_scale(training)
    return [
        {"params": ps, "weight_decay": decay, "scale": scale * (faster if muon else 1.0), "muon": muon}
        for (scale, decay, muon), ps in ordered
    ]


def muon_lr_scale(training: TrainingConfig) -> float:
    """How many times as fast as AdamW Muon goes."""
    if not training.muon_learning_rate or not training.learning_rate:
        return 1.0
    return training.muon_learning_rate / training.learning_rate


def learning_rate_at(step: int, training: TrainingConfig) -> float:
    """The learning rate of step 0, 1, 2 ...: up during the warm-up, then down."""
    warmup, last, kind = training.warmup_steps, training.max_steps, training.lr_scheduler_type
    highest, done = training.learning_rate, min((step - warmup) / max(last - warmup, 1), 1.0)
    if kind == "slanted-triangle":  # Howard and Ruder 2018, equation 3, with a cut after the warm-up
        share = step / warmup if step < warmup else 1 - done
        return highest * (1 + share * (SLANTED_TRIANGLE_RATIO - 1)) / SLANTED_TRIANGLE_RATIO
    if step < warmup:
        return highest * (step + 1) / (warmup + 1)
    if kind == "linear":
        return highest * (1 - done)
    if kind == "cosine":
        return highest * (0.5 * (1 + math.cos(math.pi * done)))
    if kind == "inverse-sqrt":
        return highest * math.sqrt((warmup + 1) / (step + 1))
    if kind == "wsd":
        tail = max(1, min(int(training.wsd_decay * last + 1e-9), last - warmup))
        return highest * min(1.0, max(last - step, 0) / tail)
    assert kind == "constant"
    return highest
