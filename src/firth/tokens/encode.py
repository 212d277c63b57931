"""Tokenize documents into the arrays that shards consist of: ids, word starts, sentence ends, salient bits."""

# Shapes: N tokens, D documents.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from firth.text import Document, SalientSpanFinder, is_held_out, text_fingerprint
from firth.tokens.boundaries import (
    EncodedText,
    find_sentence_ends,
    find_tokens_in_spans,
    find_word_starts,
    sentence_end_offsets,
)
from firth.tokens.tokenizer import Tokenizer
from firth.tokens.word_cache import MAX_WORD_CACHE_BYTES, SegmentedSentence, WordCache, find_split_rules

ENCODE_CHUNK_CHARS = 2**17  # characters: an encoding takes 300 bytes each, so a longer text is encoded in parts
LONG_DOCUMENT_CHARS = 50_000  # characters, about 20 pages: a longer document holds out a block of its own
MAX_CUT_SHIFT = 1000  # characters to the end of a line or word, where such a block begins and ends
CUT_CONTEXT_CHARS = 200  # characters on each side of a cut that are tokenized to check that it changes no token


class TokenizedDocuments(NamedTuple):
    """The tokens of documents, one document after the other, with their boundaries."""

    tokens: np.ndarray  # (N,) uint16 or uint32
    words: np.ndarray  # (N,) bool: starts a word
    sentences: np.ndarray  # (N,) bool: ends a sentence
    salient: np.ndarray  # (N,) bool; empty without a salient span finder
    document_lengths: np.ndarray  # (D,) int64: tokens of each document
    first_side_lengths: np.ndarray  # (D,) int64: tokens of its first side, -1 if it has one side only
    text_bytes: np.ndarray  # (D,) int64


class TokenizedText(NamedTuple):
    """One side of a document: its tokens and their boundaries."""

    tokens: np.ndarray
    word_starts: np.ndarray
    sentence_ends: np.ndarray
    salient: np.ndarray | None = None


@dataclass(frozen=True)
class DocumentEncoder:
    """Tokenizes documents and splits off the held-out share, with the sentence rules of `language`."""

    tokenizer: Tokenizer
    held_out_share: float
    language: str
    find_salient: SalientSpanFinder | None = None
    cache_bytes: int = MAX_WORD_CACHE_BYTES  # bytes of the word cache

    @property
    def token_dtype(self) -> type:
        return np.uint16 if self.tokenizer.vocab.size <= 2**16 else np.uint32

    def __call__(self, documents: Sequence[Document]) -> tuple[TokenizedDocuments, TokenizedDocuments]:
        """Return the documents to train on, and the held-out ones."""
        split = [part for d in documents for part in split_held_out(d, self.held_out_share)]
        train, held_out = ([d for d, is_out in split if is_out is part] for part in (False, True))
        return self._encode_documents(train), self._encode_documents(held_out)

    def _encode_documents(self, documents: Sequence[Document]) -> TokenizedDocuments:
        """Tokenize documents; skip those that have no tokens, or none on one of their sides."""
        texts = iter(self._encode_texts([(d, text) for d in documents for text in d.texts]))
        encoded = [(d, [next(texts) for _ in d.texts]) for d in documents]
        kept = [(d, sides) for d, sides in encoded if all(len(side.tokens) for side in sides)]
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
        """Tokenize each text from the word cache where that gives the same tokens, else without it."""
        segmented = [self._segment_for_cache(document, text) for document, text in sides]
        uncached = iter(self._encode_uncached([side for side, s in zip(sides, segmented, strict=True) if s is None]))
        cached = iter(self._word_cache([s for s in segmented if s is not None]) if self._word_cache else ())
        return [next(uncached) if s is None else text_from_sentence_lengths(*next(cached)) for s in segmented]

    def _segment_for_cache(self, document: Document, text: str) -> list[SegmentedSentence] | None:
        """Return the sentences of a text as segments of the word cache; None if it cannot tokenize them."""
        if self._word_cache is None or self.find_salient is not None or document.word_starts is not None:
            return None
        return self._word_cache.segment_text(text, sentence_end_offsets(text, self.language)[:-1])

    def _encode_uncached(self, texts: Sequence[tuple[Document, str]]) -> list[TokenizedText]:
        """Tokenize texts with offsets, long ones part by part."""
        parts = [self._split_long_text(document, text) for document, text in texts]
        flat = [(document, part) for (document, _), of_text in zip(texts, parts, strict=True) for part in of_text]
        encoded = iter(self._encode_with_boundaries(flat))
        return [concatenate_texts([next(encoded) for _ in of_text]) for of_text in parts]

    def _split_long_text(self, document: Document, text: str) -> list[str]:
        """Cut a long text between sentences, where the cut changes neither tokens nor words."""
        marked = self.find_salient is not None or document.word_starts is not None
        if len(text) <= ENCODE_CHUNK_CHARS or marked or self.tokenizer.is_reversed:
            return [text]
        cuts = [0]
        for end in sentence_end_offsets(text, self.language)[:-1]:
            if end - cuts[-1] >= ENCODE_CHUNK_CHARS and self._is_safe_cut(
                text[end - CUT_CONTEXT_CHARS : end], text[end : end + CUT_CONTEXT_CHARS]
            ):
                cuts.append(end)
        return [text[start:end] for start, end in pairwise([*cuts, len(text)])]

    def _is_safe_cut(self, before: str, after: str) -> bool:
        """Whether two texts have the same tokens and words apart as together."""
        joined, *apart = self.tokenizer.encode_with_offsets([before + after, before, after])
        starts = self.tokenizer.word_starts
        return joined.ids == apart[0].ids + apart[1].ids and np.array_equal(starts(joined), starts(*apart))

    def _encode_with_boundaries(self, texts: Sequence[tuple[Document, str]]) -> list[TokenizedText]:
        if not texts:
            return []
        encodings = self.tokenizer.encode_with_offsets([text for _, text in texts])
        sides = [EncodedText(d, text, e) for (d, text), e in zip(texts, encodings, strict=True)]
        nonempty = [side for side in sides if len(side.encoding)]
        bits = [find_word_starts(nonempty, self.tokenizer), find_sentence_ends(nonempty, self.language)]
        if self.find_salient is not None:
            bits.append(find_tokens_in_spans(nonempty, self.find_salient))
        edges = np.cumsum([len(side.encoding) for side in sides])
        parts = zip(*(np.split(bit, edges[:-1]) for bit in bits), strict=True)
        direction = -1 if self.tokenizer.is_reversed else 1
        return [
            TokenizedText(np.array(side.encoding.ids[::direction], self.token_dtype), *(b[::direction] for b in part))
            for side, part in zip(sides, parts, strict=True)
        ]

    @cached_property
    def _word_cache(self) -> WordCache | None:
        rules = find_split_rules(self.tokenizer)
        return None if rules is None else WordCache(self.tokenizer, rules, self.cache_bytes)


def concatenate_texts(parts: list[TokenizedText]) -> TokenizedText:
    """Join the parts of a text."""
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
    """Return a text with a sentence end after each of `sentence_lengths` tokens."""
    ends_N = np.zeros(len(tokens_N), dtype=bool)
    last = np.cumsum(sentence_lengths) - 1
    ends_N[last[last >= 0]] = True
    word_starts_N[:1] = True
    return TokenizedText(tokens_N, word_starts_N, ends_N)


def concatenate_arrays(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def split_held_out(document: Document, share: float) -> Iterator[tuple[Document, bool]]:
    """Yield a document with whether it is held out; a long text in parts, of which one block is held out.

    A text of a few long documents would hold out nothing, or most of itself. So a document of more than
    `LONG_DOCUMENT_CHARS` gives this share of itself: one block at a position that follows from its hash, which ends
    with a line or a word. What is before and after it become two documents. Everything depends on the document alone.
    """
    text = document.text
    is_plain = document.word_starts is None and document.text_pair is None
    if len(text) <= LONG_DOCUMENT_CHARS or share <= 0 or not is_plain:
        yield document, is_held_out(join_document_sides(document), share)
        return
    fraction = int.from_bytes(text_fingerprint(text)[:8], "big") / 2**64
    start = cut_near(text, int(fraction * (1 - share) * len(text)))
    end = cut_near(text, start + int(share * len(text)))
    for part, is_out in ((text[:start], False), (text[start:end], True), (text[end:], False)):
        if part:
            yield Document(part, document.source), is_out


def cut_near(text: str, position: int) -> int:
    """Return the end of the line or the word at a position, or the position itself where neither ends nearby."""
    for mark in "\n", " ":
        if (found := text.find(mark, position, position + MAX_CUT_SHIFT)) >= 0:
            return found + 1
    return min(position, len(text))


def join_document_sides(document: Document) -> str:
    """Return the text of a document for fingerprints: both sides, joined by a character that no text has."""
    return "\0".join(document.texts)
