"""Many runs and two systems: mean and deviation, runs that did not learn, and whether a difference is chance."""

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

MIN_FINITE_SHARE = 0.5  # the share of the samples that must have a number, for anything to be said


class Comparison(NamedTuple):
    """Score of A minus score of B, the middle 95% of that difference over the samples, and how often chance does it.

    `num_samples` are those whose difference is a number. All but these and the difference is nan where nothing can be said.
    """

    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and the sample standard deviation (divided by n - 1); one value alone has deviation 0.

    Where a value is not a finite number, as the correlation of answers that are all the same, there is no deviation.

    >>> mean_and_std([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        raise UserError("There is nothing to average: no values. Give at least one.")
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return statistics.fmean(numbers), math.nan
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def failed_runs(values: Sequence[float], chance: float) -> list[int]:
    """Which runs did not learn: those that are no better than chance (Mosbach et al. 2021), or not a number.

    For accuracy, chance is `majority`; for a correlation or mcc, 0.

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
    """Draw the test set anew, with replacement, many times, and see how the difference of two systems varies.

    The p-value is that of Berg-Kirkpatrick et al. (2012), on both sides: how often a sample strays from the difference
    by at least as much as the difference itself. `score_fn(predictions, references)` gives either one number, and is
    then called for each sample (Koehn 2004); or, much faster, the `AdditiveScore` that it comes from. After so many `max_seconds` no
    more samples are drawn, and that is said.

    Samples whose difference is not a finite number, as where all answers drawn are the same and have no correlation,
    are left out; where that is more than half of them, or the difference itself is not finite, nothing can be said.
    """
    check_same_length(predictions_a, references)
    check_same_length(predictions_b, references)
    score_a, score_b = score_fn(predictions_a, references), score_fn(predictions_b, references)
    if isinstance(score_a, AdditiveScore):
        once_N = np.ones(len(references))
        difference = score_a.score_sample(once_N) - score_b.score_sample(once_N)

        def sampled(chosen: NDArray[np.int64]) -> float:
            times_N = np.bincount(chosen, minlength=len(references)).astype(np.float64)
            return float(score_a.score_sample(times_N) - score_b.score_sample(times_N))

    else:
        difference = float(score_a - score_b)

        def sampled(chosen: NDArray[np.int64]) -> float:
            return _resampled_difference(score_fn, predictions_a, predictions_b, references, chosen)

    drawn = _sample_differences(
        sampled, _bootstrap_indices(len(references), num_samples, seed), num_samples, max_seconds
    )
    known = drawn[np.isfinite(drawn)]
    if not math.isfinite(difference) or len(known) < MIN_FINITE_SHARE * len(drawn):
        return Comparison(difference, math.nan, math.nan, math.nan, len(known))
    low, high = np.quantile(known, [0.025, 0.975])
    return Comparison(difference, float(low), float(high), _p_value(known, difference), len(known))


def _sample_differences(
    difference_fn: Callable[[NDArray[np.int64]], float],
    draws: Iterator[NDArray[np.int64]],
    num_samples: int,
    max_seconds: float,
) -> NDArray[np.float64]:
    """The difference in each sample, until there is no time left."""
    end, found = time.monotonic() + max_seconds, []
    with progress("comparing both", "samples", num_samples) as shown:
        for chosen in draws:
            found.append(difference_fn(chosen))
            shown.advance()
            if time.monotonic() > end:
                break
    if len(found) < num_samples:
        say(
            f"the comparison took {format_duration(max_seconds)}: it is from {format_count(len(found), 'sample')}, not from {num_samples:,}."
        )
    return np.array(found)


def _resampled_difference(
    score_fn: Callable[[Any, Any], float],
    predictions_a: Sequence[Any],
    predictions_b: Sequence[Any],
    references: Sequence[Any],
    indices: NDArray[np.int64],
) -> float:
    """Score of A minus score of B on the chosen examples."""
    true = _select(references, indices)
    return score_fn(_select(predictions_a, indices), true) - score_fn(_select(predictions_b, indices), true)


def _bootstrap_indices(num_examples: int, num_samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """For each sample, which examples are in it."""
    rng = np.random.default_rng(seed)
    return (rng.integers(num_examples, size=num_examples) for _ in range(num_samples))


def _select(items: Sequence[Any], indices: NDArray[np.int64]) -> Any:
    """The chosen items, as a list, or as an array if they were one."""
    return items[indices] if isinstance(items, np.ndarray) else [items[i] for i in indices.tolist()]


def _p_value(sampled_differences: NDArray[np.float64], difference: float) -> float:
    """The observed sample counts as one of those that chance gave, so that it is never 0."""
    # A hair of slack: sums in another order must not decide whether equal means equal.
    strays = np.abs(sampled_differences - difference) >= abs(difference) * (1 - 1e-9)
    return float((1 + strays.sum()) / (1 + len(sampled_differences)))
