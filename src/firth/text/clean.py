"""Exact duplicates, hold-out by document, and characters that no file can hold."""

from __future__ import annotations

import re
from hashlib import blake2b

HELD_OUT = 0.05
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def fingerprint(text: str) -> bytes:
    """128 bits that stand for a text: two texts with the same fingerprint are the same text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def held_out(text: str, share: float = HELD_OUT) -> bool:
    """Whether a document is kept from training: decided by its text alone.

    So the answer is the same in every run and every program, a duplicate never lands on the other side, and a
    smaller share is a part of a larger one.
    """
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < share * 2**64


def repair(text: str) -> str:
    """Put U+FFFD for half characters (lone surrogates): JSON can spell them, but no encoding can write them."""
    return LONE_SURROGATE.sub("\ufffd", text)


class Unique:
    """Tells a new text from one that was there before, and counts the latter; keeps 16 bytes per text.

    >>> unique = Unique()
    >>> [unique.is_new(text) for text in ("a", "b", "a")], unique.duplicates
    ([True, True, False], 1)
    """

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.duplicates = 0

    def is_new(self, text: str) -> bool:
        mark = fingerprint(text)
        if mark in self.seen:
            self.duplicates += 1
            return False
        self.seen.add(mark)
        return True
