"""The result of an evaluation: metrics, predictions and notices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from firth.tasks import Prediction


class Evaluation(NamedTuple):
    """`details` go to results.json (method, scores by group); `notices` are printed."""

    metrics: Mapping[str, float]
    predictions: Sequence[Prediction]
    details: Mapping[str, Any] = {}
    notices: Sequence[str] = ()
