"""Random numbers as a pure function of where they are used: no generator is carried along.

The noise of a row depends on (seed, place of the row in the stream, purpose) and on nothing else, so it is the same
whoever computes it, in whatever order, before and after a resume.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from firth.core.hashing import hash_uint64


@dataclass(frozen=True)
class CounterRNG:
    """Draws for a batch of rows; `index` (B,) are their places in the stream of all rows, `step` (B,) their steps."""

    seed: int
    index: np.ndarray
    step: np.ndarray | None = None

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        """(B, width) float32 numbers in [0, 1), independent for every purpose."""
        return bits_to_unit_floats(self._random_bits(purpose, width))

    def uniform_at(self, purpose: str, row_N: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        """What `uniform` has at these places, without the others."""
        return bits_to_unit_floats(hash_uint64(self.seed, zlib.crc32(purpose.encode()), self.index[row_N], position_N))

    def integers(self, purpose: str, width: int, high: int) -> np.ndarray:
        """(B, width) whole numbers in [0, below)."""
        return ((self._random_bits(purpose, width) >> np.uint64(32)) * np.uint64(high) >> np.uint64(32)).astype(
            np.int64
        )

    def _random_bits(self, purpose: str, width: int) -> np.ndarray:
        return hash_uint64(self.seed, zlib.crc32(purpose.encode()), self.index[:, None], np.arange(width))


def bits_to_unit_floats(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
