"""What a person's text becomes: documents to read, labelled examples to learn from."""

from __future__ import annotations

from typing import NamedTuple


class Document(NamedTuple):
    """A text and where it came from: `books/a.txt`, or `x.jsonl:12` for a document that starts at line 12."""

    text: str
    source: str


class Example(NamedTuple):
    """What is read and what is asked. `texts` has one part, or two for a pair; `id` is the file's own or the line."""

    id: str | int
    texts: tuple[str, ...]
    target: str
