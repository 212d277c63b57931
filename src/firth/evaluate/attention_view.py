"""The attention of a text as an object that shows itself: all heads as small pictures, one of them enlarged.

seen = firth.attention("run/final", "The cat sleeps.")
seen                 # in a notebook: a picture of each head, with the name of what it does
seen.head(0, 1)      # layer 0, head 1, with the tokens
seen.weights["encoder"].shape  # (layers, heads, queries, keys)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from firth.core.errors import UserError, list_names
from firth.core.html import HtmlPage
from firth.core.notebook import PARTS, to_notebook_html
from firth.evaluate.attention import compute_attention
from firth.evaluate.attention_heads import HeadSummary, LayerMask, overview_heads
from firth.models import Model

MAX_PICTURE_CELLS = 24  # rows and columns of a head's small picture
MAX_MATRIX_TOKENS = 48  # tokens of an enlarged head
SHADES = (0.08, 0.2, 0.35, 0.55, 0.8, 1.0)  # opacities of a small picture
CELL, CHAR = 22, 6.5  # pixels of a cell, and of a character


class HeadPicture(NamedTuple):
    """A head as a small picture: for each opacity the path of its cells."""

    title: str
    text: str
    rows: int
    columns: int
    shades: list[tuple[float, str]]


class AttentionHead(NamedTuple):
    """The weights of one head: `weights[i, j]` is what query i gives to key j; each row sums to 1."""

    kind: str
    layer: int
    head: int
    queries: Sequence[str]
    keys: Sequence[str]
    weights: np.ndarray
    summary: HeadSummary

    def __repr__(self) -> str:
        name = f"{self.summary.name} {self.summary.share:.0%}, " if self.summary.name else ""
        return (
            f"AttentionHead({self.kind}, layer {self.layer}, head {self.head}: {name}entropy "
            f"{self.summary.entropy:.2f} nats, {len(self.queries)} queries, {len(self.keys)} keys)"
        )

    def _repr_html_(self) -> str:
        page = HtmlPage(f"{self.kind}, layer {self.layer}, head {self.head}")
        shown = self.weights[:MAX_MATRIX_TOKENS, :MAX_MATRIX_TOKENS]
        queries, keys = self.queries[:MAX_MATRIX_TOKENS], self.keys[:MAX_MATRIX_TOKENS]
        caption = f"Each line is a query, each column a key; weights of a line sum to 1. {describe_head(self.summary)}"
        if shown.shape != self.weights.shape:
            caption += f" The first {MAX_MATRIX_TOKENS} tokens."
        page.add_fragment(PARTS, "matrix", layout_matrix(shown, queries, keys), caption)
        return to_notebook_html(page)


class Attention:
    """The attention weights of a text, of all layers and heads."""

    def __init__(self, model: Model, text: str, target: str = "") -> None:
        found = compute_attention(model, text, target)
        overview = overview_heads(model, text, target, MAX_PICTURE_CELLS)
        self.text, self.tokens, self.target_tokens = text, found.tokens, found.target_tokens
        self.weights = found.matrices  # by kind: (layers, heads, queries, keys)
        self.summaries = {kind: part.summaries for kind, part in overview.kinds.items()}  # by kind, layer and head
        self.masks: dict[str, list[LayerMask]] = {kind: part.masks for kind, part in overview.kinds.items()}
        self._pictures = {kind: part.pictures for kind, part in overview.kinds.items()}

    def head(self, layer: int, head: int, kind: str = "") -> AttentionHead:
        """Return one head; `kind` is "encoder", "decoder" or "cross", by default the first that the model has."""
        kind = kind or next(iter(self.weights))
        if kind not in self.weights:
            raise UserError(f"This text has no {kind} attention: there is {list_names(self.weights)}.")
        layers, heads = self.weights[kind].shape[:2]
        if not (0 <= layer < layers and 0 <= head < heads):
            known = f"layers 0 to {layers - 1}, heads 0 to {heads - 1}"
            raise UserError(f"There is no layer {layer}, head {head}: the {kind} has {known}.")
        queries = self.target_tokens if self.target_tokens and kind != "encoder" else self.tokens
        keys = self.target_tokens if self.target_tokens and kind == "decoder" else self.tokens
        summary = self.summaries[kind][layer][head]
        return AttentionHead(kind, layer, head, queries, keys, self.weights[kind][layer, head], summary)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {tuple(weights.shape)}" for kind, weights in self.weights.items())
        return f"Attention({len(self.tokens)} tokens; weights by layer, head, query, key: {kinds})"

    def _repr_html_(self) -> str:
        page = HtmlPage(f"Attention over {len(self.tokens)} tokens")
        for kind, layers in self.summaries.items():
            masks = ", ".join(f"{mask.name} (layers {list_names(mask.layers)})" for mask in self.masks[kind])
            page.add_heading(f"{kind}: mask {masks}")
            page.add_fragment(
                PARTS,
                "heads",
                [
                    draw_head(f"layer {i}, head {j}", describe_head(summary), self._pictures[kind][i, j])
                    for i, layer in enumerate(layers)
                    for j, summary in enumerate(layer)
                ],
            )
        return to_notebook_html(page)


def describe_head(summary: HeadSummary) -> str:
    name = f"{summary.name} ({summary.share:.0%}), " if summary.name else ""
    return f"{name}entropy {summary.entropy:.2f}"


def draw_head(title: str, text: str, weights: np.ndarray) -> HeadPicture:
    """Draw the weights of a head in a few shades, relative to its largest."""
    rows, columns = weights.shape
    level = np.ceil(weights / max(float(weights.max()), 1e-9) * len(SHADES)).astype(int) - 1
    level[weights < 0.02] = -1  # white
    shades = []
    for i, opacity in enumerate(SHADES):
        cells = zip(*np.nonzero(level == i), strict=True)
        path = "".join(f"M{x} {y}h1v1h-1z" for y, x in cells)
        shades += [(opacity, path)] if path else []
    return HeadPicture(title, text, rows, columns, shades)


def layout_matrix(weights: np.ndarray, queries: Sequence[str], keys: Sequence[str]) -> dict[str, object]:
    """Return the labels and cells of an enlarged head in pixels."""
    left = CHAR * max(map(len, queries)) + 8
    top = CHAR * max(map(len, keys)) * 0.87 + 14
    cells = [
        {
            "x": round(left + CELL * j, 1),
            "y": round(top + CELL * i, 1),
            "opacity": f"{weights[i, j]:.2f}",
            "title": f"{queries[i]} \u2192 {keys[j]}: {weights[i, j]:.1%}",
        }
        for i in range(len(queries))
        for j in range(len(keys))
        if weights[i, j] >= 0.005
    ]
    columns = [
        {"x": round(left + CELL * (j + 0.6), 1), "y": round(top - 4, 1), "text": key} for j, key in enumerate(keys)
    ]
    rows = [{"x": round(left - 5, 1), "y": round(top + CELL * (i + 0.68), 1), "text": q} for i, q in enumerate(queries)]
    width, height = left + CELL * len(keys) + 40, top + CELL * len(queries) + 2
    return dict(width=round(width), height=round(height), size=CELL - 1, cells=cells, columns=columns, rows=rows)
