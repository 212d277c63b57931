"""Normalize and filter documents, drop exact duplicates, and choose the held-out split."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.text.language_detection import detect_language, parse_language_codes
from firth.text.normalize import apply_normal_forms, count_replaced_chars, parse_normal_forms

HELD_OUT_FRACTION = 0.05  # of the documents
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def text_fingerprint(text: str) -> bytes:
    """Return a 128-bit hash of a text; at this size, collisions do not occur in practice."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_held_out(text: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a document is in the held-out split: its 64-bit hash is in the lowest `fraction` of the range.

    The decision depends on the text alone. It is the same in every run, a duplicate is always in the same split, and
    the split of a smaller fraction is a subset of that of a larger one.
    """
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def replace_lone_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD: JSON escapes can produce them, but UTF-8 cannot encode them."""
    return text if text.isascii() else LONE_SURROGATE.sub("\ufffd", text)


class ExactDedup:
    """Exact deduplication: remembers a 16-byte hash per text and counts duplicates.

    >>> unique = ExactDedup()
    >>> [unique.is_new(text) for text in ("a", "b", "a")], unique.num_duplicates
    ([True, True, False], 1)
    """

    def __init__(self) -> None:
        self.fingerprints: set[bytes] = set()
        self.num_duplicates = 0

    def is_new(self, text: str) -> bool:
        """Whether `text` was not passed before."""
        fingerprint = text_fingerprint(text)
        if fingerprint in self.fingerprints:
            self.num_duplicates += 1
            return False
        self.fingerprints.add(fingerprint)
        return True


@dataclass
class TextCleaner:
    """Normalization and filters for documents, with counts of their effect. By default nothing is changed or dropped.

    `normalize` lists normal forms ("nfc", "nfkc,lower", see `normalize.py`); `language` lists languages to keep ("en",
    "de,fr"). A limit of 0 is off. Words are separated by whitespace. Both texts of a text pair must pass.
    `dropped_by_reason` counts dropped documents; `change_counts` counts changed texts and characters.
    """

    normalize: str | None = None
    min_words: int = 0
    max_words: int = 0
    min_characters: int = 0
    max_characters: int = 0
    language: str | None = None
    dropped_by_reason: Counter[str] = field(default_factory=Counter, init=False, compare=False)
    change_counts: Counter[str] = field(default_factory=Counter, init=False, compare=False)

    def __post_init__(self) -> None:
        self.forms, self.languages = parse_normal_forms(self.normalize), parse_language_codes(self.language)
        limits = (self.min_words, self.max_words, self.min_characters, self.max_characters)
        self.has_filters = any(limits) or bool(self.languages)
        for unit in ("words", "characters"):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if min(low, high) < 0 or 0 < high < low:
                raise UserError(f"--min-{unit} {low} --max-{unit} {high}: no document has that many {unit}.")

    def normalize_text(self, text: str) -> str:
        """Apply the normal forms and count the changes."""
        if not self.forms:
            return text
        after = apply_normal_forms(text, self.forms)
        if after != text:
            self.change_counts["texts"] += 1
            self.change_counts["characters"] += count_replaced_chars(text, after)
        return after

    def should_keep(self, texts: Sequence[str]) -> bool:
        """Whether a document with these texts passes the filters; if not, count the reason."""
        if not self.has_filters:
            return True
        reason = next((reason for text in texts if (reason := self.drop_reason(text))), None)
        if reason is not None:
            self.dropped_by_reason[reason] += 1
        return reason is None

    def drop_reason(self, text: str) -> str | None:
        """Return why a text is dropped, or None if it passes."""
        num_words = len(text.split()) if self.min_words or self.max_words else 0  # counting costs time
        for unit, size in (("characters", len(text)), ("words", num_words)):
            low, high = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if size < low:
                return f"under {low:,} {unit}"
            if 0 < high < size:
                return f"over {high:,} {unit}"
        if self.languages and detect_language(text) not in self.languages:
            return f"not in the language {' or '.join(self.languages)}"
        return None

    def summary_lines(self) -> list[str]:
        """Return one phrase for each effect: "12 left out, under 50 words"."""
        lines = [f"{n:,} left out, {reason}" for reason, n in sorted(self.dropped_by_reason.items())]
        if self.change_counts:
            n, characters = self.change_counts["texts"], self.change_counts["characters"]
            lines.append(
                f"{n:,} changed by --normalize {self.normalize} ({format_count(characters, 'character')} replaced)"
            )
        return lines

    def reset_counts(self) -> None:
        self.dropped_by_reason.clear()
        self.change_counts.clear()
