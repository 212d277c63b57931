"""Fit a scaling law to finished runs: the held-out loss as a function of model size, tokens read and unique tokens.

    L(N, D) = E + A / N^alpha + B / D'^beta + C N / D

The first three terms are those of Hoffmann et al. (2022, equation 2). E is the loss of a perfect model, N the number of
parameters, D the tokens read. Tokens that are read again are worth less than new ones: with U unique tokens and
R = D / U - 1 repetitions,

    D' = U + U r (1 - exp(-R / r))                                        (Muennighoff et al. 2023, equation 5)

so that r passes over the text are worth almost r times as much text, and after about 4 r passes nothing is gained. The
paper found r = 15 for decoders of 1e8 parameters and more.

The last term is ours. By the first three a larger model is always the better one after as many tokens. That holds for
models that have read many tokens per parameter, as those of the papers. In a run of minutes a model of 1e8 parameters
reads about one token per parameter, and has not learned what it could: 8e7 tokens left one of 1.2e8 parameters at a
higher loss than 5e7 tokens one of 3e7 (docs/results.md). C N / D is what it still lacks. In long runs the term
vanishes, and the law is the published one.

`fit_scaling_law` minimizes the Huber loss of log L summed over the runs, from a grid of starts, as approach 3 of
Hoffmann et al. (section 3.3); a mean instead of the sum ends the search too early (Besiroglu et al. 2024). Intervals
come from a bootstrap over the runs. They say how far the runs determine a parameter, not whether the law holds outside
of the range of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from firth.core.errors import UserError
from firth.recipes.pretraining import worth_of_repeats

HUBER_DELTA = 1e-3  # residuals of log L beyond it count linearly (Hoffmann et al. 2022, appendix D.2)
MIN_RUNS = 6  # as many as the law of the papers has parameters; C is fitted to more runs only
MIN_LOG_C, MAX_LOG_C = -12.0, 3.0  # bounds of C's logarithm; at the lower one C is 0
MAX_REPEATED_WORTH = 1e3  # bound of r: no run repeats its text so often that more could be told apart
FLOPS_PER_PARAMETER = 6  # and token, forward and backward (Kaplan et al. 2020, section 2.1)
PARAMETER_BOUNDS = (1e3, 1e15)  # of the search for an optimal size


class ScalingRun(NamedTuple):
    """What the law needs of a finished run."""

    parameters: float
    tokens: float  # read, repetitions included
    unique_tokens: float
    loss: float  # held-out, in nats per token


@dataclass(frozen=True)
class ScalingLaw:
    """The parameters of the law: E, A, B, alpha, beta, r, the worth of repetition, and C, what short runs lack."""

    e: float
    a: float
    b: float
    alpha: float
    beta: float
    repeated_worth: float
    c: float = 0.0

    def loss(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Return the held-out loss that a run is expected to reach."""
        effective = float(worth_of_repeats(tokens, unique_tokens, self.repeated_worth))
        lacking = self.c * parameters / tokens
        return self.e + self.a / parameters**self.alpha + self.b / effective**self.beta + lacking

    def optimal_parameters(self, flops: float) -> float:
        """Return the size with the lowest loss for a compute budget, with unlimited text.

        Without C it is equation 4 of Hoffmann et al.
        """

        def loss(log_parameters: float) -> float:
            tokens = flops / FLOPS_PER_PARAMETER * math.exp(-log_parameters)
            return self.loss(math.exp(log_parameters), tokens, tokens)

        bounds = [math.log(bound) for bound in PARAMETER_BOUNDS]
        return math.exp(minimize_scalar(loss, bounds=bounds, options={"xatol": 1e-6}).x)


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


def fit_scaling_law(
    runs: Sequence[ScalingRun], num_bootstraps: int = 200, seed: int = 0, alpha: float | None = None
) -> ScalingFit:
    """Fit the law to runs that differ in size and in tokens; with a given `alpha` where the sizes cannot tell it."""
    check_runs(runs)
    table = np.array(runs, float)  # (runs, 4)
    found = [minimize_residuals(table, start, alpha) for start in initial_points(table)]
    best = min(found, key=lambda point_and_value: point_and_value[1])[0]
    rng = np.random.default_rng(seed)
    samples = [
        vars(to_law(minimize_residuals(table[rng.integers(0, len(table), len(table))], best, alpha)[0]))
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
    """Return the law of a point of the search: logarithms of E, A, B, r and C, and the exponents."""
    log_e, log_a, log_b, alpha, beta, log_worth, log_c = x.tolist()
    c = math.exp(log_c) if log_c > MIN_LOG_C else 0.0
    return ScalingLaw(math.exp(log_e), math.exp(log_a), math.exp(log_b), alpha, beta, math.exp(log_worth), c)


def log_loss(x: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L of each run, and its derivatives with respect to `x`, (runs, 7).

    log L is the log-sum-exp of the four terms, which cannot overflow. Its derivative with respect to the logarithm of a
    term is that term's share of L.
    """
    log_e, log_a, log_b, alpha, beta, log_worth, log_c = x
    worth = np.exp(log_worth)
    data = worth_of_repeats(table[:, 1], table[:, 2], worth)
    log_parameters, log_tokens, log_data = np.log(table[:, 0]), np.log(table[:, 1]), np.log(data)
    terms = np.stack(
        [
            np.full(len(table), log_e),
            log_a - alpha * log_parameters,
            log_b - beta * log_data,
            log_c + log_parameters - log_tokens,
        ],
        axis=1,
    )
    total = np.logaddexp.reduce(terms, axis=1)
    e, a, b, c = np.exp(terms - total[:, None]).T
    # derivative of log D' with respect to log r, where D' = u + u r (1 - exp(-R / r))
    unique = np.minimum(table[:, 1], table[:, 2])
    repeats = (table[:, 1] / unique - 1) / worth
    data_per_worth = unique * worth * (-np.expm1(-repeats) - repeats * np.exp(-repeats)) / data
    return total, np.stack([e, a, b, -a * log_parameters, -b * log_data, -beta * b * data_per_worth, c], axis=1)


def sum_of_residuals(x: np.ndarray, table: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the Huber loss of log L, summed over the runs, and its gradient.

    Both are divided by `HUBER_DELTA`, so that the search does not end at rounding errors.
    """
    predicted, derivatives = log_loss(x, table)
    residuals = predicted - np.log(table[:, 3])
    clipped = residuals.clip(-HUBER_DELTA, HUBER_DELTA)
    huber = clipped * (residuals - clipped / 2)
    return float(huber.sum()) / HUBER_DELTA, clipped @ derivatives / HUBER_DELTA


def minimize_residuals(table: np.ndarray, start: np.ndarray, alpha: float | None = None) -> tuple[np.ndarray, float]:
    bounds = [
        (-5, np.log(table[:, 3].min())),
        (-5, 30),
        (-5, 30),
        (0.01, 2) if alpha is None else (alpha, alpha),
        (0.01, 2),
        (0, np.log(MAX_REPEATED_WORTH)),
        (MIN_LOG_C, MAX_LOG_C if len(np.unique(table, axis=0)) > MIN_RUNS else MIN_LOG_C),
    ]
    start = np.clip(start, *np.array(bounds).T)
    found = minimize(sum_of_residuals, start, (table,), "L-BFGS-B", jac=True, bounds=bounds)
    return found.x, float(found.fun)


def initial_points(table: np.ndarray) -> list[np.ndarray]:
    """Return starts of the search: exponents on a grid, and half of the spread of losses in each of A and B.

    C starts at 0 and at a tenth of the spread.
    """
    floor, spread = np.log(table[:, 3].min()), max(np.ptp(table[:, 3]), 1e-3)
    points = []
    per_token = (table[:, 0] / table[:, 1]).max()
    log_cs = (MIN_LOG_C, max(np.log(spread / 10 / per_token), MIN_LOG_C))
    for alpha, beta, share, log_c in product((0.2, 0.5), (0.2, 0.5), (0.3, 0.9), log_cs):
        log_a = np.log(spread / 2) + alpha * np.log(table[:, 0].mean())
        log_b = np.log(spread / 2) + beta * np.log(table[:, 1].mean())
        points.append(np.array([floor + np.log(share), log_a, log_b, alpha, beta, np.log(10.0), log_c]))
    return points
