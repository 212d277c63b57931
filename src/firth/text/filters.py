"""Which documents stay and which spelling they have; exact duplicates; hold-out by document."""

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

HELD_OUT_FRACTION = 0.05
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def text_fingerprint(text: str) -> bytes:
    """128 bits that stand for a text: two texts with the same fingerprint are the same text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def is_held_out(text: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a document is kept from training: decided by its text alone.

    So the answer is the same in every run and every program, a duplicate never lands on the other side, and a
    smaller share is a part of a larger one.
    """
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, person=b"held out").digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def replace_lone_surrogates(text: str) -> str:
    """Put U+FFFD for half characters (lone surrogates): JSON can spell them, but no encoding can write them."""
    return text if text.isascii() else LONE_SURROGATE.sub("\ufffd", text)


class ExactDedup:
    """Tells a new text from one that was there before, and counts the latter; keeps 16 bytes per text.

    >>> unique = ExactDedup()
    >>> [unique.is_new(text) for text in ("a", "b", "a")], unique.num_duplicates
    ([True, True, False], 1)
    """

    def __init__(self) -> None:
        self.fingerprints: set[bytes] = set()
        self.num_duplicates = 0

    def is_new(self, text: str) -> bool:
        mark = text_fingerprint(text)
        if mark in self.fingerprints:
            self.num_duplicates += 1
            return False
        self.fingerprints.add(mark)
        return True


@dataclass
class TextCleaner:
    """What a person wants changed or left out of a text, and what was: `dropped_by_reason` documents by reason, `change_counts` text.

    `normalize` names forms ("nfc", "nfkc", "lower", or several: "nfkc,lower") and `language` the languages that stay
    ("en", "de,fr"). A limit of 0 is none; words are what spaces set apart. Of a document with two sides, each must
    pass. Nothing is changed or dropped unless asked for.
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
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if min(least, most) < 0 or 0 < most < least:
                raise UserError(f"--min-{unit} {least} --max-{unit} {most}: no document can have so many {unit}.")

    def normalize_text(self, text: str) -> str:
        """A text in the forms that are asked for."""
        if not self.forms:
            return text
        after = apply_normal_forms(text, self.forms)
        if after != text:
            self.change_counts["texts"] += 1
            self.change_counts["characters"] += count_replaced_chars(text, after)
        return after

    def should_keep(self, texts: Sequence[str]) -> bool:
        """Whether a document with these texts is one that is wanted; if not, the reason is counted."""
        if not self.has_filters:
            return True
        reason = next((reason for text in texts if (reason := self.drop_reason(text))), None)
        if reason is not None:
            self.dropped_by_reason[reason] += 1
        return reason is None

    def drop_reason(self, text: str) -> str | None:
        """Why a text is left out, or None."""
        for unit, size in (("characters", len(text)), ("words", self.count_words_if_limited(text))):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if size < least:
                return f"under {least:,} {unit}"
            if 0 < most < size:
                return f"over {most:,} {unit}"
        if self.languages and detect_language(text) not in self.languages:
            return f"not in the language {' or '.join(self.languages)}"
        return None

    def count_words_if_limited(self, text: str) -> int:
        """Counted only where it matters."""
        return len(text.split()) if self.min_words or self.max_words else 0

    def summary_lines(self) -> list[str]:
        """What happened, in words: "12 left out, under 50 words"."""
        told = [f"{n:,} left out, {reason}" for reason, n in sorted(self.dropped_by_reason.items())]
        if self.change_counts:
            n, characters = self.change_counts["texts"], self.change_counts["characters"]
            told.append(
                f"{n:,} changed by --normalize {self.normalize} ({format_count(characters, 'character')} replaced)"
            )
        return told

    def reset_counts(self) -> None:
        """Count from zero."""
        self.dropped_by_reason.clear()
        self.change_counts.clear()
