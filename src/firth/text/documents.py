"""The two kinds of input: documents for pretraining, labelled examples for tasks."""

from __future__ import annotations

from typing import Any, NamedTuple


class Document(NamedTuple):
    """A text and where it came from: `books/a.txt`, or `x.jsonl:12` for a document that starts at line 12.

    `word_starts` are the character offsets of words, if the input lists them. `text_pair` is the second text of a
    text pair, such as the translation of `text`.
    """

    text: str
    source: str
    word_starts: tuple[int, ...] | None = None
    text_pair: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The text, or both texts of a pair."""
        return (self.text,) if self.text_pair is None else (self.text, self.text_pair)

    @property
    def num_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


class AnswerSpan(NamedTuple):
    """A span of a context that answers a question: `context[start : start + len(text)] == text`."""

    text: str
    start: int


class Example(NamedTuple):
    """A labelled example: the input texts and the target. `id` is the id in the file, or the line number.

    | task            | texts                  | target                                  | spans, references           |
    |-----------------|------------------------|-----------------------------------------|-----------------------------|
    | classify        | text                   | label                                   |                             |
    | pair            | text_a, text_b         | label                                   |                             |
    | regress         | text_a, optional text_b| a float                                 |                             |
    | choice          | context, the choices   | index of the right choice, from 0       | references: see ReCoRD      |
    | tag             | the words              | a tag for each word, as a tuple         | the predicate, [word, word) |
    | relation        | text                   | label                                   | head, tail, in characters   |
    | span-qa         | question, context      | `AnswerSpan`s; () if unanswerable       |                             |
    | text-to-text    | source                 | text                                    | all right answers, if more  |
    | extract         | text                   | a JSON object, as text                  |                             |
    | lm              | role, text, role, text | None                                    |                             |
    | preference      | role, text, role, text | None; of one answer: whether it is good | chosen, rejected, or one    |
    | reward          | role, text, role, text | the margin, 0 without one; None         | chosen, rejected, or one    |
    | embed           | text_a, text_b         | a float, or None without scores         |                             |
    | minimal-pairs   | good, bad              | None                                    | the phenomenon              |
    | cloze           | context                | text                                    |                             |
    | word-in-context | text_a, text_b         | label                                   | the word in each text       |
    | word-similarity | word1, word2           | a float                                 |                             |
    | analogy         | a, b, c                | d                                       | the section                 |

    Every target of an unlabelled test set is None. The target of a ReCoRD query without a right choice is -1. Spans
    are [start, end).
    """

    id: str | int
    texts: tuple[str, ...]
    target: Any = None
    spans: tuple[tuple[int, int], ...] = ()
    references: tuple[str, ...] = ()
