"""What a person's text becomes: documents to read, labelled examples to learn from."""

from __future__ import annotations

from typing import NamedTuple


class Document(NamedTuple):
    """A text and where it came from: `books/a.txt`, or `x.jsonl:12` for a document that starts at line 12.

    `word_starts` are the characters at which words begin, where the user has said so. `second` is the other side of
    a document that has two, as a sentence and its translation.
    """

    text: str
    source: str
    word_starts: tuple[int, ...] | None = None
    second: str | None = None

    @property
    def sides(self) -> tuple[str, ...]:
        """Its text, or both its texts."""
        return (self.text,) if self.second is None else (self.text, self.second)


class Example(NamedTuple):
    """What is read and what is asked. `texts` has one part, or two for a pair; `id` is the file's own or the line."""

    id: str | int
    texts: tuple[str, ...]
    target: str
