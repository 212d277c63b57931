"""What the tasks share whose answers are read from hidden states of packed rows.

N texts, B rows, T places, K answers of a row, A answers in all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from firth.errors import UserError
from firth.metrics import score
from firth.models import Head, Model, ModelConfig
from firth.models.config import Auxiliary, Choices, Classes, ELMo, LMHead, Score
from firth.objectives import IGNORED, Batch
from firth.tasks.form import DELIMITER, EXTRACT, Form, Sheet
from firth.tasks.packing import Packing, pack
from firth.tasks.shapes import TRIED, find_shapes, size_of, unpadded
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.frame import A, B, framed
from firth.tokens.lexicon import opened
from firth.train import Machine

Array = np.ndarray
ABOUT_PLACES = ("tag", "span-qa", "relation", "word-in-context")


@dataclass(frozen=True)
class Item:
    """An example as a model reads it: one sheet or several, and what is asked (None where nobody knows)."""

    sheets: tuple[Sheet, ...]
    answer: Any = None

    @property
    def size(self) -> int:
        return sum(sheet.size for sheet in self.sheets)


class Laid(NamedTuple):
    """A batch without its answers, and the slot of each answer in (B, K) laid end to end."""

    batch: Batch
    packing: Packing
    slot: Array  # (A,)


class Headed:
    """A task with a head. What differs is how examples are read, what is asked, and what logits mean."""

    name: str
    metric: str
    together = 1  # so many sheets are one answer: both orders of two texts
    marks = 1  # so many places of a sheet are one answer
    num_shapes = 0  # that the batches of the last prediction had

    def __init__(
        self, tokenizer: Tokenizer, config: ModelConfig, length: int, labels: Sequence[str] = (), learns: bool = True
    ) -> None:
        if config.shape == "decoder" and learns and config.recurrent is None:
            tokenizer = tokenizer.with_tokens((DELIMITER, EXTRACT))
        if isinstance(config.recurrent, ELMo):
            tokenizer = opened(tokenizer)
        if tokenizer.backward and self.name in ABOUT_PLACES:
            raise UserError(
                f"A model that reads backward labels whole texts, not places in them: {self.name} is not its."
            )
        self.tokenizer, self.labels, self.shape = tokenizer, tuple(labels), config.shape
        self.form = Form(tokenizer, config, length)
        self.number = {label: i for i, label in enumerate(self.labels)}
        self.both_sides = config.shape == "encoder-decoder" and config.framed and self.name != "embed"

    # --- what each task says for itself

    @abstractmethod
    def encode(self, examples: Sequence[Example]) -> Sequence[Item]: ...

    @abstractmethod
    def batch(self, items: Sequence[Any]) -> Batch: ...

    @abstractmethod
    def read(self, items: Sequence[Any], logits: Array, laid: Laid) -> list[Prediction]:
        """Logits to predictions."""

    @abstractmethod
    def answers(self, config: ModelConfig) -> Head:
        """The head that this task has in this model."""

    # --- what they share

    @property
    def said(self) -> list[str]:
        return self.form.say_cut()

    def head(self, config: ModelConfig) -> ModelConfig:
        """A decoder goes on learning the language beside its task (Radford et al. 2018, section 3.2)."""
        head, words = self.answers(config), config.head
        if config.recurrent is not None:
            return replace(config, head=head, extras=())
        if config.shape == "decoder" and isinstance(head, Classes | Score | Choices) and isinstance(words, LMHead):
            return replace(config, head=head, extras=(Auxiliary(head=words),))
        return replace(config, head=head, extras=())

    def framed(self) -> Tokenizer:
        return framed(self.tokenizer, [self.form.frame([A]), self.form.frame([A], [B])], self.form.segments)

    def facts(self) -> dict[str, Any]:
        labels = {"labels": list(self.labels)} if self.labels else {}
        return {"task": self.name, "answer": "head", **labels, "max_seq_length": self.form.length}

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return score(self.name, [p.prediction for p in predictions], [e.target for e in examples])

    def class_of(self, label: str, example: Example) -> int:
        if label not in self.number:
            raise UserError(f"Example {example.id}: the label {label!r} is none of {', '.join(self.labels[:20])}.")
        return self.number[label]

    def lay(self, items: Sequence[Item]) -> Laid:
        """The sheets of the items in rows, and the places that they ask."""
        sheets = [sheet for item in items for sheet in item.sheets]
        packing = pack([sheet.size for sheet in sheets], self.form.length, self.together)
        doc_BT, position_BT = packing.documents()
        tokens_BT = packing.lay(np.concatenate([sheet.ids for sheet in sheets]), self.tokenizer.vocab.pad)
        segment_BT = packing.lay(np.concatenate([s.segment for s in sheets]), 0) if self.form.segments else None
        count_N = np.array([len(sheet.asked) for sheet in sheets])
        place_A = np.array([place for s in sheets for place in s.asked], np.int64) + np.repeat(packing.first, count_N)
        each = self.together * self.marks
        width, entry_A = packing.slots(count_N, each)
        asked_BK = np.zeros((packing.num_rows, width), np.int64)
        asked_BK.reshape(-1)[entry_A] = place_A
        batch = Batch(tokens_BT, doc=doc_BT, position=position_BT, segment=segment_BT, asked=asked_BK)
        if self.both_sides:
            batch = self.on_both_sides(batch)
        if self.shape == "decoder":  # which goes on to learn the language
            batch = batch._replace(labels=next_tokens(tokens_BT, doc_BT))
        return Laid(batch, packing, entry_A[::each] // each)

    def on_both_sides(self, batch: Batch) -> Batch:
        """The decoder reads the same texts, one place later."""
        later_BT = np.roll(batch.tokens, 1, 1)
        later_BT[batch.position == 0] = self.form.start
        return batch._replace(decoder_tokens=later_BT, decoder_doc=batch.doc, decoder_position=batch.position)

    def targets(self, laid: Laid, answer_A: Any, empty: float, dtype: Any = np.int64) -> Array:
        """(B, K): what is asked in each slot."""
        assert laid.batch.asked is not None
        shape = laid.batch.asked.shape
        target_BK = np.full((shape[0], shape[1] // (self.together * self.marks)), empty, dtype)
        target_BK.reshape(-1)[laid.slot] = answer_A
        return target_BK

    @torch.no_grad()
    def predict(self, model: Model, items: Sequence[Any], machine: Machine, size: int) -> list[Prediction]:
        """Where steps are compiled, the batches have few shapes here too."""
        model.eval()
        found: list[Prediction] = []
        parts = [items[first : first + size] for first in range(0, len(items), size)]
        shapes = find_shapes(map(self.batch, parts[:TRIED]), self.tokenizer.vocab.pad) if machine.compile else None
        sizes = set()
        for some in parts:
            batch = self.batch(some)
            whole = batch if shapes is None else shapes(batch)
            with machine.precision():
                logits = model.logits(whole.to(machine.device))
            logits = unpadded(logits.float().cpu().numpy(), size_of(batch), size_of(whole))
            found += self.read(some, logits, self.lay(some))
            sizes.add(size_of(whole))
        self.num_shapes = len(sizes)
        return found


def next_tokens(tokens_BT: Array, doc_BT: Array) -> Array:
    """What follows each token in its text; -100 where nothing does."""
    labels_BT = np.full_like(tokens_BT, IGNORED)
    follows = (doc_BT[:, 1:] == doc_BT[:, :-1]) & (doc_BT[:, 1:] >= 0)
    labels_BT[:, :-1][follows] = tokens_BT[:, 1:][follows]
    return labels_BT


def at_slots(logits: Array, laid: Laid) -> Array:
    """(A, ...): the logits (B, K, ...) of the answers."""
    return logits.reshape(-1, *logits.shape[2:])[laid.slot]


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
