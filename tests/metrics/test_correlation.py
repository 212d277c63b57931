"""Correlations, by hand and against scipy."""

from __future__ import annotations

import math
import warnings

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.metrics.correlation import pearson, spearman, word_similarity_correlation


def test_by_hand() -> None:
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)
    assert pearson([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)
    # Only the order matters to Spearman; 1 - 6 * (0 + 1 + 1) / (3 * 8) = 0.5.
    assert spearman([1, 20, 300], [1, 30, 2]) == pytest.approx(0.5)
    assert spearman([1, 2, 300], [-1, 0, 1]) == pytest.approx(1)
    assert pearson([1, 2, 300], [-1, 0, 1]) < 0.9


@pytest.mark.parametrize("metric", [pearson, spearman])
@pytest.mark.parametrize("predictions", [[2.0, 2.0, 2.0], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]])
def test_what_cannot_be_said_is_nan_without_a_warning(metric, predictions: list[float]) -> None:  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(metric(predictions, [1.0, 2.0, 3.0]))
        assert math.isnan(metric([1.0, 2.0, 3.0], predictions))
        assert math.isnan(metric([1.0], [1.0]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 9), st.floats(-5, 5, width=16)), min_size=3, max_size=30))
def test_as_scipy(pairs: list[tuple[int, float]]) -> None:
    predicted, true = map(list, zip(*pairs, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = scipy.stats.pearsonr(predicted, true)[0], scipy.stats.spearmanr(predicted, true)[0]
    assert (pearson(predicted, true), spearman(predicted, true)) == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_unknown_words_are_left_out_and_counted() -> None:
    assert word_similarity_correlation([0.1, None, 0.5, 0.3], [1, 9, 3, 2]) == (pytest.approx(1), 0.75)
    correlation, known = word_similarity_correlation([None, None], [1, 2])
    assert math.isnan(correlation)
    assert known == 0


@pytest.mark.parametrize("metric", [pearson, spearman, word_similarity_correlation])
def test_mistakes_are_named(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="2 predictions for 3 references"):
        metric([0, 1], [0, 1, 1])
    with pytest.raises(UserError, match="No predictions"):
        metric([], [])
