"""Labelled texts that stand in the training text are found."""

from __future__ import annotations

from firth.text import Document, Example, find_leaks
from firth.text.leak_detection import Leak

LONG = "It was the best of times, it was the worst of times, it was the age of wisdom."
SHORT = "Call me Ishmael some years ago"


def test_a_leak_is_found_whatever_the_case_and_punctuation() -> None:
    documents = [Document("Nothing here at all, my friend.", "a:1"), Document(f"... {LONG.upper()} And so on", "a:2")]
    examples = [Example("x", (LONG,), "good"), Example("y", ("an entirely different text of some length",), "bad")]
    assert find_leaks(documents, examples) == [Leak("x", LONG, 1.0, "a:2")]


def test_a_short_text_is_compared_whole() -> None:
    examples = [Example(1, (SHORT,), None), Example(2, ("Call me",), None)]
    assert find_leaks([Document("He said: call me, Ishmael; some years ago ...", "b")], examples) == [
        Leak(1, SHORT, 1.0, "b")
    ]
    assert find_leaks([Document("call me Ishmael", "b")], examples) == []
    assert find_leaks([], examples) == []


def test_share_and_order() -> None:
    words = [f"w{i}" for i in range(32)]  # 20 runs of 13
    half, most = (
        Document(" ".join(words[:22]), "half"),
        Document(" ".join(words[:30]), "most", text_pair="side " + SHORT),
    )
    examples = [Example("a", (" ".join(words),)), Example("b", ("no", SHORT))]
    assert [(leak.example_id, leak.share, leak.source) for leak in find_leaks([half], examples)] == [("a", 0.5, "half")]
    found = find_leaks([half, most], examples)
    assert [(leak.example_id, leak.share, leak.source) for leak in found] == [("b", 1.0, "most"), ("a", 0.9, "half")]
    assert find_leaks([half], examples, min_share=0.6) == []
