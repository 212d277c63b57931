"""Many runs and two systems: mean and deviation, runs that did not learn, and whether a difference is chance."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firth.console import count, duration, progress, say
from firth.errors import UserError
from firth.metrics.classification import check_paired
from firth.metrics.sums import Sums

ENOUGH = 0.5  # the share of the samples that must have a number, for anything to be said


class Comparison(NamedTuple):
    """Score of A minus score of B, the middle 95% of that difference over the samples, and how often chance does it.

    `samples` are those whose difference is a number. All but these and the difference is nan where nothing can be said.
    """

    difference: float
    low: float
    high: float
    p_value: float
    samples: int


def summarise(values: Sequence[float]) -> tuple[float, float]:
    """The mean over seeds and the sample standard deviation (divided by n - 1); one value alone has deviation 0.

    Where a value is not a finite number, as the correlation of answers that are all the same, there is no deviation.

    >>> summarise([1.0, 2.0, 3.0])
    (2.0, 1.0)
    """
    if not values:
        raise UserError("There is nothing to average: no values. Give at least one.")
    numbers = [float(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return statistics.fmean(numbers), math.nan
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def failed(values: Sequence[float], chance: float) -> list[int]:
    """Which runs did not learn: those that are no better than chance (Mosbach et al. 2021), or not a number.

    For accuracy, chance is `majority`; for a correlation or mcc, 0.

    >>> failed([0.91, 0.53, 0.9], chance=0.53)
    [1]
    """
    return [i for i, value in enumerate(values) if not value > chance]


def paired_bootstrap(
    score_fn: Callable[[Any, Any], Any],
    predictions_a: Sequence[Any],
    predictions_b: Sequence[Any],
    references: Sequence[Any],
    samples: int = 1000,
    seed: int = 0,
    seconds: float = math.inf,
) -> Comparison:
    """Draw the test set anew, with replacement, many times, and see how the difference of two systems varies.

    The p-value is that of Berg-Kirkpatrick et al. (2012), on both sides: how often a sample strays from the difference
    by at least as much as the difference itself. `score_fn(predictions, references)` gives either one number, and is
    then called for each sample (Koehn 2004); or, much faster, the `Sums` that it comes from. After so many `seconds` no
    more samples are drawn, and that is said.

    Samples whose difference is not a finite number, as where all answers drawn are the same and have no correlation,
    are left out; where that is more than half of them, or the difference itself is not finite, nothing can be said.
    """
    check_paired(predictions_a, references)
    check_paired(predictions_b, references)
    score_a, score_b = score_fn(predictions_a, references), score_fn(predictions_b, references)
    if isinstance(score_a, Sums):
        once_N = np.ones(len(references))
        difference = score_a.of(once_N) - score_b.of(once_N)

        def sampled(chosen: NDArray[np.int64]) -> float:
            times_N = np.bincount(chosen, minlength=len(references)).astype(np.float64)
            return float(score_a.of(times_N) - score_b.of(times_N))

    else:
        difference = float(score_a - score_b)

        def sampled(chosen: NDArray[np.int64]) -> float:
            return _difference(score_fn, predictions_a, predictions_b, references, chosen)

    drawn = _sampled(sampled, _draws(len(references), samples, seed), samples, seconds)
    known = drawn[np.isfinite(drawn)]
    if not math.isfinite(difference) or len(known) < ENOUGH * len(drawn):
        return Comparison(difference, math.nan, math.nan, math.nan, len(known))
    low, high = np.quantile(known, [0.025, 0.975])
    return Comparison(difference, float(low), float(high), _p_value(known, difference), len(known))


def _sampled(
    difference: Callable[[NDArray[np.int64]], float], draws: Iterator[NDArray[np.int64]], samples: int, seconds: float
) -> NDArray[np.float64]:
    """The difference in each sample, until there is no time left."""
    end, found = time.monotonic() + seconds, []
    with progress("comparing both", "samples", samples) as shown:
        for chosen in draws:
            found.append(difference(chosen))
            shown.advance()
            if time.monotonic() > end:
                break
    if len(found) < samples:
        say(f"the comparison took {duration(seconds)}: it is from {count(len(found), 'sample')}, not from {samples:,}.")
    return np.array(found)


def _difference(
    score_fn: Callable[[Any, Any], float],
    predictions_a: Sequence[Any],
    predictions_b: Sequence[Any],
    references: Sequence[Any],
    chosen: NDArray[np.int64],
) -> float:
    """Score of A minus score of B on the chosen examples."""
    true = _take(references, chosen)
    return score_fn(_take(predictions_a, chosen), true) - score_fn(_take(predictions_b, chosen), true)


def _draws(num_examples: int, samples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """For each sample, which examples are in it."""
    rng = np.random.default_rng(seed)
    return (rng.integers(num_examples, size=num_examples) for _ in range(samples))


def _take(items: Sequence[Any], chosen: NDArray[np.int64]) -> Any:
    """The chosen items, as a list, or as an array if they were one."""
    return items[chosen] if isinstance(items, np.ndarray) else [items[i] for i in chosen.tolist()]


def _p_value(drawn: NDArray[np.float64], difference: float) -> float:
    """The observed sample counts as one of those that chance gave, so that it is never 0."""
    # A hair of slack: sums in another order must not decide whether equal means equal.
    strays = np.abs(drawn - difference) >= abs(difference) * (1 - 1e-9)
    return float((1 + strays.sum()) / (1 + len(drawn)))
