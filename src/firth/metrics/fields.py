"""Metrics of extracted JSON objects: right fields among the predicted ones (precision) and the true ones (recall).

An object is a multiset of fields: a path and a value. The fields of {"name": "Ada", "born": {"year": 1815}, "tags":
["a", "b"]} are name = "Ada", born.year = 1815, tags = "a" and tags = "b". So the order of a list does not count. A
predicted field is right if the true object has the same path with an equal value. Text that is no JSON object has no
fields.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from firth.metrics.classification import check_same_length

Fields = Counter[tuple[str, str]]


class FieldCounts(NamedTuple):
    """Sums over examples: equal, predicted and true fields; whole objects that are equal; valid JSON; examples."""

    correct: float
    predicted: float
    true: float
    exact: float
    valid: float
    examples: float

    @property
    def precision(self) -> float:
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        return self.correct / self.true if self.true else 0.0

    @property
    def f1(self) -> float:
        return 2 * self.correct / (self.predicted + self.true) if self.predicted + self.true else 0.0


def parse_object(text: Any) -> dict[str, Any] | None:
    """Return the JSON object of a text; None for anything else."""
    if isinstance(text, str):
        try:
            text = json.loads(text)
        except (ValueError, RecursionError):
            return None
    return text if isinstance(text, dict) else None


def iter_fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each field. An empty list or object is a field too.

    >>> list(iter_fields({"a": {"b": 1.0}, "c": ["x", "y"]}))
    [('a.b', '1'), ('c', '"x"'), ('c', '"y"')]
    """
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from iter_fields(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for inner in value:
            yield from iter_fields(inner, path)
    elif path:
        is_whole = isinstance(value, float) and value.is_integer()
        yield path, json.dumps(int(value) if is_whole else value, ensure_ascii=False)


def fields_of(value: Mapping[str, Any], name: str) -> Fields:
    """Return the fields of a top-level field; none if it is absent."""
    return Fields(iter_fields({name: value[name]} if name in value else {}))


def count_fields(prediction: Any, reference: Any) -> FieldCounts:
    """Compare one predicted object with the true one; both are objects or JSON text."""
    predicted, true = parse_object(prediction), parse_object(reference)
    ours, theirs = Fields(iter_fields(predicted or {})), Fields(iter_fields(true or {}))
    correct, is_valid = (ours & theirs).total(), predicted is not None
    return FieldCounts(correct, ours.total(), theirs.total(), is_valid and ours == theirs, is_valid, 1)


def field_scores(predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Return F1, precision and recall over all fields, the share of exact objects and of valid JSON.

    `match.NAME` is the share of examples whose top-level field NAME is exactly right: it has the same fields, or is
    absent in both.
    """
    check_same_length(predictions, references)
    sums = FieldCounts(*map(sum, zip(*map(count_fields, predictions, references), strict=True)))
    scores = {
        "field_f1": sums.f1,
        "field_precision": sums.precision,
        "field_recall": sums.recall,
        "exact_match": sums.exact / sums.examples,
        "valid": sums.valid / sums.examples,
    }
    pairs = [(parse_object(p), parse_object(r) or {}) for p, r in zip(predictions, references, strict=True)]
    for name in dict.fromkeys(name for _, true in pairs for name in true):
        hits = [p is not None and fields_of(p, name) == fields_of(true, name) for p, true in pairs]
        scores[f"match.{name}"] = sum(hits) / len(hits)
    return scores
