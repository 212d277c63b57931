"""A number for a text or for two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from firth.models import Head, ModelConfig, head_for
from firth.objectives import Batch
from firth.tasks.headed import Array, Headed, Item, Laid, at_slots
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer


class Regress(Headed):
    """One number. A decoder reads two texts in both orders, as neither comes first (Radford et al. 2018, 3.3)."""

    name = "regress"
    metric = "pearson"

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, length: int, texts: int, learns: bool = True) -> None:
        super().__init__(tokenizer, config, length, learns=learns)
        self.texts, self.together = texts, 2 if texts == 2 and config.shape == "decoder" else 1

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, "regress", orders=self.together)

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"texts": self.texts}

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        sheets = iter(self.form.read([texts for e in examples for texts in self.orders(e)]))
        items = []
        for e in examples:
            answer = math.nan if e.target is None else float(e.target)
            items.append(Item(tuple(next(sheets) for _ in self.orders(e)), answer))
        return items

    def orders(self, example: Example) -> list[tuple[str, ...]]:
        return [example.texts, example.texts[::-1]][: self.together]

    def batch(self, items: Sequence[Item]) -> Batch:
        laid = self.lay(items)
        return laid.batch._replace(target=self.targets(laid, [i.answer for i in items], math.nan, np.float32))

    def read(self, items: Sequence[Item], logits: Array, laid: Laid) -> list[Prediction]:
        return [Prediction(float(value)) for value in at_slots(logits, laid).reshape(len(items))]
