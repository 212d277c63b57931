"""Reports as one self-contained HTML file: text, tables, figures and cloze samples.

The markup is in Jinja templates beside this file, with the CSS in `templates/page.css.j2`. Plots are matplotlib
figures that become inline SVG. A page makes no request, so it can be mailed, archived and opened without a network.
Its content security policy allows one script at most, named by its hash: nothing in a text can run.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firth.core import files
from firth.core.errors import UserError

if TYPE_CHECKING:  # matplotlib takes half a second to import, and most commands write no page
    from jinja2 import Environment
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LossSeries = Sequence[tuple[float, float]]  # (step, loss)
LossSeriesByRun = Mapping[str, LossSeries]

# Distinguishable on white and on black.
PLOT_COLOURS = ["#2f7ed8", "#e0703a", "#2fa36b", "#9a63c9", "#c9a227", "#d1495b"]
# An otherwise unused colour. The SVG's occurrences become `currentColor`: the page's text colour, light or dark.
INK_SENTINEL_COLOUR = "#010203"
MAX_PLOT_POINTS = 500  # points per line; longer series are averaged


class ClozeSample(NamedTuple):
    """A sentence with a blank, the right word if it is known, and the model's guesses with their probabilities."""

    before: str
    after: str
    answer: str | None
    guesses: Sequence[tuple[str, float]]


class HtmlPage:
    """A page that is built from top to bottom and saved as one file.

    Each `add_*` method renders one fragment with the macro of the same name in `templates/fragments.html.j2`.
    Jinja escapes every value. `css_template` follows the common CSS, and `script_template` is the page's only script;
    `command` is named in the page's head, by which `resolve_page_path` recognizes it.
    """

    def __init__(self, title: str, css_template: str = "", command: str = "") -> None:
        self.title, self.css_template, self.command = title, css_template, command
        self.script_template = ""
        self.fragments: list[str] = []
        self.num_figures = 0

    def add_heading(self, text: str) -> None:
        """Start a section."""
        self.fragments.append(_macros().heading(text))

    def add_paragraph(self, text: str) -> None:
        """Add a paragraph of plain text."""
        self.fragments.append(_macros().paragraph(text))

    def add_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; columns that hold only numbers are right-aligned."""
        cells = [[format_cell(value) for value in row] for row in rows]
        assert all(len(row) == len(columns) for row in cells), "a row has one cell for each column"
        titled = [
            {"title": title, "css_class": "number" if _is_numeric([row[i] for row in cells]) else "words"}
            for i, title in enumerate(columns)
        ]
        self.fragments.append(_macros().table(titled, cells, caption))

    def add_figure(self, figure: Figure, caption: str = "") -> None:
        """Add a matplotlib figure as inline SVG; black lines and text take the page's text colour."""
        from markupsafe import Markup

        self.num_figures += 1
        svg = Markup(_figure_to_svg(figure, salt=f"figure-{self.num_figures}", label=caption))
        self.fragments.append(_macros().figure(svg, caption))

    def add_cloze_samples(self, samples: Iterable[ClozeSample], caption: str = "") -> None:
        """Add sentences with a marked blank, each above the model's guesses and their probabilities."""
        self.fragments.append(_macros().cloze_samples(samples, caption))

    def add_code(self, text: str, caption: str = "") -> None:
        """Add preformatted text, such as a recipe."""
        self.fragments.append(_macros().code(text, caption))

    def add_fragment(self, template: str, macro: str, *values: Any) -> None:
        """Add the markup of a macro of another template, for fragments that only one page has."""
        self.fragments.append(getattr(_environment().get_template(template).module, macro)(*values))

    def to_html(self) -> str:
        """Return the whole page. Lone surrogates, which UTF-8 cannot encode, become question marks."""
        script = _environment().get_template(self.script_template).render() if self.script_template else ""
        script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        html = _environment().get_template("page.html.j2").render(page=self, script=script, script_hash=script_hash)
        return html.encode(errors="replace").decode()

    def save(self, path: str | Path) -> None:
        files.write_text(Path(path), self.to_html())


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_template(name: str, **values: Any) -> str:
    """Return the text of a template; every value is escaped."""
    return _environment().get_template(name).render(**values)


def _macros() -> Any:
    """The macros of `fragments.html.j2` as functions that return markup."""
    return _environment().get_template("fragments.html.j2").module


def generator_meta_tag(command: str) -> str:
    """Return the meta tag by which `resolve_page_path` recognizes a page that `command` wrote."""
    return f'<meta name="generator" content="firth {command}">'


def resolve_page_path(folder: Path, command: str, overwrite: bool) -> Path:
    """Return the path of a command's page; refuse to replace a file of another origin without `overwrite`."""
    page = folder / f"{command}.html"
    files.check_writable(folder)
    if page.is_dir():
        raise UserError(f"{page} is a folder. Name another --output-dir.")
    if page.exists() and not overwrite and generator_meta_tag(command).encode() not in page.read_bytes()[:10_000]:
        raise UserError(f"{page} was not written by `firth {command}`. Name another --output-dir, or pass --overwrite.")
    return page


def escape_html(text: str) -> str:
    """Escape a text for HTML; lone surrogates, which UTF-8 cannot encode, become question marks."""
    return escape(text.encode(errors="replace").decode())


def format_cell(value: object) -> str:
    """Format a value for a table cell.

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
    """Whether every non-empty cell starts with a number."""
    filled = [cell for cell in cells if cell != "–"]
    return bool(filled) and all(re.match(r"[-+−±]?(\d|\.\d|inf|nan)", cell) for cell in filled)


def _figure_to_svg(figure: Figure, salt: str, label: str) -> str:
    """Return the figure as inline SVG: transparent, in the page's text colour, with ids that are unique by `salt`."""
    import matplotlib

    _recolour_figure(figure)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata=dict.fromkeys(["Creator", "Date", "Format", "Type"])
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK_SENTINEL_COLOUR, "currentColor")
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape_html(label)}"', 1).strip()


def _recolour_figure(figure: Figure) -> None:
    """Replace matplotlib's default black by the sentinel colour."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK_SENTINEL_COLOUR)
    for axes in figure.axes:
        axes.tick_params(which="both", color=INK_SENTINEL_COLOUR, labelcolor=INK_SENTINEL_COLOUR)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK_SENTINEL_COLOUR)


def make_axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return an empty plot in the style of the page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=INK_SENTINEL_COLOUR, alpha=0.12, linewidth=0.8)
    return figure, axes


def escape_mathtext(name: str) -> str:
    """Escape dollar signs, which start a formula in matplotlib."""
    return name.replace("$", r"\$")


def _downsample(series: LossSeries) -> LossSeries:
    """Average neighbouring points so that at most `MAX_PLOT_POINTS` remain, which bounds the size of the SVG."""
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
    """Plot loss over steps for one run (two lists) or for several (two dictionaries by run name).

    The thin line is the training loss; the thick line with dots is the held-out loss. The dashed line is the unigram
    entropy: the loss of a model that knows only token frequencies. A run above it has learnt nothing from context.
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
        axes.axhline(
            unigram_entropy,
            color=INK_SENTINEL_COLOUR,
            alpha=0.7,
            linewidth=1.2,
            linestyle="--",
            label=f"word frequencies only (unigram entropy): {unigram_entropy:.2f}",
        )
    add_plot_legend(axes)
    return figure


def add_plot_legend(axes: Axes) -> None:
    """Put the legend above the plot, where it covers no line; a column holds both lines of one run."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        num_columns = 2 if len(handles) <= 2 else min(math.ceil(len(handles) / 2), 3)
        figure = axes.get_figure(root=True)
        assert figure is not None
        figure.legend(handles, labels, loc="outside upper left", ncols=num_columns, frameon=False, fontsize=9)
