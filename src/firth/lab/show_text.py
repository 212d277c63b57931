"""What a model will see, in a terminal: colours where there are any, and signs that do without them."""

from __future__ import annotations

import numpy as np
from rich.table import Table
from rich.text import Text

from firth.core.console import show_table, stdout_console
from firth.core.html import format_cell
from firth.lab.show import BatchPreview
from firth.lab.show_row import TOKEN_KINDS, AttentionMaskView, RowView, SequenceView, TokenView, downsample_mask

TOKEN_STYLES = {
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
TERMINAL_MASK_CELLS = 32  # cells of a picture, across and down
HALF_BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def print_preview(preview: BatchPreview) -> None:
    """Header, legend, rows and counts on stdout."""
    about = Table.grid(padding=(0, 2))
    for name, value in preview.header.items():
        about.add_row(Text(name, "bold"), Text(value))
    stdout_console.print(about)
    stdout_console.print()
    stdout_console.print(legend_text(preview.views))
    for view in preview.views:
        print_row_view(view)
    rows = [(name, *map(format_cell, values)) for name, *values in preview.rate_table()]
    columns = ["", "promised", f"{preview.counts['sample']['rows']:.0f} rows", "shown"]
    stdout_console.print()
    show_table("What the recipe promises, and what is there", columns, rows)


def print_row_view(view: RowView) -> None:
    stdout_console.print()
    stdout_console.rule(Text(f"row {view.row_index}", "bold"), align="left")
    for strip in view.sequences:
        stdout_console.print(Text(strip.name, "bold"))
        stdout_console.print(sequence_text(strip))
    for fact in view.notes:
        stdout_console.print(Text(fact, "italic"))
    for picture in view.attention_masks:
        if picture.mask.all():
            stdout_console.print(Text(picture.title, "italic"))
    if pictures := [picture for picture in view.attention_masks if not picture.mask.all()]:
        stdout_console.print(masks_side_by_side(pictures))


def legend_text(views: list[RowView]) -> Text:
    """What the marks mean, of those that occur."""
    kinds = {piece.kind for view in views for strip in view.sequences for piece in strip.tokens}
    text = Text()
    for kind, meaning in TOKEN_KINDS.items():
        if kind in kinds:
            under = {"masked": "…", "random": "…", "sentinel": "…", "asked": "1"}.get(kind, "")
            text.append_text(token_text(TokenView(kind, kind, under, 0, 0, 0, 0)))
            text.append(f" {meaning}; ")
    if any(piece.is_target for view in views for strip in view.sequences for piece in strip.tokens):
        text.append("→", "bold")
        text.append(" what is asked begins; ")
    text.append("┃", "bold")
    text.append(" edge of a document; ")
    text.append("·", "dim")
    return text.append(" edge of a token inside a word")


def sequence_text(sequence: SequenceView) -> Text:
    """The tokens of a sequence one after the other, to be wrapped."""
    text, before = Text(), None
    several = len({piece.token_type for piece in sequence.tokens}) > 1
    for piece in sequence.tokens:
        new = before is None or before.document != piece.document
        if new and before is not None:
            text.append(" ┃", "bold")
        if several and (new or before is None or before.token_type != piece.token_type):
            text.append(
                f" {'AB'[piece.token_type]}:" if piece.token_type < 2 else f" {piece.token_type}:", "bold magenta"
            )
        if piece.is_target and not (before and before.is_target):
            text.append(" →", "bold")
        if piece.text.startswith(" "):
            text.append(" ")
        elif before is not None:
            text.append("·", "dim")
        text.append_text(token_text(piece))
        before = piece
    if sequence.num_padding:
        text.append(f"  + {sequence.num_padding:,} places of padding", "dim")
    return text


def token_text(token: TokenView) -> Text:
    """A token and, between ‹ and ›, what it hides or stands for; ‹=› where it hides nothing."""
    text = Text(token.text.lstrip(" "), TOKEN_STYLES.get(token.kind, ""))
    if token.kind == "number":
        text = Text(f"({token.text.strip()})", TOKEN_STYLES["number"])
    elif token.kind == "kept":
        text.append("‹=›", "dim")
    elif token.original_text or token.kind == "masked":
        text.append(f"‹{token.original_text}›", "italic")
    return text


def masks_side_by_side(mask_views: list[AttentionMaskView]) -> Table:
    side = min(TERMINAL_MASK_CELLS, (stdout_console.width - 3 * len(mask_views)) // len(mask_views))
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        *(Text("\n".join([f"{p.name}:", *half_block_lines(downsample_mask(p.mask, max(side, 4)))])) for p in mask_views)
    )
    return grid


def half_block_lines(mask: np.ndarray) -> list[str]:
    """A picture in half blocks, two rows to a line, between two edges.

    >>> half_block_lines(np.tril(np.ones((3, 3), bool)))
    ['▕█▄ ▏', '▕▀▀▀▏']
    """
    padded = np.pad(mask, ((0, len(mask) % 2), (0, 0)))
    pairs = zip(padded[::2].tolist(), padded[1::2].tolist(), strict=True)
    return ["▕" + "".join(HALF_BLOCKS[cells] for cells in zip(*two, strict=True)) + "▏" for two in pairs]
