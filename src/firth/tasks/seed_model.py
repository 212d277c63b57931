"""The model of a seed: the checkpoint's backbone with the task's head, and the folder it is written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import atomic_folder, write_json
from firth.models import (
    ClassificationHead,
    LMHead,
    Model,
    ModelConfig,
    MultiTaskHead,
    RegressionHead,
    TaskHead,
    get_eos_token_ids,
    grow_vocabulary,
    load_model,
    make_model,
    make_sequence_template,
    read_config,
    write_model,
)
from firth.models.config import without_detector, without_dropout
from firth.models.hf.adapter import write_adapter
from firth.models.kernels.dropout import Dropout
from firth.models.lora import add_lora, train_new_tokens
from firth.models.task_distill import TaskDistillation
from firth.models.task_heads import MultiTaskHeadModule, RegressionHeadModule
from firth.tasks.embed import EmbeddingTask, write_sentence_transformers_files
from firth.tasks.finetune_job import FinetuneJob
from firth.tasks.lm import LanguageModelingTask
from firth.tasks.multitask import split_by_task
from firth.tasks.recipe import TASK_FILE, FinetuneRecipe, read_task_file
from firth.tasks.task import Task
from firth.text import Example
from firth.tokens import load_tokenizer

TASKS_WITHOUT_DROPOUT = ("preference", "reward")
CONSTANT_TOLERANCE = 1e-9  # numbers that differ by less of their size are all the same


def build_seed_model(job: FinetuneJob, seed: int) -> Model:
    """Load the checkpoint's backbone with the task's head, or initialize it randomly; add LoRA if enabled.

    Answers are compared without dropout, as TRL's trainers do: its noise would be as large as the first differences,
    and those to a reference that has none would begin above 0. A head has dropout then if the recipe says so.
    """
    recipe, task = job.recipe, job.task
    torch.manual_seed(recipe.seed + seed)
    config = without_detector(read_config(recipe.checkpoint))
    model_config = recipe.apply_head_options(task.configure_model(config))
    if recipe.class_weights == "balanced":
        model_config = balance_class_weights(model_config, [e.target for e in train_examples(job, seed)])
    targets = describe_regression_targets(job, seed)
    model_config = replace(model_config, head=with_target_std(model_config.head, targets))
    dropout = recipe.task not in TASKS_WITHOUT_DROPOUT
    if recipe.from_scratch:
        model = make_model(model_config if dropout else without_dropout(model_config))
        model.config = model_config
    else:
        model = load_model(recipe.checkpoint, model_config.head, model_config.extras, dropout)
        if isinstance(config.head, TaskHead) and not keeps_head(recipe, config, model_config.head):
            reset_head(model)
    if not keeps_head(recipe, config, model_config.head):
        for name, target in targets.items():
            head = model.head[name] if isinstance(model.head, MultiTaskHeadModule) else model.head
            if isinstance(head, RegressionHeadModule):
                head.standardize(target.mean)
    if not dropout and recipe.head_dropout is None:
        for module in model.head.modules():  # some families publish one of the head's own
            if isinstance(module, Dropout):
                module.p = 0.0
    if recipe.teacher:
        model.distillation = TaskDistillation(recipe.distill_alpha, recipe.distill_temperature)
    model.tokenizer = task.tokenizer
    if isinstance(model_config.head, LMHead):
        add_end_tokens(model, task)
    grow_vocabulary(model, max(config.vocab_size, task.tokenizer.vocab.size))
    if recipe.lora is not None:
        add_lora(model, model.config, recipe.lora)
        train_new_tokens(model, load_tokenizer(recipe.checkpoint).vocab.size, task.tokenizer.vocab.size)
    return model


def train_examples(job: FinetuneJob, seed: int) -> list[Example]:
    """Return the labelled examples that a seed trains on."""
    return [job.data.train[i] for i in job.train_indices[seed] if i < len(job.data.train)]


class TargetStatistics(NamedTuple):
    """Mean and standard deviation of the numbers that a regression learns."""

    mean: float
    std: float


def describe_regression_targets(job: FinetuneJob, seed: int) -> dict[str, TargetStatistics]:
    """Return the statistics of each regression by the name of its task; the only task of a run has the name ""."""
    tasks, examples = job.recipe.task_recipes(), train_examples(job, seed)
    by_task = split_by_task(examples) if job.recipe.tasks else {"": examples}
    found = {}
    for name in (name for name, own in tasks.items() if own.task == "regress"):
        numbers = [float(e.target) for e in by_task.get(name, []) if e.target is not None]
        mean, std = (fmean(numbers), pstdev(numbers)) if numbers else (0.0, 0.0)
        found[name] = TargetStatistics(mean, std if std > abs(mean) * CONSTANT_TOLERANCE else 1.0)
    return found


def with_target_std(head: Any, targets: Mapping[str, TargetStatistics | None]) -> Any:
    """Return the head with the standard deviation of the targets of each regression in it."""
    if isinstance(head, MultiTaskHead):
        own = (replace(named, head=with_target_std(named.head, {"": targets.get(named.name)})) for named in head.heads)
        return replace(head, heads=tuple(own))
    target = targets.get("")
    return replace(head, target_std=target.std) if target is not None and isinstance(head, RegressionHead) else head


def add_end_tokens(model: Model, task: Task) -> None:
    """Let generation stop at the end tokens that the task teaches: the model's own, and that of the chat template.

    A base model often knows its end of text alone, and its template ends answers with <|im_end|> or <end_of_turn>.
    """
    vocab = task.tokenizer.vocab
    taught: list[int | None] = []
    if model.eos_token_ids is not None:
        taught.append(make_sequence_template(model.config, vocab).eos_id)
    if isinstance(task, LanguageModelingTask) and task.is_decoder and task.roles:
        taught.append(task.chat_template.find_answer_end())
    known = get_eos_token_ids(model, vocab)
    if new := [token for token in taught if token is not None and token not in known]:
        model.eos_token_ids = (*known, *new)


def reset_head(model: Model) -> None:
    """Reinitialize the output layer: another task's head may have the same number of classes."""
    heads = model.head.heads.values() if isinstance(model.head, MultiTaskHeadModule) else [model.head]
    for out in (getattr(head, "out", None) for head in heads):
        if isinstance(out, torch.nn.Linear):
            torch.nn.init.normal_(out.weight, 0.0, getattr(model.config.init, "std", out.in_features**-0.5))
            if out.bias is not None:
                torch.nn.init.zeros_(out.bias)


def balance_class_weights(config: ModelConfig, labels: Sequence[str]) -> ModelConfig:
    """Weight each class by n / (k * n_c), so that rare and frequent classes contribute equally to the loss."""
    if not isinstance(config.head, ClassificationHead):
        raise UserError("class_weights=balanced needs a classification head, and this task has another one.")
    count, names = Counter(labels), config.head.names
    weights = tuple(len(labels) / (len(names) * max(count[name], 1)) for name in names)
    return replace(config, head=replace(config.head, class_weights=weights))


def keeps_head(recipe: FinetuneRecipe, config: ModelConfig, head: Any) -> bool:
    """Whether a run goes on with the head of its checkpoint: the LM head, or that of the same task and labels.

    Tasks often share labels, such as 0 and 1. A checkpoint without task.json does not say of which task its head is.
    """
    if recipe.from_scratch or not has_same_labels(config, head):
        return False
    facts = read_task_file(Path(recipe.checkpoint))
    if isinstance(head, LMHead) or not facts:
        return True
    theirs = {name: own["task"] for name, own in (facts.get("tasks") or {"": facts}).items()}
    return theirs == {name: own.task for name, own in recipe.task_recipes().items()}


def has_same_labels(config: ModelConfig, head: Any) -> bool:
    """Whether a checkpoint's head has this type, these labels, and as many marked words."""
    if isinstance(head, MultiTaskHead) and isinstance(config.head, MultiTaskHead):
        mine, theirs = ({own.name: own.head for own in side.heads} for side in (head, config.head))
        return mine.keys() == theirs.keys() and all(
            has_same_labels(replace(config, head=theirs[name]), own) for name, own in mine.items()
        )

    def kind(own: Any) -> tuple[Any, ...]:
        return type(own), getattr(own, "names", ()), getattr(own, "num_marked", 1)

    return kind(config.head) == kind(head)


def save_seed_model(
    recipe: FinetuneRecipe, task: Task, model: Model, seed_folder: Path, chain: Sequence[Mapping[str, Any]]
) -> None:
    """Write `final/` and, with LoRA, `adapter/` in the format of peft."""
    if recipe.lora is not None:
        try:
            with atomic_folder(seed_folder / "adapter", "adapter") as temporary:
                write_adapter(model, recipe.lora, recipe.checkpoint, temporary)
        except UserError as e:
            say(f"no adapter/: {e}")
    model.tokenizer = task.templated_tokenizer()
    with atomic_folder(seed_folder / "final") as temporary:
        write_model(model, temporary)
        write_json(temporary / TASK_FILE, task.metadata() | {"chain": chain})
        if isinstance(task, EmbeddingTask):
            write_sentence_transformers_files(model, task.template.max_length, temporary)
