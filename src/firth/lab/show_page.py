"""The preview of `firth show` as one self-contained HTML page."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np

from firth.core.chart import Axis, Chart, mask_chart, nice_ticks
from firth.core.html import HtmlPage
from firth.lab.show import BatchPreview
from firth.lab.show_dialogue import DialoguePreview
from firth.lab.show_row import TOKEN_KINDS, AttentionMaskView, RowView, SequenceView, downsample_mask

ROWS_INTRODUCTION = (
    "The first rows of the first step, made by the code of training. Point at a token for its id and position. The "
    "small pictures are attention masks: the token of a row attends to the tokens of its blue columns."
)
EXAMPLES_INTRODUCTION = (
    "The first examples of the file in the chat template, encoded by the code of fine-tuning. Only marked tokens carry "
    "a label. Point at a token for its id and position."
)
PAGE_MASK_CELLS = 96  # maximum cells of an attention mask, across and down


def save_show_page(preview: BatchPreview | DialoguePreview, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make_show_page(preview).save(path)


def make_show_page(preview: BatchPreview | DialoguePreview) -> HtmlPage:
    """Return a page with header, legend, rows and, of pretraining, rates."""
    page = HtmlPage("What the model will read and predict", "show")
    page.add_facts(preview.header)
    page.add_paragraph(EXAMPLES_INTRODUCTION if isinstance(preview, DialoguePreview) else ROWS_INTRODUCTION)
    tokens = [token for view in preview.views for sequence in view.sequences for token in sequence.tokens]
    kinds = {token.kind for token in tokens}
    meanings = {kind: meaning for kind, meaning in TOKEN_KINDS.items() if kind in kinds}
    page.add_fragment("show.html.j2", "legend", meanings, len({token.token_type for token in tokens}) > 1)
    for view in preview.views:
        add_row_section(page, view)
    if isinstance(preview, DialoguePreview):
        return page
    page.add_heading("Expected and measured rates")
    sample = f"in {preview.counts['sample']['rows']:.0f} rows"
    page.add_table(["", "expected", sample, "in those above"], preview.rate_table())
    return page


def add_row_section(page: HtmlPage, view: RowView) -> None:
    page.add_heading(f"Row {view.row_index}")
    for sequence in view.sequences:
        page.add_fragment("show.html.j2", "sequence", sequence, text_direction(sequence), TOKEN_KINDS["number"])
    for note in view.notes:
        page.add_paragraph(note)
    if view.attention_masks:
        page.add_charts(list(map(attention_chart, view.attention_masks)))


def text_direction(sequence: SequenceView) -> str:
    """Return "rtl" where most letters of the text are of a right-to-left script, otherwise "ltr"."""
    special = ("special", "sentinel", "masked", "number")
    letters = [
        unicodedata.bidirectional(c) for token in sequence.tokens if token.kind not in special for c in token.text
    ]
    return "rtl" if letters.count("R") + letters.count("AL") > letters.count("L") else "ltr"


def attention_chart(mask_view: AttentionMaskView) -> Chart:
    """Return a chart of an attention mask. Its marks say which positions a token, or a few neighbours, attend to."""
    mask = downsample_mask(mask_view.mask, PAGE_MASK_CELLS)
    num_queries, num_keys = mask_view.mask.shape
    size = -(-max(mask_view.mask.shape) // PAGE_MASK_CELLS)  # tokens of a cell
    titles = [
        f"{format_positions(i * size, min((i + 1) * size, num_queries))}: {describe_runs(row, size, num_keys)}"
        for i, row in enumerate(mask)
    ]
    x = Axis("attended position", high=len(mask[0]), ticks=position_ticks(num_keys, size))
    y = Axis("position", high=len(mask), ticks=position_ticks(num_queries, size))
    chart = mask_chart(mask_svg_path(mask), len(mask), len(mask[0]), x, y, titles)
    return chart._replace(label=mask_view.title)


def position_ticks(num_positions: int, size: int) -> list[tuple[float, str]]:
    """Return ticks in the middle of their cells."""
    whole = [tick for tick in nice_ticks(0, max(num_positions - 1, 1), 3) if tick == int(tick) and tick < num_positions]
    return [((int(tick) // size) + 0.5, f"{tick:,.0f}") for tick in whole]


def format_positions(start: int, stop: int) -> str:
    """
    >>> format_positions(3, 4), format_positions(2, 8)
    ('3', '2–7')
    """
    return f"{start}" if stop - start == 1 else f"{start}–{stop - 1}"


def describe_runs(row: np.ndarray, size: int, num_positions: int) -> str:
    """Return the positions of the True cells of a row of a mask."""
    edges = np.flatnonzero(np.diff(row.astype(int), prepend=0, append=0)).tolist()
    runs = zip(edges[::2], edges[1::2], strict=True)
    shown = [format_positions(start * size, min(stop * size, num_positions)) for start, stop in runs]
    return ", ".join(shown) or "none"


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
