"""Every task as text to text, as T5 has it: a text is read, and the answer is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from firth.console import progress
from firth.errors import UserError
from firth.generate import Decoding, generate_ids
from firth.metrics import score
from firth.models import Model, ModelConfig, framing, head_for
from firth.objectives import Batch
from firth.tasks.form import DELIMITER, Sheet
from firth.tasks.task import Prediction, Reader, by_length
from firth.tasks.writing import Laid, Line, foresee, lay_lines, lay_pairs
from firth.text import Example
from firth.tokens import Tokenizer
from firth.tokens.frame import A, framed
from firth.train import Machine

LENGTH, TARGET_LENGTH = 512, 32  # tokens, where nothing is said

Answers = Sequence[list[int]]


@dataclass(frozen=True)
class Writing:
    """How texts are read and answers written: lengths in tokens, what stands before, how beams search, which day."""

    max_seq_length: int = LENGTH
    max_target_length: int = TARGET_LENGTH
    prefix: str = ""
    num_beams: int = 1
    length_penalty: float = 1.0
    day: str = ""  # that a chat template is told; today unless said


def writing_of(facts: Mapping[str, Any], config: ModelConfig) -> Writing:
    """As task.json, or a recipe, says; the length is the model's own where it is left open."""
    known = {name: facts[name] for name in Writing.__dataclass_fields__ if facts.get(name) is not None}
    length = known.pop("max_seq_length", 0) or config.max_length or LENGTH
    target = known.pop("max_target_length", 0) or min(TARGET_LENGTH, (config.max_length or length) // 2)
    return Writing(length, target, **known)


class Item(NamedTuple):
    ids: list[int]
    answer: list[int]
    candidates: tuple[list[int], ...] = ()  # answers of its own to choose from

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.answer)


def check_writes(task: str, config: ModelConfig) -> None:
    if config.shape == "encoder":
        raise UserError(
            f"{task} needs a model that writes: a decoder or an encoder-decoder. This {config.family} is an encoder, "
            "which can learn every task but text-to-text and lm."
        )


class TextToText:
    """The answer is generated, word by word. A decoder reads the text and a delimiter, and goes on with the answer.

    A decoder that was never tuned has no delimiter, and just goes on.
    """

    name = "text-to-text"
    metric = "chrf"
    labels: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, writing: Writing, learns: bool = True) -> None:
        check_writes(self.name, config)
        self.decoder, self.start = config.shape == "decoder", framing(config, tokenizer.vocab).start
        if self.decoder and learns:
            tokenizer = tokenizer.with_tokens((DELIMITER,))
        self.tokenizer, self.writing, self.pad = tokenizer, writing, tokenizer.vocab.pad
        self.writer = Reader(tokenizer, config, writing.max_target_length, before=() if self.decoder else None)
        length, delimiter = writing.max_seq_length, None
        if self.decoder:  # the text and its answer share a row
            length = min(length, (config.max_length or length + self.writer.length) - self.writer.length)
            delimiter = tokenizer.backend.token_to_id(DELIMITER)
        self.reader = Reader(tokenizer, config, length, end=delimiter)
        self.row = max(self.reader.length, self.writer.length)
        self.side_by_side = not self.decoder and config.recurrent is None  # answers to one text
        self.delimited = not self.decoder or delimiter is not None
        self.check_room(config)
        self.decoding = Decoding(
            max_new_tokens=self.writer.length, num_beams=writing.num_beams, length_penalty=writing.length_penalty
        )

    def check_room(self, config: ModelConfig) -> None:
        """Refuse lengths that leave no room for a text, and a prefix that takes all of it."""
        room = self.reader.length - len(self.reader.before) - 1 - len(self.tokenizer.encode(self.writing.prefix))
        if room >= 1:
            return
        if self.decoder and config.max_length and self.writer.length >= config.max_length // 2:
            raise UserError(
                f"A row of this decoder has {config.max_length} places, and answers take {self.writer.length} of them: "
                "no room is left for a text. Lower max_target_length."
            )
        raise UserError(
            f"max_seq_length={self.reader.length} has no room for a text behind the prefix {self.writing.prefix!r}."
        )

    @property
    def said(self) -> list[str]:
        return [*self.reader.say_cut("text"), *self.writer.say_cut("answer")]

    def head(self, config: ModelConfig) -> ModelConfig:
        return replace(config, head=head_for(config, "text-to-text"))

    def framed(self) -> Tokenizer:
        ids = [*self.reader.before, A, *([self.reader.end] if self.delimited else [])]
        return framed(self.tokenizer, [Sheet(ids, [0] * len(ids), ())], False)

    def facts(self) -> dict[str, Any]:
        return {"task": self.name, "answer": "words", **vars(self.writing)}

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        read = self.reader.read(self.writing.prefix + e.texts[0] for e in examples)
        write = self.writer.read(e.target or "" for e in examples)
        return [Item(r if self.delimited else r[:-1], w) for r, w in zip(read, write, strict=True)]

    def batch(self, items: Sequence[Item]) -> Batch:
        return self.lay(items, [[item.answer] for item in items]).batch

    def lay(self, items: Sequence[Item], answers: Sequence[Answers], room: Sequence[int] | None = None) -> Laid:
        """The texts of the items with these answers in rows; `room` is what other answers may take there."""
        if self.decoder:
            both = [
                Line([*i.ids, *a], range(len(i.ids) - 1, len(i.ids) + len(a) - 1))
                for i, some in zip(items, answers, strict=True)
                for a in some
            ]
            return lay_lines(both, self.reader.length + self.writer.length, self.pad)
        return lay_pairs([item.ids for item in items], answers, self.row, self.pad, self.start, room)

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        found: list[Prediction | None] = [None] * len(items)
        with progress("writing", "answers", len(items)) as shown:
            for places in by_length(items, size, lambda item: len(item.ids)):
                with machine.precision():
                    written = generate_ids(model, [items[i].ids for i in places], decoding=self.decoding)
                for i, ids in zip(places, written, strict=True):
                    found[i] = Prediction(self.tokenizer.decode(ids).strip())
                shown.advance(len(places))
        return [p for p in found if p is not None]

    def settle(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> list[Prediction]:
        return list(predictions)

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        references = [list(e.references) or e.target for e in examples]
        return score(self.name, [p.prediction for p in predictions], references)


class LabelWords(TextToText):
    """One of several answers: the one whose words are the likeliest. Those of all examples, or those of an item."""

    name = "classify"
    metric = "accuracy"

    def __init__(
        self, labels: Sequence[str], tokenizer: Tokenizer, config: ModelConfig, writing: Writing, learns: bool = True
    ) -> None:
        super().__init__(tokenizer, config, writing, learns)
        self.labels = tuple(labels)
        self.answers = tuple(self.writer.read(self.labels))
        if len(set(map(tuple, self.answers))) < len(self.labels):
            raise UserError(
                f"Some labels have the same first {self.writer.length} tokens: raise max_target_length or shorten them."
            )

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"labels": list(self.labels)}

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        return score(self.name, [p.prediction for p in predictions], [e.target for e in examples])

    def predict(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[Prediction]:
        found = []
        for p_C in self.probabilities(model, items, machine, size):
            names = self.labels or [str(i) for i in range(len(p_C))]
            found.append(Prediction(names[int(p_C.argmax())], dict(zip(names, p_C.tolist(), strict=True))))
        return found

    def probabilities(self, model: Model, items: Sequence[Item], machine: Machine, size: int) -> list[np.ndarray]:
        """(C,) for each item: how likely each of its answers is, among these."""
        model.eval()
        found: list[np.ndarray] = [np.zeros(0)] * len(items)
        with progress("choosing", "answers", len(items)) as shown:
            for places in by_length(items, size, lambda item: len(item.ids)):
                some = [items[i] for i in places]
                choices = [item.candidates or self.answers for item in some]
                for i, score_C in zip(places, self.log_likelihoods(model, some, choices, machine), strict=True):
                    found[i] = np.exp(score_C - np.logaddexp.reduce(score_C))
                shown.advance(len(places))
        return found

    def log_likelihoods(
        self, model: Model, items: Sequence[Item], choices: Sequence[Answers], machine: Machine
    ) -> list[np.ndarray]:
        """(C,) for each item; an encoder reads each text once, its decoder as many answers as a row has room for."""
        longest, encoded = max(len(ids) for some in choices for ids in some), None
        most = max(1, self.row // longest) if self.side_by_side else 1
        turns = [[some[c : c + most] or some[:1] for some in choices] for c in range(0, max(map(len, choices)), most)]
        room = [max(sum(map(len, some)) for some in of_item) for of_item in zip(*turns, strict=True)]
        found: list[list[float]] = [[] for _ in items]
        for answers in turns:
            laid = self.lay(items, answers, room)
            logp_A, _, encoded = foresee(model, laid, machine, encoded)
            scores = iter(laid.sums(logp_A).tolist())
            for of_item, some in zip(found, answers, strict=True):
                of_item += islice(scores, len(some))
        return [np.array(of_item[: len(some)]) for of_item, some in zip(found, choices, strict=True)]
