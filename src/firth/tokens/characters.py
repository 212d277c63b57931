"""Words as character ids, the input of ELMo's character CNN (Peters et al. 2018, section 3.4).

The ids are those of bilm-tf: a word is its bytes in UTF-8, 0 to 255, between the ids for its beginning and its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from firth.tokens.builders import MAX_ELMO_WORD_CHARS

BOS_CHAR, EOS_CHAR, BOW_CHAR, EOW_CHAR, PAD_CHAR = range(256, 261)
NUM_CHAR_IDS = 261
MAX_ELMO_WORD_BYTES = MAX_ELMO_WORD_CHARS - 2  # bytes of a word, without its beginning and end


class WordCharIds(NamedTuple):
    """The characters of N words, and the number of words that were truncated."""

    char_ids: np.ndarray  # (N, 50) int16
    num_truncated: int


def encode_word_chars(words: Iterable[str]) -> WordCharIds:
    """Return the character ids of words, padded to 50; words of more than 48 bytes are truncated."""
    spelled = [word.encode() for word in words]
    length_N = np.array([min(len(word), MAX_ELMO_WORD_BYTES) for word in spelled], dtype=np.int64)
    flat = np.frombuffer(b"".join(word[:MAX_ELMO_WORD_BYTES] for word in spelled), np.uint8)
    ids = np.full((len(spelled), MAX_ELMO_WORD_CHARS), PAD_CHAR, dtype=np.int16)
    ids[:, 0] = BOW_CHAR
    ids[:, 1:-1][np.arange(MAX_ELMO_WORD_BYTES) < length_N[:, None]] = flat
    ids[np.arange(len(spelled)), length_N + 1] = EOW_CHAR
    return WordCharIds(ids, sum(len(word) > MAX_ELMO_WORD_BYTES for word in spelled))


def sentence_boundary_chars(boundary_char: int) -> np.ndarray:
    """Return BOS_CHAR or EOS_CHAR, the beginning or end of a sentence, as a word (50,)."""
    ids = np.full(MAX_ELMO_WORD_CHARS, PAD_CHAR, dtype=np.int16)
    ids[:3] = BOW_CHAR, boundary_char, EOW_CHAR
    return ids
