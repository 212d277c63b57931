"""Near duplicates: texts that share most of their runs of words (MinHash, Broder 1997, with banded lookup)."""

from __future__ import annotations

from functools import cache
from hashlib import shake_128

import numpy as np

from firth.errors import UserError
from firth.text.shingles import GOLDEN, constants, runs, word_numbers

NUM_PERM = 128
ROWS = 8  # bytes in a band: two texts are compared when all of a band agree
BANDS = NUM_PERM // ROWS
WAYS = 8  # places of a table for texts whose bands fall together
SMALL = 2**14  # texts that there is room for at the start
BAND = np.arange(BANDS)
BLOCK = 4096  # runs of words that are permuted at a time
MAX_MEMORY = 2**30
BYTES_PER_TEXT = NUM_PERM + 4 * BANDS * 2  # a signature, and two places in each table


@cache
def permutations() -> tuple[np.ndarray, np.ndarray]:
    both = constants("permutations", NUM_PERM)
    return (both >> np.uint64(32)).astype(np.uint32)[:, None] | np.uint32(1), both.astype(np.uint32)[:, None]


def texts_in(max_memory: int) -> int:
    """How many texts can be remembered in so many bytes."""
    return int(max(SMALL, 2 ** ((max_memory // BYTES_PER_TEXT).bit_length() - 1)))


def signature(text: str, ngram: int = 5) -> np.ndarray:
    """(128,) bytes of which two texts share about as many as of their runs of `ngram` words.

    A pure function of the text: it may be computed anywhere. One byte of each minimum is kept (b-bit minwise
    hashing, Li and König 2010).
    """
    run_S = (runs(word_numbers(text), ngram) >> np.uint64(32)).astype(np.uint32)
    if not len(run_S):  # no words: only the same text is like it
        return np.frombuffer(shake_128(text.encode("utf-8", "surrogatepass")).digest(NUM_PERM), np.uint8)
    times, plus = permutations()
    least = np.full(NUM_PERM, 2**32 - 1, np.uint32)
    for start in range(0, len(run_S), BLOCK):
        np.minimum(least, (run_S[None, start : start + BLOCK] * times + plus).min(axis=1), out=least)
    return (least * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8)


class NearDuplicates:
    """Tells a text that is nearly one before it: their Jaccard index of runs of words is `threshold` or more.

    Exact to about 0.03, which is what 128 minima can tell. The first of some near duplicates stays, whatever follows.
    `max_memory` bounds the bytes that are kept, 256 per text that stays (and a quarter more for the moment in which the
    tables grow); when it is full the oldest are forgotten, and `forgotten` counts them.

    >>> near = NearDuplicates()
    >>> near.seen("the heron stands in the shallow water all day long"), near.seen("a cat sleeps all day in the sun")
    (False, False)
    >>> near.seen("The heron stands in the shallow water, all day long!"), near.duplicates
    (True, 1)
    """

    def __init__(self, threshold: float = 0.8, ngram: int = 5, max_memory: int = MAX_MEMORY) -> None:
        if not 0.5 <= threshold <= 1:
            raise UserError(f"The threshold of near duplicates is {threshold:g}, and must be from 0.5 to 1.")
        self.least = threshold * NUM_PERM + (1 - threshold) * NUM_PERM / 256  # bytes that agree, some by chance
        self.ngram = ngram
        self.most = texts_in(max_memory)
        self.kept = 0
        self.duplicates = 0
        self.signatures = np.zeros((0, NUM_PERM), np.uint8)
        self._make_room(SMALL)

    @property
    def forgotten(self) -> int:
        return max(0, self.kept - self.most)

    def seen(self, text: str) -> bool:
        """Whether a text is nearly one that was there before; if not, it is remembered."""
        return self.seen_signature(signature(text, self.ngram))

    def seen_signature(self, bytes_P: np.ndarray) -> bool:
        """As `seen`, for a text whose signature was computed elsewhere."""
        found = self.tables[self._places(bytes_P)]
        found = found[found > 0] - 1
        if len(found) and np.count_nonzero(self.signatures[found] == bytes_P, axis=1).max() >= self.least:
            self.duplicates += 1
            return True
        self._remember(bytes_P)
        return False

    def _places(self, bytes_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tables, and where the bands of a text, or of many, stand in them."""
        return BAND, (bytes_P.view(np.uint64) * GOLDEN >> np.uint64(64 - self.bits)).astype(np.int64)

    def _remember(self, bytes_P: np.ndarray) -> None:
        if self.kept == self.size < self.most:
            self._make_room(2 * self.size)
        index = self.kept % self.size
        self.signatures[index] = bytes_P
        places = self._places(bytes_P)
        is_taken = self.tables[places] > 0
        way = np.where(is_taken.all(axis=1), self.kept % WAYS, is_taken.argmin(axis=1))
        self.tables[*places, way] = index + 1
        self.kept += 1

    def _make_room(self, size: int) -> None:
        """Grow to so many texts, and look up those that are there in tables of the new size."""
        old = self.signatures
        self.tables = np.zeros(0, np.uint32)  # so that those of both sizes are never there together
        self.size = size
        self.bits = (2 * size // WAYS).bit_length() - 1
        self.signatures = np.zeros((size, NUM_PERM), np.uint8)
        self.signatures[: len(old)] = old
        self.tables = np.zeros((BANDS, 2**self.bits, WAYS), np.uint32)
        for table, place in zip(self.tables, self._places(old)[1].T, strict=True):
            order = np.argsort(place, kind="stable")
            ordered = place[order]
            way = np.arange(len(order)) - np.searchsorted(ordered, ordered)
            fits = way < WAYS
            np.asarray(table)[ordered[fits], way[fits]] = order[fits] + 1
