"""Where words and sentences begin and end, and what is salient, for each token of some texts."""

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

SENTENCE_WINDOW_CHARS = (
    20_000  # characters; the time that sentencex 1.0 takes is quadratic in the length of a paragraph
)
LONG_TEXT_TOKENS = 8192  # tokens: asking an encoding for one place takes longer the more tokens it has
NON_ASCII_SPACE_REGEX = re.compile(r"[^\S\x00-\x7f]")  # spaces of several bytes: sentencex 1.0 fails on "A\xa0."


class EncodedText(NamedTuple):
    """One text of a document, and its tokens."""

    document: Document
    text: str
    encoding: Encoding


def find_word_starts(encoded_texts: Sequence[EncodedText], tokenizer: Tokenizer) -> np.ndarray:
    """For each token of some texts, one text after the other: does it start a word?

    The tokenizer says so, unless the user has named the words.
    """
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
    """The first token of each word of a text, given the characters at which words begin.

    It holds that character or a part of it, or it is the space before it, as a word's own first token often is.
    """
    begin_N, end_N = np.array(encoded_text.encoding.offsets).T
    end_N = np.maximum.accumulate(end_N)  # a normaliser may have moved an accent
    word = np.array(char_offsets, dtype=np.int64)
    space = word - np.array([encoded_text.text[i - 1 : i] == " " for i in char_offsets], dtype=np.int64)
    plain, wider = (np.searchsorted(end_N, places, side="right") for places in (word, space))
    last = len(end_N) - 1  # beyond which a word lies that the tokenizer drops
    wider = np.minimum(wider, last)
    return np.where(begin_N[wider] == space, wider, np.minimum(plain, last))


def find_sentence_ends(encoded_texts: Sequence[EncodedText], language: str) -> np.ndarray:
    """For each token of some texts, one text after the other: is it the last of a sentence?

    That is the last token which begins before the end of the sentence; the last sentence ends with its text.
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
    """The last token that begins before each of some characters, -1 where none does."""
    if len(encoding) > LONG_TEXT_TOKENS:
        return find_last_tokens_by_offset(encoding, char_offsets)
    found = []
    for edge in char_offsets:
        token = encoding.char_to_token(edge - 1)
        if token is None:  # a character that the tokenizer drops
            return find_last_tokens_by_offset(encoding, char_offsets)
        while (place := encoding.token_to_chars(token + 1)) is not None and place[0] < edge:
            token += 1  # of the tokens that share a character the last
        found.append(token)
    return found


def find_last_tokens_by_offset(encoding: Encoding, char_offsets: Sequence[int]) -> list[int]:
    """The same by the places of all tokens, which take longer to get than those of a few."""
    starts_N = np.array(encoding.offsets)[:, 0]
    starts_N = np.maximum.accumulate(starts_N)  # a normaliser may have moved an accent
    return (np.searchsorted(starts_N, char_offsets, side="left") - 1).tolist()


def find_tokens_in_spans(encoded_texts: Sequence[EncodedText], find_spans: SalientSpanFinder) -> np.ndarray:
    """For each token of some texts, one text after the other: does it share a character with a span that is found?"""
    if not encoded_texts:
        return np.zeros(0, dtype=bool)
    starts_N, ends_N = concatenate_offsets(encoded_texts)
    change = np.zeros(sum(len(side.text) for side in encoded_texts) + 1, dtype=np.int64)
    place = 0
    for side in encoded_texts:
        spans = place + validate_spans(find_spans(side.text), side)
        np.add.at(change, spans[:, 0], 1)
        np.add.at(change, spans[:, 1], -1)
        place += len(side.text)
    before = np.concatenate([[0], np.cumsum(np.cumsum(change) > 0)])  # how many salient characters come before one
    return before[ends_N] > before[starts_N]


def validate_spans(spans: Sequence[tuple[int, int]], encoded_text: EncodedText) -> np.ndarray:
    """Spans as an array (n, 2); what a user's function gives may be anything."""
    try:
        found = np.array([[index(start), index(end)] for start, end in spans], dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise UserError(
            f"{encoded_text.document.source}: salient spans must be a list of (start, end), not {repr(spans)[:60]}."
        ) from None
    wrong = (found[:, 0] < 0) | (found[:, 0] >= found[:, 1]) | (found[:, 1] > len(encoded_text.text))
    if wrong.any():
        start, end = found[wrong][0].tolist()
        raise UserError(
            f"{encoded_text.document.source}: the salient span ({start}, {end}) is empty or outside of its text, which has "
            f"{len(encoded_text.text):,} characters."
        )
    return found


def concatenate_offsets(encoded_texts: Sequence[EncodedText]) -> tuple[np.ndarray, np.ndarray]:
    """Where each token begins and ends, in characters, when the texts lie end to end."""
    place = np.cumsum([0] + [len(side.text) for side in encoded_texts[:-1]])
    flat = chain.from_iterable(chain.from_iterable(side.encoding.offsets) for side in encoded_texts)
    sizes = [len(side.encoding) for side in encoded_texts]
    starts_N, ends_N = np.fromiter(flat, np.int64, 2 * sum(sizes)).reshape(-1, 2).T + np.repeat(place, sizes)
    return starts_N, ends_N


def sentence_end_offsets(text: str, language: str) -> list[int]:
    """The character positions at which sentences end, spaces after them not counted.

    >>> sentence_end_offsets("Mr. Grey came. He left.", "en")
    [14, 23]
    """
    text = NON_ASCII_SPACE_REGEX.sub(" ", text)
    edges, start = [], 0
    while start < len(text):
        window = text[start : start + SENTENCE_WINDOW_CHARS]
        sentences = sentencex.segment(language, window)
        if start + len(window) < len(text) and len(sentences) > 1:
            sentences.pop()  # perhaps cut in two by the window: the next one begins with it
        place = 0
        for sentence in sentences:
            place = window.index(sentence, place)  # of a long text sentencex 1.0 leaves out some blank lines
            if not sentence.isspace():
                edges.append(start + place + len(sentence.rstrip()))
            place += len(sentence)
        start += place
    return edges
