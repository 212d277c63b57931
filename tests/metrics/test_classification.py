"""Classification metrics, by hand and against scikit-learn."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.metrics import ClassMetrics, accuracy, f1, per_class_metrics
from firth.metrics.classification import (
    confusion_matrix,
    correct_mask,
    macro_f1,
    mcc,
    micro_f1,
)

TRUE = ["cat", "cat", "cat", "dog", "dog", "fox"]
PREDICTED = ["cat", "cat", "dog", "dog", "cat", "fox"]


def test_by_hand() -> None:
    assert accuracy(PREDICTED, TRUE) == pytest.approx(4 / 6)
    # cat: 2 of 3 found, 2 of 3 right -> 2/3; dog: 1 of 2 both ways -> 1/2; fox: 1.
    assert macro_f1(PREDICTED, TRUE) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert confusion_matrix(PREDICTED, TRUE).tolist() == [[2, 1, 0], [1, 1, 0], [0, 0, 1]]


def test_rows_are_the_truth_and_columns_the_guess() -> None:
    assert confusion_matrix(["b", "b"], ["a", "b"], labels=["b", "a", "c"]).tolist() == [
        [1, 0, 0],
        [1, 0, 0],
        [0, 0, 0],
    ]


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
    assert confusion_matrix([0, 2], [0, 1]).tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_f1_of_the_positive_class() -> None:
    true, predicted = ["1", "1", "1", "0", "0"], ["1", "0", "1", "1", "0"]
    assert f1(predicted, true) == pytest.approx(2 / 3)  # two of three, both ways
    assert f1(predicted, true, positive_label="0") == pytest.approx(1 / 2)
    assert f1([0, 0], [0, 0], positive_label=1) == 0.0


def test_micro_f1_without_the_class_that_means_nothing() -> None:
    true = ["born", "no_relation", "no_relation", "works"]
    predicted = ["born", "no_relation", "works", "born"]
    # 3 relations were guessed, 2 are true, 1 is right: 2 * 1 / (3 + 2).
    assert micro_f1(predicted, true, exclude={"no_relation"}) == pytest.approx(2 / 5)
    assert micro_f1(predicted, true) == accuracy(predicted, true)
    assert micro_f1(["no_relation"], ["no_relation"], exclude={"no_relation"}) == 0.0


def test_table_by_hand() -> None:
    assert per_class_metrics(PREDICTED, TRUE) == {
        "cat": pytest.approx(ClassMetrics(2 / 3, 2 / 3, 2 / 3, 3)),
        "dog": ClassMetrics(0.5, 0.5, 0.5, 2),
        "fox": ClassMetrics(1.0, 1.0, 1.0, 1),
    }
    assert per_class_metrics(["b"], ["a"]) == {"a": ClassMetrics(0.0, 0.0, 0.0, 1), "b": ClassMetrics(0.0, 0.0, 0.0, 0)}


def test_correct_mask_by_hand() -> None:
    assert correct_mask(PREDICTED, TRUE).tolist() == [True, True, False, True, False, True]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcde")), min_size=1, max_size=40))
def test_as_scikit_learn(pairs: list[tuple[str, str]]) -> None:
    true, predicted = map(list, zip(*pairs, strict=True))
    learn = sklearn.metrics
    same = lambda value: pytest.approx(value, abs=1e-9)  # noqa: E731
    assert accuracy(predicted, true) == same(learn.accuracy_score(true, predicted))
    assert macro_f1(predicted, true) == same(learn.f1_score(true, predicted, average="macro", zero_division=0))
    assert micro_f1(predicted, true) == same(learn.f1_score(true, predicted, average="micro"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns where there is one label; we do not
        matthews, table_CC = learn.matthews_corrcoef(true, predicted), learn.confusion_matrix(true, predicted)
    assert mcc(predicted, true) == same(matthews)
    assert np.array_equal(confusion_matrix(predicted, true), table_CC)
    if "b" in true:  # scikit-learn wants one of the labels among the references
        some_CC = learn.confusion_matrix(true, predicted, labels=["c", "b"])
        assert np.array_equal(confusion_matrix(predicted, true, labels=["c", "b"]), some_CC)
    binary = [label == "a" for label in true], [label == "a" for label in predicted]
    assert f1(predicted, true, positive_label="a") == same(learn.f1_score(*binary, zero_division=0))
    some = learn.f1_score(true, predicted, labels=["b", "c", "d", "e"], average="micro", zero_division=0)
    assert micro_f1(predicted, true, exclude={"a"}) == same(some)
    table = learn.classification_report(true, predicted, output_dict=True, zero_division=0)
    for label, row in per_class_metrics(predicted, true).items():
        assert row == pytest.approx(tuple(table[label].values()), abs=1e-9)


@pytest.mark.parametrize("metric", [accuracy, f1, macro_f1, micro_f1, mcc, confusion_matrix, per_class_metrics])
def test_mistakes_are_named(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="2 predictions for 3 references"):
        metric([0, 1], [0, 1, 1])
    with pytest.raises(UserError, match="No predictions"):
        metric([], [])
