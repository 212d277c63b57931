"""Classification metrics, by hand and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics

from firth.errors import UserError
from firth.metrics import accuracy, confusion, macro_f1, mcc, summarise

TRUE = ["cat", "cat", "cat", "dog", "dog", "fox"]
PREDICTED = ["cat", "cat", "dog", "dog", "cat", "fox"]


def test_by_hand() -> None:
    assert accuracy(PREDICTED, TRUE) == pytest.approx(4 / 6)
    # cat: 2 of 3 found, 2 of 3 right -> 2/3; dog: 1 of 2 both ways -> 1/2; fox: 1.
    assert macro_f1(PREDICTED, TRUE) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert confusion(PREDICTED, TRUE).tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_rows_are_the_truth_and_columns_the_guess() -> None:
    assert confusion(["b", "b"], ["a", "b"], labels=["b", "a", "c"]).tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_mcc_by_hand() -> None:
    # tp 3, tn 2, fp 1, fn 1: (3*2 - 1*1) / sqrt(4 * 4 * 3 * 3) = 5/12
    assert mcc([1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 0, 0, 0]) == pytest.approx(5 / 12)
    assert mcc([0, 1], [0, 1]) == 1.0
    assert mcc([1, 0], [0, 1]) == -1.0


def test_always_the_same_answer_is_worth_nothing() -> None:
    true = ["yes"] * 9 + ["no"]
    assert accuracy(["yes"] * 10, true) == 0.9
    assert mcc(["yes"] * 10, true) == 0.0
    # yes: precision 0.9, recall 1 -> 18/19; no: never found -> 0, without a warning.
    assert macro_f1(["yes"] * 10, true) == pytest.approx(18 / 19 / 2)


def test_predictions_come_first() -> None:
    """A label that only the predictions have is a row of zeros, not a column."""
    assert confusion([0, 2], [0, 1]).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_as_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    assert accuracy(predicted, true) == pytest.approx(sklearn.metrics.accuracy_score(true, predicted))
    assert macro_f1(predicted, true) == pytest.approx(sklearn.metrics.f1_score(true, predicted, average="macro"))
    assert mcc(predicted, true) == pytest.approx(sklearn.metrics.matthews_corrcoef(true, predicted))
    assert np.array_equal(confusion(predicted, true), sklearn.metrics.confusion_matrix(true, predicted))


@pytest.mark.parametrize("metric", [accuracy, macro_f1, mcc, confusion])
def test_mistakes_are_named(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="2 predictions for 3 references"):
        metric([0, 1], [0, 1, 1])
    with pytest.raises(UserError, match="no predictions"):
        metric([], [])


def test_summarise_divides_by_n_minus_one() -> None:
    mean, std = summarise([0.8, 0.9, 0.85, 0.95])
    assert mean == pytest.approx(0.875)
    # distances .075, .025, .025, .075: squares sum to .0125, over 3
    assert std == pytest.approx(math.sqrt(0.0125 / 3))
    assert summarise([0.7]) == (0.7, 0.0)
    assert summarise(np.array([1.0, 3.0]).tolist()) == (2.0, pytest.approx(math.sqrt(2)))
    with pytest.raises(UserError, match="no values"):
        summarise([])
