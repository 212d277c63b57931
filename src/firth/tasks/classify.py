"""Classification of one text or two, from [CLS] of an encoder or the last token of a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits, softmax
from firth.tasks.task import Prediction
from firth.text import Example


class ClassificationTask(HeadTask):
    """Predict the class of one text."""

    name = "classify"
    metric = "accuracy"

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, "classify", self.labels)

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        ids = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [self.build_item([next(ids) for _ in e.texts], e) for e in examples]

    def build_item(self, ids: Sequence[list[int]], example: Example) -> EncodedExample:
        """Return the item of an example whose texts are tokenized."""
        return EncodedExample((self.template.truncate_and_build(*ids),), self.encode_label(example))

    def encode_label(self, example: Example) -> int:
        return IGNORE_INDEX if example.target is None else self.label_id(example.target, example)

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        return packed.batch._replace(
            task_labels=self.scatter_labels(packed, [item.label for item in items], IGNORE_INDEX),
            soft_labels=self.scatter_soft_labels(packed, items),
        )

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        return [
            prediction_from_probabilities(self.labels, p_C) for p_C in softmax(gather_answer_logits(logits, packed))
        ]


class PairClassificationTask(ClassificationTask):
    """Predict the class of two texts."""

    name = "pair"


def prediction_from_probabilities(labels: Sequence[str], probability_C: Array) -> Prediction:
    """Return the most likely label with the probability of each label."""
    best = labels[int(np.argmax(probability_C))]
    return Prediction(best, dict(zip(labels, probability_C.tolist(), strict=True)))
