"""Some documents to the arrays that shards are made of."""

# Shapes: N tokens, D documents.

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from string import punctuation
from typing import NamedTuple

import numpy as np

from firth.text import Document, Salient, held_out
from firth.tokens.edges import Side, in_spans, sentence_edges, sentence_ends, word_starts
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
    """One side of a document: its ids, in one list or sentence by sentence, and their edges where already known."""

    ids: list[list[int]]
    size: int
    words: np.ndarray | None = None  # None where the ids alone tell
    ends: np.ndarray | None = None  # None where the lists of ids are the sentences
    salient: np.ndarray | None = None


@dataclass(frozen=True)
class Way:
    """How documents are tokenised."""

    tokenizer: Tokenizer
    held_out_share: float
    language: str
    salient: Salient | None = None

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
        kept = [(d, sides) for d, sides in read if all(side.size for side in sides)]
        flat = [side for _, sides in kept for side in sides]
        size = sum(side.size for side in flat)
        tokens_N: np.ndarray = np.fromiter(
            chain.from_iterable(chain.from_iterable(s.ids for s in flat)), self.dtype, size
        )
        words_N = self._word_starts[tokens_N] if self._word_starts is not None else np.zeros(size, dtype=bool)
        ends_N, salient_N = np.zeros(size, dtype=bool), np.zeros(0 if self.salient is None else size, dtype=bool)
        for first, side in zip(accumulate((s.size for s in flat), initial=0), flat, strict=False):
            last = first + side.size
            if side.words is not None:
                words_N[first:last] = side.words
            if side.salient is not None:
                salient_N[first:last] = side.salient
            if side.ends is not None:
                ends_N[first:last] = side.ends
            else:
                ends = accumulate(map(len, side.ids), initial=first - 1)
                ends_N[[end for end in ends if end >= first]] = True
            words_N[first] = True
        return Tokenised(
            tokens=tokens_N,
            words=words_N,
            sentences=ends_N,
            salient=salient_N,
            lengths=np.array([sum(side.size for side in sides) for _, sides in kept], dtype=np.int64),
            splits=np.array([sides[0].size if len(sides) == 2 else -1 for _, sides in kept], dtype=np.int64),
            text_bytes=np.array([sum(len(t.encode()) for t in d.sides) for d, _ in kept], dtype=np.int64),
        )

    def _texts(self, sides: Sequence[tuple[Document, str]]) -> list[Text]:
        """The ids and edges of each text: sentence by sentence where that gives the same tokens, else whole."""
        pieces = [self._pieces(document, text) for document, text in sides]
        whole = iter(self._whole([side for side, piece in zip(sides, pieces, strict=True) if piece is None]))
        sentences = iter(self.tokenizer.encode_batch(list(chain.from_iterable(p for p in pieces if p is not None))))
        return [next(whole) if piece is None else by_sentence([next(sentences) for _ in piece]) for piece in pieces]

    def _pieces(self, document: Document, text: str) -> list[str] | None:
        """The sentences of a text, each with the space before it; None where tokens must be known with their places."""
        by_place = self.tokenizer.backward or self.salient is not None or document.word_starts is not None
        if by_place or self._word_starts is None:
            return None
        edges = sentence_edges(text, self.language)[:-1]
        if not all(text[edge] in " \n" or text[edge - 1] in punctuation for edge in edges):  # where words part anyway
            return None
        return [text[start:end] for start, end in pairwise([0, *edges, len(text)])]

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
            Text([s.encoding.ids[::way]], len(s.encoding), *(bits[::way] for bits in part))
            for s, part in zip(sides, parts, strict=True)
        ]

    @cached_property
    def _word_starts(self) -> np.ndarray | None:
        """Which tokens start a word, where the token alone says so, and where a space always parts words: BERT's.

        Such a text can be tokenised sentence by sentence and without the places of the tokens, which is faster.
        """
        state = json.loads(self.tokenizer.backend.to_str())
        parts = {name: (state[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")}
        bert = {"normalizer": "BertNormalizer", "pre_tokenizer": "BertPreTokenizer", "model": "WordPiece"}
        own_words = any(not token["special"] for token in state["added_tokens"])
        if parts != bert or state["model"]["continuing_subword_prefix"] != "##" or own_words:
            return None
        starts_V = np.ones(self.tokenizer.vocab.size, dtype=bool)
        starts_V[[i for token, i in self.tokenizer.backend.get_vocab().items() if token.startswith("##")]] = False
        return starts_V


def joined(parts: list[Text]) -> Text:
    """The parts of a text as one."""
    if len(parts) == 1:
        return parts[0]
    words, ends = (np.concatenate([getattr(part, name) for part in parts]) for name in ("words", "ends"))
    return Text([ids for part in parts for ids in part.ids], sum(part.size for part in parts), words, ends)


def by_sentence(ids: list[list[int]]) -> Text:
    return Text(ids, sum(map(len, ids)))


def both(document: Document) -> str:
    """What stands for a document when it is held out or compared with others."""
    return "\0".join(document.sides)
