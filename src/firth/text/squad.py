"""Questions whose answers are stretches of a context, as SQuAD and its like write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.errors import UserError
from firth.text.kinds import Answer, Example
from firth.text.records import short
from firth.text.row import Row, listed


def squad_records(data: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """The questions of SQuAD's nested JSON, 1.1 or 2.0: articles, their paragraphs, the questions of each."""
    for i, article in enumerate(data, 1):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {"context": paragraph["context"], "title": article.get("title"), **question}
        except (KeyError, TypeError, AttributeError) as e:
            what = f"no {e}" if isinstance(e, KeyError) else "another form"
            raise UserError(f"{where}: article {i} is not as in SQuAD ({what}).") from None


def span_qa(row: Row) -> Example | None:
    """The answers are moved to their place where the file is wrong about it; () means that there is no answer.

    A question that has answers, but none that its context holds, is left out of what is learned from: nothing right
    can be learned, and it is not unanswerable. In what is scored on it stays, and counts.
    """
    question, context = row.text("question"), row.text("context")
    if row.has("is_impossible") and row.value("is_impossible") in (True, "true", "True"):
        return row.example((question, context), ())
    if not row.answers and not row.has("answers"):
        return row.example((question, context))
    said = the_answers(row)
    found = [answer for text, start in said if (answer := in_place(row, context, text, start)) is not None]
    if said and not found:
        row.leave_out("question", "without an answer in the context")
        return None
    return row.example((question, context), tuple(found))


def in_place(row: Row, context: str, text: str, start: int | None) -> Answer | None:
    """The answer where it stands, or at its nearest occurrence, or None if it has none."""
    if start is not None and context.startswith(text, max(start, 0)) and start >= 0:
        return Answer(text, start)
    text = text.strip()
    place = nearest_place(context, text, start or 0)
    if place is None and row.part == "dev":  # the official scorers compare words, wherever they stand
        row.notes.add("answer", "scored on, but not in the context", row.place)
        return Answer(text, -1)
    if place is None:
        row.notes.add("answer", "left out, as the context does not have the same words", row.place)
        return None
    if start is not None:
        row.notes.add("answer", "moved to where the context has the same words", row.place)
    return Answer(text, place)


def nearest_place(context: str, text: str, start: int) -> int | None:
    """The occurrence of a text that begins nearest to a place.

    >>> nearest_place("to be or not to be", "be", 12), nearest_place("to be", "bee", 0)
    (16, None)
    """
    before, after = context.rfind(text, 0, max(start, 0) + len(text)), context.find(text, max(start, 0))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=None)


def the_answers(row: Row) -> list[tuple[str, int | None]]:
    """Texts with their starts, however the file writes them; no start is None.

    As `[{"text", "start"}]`, SQuAD's `[{"text", "answer_start"}]`, `{"text": [...], "answer_start": [...]}`, or
    texts alone. A table has JSON, or one answer as it is; an empty cell is no answer.
    """
    value = listed(row.value("answers"))
    if isinstance(value, str):
        return [(value, None)] if value.strip() else []
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise row.error("answers", f"holds {short(value)}: text and answer_start must be lists of the same length")
        value = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise row.error("answers", f"holds {short(value)}, which is not a list of answers")
    return [one_answer(row, answer) for answer in value]


def one_answer(row: Row, answer: Any) -> tuple[str, int | None]:
    if isinstance(answer, str):
        return row.filled("answers", answer), None
    text = answer.get("text") if isinstance(answer, dict) else None
    start = answer.get("start", answer.get("answer_start")) if isinstance(answer, dict) else None
    if not isinstance(text, str) or not (start is None or type(start) is int):
        raise row.error("answers", f'holds {short(answer)}, which is not like {{"text": "in May", "start": 12}}')
    return row.filled("answers", text), start
