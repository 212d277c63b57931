"""Labelled examples to a fine-tuned model."""

from firth.tasks.finetune import check_task, finetune
from firth.tasks.make import TASK_FILE, TASKS, make_task, without_examples
from firth.tasks.prompts import prompts_for, usual_settings
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.results import lines_of, metric_names, read_predictions, write_predictions
from firth.tasks.task import Prediction, Task

__all__ = [
    "TASKS",
    "TASK_FILE",
    "FinetuneRecipe",
    "Prediction",
    "Task",
    "check_task",
    "finetune",
    "lines_of",
    "make_task",
    "metric_names",
    "prompts_for",
    "read_predictions",
    "usual_settings",
    "without_examples",
    "write_predictions",
]
