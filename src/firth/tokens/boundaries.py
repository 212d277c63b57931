"""Word starts, sentence ends and salient spans, as one bit per token.

Words, sentences and salient spans are found in characters. A tokenizer's offsets say which characters each token
covers, so a binary search over them turns a character offset into a token.
"""

# Shapes: N tokens of all texts, one text after the other.

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import NamedTuple

import numpy as np
import sentencex
from tokenizers import Encoding

from firth.core.errors import UserError
from firth.text import Document, SalientSpanFinder
from firth.tokens.tokenizer import Tokenizer

SENTENCE_WINDOW_CHARS = 20_000  # characters per call: sentencex 1.0 is quadratic in the length of a paragraph
LONG_TEXT_TOKENS = 8192  # tokens: above, one lookup in an encoding is slower than converting all its offsets
NON_ASCII_SPACE_REGEX = re.compile(r"[^\S\x00-\x7f]")  # multi-byte spaces: sentencex 1.0 fails on "A\xa0."


class EncodedText(NamedTuple):
    """One text of a document, and its tokens."""

    document: Document
    text: str
    encoding: Encoding


def find_word_starts(encoded_texts: Sequence[EncodedText], tokenizer: Tokenizer) -> np.ndarray:
    """Return which tokens start a word, (N,) bool: as the user's `words` say, else as the pre-tokenizer does."""
    starts = tokenizer.word_starts(*(side.encoding for side in encoded_texts))
    first = 0
    for side in encoded_texts:
        size = len(side.encoding)
        if side.document.word_starts is not None:
            starts[first : first + size] = False
            starts[first + find_first_tokens(side.document.word_starts, side)] = True
            starts[first] = True
        first += size
    return starts


def find_first_tokens(char_offsets: Sequence[int], encoded_text: EncodedText) -> np.ndarray:
    """Return the first token of each word, given the characters at which words begin.

    That is the token which covers the character, or the token of the space before it, which often opens a word.
    """
    begin_N, end_N = np.array(encoded_text.encoding.offsets).T
    end_N = np.maximum.accumulate(end_N)  # a normalizer may have moved an accent
    word = np.array(char_offsets, dtype=np.int64)
    space = word - np.array([encoded_text.text[i - 1 : i] == " " for i in char_offsets], dtype=np.int64)
    plain, wider = (np.searchsorted(end_N, chars, side="right") for chars in (word, space))
    last = len(end_N) - 1  # a word that the tokenizer drops may lie after it
    wider = np.minimum(wider, last)
    return np.where(begin_N[wider] == space, wider, np.minimum(plain, last))


def find_sentence_ends(encoded_texts: Sequence[EncodedText], language: str) -> np.ndarray:
    """Return which tokens end a sentence, (N,) bool: the last token that begins before the sentence's end.

    The last token of a text ends its last sentence.
    """
    is_end = np.zeros(sum(len(side.encoding) for side in encoded_texts), dtype=bool)
    first = 0
    for side in encoded_texts:
        last = find_last_tokens(side.encoding, sentence_end_offsets(side.text, language)[:-1])
        is_end[[first + token for token in last if token >= 0]] = True
        first += len(side.encoding)
        is_end[first - 1] = True
    return is_end


def find_last_tokens(encoding: Encoding, char_offsets: Sequence[int]) -> list[int]:
    """Return the last token that begins before each character offset; -1 if there is none."""
    if len(encoding) > LONG_TEXT_TOKENS:
        return find_last_tokens_by_offset(encoding, char_offsets)
    last_tokens = []
    for end in char_offsets:
        token = encoding.char_to_token(end - 1)
        if token is None:  # a character that the tokenizer drops
            return find_last_tokens_by_offset(encoding, char_offsets)
        while (span := encoding.token_to_chars(token + 1)) is not None and span[0] < end:
            token += 1  # several tokens may share a character: take the last
        last_tokens.append(token)
    return last_tokens


def find_last_tokens_by_offset(encoding: Encoding, char_offsets: Sequence[int]) -> list[int]:
    """Return the same from the offsets of all tokens, which is slower for a few offsets in a short text."""
    starts_N = np.array(encoding.offsets)[:, 0]
    starts_N = np.maximum.accumulate(starts_N)  # a normalizer may have moved an accent
    return (np.searchsorted(starts_N, char_offsets, side="left") - 1).tolist()


def find_tokens_in_spans(encoded_texts: Sequence[EncodedText], find_spans: SalientSpanFinder) -> np.ndarray:
    """Return which tokens share a character with a span that `find_spans` finds, (N,) bool."""
    if not encoded_texts:
        return np.zeros(0, dtype=bool)
    starts_N, ends_N = concatenate_offsets(encoded_texts)
    change = np.zeros(sum(len(side.text) for side in encoded_texts) + 1, dtype=np.int64)
    text_start = 0
    for side in encoded_texts:
        spans = text_start + validate_spans(find_spans(side.text), side)
        np.add.at(change, spans[:, 0], 1)
        np.add.at(change, spans[:, 1], -1)
        text_start += len(side.text)
    salient_before = np.concatenate([[0], np.cumsum(np.cumsum(change) > 0)])  # salient characters before each
    return salient_before[ends_N] > salient_before[starts_N]


def validate_spans(spans: Sequence[tuple[int, int]], encoded_text: EncodedText) -> np.ndarray:
    """Return spans as an array (n, 2); a user's function may return anything."""
    try:
        spans_n2 = np.array([[index(start), index(end)] for start, end in spans], dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise UserError(
            f"{encoded_text.document.source}: salient spans must be a list of (start, end), not {repr(spans)[:60]}."
        ) from None
    start_n, end_n = spans_n2.T
    wrong = (start_n < 0) | (start_n >= end_n) | (end_n > len(encoded_text.text))
    if wrong.any():
        start, end = spans_n2[wrong][0].tolist()
        raise UserError(
            f"{encoded_text.document.source}: the salient span ({start}, {end}) is empty or outside of its text, "
            f"which has {len(encoded_text.text):,} characters."
        )
    return spans_n2


def concatenate_offsets(encoded_texts: Sequence[EncodedText]) -> tuple[np.ndarray, np.ndarray]:
    """Return start and end (N,) of each token in characters, when the texts lie end to end."""
    text_start = np.cumsum([0] + [len(side.text) for side in encoded_texts[:-1]])
    flat = chain.from_iterable(chain.from_iterable(side.encoding.offsets) for side in encoded_texts)
    sizes = [len(side.encoding) for side in encoded_texts]
    starts_N, ends_N = np.fromiter(flat, np.int64, 2 * sum(sizes)).reshape(-1, 2).T + np.repeat(text_start, sizes)
    return starts_N, ends_N


def sentence_end_offsets(text: str, language: str) -> list[int]:
    """Return the character offsets at which sentences end, without the spaces after them.

    >>> sentence_end_offsets("Mr. Grey came. He left.", "en")
    [14, 23]
    """
    text = NON_ASCII_SPACE_REGEX.sub(" ", text)
    ends, start = [], 0
    while start < len(text):
        window = text[start : start + SENTENCE_WINDOW_CHARS]
        sentences = sentencex.segment(language, window)
        if start + len(window) < len(text) and len(sentences) > 1:
            sentences.pop()  # the window may have cut it: the next window begins with it
        offset = 0
        for sentence in sentences:
            offset = window.index(sentence, offset)  # sentencex 1.0 drops some blank lines of a long text
            if not sentence.isspace():
                ends.append(start + offset + len(sentence.rstrip()))
            offset += len(sentence)
        start += offset
    return ends
