"""A chart of transfer: the scores after fine-tuning, for each start of the weights, with every seed as a dot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from firth.core.chart import Axis, Chart, Reference, Row, row_chart


class ArmScore(NamedTuple):
    """The scores of one model after fine-tuning on `num_labels` examples (0: not stated), one of each seed."""

    model: str
    start: str  # of the weights
    num_labels: int
    seeds: Sequence[float]


def arm_chart(scores: Iterable[ArmScore], chance: float | None = None, name: str = "accuracy (%)") -> Chart:
    """Draw a bar for each start of the weights: the mean over seeds, and a dot for each seed.

    Each model and number of labels is a group of bars. A dashed line shows the score of `chance`.
    """
    scores = list(scores)
    starts = list(dict.fromkeys(score.start for score in scores))
    has_models = len({score.model for score in scores}) > 1
    rows = [
        Row(
            score.start,
            fmean(score.seeds),
            score.seeds,
            colour=starts.index(score.start),
            group=f"{score.model}, " * has_models + f"{score.num_labels:,} labels" * (score.num_labels > 0),
        )
        for score in sorted(scores, key=lambda score: group_order(scores, score))
    ]
    axis = Axis(name, format=format_accuracy)
    references = [] if chance is None else [Reference("guessing", chance)]
    return row_chart(rows, axis, references, columns=("weights at the start", "mean", "seeds"))


def group_order(scores: Sequence[ArmScore], score: ArmScore) -> int:
    """The position of the first score of the same model and number of labels."""
    groups = [(one.model, one.num_labels) for one in scores]
    return groups.index((score.model, score.num_labels))


def format_accuracy(value: float) -> str:
    return f"{value:.1f}"
