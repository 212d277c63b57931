"""Classification with a head on one state: [CLS] of an encoder, the last token of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.models import Head, Model, ModelConfig, with_classes
from firth.objectives import Batch
from firth.tasks.task import Prediction, Reader, by_length, pad_rows
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine


class Item(NamedTuple):
    ids: list[int]
    label: int


class Classify:
    metric = "accuracy"

    def __init__(self, labels: Sequence[str], tokenizer: Tokenizer, config: ModelConfig, length: int) -> None:
        self.labels = tuple(labels)
        self.reader = Reader(tokenizer, config, length)
        self.pad, self.last = tokenizer.vocab.pad, with_classes(config, self.labels).answers_last

    @property
    def cut(self) -> list[str]:
        return self.reader.say_cut("texts")

    def head(self, config: ModelConfig) -> Head:
        return with_classes(config, self.labels).head

    def facts(self) -> dict[str, Any]:
        return {"task": "classify", "labels": list(self.labels)}

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        number = {label: i for i, label in enumerate(self.labels)}
        rows = self.reader.read(e.texts[0] for e in examples)
        return [Item(ids, number[e.target]) for ids, e in zip(rows, examples, strict=True)]

    def batch(self, items: Sequence[Item]) -> Batch:
        tokens, doc = pad_rows([item.ids for item in items], self.pad)
        asked = np.array([[len(item.ids) - 1 if self.last else 0] for item in items])
        return Batch(tokens, doc=doc, asked=asked, target=np.array([item.label for item in items]))

    @torch.no_grad()
    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        model.eval()
        probability_NC = np.zeros((len(items), len(self.labels)))
        for places in by_length(items, size, lambda item: len(item.ids)):
            with machine.precision():
                logits = model.logits(self.batch([items[i] for i in places]).to(machine.device))
            probability_NC[places] = logits.float().softmax(-1).cpu().numpy()
        return [
            Prediction(self.labels[int(p_C.argmax())], dict(zip(self.labels, p_C.tolist(), strict=True)))
            for p_C in probability_NC
        ]
