"""Contiguous rows for models with a recurrent state: LSTMs, and XLNet's and Transformer-XL's memory.

A packed row starts from nothing. A model that carries its state from step to step needs the text to continue instead:
row b of step s + 1 must begin where row b of step s ended (Dai et al. 2019, section 3.2; the "bptt" batches of ULMFiT
and AWD-LSTM). So all documents of an epoch, in random order, form one sequence. It is divided into as many equal
streams as a step has rows, and each step reads the next T tokens of every stream. Gradients stop at the step's
boundary, the state does not. `Rows.reset_state` is set where an epoch begins and the state has to start at zero.

Row g is still a pure function of (seed, g): stream and step follow from g by division, the token by a binary search in
the document ends of that epoch. The state itself is in the checkpoint.
"""

# Shapes: D documents, L streams, B rows of a batch, T positions of a row.

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
    """The documents in the order of one epoch, end to end with their special tokens; each field (D,)."""

    text_start: np.ndarray  # index of the first token in the shards
    text_length: np.ndarray  # tokens of text
    end: np.ndarray  # end in the sequence of the epoch, special tokens included


class StreamPositions(NamedTuple):
    """Positions of the epoch's sequence; each field (B, T)."""

    token_index: np.ndarray  # index in the shards; arbitrary at special tokens
    text_position: np.ndarray  # position in the text of the document; negative in its prefix
    text_length: np.ndarray  # tokens of text of the document
    is_filled: np.ndarray  # False after the end of a stream

    @property
    def maskable(self) -> np.ndarray:
        return self.is_filled & (self.text_position >= 0) & (self.text_position < self.text_length)


class StreamDataset(RowDataset):
    """Row g is the next one of stream g % num_streams, read at step g // num_streams.

    Documents have a new order in each epoch (`shuffle=False`: the order of the shards). Only the last row of a stream
    has padding, and all streams start an epoch at the same step. A row is one document to the attention mask, as in
    the published recurrent models: only special tokens tell where a document ends. A row of step s + 1 begins `stride`
    tokens after that of step s.
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
        stride: int | None = None,
    ) -> None:
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.num_streams, self.stride = num_streams, stride or row_length
        self.total_tokens = shards.num_tokens + shards.num_documents * template.num_special_tokens()
        if self.total_tokens < num_streams * row_length and not allow_short:
            raise UserError(
                f"The text has {format_count(self.total_tokens, 'token')}, too few for "
                f"{format_count(num_streams, 'row')} of {row_length:,} side by side. "
                "Choose a smaller --per-device-train-batch-size or a shorter --max-seq-length, or give more text."
            )
        self.stream_bounds_L = self.total_tokens * np.arange(num_streams + 1) // num_streams
        self.steps_per_epoch = -(-int(np.diff(self.stream_bounds_L).max()) // self.stride)
        self.num_rows = self.steps_per_epoch * num_streams
        self.fill_ratio = self.total_tokens / (self.num_rows * row_length)
        self._epoch_layouts: dict[int, EpochLayout] = {}

    def get_rows(self, indices: np.ndarray) -> Rows:
        """Return the rows at these indices of the stream of rows."""
        self.shards.check_not_cut()
        index_B = np.asarray(indices, dtype=np.int64)
        epoch_B, epoch_step_B, stream_B, first_B = self._locate_rows(index_B)
        position_BT = first_B[:, None] + np.arange(self.row_length)
        is_filled = position_BT < self.stream_bounds_L[stream_B + 1][:, None]
        positions = self._locate_positions(epoch_B, position_BT, is_filled)
        return Rows(
            input_ids=self._gather_input_ids(positions),
            document_ids=np.where(is_filled, 0, -1).astype(np.int32),
            position_ids=np.where(is_filled, np.arange(self.row_length), 0).astype(np.int32),
            maskable=positions.maskable,
            stream_index=index_B,
            row_index=index_B % self.num_rows,
            epoch=epoch_B,
            reset_state=epoch_step_B == 0,
            **{name: self._gather_bit(name, positions) for name in self.token_bits},
        )

    def _locate_rows(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the epoch of each row, its step in the epoch, its stream, and its first position in the sequence."""
        step_B, stream_B = np.divmod(index_B, self.num_streams)
        epoch_B, epoch_step_B = np.divmod(step_B, self.steps_per_epoch)
        return epoch_B, epoch_step_B, stream_B, self.stream_bounds_L[stream_B] + epoch_step_B * self.stride

    def _locate_positions(self, epoch_B: np.ndarray, position_BT: np.ndarray, filled_BT: np.ndarray) -> StreamPositions:
        """Find the document and the token at positions of the epochs' sequences."""
        token_index, text_position, text_length = (np.zeros_like(position_BT) for _ in range(3))
        for epoch in np.unique(epoch_B).tolist():
            rows, layout = epoch_B == epoch, self._epoch_layout(epoch)
            position = np.minimum(position_BT[rows], self.total_tokens - 1)
            document = np.searchsorted(layout.end, position, side="right")
            text_length[rows] = layout.text_length[document]
            text_first = layout.end[document] - len(self.template.suffix_ids) - text_length[rows]
            text_position[rows] = position - text_first
            token_index[rows] = layout.text_start[document] + text_position[rows]
        return StreamPositions(token_index, text_position, text_length, filled_BT)

    def _epoch_layout(self, epoch: int) -> EpochLayout:
        """Return the layout of an epoch; the last one is cached, because rows are mostly read in order."""
        if epoch not in self._epoch_layouts:
            order_D = np.arange(self.shards.num_documents)
            if self.shuffle:
                order_D = permute_indices(order_D, len(order_D), hash_uint64(self.seed, epoch))
            length_D = np.diff(self.shards.offsets)[order_D]
            end_D = np.cumsum(length_D + self.template.num_special_tokens())
            self._epoch_layouts = {epoch: EpochLayout(self.shards.offsets[order_D], length_D, end_D)}
        return self._epoch_layouts[epoch]

    def _gather_input_ids(self, positions: StreamPositions) -> np.ndarray:
        tokens_BT = np.take(np.asarray(self.shards.tokens), positions.token_index, mode="clip").astype(np.int64)
        for k, token in enumerate(self.template.prefix_ids, -len(self.template.prefix_ids)):
            tokens_BT[positions.text_position == k] = token
        for k, token in enumerate(self.template.suffix_ids):
            tokens_BT[positions.text_position == positions.text_length + k] = token
        return np.where(positions.is_filled, tokens_BT, self.pad_id)

    def _gather_bit(self, bit: str, positions: StreamPositions) -> np.ndarray:
        """Return a bit of the shards, (B, T) bool; a cut starts a word and ends a sentence."""
        is_text = positions.maskable
        bit_BT = self.shards.gather_bits(bit, positions.token_index) & is_text
        if bit == "word_start":
            bit_BT |= is_text & ~np.pad(is_text, ((0, 0), (1, 0)))[:, :-1]
        if bit == "sentence_end":
            bit_BT |= is_text & ~np.pad(is_text, ((0, 0), (0, 1)))[:, 1:]
        return bit_BT
