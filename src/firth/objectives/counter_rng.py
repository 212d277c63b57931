"""A counter-based random number generator: random numbers are a hash of where they are used.

A stateful generator gives numbers that depend on everything drawn before. Here each number is a hash of (seed, purpose,
row index, column), as in Philox or JAX's threefry (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
So the noise of a row is the same on any process, in any order, and after a resume, and a checkpoint holds no RNG state.
The purpose is a string, so that two uses in one row are independent; renaming one changes the noise of every run.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from firth.core.hashing import hash_uint64


@dataclass(frozen=True)
class CounterRNG:
    """Random numbers for B rows; `index` (B,) is the index of each row in the stream, `step` (B,) its training step.

    `progress` is the share of the run's steps before this one. It changes no random number: a rate may follow it.
    `seed` may differ by row, (B, 1).
    """

    seed: int | np.ndarray
    index: np.ndarray
    step: np.ndarray | None = None
    progress: float = 0.0

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        """Return (B, width) float32 in [0, 1), independent for every purpose."""
        return bits_to_unit_floats(self._random_bits(purpose, width))

    def uniform_at(self, purpose: str, row_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        """Return `uniform(purpose, ...)[row_N, position_N]` (N,) without computing the rest."""
        return bits_to_unit_floats(hash_uint64(self.seed, zlib.crc32(purpose.encode()), self.index[row_N], position_N))

    def integers(self, purpose: str, width: int, high: int) -> np.ndarray:
        """Return (B, width) int64 in [0, high)."""
        return ((self._random_bits(purpose, width) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)).astype(
            np.int64
        )

    def _random_bits(self, purpose: str, width: int) -> np.ndarray:
        return hash_uint64(self.seed, zlib.crc32(purpose.encode()), self.index[:, None], np.arange(width))


def bits_to_unit_floats(bits: np.ndarray) -> np.ndarray:
    """Return float32 in [0, 1) from the upper 24 bits, as many as a float32 can hold."""
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
