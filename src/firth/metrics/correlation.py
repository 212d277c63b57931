"""Correlations, from -1 to 1; NaN where undefined, as for a constant list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.metrics.classification import check_same_length


def pearson(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return Pearson's correlation coefficient: the strength of a linear relation."""
    from scipy.stats import pearsonr

    predicted, true = _as_float_arrays(predictions, references)
    return float(pearsonr(predicted, true).statistic) if _all_vary(predicted, true) else math.nan


def spearman(predictions: ArrayLike, references: ArrayLike) -> float:
    """Return Spearman's rank correlation: Pearson's correlation of the ranks, ties sharing their mean rank."""
    from scipy.stats import spearmanr

    predicted, true = _as_float_arrays(predictions, references)
    return float(spearmanr(predicted, true).statistic) if _all_vary(predicted, true) else math.nan


def word_similarity_correlation(
    predictions: Sequence[float | None], references: Sequence[float]
) -> tuple[float, float]:
    """Return Spearman's correlation over the word pairs in the vocabulary, and the share of these pairs.

    The prediction for a pair with an unknown word is None.
    """
    check_same_length(predictions, references)
    known = [(p, r) for p, r in zip(predictions, references, strict=True) if p is not None]
    share = len(known) / len(predictions)
    return (spearman(*zip(*known, strict=True)) if known else math.nan), share


def _as_float_arrays(predictions: ArrayLike, references: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both as (N,) float arrays, after checking their lengths."""
    predicted, true = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.float64)
    assert predicted.ndim == true.ndim == 1, "numbers come as flat lists"
    check_same_length(predicted, true)
    return predicted, true


def _all_vary(*lists: NDArray[np.float64]) -> bool:
    """Whether every list is finite and not constant."""
    return all(bool(np.isfinite(numbers).all()) and numbers.min() < numbers.max() for numbers in lists)
