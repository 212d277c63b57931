"""Hash the words and word n-grams (shingles) of a text, vectorized over the whole text.

W words, S n-grams. Case and punctuation are ignored. In scripts without spaces between words (Chinese, Japanese, Thai
and others) each character is a word. The hashes are multiply-add sums with fixed multipliers, so they are the same in
every run and on every machine.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import shake_128
from unicodedata import category

import numpy as np

NOT_IN_WORD, IN_WORD, SINGLE_CHAR_WORD = 0, 1, 2
# Thai, Lao, Tibetan, Burmese; Khmer; kana and ideographs; half-width kana
UNSPACED_SCRIPT_RANGES = (
    (0x0E00, 0x10A0),
    (0x1780, 0x1800),
    (0x3040, 0x3100),
    (0x3400, 0xA000),
    (0xF900, 0xFB00),
    (0xFF66, 0xFFA0),
)
# 2^64 / golden ratio (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, section 6.4)
FIBONACCI_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIER_PERIOD_CHARS = 64  # characters; longer words reuse the multipliers


@cache
def hash_multipliers(purpose: str, n: int) -> np.ndarray:
    """(n,) fixed pseudo-random odd 64-bit integers, different for each `purpose`."""
    return np.frombuffer(shake_128(purpose.encode()).digest(8 * n), "<u8").astype(np.uint64) | np.uint64(1)


@cache
def character_word_classes() -> np.ndarray:
    """(65536,) class of each character: not in a word, in a word, or a word alone. The last covers U+FFFF and up."""
    table = np.array([category(chr(i))[0] in "LNM" for i in range(0x10000)], dtype=np.uint8)
    for start, end in UNSPACED_SCRIPT_RANGES:
        table[start:end] *= SINGLE_CHAR_WORD
    table[-1] = SINGLE_CHAR_WORD
    return table


def hash_words(text: str) -> np.ndarray:
    """(W,) case-insensitive 32-bit hashes of the words, as uint64."""
    raw = text.lower().encode("utf-32-le" if sys.byteorder == "little" else "utf-32-be", "surrogatepass")
    character = np.frombuffer(raw, np.uint32)
    kind = character_word_classes()[np.minimum(character, 0xFFFF)]
    starts = kind != NOT_IN_WORD
    starts[1:] &= (kind[1:] == SINGLE_CHAR_WORD) | (kind[:-1] != IN_WORD)
    first_W = np.flatnonzero(starts)
    if not len(first_W):
        return np.zeros(0, np.uint64)
    word = np.cumsum(starts, dtype=np.int32) - 1
    offset = np.arange(len(kind), dtype=np.int32) - first_W.astype(np.int32)[word]  # in the word and what follows it
    multipliers = hash_multipliers("place in a word", MULTIPLIER_PERIOD_CHARS)
    term = character * multipliers[offset & (MULTIPLIER_PERIOD_CHARS - 1)]
    term[kind == NOT_IN_WORD] = 0
    return np.add.reduceat(term, first_W) >> np.uint64(32)


def hash_word_ngrams(word_hashes_W: np.ndarray, n: int) -> np.ndarray:
    """(S,) 64-bit hashes of the n-grams. Fewer than n words give one n-gram, no words give none."""
    n = min(n, len(word_hashes_W))
    size = len(word_hashes_W) - n + 1 if n else 0
    total = np.zeros(size, np.uint64)
    for i, factor in enumerate(hash_multipliers(f"place in a run of {n}", n)):
        total += word_hashes_W[i : i + size] * factor
    return (total ^ (total >> np.uint64(29))) * FIBONACCI_HASH_MULTIPLIER
