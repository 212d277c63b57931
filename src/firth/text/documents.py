"""What a person's text becomes: documents to read, labelled examples to learn from."""

from __future__ import annotations

from typing import Any, NamedTuple


class Document(NamedTuple):
    """A text and where it came from: `books/a.txt`, or `x.jsonl:12` for a document that starts at line 12.

    `find_word_starts` are the characters at which words begin, where the user has said so. `text_pair` is the other side of
    a document that has two, as a sentence and its translation.
    """

    text: str
    source: str
    word_starts: tuple[int, ...] | None = None
    text_pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Its text, or both its texts."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)


class AnswerSpan(NamedTuple):
    """A stretch of a context that answers a question: `context[start : start + len(text)] == text`."""

    text: str
    start: int


class Example(NamedTuple):
    """What is read and what is asked; `id` is the file's own or the line.

    | task            | texts                  | target                                  | spans, references           |
    |-----------------|------------------------|-----------------------------------------|-----------------------------|
    | classify        | text                   | label                                   |                             |
    | pair            | text_a, text_b         | label                                   |                             |
    | regress         | text_a and maybe text_b| a float                                 |                             |
    | choice          | context, the choices   | which is right, from 0                  | references: see ReCoRD      |
    | tag             | the words              | a tag for each word, as a tuple         | the predicate, [word, word) |
    | relation        | text                   | label                                   | head, tail, in characters   |
    | span-qa         | question, context      | a tuple of `AnswerSpan`; () if there is none|                             |
    | text-to-text    | source                 | text                                    | all that are right, if more |
    | lm              | role, text, role, text | None                                    |                             |
    | embed           | text_a, text_b         | a float where the file scores the pair  |                             |
    | minimal-pairs   | good, bad              | None                                    | the phenomenon              |
    | cloze           | context                | text                                    |                             |
    | word-in-context | text_a, text_b         | label                                   | the word in each text       |
    | word-similarity | word1, word2           | a float                                 |                             |
    | analogy         | a, b, c                | d                                       | the section                 |

    A test set that comes without answers has None for every target; where ReCoRD has no right choice, it is -1. Spans
    are [start, end).
    """

    id: str | int
    texts: tuple[str, ...]
    target: Any = None
    spans: tuple[tuple[int, int], ...] = ()
    references: tuple[str, ...] = ()
