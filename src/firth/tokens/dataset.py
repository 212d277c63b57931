"""Rows of token ids: packing and shuffled order, as a pure function of the shards, the seed and the index."""

# Shapes: D documents, P pieces, R rows, B rows of a batch, T positions of a row, N tokens of a batch.

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption
from firth.tokens.shards import Shards
from firth.tokens.template import SequenceTemplate

# --- packing ------------------------------------------------------------------------------------------------------

MAX_PADDING_SHARE = 0.01
MIN_GAP_TOKENS = 32  # tokens of text that are worth cutting a document for


class RowPacking(NamedTuple):
    """Which pieces of text share a row: row r holds the pieces row_first[r] up to row_first[r + 1]."""

    piece_start: np.ndarray  # (P,) int64, offset in the tokens of the shards
    piece_length: np.ndarray  # (P,) int32
    row_first: np.ndarray  # (R + 1,) int64

    @property
    def num_rows(self) -> int:
        return len(self.row_first) - 1


def pack_documents(
    lengths_D: np.ndarray, capacity: int, template_size: int = 0, max_documents_per_row: int | None = None
) -> RowPacking:
    """Put documents that lie one after the other into rows of `capacity`; every token reaches exactly one row.

    A document that is too long is cut into full pieces and a remainder. Pieces, which cost their length and `frame`
    more, are packed best-fit decreasing: the longest first, each into the row where it leaves the least room, at
    most `max_documents_per_row` to a row.
    """
    assert capacity > template_size, "a row must have room for text"
    return pack_pieces(
        *split_documents(np.asarray(lengths_D, dtype=np.int64), capacity - template_size),
        capacity,
        template_size,
        max_documents_per_row,
    )


def pack_pieces(
    start_P: np.ndarray, length_P: np.ndarray, capacity: int, template_size: int, max_documents_per_row: int | None
) -> RowPacking:
    """The same for pieces that are cut already."""
    order = np.argsort(-length_P, kind="stable")
    row_P, num_rows = best_fit_decreasing(length_P[order] + template_size, capacity, max_documents_per_row)
    by_row = np.argsort(row_P, kind="stable")
    order = order[by_row]
    return RowPacking(
        piece_start=start_P[order],
        piece_length=length_P[order].astype(np.int32),
        row_first=np.searchsorted(row_P[by_row], np.arange(num_rows + 1)).astype(np.int64),
    )


def split_documents(lengths_D: np.ndarray, max_piece_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of the pieces: full ones of length `max_piece_length`, and what remains of each document."""
    num_pieces_D = -(-lengths_D // max_piece_length)
    document_P = np.repeat(np.arange(len(lengths_D)), num_pieces_D)
    done_P = ragged_arange(num_pieces_D) * max_piece_length
    start_P = (np.cumsum(lengths_D) - lengths_D)[document_P] + done_P
    return start_P, np.minimum(lengths_D[document_P] - done_P, max_piece_length)


def split_at_sentences(
    sentence_bounds: np.ndarray, document_offsets: np.ndarray, max_piece_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of pieces that are whole sentences of a document, as many as fit into `max_piece_length`.

    `sentence_bounds` are where sentences begin and end, `document_offsets` where documents do. A sentence that is too long is cut.
    """
    edges = np.append(split_documents(np.diff(sentence_bounds), max_piece_length)[0], sentence_bounds[-1])
    doc_first = np.searchsorted(edges, document_offsets)
    next_S = np.searchsorted(edges, edges[:-1] + max_piece_length, side="right") - 1
    next_S = np.minimum(next_S, np.repeat(doc_first[1:], np.diff(doc_first)))
    is_document, is_begin = np.zeros(len(edges), dtype=bool), np.zeros(len(edges), dtype=bool)
    is_document[doc_first] = True
    at = np.unique(doc_first[:-1])
    while len(at):  # one piece further in all documents at the same time
        is_begin[at] = True
        at = next_S[at]
        at = at[~is_document[at]]
    start_P = edges[is_begin]
    return start_P, np.diff(start_P, append=sentence_bounds[-1])


def fill_row_gaps(
    packing: RowPacking, capacity: int, template_size: int, max_documents_per_row: int | None
) -> RowPacking:
    """Break up the emptiest rows and put their text into the gaps of others, where over a hundredth is padding.

    So many as the gaps have room for; a few documents are cut for it that would have fitted into a row.
    """
    num_rows, pieces_R = packing.num_rows, np.diff(packing.row_first)
    row_P = np.repeat(np.arange(num_rows), pieces_R)
    text_R = np.bincount(row_P, packing.piece_length, minlength=num_rows).astype(np.int64)
    room_R = capacity - text_R - template_size * pieces_R
    if room_R.sum() <= MAX_PADDING_SHARE * num_rows * capacity:
        return packing
    is_gap = (room_R >= MIN_GAP_TOKENS + template_size) & (pieces_R < (max_documents_per_row or capacity))
    order = np.argsort(-room_R, kind="stable")
    gap_R = np.where(is_gap, room_R - template_size, 0)[order]
    # Text of the rows that are broken up must fit into the gaps of the rest; some room is lost at their ends.
    fits = np.cumsum(text_R[order]) <= 0.9 * (gap_R.sum() - np.cumsum(gap_R))
    broken, rest = order[: fits.sum()], order[fits.sum() :]
    if not len(broken):
        return packing
    is_moved = np.isin(row_P, broken)
    gaps = RowGaps(
        [(r, int(room_R[r]) - template_size, int(pieces_R[r])) for r in rest[is_gap[rest]].tolist()],
        template_size,
        num_rows,
    )
    for start, length in zip(packing.piece_start[is_moved], packing.piece_length[is_moved], strict=True):
        gaps.place_piece(int(start), int(length), max_documents_per_row)
    moved_P3 = np.array(gaps.placed, dtype=np.int64).reshape(-1, 3)
    row_P = np.concatenate([row_P[~is_moved], moved_P3[:, 0]])
    start_P = np.concatenate([packing.piece_start[~is_moved], moved_P3[:, 1]])
    length_P = np.concatenate([packing.piece_length[~is_moved], moved_P3[:, 2]])
    by_row = np.argsort(row_P, kind="stable")
    tighter = RowPacking(
        piece_start=start_P[by_row],
        piece_length=length_P[by_row].astype(np.int32),
        row_first=np.append(np.unique(row_P[by_row], return_index=True)[1], len(row_P)).astype(np.int64),
    )
    return (
        fill_row_gaps(tighter, capacity, template_size, max_documents_per_row)
        if tighter.num_rows < num_rows
        else packing
    )


class RowGaps:
    """Room at the ends of rows, the largest first, and what is put there."""

    def __init__(self, gaps: list[tuple[int, int, int]], template_size: int, next_row: int) -> None:
        self.gaps = deque(gaps)  # (row, room for text, pieces that it has)
        self.template_size, self.next_row = template_size, next_row
        self.placed: list[tuple[int, int, int]] = []  # (row, start, length)

    def place_piece(self, start: int, length: int, max_documents_per_row: int | None) -> None:
        """Place a piece, cut as the gaps demand; what finds none has a row of its own."""
        while length and self.gaps:
            row, room, pieces = self.gaps.popleft()
            take = length if length <= room else min(room, length - MIN_GAP_TOKENS // 2)
            self.placed.append((row, start, take))
            start, length = start + take, length - take
            left = room - take - self.template_size
            if left >= MIN_GAP_TOKENS and (max_documents_per_row is None or pieces + 1 < max_documents_per_row):
                self.gaps.appendleft((row, left, pieces + 1))
        if length:
            self.placed.append((self.next_row, start, length))
            self.next_row += 1


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """
    >>> ragged_arange(np.array([3, 0, 2]))
    array([0, 1, 2, 0, 1])
    """
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(before, counts)


def best_fit_decreasing(cost_P: np.ndarray, capacity: int, max_pieces_per_row: int | None) -> tuple[np.ndarray, int]:
    """The row of each piece, and the number of rows; costs are given in falling order.

    Open rows lie in buckets by the room that they have left. Pieces of equal cost are placed together: the best row
    for one of them stays the best row for the next until it is full, so a bucket is served at one stroke.
    """
    row_P = np.empty(len(cost_P), dtype=np.int64)
    rows = OpenRows(capacity)
    costs, counts = np.unique(cost_P, return_counts=True)
    first = 0
    for cost, left in zip(costs[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            room, pieces = rows.best_bucket(cost)
            fit = room // cost if max_pieces_per_row is None else min(room // cost, max_pieces_per_row - pieces)
            chosen = rows.take_rows(room, pieces, -(-left // fit))
            placed = min(left, len(chosen) * fit)
            row_P[first : first + placed] = np.repeat(chosen, fit)[:placed]
            first, left = first + placed, left - placed
            partly = placed % fit  # the last row may get fewer than would fit
            full = len(chosen) - (partly > 0)
            for group, more in ((chosen[:full], fit), (chosen[full:], partly)):
                if max_pieces_per_row is None or pieces + more < max_pieces_per_row:
                    rows.put_rows(group, room - more * cost, pieces + more if max_pieces_per_row is not None else 0)
    return row_P, rows.num_rows


class OpenRows:
    """Rows that have room left, in buckets by their room and, where that is limited, the number of their pieces."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self.buckets: list[dict[int, list[int]]] = [{} for _ in range(capacity + 1)]
        self.nonempty_mask = 0  # bit r is set when a bucket with room r is not empty

    def best_bucket(self, cost: int) -> tuple[int, int]:
        """The bucket with the least room that is enough; a new row where there is none."""
        enough = self.nonempty_mask >> cost
        if not enough:
            return self.capacity, 0
        room = cost + (enough & -enough).bit_length() - 1
        return room, max(self.buckets[room])

    def take_rows(self, free_tokens: int, num_pieces: int, max_rows: int) -> list[int]:
        """Up to `count` rows of a bucket; new rows when no row is open there."""
        bucket = self.buckets[free_tokens]
        if num_pieces not in bucket:
            self.num_rows += max_rows
            return list(range(self.num_rows - max_rows, self.num_rows))
        rows = bucket[num_pieces]
        taken = rows[-max_rows:]
        del rows[-max_rows:]
        if not rows:
            del bucket[num_pieces]
        if not bucket:
            self.nonempty_mask &= ~(1 << free_tokens)
        return taken

    def put_rows(self, rows: list[int], free_tokens: int, num_pieces: int) -> None:
        if rows and free_tokens:
            self.buckets[free_tokens].setdefault(num_pieces, []).extend(rows)
            self.nonempty_mask |= 1 << free_tokens


def cached_packing(
    shards: Shards, capacity: int, template_size: int, max_documents_per_row: int | None, split_at: str = "token"
) -> RowPacking:
    """The packing of a part of shards, computed once and kept beside it."""
    key = hashlib.sha256(
        f"2 {shards.fingerprint} {template_size} {max_documents_per_row} {split_at}".encode()
    ).hexdigest()[:12]

    def make() -> RowPacking:
        if split_at == "sentence":
            pieces = split_at_sentences(shards.sentence_bounds(), np.asarray(shards.offsets), capacity - template_size)
            return pack_pieces(*pieces, capacity, template_size, max_documents_per_row)
        packing = pack_documents(np.diff(shards.offsets), capacity, template_size, max_documents_per_row)
        return fill_row_gaps(packing, capacity, template_size, max_documents_per_row)

    return load_or_compute_arrays(shards, f"rows-{capacity}-{key}", RowPacking, make)


ArraysT = TypeVar("ArraysT", bound=NamedTuple)


def load_or_compute_arrays(
    shards: Shards, name: str, array_type: type[ArraysT], compute: Callable[[], ArraysT]
) -> ArraysT:
    """Some arrays that are made once and kept beside a part of shards, in a folder of this name."""
    folder = shards.folder / name
    if find_corruption(folder) is None:
        return array_type(*(np.load(folder / f"{field}.npy", mmap_mode="r") for field in array_type._fields))
    made = compute()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        save_arrays(made, folder)
    except OSError as e:
        say(f"{shards.folder} cannot be written ({e.strerror}), so how its rows are made is not kept.")
    return made


def save_arrays(arrays: NamedTuple, folder: Path) -> None:
    """Write some arrays. Several processes may do so at the same time: each writes its own, the first one stays."""
    mine = folder.with_name(f"{folder.name}.{os.getpid()}")
    with atomic_folder(mine) as temporary:
        for name, array in arrays._asdict().items():
            np.save(temporary / f"{name}.npy", array)
    try:
        mine.rename(folder)
    except OSError:
        shutil.rmtree(mine)
        if not folder.is_dir():
            raise


# --- order --------------------------------------------------------------------------------------------------------

FEISTEL_ROUNDS = 6


def hash_uint64(*numbers: int | np.integer | np.ndarray) -> np.ndarray:
    """64 random-looking bits from any integers, or from arrays of them element by element."""
    state = np.zeros((), dtype=np.uint64)
    for number in numbers:
        value = np.uint64(number % 2**64) if isinstance(number, int) else number.astype(np.uint64)
        state = splitmix64(state ^ value)
    return np.asarray(state)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea, Flood 2014): every bit of the answer depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)  # a new one, which is changed in place from here on
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return x


def permute_indices(indices: np.ndarray, n: int, seed: int | np.integer | np.ndarray) -> np.ndarray:
    """Where each of `indices` goes in a random permutation of range(n): any place at once, no list is kept.

    A Feistel network permutes the numbers of so many bits as n - 1 has; one that lands beyond n goes through it again
    until it lands inside, which gives a permutation of range(n). `seed` is one number, or one for each of `indices`.
    """
    indices = np.asarray(indices, dtype=np.int64)
    assert ((indices >= 0) & (indices < n)).all(), "not in range(n)"
    bits = max((n - 1).bit_length(), 4)
    key = np.broadcast_to(hash_uint64(seed, n), indices.shape).ravel()
    keys = hash_uint64(key, np.arange(FEISTEL_ROUNDS)[:, None])  # ROUNDS for each
    out = indices.astype(np.uint64).ravel()
    todo = np.arange(len(out))
    while len(todo):
        out[todo] = feistel_permute(out[todo], keys[:, todo], bits)
        todo = todo[out[todo] >= n]
    return out.astype(np.int64).reshape(indices.shape)


def feistel_permute(x: np.ndarray, keys: Iterable[np.ndarray], num_bits: int) -> np.ndarray:
    """A permutation of the numbers of `bits` bits, another one for other keys; their count must be even."""
    many, few = np.uint64(num_bits - num_bits // 2), np.uint64(num_bits // 2)
    left, right = x >> few, x & low_bit_mask(few)
    for k, key in enumerate(keys):
        width = many if k % 2 == 0 else few
        left, right = right, left ^ (splitmix64(right ^ key) & low_bit_mask(width))
    return left << few | right


def low_bit_mask(num_bits: np.uint64) -> np.uint64:
    return np.uint64(2 ** int(num_bits) - 1)


# --- rows ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Some rows of text. What not everyone needs is None unless it was asked for."""

    input_ids: np.ndarray  # (B, T) int64
    document_ids: np.ndarray  # (B, T) int32: 0, 1, 2 ... within the row, -1 for padding
    position_ids: np.ndarray  # (B, T) int32: place in the piece, 0 for padding
    maskable: np.ndarray  # (B, T) bool: text, neither frame nor padding
    stream_index: np.ndarray  # (B,) int64: which rows of the stream
    row_index: np.ndarray | None = None  # (B,) int64: which of the rows that an epoch has once each
    epoch: np.ndarray | None = None  # (B,) int64
    word_start: np.ndarray | None = None  # (B, T) bool: the first token of a word, or of a piece
    sentence_end: np.ndarray | None = None  # (B, T) bool: the last token of a sentence, or of a piece
    salient: np.ndarray | None = None  # (B, T) bool: part of a name, a number, a date
    token_type_ids: np.ndarray | None = None  # (B, T) int32: first or second text of a pair
    pair_labels: np.ndarray | None = None  # (B,) int64: 0 where the second text follows the first, 1 where it does not
    reset_state: np.ndarray | None = None  # (B,) bool: where rows go on from step to step, those that begin anew


class PieceLayout:
    """Pieces of text laid end to end, each with room before and after it for what is put around it."""

    def __init__(
        self, shards: Shards, start_P: np.ndarray, length_P: np.ndarray, before_P: np.ndarray, after_P: np.ndarray
    ) -> None:
        self.shards = shards
        self.cost_P = before_P + length_P + after_P
        self.end_P = np.cumsum(self.cost_P)
        self.begin_P = self.end_P - self.cost_P
        self.text_first_P, self.text_last_P = self.begin_P + before_P, self.end_P - after_P - 1  # of text
        self.position_N = np.arange(self.end_P[-1] if len(self.end_P) else 0)
        self.token_index_N = self.position_N + self.expand_pieces(start_P - self.text_first_P)
        self.input_ids_N = np.take(np.asarray(shards.tokens), self.token_index_N, mode="clip").astype(np.int64)
        self.maskable_N = np.ones(len(self.position_N), dtype=bool)

    def expand_pieces(self, value_P: np.ndarray) -> np.ndarray:
        """What holds for a piece, for each of its places."""
        return np.repeat(value_P, self.cost_P)

    def write_special_tokens(self, position_P: np.ndarray, special_ids: tuple[int, ...]) -> None:
        """Put special tokens at some places, one after the other."""
        for k, token in enumerate(special_ids):
            self.input_ids_N[position_P + k] = token
            self.maskable_N[position_P + k] = False

    def gather_bit(self, bit: str) -> np.ndarray:
        """A bit of the shards for each place of text; where a piece is cut, a word starts and a sentence ends."""
        bit_N = self.shards.gather_bits(bit, self.token_index_N) & self.maskable_N
        if bit == "word_start":
            bit_N[self.text_first_P] = True
        if bit == "sentence_end":
            bit_N[self.text_last_P] = True
        return bit_N

    def make_fold_fn(self, pieces_B: np.ndarray, row_length: int) -> Callable[[np.ndarray, int, type], np.ndarray]:
        """A function that breaks values of the line into rows of so many pieces; the rest of a row stays empty."""
        end_B = np.concatenate([[0], self.end_P])[np.concatenate([[0], np.cumsum(pieces_B)])]
        is_filled = np.arange(row_length) < np.diff(end_B)[:, None]

        def fold(values_N: np.ndarray, empty: int, dtype: type) -> np.ndarray:
            rows = np.full(is_filled.shape, empty, dtype=dtype)
            rows[is_filled] = values_N
            return rows

        return fold


class RowDataset:
    """An endless stream of rows in which any row can be asked for: row g is always the same row.

    An epoch has every row once, in an order of its own (`shuffle=False`: as they lie in the shards). `bits` names
    what the rows carry besides: "word_start", "sentence_end", "salient".
    """

    num_rows: int
    fill_ratio: float  # the share of positions that are not padding

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

    def get_rows(self, indices: np.ndarray) -> Rows:
        """The rows at these places of the stream."""
        index_B = np.asarray(indices, dtype=np.int64)
        epoch_B, place_B = np.divmod(index_B, self.num_rows)
        row_B = permute_indices(place_B, self.num_rows, hash_uint64(self.seed, epoch_B)) if self.shuffle else place_B
        return self._build_rows(row_B, index_B)._replace(row_index=row_B, epoch=epoch_B)

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        raise NotImplementedError


class PackedDataset(RowDataset):
    """Rows of packed documents, at most `max_documents_per_row` to a row.

    A document that is longer than a row is cut where the row is full; with `split="sentence"` at the end of a
    sentence, as long as a sentence is not longer than a row.
    """

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
    ) -> None:
        if row_length <= template.num_special_tokens():
            raise UserError(f"A row of {row_length} tokens has no room for text. Choose a longer --max-seq-length.")
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.packing = cached_packing(
            shards, row_length, template.num_special_tokens(), max_documents_per_row, split_at
        )
        self.num_rows = self.packing.num_rows
        start_P, end_P = self.packing.piece_start, self.packing.piece_start + self.packing.piece_length
        frames = (
            len(template.prefix_ids) * self._has_template_at(start_P).sum()
            + len(template.suffix_ids) * self._has_template_at(end_P).sum()
        )
        self.fill_ratio = (shards.num_tokens + int(frames)) / (self.num_rows * row_length)

    def _has_template_at(self, token_index_P: np.ndarray) -> np.ndarray:
        """Where the frame goes: at the edges of documents, or of every piece."""
        if not self.template.document_edges_only:
            return np.ones(len(token_index_P), dtype=bool)
        return self.shards.offsets[np.searchsorted(self.shards.offsets, token_index_P)] == token_index_P

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Lay the pieces of the rows end to end, then fold the line into rows."""
        first_B = self.packing.row_first[row_B]
        pieces_B = self.packing.row_first[row_B + 1] - first_B
        doc_P = ragged_arange(pieces_B)
        piece_P = np.repeat(first_B, pieces_B) + doc_P
        start_P = self.packing.piece_start[piece_P]
        length_P = self.packing.piece_length[piece_P].astype(np.int64)
        opens_P, closes_P = self._has_template_at(start_P), self._has_template_at(start_P + length_P)
        before, after = self.template.prefix_ids, self.template.suffix_ids
        line = PieceLayout(self.shards, start_P, length_P, len(before) * opens_P, len(after) * closes_P)
        line.write_special_tokens(line.begin_P[opens_P], before)
        line.write_special_tokens(line.text_last_P[closes_P] + 1, after)
        fold = line.make_fold_fn(pieces_B, self.row_length)
        return Rows(
            input_ids=fold(line.input_ids_N, self.pad_id, np.int64),
            document_ids=fold(line.expand_pieces(doc_P), -1, np.int32),
            position_ids=fold(line.position_N - line.expand_pieces(line.begin_P), 0, np.int32),
            maskable=fold(line.maskable_N, False, bool),
            stream_index=index_B,
            **{name: fold(line.gather_bit(name), False, bool) for name in self.token_bits},
        )
