"""The preview of `firth show` as one self-contained HTML page."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np

from firth.core.html import HtmlPage, escape_html, generator_meta_tag, resolve_page_path
from firth.lab.show import BatchPreview
from firth.lab.show_row import TOKEN_KINDS, AttentionMaskView, RowView, SequenceView, TokenView, downsample_mask

SHOW_PAGE_GENERATOR = generator_meta_tag("show")
PAGE_MASK_CELLS = 96  # maximum cells of an attention mask, across and down

SHOW_PAGE_CSS = """
:root { --masked: #ffe08a; --random: #ffc9c4; --kept: #c6ecc9; --target: #bfe6ee; --sentinel: #cfdcff;
  --label: #2f7ed8; --b: #f1e2f5; }
@media (prefers-color-scheme: dark) { :root { --masked: #6b5310; --random: #7a2c28; --kept: #245c33; --target: #1d5461;
  --sentinel: #2b4283; --label: #6cabf0; --b: #4a2f52; } }
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
.masked, .random, .kept, .target, .sentinel { box-shadow: none; font-weight: 600; }
.masked { background: var(--masked); } .random { background: var(--random); } .kept { background: var(--kept); }
.target { background: var(--target); } .sentinel { background: var(--sentinel); }
.label, .hidden, .deleted, .predicted { box-shadow: inset 0 -2px 0 0 var(--label), inset 0 0 0 1px var(--line); }
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
    """Return the path of the page; refuse a file there that `firth show` did not write, unless `overwrite`."""
    return resolve_page_path(folder, "show", overwrite)


def save_show_page(preview: BatchPreview, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_show_page(preview).save(path)


def make_show_page(preview: BatchPreview) -> HtmlPage:
    """Return a page with header, legend, rows and rates."""
    page = HtmlPage("What the model will read and predict", SHOW_PAGE_CSS, SHOW_PAGE_GENERATOR)
    lines = (f"<dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd>" for name, value in preview.header.items())
    page.add_html("<dl>" + "".join(lines) + "</dl>")
    page.add_paragraph(
        "The first rows of the first step, made by the code of training. Point at a token for its id and position. "
        "The small pictures are attention masks: the token of a row attends to the tokens of its dark columns."
    )
    page.add_html(legend_html(preview.views))
    for view in preview.views:
        add_row_section(page, view)
    page.add_heading("Expected and measured rates")
    sample = f"in {preview.counts['sample']['rows']:.0f} rows"
    page.add_table(["", "expected", sample, "in those above"], preview.rate_table())
    return page


def add_row_section(page: HtmlPage, view: RowView) -> None:
    page.add_heading(f"Row {view.row_index}")
    for sequence in view.sequences:
        page.add_html(sequence_html(sequence))
    for note in view.notes:
        page.add_paragraph(note)
    page.add_html('<div class="pictures">' + "\n".join(map(mask_figure_html, view.attention_masks)) + "</div>")


def legend_html(views: list[RowView]) -> str:
    """Return the meaning of each mark that occurs."""
    tokens = [token for view in views for sequence in view.sequences for token in sequence.tokens]
    kinds = {token.kind for token in tokens}
    items = [
        f'<span><span class="t {kind}">{kind}</span>{escape_html(TOKEN_KINDS[kind])}</span>'
        for kind in TOKEN_KINDS
        if kind in kinds
    ]
    if len({token.token_type for token in tokens}) > 1:
        items.append('<span><span class="t b">second</span>of the second text (token type 1)</span>')
    items.append('<span><span class="edge" style="margin: 0 0.5rem 0 0"></span>document boundary</span>')
    return '<div class="legend">' + "\n".join(items) + "</div>"


def sequence_html(sequence: SequenceView) -> str:
    """Return the tokens of a sequence as boxes, each with the text that it replaces under it."""
    parts: list[str] = []
    previous: TokenView | None = None
    for token in sequence.tokens:
        if previous is not None and previous.document != token.document:
            parts.append(f' <span class="edge" role="separator" aria-label="document {token.document}"></span>')
        if token.text.startswith(" "):
            parts.append("\n")
        parts.append(token_html(token))
        previous = token
    padding = (
        f'\n<span class="quiet" dir="ltr">+ {sequence.num_padding:,} padding tokens</span>'
        if sequence.num_padding
        else ""
    )
    inner = f'<div class="tokens" dir="{text_direction(sequence)}">{"".join(parts)}{padding}</div>'
    return f'<div class="strip"><h3>{escape_html(sequence.name)}</h3>{inner}</div>'


def text_direction(sequence: SequenceView) -> str:
    """Return "rtl" where most letters of the text are of a right-to-left script, otherwise "ltr"."""
    special = ("special", "sentinel", "masked", "number")
    letters = [
        unicodedata.bidirectional(c) for token in sequence.tokens if token.kind not in special for c in token.text
    ]
    return "rtl" if letters.count("R") + letters.count("AL") > letters.count("L") else "ltr"


def token_html(token: TokenView) -> str:
    """Return a token as a box."""
    if token.kind == "number":
        title = escape_html(TOKEN_KINDS["number"])
        return f'<span class="t number" title="{title}">({escape_html(token.text.strip())})</span>\n'
    original = token.original_text
    if token.kind == "masked" and not original:
        original = "nothing"
    title = token.title if token.kind == "text" else f"{token.kind}: {token.title}"
    small = f"<small>{escape_html(original)}</small>" if original else ""
    classes = f"t {token.kind}" + (" b" if token.token_type else "") + (" predicted" if token.is_target else "")
    return f'<span class="{classes}" title="{escape_html(title)}">{escape_html(token.text.lstrip(" "))}{small}</span>'


def mask_figure_html(mask_view: AttentionMaskView) -> str:
    """Return an attention mask as SVG: cell (i, j) is dark where i, counted downward, attends to j."""
    mask = downsample_mask(mask_view.mask, PAGE_MASK_CELLS)
    rows, columns = mask.shape
    label = escape_html(f"{mask_view.title}. The token of a row attends to that of a column where it is dark.")
    box = f'viewBox="0 0 {columns} {rows}" shape-rendering="crispEdges"'
    svg = f'<svg role="img" aria-label="{label}" {box}><path fill="currentColor" d="{mask_svg_path(mask)}"/></svg>'
    shape = ' class="all"' if mask_view.mask.all() else ""
    return f"<figure{shape}>{svg}<figcaption>{escape_html(mask_view.title)}</figcaption></figure>"


def mask_svg_path(mask: np.ndarray) -> str:
    """Return the True cells as an SVG path of rectangles: runs of a row, merged with equal runs of the rows below."""
    done: list[tuple[int, int, int, int]] = []
    growing: dict[tuple[int, int], int] = {}
    for y in range(len(mask) + 1):
        edges = np.flatnonzero(np.diff(mask[y].astype(int), prepend=0, append=0)) if y < len(mask) else np.zeros(0, int)
        runs = set(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        done += [(x, top, end - x, y - top) for (x, end), top in growing.items() if (x, end) not in runs]
        growing = {run: growing.get(run, y) for run in sorted(runs)}
    return "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in done)
