"""Labelled examples to a fine-tuned model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firth.core.lazy import make_lazy

if TYPE_CHECKING:
    from firth.tasks.finetune import check_task, finetune, plan_finetuning
    from firth.tasks.prompts import encode_task_prompts, finetuned_generation_settings
    from firth.tasks.recipe import FINETUNE_TASKS, TASK_FILE, FinetuneRecipe
    from firth.tasks.registry import make_task, make_task_without_examples
    from firth.tasks.results import format_predictions, metric_names, read_predictions, write_predictions
    from firth.tasks.task import Prediction, Task

__all__ = [
    "FINETUNE_TASKS",
    "TASK_FILE",
    "FinetuneRecipe",
    "Prediction",
    "Task",
    "check_task",
    "encode_task_prompts",
    "finetune",
    "finetuned_generation_settings",
    "format_predictions",
    "make_task",
    "make_task_without_examples",
    "metric_names",
    "plan_finetuning",
    "read_predictions",
    "write_predictions",
]

make_lazy(__name__)
