"""search.html of a fine-tuning with `--search`: what was tried, what it cost, what was chosen, and how sure that is.

All figures come from the entry `search` of results.json (`tasks/search.py`). Losses of different rungs are of trainings
of different lengths, so each rung has a plot of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firth.core.console import format_count, format_duration
from firth.core.html import INK_SENTINEL_COLOUR, PLOT_COLOURS, HtmlPage, add_plot_legend, make_axes
from firth.metrics import format_metric
from firth.tasks.rate_trial import format_loss
from firth.tasks.search import DIMENSION_WORDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH_PAGE = "search.html"
KEPT_COLOUR, CHOSEN_COLOUR = PLOT_COLOURS[0], PLOT_COLOURS[1]
DROPPED_ALPHA = 0.45
LOG_DIMENSIONS = ("learning_rate", "num_train_epochs", "per_device_train_batch_size")


def write_search_page(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write the page of a finished search from the results of its run."""
    search, metric = result["search"], result["metric"]
    page = HtmlPage(f"Search: {len(search['settings'])} settings")
    add_choice_section(page, result)
    page.add_heading("What was tried")
    page.add_figure(
        plot_rungs(search),
        "Held-out loss by learning rate, one plot for each rung. Filled dots were kept, hollow ones dropped; a line is "
        "one standard error over the held-out batches. A rung trains longer than the one before it, so that losses "
        "compare within a rung. Settings compete with those of as many epochs.",
    )
    if len(search["fields"]) > 1:
        page.add_figure(
            plot_parallel(search),
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
        page.add_figure(
            plot_finalists(result),
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


# --- figures --------------------------------------------------------------------------------------------------------


def plot_rungs(search: Mapping[str, Any]) -> Figure:
    """Loss by rate, one plot for each rung."""
    from matplotlib.ticker import NullLocator

    figure, first = make_axes("", "held-out loss")
    figure.delaxes(first)
    num_rungs, default = len(search["rungs"]), search["settings"][0]["learning_rate"]
    rates = sorted(setting["learning_rate"] for setting in search["settings"])
    panels = figure.subplots(1, num_rungs, sharex=True, squeeze=False)[0]
    for rung, axes in enumerate(panels):
        share = format_share(search["rungs"][rung]["share"])
        axes.set_title(f"rung {rung + 1}: {share} of the steps", fontsize=9)
        axes.set_xscale("log")
        axes.set_xticks([rates[0], default, rates[-1]], [f"{rate:.2g}" for rate in (rates[0], default, rates[-1])])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("learning rate")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=INK_SENTINEL_COLOUR, alpha=0.12, linewidth=0.8)
        for trial in search["trials"]:
            if trial["rung"] == rung and trial["loss"] is not None:
                plot_trial(axes, search, trial)
    panels[0].set_ylabel("held-out loss")
    return figure


def plot_trial(axes: Any, search: Mapping[str, Any], trial: Mapping[str, Any]) -> None:
    is_chosen = trial["setting"] == search["chosen"]
    is_last = trial["rung"] == len(search["rungs"]) - 1
    is_kept = is_chosen if is_last else reached_rung(search, trial["setting"]) > trial["rung"]
    colour = CHOSEN_COLOUR if is_chosen else KEPT_COLOUR
    axes.errorbar(
        search["settings"][trial["setting"]]["learning_rate"],
        trial["loss"],
        yerr=trial["loss_error"],
        fmt="D" if is_chosen else "o",
        markersize=6 if is_chosen else 5,
        color=colour,
        markerfacecolor=colour if is_kept else "none",
        alpha=1.0 if is_kept else DROPPED_ALPHA,
        elinewidth=1,
    )


def plot_parallel(search: Mapping[str, Any]) -> Figure:
    """Parallel coordinates: one axis for each varied dimension, one line for each setting."""
    import numpy as np

    names, num_rungs = list(search["fields"]), len(search["rungs"])
    figure, axes = make_axes("", "")
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_yticks([])
    columns = []
    for x, name in enumerate(names):
        values = [dimension_value(name, setting) for setting in search["settings"]]
        scale = np.log if name in LOG_DIMENSIONS else np.asarray
        columns.append(unit_scale(scale(values)))
        ticks = sorted(set(values)) if len(set(values)) <= 5 else [min(values), max(values)]
        heights = unit_scale(scale([*ticks]), scale([min(values), max(values)]))
        draw_axis(axes, x, heights, [format_tick(name, tick) for tick in ticks])
    reached = [reached_rung(search, i) for i in range(len(search["settings"]))]
    columns.append([rung / max(num_rungs - 1, 1) for rung in reached])
    draw_axis(
        axes, len(names), [r / max(num_rungs - 1, 1) for r in range(num_rungs)], [f"{r + 1}" for r in range(num_rungs)]
    )
    axes.set_xticks(range(len(names) + 1), [*(DIMENSION_WORDS[name] for name in names), "rung reached"])
    axes.tick_params(axis="x", length=0)
    for i in sorted(range(len(reached)), key=lambda i: (i == search["chosen"], reached[i])):
        is_chosen = i == search["chosen"]
        axes.plot(
            range(len(columns)),
            [column[i] for column in columns],
            color=CHOSEN_COLOUR if is_chosen else KEPT_COLOUR,
            linewidth=2.5 if is_chosen else 1.2,
            alpha=1.0 if is_chosen else 0.25 + 0.5 * reached[i] / max(num_rungs - 1, 1),
            label="chosen" if is_chosen else "_",
        )
    add_plot_legend(axes)
    return figure


def draw_axis(axes: Any, x: float, heights: Sequence[float], labels: Sequence[str]) -> None:
    """Draw one vertical axis of the parallel coordinates, with its ticks."""
    axes.axvline(x, color=INK_SENTINEL_COLOUR, alpha=0.5, linewidth=1)
    for height, label in zip(heights, labels, strict=True):
        axes.plot([x - 0.02, x], [height, height], color=INK_SENTINEL_COLOUR, alpha=0.5, linewidth=1)
        axes.text(x - 0.035, height, label, ha="right", va="center", fontsize=8)


def unit_scale(values: Any, limits: Any = None) -> list[float]:
    """Scale values to [0, 1], by the lowest and the highest of `limits`; equal ones are in the middle."""
    low, high = min(values if limits is None else limits), max(values if limits is None else limits)
    return [0.5 if high == low else float((value - low) / (high - low)) for value in values]


def format_tick(name: str, value: float) -> str:
    return f"{100 * value:g}%" if name == "warmup_steps" else f"{value:.3g}"


def plot_finalists(result: Mapping[str, Any]) -> Figure:
    """Scores of the finalists on the split, and of the seeds on dev, as rows."""
    search, metric = result["search"], result["metric"]
    figure, axes = make_axes(metric, "")
    axes.xaxis.set_major_formatter(lambda value, _: format_metric(metric, value))
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=INK_SENTINEL_COLOUR, alpha=0.12, linewidth=0.8)
    finals, labels = final_trials(search), []
    for y, trial in enumerate(finals):
        is_chosen = trial["setting"] == search["chosen"]
        axes.errorbar(
            trial["score"],
            y,
            xerr=trial["score_error"],
            fmt="D" if is_chosen else "o",
            color=CHOSEN_COLOUR if is_chosen else KEPT_COLOUR,
            markersize=6,
            elinewidth=1.5,
            capsize=3,
        )
        labels.append(f"setting {trial['setting'] + 1} on the split" + (", chosen" if is_chosen else ""))
    seeds = [seed for seed in result["seeds"] if seed is not None and seed == seed]  # a diverged one has no score
    axes.plot(seeds, [len(finals)] * len(seeds), "|", markersize=16, markeredgewidth=2, color=CHOSEN_COLOUR)
    labels.append(f"chosen, {format_count(len(seeds), 'seed')} on dev")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    figure.set_size_inches(7.2, 1.0 + 0.45 * len(labels))
    return figure
