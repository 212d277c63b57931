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
        ids = iter(self.tokenizer.encode_batch([text for e in examples for text in e.texts]))
        return [self.build_item([next(ids) for _ in e.texts], e) for e in examples]

    def build_item(self, ids: Sequence[list[int]], example: Example) -> EncodedExample:
        """Return the item of an example whose texts are tokenized: the context with each candidate."""
        context, *candidates = ids
        pairs = (self.template.truncate_and_build(context, candidate) for candidate in candidates)
        return EncodedExample(tuple(pairs), example.target)

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
