"""Deduplication by hash range: which documents of all tasks are repeated, with no machine that holds all of them.

A document has a number: all documents of task 0 in their order, then those of task 1, and so on. One process keeps the
first of equal documents in this order, and so does this file, in three steps:

1. **Exact duplicates.** Each task sends the 64-bit hash of every document to the range that the hash falls into. Equal
   documents meet in the same range, which drops all but the one with the lowest number.
2. **Similar pairs.** Each task sends the 16 bands of every MinHash signature to ranges in the same way. Texts that
   agree in a band are a bucket and meet in the same range. The range compares each text with the first 8 of its
   bucket, by their whole signatures, and returns the similar pairs (`text/minhash.py` explains bands and buckets).
3. **The decision.** A document is dropped if an earlier one is similar and *kept*. This depends on earlier decisions,
   so it is made in the order of the documents, from the pairs alone: one byte for each document, and the pairs of
   some tasks at a time.

The number of ranges bounds the memory of a range. All functions here are pure: arrays in, arrays out.

N entries, D documents, E pairs (edges of a graph of similar documents).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from firth.text.minhash import BAND_INDICES, NUM_PERMUTATIONS, TEXTS_PER_BUCKET, min_matching_bytes
from firth.text.shingles import FIBONACCI_HASH_MULTIPLIER

NEAR_THRESHOLD = 0.8  # of the estimated Jaccard similarity, as in `MinHashIndex`
COMPARE_BLOCK = 2**16  # pairs of signatures that are compared at once


def hash_ranges(hashes_N: np.ndarray, num_ranges: int) -> np.ndarray:
    """Return the range of each uniform 64-bit hash: the hash as a fraction of 2^64, times the number of ranges.

    >>> hash_ranges(np.array([0, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 2).tolist()
    [0, 0, 1, 1]
    """
    return ((hashes_N >> np.uint64(32)) * np.uint64(num_ranges) >> np.uint64(32)).astype(np.int64)


def band_hashes(signatures_DP: np.ndarray) -> np.ndarray:
    """Return (D, 16): a hash of each band, different for equal bytes in different bands; a bijection of its bytes."""
    salt = (BAND_INDICES.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    mixed = (np.ascontiguousarray(signatures_DP).view(np.uint64) ^ salt) * FIBONACCI_HASH_MULTIPLIER
    mixed ^= mixed >> np.uint64(32)
    return mixed * FIBONACCI_HASH_MULTIPLIER


def group_by_range(hashes_N: np.ndarray, num_ranges: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that sorts hashes by their range, and (R + 1,) bounds: range r is order[bounds[r]:bounds[r+1]].

    Inside a range the order stays.
    """
    ranges = hash_ranges(hashes_N, num_ranges)
    order = np.argsort(ranges, kind="stable")
    return order, np.searchsorted(ranges[order], np.arange(num_ranges + 1))


def find_repeated(hashes_N: np.ndarray, documents_N: np.ndarray) -> np.ndarray:
    """Return the documents whose hash an earlier document has, sorted.

    >>> find_repeated(np.array([7, 9, 7, 7], np.uint64), np.array([0, 1, 5, 3])).tolist()
    [3, 5]
    """
    order = np.lexsort((documents_N, hashes_N))
    repeated = hashes_N[order][1:] == hashes_N[order][:-1]
    return np.sort(documents_N[order][1:][repeated])


def find_candidate_pairs(bands_N: np.ndarray, documents_N: np.ndarray) -> np.ndarray:
    """Return (E, 2): each document and an earlier one among the first 8 of the same bucket, sorted, each pair once.

    >>> find_candidate_pairs(np.array([7, 9, 7, 7], np.uint64), np.array([0, 1, 3, 5])).tolist()
    [[3, 0], [5, 0], [5, 3]]
    """
    order = np.lexsort((documents_N, bands_N))
    bands_N, documents_N = bands_N[order], documents_N[order]
    first_of_bucket = np.searchsorted(bands_N, bands_N, side="left")
    place_N = np.arange(len(bands_N)) - first_of_bucket
    pairs = [np.zeros((0, 2), np.int64)]
    for place in range(TEXTS_PER_BUCKET):
        later = np.flatnonzero(place_N > place)
        pairs.append(np.stack([documents_N[later], documents_N[first_of_bucket[later] + place]], axis=1))
    return np.unique(np.concatenate(pairs), axis=0)


def select_similar(
    pairs_E2: np.ndarray, get_signatures: Callable[[np.ndarray], np.ndarray], threshold: float = NEAR_THRESHOLD
) -> np.ndarray:
    """Return the pairs whose signatures agree often enough; `get_signatures` reads those of sorted documents."""
    documents = np.unique(pairs_E2)
    signatures = get_signatures(documents)
    assert signatures.shape == (len(documents), NUM_PERMUTATIONS)
    rows_E2 = np.searchsorted(documents, pairs_E2)
    kept = [np.zeros((0, 2), np.int64)]
    for start in range(0, len(rows_E2), COMPARE_BLOCK):
        a, b = rows_E2[start : start + COMPARE_BLOCK].T
        num_equal = np.count_nonzero(signatures[a] == signatures[b], axis=1)
        kept.append(pairs_E2[start : start + COMPARE_BLOCK][num_equal >= min_matching_bytes(threshold)])
    return np.concatenate(kept)


def drop_similar(pairs_by_task: Iterable[np.ndarray], is_dropped_D: np.ndarray) -> None:
    """Mark each document that is similar to an earlier one that is kept, in the order of the documents, in place.

    `pairs_by_task` are the pairs (document, earlier document) of task 0, 1 and so on; `is_dropped_D` has True for exact
    duplicates. Pairs with an earlier task are decided at once for a whole task, others one document at a time.

    >>> is_dropped = np.zeros(4, bool)
    >>> drop_similar([np.array([[1, 0], [2, 1], [3, 2]])], is_dropped)
    >>> is_dropped.tolist()  # 1 is like 0; 2 is like 1, which is dropped; 3 is like 2, which is kept
    [False, True, False, True]
    """
    for pairs_E2 in pairs_by_task:
        if not len(pairs_E2):
            continue
        is_outer = pairs_E2[:, 1] < pairs_E2[:, 0].min()
        outer = pairs_E2[is_outer]
        is_dropped_D[outer[~is_dropped_D[outer[:, 1]], 0]] = True
        inner = pairs_E2[~is_outer]
        for document, earlier in inner[np.lexsort((inner[:, 1], inner[:, 0]))].tolist():
            if not is_dropped_D[earlier]:
                is_dropped_D[document] = True
