"""One self-contained page of results: text, tables, figures and filled blanks in a single HTML file."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from firth.core import files
from firth.core.errors import UserError

if TYPE_CHECKING:  # it takes half a second to load, and most commands draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LossSeries = Sequence[tuple[float, float]]  # (step, loss)
LossSeriesByRun = Mapping[str, LossSeries]

# Six colours that can be told apart on white and on black.
PLOT_COLOURS = ["#2f7ed8", "#e0703a", "#2fa36b", "#9a63c9", "#c9a227", "#d1495b"]
# A colour that nothing else uses: in the page it becomes the colour of the text, light or dark.
INK_SENTINEL_COLOUR = "#010203"
MAX_PLOT_POINTS = 500

PAGE_CSS = """
:root { color-scheme: light dark; --paper: #fcfcfa; --ink: #1f2328; --quiet: #656d76; --line: #dfe2e6;
  --card: #f3f4f2; --accent: #2f7ed8; --blank: #ffe9a8; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e4e6e9; --quiet: #9aa2ac; --line: #343940;
  --card: #1f2227; --accent: #6cabf0; --blank: #5d4a12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 3rem 1.25rem 5rem; max-width: 46rem; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 1.5rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 3rem 0 0.75rem; }
p { margin: 0 0 1rem; overflow-wrap: anywhere; white-space: pre-line; }
figure { margin: 1.75rem 0; }
figcaption { color: var(--quiet); font-size: 0.875rem; margin-top: 0.6rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; min-width: 60%; font-size: 0.9375rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.45rem 0.75rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--quiet); font-weight: 600; font-size: 0.8125rem; }
th:first-child, td:first-child { padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
pre { margin: 0; padding: 1rem 1.1rem; overflow-x: auto; background: var(--card); border-radius: 8px;
  font: 0.8125rem/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.sample { padding: 1rem 1.1rem; margin: 0.75rem 0; background: var(--card); border-radius: 8px; }
.sample p { margin: 0 0 0.6rem; white-space: pre-wrap; }
mark { background: var(--blank); color: inherit; border-radius: 4px; padding: 0.05em 0.5em; white-space: pre; }
.guesses { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr 3.5rem; gap: 0.2rem 0.75rem;
  align-items: center; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
.guess { white-space: pre; }
.right { font-weight: 700; }
.bar { height: 0.5rem; border-radius: 4px; background: var(--accent); min-width: 2px; }
.share { color: var(--quiet); text-align: right; }
@media print { body { max-width: none; padding: 0; } figure, .sample { break-inside: avoid; } }
"""


class ClozeSample(NamedTuple):
    """A sentence with a blank, the word that stood there, and the model's guesses with their probabilities."""

    before: str
    after: str
    answer: str | None
    guesses: Sequence[tuple[str, float]]


class HtmlPage:
    """A page that is written piece by piece, from top to bottom, and saved as one file.

    `extra_css` is CSS on top of the common one, `head_html` is markup for the page's head.
    """

    def __init__(self, title: str, extra_css: str = "", head_html: str = "") -> None:
        self.title, self.extra_css, self.head_html = title, extra_css, head_html
        self.fragments: list[str] = []
        self.num_figures = 0

    def add_heading(self, text: str) -> None:
        """Begin a section."""
        self.fragments.append(f"<h2>{escape_html(text)}</h2>")

    def add_paragraph(self, paragraph: str) -> None:
        """A paragraph of plain text."""
        self.fragments.append(f"<p>{escape_html(paragraph)}</p>")

    def add_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """A table; columns that hold only numbers stand on the right."""
        cells = [[format_cell(value) for value in row] for row in rows]
        assert all(len(row) == len(columns) for row in cells), "a row has one cell for each column"
        kinds = ["number" if _is_numeric([row[i] for row in cells]) else "words" for i in range(len(columns))]
        head = _table_row_html("th", columns, kinds)
        body = "\n".join(_table_row_html("td", row, kinds) for row in cells)
        table = f"<table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        self.fragments.append(_figure_html(f'<div class="scroll">{table}</div>', caption))

    def add_figure(self, figure: Figure, caption: str = "") -> None:
        """A matplotlib figure as lines and text inside the page, which take the colour of the page's text."""
        self.num_figures += 1
        self.fragments.append(
            _figure_html(_figure_to_svg(figure, name=f"figure-{self.num_figures}", label=caption), caption)
        )

    def add_cloze_samples(self, samples: Iterable[ClozeSample], caption: str = "") -> None:
        """Filled blanks: each sentence with its blank marked, and under it what the model would write there."""
        self.fragments.append(_figure_html("\n".join(_cloze_sample_html(sample) for sample in samples), caption))

    def add_code(self, text: str, caption: str = "") -> None:
        """Text as it is, such as a recipe."""
        self.fragments.append(_figure_html(f"<pre>{escape_html(text)}</pre>", caption))

    def add_html(self, fragment: str) -> None:
        """A piece of HTML as it is."""
        self.fragments.append(fragment)

    def to_html(self) -> str:
        """The whole page. It asks for nothing from outside, and the browser is told to fetch nothing."""
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        lines = [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_html(self.title)}</title>",
            *([self.head_html] if self.head_html else []),
            f"<style>{PAGE_CSS}{self.extra_css}</style>",
            "</head>",
            "<body>",
            f"<h1>{escape_html(self.title)}</h1>",
            *self.fragments,
            "</body>",
            "</html>",
        ]
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        files.write_text(Path(path), self.to_html())


def generator_meta_tag(command: str) -> str:
    """What tells a page of ours, in its head, from a person's own file."""
    return f'<meta name="generator" content="firth {command}">'


def resolve_page_path(folder: Path, command: str, overwrite: bool) -> Path:
    """Where the page of a verb goes; a file there that the verb did not write is left alone unless `overwrite`."""
    page = folder / f"{command}.html"
    files.check_writable(folder)
    if page.is_dir():
        raise UserError(f"{page} is a folder. Name another --output-dir.")
    if page.exists() and not overwrite and generator_meta_tag(command).encode() not in page.read_bytes()[:10_000]:
        raise UserError(f"{page} was not written by `firth {command}`. Name another --output-dir, or pass --overwrite.")
    return page


def escape_html(text: str) -> str:
    """Text that is safe inside HTML; half characters, which no file can hold, become question marks."""
    return escape(text.encode(errors="replace").decode())


def _figure_html(content: str, caption: str) -> str:
    below = f"\n<figcaption>{escape_html(caption)}</figcaption>" if caption else ""
    return f"<figure>\n{content}{below}\n</figure>"


def format_cell(value: object) -> str:
    """A value as a person reads it.

    >>> format_cell(12345), format_cell(0.123456), format_cell(20412.2), format_cell(None), format_cell("bert-tiny")
    ('12,345', '0.1235', '20,412', '–', 'bert-tiny')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return str(value)


def _is_numeric(cells: Sequence[str]) -> bool:
    """Whether every cell that is filled begins with a number."""
    filled = [cell for cell in cells if cell != "–"]
    return bool(filled) and all(re.match(r"[-+−±]?(\d|\.\d|inf|nan)", cell) for cell in filled)


def _table_row_html(tag: str, cells: Sequence[str], css_classes: Sequence[str]) -> str:
    parts = (
        f'<{tag} class="{kind}">{escape_html(cell)}</{tag}>' for cell, kind in zip(cells, css_classes, strict=True)
    )
    return "<tr>" + "".join(parts) + "</tr>"


def _cloze_sample_html(sample: ClozeSample) -> str:
    blank = "?" if sample.answer is None else sample.answer
    lines = [
        f"<p>{escape_html(sample.before)}<mark>{escape_html(blank)}</mark>{escape_html(sample.after)}</p>",
        '<div class="guesses">',
    ]
    for word, probability in sample.guesses:
        right = " right" if word == sample.answer else ""
        lines += [
            f'<span class="guess{right}">{escape_html(word)}</span>',
            f'<span class="bar" style="width: {100 * probability:.1f}%"></span>',
            f'<span class="share">{100 * probability:.1f}%</span>',
        ]
    return '<div class="sample">\n' + "\n".join([*lines, "</div>"]) + "\n</div>"


def _figure_to_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as SVG for the middle of a page: no background, ink in the colour of the text, names used once."""
    import matplotlib

    _recolour_figure(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"])
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK_SENTINEL_COLOUR, "currentColor")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape_html(label)}"', 1).strip()


def _recolour_figure(figure: Figure) -> None:
    """Everything that is drawn in black by default is drawn in ink."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK_SENTINEL_COLOUR)
    for axes in figure.axes:
        axes.tick_params(which="both", color=INK_SENTINEL_COLOUR, labelcolor=INK_SENTINEL_COLOUR)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK_SENTINEL_COLOUR)


def make_axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """An empty plot in the style of the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=INK_SENTINEL_COLOUR, alpha=0.12, linewidth=0.8)
    return figure, axes


def escape_mathtext(name: str) -> str:
    """A name as it is: a dollar sign begins no formula."""
    return name.replace("$", r"\$")


def _downsample(series: LossSeries) -> LossSeries:
    """At most `MAX_PLOT_POINTS` points, each the mean of its neighbours, so that a long run stays a small picture."""
    size = math.ceil(len(series) / MAX_PLOT_POINTS)
    if size <= 1:
        return series
    groups = [series[i : i + size] for i in range(0, len(series), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _by_run_name(series: LossSeries | LossSeriesByRun) -> LossSeriesByRun:
    return series if isinstance(series, Mapping) else {"": series}


def plot_loss_curve(
    train: LossSeries | LossSeriesByRun, evals: LossSeries | LossSeriesByRun, unigram_entropy: float | None = None
) -> Figure:
    """Loss against steps for one run (two lists) or several (two dictionaries by name).

    Thin is the training loss, thick with dots the held-out loss. The dashed line is what a model reaches that
    knows only how frequent each token is: a run that stays above it has learnt nothing about context.
    """
    figure, axes = make_axes("step", "loss (nats per token)")
    runs, held_out = _by_run_name(train), _by_run_name(evals)
    names = list(dict.fromkeys([*runs, *held_out]))
    for name, colour in zip(names, cycle(PLOT_COLOURS)):
        prefix = f"{escape_mathtext(name)}: " if name else ""
        if runs.get(name):
            x, y = zip(*_downsample(runs[name]), strict=True)
            axes.plot(x, y, color=colour, linewidth=1.2, alpha=0.6, label=prefix + "training")
        if held_out.get(name):
            x, y = zip(*held_out[name], strict=True)
            axes.plot(x, y, color=colour, linewidth=2, marker="o", markersize=4, label=prefix + "held out")
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=INK_SENTINEL_COLOUR, alpha=0.7, linewidth=1.2, linestyle="--")
        axes.annotate(
            f"word frequencies only (unigram entropy): {unigram_entropy:.2f}",
            xy=(1, unigram_entropy),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
            horizontalalignment="right",
            fontsize=9,
        )
    add_plot_legend(axes)
    return figure


def add_plot_legend(axes: Axes) -> None:
    """The names of the lines above the plot, where they cover nothing; each column holds both lines of one name."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        num_columns = 2 if len(handles) <= 2 else min(math.ceil(len(handles) / 2), 3)
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, frameon=False, fontsize=9)
