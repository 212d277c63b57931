"""Statistics over runs and between two systems: mean and deviation, failed runs, and two tests of a difference.

The paired bootstrap (Koehn 2004) asks whether system A beats system B beyond the chance of the test set. It draws test
sets of the same size with replacement and computes the difference of both systems on each. The middle 95% of these
differences is a confidence interval. Pairing matters: both systems are scored on the same draw, so that the difficulty
of its examples cancels out.

It takes the trained models as given. Other seeds give other models, and a difference between two methods must hold for
them too (Dror et al. 2019, "Deep Dominance"). `compare_seeds` counts both: its variance is that of the seeds' scores
plus what resampling the examples adds to all seeds alike. Few seeds tell their variance badly, so its quantiles are
those of Student's t with the degrees of freedom of Welch and Satterthwaite.
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
MIN_SEEDS = 3  # of each arm; with fewer, the variance between seeds is not judged


class Comparison(NamedTuple):
    """Score of A minus score of B, its 95% interval and the two-sided p-value; of several seeds the mean scores.

    `samples` counts the samples with a finite difference. `low`, `high` and `p_value` are NaN if there are too few.
    `over` says what may vary: seeds and examples, or the examples alone where an arm has fewer than `MIN_SEEDS` seeds.
    `seed_error` and `example_error` are the standard errors of both parts; NaN if unknown.
    """

    difference: float
    low: float
    high: float
    p_value: float
    samples: int
    over: str
    degrees_of_freedom: float
    seed_error: float
    example_error: float


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

    Chance is the share of the most frequent label for accuracy, and 0 for a correlation or MCC.

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
    runs = [predictions_a, predictions_b]
    score_S, sampled_RS = bootstrap_scores(score_fn, runs, references, num_samples, seed, max_seconds)
    return compare_seeds(score_S[:1], score_S[1:], sampled_RS[:, :1], sampled_RS[:, 1:], len(references))


def bootstrap_scores(
    score_fn: Callable[[Any, Any], Any],
    runs: Sequence[Sequence[Any]],
    references: Sequence[Any],
    num_samples: int = 1000,
    seed: int = 0,
    max_seconds: float = math.inf,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the scores of S runs (S,), and their scores in R resampled test sets (R, S), the same for all runs."""
    for predictions in runs:
        check_same_length(predictions, references)
    scores = [score_fn(predictions, references) for predictions in runs]
    if isinstance(scores[0], AdditiveScore):
        ones_N = np.ones(len(references))
        observed = [score.score_sample(ones_N) for score in scores]

        def score_sample(indices: NDArray[np.int64]) -> list[float]:
            count_N = np.bincount(indices, minlength=len(references)).astype(np.float64)
            return [score.score_sample(count_N) for score in scores]

    else:
        observed = scores

        def score_sample(indices: NDArray[np.int64]) -> list[float]:
            sampled_references = _select(references, indices)
            return [score_fn(_select(predictions, indices), sampled_references) for predictions in runs]

    rng = np.random.default_rng(seed)
    draws = (rng.integers(len(references), size=len(references)) for _ in range(num_samples))
    return np.array(observed, dtype=np.float64), _score_samples(score_sample, draws, num_samples, max_seconds)


def compare_seeds(
    scores_a: NDArray[np.float64],
    scores_b: NDArray[np.float64],
    sampled_a: NDArray[np.float64],
    sampled_b: NDArray[np.float64],
    num_examples: int,
    paired: bool = False,
) -> Comparison:
    """Compare two arms of several seeds: their scores (seeds,), and those in resampled test sets (R, seeds).

    The score of seed i varies with the seed, with the examples in a way that all seeds share, and with both at once (on
    which examples this seed is lucky). The variance over the seeds, s^2 / n, has the first and the last part. The
    variance over resampled examples has the second and the last one, and `own` is that last one: the variance of the
    seeds around their mean. So the sum of both minus `own` counts each part once. Without `paired` the arms' seeds are
    independent (Welch's t-test); with it, seed i of both has the same training examples.
    """
    from scipy.special import stdtr, stdtrit  # Student's t: distribution function and its inverse

    with np.errstate(invalid="ignore"):  # infinite scores
        difference, samples = float(scores_a.mean() - scores_b.mean()), len(sampled_a)
    finite_R = np.isfinite(sampled_a).all(1) & np.isfinite(sampled_b).all(1)
    sampled_a, sampled_b = sampled_a[finite_R], sampled_b[finite_R]
    over = "seeds and examples" if min(len(scores_a), len(scores_b)) >= MIN_SEEDS else "examples"
    unknown = Comparison(difference, *(math.nan,) * 3, len(sampled_a), over, *(math.nan,) * 3)
    if not math.isfinite(difference) or len(sampled_a) < max(MIN_FINITE_SHARE * samples, 2):
        return unknown
    differences_R = sampled_a.mean(1) - sampled_b.mean(1)
    example_variance = float(differences_R.var(ddof=1))
    if over == "examples":
        low, high = np.quantile(differences_R, [0.025, 0.975]).tolist()
        p_value = _p_value(differences_R, difference)
        return unknown._replace(low=low, high=high, p_value=p_value, example_error=math.sqrt(example_variance))
    arms = [(scores_a, sampled_a), (scores_b, sampled_b)]
    if paired:
        arms = [(scores_a - scores_b, sampled_a - sampled_b)]
    seed_variances = [float(scores.var(ddof=1)) / len(scores) for scores, _ in arms]
    own = sum(_variance_around_mean(sampled_RS) / sampled_RS.shape[1] for _, sampled_RS in arms)
    shared = max(example_variance - own, 0.0)
    variance = sum(seed_variances) + shared
    if variance == 0:  # every seed and every sample gives this difference
        return unknown._replace(
            low=difference, high=difference, p_value=float(difference == 0), seed_error=0.0, example_error=0.0
        )
    uncertainty = shared**2 / max(num_examples - 1, 1)
    uncertainty += sum(v**2 / (len(scores) - 1) for v, (scores, _) in zip(seed_variances, arms, strict=True))
    freedom, error = variance**2 / uncertainty, math.sqrt(variance)
    half_width = error * float(stdtrit(freedom, 0.975))
    return unknown._replace(
        low=difference - half_width,
        high=difference + half_width,
        p_value=2 * float(stdtr(freedom, -abs(difference) / error)),
        degrees_of_freedom=freedom,
        seed_error=math.sqrt(sum(seed_variances)),
        example_error=math.sqrt(shared),
    )


def _variance_around_mean(sampled_RS: NDArray[np.float64]) -> float:
    """Return the variance over the samples of one seed's score around the mean of the seeds (unbiased)."""
    around_RS = sampled_RS - sampled_RS.mean(1, keepdims=True)
    return float(around_RS.var(axis=0, ddof=1).sum()) / (sampled_RS.shape[1] - 1)


def _score_samples(
    score_fn: Callable[[NDArray[np.int64]], list[float]],
    draws: Iterator[NDArray[np.int64]],
    num_samples: int,
    max_seconds: float,
) -> NDArray[np.float64]:
    """Return the scores in each sample (R, S); stop after `max_seconds`."""
    deadline, scores = time.monotonic() + max_seconds, []
    with progress("comparing both", "samples", num_samples) as p:
        for indices in draws:
            scores.append(score_fn(indices))
            p.advance()
            if time.monotonic() > deadline:
                break
    if len(scores) < num_samples:
        count = format_count(len(scores), "sample")
        say(f"the comparison took {format_duration(max_seconds)}: it is from {count}, not from {num_samples:,}.")
    return np.array(scores, dtype=np.float64)


def _select(items: Sequence[Any], indices: NDArray[np.int64]) -> Any:
    """Return the items at `indices`, as an array if `items` is one, otherwise as a list."""
    return items[indices] if isinstance(items, np.ndarray) else [items[i] for i in indices.tolist()]


def _p_value(sampled_differences: NDArray[np.float64], difference: float) -> float:
    """Return the p-value; the observed test set counts as one more sample, so that it is never 0."""
    # The tolerance absorbs rounding: sums in another order must not decide a tie.
    extreme = np.abs(sampled_differences - difference) >= abs(difference) * (1 - 1e-9)
    return float((1 + extreme.sum()) / (1 + len(sampled_differences)))
