"""What every task can do: turn examples into batches, and batches into predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from firth.console import too_long
from firth.models import Model, ModelConfig, framing
from firth.objectives import Batch
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine


class Prediction(NamedTuple):
    prediction: Any
    scores: dict[str, float] | None = None  # probabilities by label
    extra: dict[str, Any] | None = None  # what else a task knows: other answers, how sure it is that there is none


class Task(Protocol):
    """A task that is ready for one model: it knows the tokenizer, the lengths and, where there are some, the labels.

    An item is an example as the model reads it. It has a `size`, the tokens that it takes.
    """

    name: str
    metric: str  # the one that decides
    labels: tuple[str, ...]
    tokenizer: Tokenizer  # that of the checkpoint, or one with more tokens: the model must grow as far

    @property
    def said(self) -> list[str]:
        """Sentences for the user: what was cut, what was not found, after `encode`."""

    def encode(self, examples: Sequence[Example]) -> Sequence[Any]: ...

    def batch(self, items: Sequence[Any]) -> Batch:
        """The items, packed into rows; the same items give the same batch."""

    def predict(self, model: Model, items: Sequence[Any], machine: Machine, size: int) -> list[Prediction]:
        """An answer for each item, in their order; `size` items are computed at once."""

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        """Choose on these examples what a task has to choose on held-out ones (a threshold), and answer again."""

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]: ...

    def head(self, config: ModelConfig) -> ModelConfig:
        """The model that the task needs: its head, and what stands beside it."""

    def framed(self) -> Tokenizer:
        """The tokenizer, which frames raw texts as this task reads them: `transformers` then does so too."""

    def facts(self) -> dict[str, Any]:
        """What is kept in task.json: enough to make the task again."""


class Reader:
    """Texts to ids as the checkpoint was trained to read them, cut to a length; counts what it cut.

    `before` and `end` stand around a text in place of the checkpoint's own frame.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        length: int,
        before: tuple[int, ...] | None = None,
        end: int | None = None,
    ) -> None:
        self.tokenizer, self.cut = tokenizer, 0
        self.length = min(length, config.max_length or length)
        frame = framing(config, tokenizer.vocab)
        self.before, self.end = frame.before if before is None else before, frame.end if end is None else end

    def read(self, texts: Iterable[str]) -> list[list[int]]:
        room = self.length - len(self.before) - 1
        rows = []
        for ids in self.tokenizer.encode_batch(list(texts)):
            self.cut += len(ids) > room
            rows.append([*self.before, *ids[:room], self.end])
        return rows

    def say_cut(self, noun: str) -> list[str]:
        return too_long(self.cut, noun, self.length)


def by_length(items: Sequence[Any], size: int, length: Any) -> Iterator[list[int]]:
    """Batches of places in `items`, those of like length together, so that little is padded."""
    order = sorted(range(len(items)), key=lambda i: length(items[i]))
    for first in range(0, len(order), size):
        yield order[first : first + size]
