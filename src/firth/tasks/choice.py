"""Multiple choice: predict the right one of several candidates; their number may differ between examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firth.models import Head, ModelConfig, head_for_task
from firth.objectives import Batch
from firth.tasks.head_task import Array, EncodedExample, HeadTask, PackedBatch, gather_answer_logits, softmax
from firth.tasks.task import Prediction
from firth.text import Example


class ChoiceTask(HeadTask):
    """Encode the context with each candidate as one sequence; a softmax over their logits selects the answer."""

    name = "choice"
    metric = "accuracy"

    def head_config(self, config: ModelConfig) -> Head:
        return head_for_task(config, "choice")

    def encode(self, examples: Sequence[Example]) -> list[EncodedExample]:
        pairs = [(e.texts[0], candidate) for e in examples for candidate in e.texts[1:]]
        sequences = iter(self.template.encode_texts(pairs))
        return [EncodedExample(tuple(next(sequences) for _ in e.texts[1:]), e.target) for e in examples]

    def add_labels(self, packed: PackedBatch, items: Sequence[EncodedExample]) -> Batch:
        group_A = np.repeat(np.arange(len(items)), [len(item.sequences) for item in items])
        right_A = [int(i == item.label) for item in items for i in range(len(item.sequences))]
        return packed.batch._replace(
            group_ids=self.scatter_labels(packed, group_A, -1),
            task_labels=self.scatter_labels(packed, right_A, 0),
            soft_labels=self.scatter_soft_labels(packed, items),
        )

    def num_labels(self, item: EncodedExample) -> int:
        return len(item.sequences)

    def decode_logits(self, items: Sequence[EncodedExample], logits: Array, packed: PackedBatch) -> list[Prediction]:
        score_A = gather_answer_logits(logits, packed).reshape(-1)
        ends = np.cumsum([len(item.sequences) for item in items])
        predictions = []
        for score_C in np.split(score_A, ends[:-1]):
            probability_C = softmax(score_C)
            scores = {str(i): float(p) for i, p in enumerate(probability_C)}
            predictions.append(Prediction(int(probability_C.argmax()), scores))
        return predictions
