"""Objects that show themselves: as HTML in a notebook, as a few lines at a prompt.

The results of the API are dictionaries and lists, so that scripts read them by key and `--json` prints them. In a
notebook, Jupyter calls `_repr_html_`, and the object becomes a small piece of a report: a sentence, a curve, a table.

The HTML is one `<div>` with its own CSS, whose selectors all begin with `.firth-out`. It has no script and requests
nothing. It takes the text colour of the notebook and mixes all other shades from it, so that it fits light and dark
themes without knowing which is in use. Jinja escapes every value, as on the pages of reports (`core/html.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from firth.core.console import escape_controls
from firth.core.errors import quote, shorten
from firth.core.html import HtmlPage, format_cell, read_template, render_template

ItemT = TypeVar("ItemT")
MAX_REPR_CHARS = 70  # characters of a value in a plain listing
MAX_REPR_ITEMS = 6  # items of a list or a dictionary in it
MAX_HTML_ROWS = 20  # rows of a table in a notebook
CSS_RULE = re.compile(r"([^{}]+)\{((?:[^{}]|\{[^{}]*\})*)\}")  # a rule, or an at-rule with rules in it
CSS_NAME = re.compile(r"(?<![\w:(\[=\"'-])[a-zA-Z][\w-]*(?![\w(])")  # a class or an element of a selector
PARTS = "notebook_parts.html.j2"  # macros of the fragments that only notebooks have


def to_notebook_html(page: HtmlPage) -> str:
    """Return the fragments of a page as one element for a notebook."""
    markup = render_template("notebook.html.j2", page=page, style="")
    rules = [select_css(read_template(name), markup) for name in ("notebook.css", "design.css")]
    html = render_template("notebook.html.j2", page=page, style=f"{rules[0]}.firth-out{{{rules[1]}}}")
    return html.encode(errors="replace").decode()


def select_css(css: str, markup: str) -> str:
    """Return the rules whose classes and elements occur in the markup: a notebook repeats them with every output.

    >>> select_css("/* bars */ .bar, .box b { width: 1px; } .t { color: red; } i { top: 0; }", '<p class="bar"><i>')
    '.bar{width: 1px;}i{top: 0;}'
    """
    names = {name for value in re.findall(r'class="([^"]*)"', markup) for name in value.split()}
    names |= set(re.findall(r"<([a-zA-Z]\w*)", markup))
    kept = []
    for selectors, body in CSS_RULE.findall(re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL)):
        if selectors.lstrip().startswith("@"):
            inside = select_css(body, markup)
            kept.append(f"{selectors.strip()}{{{inside}}}" if inside else "")
            continue
        used = [one.strip() for one in selectors.split(",") if set(CSS_NAME.findall(one)) <= names]
        kept.append(f"{','.join(used)}{{{' '.join(body.split())}}}" if used else "")
    return "".join(kept)


def format_short(value: Any) -> str:
    """Format a value for a plain listing, in one line.

    >>> format_short([0.81234, 0.8]), format_short({"a": 1, "b": [1, 2]}), format_short("a\\nb")
    ('[0.8123, 0.8]', "{'a': 1, 'b': [1, 2]}", 'a b')
    >>> format_short(list(range(100)))
    '[0, 1, 2, 3, 4, 5, ...] (100)'
    """
    if isinstance(value, Mapping):
        items = [f"{quote(key)}: {format_short(item)}" for key, item in list(value.items())[:MAX_REPR_ITEMS]]
        return shorten(_join_items("{", items, "}", len(value)), MAX_REPR_CHARS)
    if isinstance(value, list | tuple):
        items = [format_short(item) for item in value[:MAX_REPR_ITEMS]]
        return shorten(_join_items("[", items, "]", len(value)), MAX_REPR_CHARS)
    return shorten(" ".join(format_cell(value).split()), MAX_REPR_CHARS)


def _join_items(opening: str, items: Sequence[str], closing: str, count: int) -> str:
    more, total = (", ...", f" ({count:,})") if count > len(items) else ("", "")
    return f"{opening}{', '.join(items)}{more}{closing}{total}"


def format_listing(title: str, values: Mapping[str, Any]) -> str:
    """Return a title and, below it, one line for each name and its value.

    >>> print(format_listing("Shards", {"documents": 1200, "output_dir": "shards"}))
    Shards
      documents   1,200
      output_dir  shards
    """
    width = max(map(len, values), default=0)
    lines = [title, *(f"  {name:<{width}}  {format_short(value)}" for name, value in values.items())]
    return escape_controls("\n".join(lines))


class Result(dict[str, Any]):
    """The result of a command: a dictionary that shows itself.

    A subclass sets `title` and overrides `make_page` where a table of all values is not the best view.
    """

    title = "Result"

    def __repr__(self) -> str:
        return format_listing(self.title, self)

    def make_page(self) -> HtmlPage:
        """Return what a notebook shows."""
        page = HtmlPage(self.title)
        add_facts(page, self)
        return page

    def _repr_html_(self) -> str:
        return to_notebook_html(self.make_page())


class ResultList(list[ItemT]):
    """Several results: a list that shows itself, in a notebook by `make_page`."""

    def make_page(self) -> HtmlPage:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return to_notebook_html(self.make_page())


def add_facts(page: HtmlPage, facts: Mapping[str, Any]) -> None:
    """Add names and values as a table, long values shortened."""
    page.add_facts((name.replace("_", " "), format_short(value)) for name, value in facts.items())


def add_note(page: HtmlPage, text: str) -> None:
    """Add a quiet line, such as where a report is."""
    page.add_fragment(PARTS, "note", text)


def add_bars(page: HtmlPage, bars: Iterable[tuple[str, float]], caption: str = "", is_share: bool = True) -> None:
    """Add horizontal bars for numbers from 0 to 1: probabilities as percentages, else cosines."""
    rows = [(name, max(0.0, min(value, 1.0)), f"{value:.1%}" if is_share else f"{value:.3f}") for name, value in bars]
    page.add_fragment(PARTS, "bars", rows, caption)


def add_heat_table(
    page: HtmlPage, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float]], caption: str = ""
) -> None:
    """Add a table of numbers whose cells are the darker the nearer they are to the largest; the smallest is blank."""
    flat = [value for row in values for value in row]
    low, high = min(flat), max(flat)
    shades = [[(value, (value - low) / max(high - low, 1e-9)) for value in row] for row in values]
    page.add_fragment(PARTS, "heat_table", list(zip(rows, shades, strict=True)), list(columns), caption)


def add_long_table(page: HtmlPage, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Add the first rows of a table, and how many there are in all."""
    more = f"The first {MAX_HTML_ROWS} of {len(rows):,}." if len(rows) > MAX_HTML_ROWS else ""
    page.add_table(columns, rows[:MAX_HTML_ROWS], more)
