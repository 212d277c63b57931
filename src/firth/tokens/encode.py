"""Some documents to the arrays that shards are made of."""

# Shapes: N tokens, D documents.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from firth.text import Document, SalientSpanFinder, is_held_out
from firth.tokens.boundaries import (
    EncodedText,
    find_sentence_ends,
    find_tokens_in_spans,
    find_word_starts,
    sentence_end_offsets,
)
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.word_cache import MAX_WORD_CACHE_BYTES, SegmentedSentence, WordCache, find_split_rules

ENCODE_CHUNK_CHARS = (
    2**17
)  # characters: while a text is encoded it takes 300 bytes for each, so a longer one is encoded in parts
CUT_CONTEXT_CHARS = 200  # characters on each side of a cut that show whether it changes the tokens


class TokenizedDocuments(NamedTuple):
    """The tokens of some documents, one after the other, with their edges."""

    tokens: np.ndarray  # (N,) uint16 or uint32
    words: np.ndarray  # (N,) bool: starts a word
    sentences: np.ndarray  # (N,) bool: ends a sentence
    salient: np.ndarray  # (N,) bool; empty where nobody asked for it
    document_lengths: np.ndarray  # (D,) int64: tokens of each document
    first_side_lengths: np.ndarray  # (D,) int64: tokens of its first side, -1 where it has one side only
    text_bytes: np.ndarray  # (D,) int64


class TokenizedText(NamedTuple):
    """One side of a document: its tokens and their edges."""

    tokens: np.ndarray
    word_starts: np.ndarray
    sentence_ends: np.ndarray
    salient: np.ndarray | None = None


@dataclass(frozen=True)
class DocumentEncoder:
    """How documents are tokenised."""

    tokenizer: Tokenizer
    held_out_share: float
    language: str
    find_salient: SalientSpanFinder | None = None
    cache_bytes: int = MAX_WORD_CACHE_BYTES  # bytes for words that are remembered

    @property
    def token_dtype(self) -> type:
        return np.uint16 if self.tokenizer.vocab.size <= 2**16 else np.uint32

    def __call__(self, documents: Sequence[Document]) -> tuple[TokenizedDocuments, TokenizedDocuments]:
        """The documents to train on, and those held out."""
        aside = [is_held_out(join_document_sides(d), self.held_out_share) for d in documents]
        train, rest = ([d for d, out in zip(documents, aside, strict=True) if out is part] for part in (False, True))
        return self._encode_documents(train), self._encode_documents(rest)

    def _encode_documents(self, documents: Sequence[Document]) -> TokenizedDocuments:
        """Documents that give no tokens, or none for one of their sides, are skipped."""
        texts = iter(self._encode_texts([(d, text) for d in documents for text in d.texts]))
        read = [(d, [next(texts) for _ in d.texts]) for d in documents]
        kept = [(d, sides) for d, sides in read if all(len(side.tokens) for side in sides)]
        flat = [side for _, sides in kept for side in sides]
        salient = [side.salient for side in flat if side.salient is not None]
        return TokenizedDocuments(
            tokens=concatenate_arrays([side.tokens for side in flat], self.token_dtype),
            words=concatenate_arrays([side.word_starts for side in flat], np.bool_),
            sentences=concatenate_arrays([side.sentence_ends for side in flat], np.bool_),
            salient=concatenate_arrays(salient, np.bool_),
            document_lengths=np.array([sum(len(side.tokens) for side in sides) for _, sides in kept], dtype=np.int64),
            first_side_lengths=np.array(
                [len(sides[0].tokens) if len(sides) == 2 else -1 for _, sides in kept], dtype=np.int64
            ),
            text_bytes=np.array([sum(len(t.encode()) for t in d.texts) for d, _ in kept], dtype=np.int64),
        )

    def _encode_texts(self, sides: Sequence[tuple[Document, str]]) -> list[TokenizedText]:
        """The tokens and edges of each text: from words that are known where that gives the same, else whole."""
        pieces = [self._segment_for_cache(document, text) for document, text in sides]
        whole = iter(self._encode_uncached([side for side, piece in zip(sides, pieces, strict=True) if piece is None]))
        quick = iter(self._word_cache([p for p in pieces if p is not None]) if self._word_cache else ())
        return [next(whole) if piece is None else text_from_sentence_lengths(*next(quick)) for piece in pieces]

    def _segment_for_cache(self, document: Document, text: str) -> list[SegmentedSentence] | None:
        """The sentences of a text in the form that is quick; None where that would not do."""
        if self._word_cache is None or self.find_salient is not None or document.word_starts is not None:
            return None
        return self._word_cache.segment_text(text, sentence_end_offsets(text, self.language)[:-1])

    def _encode_uncached(self, texts: Sequence[tuple[Document, str]]) -> list[TokenizedText]:
        """The ids of each text with their places; long texts part by part."""
        parts = [self._split_long_text(document, text) for document, text in texts]
        flat = [(document, part) for (document, _), some in zip(texts, parts, strict=True) for part in some]
        found = iter(self._encode_with_boundaries(flat))
        return [concatenate_texts([next(found) for _ in some]) for some in parts]

    def _split_long_text(self, document: Document, text: str) -> list[str]:
        """A text, cut if it is long between sentences, where the tokens and words stay the same."""
        marked = self.find_salient is not None or document.word_starts is not None
        if len(text) <= ENCODE_CHUNK_CHARS or marked or self.tokenizer.is_reversed:
            return [text]
        cuts = [0]
        for edge in sentence_end_offsets(text, self.language)[:-1]:
            if edge - cuts[-1] >= ENCODE_CHUNK_CHARS and self._is_safe_cut(
                text[edge - CUT_CONTEXT_CHARS : edge], text[edge : edge + CUT_CONTEXT_CHARS]
            ):
                cuts.append(edge)
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])]

    def _is_safe_cut(self, before: str, after: str) -> bool:
        """Whether the tokens and the words of two texts are those of both together."""
        whole, *two = self.tokenizer.encode_with_offsets([before + after, before, after])
        starts = self.tokenizer.word_starts
        return whole.ids == two[0].ids + two[1].ids and np.array_equal(starts(whole), starts(*two))

    def _encode_with_boundaries(self, texts: Sequence[tuple[Document, str]]) -> list[TokenizedText]:
        if not texts:
            return []
        encodings = self.tokenizer.encode_with_offsets([text for _, text in texts])
        sides = [EncodedText(d, text, e) for (d, text), e in zip(texts, encodings, strict=True)]
        sides_with = [side for side in sides if len(side.encoding)]
        bits = [find_word_starts(sides_with, self.tokenizer), find_sentence_ends(sides_with, self.language)]
        if self.find_salient is not None:
            bits.append(find_tokens_in_spans(sides_with, self.find_salient))
        edges = np.cumsum([len(side.encoding) for side in sides])
        parts = zip(*(np.split(bit, edges[:-1]) for bit in bits), strict=True)
        way = -1 if self.tokenizer.is_reversed else 1
        return [
            TokenizedText(np.array(side.encoding.ids[::way], self.token_dtype), *(bits[::way] for bits in part))
            for side, part in zip(sides, parts, strict=True)
        ]

    @cached_property
    def _word_cache(self) -> WordCache | None:
        habit = find_split_rules(self.tokenizer)
        return None if habit is None else WordCache(self.tokenizer, habit, self.cache_bytes)


def concatenate_texts(parts: list[TokenizedText]) -> TokenizedText:
    """The parts of a text as one."""
    if len(parts) == 1:
        return parts[0]
    return TokenizedText(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("tokens", "word_starts", "sentence_ends")
        )
    )


def text_from_sentence_lengths(
    tokens_N: np.ndarray, word_starts_N: np.ndarray, sentence_lengths: np.ndarray
) -> TokenizedText:
    """A text whose sentences have so many tokens."""
    ends_N = np.zeros(len(tokens_N), dtype=bool)
    last = np.cumsum(sentence_lengths) - 1
    ends_N[last[last >= 0]] = True
    word_starts_N[:1] = True
    return TokenizedText(tokens_N, word_starts_N, ends_N)


def concatenate_arrays(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def join_document_sides(document: Document) -> str:
    """What stands for a document when it is held out or compared with others."""
    return "\0".join(document.texts)
