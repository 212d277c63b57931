"""Any task by words: examples become texts to read and texts to write, and what is written becomes an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from firth.metrics import score
from firth.models import Model, ModelConfig
from firth.objectives import Batch
from firth.tasks.relation import mark
from firth.tasks.task import Prediction
from firth.tasks.text_to_text import Item, LabelWords, TextToText, Writing
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine

STEPS = 25  # a number is told in so many steps: STS-B's 0 to 5 by 0.2, as T5 has it


def one(example: Example) -> str:
    return example.texts[0]


def two(example: Example) -> str:
    """One text, or two, in T5's words."""
    if len(example.texts) == 1:
        return example.texts[0]
    return f"sentence1: {example.texts[0]} sentence2: {example.texts[1]}"


def question(example: Example) -> str:
    return f"question: {example.texts[0]} context: {example.texts[1]}"


def marked(example: Example) -> str:
    return mark(example.texts[0], example.spans)[0]


def marked_words(example: Example) -> str:
    texts = tuple(mark(text, [span])[0] for text, span in zip(example.texts, example.spans, strict=True))
    return two(example._replace(texts=texts))


SOURCES: dict[str, Callable[[Example], str]] = {
    "classify": one,
    "pair": two,
    "regress": two,
    "choice": one,
    "relation": marked,
    "word-in-context": marked_words,
    "span-qa": question,
}
METRICS = {"regress": "pearson", "relation": "f1", "span-qa": "f1"}  # the rest: accuracy


class ByWords:
    """What the tasks by words share: a task of text to text does the work (`inner`)."""

    def __init__(self, name: str, inner: TextToText) -> None:
        self.name, self.inner, self.source = name, inner, SOURCES[name]
        self.metric = METRICS.get(name, "accuracy")
        self.labels, self.tokenizer = inner.labels, inner.tokenizer

    @property
    def said(self) -> list[str]:
        return self.inner.said

    def head(self, config: ModelConfig) -> ModelConfig:
        return self.inner.head(config)

    def framed(self) -> Tokenizer:
        return self.inner.framed()

    def facts(self) -> dict[str, Any]:
        return self.inner.facts() | {"task": self.name}

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        return self.inner.encode([self.text(e) for e in examples])

    def text(self, example: Example) -> Example:
        """The example as texts."""
        return Example(example.id, (self.source(example),), self.written(example))

    def written(self, example: Example) -> str:
        return example.target or ""

    def batch(self, items: Sequence[Item]) -> Batch:
        return self.inner.batch(items)

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        return self.inner.predict(model, items, machine, size)

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return score(self.name, [p.prediction for p in predictions], [e.target for e in examples])


class NumberWords(ByWords):
    """Numbers are written rounded; the likeliest of those that were learned is the answer (T5, section 2.4)."""

    def written(self, example: Example) -> str:
        values = [float(label) for label in self.labels]
        target = float(example.target or 0.0)
        return self.labels[min(range(len(values)), key=lambda i: abs(values[i] - target))]

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        found = self.inner.predict(model, items, machine, size)
        return [p._replace(prediction=float(p.prediction)) for p in found]


class ChoiceWords(ByWords):
    """The candidate that is the likeliest continuation of the context."""

    def written(self, example: Example) -> str:
        return example.texts[1 + max(example.target or 0, 0)]  # it is -1 where none is right

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        candidates = iter(self.inner.writer.read(text for e in examples for text in e.texts[1:]))
        return [
            item._replace(candidates=tuple(next(candidates) for _ in e.texts[1:]))
            for item, e in zip(super().encode(examples), examples, strict=True)
        ]

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        found = self.inner.predict(model, items, machine, size)
        return [p._replace(prediction=int(p.prediction)) for p in found]


class AnswerWords(ByWords):
    """The answer to a question, written freely; nothing at all where there is none."""

    def written(self, example: Example) -> str:
        return example.target[0].text if example.target else ""


def rounded(targets: Sequence[float]) -> tuple[str, ...]:
    """The numbers that are written for these, rounded to about a 25th of what they span.

    >>> rounded([0.0, 0.31, 5.0, 4.9])
    ('0.0', '0.4', '4.8', '5.0')
    >>> rounded([0.0, 5e-6])
    ('0.0000000', '0.0000050')
    """
    step = float(f"{(max(targets) - min(targets)) / STEPS or 1:.1g}")
    decimals = max(0, -math.floor(math.log10(step)))
    return tuple(f"{n * step:.{decimals}f}" for n in sorted({round(t / step) for t in targets}))


def by_words(
    name: str, labels: Sequence[str], tokenizer: Tokenizer, config: ModelConfig, writing: Writing, learns: bool
) -> ByWords:
    """The task of this name for a model that writes."""
    if name == "span-qa":
        return AnswerWords(name, TextToText(tokenizer, config, writing, learns))
    inner = LabelWords(labels, tokenizer, config, writing, learns)
    kinds: dict[str, type[ByWords]] = {"regress": NumberWords, "choice": ChoiceWords}
    return kinds.get(name, ByWords)(name, inner)
