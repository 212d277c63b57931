"""What every evaluation gives: scores, predictions, and what a person should be told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from firth.tasks import Prediction


class Evaluation(NamedTuple):
    """`details` are what else is worth keeping: how it was measured, the scores of groups."""

    metrics: Mapping[str, float]
    predictions: Sequence[Prediction]
    details: Mapping[str, Any] = {}
    notices: Sequence[str] = ()
