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

Texts with equal bytes in a band are a bucket. A bucket lists its first 8 texts, and a later text is compared with these
alone: a template that a million pages share would otherwise cost a million comparisons for each of them. A text is a
near duplicate if a text of one of its 16 buckets is similar and was kept. Which texts are compared depends on the
signatures and their order, not on what was kept, so buckets can be built apart (`tokens/cluster/bucket_dedup.py`).

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
TEXTS_PER_BUCKET = 8  # texts that a bucket lists: the first ones
ABSENT = 2**32 - 1  # link of a text that a bucket does not list
INITIAL_CAPACITY_TEXTS = 2**14  # texts; doubles when full
BAND_INDICES = np.arange(NUM_BANDS)
BLOCK_SHINGLES = 4096  # n-grams that are permuted at once: bounds the (P, S) array
MAX_INDEX_BYTES = 2**30  # default bound of an index
INDEX_BYTES_PER_TEXT = 256  # bytes: a signature (128), a link in each band (64), half a list head in each band (32)


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


def min_matching_bytes(threshold: float) -> float:
    """Expected equal bytes of two signatures at a similarity: equal minima, and unequal ones that collide in a byte."""
    return threshold * NUM_PERMUTATIONS + (1 - threshold) * NUM_PERMUTATIONS / 256


class MinHashIndex:
    """Finds texts whose estimated Jaccard similarity to an earlier text is at least `threshold`.

    The first text of a group of near duplicates is kept. `max_bytes` bounds the memory, 256 bytes per text (and a
    quarter more while the index grows). A full index evicts the oldest texts; `num_evicted` counts them.

    Each band has a hash table of linked lists. A list holds the texts of the buckets that fall on it, oldest first, so
    the text to evict is always at the head of its lists.

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
        self.min_matching_bytes = min_matching_bytes(threshold)
        self.ngram = ngram
        self.max_texts = index_capacity_texts(max_bytes)
        self.num_added = 0
        self.num_duplicates = 0
        self.capacity = 0
        self.signatures = np.zeros((0, NUM_PERMUTATIONS), np.uint8)
        self.is_kept = np.zeros(0, bool)
        self.links = np.zeros((0, NUM_BANDS), np.uint32)  # the next text of a list + 1; 0: the last one
        self._grow(INITIAL_CAPACITY_TEXTS)

    @property
    def num_evicted(self) -> int:
        return max(0, self.num_added - self.max_texts)

    def check_and_add(self, text: str) -> bool:
        """Whether a text is a near duplicate of an earlier one; either way, add it."""
        return self.check_and_add_signature(minhash_signature(text, self.ngram))

    def check_and_add_signature(self, signature_P: np.ndarray) -> bool:
        """As `check_and_add`, for a precomputed signature."""
        band_values, lists = signature_P.view(np.uint64), self._list_indices(signature_P)
        text, last = self.heads[lists].astype(np.int64), np.zeros(NUM_BANDS, np.int64)
        bucket_sizes, candidates = np.zeros(NUM_BANDS, np.int64), list[np.ndarray]()
        while text.any():
            in_bucket = (self.bands[text - 1, BAND_INDICES] == band_values) & (text > 0)
            bucket_sizes += in_bucket
            candidates.append(text[in_bucket] - 1)
            last = np.where(text > 0, text, last)
            text = np.where(text > 0, self.links[text - 1, BAND_INDICES], 0).astype(np.int64)
        is_duplicate = bool(candidates) and self._is_similar_to_kept(np.concatenate(candidates), signature_P)
        self.num_duplicates += is_duplicate
        if (has_space := bucket_sizes < TEXTS_PER_BUCKET).any():
            self._add_signature(signature_P, lists, last, has_space, not is_duplicate)
        return is_duplicate

    def _is_similar_to_kept(self, candidates: np.ndarray, signature_P: np.ndarray) -> bool:
        kept = candidates[self.is_kept[candidates]]
        num_equal = np.count_nonzero(self.signatures[kept] == signature_P, axis=1)
        return bool(num_equal.max(initial=0) >= self.min_matching_bytes)

    def _list_indices(self, signature_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table index of each band, and the list in it: (16,) for one signature, (N, 16) for N."""
        return BAND_INDICES, (
            signature_P.view(np.uint64) * FIBONACCI_HASH_MULTIPLIER >> np.uint64(64 - self.list_bits)
        ).astype(np.int64)

    def _add_signature(
        self,
        signature_P: np.ndarray,
        lists: tuple[np.ndarray, np.ndarray],
        last: np.ndarray,
        has_space: np.ndarray,
        is_kept: bool,
    ) -> None:
        """Append a text to the lists of the buckets that have space; `last` are the last texts of the lists + 1."""
        if self.num_added == self.capacity < self.max_texts:
            self._grow(2 * self.capacity)
            lists = self._list_indices(signature_P)
            last = self._last_texts(lists)
        index = self.num_added % self.capacity
        if self.num_added >= self.capacity:
            self._evict(index)
            last = np.where(last == index + 1, 0, last)
        self.signatures[index], self.is_kept[index] = signature_P, is_kept
        self.links[index] = np.where(has_space, 0, ABSENT)
        follows, begins = has_space & (last > 0), has_space & (last == 0)
        self.links[last[follows] - 1, BAND_INDICES[follows]] = index + 1
        self.heads[BAND_INDICES[begins], lists[1][begins]] = index + 1
        self.num_added += 1

    def _last_texts(self, lists: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        text, last = self.heads[lists].astype(np.int64), np.zeros(NUM_BANDS, np.int64)
        while text.any():
            last = np.where(text > 0, text, last)
            text = np.where(text > 0, self.links[text - 1, BAND_INDICES], 0).astype(np.int64)
        return last

    def _evict(self, index: int) -> None:
        """Remove the oldest text, which is at the head of each of its lists."""
        listed = self.links[index] != ABSENT
        _, lists = self._list_indices(self.signatures[index])
        self.heads[BAND_INDICES[listed], lists[listed]] = self.links[index, listed]

    def _grow(self, capacity: int) -> None:
        """Set the capacity, and link the texts in tables of the new size."""
        old, num_texts = self.signatures, self.num_added
        self.heads = np.zeros((NUM_BANDS, 0), np.uint32)  # free the old table before the new one is allocated
        self.capacity = capacity
        self.list_bits = (capacity // 2).bit_length() - 1
        self.signatures = np.zeros((capacity, NUM_PERMUTATIONS), np.uint8)
        self.signatures[: len(old)] = old
        self.bands = self.signatures.view(np.uint64)
        self.is_kept = np.append(self.is_kept, np.zeros(capacity - len(old), bool))
        self.links = np.concatenate([self.links, np.zeros((capacity - len(old), NUM_BANDS), np.uint32)])
        self.heads = np.zeros((NUM_BANDS, 2**self.list_bits), np.uint32)
        lists_of_texts = self._list_indices(old[:num_texts])[1]
        for band in BAND_INDICES:
            listed = np.flatnonzero(self.links[:num_texts, band] != ABSENT)
            order = listed[np.argsort(lists_of_texts[listed, band], kind="stable")]
            ordered = lists_of_texts[order, band]
            begins = np.append(True, ordered[1:] != ordered[:-1])[: len(order)]
            self.heads[band, ordered[begins]] = order[begins] + 1
            self.links[order, band] = np.append(np.where(begins[1:], 0, order[1:] + 1), [0] * bool(len(order)))
