"""Shards made by hand, with the boundaries that a test wants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokens.fake_shards import FakeShards

from firth.core.files import atomic_folder
from firth.tokens.shards import Shards


@pytest.fixture
def shards(tmp_path: Path) -> FakeShards:
    return FakeShards(tmp_path, np.random.default_rng(0).integers(1, 40, size=200).tolist())


@pytest.fixture
def make_shards(tmp_path: Path) -> Callable[..., Shards]:
    """Shards of documents given as the lengths of their sentences.

    The tokens are 100, 101, 102 ..., all different. `words` and `salient` are token indices; by default every word has
    two tokens.
    """
    made = 0

    def make(
        documents: Sequence[Sequence[int]],
        words: Collection[int] | None = None,
        salient: Collection[int] | None = None,
        splits: Sequence[int] | None = None,
        kind: str = "wordpiece",
        part: str = "train",
    ) -> Shards:
        nonlocal made
        made += 1
        lengths = [sum(sentences) for sentences in documents]
        size = sum(lengths)
        ends = np.cumsum([length for sentences in documents for length in sentences]) - 1
        with atomic_folder(tmp_path / f"shards-{made}", kind="shards", metadata={"tokenizer_kind": kind}) as folder:
            (folder / part).mkdir()
            np.arange(100, 100 + size, dtype=np.uint16).tofile(folder / part / "tokens.bin")
            np.save(folder / part / "offsets.npy", np.cumsum([0, *lengths]))
            marks = {"words": range(0, size, 2) if words is None else words, "sentences": ends, "salient": salient}
            for name, indices in marks.items():
                if indices is not None:
                    np.packbits(np.isin(np.arange(size), list(indices))).tofile(folder / part / f"{name}.bin")
            if splits is not None:
                np.save(folder / part / "splits.npy", np.array(splits))
        return Shards(tmp_path / f"shards-{made}" / part)

    return make
