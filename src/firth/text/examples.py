"""How a row of a labelled file becomes an example, task by task."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from firth.console import count
from firth.errors import UserError
from firth.text.kinds import Example
from firth.text.records import value_in
from firth.text.row import Row, listed
from firth.text.squad import span_qa
from firth.text.words import find_word

ENTITIES = "entities of ReCoRD"  # a column that no file of a person has: where they stand, which are right
NO_CHOICE = -1  # the target where no choice is right


class TaskColumns(NamedTuple):
    """The columns that a task may read, and what it makes of a row; None leaves the row out."""

    roles: tuple[str, ...]
    example: Callable[[Row], Example | None]


def classify(row: Row) -> Example:
    return row.example((row.text("text"),), row.label("label"))


def pair(row: Row) -> Example:
    return row.example((row.text("text_a"), row.text("text_b")), row.label("label"))


def regress(row: Row) -> Example:
    texts = [row.text(row.first("text_a", "text"))]
    if row.has("text_b"):
        texts.append(row.text("text_b"))
    return row.example(tuple(texts), row.score(row.first("score", "label")))


def choice(row: Row) -> Example | None:
    """Of ReCoRD the right answer may be none of the entities.

    Then nothing can be learned from it; in what is scored on every choice is wrong, though the official scores compare
    words and may find some that are right.
    """
    choices = the_choices(row)
    entities = row.record.get(ENTITIES, {"spans": (), "right": ()})
    none_right = entities["right"] and "gold" not in row.record
    if none_right and row.part != "dev":
        row.leave_out("query", "without a right answer among the entities")
        return None
    if none_right:
        row.notes.add("query", "without a right answer among the entities, where every choice is wrong", row.place)
    gold = NO_CHOICE if none_right else row.index("gold")
    if not none_right and gold is not None and not 0 <= gold < len(choices):
        raise row.error("gold", f"is {gold}, but the {len(choices)} choices are counted from 0 to {len(choices) - 1}")
    return row.example(
        (row.text("context"), *choices), gold, spans=tuple(entities["spans"]), references=tuple(entities["right"])
    )


def the_choices(row: Row) -> tuple[str, ...]:
    """The list in the column `choices`; a table may have columns choice1, choice2 ... instead."""
    column = row.column("choices")
    numbered = re.compile(re.escape(column.removesuffix("s")) + r"\d+")
    if column in row.record:
        choices = row.texts("choices")
    else:
        cells = [cell for name, cell in row.record.items() if numbered.fullmatch(name)] or [row.value("choices")]
        choices = tuple(row.filled("choices", str(cell)) for cell in cells)
    if len(choices) < 2:
        raise row.error("choices", "has fewer than 2 choices")
    return choices


def tag(row: Row) -> Example:
    words = row.words("tokens")
    if not words or not all(word and not word.isspace() for word in words):
        raise row.error("tokens", "has an empty word" if words else "has no words")
    tags = None if row.lacks("tags") else row.words("tags")
    if tags is not None and len(tags) != len(words):
        raise UserError(
            f"{row.where}: {count(len(words), 'token')}, but {count(len(tags), 'tag')}. Each token needs one."
        )
    if tags is not None and not all(tags):
        raise row.error("tags", "has an empty tag")
    return row.example(words, tags, spans=(predicate(row, len(words)),) if row.has("predicate") else ())


def predicate(row: Row, length: int) -> tuple[int, int]:
    """The words of a predicate: [start, end], or the number of the only one, counted from 0."""
    if isinstance(listed(row.value("predicate")), list):
        return row.span("predicate", length, "words")
    start = row.index("predicate")
    assert start is not None, "an absent predicate is not asked for"
    return row.stretch("predicate", start, start + 1, length, "words")


def relation(row: Row) -> Example:
    """A text and two of its stretches, counted in characters, or in words where the row has `tokens`."""
    if row.has("text") or not row.has("tokens"):
        text = row.text("text")
        spans = [row.span(role, len(text), "characters") for role in ("head", "tail")]
    else:
        words = row.words("tokens")
        text = " ".join(words)
        spans = [in_characters(words, *row.span(role, len(words), "words")) for role in ("head", "tail")]
    return row.example((row.filled("text", text),), row.label("label"), spans=tuple(spans))


def in_characters(words: tuple[str, ...], start: int, end: int) -> tuple[int, int]:
    """Where words [start, end) stand in the words joined by spaces.

    >>> in_characters(("a", "bcd", "ef"), 1, 3)
    (2, 8)
    """
    before = sum(len(word) + 1 for word in words[:start])
    return before, before + len(" ".join(words[start:end]))


def text_to_text(row: Row) -> Example:
    """The target is the first of the references where it has no column of its own."""
    known = row.texts("references") if row.has("references") else ()
    if known and not row.has("target"):
        return row.example((row.text("source"),), known[0], references=known)
    target = None if row.lacks("target") else row.text("target")
    all_right = (target, *(text for text in known if text != target)) if known and target is not None else known
    return row.example((row.text("source"),), target, references=all_right)


def lm(row: Row) -> Example:
    form = row.first("messages", "prompt", "text")
    if form == "messages" and not row.named(form):
        value_in(row.record, "text", form, row.where, ", nor 'prompt' and 'response', nor 'text'")
    if form == "messages":
        return row.example(tuple(part for message in the_messages(row) for part in message))
    if form == "prompt":
        return row.example(("user", row.text("prompt"), "assistant", row.text("response")))
    return row.example(("text", row.text("text")))


def the_messages(row: Row) -> list[tuple[str, str]]:
    found = []
    for i, message in enumerate(row.items("messages"), 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise row.error("messages", f"has no text for the role and the content of message {i}")
        found.append((role, row.filled("messages", content)))
    if not found:
        raise row.error("messages", "has no messages")
    return found


def embed(row: Row) -> Example:
    scored = row.first("score", "label")
    score = row.score(scored) if row.has(scored) and row.value(scored) != "" else None
    return row.example((row.text("text_a"), row.text("text_b")), score)


def minimal_pairs(row: Row) -> Example:
    """BLiMP's own column names are known too."""
    group = row.first("group", "uid", "UID", "phenomenon", "term")
    good, bad = row.first("good", "sentence_good"), row.first("bad", "sentence_bad")
    return row.example((row.text(good), row.text(bad)), references=(row.text(group),) if row.has(group) else ())


def cloze(row: Row) -> Example:
    answer = None if row.lacks("answer") else row.text("answer")
    return row.example((row.text("context"),), answer)


def word_in_context(row: Row) -> Example | None:
    """The word's place in each text is given as characters, or found in any form that the word may have.

    Without the word nothing right can be learned. In what is scored on such a row stays, and counts: there all of the
    text stands for the word.
    """
    texts = row.text("text_a"), row.text("text_b")
    if row.has("span_a") or row.has("span_b"):
        spans = [
            row.span(role, len(text), "characters") for role, text in zip(("span_a", "span_b"), texts, strict=True)
        ]
    else:
        found = [find_word(row.text("word"), text) for text in texts]
        if None in found and row.part != "dev":
            row.leave_out("example", "without the word in both texts")
            return None
        if None in found:
            row.notes.add("example", "scored on, but without the word in both texts", row.place)
        spans = [span or (0, len(text)) for span, text in zip(found, texts, strict=True)]
    return row.example(texts, row.label("label"), spans=tuple(spans))


def word_similarity(row: Row) -> Example:
    return row.example((row.text("word1"), row.text("word2")), row.score("score"))


def analogy(row: Row) -> Example:
    section = (row.text("section"),) if row.has("section") else ()
    words = row.text("a"), row.text("b"), row.text("c")
    return row.example(words, None if row.lacks("d") else row.text("d"), references=section)


TASKS = {
    "classify": TaskColumns(("text", "label"), classify),
    "pair": TaskColumns(("text_a", "text_b", "label"), pair),
    "regress": TaskColumns(("text_a", "text", "text_b", "score", "label"), regress),
    "choice": TaskColumns(("context", "choices", "gold"), choice),
    "tag": TaskColumns(("tokens", "tags", "predicate"), tag),
    "relation": TaskColumns(("text", "tokens", "head", "tail", "label"), relation),
    "span-qa": TaskColumns(("question", "context", "answers", "is_impossible"), span_qa),
    "text-to-text": TaskColumns(("source", "target", "references"), text_to_text),
    "lm": TaskColumns(("messages", "prompt", "response", "text"), lm),
    "embed": TaskColumns(("text_a", "text_b", "score", "label"), embed),
    "minimal-pairs": TaskColumns(("good", "bad", "group"), minimal_pairs),
    "cloze": TaskColumns(("context", "answer"), cloze),
    "word-in-context": TaskColumns(("text_a", "text_b", "word", "span_a", "span_b", "label"), word_in_context),
    "word-similarity": TaskColumns(("word1", "word2", "score"), word_similarity),
    "analogy": TaskColumns(("section", "a", "b", "c", "d"), analogy),
}
