"""Classification metrics, from 0 to 1, except `mcc`, which is from -1 to 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.core.errors import UserError


class ClassMetrics(NamedTuple):
    """Precision (correct / predicted), recall (correct / true), F1 and support of one class.

    F1 is the harmonic mean of precision and recall; support is the number of true examples. 0 / 0 is 0.
    """

    precision: float
    recall: float
    f1: float
    support: int

    @classmethod
    def from_counts(cls, num_correct: int, num_predicted: int, num_true: int) -> ClassMetrics:
        """Compute the metrics from counts.

        >>> ClassMetrics.from_counts(num_correct=1, num_predicted=4, num_true=2)
        ClassMetrics(precision=0.25, recall=0.5, f1=0.3333333333333333, support=2)
        """
        f1 = 2 * num_correct / (num_predicted + num_true) if num_predicted + num_true else 0.0
        return cls(
            num_correct / num_predicted if num_predicted else 0.0,
            num_correct / num_true if num_true else 0.0,
            f1,
            num_true,
        )


def check_same_length(predictions: Sized, references: Sized) -> None:
    """Raise a UserError unless there are as many predictions as references, and at least one."""
    if len(predictions) != len(references):
        raise UserError(f"{len(predictions)} predictions for {len(references)} references. Give one for each.")
    if len(predictions) == 0:
        raise UserError("No predictions to score. Give at least one example.")


def _as_label_arrays(predictions: ArrayLike, references: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return both as (N,) arrays of labels, after checking their lengths."""
    predicted, true = np.asarray(predictions), np.asarray(references)
    assert predicted.ndim == true.ndim == 1, "labels come as flat lists"
    check_same_length(predicted, true)
    return predicted, true


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return the share of correct labels."""
    return float(np.mean(correct_mask(predictions, references)))


def correct_mask(predictions: ArrayLike, references: ArrayLike) -> NDArray[np.bool_]:
    """(N,) whether each label is correct."""
    predicted, true = _as_label_arrays(predictions, references)
    return np.asarray(predicted == true)


def f1(predictions: ArrayLike, references: ArrayLike, positive_label: Any = None) -> float:
    """Return F1 of the class `positive_label`. Default: the last label in sorted order, "1" of "0" and "1"."""
    predicted, true = _as_label_arrays(predictions, references)
    if positive_label is None:
        positive_label = np.union1d(predicted, true)[-1]
    is_predicted, is_true = predicted == positive_label, true == positive_label
    num_correct = int((is_predicted & is_true).sum())
    return ClassMetrics.from_counts(num_correct, int(is_predicted.sum()), int(is_true.sum())).f1


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return the mean F1 over the classes that occur in predictions or references, each with the same weight."""
    return float(np.mean([row.f1 for row in per_class_metrics(predictions, references).values()]))


def micro_f1(predictions: ArrayLike, references: ArrayLike, exclude: Collection[Any] = ()) -> float:
    """Return F1 over the counts of all classes except `exclude`, the negative classes.

    Excluding "no_relation" gives TACRED's score (Zhang et al. 2017); excluding nothing gives accuracy.
    """
    predicted, true = _as_label_arrays(predictions, references)
    is_predicted, is_true = ~np.isin(predicted, [*exclude]), ~np.isin(true, [*exclude])
    num_correct = int(((predicted == true) & is_true).sum())
    return ClassMetrics.from_counts(num_correct, int(is_predicted.sum()), int(is_true.sum())).f1


def mcc(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return Matthews' correlation coefficient: 1 is perfect, 0 is chance, also for imbalanced classes.

    For any number of classes (Gorodkin 2004); 0 if all predictions, or all references, are equal.
    """
    return mcc_from_confusion(confusion_matrix(predictions, references).astype(np.float64))


def mcc_from_confusion(count_CC: NDArray[np.float64]) -> float:
    """Return `mcc` from a (C, C) confusion matrix."""
    true_C, predicted_C, total = count_CC.sum(1), count_CC.sum(0), count_CC.sum()
    variance = (total**2 - predicted_C @ predicted_C) * (total**2 - true_C @ true_C)
    return float((np.trace(count_CC) * total - true_C @ predicted_C) / np.sqrt(variance)) if variance else 0.0


def confusion_matrix(
    predictions: ArrayLike, references: ArrayLike, labels: Sequence[Any] | None = None
) -> NDArray[np.int64]:
    """(C, C) counts with a row for each true label and a column for each predicted one.

    Rows and columns follow `labels`; other labels are not counted. Default: every label that occurs, sorted.
    """
    predicted, true = _as_label_arrays(predictions, references)
    names = np.union1d(predicted, true).tolist() if labels is None else labels
    index = {name: i for i, name in enumerate(names)}
    count_CC = np.zeros((len(names), len(names)), dtype=np.int64)
    for (true_label, predicted_label), count in Counter(zip(true.tolist(), predicted.tolist(), strict=True)).items():
        if true_label in index and predicted_label in index:
            count_CC[index[true_label], index[predicted_label]] = count
    return count_CC


def per_class_metrics(predictions: ArrayLike, references: ArrayLike) -> dict[Any, ClassMetrics]:
    """Return the metrics of every label that occurs in predictions or references, sorted."""
    predicted, true = _as_label_arrays(predictions, references)
    count_CC = confusion_matrix(predicted, true)
    counts = zip(np.diag(count_CC).tolist(), count_CC.sum(0).tolist(), count_CC.sum(1).tolist(), strict=True)
    return {
        label: ClassMetrics.from_counts(*c)
        for label, c in zip(np.union1d(predicted, true).tolist(), counts, strict=True)
    }
