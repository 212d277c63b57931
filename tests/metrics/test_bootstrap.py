"""Seeds, failed runs and the paired bootstrap, by hand and against its own definition."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from firth.core.errors import UserError
from firth.metrics import accuracy, compare_seeds, failed_runs, make_additive_score, mean_and_std
from firth.metrics.bootstrap import Comparison, paired_bootstrap
from firth.metrics.text import bleu


def test_summarise_divides_by_n_minus_one() -> None:
    mean, std = mean_and_std([0.8, 0.9, 0.85, 0.95])
    assert mean == pytest.approx(0.875)
    # distances .075, .025, .025, .075: squares sum to .0125, over 3
    assert std == pytest.approx(math.sqrt(0.0125 / 3))
    assert mean_and_std([0.7]) == (0.7, 0.0)
    assert np.isnan(mean_and_std([0.7, math.nan])).all()
    assert mean_and_std(np.array([1.0, 3.0]).tolist()) == (2.0, pytest.approx(math.sqrt(2)))
    with pytest.raises(UserError, match="No values"):
        mean_and_std([])


def test_a_run_at_chance_failed() -> None:
    assert failed_runs([0.5, 0.501, 0.49, math.nan, 0.9], chance=0.5) == [0, 2, 3]


def example(num: int, right_a: float, right_b: float) -> tuple[list[int], list[int], list[int]]:
    """Two systems with these accuracies, right on different examples."""
    rng = np.random.default_rng(1)
    true = rng.integers(0, 5, num)
    a, b = (np.where(rng.random(num) < right, true, (true + 1) % 5) for right in (right_a, right_b))
    return a.tolist(), b.tolist(), true.tolist()


by_sums = partial(make_additive_score, "classify", "accuracy")


def test_both_ways_give_the_same() -> None:
    a, b, true = example(60, 0.8, 0.7)
    slow = paired_bootstrap(accuracy, a, b, true, num_samples=200)
    fast = paired_bootstrap(by_sums, a, b, true, num_samples=200)
    assert slow[:5] == pytest.approx(fast[:5], abs=1e-12)
    assert slow[:5] == paired_bootstrap(accuracy, np.array(a), np.array(b), np.array(true), num_samples=200)[:5]
    assert fast.difference == pytest.approx(accuracy(a, true) - accuracy(b, true))
    assert fast != paired_bootstrap(by_sums, a, b, true, num_samples=200, seed=1)


def test_a_clear_difference_and_none() -> None:
    a, b, true = example(400, 0.9, 0.6)
    clear = paired_bootstrap(by_sums, a, b, true)
    assert clear.p_value == 1 / 1001  # the smallest that 1000 samples can tell
    assert 0 < clear.low < clear.difference < clear.high
    back = paired_bootstrap(by_sums, b, a, true)
    assert back[:5] == pytest.approx((-clear.difference, -clear.high, -clear.low, clear.p_value, 1000))
    assert paired_bootstrap(by_sums, a, a, true)[:5] == (0, 0, 0, 1, 1000)


def test_p_value_by_hand() -> None:
    """One example in two differs: half of the samples of two draw it once, and are as far as expected.

    Drawn 0, 1 or 2 times (1/4, 1/2, 1/4) the difference is 0, 1/2 or 1; the true one is 1/2, so half stray by 1/2.
    """
    result = paired_bootstrap(by_sums, [1, 1], [1, 0], [1, 1], num_samples=4000)
    assert result[:3] == (0.5, 0, 1)
    assert result.p_value == pytest.approx(0.5, abs=0.03)


def test_as_the_normal_law() -> None:
    """Of many examples the mean is nearly normal: interval and p-value are those of a z-test."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.1, 1, 500), rng.normal(0, 1, 500)
    result = paired_bootstrap(lambda predictions, _: float(np.mean(predictions)), a, b, a, num_samples=4000)
    error = np.std(a - b) / math.sqrt(500)
    assert (result.high - result.low) / 2 == pytest.approx(1.96 * error, rel=0.05)
    assert result.p_value == pytest.approx(math.erfc(abs(result.difference) / error / math.sqrt(2)), abs=0.03)


def test_scores_of_the_whole_corpus() -> None:
    true = ["the cat sat on the mat today", "a dog barked at night very loudly", "it rains in the old town again"]
    result = paired_bootstrap(bleu, true, ["the cat sat on a mat", "a dog", "rain in town"], true, num_samples=10)
    assert result.difference == pytest.approx(100 - bleu(["the cat sat on a mat", "a dog", "rain in town"], true))
    assert 0 < result.low <= result.high


def test_samples_without_a_number_are_left_out() -> None:
    """Of three examples one is sure to be drawn in 19 of 27 samples; in the others the score is NaN."""

    def only_with_the_first(predictions: list[int], references: list[int]) -> float:
        return accuracy(predictions, references) if 0 in references else math.nan

    found = paired_bootstrap(only_with_the_first, [0, 1, 2], [0, 1, 0], [0, 1, 2], num_samples=2000)
    assert found.samples == pytest.approx(2000 * 19 / 27, rel=0.05)
    assert found.difference == pytest.approx(1 / 3)
    assert np.isfinite(found[:5]).all()


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_what_is_no_number_cannot_be_compared(unknown: float) -> None:
    a, b, true = [1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]
    found = paired_bootstrap(lambda predictions, _: unknown if predictions[0] == 1 else 1.0, a, b, true, num_samples=50)
    assert np.isnan(found[1:4]).all()
    assert not math.isfinite(found.difference)
    rare = paired_bootstrap(
        lambda _, references: 1.0 if references == true else math.nan, a, b, true, num_samples=50
    )  # drawn in this order: 1 of 27
    assert rare.difference == 0
    assert rare.samples < 25
    assert math.isnan(rare.p_value)


def test_a_slow_score_has_fewer_samples_and_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = paired_bootstrap(accuracy, [1, 0], [1, 1], [1, 1], max_seconds=0.0)
    assert found.samples == 1
    assert "it is from 1 sample, not from 1,000" in capsys.readouterr().err


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="1 predictions for 2 references"):
        paired_bootstrap(accuracy, [1, 0], [1], [1, 0])


def simulate(
    rng: np.random.Generator, num_seeds: int, seed_std: float, gain: float = 0.0, num_examples: int = 100
) -> np.ndarray:
    """Right or wrong answers (seeds, examples) of one arm: its own example effects, seed effects and luck."""
    logit_E = rng.normal(0.8 + gain, 1.0, num_examples)
    logit_SE = logit_E + rng.normal(0, seed_std, (num_seeds, 1))
    return (rng.random(logit_SE.shape) < 1 / (1 + np.exp(-logit_SE))).astype(float)


def compare_arms(rng: np.random.Generator, a_SE: np.ndarray, b_SE: np.ndarray, paired: bool = False) -> Comparison:
    num = a_SE.shape[1]
    count_RE = rng.multinomial(num, np.full(num, 1 / num), size=100)
    return compare_seeds(a_SE.mean(1), b_SE.mean(1), count_RE @ a_SE.T / num, count_RE @ b_SE.T / num, num, paired)


@pytest.mark.parametrize("num_seeds", [3, 5])
@pytest.mark.parametrize("seed_std", [0.0, 0.4])
def test_without_a_difference_five_percent_are_called_significant(num_seeds: int, seed_std: float) -> None:
    """A bootstrap over the examples alone finds a difference in 20% of these cases at seed_std 0.4."""
    rng, trials = np.random.default_rng(0), 400
    found = [compare_arms(rng, *(simulate(rng, num_seeds, seed_std) for _ in "ab")) for _ in range(trials)]
    assert 0.02 <= np.mean([c.p_value < 0.05 for c in found]) <= 0.08  # 5% plus or minus 2.7 standard errors
    assert np.mean([c.low <= 0 <= c.high for c in found]) >= 0.92
    larger = [compare_arms(rng, simulate(rng, 5, 0.1, gain=1.0), simulate(rng, 5, 0.1)) for _ in range(40)]
    assert np.mean([c.p_value < 0.05 for c in larger]) > 0.5


@pytest.mark.parametrize("paired", [False, True])
def test_without_variance_over_examples_it_is_the_t_test(paired: bool) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.1, 1, 5), rng.normal(-0.8, 2, 5)
    found = compare_seeds(a, b, np.tile(a, (9, 1)), np.tile(b, (9, 1)), 100, paired)
    theirs = stats.ttest_rel(a, b) if paired else stats.ttest_ind(a, b, equal_var=False)
    assert found.p_value == pytest.approx(theirs.pvalue)
    assert found.degrees_of_freedom == pytest.approx(theirs.df)
    assert (found.low, found.high) == pytest.approx(theirs.confidence_interval(0.95))
    assert (found.over, found.example_error) == ("seeds and examples", 0.0)


def test_two_seeds_are_judged_over_the_examples_alone() -> None:
    rng = np.random.default_rng(0)
    found = compare_arms(rng, simulate(rng, 2, 0.1, gain=2.0), simulate(rng, 2, 0.1))
    assert (found.over, math.isnan(found.seed_error)) == ("examples", True)
    same = compare_arms(rng, np.ones((3, 10)), np.zeros((3, 10)))
    assert (same.difference, same.low, same.high, same.p_value) == (1.0, 1.0, 1.0, 0.0)
