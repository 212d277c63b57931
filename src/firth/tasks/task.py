"""What every task can do: turn examples into batches, and batches into predictions."""

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
    extra: dict[str, Any] | None = None  # what else a task knows: other answers, how sure it is that there is none


class Task(Protocol):
    """A task that is ready for one model: it knows the tokenizer, the lengths and, where there are some, the labels.

    An item is an example as the model reads it. It has a `batch_size`, the tokens that it takes.
    """

    name: str
    metric: str  # the one that decides
    labels: tuple[str, ...]
    tokenizer: Tokenizer  # that of the checkpoint, or one with more tokens: the model must grow as far

    @property
    def notices(self) -> list[str]:
        """Sentences for the user: what was cut, what was not found, after `encode`."""

    def encode(self, examples: Sequence[Example]) -> Sequence[Any]: ...

    def collate(self, items: Sequence[Any]) -> Batch:
        """The items, packed into rows; the same items give the same batch."""

    def predict(self, model: Model, items: Sequence[Any], compute: ComputeConfig, batch_size: int) -> list[Prediction]:
        """An answer for each item, in their order; `batch_size` items are computed at once."""

    def calibrate(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        """Choose on these examples what a task has to choose on held-out ones (a threshold), and answer again."""

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]: ...

    def configure_model(self, config: ModelConfig) -> ModelConfig:
        """The model that the task needs: its head, and what stands beside it."""

    def templated_tokenizer(self) -> Tokenizer:
        """The tokenizer, which frames raw texts as this task reads them: `transformers` then does so too."""

    def metadata(self) -> dict[str, Any]:
        """What is kept in task.json: enough to make the task again."""


class TruncatingTokenizer:
    """Texts to ids as the checkpoint was trained to read them, cut to a length; counts what it cut.

    `prefix_ids` and `end_id` stand around a text in place of the checkpoint's own frame.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        max_length: int,
        prefix_ids: tuple[int, ...] | None = None,
        end_id: int | None = None,
    ) -> None:
        self.tokenizer, self.num_truncated = tokenizer, 0
        self.max_length = min(max_length, config.max_length or max_length)
        frame = make_sequence_template(config, tokenizer.vocab)
        self.prefix_ids, self.end_id = (
            frame.prefix_ids if prefix_ids is None else prefix_ids,
            frame.eos_id if end_id is None else end_id,
        )

    def encode_texts(self, texts: Iterable[str]) -> list[list[int]]:
        room = self.max_length - len(self.prefix_ids) - 1
        rows = []
        for ids in self.tokenizer.encode_batch(list(texts)):
            self.num_truncated += len(ids) > room
            rows.append([*self.prefix_ids, *ids[:room], self.end_id])
        return rows

    def truncation_notices(self, noun: str) -> list[str]:
        return truncation_messages(self.num_truncated, noun, self.max_length)


def batch_indices_by_length(items: Sequence[Any], batch_size: int, length_fn: Any) -> Iterator[list[int]]:
    """Batches of places in `items`, those of like length together, so that little is padded."""
    order = sorted(range(len(items)), key=lambda i: length_fn(items[i]))
    for first in range(0, len(order), batch_size):
        yield order[first : first + batch_size]
