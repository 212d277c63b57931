"""search.html of a fine-tuning with `--search`: what was tried, what it cost, what was chosen, and how sure that is.

All figures come from the entry `search` of results.json (`tasks/search.py`). Losses of different rungs are of trainings
of different lengths, so each rung has a plot of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from firth.core.chart import Axis, Chart, LegendEntry, ParallelAxis, Row, Series, line_chart, parallel_chart, row_chart
from firth.core.console import format_count, format_duration
from firth.core.html import HtmlPage
from firth.metrics import format_metric
from firth.tasks.rate_trial import format_loss
from firth.tasks.search import DIMENSION_WORDS

SEARCH_PAGE = "search.html"
KEPT_COLOUR, CHOSEN_COLOUR = 0, 1
LOG_DIMENSIONS = ("learning_rate", "num_train_epochs", "per_device_train_batch_size")


def write_search_page(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write the page of a finished search from the results of its run."""
    search, metric = result["search"], result["metric"]
    page = HtmlPage(f"Search: {len(search['settings'])} settings")
    add_choice_section(page, result)
    page.add_heading("What was tried")
    page.add_charts(
        rung_charts(search),
        "Held-out loss by learning rate, one plot for each rung. Filled dots were kept, hollow ones dropped; a line is "
        "one standard error over the held-out batches. A rung trains longer than the one before it, so that losses "
        "compare within a rung. Settings compete with those of as many epochs.",
    )
    if len(search["fields"]) > 1:
        page.add_chart(
            settings_chart(search),
            "Each line is a setting, through its value of everything that was varied. The last axis is the rung that "
            "the setting reached.",
        )
    add_finalists_section(page, result)
    add_budget_section(page, search)
    add_settings_table(page, search, metric)
    page.save(folder / SEARCH_PAGE)
    return folder / SEARCH_PAGE


def add_choice_section(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """The chosen setting beside the default, and the figure to report."""
    search, metric, seeds = result["search"], result["metric"], len(result["seeds"])
    dev = f"{format_metric(metric, result['mean'])} {metric} on dev"
    if seeds > 1:
        dev = f"{dev}, the mean of {seeds} seeds (standard deviation {format_metric(metric, result['std'])})"
    chosen = f"Setting {search['chosen'] + 1} of {len(search['settings'])} was chosen: {search['reason']}"
    page.add_paragraph(
        f"{chosen}. Trained on all of train, it has {dev}. That is the figure to report: the search has never read dev."
    )
    chosen, default = search["settings"][search["chosen"]], search["settings"][0]
    rows = [
        (
            DIMENSION_WORDS[name],
            format_value(name, default),
            format_value(name, chosen) if name in search["fields"] else "held",
        )
        for name in DIMENSION_WORDS
    ]
    page.add_table(["", "default or given", "chosen"], rows, "Options that the user has set are held and not varied.")


def add_finalists_section(page: HtmlPage, result: Mapping[str, Any]) -> None:
    """The scores of the last rung with their noise, beside the seeds on dev."""
    search, metric = result["search"], result["metric"]
    finals = final_trials(search)
    page.add_heading("How sure is the choice?")
    if all(trial["score"] is not None for trial in finals):
        page.add_chart(
            finalists_chart(result),
            f"{metric} of the finalists on {search['held_out_examples']:,} held-out examples of train, with one "
            "standard error over these examples, and of the seeds of the chosen setting on dev.",
        )
    once = "Each finalist was trained once. Another seed and other held-out examples would give other figures"
    texts = [f"{once}: finalists whose lines overlap cannot be told apart, and another one may be as good."]
    if len(finals) > 1:
        texts.append(
            "The chosen setting's figure on the split is the best of several, and so too good on average; the seeds on "
            "dev are not chosen by it."
        )
    if len(result["seeds"]) < 3:
        texts.append("One or two seeds say little about others: --seeds 5 would.")
    texts.append(
        "Whether the search has helped at all is a question of its own: train the defaults with as many seeds, and "
        "compare with --baseline."
    )
    page.add_paragraph(" ".join(texts))


def add_budget_section(page: HtmlPage, search: Mapping[str, Any]) -> None:
    page.add_heading("Budget")
    rows = [
        (
            f"{i + 1}",
            rung["settings"],
            format_share(rung["share"]),
            rung["examples"],
            f"{rung['cost']:.2f}",
            format_duration(rung["seconds"]),
        )
        for i, rung in enumerate(search["rungs"])
    ]
    columns = ["rung", "settings", "share of their steps", "examples read", "cost in seeds", "time"]
    total = f"All rungs cost {search['cost']:.1f} times one seed of the default length"
    split = (
        f"{search['train_examples']:,} examples of train, and were measured on {search['held_out_examples']:,} others"
    )
    page.add_table(columns, rows, f"{total}. Settings were trained on {split}.")


def add_settings_table(page: HtmlPage, search: Mapping[str, Any], metric: str) -> None:
    """Every setting, the best first, with its loss in each rung."""
    page.add_heading("All settings")
    trials = {(t["rung"], t["setting"]): t for t in search["trials"]}
    num_rungs = len(search["rungs"])
    order = sorted(range(len(search["settings"])), key=lambda i: sort_key(search, trials, i))
    rows = []
    for i in order:
        mine = [trials.get((rung, i)) for rung in range(num_rungs)]
        last = mine[-1]
        rows.append(
            (
                f"{i + 1}" + (" (chosen)" if i == search["chosen"] else " (default)" if i == 0 else ""),
                *(format_value(name, search["settings"][i]) for name in search["fields"]),
                *("" if trial is None else format_loss(trial["loss"]) for trial in mine),
                format_metric(metric, last["score"]) if last and last["score"] is not None else "",
            )
        )
    columns = [DIMENSION_WORDS[name] for name in search["fields"]]
    losses = [f"loss, rung {rung + 1}" for rung in range(num_rungs)]
    page.add_table(["setting", *columns, *losses, metric], rows, f"Held-out losses; {metric} in the last rung alone.")


def sort_key(search: Mapping[str, Any], trials: Mapping[tuple[int, int], Any], setting: int) -> tuple[Any, ...]:
    """The chosen setting first, then those that came furthest, by their last loss."""
    rung = reached_rung(search, setting)
    loss = trials[rung, setting]["loss"] if (rung, setting) in trials else None
    return setting != search["chosen"], -rung, float("inf") if loss is None else loss, setting


def reached_rung(search: Mapping[str, Any], setting: int) -> int:
    return max((t["rung"] for t in search["trials"] if t["setting"] == setting), default=0)


def final_trials(search: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [t for t in search["trials"] if t["rung"] == len(search["rungs"]) - 1]


def format_value(name: str, setting: Mapping[str, Any]) -> str:
    """Format the value of a setting in one dimension."""
    if name == "warmup_steps":
        share = setting["warmup_share"]
        return "as given" if share is None else f"{100 * share:g}%"
    return f"{dimension_value(name, setting):.3g}"


def dimension_value(name: str, setting: Mapping[str, Any]) -> float:
    keys = {"num_train_epochs": "epochs", "per_device_train_batch_size": "batch_size", "warmup_steps": "warmup_share"}
    return float(setting[keys.get(name, name)])


def format_share(share: float) -> str:
    """
    >>> format_share(1 / 9), format_share(1.0)
    ('1/9', 'all')
    """
    return "all" if share == 1 else f"1/{round(1 / share)}"


# --- charts ---------------------------------------------------------------------------------------------------------


def rung_charts(search: Mapping[str, Any]) -> list[Chart]:
    """Loss by rate, one chart for each rung."""
    charts = []
    for rung, facts in enumerate(search["rungs"]):
        trials = [t for t in search["trials"] if t["rung"] == rung and t["loss"] is not None]
        groups: dict[str, list[Mapping[str, Any]]] = {"dropped": [], "kept": [], "chosen": []}
        for trial in trials:
            groups[trial_outcome(search, trial)].append(trial)
        series = [
            Series(
                name,
                [(search["settings"][t["setting"]]["learning_rate"], t["loss"]) for t in own],
                CHOSEN_COLOUR if name == "chosen" else KEPT_COLOUR,
                "none",
                {"dropped": "hollow", "kept": "circle", "chosen": "diamond"}[name],
                [t["loss_error"] for t in own],
            )
            for name, own in groups.items()
            if own
        ]
        chart = line_chart(series, Axis("learning rate", 10), Axis("held-out loss"), height=200)
        charts.append(chart._replace(label=f"Rung {rung + 1}: {format_share(facts['share'])} of the steps"))
    return charts


def trial_outcome(search: Mapping[str, Any], trial: Mapping[str, Any]) -> str:
    """Whether a setting was chosen, kept for the next rung, or dropped after this one."""
    if trial["setting"] == search["chosen"]:
        return "chosen"
    return "kept" if reached_rung(search, trial["setting"]) > trial["rung"] else "dropped"


def settings_chart(search: Mapping[str, Any]) -> Chart:
    """Parallel axes: one for each varied dimension, one line for each setting. The chosen one is drawn last."""
    chosen = search["chosen"]
    order = sorted(range(len(search["settings"])), key=lambda i: (i == chosen, reached_rung(search, i)))
    settings = [search["settings"][i] for i in order]
    axes = [
        ParallelAxis(
            DIMENSION_WORDS[name],
            [dimension_value(name, setting) for setting in settings],
            [format_value(name, setting) for setting in settings],
            10 if name in LOG_DIMENSIONS else 0,
        )
        for name in search["fields"]
    ]
    rungs = [reached_rung(search, i) + 1 for i in order]
    axes.append(ParallelAxis("rung reached", rungs, [f"{rung}" for rung in rungs]))
    names = [f"setting {i + 1}" + (" (chosen)" if i == chosen else "") for i in order]
    colours = [CHOSEN_COLOUR if i == chosen else KEPT_COLOUR for i in order]
    legend = [LegendEntry("chosen", CHOSEN_COLOUR, "solid"), LegendEntry("others", KEPT_COLOUR, "thin")]
    return parallel_chart(axes, names, colours)._replace(legend=legend)


def finalists_chart(result: Mapping[str, Any]) -> Chart:
    """Scores of the finalists on the split, and of the seeds on dev, as rows."""
    search, metric = result["search"], result["metric"]
    rows = [
        Row(
            f"setting {trial['setting'] + 1} on the split"
            + (", chosen" if trial["setting"] == search["chosen"] else ""),
            trial["score"],
            error=trial["score_error"],
            colour=CHOSEN_COLOUR if trial["setting"] == search["chosen"] else KEPT_COLOUR,
            is_bar=False,
        )
        for trial in final_trials(search)
    ]
    seeds = [seed for seed in result["seeds"] if seed is not None and seed == seed]  # a diverged one has no score
    name = f"chosen, {format_count(len(seeds), 'seed')} on dev"
    rows.append(Row(name, None, seeds, colour=CHOSEN_COLOUR, is_bar=False))
    number = partial(format_metric, metric)
    return row_chart(rows, Axis(metric, format=number, tick_format=number), columns=("", metric, "error or seeds"))
