"""Drop duplicate documents: exact ones by a fingerprint, near ones by MinHash signatures (see `text/minhash.py`)."""

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
    """Return the MinHash signature of each document, (D, 128) uint8. It depends on that document alone."""
    signatures = [minhash_signature(join_document_sides(document)) for document in documents]
    return np.array(signatures, np.uint8).reshape(-1, NUM_PERMUTATIONS)


def max_near_texts(max_memory_bytes: int) -> int:
    """Number of texts that the near-duplicate index holds in three quarters of the memory."""
    return index_capacity_texts(max_memory_bytes - max_memory_bytes // 4)


def near_dedup_memory_bytes(num_texts: int) -> int:
    """Inverse of `max_near_texts`: bytes of which three quarters hold `num_texts` texts."""
    return num_texts * INDEX_BYTES_PER_TEXT * 4 // 3


class DuplicateFilter:
    """Finds documents that came before.

    `is_new` finds exact duplicates while documents are read, `select_new` near ones after a chunk has been signed. Both
    must be called in the order of the documents.
    """

    def __init__(self, exact_dedup: DiskFingerprintSet | None = None, near_dedup: MinHashIndex | None = None) -> None:
        self.exact_dedup, self.near_dedup = exact_dedup, near_dedup

    def is_new(self, text_fingerprint: bytes) -> bool:
        """Whether this is the first text with this fingerprint."""
        return self.exact_dedup is None or self.exact_dedup.is_new(text_fingerprint)

    def select_new(self, signatures: np.ndarray) -> list[int]:
        """Return the indices of the documents that are no near duplicates of earlier ones."""
        assert self.near_dedup is not None
        return [i for i, signature in enumerate(signatures) if not self.near_dedup.check_and_add_signature(signature)]

    def record_only(self, signatures: np.ndarray) -> list[int]:
        """Add documents that are in the shards already to the index; select none of them."""
        self.select_new(signatures)
        return []


@contextmanager
def open_duplicate_filter(path: Path, dedup: str, max_memory_bytes: int, near_texts: int) -> Iterator[DuplicateFilter]:
    """Open the filter of one source, within `max_memory_bytes`; near duplicates among the last `near_texts` texts."""
    if dedup == "none":
        yield DuplicateFilter()
        return
    near = MinHashIndex(max_bytes=near_texts * INDEX_BYTES_PER_TEXT) if dedup == "near" else None
    share = max_memory_bytes if near is None else max_memory_bytes // 4
    with closing(DiskFingerprintSet(path.with_name(f".{path.name}.seen"), share)) as seen:
        yield DuplicateFilter(seen, near)
    if near is not None and near.num_evicted:
        say(f"--dedup near compared each text with the last {near.max_texts:,} only: --max-memory allows no more.")
