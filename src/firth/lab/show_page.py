"""What a model will see, as one page of HTML that needs nothing else."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np

from firth.lab.show import Shown
from firth.lab.show_row import KINDS, Picture, Piece, Strip, View, shrink
from firth.page import Page, free_place, generator, html

MARK = generator("show")
SIDE = 96  # cells of a picture, across and down

STYLE = """
:root { --masked: #ffe08a; --random: #ffc9c4; --kept: #c6ecc9; --asked: #bfe6ee; --sentinel: #cfdcff;
  --answer: #2f7ed8; --b: #f1e2f5; }
@media (prefers-color-scheme: dark) { :root { --masked: #6b5310; --random: #7a2c28; --kept: #245c33; --asked: #1d5461;
  --sentinel: #2b4283; --answer: #6cabf0; --b: #4a2f52; } }
body { max-width: 60rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.25rem; margin: 0 0 1.5rem; }
dt { color: var(--quiet); } dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0.4rem 1.25rem; padding: 0.75rem 1rem; background: var(--card);
  border-radius: 8px; font-size: 0.875rem; margin: 1.5rem 0; }
.strip { margin: 1rem 0; }
.strip h3 { font-size: 0.8125rem; color: var(--quiet); margin: 0 0 0.35rem; font-weight: 600; }
.tokens { background: var(--card); border-radius: 8px; padding: 0.9rem 1rem 0.6rem; line-height: 1.35;
  font-size: 0.9375rem; overflow-wrap: anywhere; }
.t { display: inline-flex; flex-direction: column; align-items: center; vertical-align: top; margin: 0 0 0.55rem 1px;
  white-space: pre-wrap; border-radius: 4px; box-shadow: inset 0 0 0 1px var(--line); padding: 0.05em 0.22em;
  max-width: 100%; unicode-bidi: plaintext; }
.t small { font-size: 0.75rem; line-height: 1.25; font-weight: 400; font-style: italic; max-width: 16rem; }
.b { background: var(--b); }
.masked, .random, .kept, .asked, .sentinel { box-shadow: none; font-weight: 600; }
.masked { background: var(--masked); } .random { background: var(--random); } .kept { background: var(--kept); }
.asked { background: var(--asked); } .sentinel { background: var(--sentinel); }
.answer, .hidden, .deleted, .written { box-shadow: inset 0 -2px 0 0 var(--answer), inset 0 0 0 1px var(--line); }
.hidden { background: var(--masked); } .deleted { background: var(--random); text-decoration: line-through; }
.special { color: var(--quiet); box-shadow: none; }
.t.number { color: var(--accent); box-shadow: none; font-weight: 700; font-size: 0.75rem; }
.legend .t { margin: 0 0.4rem 0 0; }
.edge { display: inline-block; width: 4px; height: 1.5em; margin: 0 0.6rem 0.55rem 0.7rem; vertical-align: top;
  border-radius: 2px; background: var(--accent); }
.quiet { color: var(--quiet); font-size: 0.875rem; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; margin: 1rem 0 0; }
.pictures figure { margin: 0; width: 10rem; } .pictures .all { width: 5rem; }
.pictures figcaption { margin-top: 0.3rem; font-size: 0.8125rem; line-height: 1.35; }
.pictures svg { border: 1px solid var(--line); border-radius: 4px; width: 100%; height: auto; color: var(--accent); }
"""


def free_page(folder: Path, overwrite: bool) -> Path:
    """Where the page goes; a file there that no earlier look wrote is left alone unless `overwrite`."""
    return free_place(folder, "show", overwrite)


def save_page(shown: Shown, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_page(shown).save(path)


def make_page(shown: Shown) -> Page:
    """Header, legend, rows, counts."""
    page = Page("What the model will see", STYLE, MARK)
    lines = (f"<dt>{html(name)}</dt><dd>{html(value)}</dd>" for name, value in shown.header.items())
    page.markup("<dl>" + "".join(lines) + "</dl>")
    page.text(
        "The first rows of the first step, as training will read them. Point at a token for its id and place. "
        "In the small pictures the token of a row sees the tokens whose columns are dark there."
    )
    page.markup(legend(shown.views))
    for view in shown.views:
        add_view(page, view)
    page.heading("What the recipe promises, and what is there")
    sample = f"in {shown.counts['sample']['rows']:.0f} rows"
    page.table(["", "promised", sample, "in those above"], shown.table())
    return page


def add_view(page: Page, view: View) -> None:
    page.heading(f"Row {view.row}")
    for strip in view.strips:
        page.markup(sequence(strip))
    for fact in view.facts:
        page.text(fact)
    page.markup('<div class="pictures">' + "\n".join(map(picture, view.pictures)) + "</div>")


def legend(views: list[View]) -> str:
    """What the marks mean, of those that occur."""
    kinds = {piece.kind for view in views for strip in view.strips for piece in strip.pieces}
    items = [f'<span><span class="t {kind}">{kind}</span>{html(KINDS[kind])}</span>' for kind in KINDS if kind in kinds]
    segments = {piece.segment for view in views for strip in view.strips for piece in strip.pieces}
    if len(segments) > 1:
        items.append('<span><span class="t b">second</span>of the second text (segment B)</span>')
    items.append('<span><span class="edge" style="margin: 0 0.5rem 0 0"></span>edge of a document</span>')
    return '<div class="legend">' + "\n".join(items) + "</div>"


def sequence(strip: Strip) -> str:
    """The tokens of a sequence as boxes, with what they hide under them."""
    parts: list[str] = []
    before: Piece | None = None
    for piece in strip.pieces:
        if before is not None and before.doc != piece.doc:
            parts.append(f' <span class="edge" role="separator" aria-label="document {piece.doc}"></span>')
        if piece.text.startswith(" "):
            parts.append("\n")
        parts.append(token(piece))
        before = piece
    padding = f'\n<span class="quiet" dir="ltr">+ {strip.padding:,} places of padding</span>' if strip.padding else ""
    inner = f'<div class="tokens" dir="{direction(strip)}">{"".join(parts)}{padding}</div>'
    return f'<div class="strip"><h3>{html(strip.name)}</h3>{inner}</div>'


def direction(strip: Strip) -> str:
    """Which way the tokens go: right to left where most letters of the text are written so."""
    special = ("special", "sentinel", "masked", "number")
    letters = [unicodedata.bidirectional(c) for piece in strip.pieces if piece.kind not in special for c in piece.text]
    return "rtl" if letters.count("R") + letters.count("AL") > letters.count("L") else "ltr"


def token(piece: Piece) -> str:
    """A box with a token."""
    if piece.kind == "number":
        return f'<span class="t number" title="{KINDS["number"]}">({html(piece.text.strip())})</span>\n'
    under = piece.under
    if piece.kind == "masked" and not under:
        under = "nothing"
    about = piece.title if piece.kind == "text" else f"{piece.kind}: {piece.title}"
    small = f"<small>{html(under)}</small>" if under else ""
    kinds = f"t {piece.kind}" + (" b" if piece.segment else "") + (" written" if piece.written else "")
    return f'<span class="{kinds}" title="{html(about)}">{html(piece.text.lstrip(" "))}{small}</span>'


def picture(picture: Picture) -> str:
    """Who sees whom: a dark cell at (i, j) where i, counted downward, sees j."""
    seen = shrink(picture.seen, SIDE)
    rows, columns = seen.shape
    label = html(f"{picture.title}. The token of a row sees that of a column where it is dark.")
    box = f'viewBox="0 0 {columns} {rows}" shape-rendering="crispEdges"'
    svg = f'<svg role="img" aria-label="{label}" {box}><path fill="currentColor" d="{outline(seen)}"/></svg>'
    shape = ' class="all"' if picture.seen.all() else ""
    return f"<figure{shape}>{svg}<figcaption>{html(picture.title)}</figcaption></figure>"


def outline(seen: np.ndarray) -> str:
    """The dark cells as an SVG path of rectangles: runs of a row, joined downward where the next row has the same."""
    done: list[tuple[int, int, int, int]] = []
    growing: dict[tuple[int, int], int] = {}
    for y in range(len(seen) + 1):
        edges = np.flatnonzero(np.diff(seen[y].astype(int), prepend=0, append=0)) if y < len(seen) else np.zeros(0, int)
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        done += [(x, top, end - x, y - top) for (x, end), top in growing.items() if (x, end) not in runs]
        growing = {run: growing.get(run, y) for run in sorted(runs)}
    return "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in done)
