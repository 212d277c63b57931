"""Charts as SVG: lines, bars in rows, histograms, parallel axes and masks.

A chart keeps its font size at every width of the page. Its `svg` has a height in pixels and no `viewBox`. It is the
plot alone: the names of axes and ticks overflow into its margins, which the stylesheet sets. Positions along it are
percentages, so ticks, bars and dots move with the width. Only paths need coordinates: they are drawn in a box of 1000
by 1000 units that is stretched over the plot, with strokes that are not.

Everything that a reader can point at is a `mark` with a `title`, which browsers show on hover. `readout.js` writes the
title of the mark under the pointer below the chart and moves between marks by the arrow keys. The numbers of the marks
are a table too (`Chart.columns`, `Chart.rows`), for screen readers and for pages without scripts. The playground draws
its live charts with the same classes (`serve/page/chart.js`), and `templates/design.css` styles both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from markupsafe import Markup

Point = tuple[float, float]
LossSeriesByRun = Mapping[str, Sequence[Point]]  # (step, loss) by the name of a run

NUM_COLOURS = 6  # --c0 ... --c5 of design.css
MAX_PLOT_POINTS = 500  # points per line; longer ones are averaged
MAX_MARKS = 160  # marks of a line chart, and rows of its table
MAX_TICKS = 7
PLOT_HEIGHT = 250  # pixels
MIN_PLOT_WIDTH, CHAR_WIDTH, TICK_GAP = 240, 6.5, 6  # pixels: a plot on a phone, a digit, and between texts of ticks
ROW_HEIGHT, GROUP_HEIGHT = 40, 26  # pixels of a bar with its name above it, and of the name of a group
PATH_UNITS = 1000
PADDING = 0.05  # of a range, above and below its values


class Axis(NamedTuple):
    """An axis: its name with the unit, its scale, and limits or ticks where the values do not decide them."""

    name: str
    log_base: int = 0  # 0: a linear scale
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] = ()
    format: Callable[[float], str] | None = None  # of numbers
    tick_format: Callable[[float], str] | None = None
    is_whole: bool = False  # values are whole numbers, and so are the ticks


class Series(NamedTuple):
    """A line, dots, or both. `errors` are drawn as a line of one error up and down of each point."""

    name: str
    points: Sequence[Point]
    colour: int | None = None  # number of a colour; the position in the list by default
    line: str = "solid"  # solid, thin, dashed or none
    dot: str = ""  # circle, hollow or diamond
    errors: Sequence[float | None] = ()
    has_marks: bool = True  # a fitted curve has none: its numbers are not measurements


class Reference(NamedTuple):
    """A dashed line at a value to compare with."""

    name: str
    value: float


class Row(NamedTuple):
    """A row of a row chart: a bar up to `value`, or a marker at it, and dots of single measurements."""

    name: str
    value: float | None
    dots: Sequence[float] = ()
    error: float | None = None
    colour: int = 0
    is_bar: bool = True
    group: str = ""


class LegendEntry(NamedTuple):
    name: str
    colour: int | None  # None: the colour of the text
    style: str = ""  # class of the swatch: dashed, thin, hollow or diamond


class Chart(NamedTuple):
    """A drawn chart: the inside of its `svg`, and its numbers as a table."""

    body: Markup
    height: int  # pixels
    label: str  # for screen readers
    legend: Sequence[LegendEntry]
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    kind: str = ""  # class of the svg: rows, without a vertical axis, or mask, a small picture


# --- numbers --------------------------------------------------------------------------------------------------------


def format_number(value: float) -> str:
    """Format a number for a reader: four digits, commas, and a short exponent.

    >>> format_number(12345.6), format_number(0.123456), format_number(5e-5), format_number(-3.0)
    ('12,346', '0.1235', '5e-5', '-3')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 0.001 <= abs(value) < 1000:
        return f"{value:.4g}"
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def format_tick(value: float) -> str:
    """Format a round number in little space.

    >>> [format_tick(value) for value in (1500, 20_000, 2.5e6, 0.00005, 0.25)]
    ['1,500', '20k', '2.5M', '5e-5', '0.25']
    """
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{name}"
    return format_number(value)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten inside a range.

    >>> nice_ticks(0.3, 9.2), nice_ticks(-0.4, 1.1)
    ([2.0, 4.0, 6.0, 8.0], [0.0, 0.5, 1.0])
    """
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def log_ticks(low: float, high: float, base: int) -> list[float]:
    """Return powers of the base inside a range; of a range without two powers, round numbers.

    >>> log_ticks(3, 2000, 10), log_ticks(20, 70, 10), log_ticks(100, 600, 2)
    ([10.0, 100.0, 1000.0], [20.0, 50.0], [128.0, 256.0, 512.0])
    """
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / MAX_TICKS))
    powers = [float(base) ** i for i in range(first, last + 1, every)]
    if len(powers) > 1:
        return powers
    start = 10.0 ** math.floor(math.log10(low))
    round_numbers = [k * start * scale for scale in (1, 10) for k in (1, 2, 5) if low <= k * start * scale <= high]
    return round_numbers if len(round_numbers) > 1 else nice_ticks(low, high)


class Scale:
    """An axis with its limits: values become shares of its length, from 0 to 1."""

    def __init__(self, axis: Axis, values: Iterable[float], is_padded: bool) -> None:
        self.axis = axis
        known = [value for value in values if self.is_valid(value)] or [1.0 if axis.log_base else 0.0]
        low, high = min(known), max(known)
        if low == high:
            low, high = (low / 2, high * 2) if axis.log_base else (low - 0.5, high + 0.5)
        elif is_padded:
            margin = PADDING * (self.warp(high) - self.warp(low))
            low, high = self.unwarp(self.warp(low) - margin), self.unwarp(self.warp(high) + margin)
        self.low = low if axis.low is None else axis.low
        self.high = high if axis.high is None else axis.high

    def is_valid(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.axis.log_base)

    def warp(self, value: float) -> float:
        return math.log(value) if self.axis.log_base else value

    def unwarp(self, value: float) -> float:
        return math.exp(value) if self.axis.log_base else value

    def share(self, value: float) -> float:
        low, high = self.warp(self.low), self.warp(self.high)
        return min(max((self.warp(value) - low) / (high - low), 0.0), 1.0)

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Return the position and the text of each tick."""
        if self.axis.ticks:
            return [(self.share(value), text) for value, text in self.axis.ticks]
        ticks = log_ticks(self.low, self.high, self.axis.log_base) if self.axis.log_base else []
        return [
            (self.share(value), (self.axis.tick_format or format_tick)(value))
            for value in ticks or nice_ticks(self.low, self.high, about)
            if not self.axis.is_whole or value == int(value)
        ]

    def text(self, value: float) -> str:
        return (self.axis.format or format_number)(value)


# --- markup ---------------------------------------------------------------------------------------------------------


def element(tag: str, attributes: Mapping[str, object] | None = None, *children: object) -> Markup:
    """Return an element; values and texts are escaped, and attributes that are None are left out."""
    from markupsafe import Markup, escape

    shown = [f' {name}="{escape(str(value))}"' for name, value in (attributes or {}).items() if value is not None]
    return Markup(f"<{tag}{''.join(shown)}>{''.join(escape(child) for child in children)}</{tag}>")


def join(parts: Iterable[object]) -> Markup:
    from markupsafe import Markup

    return Markup("").join(parts)  # type: ignore[arg-type]


def percent(share: float) -> str:
    """
    >>> percent(0.5), percent(1 / 3), percent(1.0)
    ('50%', '33.33%', '100%')
    """
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def colour_class(colour: int | None) -> str:
    return "ink" if colour is None else f"c{colour % NUM_COLOURS}"


def thin_ticks(ticks: Sequence[tuple[float, str]]) -> Sequence[tuple[float, str]]:
    """Leave out every second tick until the texts have room side by side in the narrowest plot.

    >>> thin_ticks([(0.0, "1,000"), (0.1, "1,100"), (0.2, "1,200"), (0.3, "1,300")])
    [(0.0, '1,000'), (0.2, '1,200')]
    """
    if all(
        (b - a) * MIN_PLOT_WIDTH >= CHAR_WIDTH * (len(left) + len(right)) / 2 + TICK_GAP
        for (a, left), (b, right) in pairwise(ticks)
    ):
        return ticks
    return thin_ticks(ticks[::2])


def draw_x_axis(scale: Scale, height: float) -> list[Markup]:
    parts = [element("line", {"class": "axis", "x2": "100%", "y1": height, "y2": height})]
    for share, text in thin_ticks(scale.ticks(about=6)):
        x = percent(share)
        parts.append(element("line", {"class": "axis", "x1": x, "x2": x, "y1": height, "y2": height + 4}))
        parts.append(element("text", {"class": "tick", "x": x, "y": height + 17, "text-anchor": "middle"}, text))
    name = {"class": "name", "x": "50%", "y": height + 37, "text-anchor": "middle"}
    return [*parts, element("text", name, scale.axis.name)]


def draw_y_axis(scale: Scale, height: float) -> list[Markup]:
    parts = []
    for share, text in scale.ticks():
        y = percent(1 - share)
        parts.append(element("line", {"class": "grid", "x2": "100%", "y1": y, "y2": y}))
        parts.append(element("text", {"class": "tick", "x": -8, "y": y, "dy": 4, "text-anchor": "end"}, text))
    name = {"class": "name", "x": -height / 2, "y": -52, "text-anchor": "middle", "transform": "rotate(-90)"}
    return [*parts, element("text", name, scale.axis.name)]


def draw_path(points: Sequence[Point], css_class: str) -> Markup:
    """Return a line through points, given as shares of the plot."""
    steps = [f"{PATH_UNITS * x:.1f} {PATH_UNITS * (1 - y):.1f}" for x, y in points]
    box = {"width": "100%", "height": "100%", "viewBox": f"0 0 {PATH_UNITS} {PATH_UNITS}"}
    path = element("path", {"class": css_class, "d": f"M{'L'.join(steps)}"})
    return element("svg", {**box, "preserveAspectRatio": "none"}, path)


def draw_dot(x: float, y: float, colour: int | None, dot: str = "circle") -> Markup:
    """Return a dot; a diamond is a turned square in an `svg` of its own, since only those move by percentages."""
    if dot == "diamond":
        shape = element("path", {"class": f"dot {colour_class(colour)}", "d": "M0 -6L6 0L0 6L-6 0Z"})
        return element("svg", {"class": "free", "x": percent(x), "y": percent(1 - y)}, shape)
    style = f"dot {colour_class(colour)}{' hollow' if dot == 'hollow' else ''}"
    return element("circle", {"class": style, "cx": percent(x), "cy": percent(1 - y), "r": 3.5})


def draw_band(start: float, stop: float, cross: float, title: str) -> Markup:
    """Return the mark of a vertical band, with a line at its value that is shown while the band is pointed at."""
    x = percent(cross)
    return element(
        "g",
        {"class": "mark"},
        element("title", {}, title),
        element("rect", {"class": "hit", "x": percent(start), "width": percent(stop - start), "height": "100%"}),
        element("line", {"class": "cross", "x1": x, "x2": x, "y2": "100%"}),
    )


# --- line charts ----------------------------------------------------------------------------------------------------


def downsample(points: Sequence[Point]) -> Sequence[Point]:
    """Average neighbouring points so that at most `MAX_PLOT_POINTS` remain, which bounds the size of the page."""
    size = math.ceil(len(points) / MAX_PLOT_POINTS)
    if size <= 1:
        return points
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    references: Sequence[Reference] = (),
    height: int = PLOT_HEIGHT,
) -> Chart:
    """Draw lines and dots over two axes. A mark is the band around an x, with the numbers of all series there."""
    drawn = [one._replace(points=downsample(one.points)) for one in series]
    drawn = [one._replace(colour=i if one.colour is None else one.colour) for i, one in enumerate(drawn)]
    points = [(p, e) for one in drawn for p, e in zip(one.points, one.errors or [None] * len(one.points), strict=True)]
    has_dots = any(one.line == "none" for one in drawn)
    x_scale = Scale(x, [p[0] for p, _ in points], is_padded=has_dots)
    ends = [p[1] + sign * (error or 0.0) for p, error in points for sign in (1, -1)]
    y_scale = Scale(y, [*ends, *(r.value for r in references)], is_padded=True)
    parts = [*draw_y_axis(y_scale, height), *draw_x_axis(x_scale, height)]
    for reference in references:
        at = percent(1 - y_scale.share(reference.value))
        parts.append(element("line", {"class": "line ink dashed", "x2": "100%", "y1": at, "y2": at}))
    for one in drawn:
        parts += draw_series(one, x_scale, y_scale)
    marked = [one for one in drawn if one.has_marks]
    marks = make_marks(marked, x_scale)
    names = [one.name or y.name for one in marked]
    parts += draw_bands(marks, names, x_scale, y_scale)
    rows = [[x_scale.text(at), *("" if v is None else y_scale.text(v) for v in values)] for at, values in marks]
    return Chart(
        join(parts),
        height,
        f"{y.name} by {x.name}",
        [
            *(LegendEntry(one.name, one.colour, legend_style(one)) for one in drawn if one.name and one.points),
            *(LegendEntry(f"{r.name}: {y_scale.text(r.value)}", None, "dashed") for r in references),
        ],
        [x.name, *names],
        rows,
    )


def legend_style(series: Series) -> str:
    return f"{series.line if series.line != 'none' else 'dots'} {series.dot}".strip()


def draw_series(series: Series, x: Scale, y: Scale) -> list[Markup]:
    known = [(i, p) for i, p in enumerate(series.points) if x.is_valid(p[0]) and y.is_valid(p[1])]
    colour, parts = colour_class(series.colour), []
    if series.line != "none" and len(known) > 1:
        style = "" if series.line == "solid" else f" {series.line}"
        parts.append(draw_path([(x.share(p[0]), y.share(p[1])) for _, p in known], f"line {colour}{style}"))
    for i, p in known:
        if series.errors and series.errors[i] is not None:
            at, error = percent(x.share(p[0])), series.errors[i] or 0.0
            ends = {"y1": percent(1 - y.share(p[1] - error)), "y2": percent(1 - y.share(p[1] + error))}
            parts.append(element("line", {"class": f"error-bar {colour}", "x1": at, "x2": at, **ends}))
    if series.dot or len(known) == 1:
        parts += [draw_dot(x.share(p[0]), y.share(p[1]), series.colour, series.dot) for _, p in known]
    return parts


def make_marks(series: Sequence[Series], x: Scale) -> list[tuple[float, list[float | None]]]:
    """Return the values of all series at each x; of very many, in `MAX_MARKS` cells of equal width, by their mean."""
    distinct = sorted({p[0] for one in series for p in one.points if x.is_valid(p[0])})
    cells: dict[float, float] = {at: at for at in distinct}  # x to the cell that it is in, named by its first x
    if len(distinct) > MAX_MARKS:
        first: dict[int, float] = {}
        cells = {at: first.setdefault(min(int(x.share(at) * MAX_MARKS), MAX_MARKS - 1), at) for at in distinct}
    values: dict[float, list[list[float]]] = {cell: [[] for _ in series] for cell in cells.values()}
    for i, one in enumerate(series):
        for at, value in one.points:
            if at in cells and math.isfinite(value):
                values[cells[at]][i].append(value)
    means = {cell: [sum(v) / len(v) if v else None for v in lists] for cell, lists in values.items()}
    return [(cell, found) for cell, found in means.items() if any(v is not None for v in found)]


def draw_bands(
    marks: Sequence[tuple[float, list[float | None]]], names: Sequence[str], x: Scale, y: Scale
) -> list[Markup]:
    """Return a band for each mark, from halfway to the one before it to halfway to the next."""
    shares = [x.share(at) for at, _ in marks]
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(shares)), 1.0]
    bands = []
    for i, (at, values) in enumerate(marks):
        numbers = [f"{name} {y.text(v)}" for name, v in zip(names, values, strict=True) if v is not None]
        bands.append(
            draw_band(edges[i], edges[i + 1], shares[i], " · ".join([f"{x.axis.name} {x.text(at)}", *numbers]))
        )
    return bands


def loss_chart(
    train: Sequence[Point] | LossSeriesByRun,
    evals: Sequence[Point] | LossSeriesByRun,
    unigram_entropy: float | None = None,
    y_name: str = "loss (nats per token)",
) -> Chart:
    """Draw loss over steps for one run (two lists) or for several (two dictionaries by run name).

    The thin line is the training loss; the thick line with dots is the held-out loss. The dashed line is the unigram
    entropy: the loss of a model that knows only token frequencies. A run above it has learnt nothing from context.
    """
    runs, held_out = (one if isinstance(one, Mapping) else {"": one} for one in (train, evals))
    series = []
    for colour, name in enumerate(dict.fromkeys([*runs, *held_out])):
        prefix = f"{name}: " if name else ""
        if runs.get(name):
            series.append(Series(f"{prefix}training", runs[name], colour, "thin"))
        if held_out.get(name):
            series.append(Series(f"{prefix}held out", held_out[name], colour, dot="circle"))
    entropy = unigram_entropy
    lines = [] if entropy is None else [Reference("word frequencies only (unigram entropy)", entropy)]
    return line_chart(series, Axis("step", is_whole=True), Axis(y_name), lines)


# --- bars -----------------------------------------------------------------------------------------------------------


def histogram(
    values: Sequence[float], num_bins: int, x: Axis, y: Axis, x_references: Sequence[Reference] = ()
) -> Chart:
    """Draw how many values are in each of `num_bins` intervals of equal width."""
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    width = (high - low) / num_bins
    counts = [0] * num_bins
    for value in values:
        counts[min(int((value - low) / width), num_bins - 1)] += 1
    x_scale = Scale(x, [low, high, *(r.value for r in x_references)], is_padded=False)
    y_scale = Scale(y._replace(low=0.0), [0, *counts], is_padded=True)
    parts = [*draw_y_axis(y_scale, PLOT_HEIGHT), *draw_x_axis(x_scale, PLOT_HEIGHT)]
    rows = []
    for i, count in enumerate(counts):
        ends = low + i * width, low + (i + 1) * width
        start, stop = map(x_scale.share, ends)
        top = y_scale.share(count)
        texts = f"{x_scale.text(ends[0])} to {x_scale.text(ends[1])}", f"{count:,}"
        bar = {"x": percent(start), "width": percent(stop - start), "y": percent(1 - top), "height": percent(top)}
        hit = {"class": "hit", "x": percent(start), "width": percent(stop - start), "height": "100%"}
        parts.append(
            element(
                "g",
                {"class": "mark"},
                element("title", {}, f"{texts[0]} · {y.name} {texts[1]}"),
                element("rect", hit),
                element("rect", {"class": "bin c0", **bar}),
            )
        )
        rows.append(texts)
    for reference in x_references:
        at = percent(x_scale.share(reference.value))
        parts.append(element("line", {"class": "line ink dashed", "x1": at, "x2": at, "y2": "100%"}))
    legend = [LegendEntry(f"{r.name}: {x_scale.text(r.value)}", None, "dashed") for r in x_references]
    return Chart(join(parts), PLOT_HEIGHT, f"{y.name} by {x.name}", legend, [x.name, y.name], rows)


def row_chart(
    rows: Sequence[Row],
    x: Axis,
    references: Sequence[Reference] = (),
    columns: tuple[str, str, str] = ("", "mean", "single values"),
) -> Chart:
    """Draw one row for each value: its name and its number above a bar (or a marker) with dots of single values.

    Names have a line of their own, so that a long one is readable on a phone.
    """
    numbers = [n for row in rows for n in ([] if row.value is None else [row.value]) + list(row.dots)]
    numbers += [row.value + sign * row.error for row in rows if row.value is not None and row.error for sign in (1, -1)]
    is_bar = any(row.is_bar for row in rows)
    at_least = [0.0] if is_bar else []
    scale = Scale(x, [*numbers, *at_least, *(r.value for r in references)], is_padded=True)
    if is_bar and x.low is None and min([0.0, *numbers]) >= 0:
        scale.low = 0.0
    parts, y, group, table = [], 0, "", []
    for row in rows:
        if row.group != group:
            group, y = row.group, y + GROUP_HEIGHT
            parts.append(element("text", {"class": "group", "y": y - 8}, group))
        parts.append(draw_row(row, scale, y))
        y += ROW_HEIGHT
        name = f"{row.group}: {row.name}" if row.group else row.name
        mean = "" if row.value is None else scale.text(row.value)
        table.append([name, mean, ", ".join(map(scale.text, row.dots)) or error_text(row, scale)])
    lines = [  # behind the rows
        element("line", {"class": "line ink dashed", "x1": at, "x2": at, "y2": y})
        for at in (percent(scale.share(reference.value)) for reference in references)
    ]
    parts += draw_x_axis(scale, y)
    if not any(row[2] for row in table):
        columns, table = columns[:2], [row[:2] for row in table]  # type: ignore[assignment]
    return Chart(
        join([*lines, *parts]),
        y,
        x.name,
        [LegendEntry(f"{r.name}: {scale.text(r.value)}", None, "dashed") for r in references],
        columns,
        table,
        "rows",
    )


def error_text(row: Row, scale: Scale) -> str:
    return "" if row.error is None else f"± {scale.text(row.error)}"


def draw_row(row: Row, scale: Scale, top: float) -> Markup:
    number = "" if row.value is None else f"{scale.text(row.value)} {error_text(row, scale)}".strip()
    dots = ", ".join(map(scale.text, row.dots))
    title = " · ".join(filter(None, [row.group, f"{row.name} {number}".strip(), dots]))
    colour, middle = colour_class(row.colour), top + 27
    parts = [
        element("title", {}, title),
        element("rect", {"class": "hit", "y": top, "width": "100%", "height": ROW_HEIGHT}),
        element("text", {"class": "row-name", "y": top + 14}, row.name),
        element("text", {"class": "row-value", "x": "100%", "y": top + 14, "text-anchor": "end"}, number),
    ]
    if row.value is not None and row.is_bar:
        start, stop = sorted(map(scale.share, (row.value, max(scale.low, 0.0) if scale.low >= 0 else 0.0)))
        box = {"x": percent(start), "width": percent(stop - start), "y": top + 20, "height": 14, "rx": 3}
        parts.append(element("rect", {"class": f"bin {colour}", **box}))
    if row.value is not None and row.error:
        ends = [percent(scale.share(row.value + sign * row.error)) for sign in (-1, 1)]
        line = {"class": f"error-bar {colour}", "x1": ends[0], "x2": ends[1], "y1": middle, "y2": middle}
        parts.append(element("line", line))
    if row.value is not None and not row.is_bar:
        parts.append(
            element("circle", {"class": f"dot {colour}", "cx": percent(scale.share(row.value)), "cy": middle, "r": 5})
        )
    for value in row.dots:
        dot = {"class": f"dot outlined {colour}", "cx": percent(scale.share(value)), "cy": middle, "r": 4}
        parts.append(element("circle", dot))
    return element("g", {"class": "mark"}, *parts)


# --- parallel axes, masks -------------------------------------------------------------------------------------------


class ParallelAxis(NamedTuple):
    """One of several axes that stand side by side, with the value of each line."""

    name: str
    values: Sequence[float]
    texts: Sequence[str]
    log_base: int = 0


def parallel_chart(axes: Sequence[ParallelAxis], names: Sequence[str], colours: Sequence[int]) -> Chart:
    """Draw a line for each name through its value on each axis."""
    parts, columns = [], []
    height, margin = PLOT_HEIGHT, 0.5 / len(axes)  # room for the names of the outer axes
    for i, axis in enumerate(axes):
        scale = Scale(Axis(axis.name, axis.log_base), axis.values, is_padded=False)
        x = margin + i / len(axes)
        columns.append([scale.share(value) for value in axis.values])
        known = dict(zip(axis.values, axis.texts, strict=True))
        shown = sorted(known) if len(known) <= 5 else [min(known), max(known)]
        parts.append(element("line", {"class": "axis", "x1": percent(x), "x2": percent(x), "y2": "100%"}))
        for value in shown:
            place = {"x": percent(x), "dx": -6, "y": percent(1 - scale.share(value)), "dy": 4, "text-anchor": "end"}
            parts.append(element("text", {"class": "tick", **place}, known[value]))
        words = axis.name.split()
        for k, line in enumerate([words[0], " ".join(words[1:])]):
            place = {"x": percent(x), "y": height + 18 + 15 * k, "text-anchor": "middle"}
            parts.append(element("text", {"class": "name", **place}, line))
    lines = []
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        points = [(margin + k / len(axes), column[i]) for k, column in enumerate(columns)]
        title = " · ".join([name, *(f"{axis.name} {axis.texts[i]}" for axis in axes)])
        shape = draw_path(points, f"line {colour_class(colour)}{' faint' if colour == 0 else ' strong'}")
        lines.append(element("g", {"class": "mark"}, element("title", {}, title), draw_path(points, "line hit"), shape))
    rows = [[name, *(axis.texts[i] for axis in axes)] for i, name in enumerate(names)]
    table = ["", *(axis.name for axis in axes)]
    return Chart(join([*lines, *parts]), height, ", ".join(axis.name for axis in axes), [], table, rows, "rows")


def mask_chart(path: str, rows: int, columns: int, x: Axis, y: Axis, titles: Sequence[str], size: int = 150) -> Chart:
    """Draw a mask, given as an SVG path of its dark cells, with a mark for each row. Row 0 is on top."""
    height = min(max(round(size * rows / columns), 8), 2 * size)
    x_scale = Scale(x._replace(low=x.low or 0, high=x.high or columns), [], is_padded=False)
    y_scale = Scale(y._replace(low=y.low or 0, high=y.high or rows), [], is_padded=False)
    cells = element(
        "svg",
        {"width": "100%", "height": "100%", "viewBox": f"0 0 {columns} {rows}", "preserveAspectRatio": "none"},
        element("path", {"class": "cells c0", "d": path, "shape-rendering": "crispEdges"}),
    )
    parts = [element("rect", {"class": "frame", "width": "100%", "height": "100%"}), cells]
    for share, text in y_scale.ticks() if height > 40 else y_scale.ticks()[:1]:
        place = {"x": -6, "y": percent(share), "dy": 4, "text-anchor": "end"}
        parts.append(element("text", {"class": "tick", **place}, text))
    name = {"class": "name", "x": -height / 2, "y": -34, "text-anchor": "middle", "transform": "rotate(-90)"}
    if height > 60:
        parts.append(element("text", name, y.name))
    parts += draw_x_axis(x_scale, height)
    for i, title in enumerate(titles):
        box = {"class": "hit", "y": percent(i / rows), "width": "100%", "height": percent(1 / rows)}
        parts.append(element("g", {"class": "mark"}, element("title", {}, title), element("rect", box)))
    table = [title.split(": ", 1) for title in titles]
    return Chart(join(parts), height, f"{y.name} by {x.name}", [], [y.name, x.name], table, "mask")
