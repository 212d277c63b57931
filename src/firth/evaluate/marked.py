"""Texts with marked parts: entities, answers in their context, and the words in which two texts differ.

A `Part` is a piece of text with CSS classes. Two marks are drawn, and may overlap: a box ("p") is a prediction, an
underline ("g", gold) is the right answer. The second class gives the outcome, by which colour and line style differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import NamedTuple

from firth.metrics.tagging import EntityMatch

MAX_PLAIN_CHARS = 600  # characters of an unmarked part; a longer one is shortened
MAX_DIFF_WORDS = 500  # words of a text that a diff compares: its time grows with the product of both lengths
# Words and single signs, each with the white space after it. Chinese and Japanese write no spaces: each of their
# characters is a word. Vowel signs and accents belong to their word, so a word is defined by what ends it.
NO_SPACE_CHARS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
PUNCTUATION_CHARS = r"!-&(-,./:-@\[-`{-~«»“”„…–—、。「」।॥؟،؛¿¡"
WORD_PATTERN = re.compile(rf"([{NO_SPACE_CHARS}]|[{PUNCTUATION_CHARS}]|[^\s{NO_SPACE_CHARS}{PUNCTUATION_CHARS}]+)(\s*)")


class Part(NamedTuple):
    """A piece of text. Without classes it is plain; the label follows it in small print."""

    text: str
    classes: str = ""
    label: str = ""


class CharSpan(NamedTuple):
    """Characters [start, end) of a text, with the classes of their mark and the label at its end."""

    start: int
    end: int
    classes: str
    label: str


def slug(outcome: str) -> str:
    return outcome.replace(" ", "-")


def mark_spans(text: str, spans: Sequence[CharSpan]) -> list[Part]:
    """Cut a text at the ends of its spans, which may overlap; each piece has the classes of all spans that cover it.

    >>> [tuple(part) for part in mark_spans("a big dog", [CharSpan(2, 5, "p", "adj"), CharSpan(2, 9, "g", "NP")])]
    [('a ', '', ''), ('big', 'p g', 'adj'), (' dog', 'g', 'NP')]
    """
    edges = sorted({0, len(text), *(edge for span in spans for edge in span[:2])})
    parts = []
    for start, end in pairwise(edges):
        covering = [span.classes for span in spans if span.start <= start and end <= span.end]
        classes = " ".join(covering) if text[start:end].strip() else ""
        label = ", ".join(span.label for span in spans if span.end == end and span.label)
        parts.append(Part(text[start:end], classes, label))
    return parts


def mark_entities(words: Sequence[str], matches: Sequence[EntityMatch], labels: Sequence[str]) -> list[Part]:
    """Mark the entities of a sentence, with a label for each match."""
    starts, offset = [], 0
    for word in words:
        starts.append(offset)
        offset += len(word) + 1
    spans = []
    for match, label in zip(matches, labels, strict=True):
        sides = [(side, span) for side, span in (("g", match.true), ("p", match.predicted)) if span]
        last_side = max(sides, key=lambda pair: pair[1].end)[0]  # the label follows the whole match
        for side, span in sides:
            end = starts[span.end - 1] + len(words[span.end - 1])
            classes = f"{side} {side}-{slug(match.outcome)}"
            spans.append(CharSpan(starts[span.start], end, classes, label if side == last_side else ""))
    return mark_spans(" ".join(words), spans)


class WordDiff(NamedTuple):
    """The words of two texts in order, and their similarity: 2 * equal words / words of both."""

    parts: list[Part]
    similarity: float


def diff_words(predicted: str, true: str) -> WordDiff:
    """Compare two texts word by word: equal words are plain, words that only one text has are marked.

    >>> [(part.text, part.classes.split(" ")[-1]) for part in diff_words("a red cat", "a cat sat").parts]
    [('a ', ''), ('red', 'ins'), (' ', ''), ('cat ', ''), ('sat', 'del')]
    """
    (a, a_texts), (b, b_texts) = split_words(predicted), split_words(true)
    matcher = SequenceMatcher(None, a[:MAX_DIFF_WORDS], b[:MAX_DIFF_WORDS], autojunk=False)
    parts = []
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        if kind == "equal":
            texts = [max(pair, key=len) for pair in zip(a_texts[a0:a1], b_texts[b0:b1], strict=True)]
            parts.append(Part("".join(texts)))
        else:
            parts += mark_words("".join(b_texts[b0:b1]), "g g-missed del")
            parts += mark_words("".join(a_texts[a0:a1]), "p p-invented ins")
    parts += [Part(" …")] if max(len(a), len(b)) > MAX_DIFF_WORDS else []
    return WordDiff(parts, matcher.ratio())


def mark_words(text: str, classes: str) -> list[Part]:
    """Mark a text, but not the white space after it."""
    words = text.rstrip()
    return [part for part in (Part(words, classes), Part(text[len(words) :])) if part.text]


def split_words(text: str) -> tuple[list[str], list[str]]:
    """Return the words of a text, and each with the white space after it."""
    pairs = WORD_PATTERN.findall(text)
    return [word for word, _ in pairs], [word + space for word, space in pairs]


def shorten(parts: Iterable[Part], max_chars: int = MAX_PLAIN_CHARS) -> list[Part]:
    """Shorten long plain parts: the text next to a mark stays; without a mark, the beginning does.

    >>> [part.text for part in shorten([Part("abcdefgh"), Part("x", "p"), Part("ijklmnop")], 4)]
    ['… efgh', 'x', 'ijkl …']
    """
    parts = list(parts)
    last = len(parts) - 1
    return [
        part if part.classes or len(part.text) <= max_chars else part._replace(text=_cut(part.text, max_chars, i, last))
        for i, part in enumerate(parts)
    ]


def _cut(text: str, max_chars: int, index: int, last: int) -> str:
    """Cut the end of the last part, the beginning of the first, and the middle of any other, between words."""
    half = max_chars // 2
    head, tail = (max_chars, 0) if index == last else (0, max_chars) if index == 0 else (half, half)
    before, after = text[:head], text[len(text) - tail :]
    before = before.rsplit(" ", 1)[0] if head and text[head] != " " else before
    after = after.split(" ", 1)[-1] if tail and text[-tail - 1] != " " else after
    return " ".join(filter(None, (before, "…", after)))
