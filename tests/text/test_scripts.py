"""Scripts of characters, and words in any script."""

from __future__ import annotations

import pytest

from firth.text import Document
from firth.text.scripts import compile_word_pattern, detect_script, find_word_spans, get_document_words


@pytest.mark.parametrize(
    ("character", "script"),
    [
        ("a", "Latin"),
        ("ß", "Latin"),
        ("Ａ", "Latin"),
        ("ω", "Greek"),
        ("ё", "Cyrillic"),
        ("ש", "Hebrew"),
        ("ع", "Arabic"),
        ("ि", "Devanagari"),
        ("த", "Tamil"),
        ("ก", "Thai"),
        ("か", "Hiragana"),
        ("カ", "Katakana"),
        ("ｶ", "Katakana"),
        ("語", "Han"),
        ("한", "Hangul"),
        ("𐌰", "Gothic"),
        ("𐌀", "Old Italic"),
    ],
)
def test_scripts(character: str, script: str) -> None:
    assert detect_script(character) == script


@pytest.mark.parametrize("character", ["7", " ", ".", "€", "\u0301", "ª", "\x00", "😀", "\ue000"])
def test_common_characters_have_no_script(character: str) -> None:
    assert detect_script(character) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop -- it's a well-known 2nd try.", ["Don't", "stop", "it's", "a", "well-known", "2nd", "try"]),
        ("हिन्दी में किताबें", ["हिन्दी", "में", "किताबें"]),
        ("我喜欢你。ok", ["我", "喜", "欢", "你", "ok"]),
        ("می‌خواهم", ["می‌خواهم"]),
        ("cafe\u0301 'quoted'", ["cafe\u0301", "quoted"]),
        ("?! ...", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert compile_word_pattern().findall(text) == words
    assert get_document_words(Document(text, "a")) == words
    assert [text[start:end] for start, end in find_word_spans(Document(text, "a"))] == words


def test_a_document_that_says_its_words() -> None:
    document = Document("我喜欢 你", "a", word_starts=(0, 1, 4))
    assert get_document_words(document) == ["我", "喜欢", "你"]


def test_both_sides_of_a_document() -> None:
    assert get_document_words(Document("the cat", "a", text_pair="die Katze")) == ["the", "cat", "die", "Katze"]
