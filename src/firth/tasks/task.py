"""The Task protocol: examples -> encoded items -> batches -> predictions -> scores.

Fine-tuning, evaluation and prediction use tasks through these methods alone:

    items = task.encode(examples)              # tokenize, add special tokens, truncate
    batch = task.collate(items[:32])           # pack into rows, with labels
    predictions = task.predict(model, items, compute, batch_size)
    scores = task.score(examples, predictions)

`HeadTask` implements them for task heads, `TextToTextTask` for generated answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from firth.core.console import truncation_messages
from firth.models import Model, ModelConfig, make_sequence_template
from firth.objectives import Batch
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import ComputeConfig


class Prediction(NamedTuple):
    prediction: Any
    scores: dict[str, float] | None = None  # probabilities by label
    extra: dict[str, Any] | None = None  # task-specific values, such as the n-best answers


class Task(Protocol):
    """A task that is bound to one model: tokenizer, maximum lengths and labels are fixed.

    An item is an encoded example. Its `num_tokens` is its number of input tokens.
    """

    name: str
    metric: str  # selects the best step and seed
    labels: tuple[str, ...]
    tokenizer: Tokenizer  # may have more tokens than the checkpoint: the embedding is resized to it

    @property
    def notices(self) -> list[str]:
        """Messages for the user about truncated texts and missing answers, complete after `encode`."""

    def encode(self, examples: Sequence[Example]) -> Sequence[Any]: ...

    def collate(self, items: Sequence[Any]) -> Batch:
        """Pack the items into rows; a pure function of the items."""

    def predict(self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int) -> list[Prediction]:
        """Return a prediction for each item, in order, computed `batch_size` items at a time."""

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]: ...

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the task's head and auxiliary modules."""

    def templated_tokenizer(self) -> Tokenizer:
        """Return the tokenizer with the task's special-token template, so that `transformers` adds the same tokens."""

    def metadata(self) -> dict[str, Any]:
        """Return the content of task.json, which suffices to rebuild the task."""


class TruncatingTokenizer:
    """Encode texts with special tokens, truncated to `max_length`; count the truncated texts.

    `prefix_ids` and `end_ids` replace the checkpoint's own special tokens (default: its template).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        max_length: int,
        prefix_ids: tuple[int, ...] | None = None,
        end_ids: tuple[int, ...] | None = None,
    ) -> None:
        self.tokenizer, self.num_truncated = tokenizer, 0
        self.was_truncated: list[bool] = []  # of the texts of the last call
        self.max_length = min(max_length, config.max_length or max_length)
        template = make_sequence_template(config, tokenizer.vocab)
        self.prefix_ids = template.prefix_ids if prefix_ids is None else prefix_ids
        self.end_ids = (template.eos_id,) if end_ids is None else end_ids

    def encode_texts(self, texts: Iterable[str]) -> list[list[int]]:
        max_text_tokens = self.max_length - len(self.prefix_ids) - len(self.end_ids)
        encoded = self.tokenizer.encode_batch(list(texts))
        self.was_truncated = [len(ids) > max_text_tokens for ids in encoded]
        self.num_truncated += sum(self.was_truncated)
        return [[*self.prefix_ids, *ids[:max_text_tokens], *self.end_ids] for ids in encoded]

    def truncation_notices(self, noun: str) -> list[str]:
        return truncation_messages(self.num_truncated, noun, self.max_length)


def batch_indices_by_length(items: Sequence[Any], batch_size: int, length_fn: Any) -> Iterator[list[int]]:
    """Yield batches of indices into `items`, sorted by length to minimize padding."""
    order = sorted(range(len(items)), key=lambda i: length_fn(items[i]))
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]
