"""Which of several continuations is right; every example has as many as it likes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for
from firth.objectives import Batch
from firth.tasks.headed import Array, Headed, Item, Laid, at_slots, softmax
from firth.tasks.task import Prediction
from firth.text import Example


class Choose(Headed):
    """Context and candidate are read together, one sheet for each candidate, and each gets a number."""

    name = "choice"
    metric = "accuracy"

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, "choice")

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        pairs = [(e.texts[0], candidate) for e in examples for candidate in e.texts[1:]]
        sheets = iter(self.form.read(pairs))
        return [Item(tuple(next(sheets) for _ in e.texts[1:]), e.target) for e in examples]

    def batch(self, items: Sequence[Item]) -> Batch:
        laid = self.lay(items)
        group_A = np.repeat(np.arange(len(items)), [len(item.sheets) for item in items])
        right_A = [int(i == item.answer) for item in items for i in range(len(item.sheets))]
        return laid.batch._replace(group=self.targets(laid, group_A, -1), target=self.targets(laid, right_A, 0))

    def read(self, items: Sequence[Item], logits: Array, laid: Laid) -> list[Prediction]:
        score_A = at_slots(logits, laid).reshape(-1)
        ends = np.cumsum([len(item.sheets) for item in items])
        found = []
        for score_C in np.split(score_A, ends[:-1]):
            probability_C = softmax(score_C)
            scores = {str(i): float(p) for i, p in enumerate(probability_C)}
            found.append(Prediction(int(probability_C.argmax()), scores))
        return found
