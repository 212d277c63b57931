"""Near duplicates: texts that share most of their runs of words (MinHash, Broder 1997, with banded lookup)."""

from __future__ import annotations

from functools import cache
from hashlib import shake_128

import numpy as np

from firth.core.errors import UserError
from firth.text.shingles import FIBONACCI_HASH_MULTIPLIER, hash_multipliers, hash_word_ngrams, hash_words

NUM_PERMUTATIONS = 128
ROWS_PER_BAND = 8  # bytes in a band: two texts are compared when all of a band agree
NUM_BANDS = NUM_PERMUTATIONS // ROWS_PER_BAND
SLOTS_PER_BUCKET = 8  # places of a table for texts whose bands fall together
INITIAL_CAPACITY_TEXTS = 2**14  # texts that there is room for at the start
BAND_INDICES = np.arange(NUM_BANDS)
BLOCK_SHINGLES = 4096  # runs of words that are permuted at a time
MAX_INDEX_BYTES = 2**30
INDEX_BYTES_PER_TEXT = NUM_PERMUTATIONS + 4 * NUM_BANDS * 2  # a signature, and two places in each table


@cache
def permutation_coefficients() -> tuple[np.ndarray, np.ndarray]:
    both = hash_multipliers("permutations", NUM_PERMUTATIONS)
    return (both >> np.uint64(32)).astype(np.uint32)[:, None] | np.uint32(1), both.astype(np.uint32)[:, None]


def index_capacity_texts(max_bytes: int) -> int:
    """How many texts can be remembered in so many bytes."""
    return int(max(INITIAL_CAPACITY_TEXTS, 2 ** ((max_bytes // INDEX_BYTES_PER_TEXT).bit_length() - 1)))


def minhash_signature(text: str, ngram: int = 5) -> np.ndarray:
    """(128,) bytes of which two texts share about as many as of their runs of `ngram` words.

    A pure function of the text: it may be computed anywhere. One byte of each minimum is kept (b-bit minwise
    hashing, Li and König 2010).
    """
    run_S = (hash_word_ngrams(hash_words(text), ngram) >> np.uint64(32)).astype(np.uint32)
    if not len(run_S):  # no words: only the same text is like it
        return np.frombuffer(shake_128(text.encode("utf-8", "surrogatepass")).digest(NUM_PERMUTATIONS), np.uint8)
    times, plus = permutation_coefficients()
    least = np.full(NUM_PERMUTATIONS, 2**32 - 1, np.uint32)
    for start in range(0, len(run_S), BLOCK_SHINGLES):
        np.minimum(least, (run_S[None, start : start + BLOCK_SHINGLES] * times + plus).min(axis=1), out=least)
    return (least * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8)


class MinHashIndex:
    """Tells a text that is nearly one before it: their Jaccard index of runs of words is `threshold` or more.

    Exact to about 0.03, which is what 128 minima can tell. The first of some near duplicates stays, whatever follows.
    `max_bytes` bounds the bytes that are kept, 256 per text that stays (and a quarter more for the moment in which the
    tables grow); when it is full the oldest are forgotten, and `num_evicted` counts them.

    >>> near = MinHashIndex()
    >>> texts = ("the heron stands in the shallow water all day long", "a cat sleeps all day in the sun")
    >>> [near.check_and_add(text) for text in texts]
    [False, False]
    >>> near.check_and_add("The heron stands in the shallow water, all day long!"), near.num_duplicates
    (True, 1)
    """

    def __init__(self, threshold: float = 0.8, ngram: int = 5, max_bytes: int = MAX_INDEX_BYTES) -> None:
        if not 0.5 <= threshold <= 1:
            raise UserError(f"The threshold of near duplicates is {threshold:g}, and must be from 0.5 to 1.")
        self.min_matching_bytes = (
            threshold * NUM_PERMUTATIONS + (1 - threshold) * NUM_PERMUTATIONS / 256
        )  # bytes that agree, some by chance
        self.ngram = ngram
        self.max_texts = index_capacity_texts(max_bytes)
        self.num_added = 0
        self.num_duplicates = 0
        self.signatures = np.zeros((0, NUM_PERMUTATIONS), np.uint8)
        self._grow(INITIAL_CAPACITY_TEXTS)

    @property
    def num_evicted(self) -> int:
        return max(0, self.num_added - self.max_texts)

    def check_and_add(self, text: str) -> bool:
        """Whether a text is nearly one that was there before; if not, it is remembered."""
        return self.check_and_add_signature(minhash_signature(text, self.ngram))

    def check_and_add_signature(self, signature_P: np.ndarray) -> bool:
        """As `check_and_add`, for a text whose signature was computed elsewhere."""
        found = self.tables[self._bucket_indices(signature_P)]
        found = found[found > 0] - 1
        if (
            len(found)
            and np.count_nonzero(self.signatures[found] == signature_P, axis=1).max() >= self.min_matching_bytes
        ):
            self.num_duplicates += 1
            return True
        self._add_signature(signature_P)
        return False

    def _bucket_indices(self, signature_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tables, and where the bands of a text, or of many, stand in them."""
        return BAND_INDICES, (
            signature_P.view(np.uint64) * FIBONACCI_HASH_MULTIPLIER >> np.uint64(64 - self.bucket_bits)
        ).astype(np.int64)

    def _add_signature(self, signature_P: np.ndarray) -> None:
        if self.num_added == self.capacity < self.max_texts:
            self._grow(2 * self.capacity)
        index = self.num_added % self.capacity
        self.signatures[index] = signature_P
        places = self._bucket_indices(signature_P)
        is_taken = self.tables[places] > 0
        way = np.where(is_taken.all(axis=1), self.num_added % SLOTS_PER_BUCKET, is_taken.argmin(axis=1))
        self.tables[*places, way] = index + 1
        self.num_added += 1

    def _grow(self, capacity: int) -> None:
        """Grow to so many texts, and look up those that are there in tables of the new size."""
        old = self.signatures
        self.tables = np.zeros(0, np.uint32)  # so that those of both sizes are never there together
        self.capacity = capacity
        self.bucket_bits = (2 * capacity // SLOTS_PER_BUCKET).bit_length() - 1
        self.signatures = np.zeros((capacity, NUM_PERMUTATIONS), np.uint8)
        self.signatures[: len(old)] = old
        self.tables = np.zeros((NUM_BANDS, 2**self.bucket_bits, SLOTS_PER_BUCKET), np.uint32)
        for table, place in zip(self.tables, self._bucket_indices(old)[1].T, strict=True):
            order = np.argsort(place, kind="stable")
            ordered = place[order]
            way = np.arange(len(order)) - np.searchsorted(ordered, ordered)
            fits = way < SLOTS_PER_BUCKET
            np.asarray(table)[ordered[fits], way[fits]] = order[fits] + 1
