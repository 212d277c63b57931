"""Documents that were there before: the same text, or nearly the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from firth.console import say
from firth.text import Document
from firth.text.near import BYTES_PER_TEXT, NUM_PERM, NearDuplicates, signature, texts_in
from firth.text.seen import Seen
from firth.tokens.tokenise import both

DEDUP = ("none", "exact", "near")


def sign(documents: Sequence[Document]) -> np.ndarray:
    """(D, 128) the signature of each document: it depends on nothing else, so any process may compute it."""
    found = [signature(both(document)) for document in documents]
    return np.array(found, np.uint8).reshape(-1, NUM_PERM)


def near_texts_in(max_memory: int) -> int:
    """Among how many texts near duplicates are looked for: three quarters of the memory are for them."""
    return texts_in(max_memory - max_memory // 4)


def memory_for(near_texts: int) -> int:
    """The bytes of which three quarters hold so many texts."""
    return near_texts * BYTES_PER_TEXT * 4 // 3


class Duplicates:
    """Tells documents that were there before, and counts them.

    The same text is told as soon as it is read (`is_new`), nearly the same when some documents have been signed
    (`stay`). Both must be asked in the order of the documents.
    """

    def __init__(self, seen: Seen | None = None, near: NearDuplicates | None = None) -> None:
        self.seen, self.near = seen, near

    def is_new(self, mark: bytes) -> bool:
        """Whether a text with this fingerprint comes for the first time."""
        return self.seen is None or self.seen.is_new(mark)

    def stay(self, signatures: np.ndarray) -> list[int]:
        """Which of some documents are not nearly one before them, by their places."""
        assert self.near is not None
        return [place for place, one in enumerate(signatures) if not self.near.seen_signature(one)]

    def pass_over(self, signatures: np.ndarray) -> list[int]:
        """As `stay`, for documents that have been dealt with: they are remembered, and none is wanted."""
        self.stay(signatures)
        return []


@contextmanager
def duplicates(path: Path, dedup: str, max_memory: int, near_texts: int) -> Iterator[Duplicates]:
    """What tells the duplicates of one source, in `max_memory` bytes; near ones among the last `near_texts` texts."""
    if dedup == "none":
        yield Duplicates()
        return
    near = NearDuplicates(max_memory=near_texts * BYTES_PER_TEXT) if dedup == "near" else None
    share = max_memory if near is None else max_memory // 4
    with closing(Seen(path.with_name(f".{path.name}.seen"), share)) as seen:
        yield Duplicates(seen, near)
    if near is not None and near.forgotten:
        say(f"--dedup near compared each text with the last {near.most:,} only: --max-memory has no room for more.")
