"""Fit a scaling law: known parameters are found again, intervals hold them, too few or equal runs are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firth.cli.main import app
from firth.core.errors import UserError
from firth.core.files import write_json
from firth.lab.plan import read_run
from firth.lab.scaling_law import ScalingFit, ScalingLaw, ScalingRun, fit_scaling_law, sum_of_residuals
from firth.models.presets import bert
from firth.objectives import CLM
from firth.recipes import pretraining_recipe
from firth.recipes.pretraining import worth_of_repeats
from firth.train import Recipe, save_recipe

CHINCHILLA = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28, 15.0)  # Hoffmann et al. 2022, equation 10


def make_runs(noise: float = 0.0) -> list[ScalingRun]:
    rng = np.random.default_rng(1)
    return [
        ScalingRun(n, d, 3e7, CHINCHILLA.loss(n, d, 3e7) * math.exp(noise * rng.standard_normal()))
        for n in (1e6, 4e6, 1.6e7, 6.4e7)
        for d in (3e6, 1e7, 3e7, 1e8, 5e8, 2e9)
    ]


@pytest.fixture(scope="module")
def fit() -> ScalingFit:
    """The fit of runs without noise."""
    return fit_scaling_law(make_runs(), num_bootstraps=0)


def test_known_parameters_are_found_again(fit: ScalingFit) -> None:
    """Runs of the published law, without noise: predictions to 0.2%, also for other sizes and tokens."""
    assert fit.mean_error < 1e-3
    for n, d in ((2e6, 2e7), (3e7, 6e7), (3e7, 1e9)):
        assert fit.law.loss(n, d, 3e7) == pytest.approx(CHINCHILLA.loss(n, d, 3e7), rel=2e-3)
    assert fit.law.alpha == pytest.approx(0.34, abs=0.03)
    assert fit.law.beta == pytest.approx(0.28, abs=0.03)
    assert fit.law.repeated_worth == pytest.approx(15, rel=0.1)


def test_intervals_hold_the_parameters_of_noisy_runs() -> None:
    fit = fit_scaling_law(make_runs(0.003), num_bootstraps=40)
    for name in ("alpha", "beta", "repeated_worth"):
        low, high = fit.intervals[name]
        assert low <= getattr(CHINCHILLA, name) <= high
        assert low < high


def test_the_gradient_of_the_search_is_that_of_finite_differences() -> None:
    table, x = np.array(make_runs(0.01)), np.array([0.4, 5.8, 6.1, 0.33, 0.27, 2.5, -3.0])
    _, gradient = sum_of_residuals(x, table)
    steps = 1e-6 * np.eye(len(x))
    slopes = [(sum_of_residuals(x + h, table)[0] - sum_of_residuals(x - h, table)[0]) / 2e-6 for h in steps]
    assert gradient == pytest.approx(slopes, rel=1e-3)


def test_what_short_runs_lack_is_found_again() -> None:
    """Runs of less than one token per parameter: C is found, and a smaller model that reads more is the better one."""
    known = replace(CHINCHILLA, c=0.3)
    runs = [ScalingRun(n, d, 1e7, known.loss(n, d, 1e7)) for n in (1e6, 1e7, 3e7, 1e8) for d in (3e6, 1e7, 1e8, 1e9)]
    law = fit_scaling_law(runs, num_bootstraps=0).law
    assert law.c == pytest.approx(0.3, rel=0.05)
    assert law.loss(1e8, 5e7, 1e7) > law.loss(3e7, 1.6e8, 1e7)
    assert fit_scaling_law(runs[::3], num_bootstraps=0).law.c == 0, "six runs are too few for seven parameters"


def test_repeated_tokens_are_worth_less() -> None:
    """The first passes count almost fully, and the worth is bounded by U (1 + r): equation 5 of Muennighoff et al."""
    unique, worth = 100.0, 15.0
    values = worth_of_repeats(np.array([50, 100, 200, 400, 1e9]), unique, worth)
    assert values[:2].tolist() == [50, 100]
    assert 195 < values[2] < 200
    assert np.all(np.diff(values) > 0)
    assert values[-1] == pytest.approx(unique * (1 + worth))
    expected = unique + unique * worth * (1 - math.exp(-3 / worth))
    assert values[3] == pytest.approx(expected)


def test_the_optimal_size_minimizes_the_loss() -> None:
    flops = 1e18
    for law in (CHINCHILLA, replace(CHINCHILLA, c=0.3)):

        def loss(n: float, law: ScalingLaw = law) -> float:
            return law.loss(n, flops / (6 * n), 1e30)

        best = law.optimal_parameters(flops)
        assert loss(best) < min(loss(best * 1.05), loss(best / 1.05))
    equation_4 = (0.34 * 406.4 / (0.28 * 410.7)) ** (1 / 0.62) * (flops / 6) ** (0.28 / 0.62)
    assert CHINCHILLA.optimal_parameters(flops) == pytest.approx(equation_4, rel=1e-3)


def test_outside_of_the_runs_is_extrapolation(fit: ScalingFit) -> None:
    assert fit.extrapolates(4e6, 1e8, 3e7) == []
    assert fit.extrapolates(1e9, 1e8, 3e7) == ["parameters"]
    assert fit.extrapolates(4e6, 1e11, 3e7) == ["tokens", "passes"]


def test_runs_that_do_not_determine_the_law_are_refused() -> None:
    runs = make_runs()
    with pytest.raises(UserError, match="at least 6 runs, not 3"):
        fit_scaling_law(runs[:3])
    with pytest.raises(UserError, match="same size"):
        fit_scaling_law(runs[:6])
    with pytest.raises(UserError, match="above 0"):
        fit_scaling_law([*runs, ScalingRun(1, 1, 0, 1)])


def test_the_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run folders to a law, a table and a page; runs of another objective or without an evaluation are refused."""
    monkeypatch.setattr("firth.lab.plan.fit_scaling_law", lambda runs: fit_scaling_law(runs, num_bootstraps=3))
    recipe = pretraining_recipe(bert(1, 16, 2, 100))
    folders = [write_run(tmp_path / f"run{i}", run, recipe) for i, run in enumerate(make_runs()[::2], 1)]
    app(["plan", "--fit", *map(str, folders), "--output-dir", str(tmp_path), "--json"], standalone_mode=False)
    result = json.loads(capsys.readouterr().out)
    assert result["law"]["alpha"] == pytest.approx(0.34, abs=0.05)
    assert len(result["runs"]) == len(folders)
    assert "Scaling law of your runs" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    app(["plan", "--fit", *map(str, folders), "--output-dir", str(tmp_path)], standalone_mode=False)
    assert "alpha, exponent of the size" in capsys.readouterr().out
    other = write_run(tmp_path / "other", make_runs()[0], Recipe(model=recipe.model, objective=CLM()))
    for run, message in ((other, "different objectives"), (tmp_path, "has no results.json")):
        with pytest.raises(UserError, match=message):
            app(["plan", "--fit", *map(str, [*folders, run])], standalone_mode=False)


def test_the_tokens_of_a_run_are_those_of_its_weights(tmp_path: Path) -> None:
    """20 passes over 1M tokens whose loss was lowest after 5: the loss is that of 5M tokens."""
    recipe, run = pretraining_recipe(bert(1, 16, 2, 100)), ScalingRun(1e6, 2e7, 1e6, 3.0)
    assert read_run(write_run(tmp_path / "whole", run, recipe, steps=400)) == run
    early = read_run(write_run(tmp_path / "early", run, recipe, steps=400, best_step=100))
    assert early == run._replace(tokens=5e6)


def write_run(folder: Path, run: ScalingRun, recipe: Recipe, **steps: int) -> Path:
    folder.mkdir()
    passes = run.tokens / run.unique_tokens
    write_json(
        folder / "results.json",
        {"parameters": run.parameters, "tokens": run.tokens, "passes": passes, "eval_loss": run.loss, **steps},
    )
    save_recipe(recipe, folder / "recipe.yaml")
    return folder


def test_a_given_exponent_of_the_size_stays() -> None:
    runs = [ScalingRun(n, d, 1e8, CHINCHILLA.loss(n, d, 1e8)) for n in (1e6, 3e6, 9e6) for d in (1e6, 1e7, 1e8)]
    fit = fit_scaling_law(runs, num_bootstraps=3, alpha=0.25)
    assert fit.law.alpha == 0.25
    assert fit.intervals["alpha"] == (0.25, 0.25)
    assert fit.mean_error < 0.02, "the other parameters follow"
