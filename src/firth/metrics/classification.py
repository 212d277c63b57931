"""How often a class is right; all from 0 to 1, but `mcc`, which goes from -1 to 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.core.errors import UserError


class ClassMetrics(NamedTuple):
    """How well one class was found: the share of the guesses that is right, the share of the truth that was found.

    `f1` is their harmonic mean, `support` how often the class is true. What would be divided by 0 is 0.
    """

    precision: float
    recall: float
    f1: float
    support: int

    @classmethod
    def from_counts(cls, num_correct: int, num_predicted: int, num_true: int) -> ClassMetrics:
        """From counts.

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
    """Every prediction has one reference, and there is at least one."""
    if len(predictions) != len(references):
        raise UserError(f"{len(predictions)} predictions for {len(references)} references. Give one for each.")
    if len(predictions) == 0:
        raise UserError("There is nothing to score: no predictions. Give at least one example.")


def _as_label_arrays(predictions: ArrayLike, references: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both as flat arrays of labels, checked."""
    predicted, true = np.asarray(predictions), np.asarray(references)
    assert predicted.ndim == true.ndim == 1, "labels come as flat lists"
    check_same_length(predicted, true)
    return predicted, true


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """The share of labels that are right."""
    return float(np.mean(correct_mask(predictions, references)))


def correct_mask(predictions: ArrayLike, references: ArrayLike) -> NDArray[np.bool_]:
    """For each label, whether it is right."""
    predicted, true = _as_label_arrays(predictions, references)
    return np.asarray(predicted == true)


def majority_accuracy(references: ArrayLike) -> float:
    """The accuracy of always answering the commonest label: what a model must beat to have learned anything."""
    true = np.asarray(references)
    check_same_length(true, true)
    return float(np.unique(true, return_counts=True)[1].max() / len(true))


def f1(predictions: ArrayLike, references: ArrayLike, positive_label: Any = None) -> float:
    """F1 of one class, the `positive_label` one; without it, the last of all labels in sorted order: "1" of "0" and "1"."""
    predicted, true = _as_label_arrays(predictions, references)
    if positive_label is None:
        positive_label = np.union1d(predicted, true)[-1]
    guessed, wanted = predicted == positive_label, true == positive_label
    return ClassMetrics.from_counts(int((guessed & wanted).sum()), int(guessed.sum()), int(wanted.sum())).f1


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """F1 of each class, averaged, so that a rare class weighs as much as a common one.

    The classes are those that occur among the predictions or the references.
    """
    return float(np.mean([row.f1 for row in per_class_metrics(predictions, references).values()]))


def weighted_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """F1 of each class, averaged by how often the class is true."""
    rows = per_class_metrics(predictions, references).values()
    return float(np.average([row.f1 for row in rows], weights=[row.support for row in rows]))


def micro_f1(predictions: ArrayLike, references: ArrayLike, exclude: Collection[Any] = ()) -> float:
    """F1 of all decisions together, `exclude` the classes that mean "nothing here".

    With "no_relation" left out it is the score of TACRED (Zhang et al. 2017); with nothing left out, the accuracy.
    """
    predicted, true = _as_label_arrays(predictions, references)
    guessed, wanted = ~np.isin(predicted, [*exclude]), ~np.isin(true, [*exclude])
    return ClassMetrics.from_counts(int(((predicted == true) & wanted).sum()), int(guessed.sum()), int(wanted.sum())).f1


def mcc(predictions: ArrayLike, references: ArrayLike) -> float:
    """Matthews' correlation: 1 is all right, 0 is no better than guessing, also when the classes are uneven.

    For any number of classes (Gorodkin 2004); 0 if all predictions, or all references, are the same.
    """
    return mcc_from_confusion(confusion_matrix(predictions, references).astype(np.float64))


def mcc_from_confusion(count_CC: NDArray[np.float64]) -> float:
    """The same from the counts of `confusion_matrix`."""
    true_C, guessed_C, total = count_CC.sum(1), count_CC.sum(0), count_CC.sum()
    spread = (total**2 - guessed_C @ guessed_C) * (total**2 - true_C @ true_C)
    return float((np.trace(count_CC) * total - true_C @ guessed_C) / np.sqrt(spread)) if spread else 0.0


def confusion_matrix(
    predictions: ArrayLike, references: ArrayLike, labels: Sequence[Any] | None = None
) -> NDArray[np.int64]:
    """Counts with a row for each true label and a column for each predicted one.

    Rows and columns follow `labels`, and others are not counted; without it, every label that occurs, sorted.
    """
    predicted, true = _as_label_arrays(predictions, references)
    names = np.union1d(predicted, true).tolist() if labels is None else labels
    place = {name: i for i, name in enumerate(names)}
    count_CC = np.zeros((len(names), len(names)), dtype=np.int64)
    for (wanted, guessed), count in Counter(zip(true.tolist(), predicted.tolist(), strict=True)).items():
        if wanted in place and guessed in place:
            count_CC[place[wanted], place[guessed]] = count
    return count_CC


def per_class_metrics(predictions: ArrayLike, references: ArrayLike) -> dict[Any, ClassMetrics]:
    """A row for every label that occurs among the predictions or the references, sorted."""
    predicted, true = _as_label_arrays(predictions, references)
    count_CC = confusion_matrix(predicted, true)
    counts = zip(np.diag(count_CC).tolist(), count_CC.sum(0).tolist(), count_CC.sum(1).tolist(), strict=True)
    return {
        label: ClassMetrics.from_counts(*c)
        for label, c in zip(np.union1d(predicted, true).tolist(), counts, strict=True)
    }
