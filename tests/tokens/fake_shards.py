"""Shards without files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from firth.tokens.shards import Shards


class FakeShards(Shards):
    """Documents of given lengths; the tokens are 100, 101, 102 ..., all different."""

    fingerprint = "fake"  # type: ignore[assignment]

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder = folder
        self.offsets = np.cumsum([0, *lengths])
        self._tokens = np.arange(100, 100 + self.num_tokens).astype(np.uint16)  # type: ignore[assignment]
        self._mapped_files = {}
