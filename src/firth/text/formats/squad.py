"""Questions whose answers are stretches of a context, as SQuAD and its like write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.text.documents import AnswerSpan, Example
from firth.text.labelled_row import LabelledRow, parse_json_list
from firth.text.records import preview_value


def flatten_squad_articles(articles: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """The questions of SQuAD's nested JSON, 1.1 or 2.0: articles, their paragraphs, the questions of each."""
    for i, article in enumerate(articles, 1):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {"context": paragraph["context"], "title": article.get("title"), **question}
        except (KeyError, TypeError, AttributeError) as e:
            what = f"no {e}" if isinstance(e, KeyError) else "another form"
            raise UserError(f"{where}: article {i} is not as in SQuAD ({what}).") from None


def parse_span_qa_row(row: LabelledRow) -> Example | None:
    """The answers are moved to their place where the file is wrong about it; () means that there is no answer.

    A question that has answers, but none that its context holds, is left out of what is learned from: nothing right
    can be learned, and it is not unanswerable. In what is scored on it stays, and counts.
    """
    question, context = row.text("question"), row.text("context")
    if row.has_value("is_impossible") and row.value("is_impossible") in (True, "true", "True"):
        return row.make_example((question, context), ())
    if not row.require_labels and not row.has_value("answers"):
        return row.make_example((question, context))
    said = parse_answers(row)
    found = [answer for text, start in said if (answer := locate_answer(row, context, text, start)) is not None]
    if said and not found:
        row.note_skipped("question", "without an answer in the context")
        return None
    return row.make_example((question, context), tuple(found))


def locate_answer(row: LabelledRow, context: str, text: str, start: int | None) -> AnswerSpan | None:
    """The answer where it stands, or at its nearest occurrence, or None if it has none."""
    if start is not None and context.startswith(text, max(start, 0)) and start >= 0:
        return AnswerSpan(text, start)
    text = text.strip()
    place = find_nearest_occurrence(context, text, start or 0)
    if place is None and row.split == "dev":  # the official scorers compare words, wherever they stand
        row.notes.add("answer", "scored on, but not in the context", row.location_in_file)
        return AnswerSpan(text, -1)
    if place is None:
        row.notes.add("answer", "left out, as the context does not have the same words", row.location_in_file)
        return None
    if start is not None:
        row.notes.add("answer", "moved to where the context has the same words", row.location_in_file)
    return AnswerSpan(text, place)


def find_nearest_occurrence(context: str, text: str, start: int) -> int | None:
    """The occurrence of a text that begins nearest to a place.

    >>> find_nearest_occurrence("to be or not to be", "be", 12), find_nearest_occurrence("to be", "bee", 0)
    (16, None)
    """
    before, after = context.rfind(text, 0, max(start, 0) + len(text)), context.find(text, max(start, 0))
    places = [place for place in (before, after) if place >= 0]
    return min(places, key=lambda place: abs(place - start), default=None)


def parse_answers(row: LabelledRow) -> list[tuple[str, int | None]]:
    """Texts with their starts, however the file writes them; no start is None.

    As `[{"text", "start"}]`, SQuAD's `[{"text", "answer_start"}]`, `{"text": [...], "answer_start": [...]}`, or
    texts alone. A table has JSON, or one answer as it is; an empty cell is no answer.
    """
    value = parse_json_list(row.value("answers"))
    if isinstance(value, str):
        return [(value, None)] if value.strip() else []
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start", value.get("start"))
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise row.column_error(
                "answers", f"holds {preview_value(value)}: text and answer_start must be lists of the same length"
            )
        value = [{"text": text, "start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(value, list):
        raise row.column_error("answers", f"holds {preview_value(value)}, which is not a list of answers")
    return [parse_answer(row, answer) for answer in value]


def parse_answer(row: LabelledRow, answer: Any) -> tuple[str, int | None]:
    if isinstance(answer, str):
        return row.require_nonempty("answers", answer), None
    text = answer.get("text") if isinstance(answer, dict) else None
    start = answer.get("start", answer.get("answer_start")) if isinstance(answer, dict) else None
    if not isinstance(text, str) or not (start is None or type(start) is int):
        raise row.column_error(
            "answers", f'holds {preview_value(answer)}, which is not like {{"text": "in May", "start": 12}}'
        )
    return row.require_nonempty("answers", text), start
