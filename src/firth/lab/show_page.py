"""What a model will see, as one page of HTML that needs nothing else."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np

from firth.core.html import HtmlPage, escape_html, generator_meta_tag, resolve_page_path
from firth.lab.show import BatchPreview
from firth.lab.show_row import TOKEN_KINDS, AttentionMaskView, RowView, SequenceView, TokenView, downsample_mask

SHOW_PAGE_GENERATOR = generator_meta_tag("show")
PAGE_MASK_CELLS = 96  # cells of a picture, across and down

SHOW_PAGE_CSS = """
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


def find_free_show_page(folder: Path, overwrite: bool) -> Path:
    """Where the page goes; a file there that no earlier look wrote is left alone unless `overwrite`."""
    return resolve_page_path(folder, "show", overwrite)


def save_show_page(preview: BatchPreview, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_show_page(preview).save(path)


def make_show_page(preview: BatchPreview) -> HtmlPage:
    """Header, legend, rows, counts."""
    page = HtmlPage("What the model will see", SHOW_PAGE_CSS, SHOW_PAGE_GENERATOR)
    lines = (f"<dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd>" for name, value in preview.header.items())
    page.add_html("<dl>" + "".join(lines) + "</dl>")
    page.add_paragraph(
        "The first rows of the first step, as training will read them. Point at a token for its id and place. "
        "In the small pictures the token of a row sees the tokens whose columns are dark there."
    )
    page.add_html(legend_html(preview.views))
    for view in preview.views:
        add_row_section(page, view)
    page.add_heading("What the recipe promises, and what is there")
    sample = f"in {preview.counts['sample']['rows']:.0f} rows"
    page.add_table(["", "promised", sample, "in those above"], preview.rate_table())
    return page


def add_row_section(page: HtmlPage, view: RowView) -> None:
    page.add_heading(f"Row {view.row_index}")
    for strip in view.sequences:
        page.add_html(sequence_html(strip))
    for fact in view.notes:
        page.add_paragraph(fact)
    page.add_html('<div class="pictures">' + "\n".join(map(mask_figure_html, view.attention_masks)) + "</div>")


def legend_html(views: list[RowView]) -> str:
    """What the marks mean, of those that occur."""
    kinds = {piece.kind for view in views for strip in view.sequences for piece in strip.tokens}
    items = [
        f'<span><span class="t {kind}">{kind}</span>{escape_html(TOKEN_KINDS[kind])}</span>'
        for kind in TOKEN_KINDS
        if kind in kinds
    ]
    segments = {piece.token_type for view in views for strip in view.sequences for piece in strip.tokens}
    if len(segments) > 1:
        items.append('<span><span class="t b">second</span>of the second text (segment B)</span>')
    items.append('<span><span class="edge" style="margin: 0 0.5rem 0 0"></span>edge of a document</span>')
    return '<div class="legend">' + "\n".join(items) + "</div>"


def sequence_html(sequence: SequenceView) -> str:
    """The tokens of a sequence as boxes, with what they hide under them."""
    parts: list[str] = []
    before: TokenView | None = None
    for piece in sequence.tokens:
        if before is not None and before.document != piece.document:
            parts.append(f' <span class="edge" role="separator" aria-label="document {piece.document}"></span>')
        if piece.text.startswith(" "):
            parts.append("\n")
        parts.append(token_html(piece))
        before = piece
    padding = (
        f'\n<span class="quiet" dir="ltr">+ {sequence.num_padding:,} places of padding</span>'
        if sequence.num_padding
        else ""
    )
    inner = f'<div class="tokens" dir="{text_direction(sequence)}">{"".join(parts)}{padding}</div>'
    return f'<div class="strip"><h3>{escape_html(sequence.name)}</h3>{inner}</div>'


def text_direction(sequence: SequenceView) -> str:
    """Which way the tokens go: right to left where most letters of the text are written so."""
    special = ("special", "sentinel", "masked", "number")
    letters = [
        unicodedata.bidirectional(c) for piece in sequence.tokens if piece.kind not in special for c in piece.text
    ]
    return "rtl" if letters.count("R") + letters.count("AL") > letters.count("L") else "ltr"


def token_html(token: TokenView) -> str:
    """A box with a token."""
    if token.kind == "number":
        return f'<span class="t number" title="{TOKEN_KINDS["number"]}">({escape_html(token.text.strip())})</span>\n'
    under = token.original_text
    if token.kind == "masked" and not under:
        under = "nothing"
    about = token.title if token.kind == "text" else f"{token.kind}: {token.title}"
    small = f"<small>{escape_html(under)}</small>" if under else ""
    kinds = f"t {token.kind}" + (" b" if token.token_type else "") + (" written" if token.is_target else "")
    return f'<span class="{kinds}" title="{escape_html(about)}">{escape_html(token.text.lstrip(" "))}{small}</span>'


def mask_figure_html(mask_view: AttentionMaskView) -> str:
    """Who sees whom: a dark cell at (i, j) where i, counted downward, sees j."""
    seen = downsample_mask(mask_view.mask, PAGE_MASK_CELLS)
    rows, columns = seen.shape
    label = escape_html(f"{mask_view.title}. The token of a row sees that of a column where it is dark.")
    box = f'viewBox="0 0 {columns} {rows}" shape-rendering="crispEdges"'
    svg = f'<svg role="img" aria-label="{label}" {box}><path fill="currentColor" d="{mask_svg_path(seen)}"/></svg>'
    shape = ' class="all"' if mask_view.mask.all() else ""
    return f"<figure{shape}>{svg}<figcaption>{escape_html(mask_view.title)}</figcaption></figure>"


def mask_svg_path(mask: np.ndarray) -> str:
    """The dark cells as an SVG path of rectangles: runs of a row, joined downward where the next row has the same."""
    done: list[tuple[int, int, int, int]] = []
    growing: dict[tuple[int, int], int] = {}
    for y in range(len(mask) + 1):
        edges = np.flatnonzero(np.diff(mask[y].astype(int), prepend=0, append=0)) if y < len(mask) else np.zeros(0, int)
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        done += [(x, top, end - x, y - top) for (x, end), top in growing.items() if (x, end) not in runs]
        growing = {run: growing.get(run, y) for run in sorted(runs)}
    return "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in done)
