"""`firth plan --fit`: what finished runs say of size and tokens, as a scaling law with intervals and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from firth.core.chart import Axis, Chart, Series, line_chart
from firth.core.errors import UserError
from firth.core.files import file_sha256, read_object
from firth.core.html import HtmlPage
from firth.lab.scaling_law import FLOPS_PER_PARAMETER, ScalingFit, ScalingLaw, ScalingRun, fit_scaling_law
from firth.train import Recipe, load_recipe
from firth.train.clock import RUN_RECIPE_FILE

PARAMETER_NAMES = {
    "e": "E, loss of a perfect model",
    "a": "A",
    "b": "B",
    "alpha": "alpha, exponent of the size",
    "beta": "beta, exponent of the tokens",
    "repeated_worth": "r, passes that repetition is worth",
    "c": "C, of too few tokens per parameter",
}
NUM_CURVE_POINTS = 60


def fit_runs(runs: Sequence[str | Path], page: Path) -> dict[str, Any]:
    """Fit a scaling law to finished pretraining runs of one objective and tokenizer; write a page with the curves."""
    folders = [Path(run) for run in runs]
    points = [read_run(folder) for folder in folders]
    check_comparable(folders)
    fit = fit_scaling_law(points)
    flops = max(FLOPS_PER_PARAMETER * run.parameters * run.tokens for run in points)
    result = {
        "runs": [{"run": str(folder), **point._asdict()} for folder, point in zip(folders, points, strict=True)],
        "law": vars(fit.law),
        "intervals": fit.intervals,
        "mean_error": fit.mean_error,
        "flops": flops,
        "optimal_parameters": fit.law.optimal_parameters(flops),
        "page": str(page),
    }
    write_fit_page(page, folders, points, fit, result)
    return result


def read_run(folder: Path) -> ScalingRun:
    """Return size, tokens, unique tokens and held-out loss of a finished run.

    A run that overfits its text ends with the weights of an earlier step: its tokens are those until that step.
    """
    file = folder / "results.json"
    if not file.is_file():
        raise UserError(f"{folder} has no results.json: name the folder of a finished `firth pretrain`.")
    results = read_object(file)
    missing = [key for key in ("parameters", "tokens", "passes", "eval_loss") if not results.get(key)]
    if missing:
        raise UserError(f"{file}: no {missing[0]}. The law needs pretraining runs with held-out text.")
    tokens, unique_tokens = results["tokens"], results["tokens"] / results["passes"]
    if results.get("best_step"):
        tokens *= results["best_step"] / results["steps"]
    return ScalingRun(results["parameters"], tokens, unique_tokens, results["eval_loss"])


def check_comparable(folders: Sequence[Path]) -> None:
    """Refuse runs of different objectives or tokenizers: their losses measure different things."""
    first = folders[0]
    for folder in folders[1:]:
        one, other = (load_recipe(run / RUN_RECIPE_FILE, Recipe) for run in (first, folder))
        if one.objective != other.objective:
            raise UserError(f"{first} and {folder} have different objectives: their losses cannot be compared.")
        tokenizers = [run / "final" / "tokenizer.json" for run in (first, folder)]
        if len({file_sha256(file) if file.is_file() else "" for file in tokenizers}) > 1:
            raise UserError(f"{first} and {folder} have different tokenizers: their losses cannot be compared.")


def format_parameter(name: str, fit: ScalingFit) -> tuple[str, str, str]:
    """Return a row of the table: the parameter, its value and its 95% interval."""
    low, high = fit.intervals[name]
    return PARAMETER_NAMES[name], f"{getattr(fit.law, name):.3g}", f"{low:.3g} to {high:.3g}"


def write_fit_page(
    page: Path, folders: Sequence[Path], points: Sequence[ScalingRun], fit: ScalingFit, result: dict[str, Any]
) -> None:
    html = HtmlPage("Scaling law of your runs", command="plan")
    html.add_paragraph(
        "The held-out loss as a function of the number of parameters N and of the tokens D, fitted to finished runs: "
        "L = E + A / N^alpha + B / D'^beta + C N / D. In D' repeated tokens count less: r passes over the text are "
        "worth almost r times as much text, further ones little. C N / D is what a large model lacks after few "
        "tokens; it is fitted to more than six runs."
    )
    html.add_table(
        ("parameter", "value", "95% interval"),
        [format_parameter(name, fit) for name in PARAMETER_NAMES],
        "Intervals by a bootstrap over the runs. A wide one says that the runs do not determine the parameter.",
    )
    html.add_chart(
        loss_chart_by_tokens(points, fit.law), "Loss by tokens read, for each size; points are runs, lines the law."
    )
    html.add_paragraph(
        f"The mean error of the law on these runs is {100 * fit.mean_error:.1f}%. With the compute of the largest run "
        f"({result['flops']:.2g} FLOPs) and unlimited text the best size would be "
        f"{result['optimal_parameters'] / 1e6:,.1f} million parameters."
    )
    html.add_table(
        ("run", "parameters", "tokens", "passes", "loss", "law"),
        [
            (
                folder.name,
                f"{run.parameters:,.0f}",
                f"{run.tokens:,.0f}",
                f"{run.tokens / run.unique_tokens:.2f}",
                f"{run.loss:.3f}",
                f"{fit.law.loss(*run[:3]):.3f}",
            )
            for folder, run in zip(folders, points, strict=True)
        ],
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    html.save(page)


def loss_chart_by_tokens(points: Sequence[ScalingRun], law: ScalingLaw) -> Chart:
    """Draw the loss against the tokens, a colour for each size: dots are runs, lines the law."""
    series = []
    for i, size in enumerate(sorted({run.parameters for run in points})):
        own = sorted((run for run in points if run.parameters == size), key=lambda run: run.tokens)
        tokens = np.geomspace(own[0].tokens / 1.5, own[-1].tokens * 1.5, NUM_CURVE_POINTS).tolist()
        curve = [(d, law.loss(size, d, own[-1].unique_tokens)) for d in tokens]
        runs = [(run.tokens, run.loss) for run in own]
        series += [
            Series("", curve, i, has_marks=False),
            Series(f"{size / 1e6:,.1f}M parameters", runs, i, "none", "circle"),
        ]
    return line_chart(series, Axis("tokens read", 10), Axis("held-out loss (nats per token)"))
