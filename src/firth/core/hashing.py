"""A counter-based hash: random bits as a pure function of integers.

A generator such as `np.random.default_rng` carries a state, so its n-th number depends on the n - 1 draws before it.
A counter-based one (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3") hashes the position instead:
`hash_uint64(seed, step, row)` is the same in every process, in every order, before and after a resume. The mixing
function is the finalizer of splitmix64 (Steele, Lea, Flood 2014): two multiplications and three shifts a number.
"""

from __future__ import annotations

import numpy as np


def hash_uint64(*numbers: int | np.integer | np.ndarray) -> np.ndarray:
    """Return 64 random-looking bits of the numbers; arrays are broadcast and hashed element by element."""
    state = np.zeros((), dtype=np.uint64)
    for number in numbers:
        value = np.uint64(number % 2**64) if isinstance(number, int) else number.astype(np.uint64)
        state = splitmix64(state ^ value)
    return np.asarray(state)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Mix uint64 numbers: every bit of the result depends on every bit of x. The map is one-to-one."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)  # a copy, which the lines below change in place
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return x
