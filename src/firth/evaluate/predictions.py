"""Predictions that show themselves in a notebook: labels with bars, spans marked in the text, answers, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from firth.core.errors import shorten
from firth.core.html import HtmlPage
from firth.core.notebook import PARTS, Result, ResultList, add_bars, add_facts, add_long_table

MAX_INPUT_CHARS = 90  # characters of an input in a table
MAX_BARS = 8  # classes of one prediction that are shown


def describe_input(value: Any) -> str:
    """Return an input as one line of text.

    >>> describe_input("a b"), describe_input(["a", "b"]), describe_input({"text": "a", "label": None})
    ('a b', 'a | b', 'a')
    """
    if isinstance(value, Mapping):
        return " | ".join(describe_input(part) for part in value.values() if part is not None)
    return value if isinstance(value, str) else " | ".join(map(str, value))


def describe_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a prediction for a table: spans in one cell, vectors and long lists left out.

    >>> describe_fields({"spans": [{"type": "PER", "text": "Anna"}]})
    {'spans': 'Anna (PER)'}
    """
    fields = {}
    for name, value in record.items():
        if name == "spans":
            fields[name] = ", ".join(f"{span['text']} ({span['type']})" for span in value)
        elif name == "tags":
            fields[name] = " ".join(f"{word}/{tag}" for word, tag in zip(record["words"], value, strict=True))
        elif name not in ("probabilities", "words", "vector"):
            fields[name] = value
    return fields


class PredictionRecord(Result):
    """One prediction, with the fields of its task."""

    title = "Prediction"
    source: Any = None  # the input

    def __repr__(self) -> str:  # in one line, as a record of a list
        return dict.__repr__(self)

    def make_page(self) -> HtmlPage:
        text = "" if self.source is None else describe_input(self.source)
        page = HtmlPage(self.title)
        if spans := self.get("spans"):
            page.add_fragment(PARTS, "spans", split_at_spans(text, spans))
        elif text:
            page.add_paragraph(text)
        probabilities = self.get("probabilities")
        if isinstance(probabilities, Mapping):
            add_bars(page, list(probabilities.items())[:MAX_BARS])
        else:
            add_facts(page, describe_fields(self))
        return page


def split_at_spans(text: str, spans: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the parts of a text, each with the type of its span or "".

    >>> split_at_spans("Anna slept.", [{"type": "PER", "start": 0, "end": 4}])
    [('Anna', 'PER'), (' slept.', '')]
    """
    parts, last = [], 0
    for span in sorted(spans, key=lambda span: span["start"]):
        if last < span["start"]:
            parts.append((text[last : span["start"]], ""))
        parts.append((text[span["start"] : span["end"]], str(span["type"])))
        last = span["end"]
    return [*parts, (text[last:], "")] if last < len(text) else parts


class Predictions(ResultList[PredictionRecord]):
    """Predictions in the order of their inputs: a list of records, in a notebook a table."""

    sources: Sequence[Any] = ()  # the inputs

    def make_page(self) -> HtmlPage:
        page = HtmlPage("Predictions")
        fields = list(map(describe_fields, self))
        names = list(dict.fromkeys(name for record in fields for name in record))
        has_inputs = len(self.sources) == len(self)
        inputs: Iterable[Sequence[str]] = (
            [(shorten(describe_input(source), MAX_INPUT_CHARS),) for source in self.sources]
            if has_inputs
            else [()] * len(self)
        )
        rows = [(*own, *(record.get(name) for name in names)) for own, record in zip(inputs, fields, strict=True)]
        add_long_table(page, [*(["input"] if has_inputs else []), *names], rows)
        return page
