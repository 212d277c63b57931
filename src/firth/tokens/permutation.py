"""A random permutation of range(n) with O(1) access: element i costs the same as element 0, and no list is stored.

Training reads rows in a new random order every epoch. A shuffled list of n indices needs O(n) memory, and its state has
to be saved or replayed to resume. Here the order is a function: `permute_indices(i, n, seed)` is the i-th row of the
epoch. A run that resumes at step s evaluates it at step s; it skips nothing, repeats nothing and replays nothing. Two
processes that read different indices never share state either.

How it works, for n = 1000:

1. A Feistel network permutes all numbers of 10 bits. It splits x into a left and a right half and repeats
   (left, right) -> (right, left ^ hash(right, key)). Each round can be undone whatever the hash is, so the network is
   one-to-one. `FEISTEL_ROUNDS` rounds with keys from the seed make it look random (Luby and Rackoff 1988).
2. 2^10 = 1024 is more than n. An output of 1000 or more enters the network again until it falls below 1000 (cycle
   walking: Black and Rogaway 2002, section 3). Following a cycle of a permutation keeps it a permutation. Since
   2^bits < 2n, a number walks less than twice on average (n > 8).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from firth.core.hashing import hash_uint64, splitmix64

FEISTEL_ROUNDS = 6  # must be even: the halves swap in each round and have to end in their own widths
MIN_FEISTEL_BITS = 4  # bits: with fewer, a half has too few values for the rounds to mix


def permute_indices(indices: np.ndarray, n: int, seed: int | np.integer | np.ndarray) -> np.ndarray:
    """Return the elements at `indices` of a random permutation of range(n), in the shape of `indices`.

    `seed` is one number, or an array with a number for each index.
    """
    indices = np.asarray(indices, dtype=np.int64)
    assert ((indices >= 0) & (indices < n)).all(), "not in range(n)"
    num_bits = max((n - 1).bit_length(), MIN_FEISTEL_BITS)
    key = np.broadcast_to(hash_uint64(seed, n), indices.shape).ravel()
    keys = hash_uint64(key, np.arange(FEISTEL_ROUNDS)[:, None])  # (rounds, indices)
    out = indices.astype(np.uint64).ravel()
    outside = np.arange(len(out))
    while len(outside):
        out[outside] = feistel_permute(out[outside], keys[:, outside], num_bits)
        outside = outside[out[outside] >= n]
    return out.astype(np.int64).reshape(indices.shape)


def feistel_permute(x: np.ndarray, keys: Iterable[np.ndarray], num_bits: int) -> np.ndarray:
    """Permute numbers of `num_bits` bits; each array of keys is one round, and the number of rounds is even."""
    left_bits, right_bits = np.uint64(num_bits - num_bits // 2), np.uint64(num_bits // 2)
    left, right = x >> right_bits, x & low_bit_mask(right_bits)
    for k, key in enumerate(keys):
        width = left_bits if k % 2 == 0 else right_bits
        left, right = right, left ^ (splitmix64(right ^ key) & low_bit_mask(width))
    return left << right_bits | right


def low_bit_mask(num_bits: np.uint64) -> np.uint64:
    return np.uint64(2 ** int(num_bits) - 1)
