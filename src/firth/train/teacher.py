"""Pretraining with a teacher: the frozen model, the loss function, and the stages of knowledge transfer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.models import (
    Model,
    TransferLoss,
    check_distillation_pair,
    check_transfer_pair,
    distillation_losses,
    load_model,
)
from firth.objectives import MLM
from firth.train.compute import ComputeConfig
from firth.train.recipe import Recipe
from firth.train.step import apply_flags
from firth.train.step_runner import LossFn


def load_teacher(recipe: Recipe, compute: ComputeConfig) -> Model | None:
    """Load the frozen teacher onto the device; None without one."""
    if not recipe.teacher:
        return None
    if not isinstance(recipe.objective, MLM) or recipe.objective.extras:
        raise UserError(
            "Distillation needs the objective mlm or whole-word: teacher and model predict the same masked tokens."
        )
    teacher = load_model(recipe.teacher).to(compute.device).requires_grad_(False)
    apply_flags(teacher, recipe)
    return teacher


def make_distillation_loss_fn(teacher: Model | None, model: Model, recipe: Recipe) -> LossFn | None:
    """Return the distillation loss function; None without a teacher."""
    if teacher is None:
        return None
    student, master = check_distillation_pair(model, teacher, recipe.distillation)
    if teacher.tokenizer and model.tokenizer and teacher.tokenizer.fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{recipe.teacher} has another tokenizer than the data: tokenize it with --tokenizer TEACHER.")
    if recipe.knowledge_transfer.strategy == "none":
        return partial(distillation_losses, student, master, spec=recipe.distillation, with_metrics=True)
    check_transfer_pair(student, master)
    return TransferLoss(student, master, recipe.distillation, recipe.knowledge_transfer)


def follow_transfer(loss_fn: TransferLoss, recipe: Recipe) -> tuple[Callable[[int], None], Callable[[int, int], float]]:
    """Return the functions that set the stage of knowledge transfer and the rates of the layers, by the step alone."""
    spec, num_layers = recipe.knowledge_transfer, recipe.model.num_layers
    if spec.strategy == "auxiliary":
        say(f"knowledge transfer of {format_count(num_layers, 'layer')} beside distillation")
    else:
        steps = format_count(math.ceil(spec.share * recipe.max_steps), "step")
        order = "one after the other" if spec.strategy == "progressive" else "at once"
        say(f"knowledge transfer of {format_count(num_layers, 'layer')} {order} for {steps}, then distillation")
    return (
        lambda step: loss_fn.set_progress(step / recipe.max_steps),
        lambda step, depth: spec.rate_factor(step / recipe.max_steps, num_layers, depth - 1),
    )
