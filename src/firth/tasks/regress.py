"""Regression: predict one number for a text or for two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer


class RegressionTask(HeadTask):
    """Predict a number. A decoder reads two texts in both orders (Radford et al. 2018, section 3.3)."""

    name = "regress"
    metric = "pearson"

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, max_length: int, num_texts: int, is_training: bool = True
    ) -> None:
        super().__init__(tokenizer, config, max_length, is_training=is_training)
        self.num_texts = num_texts
        self.sequences_per_label = 2 if num_texts == 2 and config.architecture == "decoder" else 1

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, "regress", num_orders=self.sequences_per_label)

    def metadata(self) -> dict[str, Any]:
        return super().metadata() | {"texts": self.num_texts}

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        ids = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [self.build_item([next(ids) for _ in e.texts], e) for e in examples]

    def build_item(self, ids: Sequence[list[int]], example: Example) -> EncodedExample:
        """Return the item of an example whose texts are tokenized, in one order or in both."""
        answer = math.nan if example.target is None else float(example.target)
        orders = [ids, ids[::-1]][: self.sequences_per_label]
        return EncodedExample(tuple(self.template.truncate_and_build(*order) for order in orders), answer)

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        return packed.batch._replace(
            task_labels=self.scatter_labels(packed, [i.label for i in items], math.nan, np.float32),
            soft_labels=self.scatter_soft_labels(packed, items),
        )

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        return [Prediction(float(value)) for value in gather_answer_logits(logits, packed).reshape(len(items))]
