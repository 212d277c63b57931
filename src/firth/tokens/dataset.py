"""Row i of step s: packed documents as arrays of token ids, as a pure function of (shards, row length, seed, index).

Stream index g = s * rows per step + i runs over epochs without end. `get_rows` turns it into ids in three lookups:

    epoch, i  = divmod(g, num_rows)
    row       = permute_indices(i, num_rows, hash(seed, epoch))        # permutation.py: O(1), nothing is stored
    pieces    = packing.row_first[row] ... packing.row_first[row + 1]  # packing.py: computed once, memory-mapped
    input_ids = the tokens of these pieces, with the special tokens of the template around each

With several packings the passes take them in turn (`num_packings`), so that documents are cut elsewhere in each. They
have different numbers of rows; the first row of a pass follows from those of the packings before it.

Nothing depends on the rows that were read before. So resuming costs nothing, any process can compute any row, and the
data are the same on one GPU and on many.
"""

# Shapes: P pieces, B rows of a batch, T positions of a row, N tokens of a batch.

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.tokens.packing import RowPacking, cached_packing, ragged_arange
from firth.tokens.permutation import permute_indices
from firth.tokens.shards import Shards
from firth.tokens.template import SequenceTemplate


class Rows(NamedTuple):
    """Rows of text. Fields that default to None are filled only by the datasets that have them, or on request."""

    input_ids: np.ndarray  # (B, T) int64
    document_ids: np.ndarray  # (B, T) int32: 0, 1, 2 ... within the row, -1 for padding
    position_ids: np.ndarray  # (B, T) int32: position in the piece, from 0; 0 for padding
    maskable: np.ndarray  # (B, T) bool: text, neither special token nor padding
    stream_index: np.ndarray  # (B,) int64: index of the row in the endless stream
    row_index: np.ndarray | None = None  # (B,) int64: index of the row among those of an epoch
    epoch: np.ndarray | None = None  # (B,) int64
    word_start: np.ndarray | None = None  # (B, T) bool: first token of a word, or of a piece
    sentence_end: np.ndarray | None = None  # (B, T) bool: last token of a sentence, or of a piece
    salient: np.ndarray | None = None  # (B, T) bool: part of a name, a number, a date
    token_type_ids: np.ndarray | None = None  # (B, T) int32: 0 for the first text of a pair, 1 for the second
    pair_labels: np.ndarray | None = None  # (B,) int64: 0 if the second text follows the first, 1 if it does not
    reset_state: np.ndarray | None = None  # (B,) bool: the recurrent state of the row's stream starts anew


class PieceLayout:
    """Pieces of text laid end to end, each with free positions before and after it for special tokens."""

    def __init__(
        self, shards: Shards, start_P: np.ndarray, length_P: np.ndarray, before_P: np.ndarray, after_P: np.ndarray
    ) -> None:
        self.shards = shards
        self.cost_P = before_P + length_P + after_P
        self.end_P = np.cumsum(self.cost_P)
        self.begin_P = self.end_P - self.cost_P
        self.text_first_P, self.text_last_P = self.begin_P + before_P, self.end_P - after_P - 1
        self.position_N = np.arange(self.end_P[-1] if len(self.end_P) else 0)
        self.token_index_N = self.position_N + self.expand_pieces(start_P - self.text_first_P)
        # Special tokens at the edges of the shards point outside of them: clip, then overwrite.
        self.input_ids_N = np.take(np.asarray(shards.tokens), self.token_index_N, mode="clip").astype(np.int64)
        self.maskable_N = np.ones(len(self.position_N), dtype=bool)

    def expand_pieces(self, value_P: np.ndarray) -> np.ndarray:
        """Repeat a value of each piece for all its positions, (N,)."""
        return np.repeat(value_P, self.cost_P)

    def write_special_tokens(self, position_P: np.ndarray, special_ids: tuple[int, ...]) -> None:
        """Write the special tokens one after another, from each of these positions on."""
        for k, token in enumerate(special_ids):
            self.input_ids_N[position_P + k] = token
            self.maskable_N[position_P + k] = False

    def gather_bit(self, bit: str) -> np.ndarray:
        """Return a bit of the shards, (N,) bool; a cut starts a word and ends a sentence."""
        bit_N = self.shards.gather_bits(bit, self.token_index_N) & self.maskable_N
        if bit == "word_start":
            bit_N[self.text_first_P] = True
        if bit == "sentence_end":
            bit_N[self.text_last_P] = True
        return bit_N

    def make_fold_fn(self, pieces_B: np.ndarray, row_length: int) -> Callable[[np.ndarray, int, type], np.ndarray]:
        """Return a function that folds values (N,) into rows (B, T) of `pieces_B` pieces, padded at their ends."""
        end_B = np.concatenate([[0], self.end_P])[np.concatenate([[0], np.cumsum(pieces_B)])]
        is_filled = np.arange(row_length) < np.diff(end_B)[:, None]

        def fold(values_N: np.ndarray, padding: int, dtype: type) -> np.ndarray:
            rows = np.full(is_filled.shape, padding, dtype=dtype)
            rows[is_filled] = values_N
            return rows

        return fold


class RowDataset:
    """An endless stream of rows with random access: row g is always the same row.

    An epoch has every row once, in its own random order (`shuffle=False`: in the order of the shards). `token_bits`
    names the bits of the shards that the rows carry: "word_start", "sentence_end", "salient". `allow_short` accepts
    text that does not fill one row (evaluation).
    """

    num_rows: int  # rows of an epoch
    fill_ratio: float  # share of positions that are not padding

    def __init__(
        self,
        shards: Shards,
        row_length: int,
        template: SequenceTemplate,
        pad_id: int,
        seed: int,
        shuffle: bool = True,
        allow_short: bool = False,
        token_bits: tuple[str, ...] = (),
    ) -> None:
        if shards.num_tokens < row_length and not allow_short:
            raise UserError(
                f"The text has {format_count(shards.num_tokens, 'token')}, less than one row of {row_length:,}. "
                f"Choose a shorter --max-seq-length, or give more text."
            )
        shards.require_bits(token_bits)
        self.shards, self.row_length, self.template, self.pad_id = shards, row_length, template, pad_id
        self.seed, self.shuffle, self.token_bits = seed, shuffle, token_bits

    @property
    def words_per_row(self) -> float:
        """Mean number of words of a row: an epoch has every word once."""
        return self.shards.num_words / self.num_rows

    def passes_of(self, num_rows: int) -> float:
        """Return how often the first `num_rows` rows of the stream read the text."""
        return num_rows / self.num_rows

    def words_of(self, num_rows: int) -> float:
        """Return the number of words in the first `num_rows` rows of the stream, as far as its mean row tells."""
        return num_rows * self.words_per_row

    def get_rows(self, indices: np.ndarray) -> Rows:
        """Return the rows at these indices of the stream."""
        self.shards.check_not_cut()
        index_B = np.asarray(indices, dtype=np.int64)
        epoch_B, row_B = self.locate_rows(index_B)
        return self._build_rows(row_B, index_B)._replace(row_index=row_B, epoch=epoch_B)

    def locate_rows(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the pass that each row of the stream belongs to, and its index among the rows of the text."""
        epoch_B, row_B = np.divmod(index_B, self.num_rows)
        if self.shuffle:
            row_B = permute_indices(row_B, self.num_rows, hash_uint64(self.seed, epoch_B))
        return epoch_B, row_B

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        raise NotImplementedError


class PackedDataset(RowDataset):
    """Rows of packed documents (see `packing.py`), at most `max_documents_per_row` to a row (None: no limit).

    `split_at="token"` cuts a document longer than a row where the row is full, "sentence" after its last sentence that
    fits. A piece that starts with a sentence is read like a text of its own, so that it has the template's prefix even
    where that is written at the edges of documents only.

    Pass p reads packing p modulo `num_packings`. A packing is computed when its first row is read; `num_rows` and
    `fill_ratio` are those of packing 0. The rows of all packings are numbered on, packing after packing.
    """

    texts_per_piece = 1  # 2: each piece may be cut into a pair of texts, and reserves its special tokens

    def __init__(
        self,
        shards: Shards,
        row_length: int,
        template: SequenceTemplate,
        pad_id: int,
        seed: int,
        max_documents_per_row: int | None = None,
        shuffle: bool = True,
        allow_short: bool = False,
        token_bits: tuple[str, ...] = (),
        split_at: str = "token",
        num_packings: int = 1,
    ) -> None:
        template_size = template.num_special_tokens(self.texts_per_piece)
        if row_length <= template_size:
            raise UserError(f"A row of {row_length} tokens has no room for text. Choose a longer --max-seq-length.")
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.split_at, self.num_packings = split_at, num_packings
        self.packing_args = row_length, template_size, max_documents_per_row, split_at
        self.packing = cached_packing(shards, *self.packing_args)
        self.packings = [self.packing]  # those that are computed, the first ones
        self.first_rows = [0, self.packing.num_rows]  # number of the first row of each, and of the next one
        self.packing_lock = threading.Lock()  # a thread makes batches while another reads `passes_of`
        self.num_rows = self.packing.num_rows
        self.fill_ratio = (shards.num_tokens + self._num_special_tokens()) / (self.num_rows * row_length)

    def _num_special_tokens(self) -> int:
        """Return the number of special tokens in an epoch."""
        start_P, end_P = self.packing.piece_start, self.packing.piece_start + self.packing.piece_length
        num_prefix, num_suffix = self._has_prefix_at(start_P).sum(), self._has_suffix_at(end_P).sum()
        return int(len(self.template.prefix_ids) * num_prefix + len(self.template.suffix_ids) * num_suffix)

    def _has_prefix_at(self, start_P: np.ndarray) -> np.ndarray:
        """Return which pieces have special tokens before them, (P,) bool."""
        return np.ones(len(start_P), dtype=bool) if self.split_at == "sentence" else self._has_suffix_at(start_P)

    def _has_suffix_at(self, token_index_P: np.ndarray) -> np.ndarray:
        """Return where special tokens end a piece, (P,) bool: at the edges of documents, or of every piece."""
        if not self.template.document_edges_only:
            return np.ones(len(token_index_P), dtype=bool)
        return self.shards.offsets[np.searchsorted(self.shards.offsets, token_index_P)] == token_index_P

    def load_packings(self, num_rows: int) -> np.ndarray:
        """Compute the packings of the stream's first `num_rows` rows; return the first row of each, and the end."""
        with self.packing_lock:
            while len(self.packings) < self.num_packings and num_rows > self.first_rows[-1]:
                self.packings.append(cached_packing(self.shards, *self.packing_args, number=len(self.packings)))
                self.first_rows.append(self.first_rows[-1] + self.packings[-1].num_rows)
            return np.array(self.first_rows)

    def locate_passes(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return pass, number of the packing's first row, row in it and rows of the packing, for rows of the stream."""
        first_K = self.load_packings(int(index_B.max(initial=0)) + 1)
        turn_B, offset_B = np.divmod(index_B, first_K[-1])  # all packings are known where a second turn begins
        packing_B = np.searchsorted(first_K, offset_B, side="right") - 1
        first_B = first_K[packing_B]
        return turn_B * self.num_packings + packing_B, first_B, offset_B - first_B, np.diff(first_K)[packing_B]

    def locate_rows(self, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.num_packings == 1:
            return super().locate_rows(index_B)
        epoch_B, first_B, row_B, size_B = self.locate_passes(index_B)
        if self.shuffle:
            for size in np.unique(size_B).tolist():
                rows = size_B == size
                row_B[rows] = permute_indices(row_B[rows], size, hash_uint64(self.seed, epoch_B[rows]))
        return epoch_B, first_B + row_B

    def passes_of(self, num_rows: int) -> float:
        if self.num_packings == 1 or not num_rows:
            return super().passes_of(num_rows)
        epoch_B, _, row_B, size_B = self.locate_passes(np.array([num_rows - 1]))
        return float(epoch_B[0] + (row_B[0] + 1) / size_B[0])

    def words_of(self, num_rows: int) -> float:
        return self.passes_of(num_rows) * self.shards.num_words

    def row_pieces(self, row_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of pieces of each row (B,); of each piece its index in the row, start and length (P,)."""
        packing_B = np.searchsorted(self.first_rows, row_B, side="right") - 1
        first_B, pieces_B = np.empty_like(row_B), np.empty_like(row_B)
        for k, packing, rows in self.split_by_packing(packing_B):
            in_packing = row_B[rows] - self.first_rows[k]
            first_B[rows] = packing.row_first[in_packing]
            pieces_B[rows] = packing.row_first[in_packing + 1] - first_B[rows]
        document_P = ragged_arange(pieces_B)
        piece_P = np.repeat(first_B, pieces_B) + document_P
        start_P, length_P = np.empty_like(piece_P), np.empty_like(piece_P)
        for _, packing, pieces in self.split_by_packing(np.repeat(packing_B, pieces_B)):
            start_P[pieces] = packing.piece_start[piece_P[pieces]]
            length_P[pieces] = packing.piece_length[piece_P[pieces]]
        return pieces_B, document_P, start_P, length_P

    def split_by_packing(self, packing_N: np.ndarray) -> list[tuple[int, RowPacking, np.ndarray]]:
        """Return the packings among these numbers, each with the mask of its entries."""
        return [(k, self.packings[k], packing_N == k) for k in np.unique(packing_N).tolist()]

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Lay the pieces of all rows end to end, then fold the result into rows."""
        pieces_B, document_P, start_P, length_P = self.row_pieces(row_B)
        opens_P, closes_P = self._has_prefix_at(start_P), self._has_suffix_at(start_P + length_P)
        prefix, suffix = self.template.prefix_ids, self.template.suffix_ids
        layout = PieceLayout(self.shards, start_P, length_P, len(prefix) * opens_P, len(suffix) * closes_P)
        layout.write_special_tokens(layout.begin_P[opens_P], prefix)
        layout.write_special_tokens(layout.text_last_P[closes_P] + 1, suffix)
        fold = layout.make_fold_fn(pieces_B, self.row_length)
        return Rows(
            input_ids=fold(layout.input_ids_N, self.pad_id, np.int64),
            document_ids=fold(layout.expand_pieces(document_P), -1, np.int32),
            position_ids=fold(layout.position_N - layout.expand_pieces(layout.begin_P), 0, np.int32),
            maskable=fold(layout.maskable_N, False, bool),
            stream_index=index_B,
            **{name: fold(layout.gather_bit(name), False, bool) for name in self.token_bits},
        )
