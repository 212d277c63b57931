"""What every task can do: turn examples into batches, and batches into predictions.

B examples, T tokens, U tokens of an answer, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from firth.models import Head, Model, ModelConfig, framing
from firth.objectives import Batch
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import Machine

ROUND = 8  # batches are padded to a multiple of this, so that few shapes occur


class Prediction(NamedTuple):
    prediction: str
    scores: dict[str, float] | None = None


class Task(Protocol):
    """A task that is ready for one model: it knows the tokenizer, the lengths and, where there are some, the labels."""

    metric: str

    @property
    def cut(self) -> list[str]:
        """Sentences about what was longer than the model reads."""

    def encode(self, examples: Sequence[Example]) -> list[Any]: ...

    def batch(self, items: Sequence[Any]) -> Batch: ...

    def predict(self, model: Model, items: Sequence[Any], machine: Machine, size: int) -> list[Prediction]: ...

    def head(self, config: ModelConfig) -> Head: ...

    def facts(self) -> dict[str, Any]: ...


def pad_rows(rows: Sequence[Sequence[int]], pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids, padded on the right, and which places are text (0) or padding (-1)."""
    width = -(-max(map(len, rows)) // ROUND) * ROUND
    length_B = np.array([len(row) for row in rows])
    text_BT = np.arange(width) < length_B[:, None]
    tokens_BT = np.full((len(rows), width), pad, np.int64)
    tokens_BT[text_BT] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return tokens_BT, text_BT.astype(np.int64) - 1


class Reader:
    """Texts to ids as the checkpoint was trained to read them, cut to a length; counts what it cut."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, length: int) -> None:
        self.tokenizer, self.cut = tokenizer, 0
        self.length = min(length, config.max_length or length)
        self.frame = framing(config, tokenizer.vocab)

    def read(self, texts: Iterable[str]) -> list[list[int]]:
        room = self.length - len(self.frame.before) - 1
        rows = []
        for ids in self.tokenizer.encode_batch(list(texts)):
            self.cut += len(ids) > room
            rows.append([*self.frame.before, *ids[:room], self.frame.end])
        return rows

    def say_cut(self, what: str) -> list[str]:
        return [f"{self.cut:,} {what} were longer than {self.length} tokens, and cut."] if self.cut else []


def by_length(items: Sequence[Any], size: int, length: Any) -> Iterator[list[int]]:
    """Batches of places in `items`, those of like length together, so that little is padded."""
    order = sorted(range(len(items)), key=lambda i: length(items[i]))
    for first in range(0, len(order), size):
        yield order[first : first + size]
