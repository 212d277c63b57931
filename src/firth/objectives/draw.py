"""Random numbers as a pure function of where they are used: no generator is carried along.

The noise of a row depends on (seed, place of the row in the stream, purpose) and on nothing else, so it is the same
whoever computes it, in whatever order, before and after a resume.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from firth.tokens.rows import mix


@dataclass(frozen=True)
class Draw:
    """Draws for a batch of rows; `index` (B,) are their places in the stream of all rows, `step` (B,) their steps."""

    seed: int
    index: np.ndarray
    step: np.ndarray | None = None

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        """(B, width) float32 numbers in [0, 1), independent for every purpose."""
        return share_of_one(self._bits(purpose, width))

    def at(self, purpose: str, row_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
        """What `uniform` has at these places, without the others."""
        return share_of_one(mix(self.seed, zlib.crc32(purpose.encode()), self.index[row_N], place_N))

    def integers(self, purpose: str, width: int, below: int) -> np.ndarray:
        """(B, width) whole numbers in [0, below)."""
        return ((self._bits(purpose, width) >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64)

    def _bits(self, purpose: str, width: int) -> np.ndarray:
        return mix(self.seed, zlib.crc32(purpose.encode()), self.index[:, None], np.arange(width))


def share_of_one(bits: np.ndarray) -> np.ndarray:
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
