"""The preview of `firth show` in a terminal, readable with and without colours."""

from __future__ import annotations

import numpy as np
from rich.table import Table
from rich.text import Text

from firth.core.console import show_table, stdout_console
from firth.core.html import format_cell
from firth.lab.show import BatchPreview
from firth.lab.show_dialogue import DialoguePreview
from firth.lab.show_row import TOKEN_KINDS, AttentionMaskView, RowView, SequenceView, TokenView, downsample_mask

TOKEN_STYLES = {
    "masked": "black on yellow",
    "random": "white on red",
    "kept": "black on green",
    "target": "black on cyan",
    "sentinel": "white on blue",
    "label": "underline",
    "hidden": "underline yellow",
    "deleted": "strike red",
    "reward": "black on cyan",
    "number": "bold magenta",
    "special": "dim",
}
TERMINAL_MASK_CELLS = 32  # maximum cells of an attention mask, across and down
HALF_BLOCKS = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}


def print_preview(preview: BatchPreview | DialoguePreview) -> None:
    """Print header, legend, rows and, of pretraining, rates to stdout."""
    header = Table.grid(padding=(0, 2))
    for name, value in preview.header.items():
        header.add_row(Text(name, "bold"), Text(value))
    stdout_console.print(header)
    stdout_console.print()
    stdout_console.print(legend_text(preview.views))
    for view in preview.views:
        print_row_view(view)
    if isinstance(preview, DialoguePreview):
        return
    rows = [(name, *map(format_cell, values)) for name, *values in preview.rate_table()]
    columns = ["", "expected", f"{preview.counts['sample']['rows']:.0f} rows", "shown"]
    stdout_console.print()
    show_table("Expected and measured rates", columns, rows)


def print_row_view(view: RowView) -> None:
    stdout_console.print()
    stdout_console.rule(Text(f"row {view.row_index}", "bold"), align="left")
    for sequence in view.sequences:
        stdout_console.print(Text(sequence.name, "bold"))
        stdout_console.print(sequence_text(sequence))
    for note in view.notes:
        stdout_console.print(Text(note, "italic"))
    for mask_view in view.attention_masks:
        if mask_view.mask.all():
            stdout_console.print(Text(mask_view.title, "italic"))
    if mask_views := [mask_view for mask_view in view.attention_masks if not mask_view.mask.all()]:
        stdout_console.print(masks_side_by_side(mask_views))


def legend_text(views: list[RowView]) -> Text:
    """Return the meaning of each mark that occurs."""
    tokens = [token for view in views for sequence in view.sequences for token in sequence.tokens]
    kinds = {token.kind for token in tokens}
    text = Text()
    for kind, meaning in TOKEN_KINDS.items():
        if kind in kinds:
            original = {"masked": "…", "random": "…", "sentinel": "…", "target": "1"}.get(kind, "")
            text.append_text(token_text(TokenView(kind, kind, original, 0, 0, 0, 0)))
            text.append(f" {meaning}; ")
    if any(token.is_target for token in tokens):
        text.append("→", "bold")
        text.append(" predicted from here; ")
    text.append("┃", "bold")
    text.append(" document boundary; ")
    text.append("·", "dim")
    return text.append(" token boundary inside a word")


def sequence_text(sequence: SequenceView) -> Text:
    """Return the tokens of a sequence as one text, to be wrapped."""
    text, previous = Text(), None
    is_pair = len({token.token_type for token in sequence.tokens}) > 1
    for token in sequence.tokens:
        starts_document = previous is None or previous.document != token.document
        if starts_document and previous is not None:
            text.append(" ┃", "bold")
        if is_pair and (starts_document or previous is None or previous.token_type != token.token_type):
            text.append(
                f" {'AB'[token.token_type]}:" if token.token_type < 2 else f" {token.token_type}:", "bold magenta"
            )
        if token.is_target and not (previous and previous.is_target):
            text.append(" →", "bold")
        if token.text.startswith(" "):
            text.append(" ")
        elif previous is not None:
            text.append("·", "dim")
        text.append_text(token_text(token))
        previous = token
    if sequence.num_padding:
        text.append(f"  + {sequence.num_padding:,} padding tokens", "dim")
    return text


def token_text(token: TokenView) -> Text:
    """Return a token and, between ‹ and ›, the text that it replaces; ‹=› for a kept target, ‹r› at a reward."""
    text = Text(token.text.lstrip(" "), TOKEN_STYLES.get(token.kind, ""))
    if token.kind == "number":
        text = Text(f"({token.text.strip()})", TOKEN_STYLES["number"])
    elif token.kind == "reward":
        text.append("‹r›", "dim")
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
    """Return a mask in half blocks, two rows to a line, between two borders.

    >>> half_block_lines(np.tril(np.ones((3, 3), bool)))
    ['▕█▄ ▏', '▕▀▀▀▏']
    """
    padded = np.pad(mask, ((0, len(mask) % 2), (0, 0)))
    pairs = zip(padded[::2].tolist(), padded[1::2].tolist(), strict=True)
    return ["▕" + "".join(HALF_BLOCKS[cells] for cells in zip(*two, strict=True)) + "▏" for two in pairs]
