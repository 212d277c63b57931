"""Names, numbers and dates are found by their spelling, and any function may be named instead."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text.salient_spans import find_salient_spans, load_salient_finder, salient_finder_name

SENTENCES = {
    # Names: runs of capitalised words, but not the first word of a sentence alone.
    "Barack Obama was born in Honolulu.": ["Barack Obama", "Honolulu"],
    "Nobody came. The heron left! Why? Because.": [],
    "In London the Bank of England fell silent.": ["London", "Bank of England"],
    "Herons like New York, but Anna's dog does not.": ["New York", "Anna"],
    "Mr. Grey met J. R. Firth and Dr. Müller-Lüdenscheidt in the U.S. He left.": [
        "Mr. Grey",
        "J. R. Firth",
        "Dr. Müller-Lüdenscheidt",
        "U.S.",
    ],
    "I think I'm right, and Élodie O'Brien agrees.": ["Élodie O'Brien"],
    "Then Ludwig van Beethoven heard of AT&T and Marks & Spencer.": [
        "Ludwig van Beethoven",
        "AT&T",
        "Marks & Spencer",
    ],
    'He said, "Go home." "Why?" asked Anna.': ["Anna"],
    "- Apples are red\n- Pears are not\n1. Plums\n2. New York": ["New York"],
    # Other scripts and accents.
    "Ọjọ́ dára ní Èkó. Ẹ kú àárọ̀ Ọláńrewájú.": ["Èkó", "Ọláńrewájú"],
    "E\u0301lodie voit la Seine. E\u0301lodie part.": ["Seine"],
    "Анна Каренина живёт в Москве. Она уехала.": ["Анна Каренина", "Москве"],
    "我在2019年3月去了北京，住了12天。": ["2019年3月", "12"],
    "في عام ٢٠١٩ سافرت": ["٢٠١٩"],
    # Dates.
    "It began on August 4, 1961, and on 3 May 1999 too.": ["August 4, 1961", "3 May 1999"],
    "On Monday, 5 June 2023 and the 4th of July.": ["Monday, 5 June 2023", "4th of July"],
    "Sept. 11, 2001, Dec 25 and in June 1999.": ["Sept. 11, 2001", "Dec 25", "June 1999"],
    "Sunday was cold. January was colder. It was in May.": ["Sunday", "January", "May"],
    "May we go? March on! Mark it.": [],
    "From 2024-05-17 to 2024-05-18T10:30:00Z, 17/05/2024, 17.05.2024.": [
        "2024-05-17",
        "2024-05-18T10:30:00Z",
        "17/05/2024",
        "17.05.2024",
    ],
    # Numbers.
    "it cost $4.50, or 1,000,000 in the 1980s, by 25% on the 3rd at 12:30": [
        "$4.50",
        "1,000,000",
        "1980s",
        "25%",
        "3rd",
        "12:30",
    ],
    "utf8, x86_64, v1.2.3, 10km and 3.": ["3"],
    "": [],
    " \n\n ": [],
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_salient_spans(sentence: str) -> None:
    assert [sentence[start:end] for start, end in find_salient_spans(sentence)] == SENTENCES[sentence]


def test_spans_are_in_order_and_apart() -> None:
    spans = find_salient_spans(" ".join(SENTENCES))
    edges = [edge for span in spans for edge in span]
    assert len(spans) > 40
    assert edges == sorted(edges)
    assert all(start < end for start, end in spans)


@pytest.mark.parametrize(
    "piece", ["\n", ".", '"', "A. ", "Ab ", "Ab of ", "A.", "Ab-", "1.", "1 ", "\n- ", "Mr. ", "("]
)
def test_no_text_takes_long(piece: str) -> None:
    text = 20_000 * piece + "x"
    spans = find_salient_spans(text)  # a pattern that goes back and forth would not end
    assert all(0 <= start < end <= len(text) for start, end in spans)


# Functions by name


def test_the_default_is_ours() -> None:
    assert load_salient_finder("default") is find_salient_spans
    assert salient_finder_name(find_salient_spans) == "default"


def test_a_function_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "finder_of_mine.py").write_text("NUMBER = 7\ndef first(text):\n    return [(0, 1)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = load_salient_finder("finder_of_mine:first")
    assert found("abc") == [(0, 1)]
    assert salient_finder_name(found) == "finder_of_mine:first"
    with pytest.raises(UserError, match="finder_of_mine has no 'second'"):
        load_salient_finder("finder_of_mine:second")
    with pytest.raises(UserError, match="finder_of_mine cannot call its 'NUMBER'"):
        load_salient_finder("finder_of_mine:NUMBER")
    del sys.modules["finder_of_mine"]


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"no module named 'no_such_finder'.*PYTHONPATH"):
        load_salient_finder("no_such_finder:spans")
    for name in ("defaults", "module:", ":function", ""):
        with pytest.raises(UserError, match=r"neither 'default' nor package\.module:function"):
            load_salient_finder(name)


def test_objects_that_can_be_called_have_a_name() -> None:
    class Finder:
        def __call__(self, text: str) -> list[tuple[int, int]]:
            return []

    assert salient_finder_name(Finder()).endswith("Finder")
