"""A bar chart of transfer: the scores after fine-tuning, for each start of the weights, with every seed as a dot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from firth.core.html import INK_SENTINEL_COLOUR, PLOT_COLOURS, add_plot_legend, escape_mathtext, make_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR_WIDTH = 0.8  # of all bars of a group, whose distance is 1
DOT_SPREAD = 0.5  # of the width of a bar, over which the dots of its seeds are spread


class ArmScore(NamedTuple):
    """The scores of one model after fine-tuning on `num_labels` examples, one of each seed."""

    model: str
    start: str  # of the weights
    num_labels: int
    seeds: Sequence[float]


def plot_arms(rows: Iterable[ArmScore], chance: float | None = None, ylabel: str = "accuracy in %") -> Figure:
    """Draw a bar for each start of the weights: the mean over seeds, as a number above it, and a dot for each seed.

    Each model and number of labels is a group of bars. A dashed line shows the score of `chance`.
    """
    rows = list(rows)
    figure, axes = make_axes("", ylabel)
    groups = list(dict.fromkeys((row.model, row.num_labels) for row in rows))
    starts = list(dict.fromkeys(row.start for row in rows))
    width = BAR_WIDTH / max(len(starts), 1)
    centres = [i - (len(starts) - 1) / 2 for i in range(len(starts))]
    for start, centre, colour in zip(starts, centres, PLOT_COLOURS, strict=False):
        bars = {groups.index((r.model, r.num_labels)) + centre * width: list(r.seeds) for r in rows if r.start == start}
        drawn = axes.bar(list(bars), [fmean(s) for s in bars.values()], 0.86 * width, color=colour, alpha=0.6)
        if len(groups) > 1:  # the names of one group fit below its bars
            drawn.set_label(escape_mathtext(start))
        for x, seeds in bars.items():
            step = DOT_SPREAD * width / max(len(seeds) - 1, 1)
            dots = [x + step * (i - (len(seeds) - 1) / 2) for i in range(len(seeds))]
            axes.scatter(dots, seeds, s=22, color=colour, edgecolors=INK_SENTINEL_COLOUR, linewidths=0.8, zorder=3)
            text = f"{fmean(seeds):.1f}"
            size = 11 if len(groups) < 4 else 8
            axes.annotate(
                text, (x, max(seeds)), (0, 7), textcoords="offset points", ha="center", weight="bold", fontsize=size
            )
    if chance is not None:
        axes.axhline(chance, color=INK_SENTINEL_COLOUR, linestyle="--", linewidth=1, label=f"guessing: {chance:.1f}")
    has_models = len({model for model, _ in groups}) > 1
    names = [f"{escape_mathtext(model)}\n" * has_models + f"{labels:,} labels" for model, labels in groups]
    if len(groups) == 1:
        axes.set_xticks([centre * width for centre in centres], [escape_mathtext(start) for start in starts])
        axes.set_xlabel(names[0])
    else:
        axes.set_xticks(range(len(groups)), names)
    axes.margins(y=0.12)
    add_plot_legend(axes)
    return figure
