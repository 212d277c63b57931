"""Labelled examples to a fine-tuned model."""

from firth.tasks.finetune import TASK_FILE, TASKS, finetune, make_task, write_predictions
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.task import Prediction, Task

__all__ = ["TASKS", "TASK_FILE", "FinetuneRecipe", "Prediction", "Task", "finetune", "make_task", "write_predictions"]
