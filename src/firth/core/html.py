"""Reports as one self-contained HTML file: text, tables, charts and cloze samples.

The components are Jinja macros in `templates/fragments.html.j2`, and charts are drawn by `core/chart.py`. The
playground has the same components and the same stylesheet, `templates/design.css`. A page makes no request, so it can
be mailed, archived and opened without a network. Its content security policy names the page's style and script by their
hashes: nothing in a text can run, and nothing in a text can restyle the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firth.core import files
from firth.core.chart import Chart
from firth.core.errors import UserError

if TYPE_CHECKING:  # most commands write no page
    from jinja2 import Environment
    from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
SHARED_STYLES = ("colours.css", "design.css")  # of reports and of the playground
READOUT_SCRIPT = "readout.js"  # of reports and of the playground
MAX_NARROW_TABLE_CHARS = 44  # characters of a row that fit on a phone; wider tables become lists there
MAX_CELL_CHARS = 22  # characters after which a cell of words is broken


class ClozeSample(NamedTuple):
    """A sentence with a blank, the right word if it is known, and the model's guesses with their probabilities."""

    before: str
    after: str
    answer: str | None
    guesses: Sequence[tuple[str, float]]


class HtmlPage:
    """A page that is built from top to bottom and saved as one file.

    Each `add_*` method renders one component, and Jinja escapes every value. `command` is named in the page's head, by
    which `resolve_page_path` recognizes it. `scripts` are files of `templates/` that the page runs.
    """

    def __init__(self, title: str, command: str = "") -> None:
        self.title, self.command = title, command
        self.scripts: list[str] = []
        self.fragments: list[Markup] = []

    def add_heading(self, text: str) -> None:
        """Start a section."""
        self.fragments.append(_macros().heading(text))

    def add_lead(self, text: str) -> None:
        """Add the sentence that a reader should take away."""
        self.fragments.append(_macros().lead(text))

    def add_paragraph(self, text: str) -> None:
        """Add a paragraph of plain text."""
        self.fragments.append(_macros().paragraph(text))

    def add_note(self, level: str, title: str, text: str, numbers: str = "", command: str = "") -> None:
        """Add a note with a level (error, warning or info), its evidence and a command to try."""
        self.fragments.append(_macros().note(level, title, text, numbers, command))

    def add_facts(self, facts: Mapping[str, object] | Iterable[tuple[str, object]]) -> None:
        """Add names with their values."""
        self.fragments.append(render_facts(facts))

    def add_table(self, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> None:
        """Add a table; columns that hold only numbers are right-aligned."""
        self.fragments.append(render_table(columns, rows, caption))

    def add_chart(self, chart: Chart, caption: str = "") -> None:
        """Add a chart with its legend and its numbers."""
        self._add_chart(render_chart(chart, caption))

    def add_charts(self, charts: Sequence[Chart], caption: str = "") -> None:
        """Add small charts side by side; each one's label stands below it."""
        self._add_chart(_macros().charts([render_chart(chart, chart.label) for chart in charts], caption))

    def _add_chart(self, fragment: Markup) -> None:
        self.add_script(READOUT_SCRIPT)
        self.fragments.append(fragment)

    def add_script(self, name: str) -> None:
        """Let the page run a script of `templates/`."""
        if name not in self.scripts:
            self.scripts.append(name)

    def add_cloze_samples(self, samples: Iterable[ClozeSample], caption: str = "") -> None:
        """Add sentences with a marked blank, each above the model's guesses and their probabilities."""
        self.fragments.append(_macros().cloze_samples(list(samples), caption))

    def add_code(self, text: str, caption: str = "") -> None:
        """Add preformatted text, such as a recipe."""
        self.fragments.append(_macros().code(text, caption))

    def add_fragment(self, template: str, macro: str, *values: Any) -> None:
        """Add the markup of a macro of another template, for fragments that only one page has."""
        self.fragments.append(getattr(_environment().get_template(template).module, macro)(*values))

    def to_html(self) -> str:
        """Return the whole page. Lone surrogates, which UTF-8 cannot encode, become question marks."""
        style, script = stylesheet(), "".join(read_template(name) for name in self.scripts)
        if READOUT_SCRIPT in self.scripts:
            script += ADD_READOUTS
        sources = {"style-src": [style], "script-src": [script] if script else []}
        hashes = {name: " ".join(map(hash_source, texts)) for name, texts in sources.items() if texts}
        policy = "; ".join(["default-src 'none'", *(f"{name} {value}" for name, value in hashes.items())])
        policy += "; base-uri 'none'; form-action 'none'"
        template = _environment().get_template("page.html.j2")
        html = template.render(page=self, style=style, script=script, policy=policy)
        return html.encode(errors="replace").decode()

    def save(self, path: str | Path) -> None:
        files.write_text(Path(path), self.to_html())


ADD_READOUTS = """
for (const figure of document.querySelectorAll(".chart-figure")) {
  addReadout(figure.querySelector(".chart"), figure.querySelector(".readout"));
}
"""


def render_facts(facts: Mapping[str, object] | Iterable[tuple[str, object]]) -> Markup:
    """Return names with their values as markup."""
    items = facts.items() if isinstance(facts, Mapping) else facts
    markup: Markup = _macros().facts([(name, format_cell(value)) for name, value in items])
    return markup


def render_table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """Return a table as markup. A wide one becomes a list of its rows on a narrow screen."""
    cells = [[format_cell(value) for value in row] for row in rows]
    assert all(len(row) == len(columns) for row in cells), "a row has one cell for each column"
    titled = _titled_columns(columns, cells)
    widths = [max(len(text) for text in (title, *column)) for title, *column in zip(columns, *cells, strict=True)]
    is_wide = sum(min(width, MAX_CELL_CHARS) + 2 for width in widths) > MAX_NARROW_TABLE_CHARS
    markup: Markup = _macros().table(titled, cells, caption, is_wide)
    return markup


def render_chart(chart: Chart, caption: str = "") -> Markup:
    """Return a chart with its legend, its caption and its numbers as markup."""
    shown = chart._replace(rows=[[format_cell(value) for value in row] for row in chart.rows])
    markup: Markup = _macros().chart(shown, caption, _titled_columns(chart.columns, shown.rows))
    return markup


def _titled_columns(columns: Sequence[str], cells: Sequence[Sequence[Any]]) -> list[dict[str, str]]:
    return [
        {"title": title, "css_class": "number" if _is_numeric([row[i] for row in cells]) else "words"}
        for i, title in enumerate(columns)
    ]


@cache
def read_template(name: str) -> str:
    """Return a stylesheet or a script of `templates/`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def stylesheet() -> str:
    """Return the stylesheet of a report: the shared design, then the layout of reports."""
    return "".join(map(read_template, [*SHARED_STYLES, "report.css"]))


def hash_source(text: str) -> str:
    """Return a source of a content security policy that allows one inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
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
    filled = [cell for cell in cells if cell not in ("", "–")]
    return bool(filled) and all(re.match(r"[-+−±]?(\d|\.\d|inf|nan)", cell) for cell in filled)
