"""Other spellings of the same characters, when a person asks for them."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial

from firth.errors import UserError, nearest

# NFC joins a letter and its accent, NFKC also makes ligatures, wide letters and the like plain (and ² to 2).
FORMS: dict[str, Callable[[str], str]] = {
    "nfc": partial(unicodedata.normalize, "NFC"),
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "lower": str.lower,
}
CAPITALS = bytes(range(ord("A"), ord("Z") + 1))


def known_forms(names: str | None) -> list[str]:
    """The forms that are asked for: "nfkc,lower" asks for two, in this order.

    >>> known_forms("nfkc,lower"), known_forms(None)
    (['nfkc', 'lower'], [])
    """
    forms = [name.strip().lower() for name in (names or "").split(",") if name.strip()]
    for name in forms:
        if name not in FORMS:
            raise UserError(f"--normalize {name}: no such form. {nearest(name, FORMS)}")
    return forms


def normalise(text: str, forms: list[str]) -> str:
    """
    >>> normalise("E\N{COMBINING ACUTE ACCENT}tude", ["nfc", "lower"])
    'étude'
    """
    for name in forms:
        text = FORMS[name](text)
    return text


def num_replaced(before: str, after: str) -> int:
    """How many characters of a text are no longer there after it was changed.

    >>> num_replaced("Aa Bb", "aa bb")
    2
    """
    if before.isascii():  # where nothing but capitals ever changes
        return len(before) - len(before.encode().translate(None, CAPITALS))
    return (Counter(before) - Counter(after)).total()
