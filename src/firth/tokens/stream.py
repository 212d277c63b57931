"""Rows of a text that goes on: each lane reads a stretch of it, row by row, from the beginning to the end."""

# Shapes: D documents, L lanes, B rows of a batch, T positions of a row.

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.tokens.dataset import RowDataset, Rows
from firth.tokens.permutation import permute_indices
from firth.tokens.shards import Shards
from firth.tokens.template import SequenceTemplate


class EpochLayout(NamedTuple):
    """The documents in the order of one epoch, laid end to end with what is put around each, (D,) each."""

    text_start: np.ndarray  # where the text of each begins in the shards
    text_length: np.ndarray  # how much text it has
    end: np.ndarray  # where it ends on the line, its frame included


class StreamPositions(NamedTuple):
    """Where some places of the line are, each (B, T)."""

    token_index: np.ndarray  # in the tokens of the shards; any number outside of text
    text_position: np.ndarray  # in the text of its document: below 0 in what is put before it
    text_length: np.ndarray  # how much text its document has
    is_filled: np.ndarray  # false after the end of a lane

    @property
    def maskable(self) -> np.ndarray:
        return self.is_filled & (self.text_position >= 0) & (self.text_position < self.text_length)


class StreamDataset(RowDataset):
    """Rows for a model that remembers: row g is the next one of lane g % lanes, read at step g // lanes.

    All documents make one long text, in another order in each epoch (`shuffle=False`: as they lie in the shards), and
    every lane reads an equal stretch of it; only the last row of a stretch has padding. `fresh` marks the rows with
    which a lane begins a stretch; all lanes do so at the same step. A row is one text, as in the published recurrent
    models: what is put around each document, and nothing else, tells where one ends.
    """

    def __init__(
        self,
        shards: Shards,
        row_length: int,
        template: SequenceTemplate,
        pad_id: int,
        seed: int,
        num_streams: int,
        shuffle: bool = True,
        allow_short: bool = False,
        token_bits: tuple[str, ...] = (),
    ) -> None:
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.num_streams = num_streams
        self.total_tokens = shards.num_tokens + shards.num_documents * template.num_special_tokens()
        if self.total_tokens < num_streams * row_length and not allow_short:
            raise UserError(
                f"The text has {format_count(self.total_tokens, 'token')}, too few for {format_count(num_streams, 'row')} of {row_length:,} side by "
                "side. Choose a smaller --per-device-train-batch-size or a shorter --max-seq-length, or give more text."
            )
        self.stream_bounds_L = self.total_tokens * np.arange(num_streams + 1) // num_streams
        self.steps_per_epoch = -(-int(np.diff(self.stream_bounds_L).max()) // row_length)
        self.num_rows = self.steps_per_epoch * num_streams
        self.fill_ratio = self.total_tokens / (self.num_rows * row_length)
        self._epoch_layouts: dict[int, EpochLayout] = {}

    def get_rows(self, indices: np.ndarray) -> Rows:
        """The rows at these places of the stream."""
        index_B = np.asarray(indices, dtype=np.int64)
        step_B, lane_B = np.divmod(index_B, self.num_streams)
        epoch_B, turn_B = np.divmod(step_B, self.steps_per_epoch)
        place_BT = (self.stream_bounds_L[lane_B] + turn_B * self.row_length)[:, None] + np.arange(self.row_length)
        places = self._locate_positions(epoch_B, place_BT, place_BT < self.stream_bounds_L[lane_B + 1][:, None])
        return Rows(
            input_ids=self._gather_input_ids(places),
            document_ids=np.where(places.is_filled, 0, -1).astype(np.int32),
            position_ids=np.where(places.is_filled, np.arange(self.row_length), 0).astype(np.int32),
            maskable=places.maskable,
            stream_index=index_B,
            row_index=index_B % self.num_rows,
            epoch=epoch_B,
            reset_state=turn_B == 0,
            **{name: self._gather_bit(name, places) for name in self.token_bits},
        )

    def _locate_positions(self, epoch_B: np.ndarray, position_BT: np.ndarray, filled_BT: np.ndarray) -> StreamPositions:
        """The documents at places of the line."""
        source, within, size = (np.zeros_like(position_BT) for _ in range(3))
        for epoch in np.unique(epoch_B).tolist():
            mine, now = epoch_B == epoch, self._epoch_layout(epoch)
            place = np.minimum(position_BT[mine], self.total_tokens - 1)
            document = np.searchsorted(now.end, place, side="right")
            size[mine] = now.text_length[document]
            first = now.end[document] - len(self.template.suffix_ids) - size[mine]  # of its text
            within[mine] = place - first
            source[mine] = now.text_start[document] + within[mine]
        return StreamPositions(source, within, size, filled_BT)

    def _epoch_layout(self, epoch: int) -> EpochLayout:
        """The line of an epoch; that of the last one asked for is kept, as rows are mostly asked for in order."""
        if epoch not in self._epoch_layouts:
            order_D = np.arange(self.shards.num_documents)
            if self.shuffle:
                order_D = permute_indices(order_D, len(order_D), hash_uint64(self.seed, epoch))
            size_D = np.diff(self.shards.offsets)[order_D]
            self._epoch_layouts = {
                epoch: EpochLayout(
                    self.shards.offsets[order_D], size_D, np.cumsum(size_D + self.template.num_special_tokens())
                )
            }
        return self._epoch_layouts[epoch]

    def _gather_input_ids(self, positions: StreamPositions) -> np.ndarray:
        tokens_BT = np.take(np.asarray(self.shards.tokens), positions.token_index, mode="clip").astype(np.int64)
        for k, token in enumerate(self.template.prefix_ids, -len(self.template.prefix_ids)):
            tokens_BT[positions.text_position == k] = token
        for k, token in enumerate(self.template.suffix_ids):
            tokens_BT[positions.text_position == positions.text_length + k] = token
        return np.where(positions.is_filled, tokens_BT, self.pad_id)

    def _gather_bit(self, bit: str, positions: StreamPositions) -> np.ndarray:
        """A bit of the shards; where a text is cut, a word starts and a sentence ends."""
        real = positions.maskable
        bit_BT = self.shards.gather_bits(bit, positions.token_index) & real
        if bit == "word_start":
            before = np.pad(real, ((0, 0), (1, 0)))[:, :-1]
            bit_BT |= real & ~before
        if bit == "sentence_end":
            after = np.pad(real, ((0, 0), (0, 1)))[:, 1:]
            bit_BT |= real & ~after
        return bit_BT
