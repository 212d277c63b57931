"""What a model will see, in a terminal: colours where there are any, and signs that do without them."""

from __future__ import annotations

import numpy as np
from rich.table import Table
from rich.text import Text

from firth.console import out, show_table
from firth.lab.show import Shown
from firth.lab.show_row import KINDS, Picture, Piece, Strip, View, shrink
from firth.page import cell

STYLES = {
    "masked": "black on yellow",
    "random": "white on red",
    "kept": "black on green",
    "asked": "black on cyan",
    "sentinel": "white on blue",
    "answer": "underline",
    "hidden": "underline yellow",
    "deleted": "strike red",
    "number": "bold magenta",
    "special": "dim",
}
SIDE = 32  # cells of a picture, across and down
BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def print_shown(shown: Shown) -> None:
    """Header, legend, rows and counts on stdout."""
    about = Table.grid(padding=(0, 2))
    for name, value in shown.header.items():
        about.add_row(Text(name, "bold"), Text(value))
    out.print(about)
    out.print()
    out.print(legend(shown.views))
    for view in shown.views:
        print_view(view)
    rows = [(name, *map(cell, values)) for name, *values in shown.table()]
    columns = ["", "promised", f"{shown.counts['sample']['rows']:.0f} rows", "shown"]
    out.print()
    show_table("What the recipe promises, and what is there", columns, rows)


def print_view(view: View) -> None:
    out.print()
    out.rule(Text(f"row {view.row}", "bold"), align="left")
    for strip in view.strips:
        out.print(Text(strip.name, "bold"))
        out.print(line(strip))
    for fact in view.facts:
        out.print(Text(fact, "italic"))
    for picture in view.pictures:
        if picture.seen.all():
            out.print(Text(picture.title, "italic"))
    if pictures := [picture for picture in view.pictures if not picture.seen.all()]:
        out.print(side_by_side(pictures))


def legend(views: list[View]) -> Text:
    """What the marks mean, of those that occur."""
    kinds = {piece.kind for view in views for strip in view.strips for piece in strip.pieces}
    text = Text()
    for kind, meaning in KINDS.items():
        if kind in kinds:
            under = {"masked": "…", "random": "…", "sentinel": "…", "asked": "1"}.get(kind, "")
            text.append_text(marked(Piece(kind, kind, under, 0, 0, 0, 0)))
            text.append(f" {meaning}; ")
    if any(piece.written for view in views for strip in view.strips for piece in strip.pieces):
        text.append("→", "bold")
        text.append(" what is asked begins; ")
    text.append("┃", "bold")
    text.append(" edge of a document; ")
    text.append("·", "dim")
    return text.append(" edge of a token inside a word")


def line(strip: Strip) -> Text:
    """The tokens of a sequence one after the other, to be wrapped."""
    text, before = Text(), None
    several = len({piece.segment for piece in strip.pieces}) > 1
    for piece in strip.pieces:
        new = before is None or before.doc != piece.doc
        if new and before is not None:
            text.append(" ┃", "bold")
        if several and (new or before is None or before.segment != piece.segment):
            text.append(f" {'AB'[piece.segment]}:" if piece.segment < 2 else f" {piece.segment}:", "bold magenta")
        if piece.written and not (before and before.written):
            text.append(" →", "bold")
        if piece.text.startswith(" "):
            text.append(" ")
        elif before is not None:
            text.append("·", "dim")
        text.append_text(marked(piece))
        before = piece
    if strip.padding:
        text.append(f"  + {strip.padding:,} places of padding", "dim")
    return text


def marked(piece: Piece) -> Text:
    """A token and, between ‹ and ›, what it hides or stands for; ‹=› where it hides nothing."""
    text = Text(piece.text.lstrip(" "), STYLES.get(piece.kind, ""))
    if piece.kind == "number":
        text = Text(f"({piece.text.strip()})", STYLES["number"])
    elif piece.kind == "kept":
        text.append("‹=›", "dim")
    elif piece.under or piece.kind == "masked":
        text.append(f"‹{piece.under}›", "italic")
    return text


def side_by_side(pictures: list[Picture]) -> Table:
    side = min(SIDE, (out.width - 3 * len(pictures)) // len(pictures))
    grid = Table.grid(padding=(0, 3))
    grid.add_row(*(Text("\n".join([f"{p.name}:", *blocks(shrink(p.seen, max(side, 4)))])) for p in pictures))
    return grid


def blocks(seen: np.ndarray) -> list[str]:
    """A picture in half blocks, two rows to a line, between two edges.

    >>> blocks(np.tril(np.ones((3, 3), bool)))
    ['▕█▄ ▏', '▕▀▀▀▏']
    """
    padded = np.pad(seen, ((0, len(seen) % 2), (0, 0)))
    pairs = zip(padded[::2].tolist(), padded[1::2].tolist(), strict=True)
    return ["▕" + "".join(BLOCKS[cells] for cells in zip(*two, strict=True)) + "▏" for two in pairs]
