"""Load a fine-tuned checkpoint together with its task.

A checkpoint without task.json, such as one of `transformers`, is used by the head that its config names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from firth.core.errors import UserError, did_you_mean, quote
from firth.models import Model, ModelConfig, load_model
from firth.models.config import (
    ClassificationHead,
    EmbeddingHead,
    MultipleChoiceHead,
    RegressionHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.tasks.head_task import HeadTask
from firth.tasks.recipe import read_task_file
from firth.tasks.registry import make_task
from firth.tasks.task import Task


class FinetunedModel(NamedTuple):
    """A model, its task, and the content of task.json about the task."""

    model: Model
    task: Task
    facts: dict[str, Any]


def load_finetuned(
    checkpoint: str | Path | Model, task: str = "", metadata: Mapping[str, Any] | None = None
) -> FinetunedModel:
    """Load a checkpoint and the task `task` of it, or its only one. `metadata` replaces the content of task.json."""
    model = checkpoint if isinstance(checkpoint, Model) else load_model(checkpoint)
    name = "This model" if isinstance(checkpoint, Model) else str(checkpoint)
    facts = metadata or ({} if isinstance(checkpoint, Model) else read_task_file(Path(checkpoint)))
    facts = select_task(facts or head_metadata(model.config, name), task, name)
    if model.tokenizer is None:
        raise UserError(f"{name} has no tokenizer.")
    own = make_task(facts["task"], facts, model.tokenizer, model.config)
    if isinstance(own, HeadTask):
        own.check_head(model.config, name)
    return FinetunedModel(model, own, facts)


def head_metadata(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return what task.json would say of a checkpoint without one, by its head."""
    head, facts = config.head, {"answer": "head", "is_inferred": True}
    if isinstance(head, ClassificationHead) and head.num_marked == 1:
        return {"task": "classify", "labels": head.names, **facts}
    if isinstance(head, TokenClassificationHead):
        return {"task": "tag", "labels": head.names, **facts, "is_inferred": False}
    if isinstance(head, RegressionHead):
        return {"task": "regress", "texts": head.num_orders, **facts}
    kinds = {SpanHead: "span-qa", MultipleChoiceHead: "choice", EmbeddingHead: "embed"}
    if task := next((task for kind, task in kinds.items() if isinstance(head, kind)), None):
        return {"task": task, **facts, "is_inferred": False}
    use = {
        "encoder": "`firth fill` predicts words for blanks, `firth embed` gives vectors",
        "decoder": "`firth generate` continues a text",
        "encoder-decoder": "`firth generate` answers a text",
    }[config.architecture]
    raise UserError(
        f"{name} is not fine-tuned for a task: {use}. "
        f"`firth finetune {name} --task ... --train ... --dev ...` teaches it one."
    )


def select_task(facts: Mapping[str, Any], task: str, name: str) -> dict[str, Any]:
    """Return the metadata of the task `task`, or of the only one."""
    several = facts.get("tasks", {})
    if several and task not in several:
        unknown = f"There is no task {quote(task)}. {did_you_mean(task, several)}"
        problem = unknown if task else "Choose one with --task."
        raise UserError(f"{name} was fine-tuned for {', '.join(several)}. {problem}")
    if not several and task not in ("", facts["task"]):
        raise UserError(f"{name} was fine-tuned for {facts['task']}, not for {task}.")
    return dict(several[task] if several else facts)
