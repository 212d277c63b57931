"""Read extractive question answering: questions whose answers are spans of a context, as in SQuAD."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firth.core.errors import UserError
from firth.text.documents import AnswerSpan, Example
from firth.text.labelled_row import LabelledRow, parse_json_list
from firth.text.records import preview_value


def flatten_squad_articles(articles: list[Any], where: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of SQuAD's nested JSON (1.1 or 2.0): articles, paragraphs, questions."""
    for i, article in enumerate(articles, 1):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {"context": paragraph["context"], "title": article.get("title"), **question}
        except (KeyError, TypeError, AttributeError) as e:
            reason = f"no {e}" if isinstance(e, KeyError) else "another form"
            raise UserError(f"{where}: article {i} is not in SQuAD's format ({reason}).") from None


def parse_span_qa_row(row: LabelledRow) -> Example | None:
    """Parse a question. A wrong `answer_start` is corrected; the target () means unanswerable.

    A question whose answers do not occur in the context is dropped from training, since it is not unanswerable. It
    stays in a dev set and counts.
    """
    question, context = row.text("question"), row.text("context")
    if row.has_value("is_impossible") and row.value("is_impossible") in (True, "true", "True"):
        return row.make_example((question, context), ())
    if not row.require_labels and not row.has_value("answers"):
        return row.make_example((question, context))
    answers = parse_answers(row)
    spans = [span for text, start in answers if (span := locate_answer(row, context, text, start)) is not None]
    if answers and not spans:
        row.note_skipped("question", "without an answer in the context")
        return None
    return row.make_example((question, context), tuple(spans))


def locate_answer(row: LabelledRow, context: str, text: str, start: int | None) -> AnswerSpan | None:
    """Return the answer at `start`, or its occurrence nearest to `start`, or None."""
    if start is not None and context.startswith(text, max(start, 0)) and start >= 0:
        return AnswerSpan(text, start)
    text = text.strip()
    offset = find_nearest_occurrence(context, text, start or 0)
    if offset is None and row.split == "dev":  # the official metrics compare the words alone
        row.notes.add("answer", "scored on, but not in the context", row.location_in_file)
        return AnswerSpan(text, -1)
    if offset is None:
        row.notes.add("answer", "left out, as the context does not have the same words", row.location_in_file)
        return None
    if start is not None:
        row.notes.add("answer", "moved to where the context has the same words", row.location_in_file)
    return AnswerSpan(text, offset)


def find_nearest_occurrence(context: str, text: str, start: int) -> int | None:
    """Return the offset of the occurrence of `text` that is nearest to `start`, or None.

    >>> find_nearest_occurrence("to be or not to be", "be", 12), find_nearest_occurrence("to be", "bee", 0)
    (16, None)
    """
    before, after = context.rfind(text, 0, max(start, 0) + len(text)), context.find(text, max(start, 0))
    offsets = [offset for offset in (before, after) if offset >= 0]
    return min(offsets, key=lambda offset: abs(offset - start), default=None)


def parse_answers(row: LabelledRow) -> list[tuple[str, int | None]]:
    """Return (text, start) of each answer; an unknown start is None.

    The formats are `[{"text", "start"}]`, SQuAD's `[{"text", "answer_start"}]`, `{"text": [...], "answer_start":
    [...]}`, and a list of texts. A cell of a table holds JSON or one answer; an empty cell means no answer.
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
