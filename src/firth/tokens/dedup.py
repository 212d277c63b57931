"""Documents that were there before: the same text, or nearly the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from firth.core.console import say
from firth.text import Document
from firth.text.exact_dedup import DiskFingerprintSet
from firth.text.minhash import (
    INDEX_BYTES_PER_TEXT,
    NUM_PERMUTATIONS,
    MinHashIndex,
    index_capacity_texts,
    minhash_signature,
)
from firth.tokens.encode import join_document_sides

DEDUP_MODES = ("none", "exact", "near")


def minhash_signatures(documents: Sequence[Document]) -> np.ndarray:
    """(D, 128) the signature of each document: it depends on nothing else, so any process may compute it."""
    found = [minhash_signature(join_document_sides(document)) for document in documents]
    return np.array(found, np.uint8).reshape(-1, NUM_PERMUTATIONS)


def max_near_texts(max_memory_bytes: int) -> int:
    """Among how many texts near duplicates are looked for: three quarters of the memory are for them."""
    return index_capacity_texts(max_memory_bytes - max_memory_bytes // 4)


def near_dedup_memory_bytes(num_texts: int) -> int:
    """The bytes of which three quarters hold so many texts."""
    return num_texts * INDEX_BYTES_PER_TEXT * 4 // 3


class DuplicateFilter:
    """Tells documents that were there before, and counts them.

    The same text is told as soon as it is read (`is_new`), nearly the same when some documents have been signed
    (`select_new`). Both must be asked in the order of the documents.
    """

    def __init__(self, exact_dedup: DiskFingerprintSet | None = None, near_dedup: MinHashIndex | None = None) -> None:
        self.exact_dedup, self.near_dedup = exact_dedup, near_dedup

    def is_new(self, text_fingerprint: bytes) -> bool:
        """Whether a text with this fingerprint comes for the first time."""
        return self.exact_dedup is None or self.exact_dedup.is_new(text_fingerprint)

    def select_new(self, signatures: np.ndarray) -> list[int]:
        """Which of some documents are not nearly one before them, by their places."""
        assert self.near_dedup is not None
        return [place for place, one in enumerate(signatures) if not self.near_dedup.check_and_add_signature(one)]

    def record_only(self, signatures: np.ndarray) -> list[int]:
        """As `select_new`, for documents that have been dealt with: they are remembered, and none is wanted."""
        self.select_new(signatures)
        return []


@contextmanager
def open_duplicate_filter(path: Path, dedup: str, max_memory_bytes: int, near_texts: int) -> Iterator[DuplicateFilter]:
    """What tells the duplicates of one source, in `max_memory_bytes` bytes; near ones among the last `num_texts` texts."""
    if dedup == "none":
        yield DuplicateFilter()
        return
    near = MinHashIndex(max_bytes=near_texts * INDEX_BYTES_PER_TEXT) if dedup == "near" else None
    share = max_memory_bytes if near is None else max_memory_bytes // 4
    with closing(DiskFingerprintSet(path.with_name(f".{path.name}.seen"), share)) as seen:
        yield DuplicateFilter(seen, near)
    if near is not None and near.num_evicted:
        say(
            f"--dedup near compared each text with the last {near.max_texts:,} only: --max-memory has no room for more."
        )
