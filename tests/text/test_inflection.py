"""A word is found in a text in any of its forms."""

from __future__ import annotations

import pytest

from firth.text.inflection import find_inflected_word


@pytest.mark.parametrize(
    ("word", "text", "form"),
    [
        ("run", "They run the runner", "run"),
        ("Throw", "Have, throw, or make a party", "throw"),
        ("run", "She was running", "running"),
        ("carry", "He carried it", "carried"),
        ("fall", "It fell", "fell"),
        ("be", "There were two", "were"),
        ("give up", "Never give up!", "give up"),
        ("class", "classes of classifiers", "classes"),
    ],
)
def test_forms(word: str, text: str, form: str) -> None:
    span = find_inflected_word(word, text)
    assert span is not None
    assert text[slice(*span)] == form


@pytest.mark.parametrize(("word", "text"), [("tea", "a cup of coffee"), ("art", "artificially"), ("go", "")])
def test_other_words_are_not_forms(word: str, text: str) -> None:
    assert find_inflected_word(word, text) is None
