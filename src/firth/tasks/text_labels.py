"""Tasks as text-to-text: each example becomes a prompt and a target text (T5, Raffel et al. 2020, section 2.4).

The model needs no task head. It scores the text of each label (classification, rounded numbers, candidates) or
generates the answer (questions), and the text is parsed back into a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from firth.metrics import compute_metrics
from firth.models import Model, ModelConfig
from firth.objectives import Batch
from firth.tasks.relation import insert_entity_markers
from firth.tasks.task import Prediction
from firth.tasks.text_to_text import AnswerConfig, LabelRankingTask, Seq2SeqExample, TextToTextTask
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig

REGRESSION_LABEL_STEPS = 25  # number of steps that targets are rounded to: STS-B's 0 to 5 in steps of 0.2, as in T5


def single_text_prompt(example: Example) -> str:
    return example.texts[0]


def text_pair_prompt(example: Example) -> str:
    """Return one text as it is, or two in T5's format."""
    if len(example.texts) == 1:
        return example.texts[0]
    return f"sentence1: {example.texts[0]} sentence2: {example.texts[1]}"


def question_prompt(example: Example) -> str:
    return f"question: {example.texts[0]} context: {example.texts[1]}"


def marked_text_prompt(example: Example) -> str:
    return insert_entity_markers(example.texts[0], example.spans)[0]


def marked_pair_prompt(example: Example) -> str:
    texts = tuple(
        insert_entity_markers(text, [span])[0] for text, span in zip(example.texts, example.spans, strict=True)
    )
    return text_pair_prompt(example._replace(texts=texts))


TASK_PROMPTS: dict[str, Callable[[Example], str]] = {
    "classify": single_text_prompt,
    "pair": text_pair_prompt,
    "regress": text_pair_prompt,
    "choice": single_text_prompt,
    "relation": marked_text_prompt,
    "word-in-context": marked_pair_prompt,
    "span-qa": question_prompt,
}
VERBALIZED_TASK_METRICS = {"regress": "pearson", "relation": "f1", "span-qa": "f1"}  # default: accuracy


class VerbalizedTask:
    """A task whose labels are texts; `base_task` encodes, trains and predicts.

    `answer_type` converts the predicted text: a class stays text, a score becomes a float, a choice its index.
    """

    answer_type: type[Any] = str

    def __init__(self, name: str, base_task: TextToTextTask) -> None:
        self.name, self.base_task, self.prompt_fn = name, base_task, TASK_PROMPTS[name]
        self.metric = VERBALIZED_TASK_METRICS.get(name, "accuracy")
        self.labels, self.tokenizer = base_task.labels, base_task.tokenizer

    @property
    def notices(self) -> list[str]:
        return self.base_task.notices

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        return self.base_task.configure_model(config)

    def templated_tokenizer(self) -> Tokenizer:
        return self.base_task.templated_tokenizer()

    def metadata(self) -> dict[str, Any]:
        return self.base_task.metadata() | {"task": self.name}

    def encode(self, examples: Sequence[Example]) -> list[Seq2SeqExample]:
        return self.base_task.encode([self.as_text_example(e) for e in examples])

    def as_text_example(self, example: Example) -> Example:
        """Return the example as a prompt and its target text."""
        return Example(example.id, (self.prompt_fn(example),), self.answer_text(example))

    def answer_text(self, example: Example) -> str:
        return example.target or ""

    def collate(self, items: Sequence[Seq2SeqExample]) -> Batch:
        return self.base_task.collate(items)

    def predict(
        self, model: Model, items: Sequence[Seq2SeqExample], compute: ComputeConfig, batch_size: int
    ) -> list[Prediction]:
        predictions = self.base_task.predict(model, items, compute, batch_size)
        return [p._replace(prediction=self.answer_type(p.prediction)) for p in predictions]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return compute_metrics(self.name, [p.prediction for p in predictions], [e.target for e in examples])


class VerbalizedRegressionTask(VerbalizedTask):
    """Targets are rounded and written as text; the prediction is the most likely number of the training set."""

    answer_type = float

    def answer_text(self, example: Example) -> str:
        values = [float(label) for label in self.labels]
        target = float(example.target or 0.0)
        return self.labels[min(range(len(values)), key=lambda i: abs(values[i] - target))]


class VerbalizedChoiceTask(VerbalizedTask):
    """Predict the candidate that is the most likely continuation of the context."""

    answer_type = int

    def answer_text(self, example: Example) -> str:
        return example.texts[1 + max(example.target or 0, 0)]  # the target is -1 if no candidate is right

    def encode(self, examples: Sequence[Example]) -> list[Seq2SeqExample]:
        candidates = iter(self.base_task.answer_tokenizer.encode_texts(text for e in examples for text in e.texts[1:]))
        return [
            item._replace(candidates=tuple(next(candidates) for _ in e.texts[1:]))
            for item, e in zip(super().encode(examples), examples, strict=True)
        ]


class VerbalizedQATask(VerbalizedTask):
    """Generate the answer to a question; an empty text means that there is none."""

    def answer_text(self, example: Example) -> str:
        return example.target[0].text if example.target else ""


def round_regression_labels(targets: Sequence[float]) -> tuple[str, ...]:
    """Return the targets as sorted texts without repetition, rounded to about a 25th of their range.

    >>> round_regression_labels([0.0, 0.31, 5.0, 4.9])
    ('0.0', '0.4', '4.8', '5.0')
    >>> round_regression_labels([0.0, 5e-6])
    ('0.0000000', '0.0000050')
    """
    step = float(f"{(max(targets) - min(targets)) / REGRESSION_LABEL_STEPS or 1:.1g}")
    decimals = max(0, -math.floor(math.log10(step)))
    return tuple(f"{n * step:.{decimals}f}" for n in sorted({round(t / step) for t in targets}))


def make_verbalized_task(
    name: str,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    config: ModelConfig,
    answer_config: AnswerConfig,
    is_training: bool,
) -> VerbalizedTask:
    """Return the task of this name for a model that generates text."""
    if name == "span-qa":
        return VerbalizedQATask(name, TextToTextTask(tokenizer, config, answer_config, is_training))
    base_task = LabelRankingTask(labels, tokenizer, config, answer_config, is_training)
    kinds: dict[str, type[VerbalizedTask]] = {"regress": VerbalizedRegressionTask, "choice": VerbalizedChoiceTask}
    return kinds.get(name, VerbalizedTask)(name, base_task)
