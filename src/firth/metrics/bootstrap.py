"""Statistics over runs and between two systems: mean and deviation, failed runs, and the paired bootstrap test.

The paired bootstrap (Koehn 2004) asks whether system A beats system B beyond the chance of the test set. It draws test
sets of the same size with replacement and computes the difference of both systems on each. The middle 95% of these
differences is a confidence interval. Pairing matters: both systems are scored on the same draw, so that the difficulty
of its examples cancels out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firth.core.console import format_count, format_duration, progress, say
from firth.core.errors import UserError
from firth.metrics.additive import AdditiveScore
from firth.metrics.classification import check_same_length

MIN_FINITE_SHARE = 0.5  # of the samples; below it, interval and p-value are NaN


class Comparison(NamedTuple):
    """Score of A minus score of B, its 95% interval over the samples, and the two-sided p-value.

    `samples` counts the samples with a finite difference. `low`, `high` and `p_value` are NaN if there are too few.
    """

    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the sample standard deviation (divided by n - 1); a single value has deviation 0.

    The deviation is NaN if a value is not finite, such as the correlation of constant predictions.

    >>> mean_and_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        raise UserError("No values to average. Give at least one.")
    floats = [float(value) for value in values]
    if not all(map(math.isfinite, floats)):
        return statistics.fmean(floats), math.nan
    return statistics.fmean(floats), statistics.stdev(floats) if len(floats) > 1 else 0.0


def failed_runs(values: Sequence[float], chance: float) -> list[int]:
    """Return the indices of failed runs: scores that do not exceed chance (Mosbach et al. 2021) or are NaN.

    Chance is `majority_accuracy` for accuracy, and 0 for a correlation or MCC.

    >>> failed_runs([0.91, 0.53, 0.9], chance=0.53)
    [1]
    """
    return [i for i, value in enumerate(values) if not value > chance]


def paired_bootstrap(
    score_fn: Callable[[Any, Any], Any],
    predictions_a: Sequence[Any],
    predictions_b: Sequence[Any],
    references: Sequence[Any],
    num_samples: int = 1000,
    seed: int = 0,
    max_seconds: float = math.inf,
) -> Comparison:
    """Compare two systems on the same test set by the paired bootstrap.

    The two-sided p-value follows Berg-Kirkpatrick et al. (2012, section 2): the share of samples whose difference
    deviates from the observed difference by at least the observed difference. `score_fn(predictions, references)`
    returns a number and is called for each sample, or returns an `AdditiveScore`, which is much faster. Sampling stops
    after `max_seconds`, with a message.

    Samples with a NaN difference, such as the correlation of equal answers, are ignored. If they are more than half, or
    the observed difference is not finite, the interval and the p-value are NaN.
    """
    check_same_length(predictions_a, references)
    check_same_length(predictions_b, references)
    score_a, score_b = score_fn(predictions_a, references), score_fn(predictions_b, references)
    if isinstance(score_a, AdditiveScore):
        ones_N = np.ones(len(references))
        difference = score_a.score_sample(ones_N) - score_b.score_sample(ones_N)

        def sample_difference(indices: NDArray[np.int64]) -> float:
            count_N = np.bincount(indices, minlength=len(references)).astype(np.float64)
            return float(score_a.score_sample(count_N) - score_b.score_sample(count_N))

    else:
        difference = float(score_a - score_b)

        def sample_difference(indices: NDArray[np.int64]) -> float:
            sampled_a, sampled_b, sampled_references = (
                _select(items, indices) for items in (predictions_a, predictions_b, references)
            )
            return float(score_fn(sampled_a, sampled_references) - score_fn(sampled_b, sampled_references))

    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(references), size=len(references)) for _ in range(num_samples))
    differences = _sample_differences(sample_difference, draws, num_samples, max_seconds)
    finite = differences[np.isfinite(differences)]
    if not math.isfinite(difference) or len(finite) < MIN_FINITE_SHARE * len(differences):
        return Comparison(difference, math.nan, math.nan, math.nan, len(finite))
    low, high = np.quantile(finite, [0.025, 0.975])
    return Comparison(difference, float(low), float(high), _p_value(finite, difference), len(finite))


def _sample_differences(
    difference_fn: Callable[[NDArray[np.int64]], float],
    draws: Iterator[NDArray[np.int64]],
    num_samples: int,
    max_seconds: float,
) -> NDArray[np.float64]:
    """Return the difference in each sample; stop after `max_seconds`."""
    deadline, differences = time.monotonic() + max_seconds, []
    with progress("comparing both", "samples", num_samples) as p:
        for indices in draws:
            differences.append(difference_fn(indices))
            p.advance()
            if time.monotonic() > deadline:
                break
    if len(differences) < num_samples:
        count = format_count(len(differences), "sample")
        say(f"the comparison took {format_duration(max_seconds)}: it is from {count}, not from {num_samples:,}.")
    return np.array(differences)


def _select(items: Sequence[Any], indices: NDArray[np.int64]) -> Any:
    """Return the items at `indices`, as an array if `items` is one, otherwise as a list."""
    return items[indices] if isinstance(items, np.ndarray) else [items[i] for i in indices.tolist()]


def _p_value(sampled_differences: NDArray[np.float64], difference: float) -> float:
    """Return the p-value; the observed test set counts as one more sample, so that it is never 0."""
    # The tolerance absorbs rounding: sums in another order must not decide a tie.
    extreme = np.abs(sampled_differences - difference) >= abs(difference) * (1 - 1e-9)
    return float((1 + extreme.sum()) / (1 + len(sampled_differences)))
