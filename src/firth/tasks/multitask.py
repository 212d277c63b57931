"""Several tasks at once: one model that answers as text (T5), or one head per task on a shared backbone (MT-DNN).

Text-to-text makes every task a pair of texts with a prefix that names the task (Raffel et al. 2020, section 3.5.2).
So a batch holds examples of all tasks, and there is one loss.

With heads, each task keeps its own output layer and loss (Liu et al. 2019, "Multi-Task Deep Neural Networks", section
3.1). All examples of a training step are of one task, as in their algorithm 1: the step updates the backbone and the
head of that task. The heads of other tasks have no gradient then, and the optimizer leaves them alone.

What is left to choose is how often each task is seen. With e examples of a task, its rate is proportional to

    min(e, cap) ** temperature

Temperature 1 is examples-proportional mixing: in proportion to the sizes, where `cap` (T5's K) keeps a very large task
from crowding out the others. Lower temperatures favour small tasks; 0 mixes all equally. T5 writes the power as 1 / T.
Explicit weights replace the formula.

Examples of such a run have the id NAME/ID, and its scores are named NAME.METRIC. `average` is the mean of the tasks'
deciding metrics, on a scale from 0 to 1.

Shapes: B items of a batch, S tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.models import Model, ModelConfig, MultiTaskHead, NamedHead
from firth.objectives import Batch
from firth.tasks.head_task import EncodedExample, HeadTask
from firth.tasks.recipe import check_mixing_weights
from firth.tasks.task import Prediction, Task
from firth.tasks.text_labels import VerbalizedTask
from firth.tasks.text_to_text import TextToTextTask
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.mixing import locate_slots, rows_per_window
from firth.tokens.permutation import permute_indices
from firth.train import ComputeConfig

AVERAGE_METRIC = "average"
LEARNED_ALONE = ("lm", "preference", "reward", "embed")
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


def mixing_rates(
    num_examples: Mapping[str, int], temperature: float, cap: int, weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the share of each task in the batches: by explicit `weights`, or by the numbers of examples.

    >>> mixing_rates({"a": 900, "b": 100}, 1.0, 300)
    {'a': 0.75, 'b': 0.25}
    >>> mixing_rates({"a": 900, "b": 100}, 0.5, 2**19)
    {'a': 0.75, 'b': 0.25}
    >>> mixing_rates({"a": 900, "b": 100}, 1.0, 2**19, {"b": 3, "a": 1})
    {'a': 0.25, 'b': 0.75}
    """
    if weights:
        check_mixing_weights(weights, num_examples)
        shares = {name: float(weights[name]) for name in num_examples}
    else:
        shares = {name: float(min(n, cap)) ** temperature for name, n in num_examples.items()}
    return {name: share / sum(shares.values()) for name, share in shares.items()}


def make_mixed_sampler(
    items: Sequence[TaskItem],
    temperature: float,
    cap: int,
    seed: int,
    weights: Mapping[str, float] | None = None,
    run_length: int = 1,
) -> Callable[[np.ndarray], list[TaskItem]]:
    """Return a function from indices of the training stream to items; every window of it has the mixing rates.

    Each task has its own epochs, with a permutation of their own. The stream consists of runs of `run_length` items of
    one task: 1 mixes the items themselves, the examples of a step give steps of one task.
    """
    by_task: dict[str, list[TaskItem]] = defaultdict(list)
    for item in items:
        by_task[item.task].append(item)
    groups = list(by_task.values())
    rates = mixing_rates({name: len(group) for name, group in by_task.items()}, temperature, cap, weights)
    count_S = rows_per_window(list(rates.values()))

    def sample(index_B: np.ndarray) -> list[TaskItem]:
        run_B, in_run_B = np.divmod(index_B, run_length)
        window_B, offset_B = np.divmod(run_B, count_S.sum())
        slot_B = permute_indices(offset_B, int(count_S.sum()), hash_uint64(seed, window_B))
        task_B, position_B = locate_slots(window_B, slot_B, count_S)
        position_B = position_B * run_length + in_run_B
        for s in np.unique(task_B).tolist():
            own = task_B == s
            epoch, offset = np.divmod(position_B[own], len(groups[s]))
            position_B[own] = permute_indices(offset, len(groups[s]), hash_uint64(seed, s, epoch))
        return [groups[s][i] for s, i in zip(task_B.tolist(), position_B.tolist(), strict=True)]

    return sample


def split_into_batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return batches of `size` items, without the rest; items of several tasks with heads are batched by task."""
    groups = [items]
    if items and isinstance(items[0], TaskItem) and isinstance(items[0].item, EncodedExample):
        names = dict.fromkeys(item.task for item in items)
        groups = [[item for item in items if item.task == name] for name in names]
    return [own[i : i + size] for own in groups for i in range(0, max(len(own) - size, 0) + 1, size)]


def text_task(task: Task) -> TextToTextTask:
    """Return the task that packs and writes the answers of a task."""
    own = task.base_task if isinstance(task, VerbalizedTask) else task
    assert isinstance(own, TextToTextTask)
    return own


def max_row_tokens(task: Task) -> int:
    return text_task(task).max_row_tokens


class MultiTask:
    """Several tasks by name, all with generated answers or all with heads. Each has its own labels and metrics."""

    name = "multi-task"
    metric = AVERAGE_METRIC
    labels: tuple[str, ...] = ()

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.has_heads = all(isinstance(task, HeadTask) for task in tasks.values())
        for name, task in tasks.items():
            if task.name in LEARNED_ALONE:
                raise UserError(f"{name}: {', '.join(LEARNED_ALONE)} are learned alone, not among several tasks.")
            if not self.has_heads and not isinstance(task, TextToTextTask | VerbalizedTask):
                raise UserError(
                    f"{name}: several tasks are all answered as text or all with heads, and {task.name} has a head "
                    "here, where others do not. Add --answer head or --answer text, or learn it alone."
                )
        self.tasks = dict(tasks)
        # Tokenizer and packing are the same in all; objects to extract may need longer rows than other answers.
        self.packer = next(iter(tasks.values())) if self.has_heads else max(tasks.values(), key=max_row_tokens)
        if self.has_heads:
            self.name_heads()
        self.tokenizer = self.packer.tokenizer

    def name_heads(self) -> None:
        """Let the batches of each task name its head."""
        decoders = {name: task.feeds_decoder for name, task in self.tasks.items() if isinstance(task, HeadTask)}
        if len(set(decoders.values())) > 1:
            name = next(name for name, feeds_decoder in decoders.items() if not feeds_decoder)
            raise UserError(f"{name}: its head reads the encoder here, and other heads the decoder. Learn it alone.")
        for name, task in self.tasks.items():
            assert isinstance(task, HeadTask)
            task.head_name = name

    @property
    def notices(self) -> list[str]:
        return [f"{name}: {notice}" for name, task in self.tasks.items() for notice in task.notices]

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        if not self.has_heads:
            return self.packer.configure_model(config)
        heads = {name: task.configure_model(config).head for name, task in self.tasks.items()}
        several = MultiTaskHead(tuple(NamedHead(name, cast(Any, head)) for name, head in heads.items()))
        return replace(config, head=several, extras=())

    def templated_tokenizer(self) -> Tokenizer:
        return self.packer.templated_tokenizer()

    def metadata(self) -> dict[str, Any]:
        """Return task.json: each task by its name. Text-to-text has no prefix of its own: the input brings it along."""
        tasks = {name: task.metadata() for name, task in self.tasks.items()}
        if self.has_heads:
            return {"task": self.name, "answer": "head", "tasks": tasks}
        shared = vars(replace(text_task(self.packer).answer_config, prefix=""))
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
        """Pack the items into rows; with heads, all of them are of one task."""
        if self.has_heads:
            assert len({item.task for item in items}) == 1, "a batch has one head"
            return self.tasks[items[0].task].collate([item.item for item in items])
        return self.packer.collate([item.item for item in items])

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
