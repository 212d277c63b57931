"""Words as the ids of their characters, as ELMo reads them.

The ids are those of bilm-tf: a character is one or more bytes of UTF-8, 0 to 255; then come the marks below.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from firth.tokens.kinds import MAX_WORD_LENGTH

BEGIN_SENTENCE, END_SENTENCE, BEGIN_WORD, END_WORD, PADDING = range(256, 261)
NUM_CHARACTERS = 261
ROOM = MAX_WORD_LENGTH - 2  # bytes, between the begin and the end of the word


class Characters(NamedTuple):
    """The characters of N words, and how many of the words were too long and lost their end."""

    ids: np.ndarray  # (N, 50) int16
    cut: int


def characters(words: Iterable[str]) -> Characters:
    """Each word between the marks of its begin and its end, and padding behind. A word has room for 48 bytes."""
    spelled = [word.encode() for word in words]
    length_N = np.array([min(len(word), ROOM) for word in spelled], dtype=np.int64)
    flat = np.frombuffer(b"".join(word[:ROOM] for word in spelled), np.uint8)
    ids = np.full((len(spelled), MAX_WORD_LENGTH), PADDING, dtype=np.int16)
    ids[:, 0] = BEGIN_WORD
    ids[:, 1:-1][np.arange(ROOM) < length_N[:, None]] = flat
    ids[np.arange(len(spelled)), length_N + 1] = END_WORD
    return Characters(ids, sum(len(word) > ROOM for word in spelled))


def edge(mark: int) -> np.ndarray:
    """(50,): the begin or the end of a sentence (BEGIN_SENTENCE, END_SENTENCE), as if it were a word."""
    ids = np.full(MAX_WORD_LENGTH, PADDING, dtype=np.int16)
    ids[:3] = BEGIN_WORD, mark, END_WORD
    return ids
