"""Unicode normal forms, lowercasing, and repairs of spellings that look the same (`--normalize`).

One word can be several strings: with a typewriter apostrophe or a typographic one (ng'ombe, ng’ombe), with a letter
and its accent composed or apart, with a letter of another script that looks the same, with an invisible character
inside. A tokenizer takes them for different words. Each form here turns such variants into one string.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Literal

from firth.core.errors import UserError, did_you_mean, shorten

# Behind a letter (or a combining mark of its accent) and before one: quotation marks and minus signs stay. The same
# syntax works in `re` and in the regular expressions of tokenizer.json.
BEHIND_LETTER = r"(?:(?<=[^\W\d_])|(?<=[\u0300-\u036f]))"
APOSTROPHE_REGEX = BEHIND_LETTER + "[\u2018\u2019\u201b\u02bb\u02bc\u2032\u00b4\uff07]" + r"(?=[^\W\d_])"
HYPHEN_REGEX = BEHIND_LETTER + "[\u2010\u2011\u2212\ufe63\uff0d]" + r"(?=[^\W\d_])"
# Soft hyphens, zero-width spaces, marks of direction. Not the joiners U+200C and U+200D, which spell words.
INVISIBLE_REGEX = "[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff]"
REPLACEMENTS = {
    "apostrophes": (APOSTROPHE_REGEX, "'"),
    "hyphens": (HYPHEN_REGEX, "-"),
    "invisible": (INVISIBLE_REGEX, ""),
}

# Letters of three scripts that look the same, column by column ("." has no counterpart).
LOOKALIKES = {
    "Latin": "ABCEHIJKMNOPSTXYZaceijopsxy",
    "Cyrillic": "АВСЕНІЈКМ.ОРЅТХУ.асеіјорѕху",
    "Greek": "ΑΒ.ΕΗΙ.ΚΜΝΟΡ.ΤΧΥΖ.....ο....",
}
SCRIPT_OF_LETTER = {
    **{chr(c): "Latin" for c in (*range(0x41, 0x5B), *range(0x61, 0x7B), *range(0xC0, 0x250)) if chr(c).isalpha()},
    **{chr(c): "Greek" for c in range(0x370, 0x400) if chr(c).isalpha()},
    **{chr(c): "Cyrillic" for c in range(0x400, 0x530) if chr(c).isalpha()},
}
MANY_MARKS = re.compile(r"[^\w\s!-~]{32,}+")  # combining marks, and other characters that are no letters
LETTERS_REGEX = re.compile(r"[^\W\d_]+")


def repair_word_script(word: str) -> str:
    """Replace letters of other scripts that look like letters of the script that most of the word is in.

    A word with a letter that has no counterpart, as in formulas, or with as many letters of both scripts is unchanged.

    >>> repair_word_script("п" + "p" + "авда").isascii(), repair_word_script("ΔT"), repair_word_script("µm")
    (False, 'ΔT', 'µm')
    """
    if word.isascii():
        return word
    scripts = Counter(SCRIPT_OF_LETTER.get(c, "other") for c in word)
    (script, count), *others = scripts.most_common()
    if not others or script not in LOOKALIKES or 2 * count <= len(word):
        return word
    pairs = {
        theirs: ours
        for other, _ in others
        for theirs, ours in zip(LOOKALIKES.get(other, ""), LOOKALIKES[script], strict=False)
        if "." not in (theirs, ours)
    }
    repaired = "".join(c if SCRIPT_OF_LETTER.get(c) == script else pairs.get(c, "") for c in word)
    return repaired if len(repaired) == len(word) else word


def normalize_unicode(form: Literal["NFC", "NFKC"], text: str) -> str:
    """Return NFC or NFKC in linear time: `unicodedata` sorts marks by insertion, so they are sorted before."""
    if not text.isascii():
        text = MANY_MARKS.sub(lambda match: sort_marks(match[0]), text)
    return unicodedata.normalize(form, text)


def sort_marks(text: str) -> str:
    """Bring the combining marks of each letter into their canonical order (Unicode, section 3.11, D109)."""
    runs = groupby(text, key=lambda c: unicodedata.combining(c) > 0)
    return "".join(c for is_marks, run in runs for c in (sorted(run, key=unicodedata.combining) if is_marks else run))


def lower_characters(text: str) -> str:
    """Lowercase each character by itself, as tokenizers do: `str.lower` looks at the word, and ends it with another σ.

    >>> lower_characters("ΟΔΟΣ"), "ΟΔΟΣ".lower()
    ('οδοσ', 'οδος')
    """
    return text.replace("Σ", "σ").lower()


def replace_lookalikes(text: str) -> str:
    """Repair every word that mixes letters of Latin, Cyrillic and Greek."""
    return text if text.isascii() else LETTERS_REGEX.sub(lambda match: repair_word_script(match[0]), text)


# NFC composes a letter and its accent; NFKC also replaces compatibility characters: ligatures, wide letters, ² by 2.
NORMALIZERS: dict[str, Callable[[str], str]] = {
    "nfc": partial(normalize_unicode, "NFC"),
    "nfkc": partial(normalize_unicode, "NFKC"),
    "lower": lower_characters,
    **{name: partial(re.compile(regex).sub, content) for name, (regex, content) in REPLACEMENTS.items()},
    "lookalikes": replace_lookalikes,
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
            raise UserError(f"--normalize {shorten(name)}: no such form. {did_you_mean(name, NORMALIZERS)}")
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
