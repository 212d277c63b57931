"""How often a class is right; all from 0 to 1, but `mcc`, which goes from -1 to 1.

scikit-learn takes a second to import, so the functions that need it import it themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.errors import UserError


def check_paired(predictions: Sized, references: Sized) -> None:
    """Every prediction has one reference, and there is at least one."""
    if len(predictions) != len(references):
        raise UserError(f"{len(predictions)} predictions for {len(references)} references. Give one for each.")
    if len(predictions) == 0:
        raise UserError("There is nothing to score: no predictions. Give at least one example.")


def _paired(predictions: ArrayLike, references: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as flat arrays of labels, checked."""
    predicted, true = np.asarray(predictions), np.asarray(references)
    assert predicted.ndim == true.ndim == 1, "labels come as flat lists"
    check_paired(predicted, true)
    return predicted, true


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """The share of labels that are right."""
    predicted, true = _paired(predictions, references)
    return float(np.mean(predicted == true))


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """F1 of each class, averaged, so that a rare class weighs as much as a common one.

    The classes are those that occur among the predictions or the references.
    """
    from sklearn.metrics import f1_score

    predicted, true = _paired(predictions, references)
    return float(f1_score(true, predicted, average="macro", zero_division=0.0))


def mcc(predictions: ArrayLike, references: ArrayLike) -> float:
    """Matthews' correlation: 1 is all right, 0 is no better than guessing, also when the classes are uneven."""
    from sklearn.metrics import matthews_corrcoef

    predicted, true = _paired(predictions, references)
    return float(matthews_corrcoef(true, predicted))


def confusion(predictions: ArrayLike, references: ArrayLike, labels: Sequence[Any] | None = None) -> NDArray[np.int64]:
    """Counts with a row for each true label and a column for each predicted one.

    Rows and columns follow `labels`; without it, every label that occurs, sorted.
    """
    from sklearn.metrics import confusion_matrix

    predicted, true = _paired(predictions, references)
    return np.asarray(confusion_matrix(true, predicted, labels=labels), dtype=np.int64)


def summarise(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and the sample standard deviation (divided by n - 1); one value alone has deviation 0.

    >>> summarise([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        raise UserError("There is nothing to average: no values. Give at least one.")
    numbers = [float(value) for value in values]
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0
