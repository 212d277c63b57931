"""Near-duplicate detection with MinHash and locality-sensitive hashing.

Two texts are near duplicates if the Jaccard similarity of their sets of word n-grams (shingles) is high: |A & B| /
|A | B|. MinHash (Broder 1997) estimates it without comparing sets. For a random permutation of all n-grams, the
minimum over A equals the minimum over B with probability J(A, B). A signature holds such minima of 128 permutations;
the share of equal entries estimates J with a standard error of sqrt(J (1 - J) / 128), about 0.035 at J = 0.8. One byte
per minimum is enough (b-bit minwise hashing, Li and König 2010): unequal minima collide with probability 1/256, and
the threshold accounts for that.

Comparing a text with every earlier one is quadratic. So the signature is cut into 16 bands of 8 bytes, and only texts
that agree in a whole band are compared (LSH; Leskovec et al., Mining of Massive Datasets, section 3.4). A pair with
J = 0.8 agrees in some band with probability 1 - (1 - 0.8^8)^16 = 0.95.

P permutations, S shingles.
"""

from __future__ import annotations

from functools import cache
from hashlib import shake_128

import numpy as np

from firth.core.errors import UserError
from firth.text.shingles import FIBONACCI_HASH_MULTIPLIER, hash_multipliers, hash_word_ngrams, hash_words

NUM_PERMUTATIONS = 128
ROWS_PER_BAND = 8  # bytes: a band is read as one uint64
NUM_BANDS = NUM_PERMUTATIONS // ROWS_PER_BAND
SLOTS_PER_BUCKET = 8  # texts per hash bucket of a band
INITIAL_CAPACITY_TEXTS = 2**14  # texts; doubles when full
BAND_INDICES = np.arange(NUM_BANDS)
BLOCK_SHINGLES = 4096  # n-grams that are permuted at once: bounds the (P, S) array
MAX_INDEX_BYTES = 2**30  # default bound of an index
INDEX_BYTES_PER_TEXT = NUM_PERMUTATIONS + 4 * NUM_BANDS * 2  # a signature, and two uint32 slots in each band's table


@cache
def permutation_coefficients() -> tuple[np.ndarray, np.ndarray]:
    """(P, 1) odd factors and (P, 1) offsets: x -> factor * x + offset is a permutation of 32-bit integers."""
    both = hash_multipliers("permutations", NUM_PERMUTATIONS)
    return (both >> np.uint64(32)).astype(np.uint32)[:, None] | np.uint32(1), both.astype(np.uint32)[:, None]


def index_capacity_texts(max_bytes: int) -> int:
    """Number of texts that an index of `max_bytes` holds: a power of two."""
    return int(max(INITIAL_CAPACITY_TEXTS, 2 ** ((max_bytes // INDEX_BYTES_PER_TEXT).bit_length() - 1)))


def minhash_signature(text: str, ngram: int = 5) -> np.ndarray:
    """(P,) uint8 MinHash signature of the `ngram`-word shingles: a pure function of the text."""
    shingle_S = (hash_word_ngrams(hash_words(text), ngram) >> np.uint64(32)).astype(np.uint32)
    if not len(shingle_S):  # a text without words matches only itself
        return np.frombuffer(shake_128(text.encode("utf-8", "surrogatepass")).digest(NUM_PERMUTATIONS), np.uint8)
    factor_P1, offset_P1 = permutation_coefficients()
    min_P = np.full(NUM_PERMUTATIONS, 2**32 - 1, np.uint32)
    for start in range(0, len(shingle_S), BLOCK_SHINGLES):
        permuted_PS = shingle_S[None, start : start + BLOCK_SHINGLES] * factor_P1 + offset_P1
        np.minimum(min_P, permuted_PS.min(axis=1), out=min_P)
    return (min_P * np.uint32(0x9E3779B1) >> np.uint32(24)).astype(np.uint8)


class MinHashIndex:
    """Finds texts whose estimated Jaccard similarity to an earlier text is at least `threshold`.

    The first text of a group of near duplicates is kept. `max_bytes` bounds the memory, 256 bytes per kept text (and
    a quarter more while the tables grow). A full index evicts the oldest texts; `num_evicted` counts them.

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
        # expected equal bytes at the threshold: equal minima, and unequal ones that collide in one byte
        self.min_matching_bytes = threshold * NUM_PERMUTATIONS + (1 - threshold) * NUM_PERMUTATIONS / 256
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
        """Whether a text is a near duplicate of an earlier one; if not, add it."""
        return self.check_and_add_signature(minhash_signature(text, self.ngram))

    def check_and_add_signature(self, signature_P: np.ndarray) -> bool:
        """As `check_and_add`, for a precomputed signature."""
        slots = self.tables[self._bucket_indices(signature_P)]
        candidates = slots[slots > 0] - 1
        num_equal = np.count_nonzero(self.signatures[candidates] == signature_P, axis=1)
        if num_equal.max(initial=0) >= self.min_matching_bytes:
            self.num_duplicates += 1
            return True
        self._add_signature(signature_P)
        return False

    def _bucket_indices(self, signature_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table index of each band, and the bucket in it: (16,) for one signature, (N, 16) for N."""
        return BAND_INDICES, (
            signature_P.view(np.uint64) * FIBONACCI_HASH_MULTIPLIER >> np.uint64(64 - self.bucket_bits)
        ).astype(np.int64)

    def _add_signature(self, signature_P: np.ndarray) -> None:
        if self.num_added == self.capacity < self.max_texts:
            self._grow(2 * self.capacity)
        index = self.num_added % self.capacity
        self.signatures[index] = signature_P
        buckets = self._bucket_indices(signature_P)
        is_taken = self.tables[buckets] > 0
        slot = np.where(is_taken.all(axis=1), self.num_added % SLOTS_PER_BUCKET, is_taken.argmin(axis=1))
        self.tables[*buckets, slot] = index + 1  # 0 is an empty slot
        self.num_added += 1

    def _grow(self, capacity: int) -> None:
        """Set the capacity and insert the signatures into tables of the new size."""
        old = self.signatures
        self.tables = np.zeros(0, np.uint32)  # free the old tables before the new ones are allocated
        self.capacity = capacity
        self.bucket_bits = (2 * capacity // SLOTS_PER_BUCKET).bit_length() - 1
        self.signatures = np.zeros((capacity, NUM_PERMUTATIONS), np.uint8)
        self.signatures[: len(old)] = old
        self.tables = np.zeros((NUM_BANDS, 2**self.bucket_bits, SLOTS_PER_BUCKET), np.uint32)
        for table, bucket in zip(self.tables, self._bucket_indices(old)[1].T, strict=True):
            order = np.argsort(bucket, kind="stable")
            ordered = bucket[order]
            slot = np.arange(len(order)) - np.searchsorted(ordered, ordered)
            fits = slot < SLOTS_PER_BUCKET
            np.asarray(table)[ordered[fits], slot[fits]] = order[fits] + 1
