"""Detect the script of a character, and find words in text of any script."""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from itertools import pairwise

from firth.text.documents import Document

# A character's Unicode name starts with its script. These prefixes are the exceptions.
SCRIPT_BY_NAME_PREFIX = {"Cjk": "Han", "Ideographic": "Han", "Fullwidth": "Latin", "Halfwidth": "Katakana"}
TWO_WORD_SCRIPT_PREFIXES = (
    "Old",
    "New",
    "Tai",
    "Linear",
    "Canadian",
    "Meetei",
    "Syloti",
    "Pahawh",
    "Psalter",
    "Zanabazar",
    "Ol",
)
NON_SCRIPT_PREFIXES = ("Mathematical", "Modifier", "Combining", "Feminine", "Masculine", "Micro", "Double", "Variation")
HAN_RANGES = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD_JOINERS = "'\u2019\u2010\u2011\u200c\u200d-"  # inside a word, not at its ends


def detect_script(character: str) -> str | None:
    """Return the script of a letter or combining mark; None for digits, punctuation, spaces and common characters.

    >>> detect_script("a"), detect_script("ж"), detect_script("語"), detect_script("7")
    ('Latin', 'Cyrillic', 'Han', None)
    """
    if unicodedata.category(character)[0] not in "LM":
        return None
    first, *rest = unicodedata.name(character, "Combining").title().replace("-", " ").split()
    if first in NON_SCRIPT_PREFIXES:
        return None
    if first in TWO_WORD_SCRIPT_PREFIXES:
        return f"{first} {rest[0]}"
    return SCRIPT_BY_NAME_PREFIX.get(first, first)


@cache
def compile_word_pattern() -> re.Pattern[str]:
    r"""Return a pattern of words: letters, combining marks and digits, with inner apostrophes and hyphens.

    A Han character is a word, since Chinese does not separate words. Python's `\w` excludes combining marks and
    would split Hindi or Tamil words at every vowel sign.
    """
    letters = unicode_character_class("LMN")
    return re.compile(f"[{HAN_RANGES}]|[_{letters}]+(?:[{WORD_JOINERS}][_{letters}]+)*")


def unicode_character_class(categories: str) -> str:
    """Return the characters of Unicode categories, without Han, as ranges for a regular expression's [...]."""
    is_han = re.compile(f"[{HAN_RANGES}]").match
    inside = (
        unicodedata.category(c)[0] in categories and not is_han(c)
        for c in map(chr, range(min(sys.maxunicode, 0x20000)))
    )
    edges = [i for i, (before, now) in enumerate(pairwise([False, *inside, False])) if before != now]
    return "".join(f"\\U{start:08x}-\\U{end - 1:08x}" for start, end in zip(edges[::2], edges[1::2], strict=True))


def find_word_spans(document: Document) -> list[tuple[int, int]]:
    """Return [start, end) of each word: from the document's `word_starts`, or found by pattern."""
    text = document.text
    if document.word_starts is None:
        return [match.span() for match in compile_word_pattern().finditer(text)]
    edges = pairwise([*document.word_starts, len(text)])
    return [(start, start + len(text[start:end].rstrip())) for start, end in edges if text[start:end].strip()]


def get_document_words(document: Document) -> list[str]:
    """Return the words of a document, including those of its `text_pair`."""
    if document.word_starts is None:
        return [word for text in document.texts for word in compile_word_pattern().findall(text)]
    return [document.text[start:end] for start, end in find_word_spans(document)]
