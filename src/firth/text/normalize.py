"""Unicode normal forms and lowercasing (`--normalize`)."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial

from firth.core.errors import UserError, did_you_mean

# NFC composes a letter and its accent; NFKC also replaces compatibility characters: ligatures, wide letters, ² by 2.
NORMALIZERS: dict[str, Callable[[str], str]] = {
    "nfc": partial(unicodedata.normalize, "NFC"),
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "lower": str.lower,
}
ASCII_CAPITALS = bytes(range(ord("A"), ord("Z") + 1))


def parse_normal_forms(names: str | None) -> list[str]:
    """Parse a comma-separated list of normal forms, which are applied in this order.

    >>> parse_normal_forms("nfkc,lower"), parse_normal_forms(None)
    (['nfkc', 'lower'], [])
    """
    forms = [name.strip().lower() for name in (names or "").split(",") if name.strip()]
    for name in forms:
        if name not in NORMALIZERS:
            raise UserError(f"--normalize {name}: no such form. {did_you_mean(name, NORMALIZERS)}")
    return forms


def apply_normal_forms(text: str, forms: list[str]) -> str:
    """Apply normal forms in order.

    >>> apply_normal_forms("E\N{COMBINING ACUTE ACCENT}tude", ["nfc", "lower"])
    'étude'
    """
    for name in forms:
        text = NORMALIZERS[name](text)
    return text


def count_replaced_chars(before: str, after: str) -> int:
    """Number of characters of `before` that `after` does not contain.

    >>> count_replaced_chars("Aa Bb", "aa bb")
    2
    """
    if before.isascii():  # only capitals can change
        return len(before) - len(before.encode().translate(None, ASCII_CAPITALS))
    return (Counter(before) - Counter(after)).total()
