"""Classes of a text or of two: from [CLS] of an encoder, from the end of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for
from firth.objectives import IGNORED, Batch
from firth.tasks.headed import Array, Headed, Item, Laid, at_slots, softmax
from firth.tasks.task import Prediction
from firth.text import Example


class Classify(Headed):
    """One text, a class."""

    name = "classify"
    metric = "accuracy"

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, "classify", self.labels)

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        sheets = self.form.read([e.texts for e in examples])
        return [Item((sheet,), self.answer_of(e)) for sheet, e in zip(sheets, examples, strict=True)]

    def answer_of(self, example: Example) -> int:
        return IGNORED if example.target is None else self.class_of(example.target, example)

    def batch(self, items: Sequence[Item]) -> Batch:
        laid = self.lay(items)
        return laid.batch._replace(target=self.targets(laid, [item.answer for item in items], IGNORED))

    def read(self, items: Sequence[Item], logits: Array, laid: Laid) -> list[Prediction]:
        return [by_label(self.labels, p_C) for p_C in softmax(at_slots(logits, laid))]


class Pair(Classify):
    """Two texts, a class."""

    name = "pair"


def by_label(labels: Sequence[str], probability_C: Array) -> Prediction:
    """The likeliest label, and the probability of each."""
    best = labels[int(np.argmax(probability_C))]
    return Prediction(best, dict(zip(labels, probability_C.tolist(), strict=True)))
