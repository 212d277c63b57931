"""A plot of transfer: the score by the number of labels, for each start of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

from firth.core.html import PLOT_COLOURS, add_plot_legend, escape_mathtext, make_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Line style, line width and whether markers are filled, by the start of the weights.
START_STYLES = {
    "pretrained": ("-", 2.0, True),
    "counted embeddings": (":", 1.8, False),
    "from scratch": ("--", 1.5, False),
}


class TransferPoint(NamedTuple):
    """The score of a model after fine-tuning on `num_labels` examples, over several seeds."""

    model: str
    start: str  # of the weights: a key of START_STYLES
    num_labels: int
    mean: float
    std: float


def transfer_plot(rows: Iterable[TransferPoint], ylabel: str = "accuracy in %") -> Figure:
    """Plot the score against the number of labels, mean and standard deviation over seeds.

    One colour per model; solid lines are pretrained, dotted ones have counted embeddings, dashed ones are from scratch.
    """
    rows = list(rows)
    figure, axes = make_axes("labelled examples", ylabel)
    models = list(dict.fromkeys(row.model for row in rows))
    for model, colour in zip(models, cycle(PLOT_COLOURS)):
        prefix = f"{escape_mathtext(model)}, " if len(models) > 1 else ""
        for start, (line_style, width, filled) in START_STYLES.items():
            points = sorted((r for r in rows if r.model == model and r.start == start), key=lambda r: r.num_labels)
            if not points:
                continue
            axes.errorbar(
                [point.num_labels for point in points],
                [point.mean for point in points],
                [point.std for point in points],
                color=colour,
                linewidth=width,
                linestyle=line_style,
                marker="o",
                markersize=5,
                markerfacecolor=colour if filled else "none",
                capsize=3,
                elinewidth=1.2,
                label=prefix + start,
            )
    _log_ticks(axes, sorted({row.num_labels for row in rows}))
    add_plot_legend(axes)
    return figure


def _log_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Set a logarithmic x axis with a tick at each value."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
