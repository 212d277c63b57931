"""Rows of a text that goes on: each lane reads a stretch of it, row by row, from the beginning to the end."""

# Shapes: D documents, L lanes, B rows of a batch, T positions of a row.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from firth.console import count
from firth.errors import UserError
from firth.tokens.rows import Frame, Rows, Source, mix, permute
from firth.tokens.shards import Shards


class Pass(NamedTuple):
    """The documents in the order of one epoch, laid end to end with what is put around each, (D,) each."""

    start: np.ndarray  # where the text of each begins in the shards
    size: np.ndarray  # how much text it has
    end: np.ndarray  # where it ends on the line, its frame included


class Places(NamedTuple):
    """Where some places of the line are, each (B, T)."""

    source: np.ndarray  # in the tokens of the shards; any number outside of text
    within: np.ndarray  # in the text of its document: below 0 in what is put before it
    size: np.ndarray  # how much text its document has
    filled: np.ndarray  # false after the end of a lane

    @property
    def real(self) -> np.ndarray:
        return self.filled & (self.within >= 0) & (self.within < self.size)


class StreamSource(Source):
    """Rows for a model that remembers: row g is the next one of lane g % lanes, read at step g // lanes.

    All documents make one long text, in another order in each epoch (`shuffle=False`: as they lie in the shards), and
    every lane reads an equal stretch of it; only the last row of a stretch has padding. `fresh` marks the rows with
    which a lane begins a stretch; all lanes do so at the same step. A row is one text, as in the published recurrent
    models: what is put around each document, and nothing else, tells where one ends.
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        frame: Frame,
        pad: int,
        seed: int,
        lanes: int,
        shuffle: bool = True,
        allow_short: bool = False,
        bits: tuple[str, ...] = (),
    ) -> None:
        super().__init__(shards, length, frame, pad, seed, shuffle, allow_short, bits)
        self.lanes = lanes
        self.total = shards.num_tokens + shards.num_documents * frame.size
        if self.total < lanes * length and not allow_short:
            raise UserError(
                f"The text has {count(self.total, 'token')}, too few for {count(lanes, 'row')} of {length:,} side by "
                "side. Choose a smaller --per-device-train-batch-size or a shorter --max-seq-length, or give more text."
            )
        self.edge_L = self.total * np.arange(lanes + 1) // lanes
        self.steps = -(-int(np.diff(self.edge_L).max()) // length)
        self.num_rows = self.steps * lanes
        self.tokens_used = self.total / (self.num_rows * length)
        self._passes: dict[int, Pass] = {}

    def rows(self, indices: np.ndarray) -> Rows:
        """The rows at these places of the stream."""
        index_B = np.asarray(indices, dtype=np.int64)
        step_B, lane_B = np.divmod(index_B, self.lanes)
        epoch_B, turn_B = np.divmod(step_B, self.steps)
        place_BT = (self.edge_L[lane_B] + turn_B * self.length)[:, None] + np.arange(self.length)
        places = self._find(epoch_B, place_BT, place_BT < self.edge_L[lane_B + 1][:, None])
        return Rows(
            tokens=self._tokens(places),
            doc=np.where(places.filled, 0, -1).astype(np.int32),
            position=np.where(places.filled, np.arange(self.length), 0).astype(np.int32),
            real=places.real,
            index=index_B,
            row=index_B % self.num_rows,
            epoch=epoch_B,
            fresh=turn_B == 0,
            **{name: self._bit(name, places) for name in self.bits},
        )

    def _find(self, epoch_B: np.ndarray, place_BT: np.ndarray, filled_BT: np.ndarray) -> Places:
        """The documents at places of the line."""
        source, within, size = (np.zeros_like(place_BT) for _ in range(3))
        for epoch in np.unique(epoch_B).tolist():
            mine, now = epoch_B == epoch, self._pass(epoch)
            place = np.minimum(place_BT[mine], self.total - 1)
            document = np.searchsorted(now.end, place, side="right")
            size[mine] = now.size[document]
            first = now.end[document] - len(self.frame.after) - size[mine]  # of its text
            within[mine] = place - first
            source[mine] = now.start[document] + within[mine]
        return Places(source, within, size, filled_BT)

    def _pass(self, epoch: int) -> Pass:
        """The line of an epoch; that of the last one asked for is kept, as rows are mostly asked for in order."""
        if epoch not in self._passes:
            order_D = np.arange(self.shards.num_documents)
            if self.shuffle:
                order_D = permute(order_D, len(order_D), mix(self.seed, epoch))
            size_D = np.diff(self.shards.offsets)[order_D]
            self._passes = {epoch: Pass(self.shards.offsets[order_D], size_D, np.cumsum(size_D + self.frame.size))}
        return self._passes[epoch]

    def _tokens(self, places: Places) -> np.ndarray:
        tokens_BT = np.take(np.asarray(self.shards.tokens), places.source, mode="clip").astype(np.int64)
        for k, token in enumerate(self.frame.before, -len(self.frame.before)):
            tokens_BT[places.within == k] = token
        for k, token in enumerate(self.frame.after):
            tokens_BT[places.within == places.size + k] = token
        return np.where(places.filled, tokens_BT, self.pad)

    def _bit(self, name: str, places: Places) -> np.ndarray:
        """A bit of the shards; where a text is cut, a word starts and a sentence ends."""
        real = places.real
        bit_BT = self.shards.bits(name, places.source) & real
        if name == "word_start":
            before = np.pad(real, ((0, 0), (1, 0)))[:, :-1]
            bit_BT |= real & ~before
        if name == "sentence_end":
            after = np.pad(real, ((0, 0), (0, 1)))[:, 1:]
            bit_BT |= real & ~after
        return bit_BT
