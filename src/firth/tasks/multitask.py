"""Several tasks at once: one model, one vocabulary, one loss, and a prefix that names the task (T5, section 3.5.2).

Text-to-text makes every task a pair of texts, so that a batch may hold examples of all tasks. What is left to choose is
how often each task is seen. With e examples of a task, its rate is proportional to

    min(e, cap) ** temperature

Temperature 1 is examples-proportional mixing: in proportion to the sizes, where `cap` (T5's K) keeps a very large task
from crowding out the others. Lower temperatures favour small tasks; 0 mixes all equally. T5 writes the power as 1 / T.

Examples of such a run have the id NAME/ID, and its scores are named NAME.METRIC. `average` is the mean of the tasks'
deciding metrics, on a scale from 0 to 1.

Shapes: B items of a batch, S tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.models import Model, ModelConfig
from firth.objectives import Batch
from firth.tasks.task import Prediction, Task
from firth.tasks.text_labels import VerbalizedTask
from firth.tasks.text_to_text import TextToTextTask
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.mixing import locate_slots, rows_per_window
from firth.tokens.permutation import permute_indices
from firth.train import ComputeConfig

AVERAGE_METRIC = "average"
PERCENT_METRICS = ("chrf",)  # deciding metrics from 0 to 100; all others are from 0 to 1


class TaskItem(NamedTuple):
    """An encoded example and the name of its task."""

    task: str
    item: Any

    @property
    def num_tokens(self) -> int:
        return int(self.item.num_tokens)


def qualify_ids(name: str, examples: Iterable[Example]) -> list[Example]:
    """Return the examples with ids of the form NAME/ID."""
    return [e._replace(id=f"{name}/{e.id}") for e in examples]


def task_of(example: Example) -> str:
    return str(example.id).partition("/")[0]


def split_by_task(examples: Iterable[Example]) -> dict[str, list[Example]]:
    by_task: dict[str, list[Example]] = defaultdict(list)
    for e in examples:
        by_task[task_of(e)].append(e)
    return by_task


def mixing_rates(num_examples: Mapping[str, int], temperature: float, cap: int) -> dict[str, float]:
    """Return the share of each task in the batches.

    >>> mixing_rates({"a": 900, "b": 100}, 1.0, 300)
    {'a': 0.75, 'b': 0.25}
    >>> mixing_rates({"a": 900, "b": 100}, 0.5, 2**19)
    {'a': 0.75, 'b': 0.25}
    """
    weights = {name: float(min(n, cap)) ** temperature for name, n in num_examples.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def make_mixed_sampler(
    items: Sequence[TaskItem], temperature: float, cap: int, seed: int
) -> Callable[[np.ndarray], list[TaskItem]]:
    """Return a function from indices of the training stream to items; every window of it has the mixing rates.

    Each task has its own epochs, with a permutation of their own.
    """
    by_task: dict[str, list[TaskItem]] = defaultdict(list)
    for item in items:
        by_task[item.task].append(item)
    groups = list(by_task.values())
    rates = mixing_rates({name: len(group) for name, group in by_task.items()}, temperature, cap)
    count_S = rows_per_window(list(rates.values()))

    def sample(index_B: np.ndarray) -> list[TaskItem]:
        window_B, offset_B = np.divmod(index_B, count_S.sum())
        slot_B = permute_indices(offset_B, int(count_S.sum()), hash_uint64(seed, window_B))
        task_B, position_B = locate_slots(window_B, slot_B, count_S)
        for s in np.unique(task_B).tolist():
            own = task_B == s
            epoch, offset = np.divmod(position_B[own], len(groups[s]))
            position_B[own] = permute_indices(offset, len(groups[s]), hash_uint64(seed, s, epoch))
        return [groups[s][i] for s, i in zip(task_B.tolist(), position_B.tolist(), strict=True)]

    return sample


class MultiTask:
    """Several tasks with generated answers, by name. Each has its own prefix, labels and metrics."""

    name = "multi-task"
    metric = AVERAGE_METRIC
    labels: tuple[str, ...] = ()

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        for name, task in tasks.items():
            if not isinstance(task, TextToTextTask | VerbalizedTask):
                raise UserError(
                    f"{name}: several tasks at once are answered as text, and {task.name} has a head here. Take an "
                    "encoder-decoder, or --answer text with a decoder; tag, lm and embed are learned alone."
                )
        self.tasks = dict(tasks)
        self.first = next(iter(tasks.values()))  # tokenizer, lengths and packing are the same in all
        self.tokenizer = self.first.tokenizer

    @property
    def notices(self) -> list[str]:
        return [f"{name}: {notice}" for name, task in self.tasks.items() for notice in task.notices]

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return self.first.configure_model(config)

    def templated_tokenizer(self) -> Tokenizer:
        return self.first.templated_tokenizer()

    def metadata(self) -> dict[str, Any]:
        """Return task.json: text-to-text without a prefix, which the input brings along, and each task by its name."""
        base_task = self.first.base_task if isinstance(self.first, VerbalizedTask) else self.first
        assert isinstance(base_task, TextToTextTask)
        shared = vars(replace(base_task.answer_config, prefix=""))
        tasks = {name: task.metadata() for name, task in self.tasks.items()}
        return {"task": "text-to-text", "answer": "text", **shared, "tasks": tasks}

    def group(self, names: Iterable[str]) -> dict[str, list[int]]:
        """Return the indices of each task's entries."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, name in enumerate(names):
            groups[name].append(i)
        return groups

    def encode(self, examples: Sequence[Example]) -> list[TaskItem]:
        items: dict[int, TaskItem] = {}
        for name, indices in self.group(map(task_of, examples)).items():
            encoded = self.tasks[name].encode([examples[i] for i in indices])
            items |= {i: TaskItem(name, item) for i, item in zip(indices, encoded, strict=True)}
        return [items[i] for i in range(len(examples))]

    def collate(self, items: Sequence[TaskItem]) -> Batch:
        return self.first.collate([item.item for item in items])

    def predict(
        self, model: Model, items: Sequence[TaskItem], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        predictions: dict[int, Prediction] = {}
        for name, indices in self.group(item.task for item in items).items():
            found = self.tasks[name].predict(model, [items[i].item for i in indices], compute, batch_size)
            predictions |= zip(indices, found, strict=True)
        return [predictions[i] for i in range(len(items))]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Return the average over the tasks, and each metric of each task."""
        scores: dict[str, float] = {}
        groups = self.group(map(task_of, examples))
        for name, task in self.tasks.items():
            indices = groups.get(name, [])
            found = task.score([examples[i] for i in indices], [predictions[i] for i in indices]) if indices else {}
            scores |= {f"{name}.{metric}": score for metric, score in found.items()}
        return {AVERAGE_METRIC: self.average(scores), **scores}

    def average(self, scores: Mapping[str, float]) -> float:
        """Return the mean of the tasks' deciding metrics, from 0 to 1; NaN where a task has none."""
        deciding = [(task.metric, scores.get(f"{name}.{task.metric}", np.nan)) for name, task in self.tasks.items()]
        return float(np.mean([score / 100 if metric in PERCENT_METRICS else score for metric, score in deciding]))
