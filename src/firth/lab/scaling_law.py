"""Fit a scaling law to finished runs: the held-out loss as a function of model size, tokens read and unique tokens.

    L(N, D) = E + A / N^alpha + B / D^beta                                   (Hoffmann et al. 2022, equation 2)

E is the loss of a perfect model, N the number of parameters, D the tokens read. Tokens that are read again are worth
less than new ones: with U unique tokens and R = D / U - 1 repetitions, D is replaced by

    D' = U + U r (1 - exp(-R / r))                                        (Muennighoff et al. 2023, equation 5)

so that r passes over the text are worth almost r times as much text, and after about 4 r passes nothing is gained. The
paper found r = 15 for decoders of 1e8 parameters and more.

`fit_scaling_law` minimizes the Huber loss of log L summed over the runs, from a grid of starts, as approach 3 of
Hoffmann et al. (section 3.3); a mean instead of the sum ends the search too early (Besiroglu et al. 2024). Intervals
come from a bootstrap over the runs. They say how far the runs determine a parameter, not whether the law holds outside
of the range of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from firth.core.errors import UserError
from firth.recipes.pretraining import worth_of_repeats

HUBER_DELTA = 1e-3  # residuals of log L beyond it count linearly (Hoffmann et al. 2022, appendix D.2)
MIN_RUNS = 6  # as many as the law has parameters
MAX_REPEATED_WORTH = 1e3  # bound of r: no run repeats its text so often that more could be told apart
FLOPS_PER_PARAMETER = 6  # and token, forward and backward (Kaplan et al. 2020, section 2.1)


class ScalingRun(NamedTuple):
    """What the law needs of a finished run."""

    parameters: float
    tokens: float  # read, repetitions included
    unique_tokens: float
    loss: float  # held-out, in nats per token


@dataclass(frozen=True)
class ScalingLaw:
    """The parameters of the law: E, A, B, alpha, beta and r, the worth of repetition."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    repeated_worth: float

    def loss(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Return the held-out loss that a run is expected to reach."""
        effective = float(worth_of_repeats(tokens, unique_tokens, self.repeated_worth))
        return self.e + self.a / parameters**self.alpha + self.b / effective**self.beta

    def optimal_parameters(self, flops: float) -> float:
        """Return the size with the lowest loss for a compute budget, with unlimited text (equation 4 of Hoffmann)."""
        ratio = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return ratio * (flops / FLOPS_PER_PARAMETER) ** (self.beta / (self.alpha + self.beta))


@dataclass(frozen=True)
class ScalingFit:
    """A law, the 95% interval of each parameter, and the range of the runs outside of which it extrapolates."""

    law: ScalingLaw
    intervals: dict[str, tuple[float, float]]
    parameters_range: tuple[float, float]
    tokens_range: tuple[float, float]
    passes_range: tuple[float, float]
    mean_error: float  # mean |log predicted - log measured| on the runs

    def extrapolates(self, parameters: float, tokens: float, unique_tokens: float) -> list[str]:
        """Return in which respects a run is outside of the range of those that were fitted."""
        values = {
            "parameters": (parameters, self.parameters_range),
            "tokens": (tokens, self.tokens_range),
            "passes": (tokens / unique_tokens, self.passes_range),
        }
        return [name for name, (value, (low, high)) in values.items() if not low <= value <= high]


def fit_scaling_law(runs: Sequence[ScalingRun], num_bootstraps: int = 200, seed: int = 0) -> ScalingFit:
    """Fit the law to runs that differ in size and in tokens."""
    check_runs(runs)
    table = np.array(runs, float)  # (runs, 4)
    best = min((minimize_residuals(table, start) for start in initial_points(table)), key=lambda found: found[1])[0]
    rng = np.random.default_rng(seed)
    samples = [
        vars(to_law(minimize_residuals(table[rng.integers(0, len(table), len(table))], best)[0]))
        for _ in range(num_bootstraps)
    ]
    law = to_law(best)
    predicted = np.array([law.loss(*run[:3]) for run in runs])
    passes = table[:, 1] / table[:, 2]
    low_high = {
        name: tuple(np.percentile([sample[name] for sample in samples], [2.5, 97.5]).tolist())
        for name in vars(law)
        if samples
    }
    return ScalingFit(
        law,
        low_high,
        (table[:, 0].min(), table[:, 0].max()),
        (table[:, 1].min(), table[:, 1].max()),
        (passes.min(), passes.max()),
        float(np.abs(np.log(predicted / table[:, 3])).mean()),
    )


def check_runs(runs: Sequence[ScalingRun]) -> None:
    """Refuse runs that cannot determine the law."""
    if len(runs) < MIN_RUNS:
        raise UserError(f"A scaling law has {MIN_RUNS} parameters: give at least {MIN_RUNS} runs, not {len(runs)}.")
    if any(min(run) <= 0 for run in runs):
        raise UserError("Sizes, tokens and losses of the runs must be above 0.")
    for name, values in (("size", {run.parameters for run in runs}), ("tokens", {run.tokens for run in runs})):
        if len(values) < 2:
            raise UserError(f"All runs have the same {name}: the law cannot tell what more of it is worth.")


def to_law(x: np.ndarray) -> ScalingLaw:
    """Return the law of a point of the search: logarithms of E, A, B and r, and the exponents."""
    log_e, log_a, log_b, alpha, beta, log_worth = x.tolist()
    return ScalingLaw(np.exp(log_e), np.exp(log_a), np.exp(log_b), alpha, beta, np.exp(log_worth))


def log_loss(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return log L of each run by the log-sum-exp of the three terms, which cannot overflow."""
    log_e, log_a, log_b, alpha, beta, log_worth = x
    data = worth_of_repeats(table[:, 1], table[:, 2], np.exp(log_worth))
    terms = [np.full(len(table), log_e), log_a - alpha * np.log(table[:, 0]), log_b - beta * np.log(data)]
    return np.logaddexp.reduce(np.stack(terms), axis=0)


def sum_of_residuals(x: np.ndarray, table: np.ndarray) -> float:
    """Return the Huber loss of log L, summed over the runs."""
    size = np.abs(log_loss(x, table) - np.log(table[:, 3]))
    huber = np.where(size <= HUBER_DELTA, size**2 / 2, HUBER_DELTA * (size - HUBER_DELTA / 2))
    return float(huber.sum()) / HUBER_DELTA  # scaled so that the search does not end at rounding errors


def minimize_residuals(table: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, float]:
    bounds = [
        (-5, np.log(table[:, 3].min())),
        (-5, 30),
        (-5, 30),
        (0.01, 2),
        (0.01, 2),
        (0, np.log(MAX_REPEATED_WORTH)),
    ]
    found = minimize(sum_of_residuals, np.clip(start, *np.array(bounds).T), (table,), "L-BFGS-B", bounds=bounds)
    return found.x, float(found.fun)


def initial_points(table: np.ndarray) -> list[np.ndarray]:
    """Return starts of the search: exponents on a grid, and a third of the reducible loss in each term."""
    floor, spread = np.log(table[:, 3].min()), max(np.ptp(table[:, 3]), 1e-3)
    points = []
    for alpha, beta, share in product((0.2, 0.5), (0.2, 0.5), (0.3, 0.9)):
        log_a = np.log(spread / 2) + alpha * np.log(table[:, 0].mean())
        log_b = np.log(spread / 2) + beta * np.log(table[:, 1].mean())
        points.append(np.array([floor + np.log(share), log_a, log_b, alpha, beta, np.log(10.0)]))
    return points
