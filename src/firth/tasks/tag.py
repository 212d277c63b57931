"""A tag for each word of a sentence: names, parts of speech, chunks, roles of a predicate.

W words of a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from firth.console import count
from firth.metrics import entity_f1, entity_precision, entity_recall
from firth.metrics.tagging import are_chunks
from firth.models import Head, ModelConfig, head_for
from firth.objectives import IGNORED, Batch
from firth.tasks.form import Ids, Sheet
from firth.tasks.headed import Array, Headed, Item, Laid, at_slots, softmax
from firth.tasks.task import Prediction
from firth.text import Example
from firth.tokens import Tokenizer

MARK = " @"  # stands around a predicate where the model has no segments to show it


@dataclass(frozen=True)
class Word:
    """The pieces of a word, which of them is asked, and the segment they are in."""

    pieces: Ids
    asked: int
    segment: int = 0


class Window(NamedTuple):
    """The words `first` up to `end` are read, and `asks` up to `stops` of them asked."""

    first: int
    end: int
    asks: int
    stops: int


class Tag(Headed):
    """The tag of a word is told from its first piece; in a decoder, which has not read the rest then, from its last.

    A sentence that is longer than a row is read in windows that overlap; each word is asked once.
    """

    name = "tag"

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig,
        length: int,
        labels: Sequence[str],
        learns: bool = True,
    ) -> None:
        super().__init__(tokenizer, config, length, labels, learns)
        self.metric = "entity_f1" if are_chunks([self.labels]) else "accuracy"
        self.mark = tokenizer.encode(MARK)
        self.windowed = self.shortened = self.empty = self.unseen = 0

    def answers(self, config: ModelConfig) -> Head:
        return head_for(config, "tag", self.labels)

    @property
    def said(self) -> list[str]:
        kinds = (
            (self.windowed, "sentence", f"longer than {self.form.length} tokens, and read in windows that overlap"),
            (self.shortened, "word", "longer than half a row, and cut"),
            (self.empty, "word", "without a token, and read as unknown"),
            (self.unseen, "word", "of a tag that the training file lacks, and counted as wrong"),
        )
        return [f"{count(n, f'{noun} was', f'{noun}s were')} {what}." for n, noun, what in kinds if n]

    def encode(self, examples: Sequence[Example]) -> list[Item]:
        encodings = self.tokenizer.encodings([" ".join(e.texts) for e in examples])
        items = []
        for e, encoding in zip(examples, encodings, strict=True):
            pieces = pieces_of_words(e.texts, encoding.ids, encoding.offsets)
            words = self.marked([self.word(ids) for ids in pieces], e.spans)
            items.append(Item(self.sheets(words), self.answer_of(e)))
        return items

    def answer_of(self, example: Example) -> tuple[int, ...]:
        if example.target is None:
            return (IGNORED,) * len(example.texts)
        answer = tuple(self.number.get(tag, IGNORED) for tag in example.target)
        self.unseen += answer.count(IGNORED)
        return answer

    def word(self, pieces: Ids) -> Word:
        limit = max(1, self.form.room(1) // 2 - 2 * len(self.mark))
        self.shortened += len(pieces) > limit
        self.empty += not pieces
        kept = pieces[:limit] or [self.form.unknown]
        return Word(kept, len(kept) - 1 if self.shape == "decoder" else 0)

    def marked(self, words: list[Word], spans: Sequence[tuple[int, int]]) -> list[Word]:
        """The predicate in the second segment, or with marks around it."""
        for first, end in spans:
            for i in range(first, end):
                word = words[i]
                before = self.mark if i == first and not self.form.segments else []
                after = self.mark if i == end - 1 and not self.form.segments else []
                words[i] = Word([*before, *word.pieces, *after], word.asked + len(before), 1)
        return words

    def sheets(self, words: Sequence[Word]) -> tuple[Sheet, ...]:
        found = windows([len(word.pieces) for word in words], self.form.room(1))
        self.windowed += len(found) > 1
        return tuple(self.sheet(words[w.first : w.end], w.asks - w.first, w.stops - w.first) for w in found)

    def sheet(self, words: Sequence[Word], asks: int, stops: int) -> Sheet:
        framed = self.form.frame([piece for word in words for piece in word.pieces])
        begins = list(accumulate((len(word.pieces) for word in words), initial=self.form.begins))
        segment = framed.segment
        for begin, word in zip(begins, words, strict=False):
            segment[begin : begin + len(word.pieces)] = [word.segment] * len(word.pieces)
        asked = [begin + word.asked for begin, word in zip(begins, words, strict=False)]
        return Sheet(framed.ids, segment, tuple(asked[asks:stops]))

    def batch(self, items: Sequence[Item]) -> Batch:
        laid = self.lay(items)
        target_BK = self.targets(laid, [tag for item in items for tag in item.answer], IGNORED)
        return laid.batch._replace(target=target_BK, labels=None)

    def read(self, items: Sequence[Item], logits: Array, laid: Laid) -> list[Prediction]:
        probability_AC = softmax(at_slots(logits, laid))
        ends = np.cumsum([len(item.answer) for item in items])
        return [self.tags(p_WC) for p_WC in np.split(probability_AC, ends[:-1])]

    def score(self, examples: Sequence[Example], predictions: Sequence[Prediction]) -> dict[str, float]:
        """Where a predicate is marked, its own tag is given away and not counted (CoNLL-2005)."""
        scores = super().score(examples, predictions)
        if self.metric == "entity_f1" and (without := given_away(examples)):
            tags, true = [p.prediction for p in predictions], [e.target for e in examples]
            kinds = {"entity_f1": entity_f1, "entity_precision": entity_precision, "entity_recall": entity_recall}
            scores |= {name: kind(tags, true, without) for name, kind in kinds.items()}
        return scores

    def tags(self, probability_WC: Array) -> Prediction:
        tags = tuple(self.labels[i] for i in probability_WC.argmax(-1)) if len(probability_WC) else ()
        extra: dict[str, Any] = {"probabilities": probability_WC.max(-1).tolist() if tags else []}
        return Prediction(tags, extra=extra)


def given_away(examples: Sequence[Example]) -> tuple[str, ...]:
    """The type that is not counted: the predicate's own, where one is marked."""
    return ("V",) if any(e.spans for e in examples) else ()


def pieces_of_words(words: Sequence[str], ids: Ids, offsets: Sequence[tuple[int, int]]) -> list[Ids]:
    """The tokens of each word, when they are those of the words joined by spaces; a space belongs to what follows."""
    begins = np.array([*accumulate((len(word) + 1 for word in words), initial=0)][:-1]) - 1
    word_of = np.searchsorted(begins, [end - 1 for _, end in offsets], side="right") - 1
    pieces: list[Ids] = [[] for _ in words]
    for token, word in zip(ids, word_of, strict=True):
        pieces[word].append(token)
    return pieces


def windows(sizes: Sequence[int], room: int) -> list[Window]:
    """Words of these sizes in windows of `room` that share a quarter of it; the middle of what they share divides them.

    >>> windows([1] * 6, 8)
    [Window(first=0, end=6, asks=0, stops=6)]
    >>> windows([1] * 12, 8)
    [Window(first=0, end=8, asks=0, stops=7), Window(first=6, end=12, asks=7, stops=12)]
    """
    upto = np.array([0, *accumulate(sizes)])
    found: list[Window] = []
    first = asks = end = 0
    while True:
        end = int(np.searchsorted(upto, upto[first] + room, side="right")) - 1
        if end >= len(sizes):
            return [*found, Window(first, len(sizes), asks, len(sizes))]
        following = max(first + 1, int(np.searchsorted(upto, upto[end] - room // 4)))
        stops = (following + end) // 2
        found.append(Window(first, end, asks, stops))
        first, asks = following, stops
