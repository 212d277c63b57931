"""Optimizers, their parameter groups, and the learning rate as a pure function of the step.

A group has one weight decay, one learning-rate factor (`scale`) and, with `--optim muon`, one update rule. Matrices and
embeddings are decayed, biases and norms are not. With `layer_decay` the factor falls from the head down (discriminative
fine-tuning: Howard & Ruder 2018, section 3.2). A resumed run needs no scheduler state: only the step.

AdamW's steps have a size of their own, whatever the size of a weight. So the output layer of a regression takes steps
in the units of its targets: u times the rate, with 1/u of the decay. Adafactor and LAMB follow the weights' norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from firth.core.errors import UserError
from firth.models.task_heads import output_units
from firth.train.adafactor import Adafactor
from firth.train.adamw import AdamW
from firth.train.lamb import Lamb
from firth.train.muon import Muon, hidden_matrices
from firth.train.recipe import FreezeSchedule, TrainingConfig
from firth.train.unfreeze import parameter_depths, trainable_parameters

SLANTED_TRIANGLE_RATIO = 32  # peak over first and last learning rate (Howard & Ruder 2018, equation 3)


def make_optimizer(
    model: nn.Module, training: TrainingConfig, freeze_schedule: FreezeSchedule | None = None
) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe, with the parameters that are trained from the first step."""
    groups = make_param_groups(model, training, freeze_schedule or FreezeSchedule(), 0, set())
    if not groups:
        raise UserError("Nothing is left to learn: this model has no head of its own. Freeze less.")
    if training.optim == "adafactor":
        return Adafactor(groups, hidden_matrices(model))
    if training.optim == "lamb":
        betas = (training.adam_beta1, training.adam_beta2)
        return Lamb(groups, hidden_matrices(model), betas, training.adam_epsilon)
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
    """Add the parameters that are unfrozen at this step; after a resume, also those of all earlier steps."""
    if not freeze_schedule.unfreeze_every:
        return
    assigned = {p for group in optimizer.param_groups for p in group["params"]}
    for group in make_param_groups(model, training, freeze_schedule, step, assigned):
        optimizer.add_param_group(group)


def make_param_groups(
    model: nn.Module, training: TrainingConfig, freeze_schedule: FreezeSchedule, step: int, assigned: set[nn.Parameter]
) -> list[dict[str, Any]]:
    """Group the parameters that are trained at a step, without the `assigned` ones.

    Sets `requires_grad` of every parameter of the model. Muon's matrices form groups of their own, which come last.
    """
    trainable, top = trainable_parameters(model, freeze_schedule, step), max(parameter_depths(model).values())
    hidden = hidden_matrices(model) if training.optim == "muon" else {}
    units = output_units(model) if training.optim in ("adamw", "muon") else {}
    groups: dict[tuple[float, float, bool, int], list[nn.Parameter]] = defaultdict(list)
    for name, p in model.named_parameters():
        p.requires_grad_(name in trainable)
        if name in trainable and p not in assigned:
            unit = units.get(name, 1.0)
            scale = unit * freeze_schedule.layer_decay ** (top - trainable[name])
            depth = trainable[name] if freeze_schedule.groups_by_layer else 0
            is_matrix = p.ndim >= 2 and not name.endswith("bias")  # XLNet's biases have a row for each head
            decay = training.weight_decay / unit if is_matrix else 0.0
            groups[scale, decay, p in hidden, depth].append(p)
    ordered = sorted(groups.items(), key=lambda item: (item[0][2], -item[0][0], item[1][0].ndim < 2))
    muon_scale = muon_lr_scale(training)
    return [
        {"params": ps, "weight_decay": decay, "initial_weight_decay": decay, "muon": muon}
        | {"scale": scale * (muon_scale if muon else 1.0)}
        | ({"depth": depth} if freeze_schedule.groups_by_layer else {})
        for (scale, decay, muon, depth), ps in ordered
    ]


def muon_lr_scale(training: TrainingConfig) -> float:
    """Ratio of Muon's learning rate to AdamW's; 1 where the recipe sets no rate for Muon."""
    if not training.muon_learning_rate or not training.learning_rate:
        return 1.0
    return training.muon_learning_rate / training.learning_rate


def learning_rate_at(step: int, training: TrainingConfig) -> float:
    """Return the learning rate of step 0, 1, 2 ...: linear warm-up to the peak, then the recipe's decay."""
    warmup, last, kind = training.warmup_steps, training.max_steps, training.lr_scheduler_type
    peak, done = training.learning_rate, min((step - warmup) / max(last - warmup, 1), 1.0)
    if kind == "slanted-triangle":  # Howard & Ruder 2018, equation 3, with the cut after the warm-up
        fraction = step / warmup if step < warmup else 1 - done
        return peak * (1 + fraction * (SLANTED_TRIANGLE_RATIO - 1)) / SLANTED_TRIANGLE_RATIO
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if kind == "linear":
        return peak * (1 - done)
    if kind == "cosine":
        return peak * (0.5 * (1 + math.cos(math.pi * done)))
    if kind == "inverse-sqrt":
        return peak * math.sqrt((warmup + 1) / (step + 1))
    if kind == "wsd":
        decay_steps = max(1, min(int(training.wsd_decay * last + 1e-9), last - warmup))
        return peak * min(1.0, max(last - step, 0) / decay_steps)
    assert kind == "constant"
    return peak
