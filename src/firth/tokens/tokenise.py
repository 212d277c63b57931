"""Some documents to the arrays that shards are made of."""

# Shapes: N tokens, D documents.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from firth.text import Document, Salient, held_out
from firth.tokens.edges import Side, in_spans, sentence_edges, sentence_ends, word_starts
from firth.tokens.known import MOST, Known, Piece, habit_of
from firth.tokens.tokenizer import Tokenizer

LONG = 2**17  # characters: while a text is encoded it takes 300 bytes for each, so a longer one is encoded in parts
NEAR = 200  # characters on each side of a cut that show whether it changes the tokens


class Tokenised(NamedTuple):
    """The tokens of some documents, one after the other, with their edges."""

    tokens: np.ndarray  # (N,) uint16 or uint32
    words: np.ndarray  # (N,) bool: starts a word
    sentences: np.ndarray  # (N,) bool: ends a sentence
    salient: np.ndarray  # (N,) bool; empty where nobody asked for it
    lengths: np.ndarray  # (D,) int64: tokens of each document
    splits: np.ndarray  # (D,) int64: tokens of its first side, -1 where it has one side only
    text_bytes: np.ndarray  # (D,) int64


class Text(NamedTuple):
    """One side of a document: its tokens and their edges."""

    tokens: np.ndarray
    words: np.ndarray
    ends: np.ndarray
    salient: np.ndarray | None = None


@dataclass(frozen=True)
class Way:
    """How documents are tokenised."""

    tokenizer: Tokenizer
    held_out_share: float
    language: str
    salient: Salient | None = None
    memory: int = MOST  # bytes for words that are remembered

    @property
    def dtype(self) -> type:
        return np.uint16 if self.tokenizer.vocab.size <= 2**16 else np.uint32

    def __call__(self, documents: Sequence[Document]) -> tuple[Tokenised, Tokenised]:
        """The documents to train on, and those held out."""
        aside = [held_out(both(d), self.held_out_share) for d in documents]
        train, rest = ([d for d, out in zip(documents, aside, strict=True) if out is part] for part in (False, True))
        return self._tokenise(train), self._tokenise(rest)

    def _tokenise(self, documents: Sequence[Document]) -> Tokenised:
        """Documents that give no tokens, or none for one of their sides, are skipped."""
        texts = iter(self._texts([(d, text) for d in documents for text in d.sides]))
        read = [(d, [next(texts) for _ in d.sides]) for d in documents]
        kept = [(d, sides) for d, sides in read if all(len(side.tokens) for side in sides)]
        flat = [side for _, sides in kept for side in sides]
        salient = [side.salient for side in flat if side.salient is not None]
        return Tokenised(
            tokens=end_to_end([side.tokens for side in flat], self.dtype),
            words=end_to_end([side.words for side in flat], np.bool_),
            sentences=end_to_end([side.ends for side in flat], np.bool_),
            salient=end_to_end(salient, np.bool_),
            lengths=np.array([sum(len(side.tokens) for side in sides) for _, sides in kept], dtype=np.int64),
            splits=np.array([len(sides[0].tokens) if len(sides) == 2 else -1 for _, sides in kept], dtype=np.int64),
            text_bytes=np.array([sum(len(t.encode()) for t in d.sides) for d, _ in kept], dtype=np.int64),
        )

    def _texts(self, sides: Sequence[tuple[Document, str]]) -> list[Text]:
        """The tokens and edges of each text: from words that are known where that gives the same, else whole."""
        pieces = [self._pieces(document, text) for document, text in sides]
        whole = iter(self._whole([side for side, piece in zip(sides, pieces, strict=True) if piece is None]))
        quick = iter(self._known([p for p in pieces if p is not None]) if self._known else ())
        return [next(whole) if piece is None else by_piece(*next(quick)) for piece in pieces]

    def _pieces(self, document: Document, text: str) -> list[Piece] | None:
        """The sentences of a text in the form that is quick; None where that would not do."""
        if self._known is None or self.salient is not None or document.word_starts is not None:
            return None
        return self._known.cut(text, sentence_edges(text, self.language)[:-1])

    def _whole(self, texts: Sequence[tuple[Document, str]]) -> list[Text]:
        """The ids of each text with their places; long texts part by part."""
        parts = [self._parts(document, text) for document, text in texts]
        flat = [(document, part) for (document, _), some in zip(texts, parts, strict=True) for part in some]
        found = iter(self._encoded(flat))
        return [joined([next(found) for _ in some]) for some in parts]

    def _parts(self, document: Document, text: str) -> list[str]:
        """A text, cut if it is long between sentences, where the tokens and words stay the same."""
        marked = self.salient is not None or document.word_starts is not None
        if len(text) <= LONG or marked or self.tokenizer.backward:
            return [text]
        cuts = [0]
        for edge in sentence_edges(text, self.language)[:-1]:
            if edge - cuts[-1] >= LONG and self._can_part(text[edge - NEAR : edge], text[edge : edge + NEAR]):
                cuts.append(edge)
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])]

    def _can_part(self, before: str, after: str) -> bool:
        """Whether the tokens and the words of two texts are those of both together."""
        whole, *two = self.tokenizer.encodings([before + after, before, after])
        starts = self.tokenizer.word_starts
        return whole.ids == two[0].ids + two[1].ids and np.array_equal(starts(whole), starts(*two))

    def _encoded(self, texts: Sequence[tuple[Document, str]]) -> list[Text]:
        if not texts:
            return []
        encodings = self.tokenizer.encodings([text for _, text in texts])
        sides = [Side(d, text, e) for (d, text), e in zip(texts, encodings, strict=True)]
        sides_with = [side for side in sides if len(side.encoding)]
        bits = [word_starts(sides_with, self.tokenizer), sentence_ends(sides_with, self.language)]
        if self.salient is not None:
            bits.append(in_spans(sides_with, self.salient))
        edges = np.cumsum([len(side.encoding) for side in sides])
        parts = zip(*(np.split(bit, edges[:-1]) for bit in bits), strict=True)
        way = -1 if self.tokenizer.backward else 1
        return [
            Text(np.array(side.encoding.ids[::way], self.dtype), *(bits[::way] for bits in part))
            for side, part in zip(sides, parts, strict=True)
        ]

    @cached_property
    def _known(self) -> Known | None:
        habit = habit_of(self.tokenizer)
        return None if habit is None else Known(self.tokenizer, habit, self.memory)


def joined(parts: list[Text]) -> Text:
    """The parts of a text as one."""
    if len(parts) == 1:
        return parts[0]
    return Text(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "words", "ends")))


def by_piece(tokens_N: np.ndarray, words_N: np.ndarray, sizes: np.ndarray) -> Text:
    """A text whose sentences have so many tokens."""
    ends_N = np.zeros(len(tokens_N), dtype=bool)
    last = np.cumsum(sizes) - 1
    ends_N[last[last >= 0]] = True
    words_N[:1] = True
    return Text(tokens_N, words_N, ends_N)


def end_to_end(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def both(document: Document) -> str:
    """What stands for a document when it is held out or compared with others."""
    return "\0".join(document.sides)
