"""Rows of token ids: packing and shuffled order, as a pure function of the shards, the seed and the index."""

# Shapes: D documents, P pieces, R rows, B rows of a batch, T positions of a row, N tokens of a batch.

from __future__ import annotations

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from firth.console import count, say
from firth.errors import UserError
from firth.files import damage, whole_folder
from firth.tokens.shards import Shards

# --- packing ------------------------------------------------------------------------------------------------------

MOST_PADDING = 0.01
SMALLEST_GAP = 32  # tokens of text that are worth cutting a document for


@dataclass(frozen=True)
class Frame:
    """Special tokens put around each piece of a document: [CLS] and [SEP] for BERT, nothing and </s> for T5.

    `edges_only`: only where a document really begins and ends (GPT-2), not where it was cut; a piece that was cut
    leaves their places free. `between` stands between the two texts of a pair.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    edges_only: bool = False
    between: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.before) + len(self.after)


class Packing(NamedTuple):
    """Which pieces of text share a row: row r holds the pieces row_first[r] up to row_first[r + 1]."""

    piece_start: np.ndarray  # (P,) int64, offset in the tokens of the shards
    piece_length: np.ndarray  # (P,) int32
    row_first: np.ndarray  # (R + 1,) int64

    @property
    def num_rows(self) -> int:
        return len(self.row_first) - 1


def pack(lengths_D: np.ndarray, capacity: int, frame: int = 0, max_documents: int | None = None) -> Packing:
    """Put documents that lie one after the other into rows of `capacity`; every token reaches exactly one row.

    A document that is too long is cut into full pieces and a remainder. Pieces, which cost their length and `frame`
    more, are packed best-fit decreasing: the longest first, each into the row where it leaves the least room, at
    most `max_documents` to a row.
    """
    assert capacity > frame, "a row must have room for text"
    return pack_pieces(*cut(np.asarray(lengths_D, dtype=np.int64), capacity - frame), capacity, frame, max_documents)


def pack_pieces(
    start_P: np.ndarray, length_P: np.ndarray, capacity: int, frame: int, max_documents: int | None
) -> Packing:
    """The same for pieces that are cut already."""
    order = np.argsort(-length_P, kind="stable")
    row_P, num_rows = best_fit(length_P[order] + frame, capacity, max_documents)
    by_row = np.argsort(row_P, kind="stable")
    order = order[by_row]
    return Packing(
        piece_start=start_P[order],
        piece_length=length_P[order].astype(np.int32),
        row_first=np.searchsorted(row_P[by_row], np.arange(num_rows + 1)).astype(np.int64),
    )


def cut(lengths_D: np.ndarray, payload: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of the pieces: full ones of length `payload`, and what remains of each document."""
    num_pieces_D = -(-lengths_D // payload)
    document_P = np.repeat(np.arange(len(lengths_D)), num_pieces_D)
    done_P = ragged_arange(num_pieces_D) * payload
    start_P = (np.cumsum(lengths_D) - lengths_D)[document_P] + done_P
    return start_P, np.minimum(lengths_D[document_P] - done_P, payload)


def cut_at_sentences(bounds: np.ndarray, offsets: np.ndarray, payload: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and length of pieces that are whole sentences of a document, as many as fit into `payload`.

    `bounds` are where sentences begin and end, `offsets` where documents do. A sentence that is too long is cut.
    """
    edges = np.append(cut(np.diff(bounds), payload)[0], bounds[-1])
    doc_first = np.searchsorted(edges, offsets)
    next_S = np.searchsorted(edges, edges[:-1] + payload, side="right") - 1
    next_S = np.minimum(next_S, np.repeat(doc_first[1:], np.diff(doc_first)))
    is_document, is_begin = np.zeros(len(edges), dtype=bool), np.zeros(len(edges), dtype=bool)
    is_document[doc_first] = True
    at = np.unique(doc_first[:-1])
    while len(at):  # one piece further in all documents at the same time
        is_begin[at] = True
        at = next_S[at]
        at = at[~is_document[at]]
    start_P = edges[is_begin]
    return start_P, np.diff(start_P, append=bounds[-1])


def tighten(packing: Packing, capacity: int, frame: int, max_documents: int | None) -> Packing:
    """Break up the emptiest rows and put their text into the gaps of others, where over a hundredth is padding.

    So many as the gaps have room for; a few documents are cut for it that would have fitted into a row.
    """
    num_rows, pieces_R = packing.num_rows, np.diff(packing.row_first)
    row_P = np.repeat(np.arange(num_rows), pieces_R)
    text_R = np.bincount(row_P, packing.piece_length, minlength=num_rows).astype(np.int64)
    room_R = capacity - text_R - frame * pieces_R
    if room_R.sum() <= MOST_PADDING * num_rows * capacity:
        return packing
    is_gap = (room_R >= SMALLEST_GAP + frame) & (pieces_R < (max_documents or capacity))
    order = np.argsort(-room_R, kind="stable")
    gap_R = np.where(is_gap, room_R - frame, 0)[order]
    # Text of the rows that are broken up must fit into the gaps of the rest; some room is lost at their ends.
    fits = np.cumsum(text_R[order]) <= 0.9 * (gap_R.sum() - np.cumsum(gap_R))
    broken, rest = order[: fits.sum()], order[fits.sum() :]
    if not len(broken):
        return packing
    is_moved = np.isin(row_P, broken)
    gaps = Gaps([(r, int(room_R[r]) - frame, int(pieces_R[r])) for r in rest[is_gap[rest]].tolist()], frame, num_rows)
    for start, length in zip(packing.piece_start[is_moved], packing.piece_length[is_moved], strict=True):
        gaps.put(int(start), int(length), max_documents)
    moved_P3 = np.array(gaps.placed, dtype=np.int64).reshape(-1, 3)
    row_P = np.concatenate([row_P[~is_moved], moved_P3[:, 0]])
    start_P = np.concatenate([packing.piece_start[~is_moved], moved_P3[:, 1]])
    length_P = np.concatenate([packing.piece_length[~is_moved], moved_P3[:, 2]])
    by_row = np.argsort(row_P, kind="stable")
    tighter = Packing(
        piece_start=start_P[by_row],
        piece_length=length_P[by_row].astype(np.int32),
        row_first=np.append(np.unique(row_P[by_row], return_index=True)[1], len(row_P)).astype(np.int64),
    )
    return tighten(tighter, capacity, frame, max_documents) if tighter.num_rows < num_rows else packing


class Gaps:
    """Room at the ends of rows, the largest first, and what is put there."""

    def __init__(self, gaps: list[tuple[int, int, int]], frame: int, next_row: int) -> None:
        self.gaps = deque(gaps)  # (row, room for text, pieces that it has)
        self.frame, self.next_row = frame, next_row
        self.placed: list[tuple[int, int, int]] = []  # (row, start, length)

    def put(self, start: int, length: int, max_documents: int | None) -> None:
        """Place a piece, cut as the gaps demand; what finds none has a row of its own."""
        while length and self.gaps:
            row, room, pieces = self.gaps.popleft()
            take = length if length <= room else min(room, length - SMALLEST_GAP // 2)
            self.placed.append((row, start, take))
            start, length = start + take, length - take
            left = room - take - self.frame
            if left >= SMALLEST_GAP and (max_documents is None or pieces + 1 < max_documents):
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


def best_fit(cost_P: np.ndarray, capacity: int, max_pieces: int | None) -> tuple[np.ndarray, int]:
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
            fit = room // cost if max_pieces is None else min(room // cost, max_pieces - pieces)
            chosen = rows.take(room, pieces, -(-left // fit))
            placed = min(left, len(chosen) * fit)
            row_P[first : first + placed] = np.repeat(chosen, fit)[:placed]
            first, left = first + placed, left - placed
            partly = placed % fit  # the last row may get fewer than would fit
            full = len(chosen) - (partly > 0)
            for group, more in ((chosen[:full], fit), (chosen[full:], partly)):
                if max_pieces is None or pieces + more < max_pieces:
                    rows.put(group, room - more * cost, pieces + more if max_pieces is not None else 0)
    return row_P, rows.num_rows


class OpenRows:
    """Rows that have room left, in buckets by their room and, where that is limited, the number of their pieces."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self.buckets: list[dict[int, list[int]]] = [{} for _ in range(capacity + 1)]
        self.filled = 0  # bit r is set when a bucket with room r is not empty

    def best_bucket(self, cost: int) -> tuple[int, int]:
        """The bucket with the least room that is enough; a new row where there is none."""
        enough = self.filled >> cost
        if not enough:
            return self.capacity, 0
        room = cost + (enough & -enough).bit_length() - 1
        return room, max(self.buckets[room])

    def take(self, room: int, pieces: int, count: int) -> list[int]:
        """Up to `count` rows of a bucket; new rows when no row is open there."""
        bucket = self.buckets[room]
        if pieces not in bucket:
            self.num_rows += count
            return list(range(self.num_rows - count, self.num_rows))
        rows = bucket[pieces]
        taken = rows[-count:]
        del rows[-count:]
        if not rows:
            del bucket[pieces]
        if not bucket:
            self.filled &= ~(1 << room)
        return taken

    def put(self, rows: list[int], room: int, pieces: int) -> None:
        if rows and room:
            self.buckets[room].setdefault(pieces, []).extend(rows)
            self.filled |= 1 << room


def cached_packing(
    shards: Shards, capacity: int, frame: int, max_documents: int | None, split: str = "token"
) -> Packing:
    """The packing of a part of shards, computed once and kept beside it."""
    key = hashlib.sha256(f"2 {shards.fingerprint} {frame} {max_documents} {split}".encode()).hexdigest()[:12]

    def make() -> Packing:
        if split == "sentence":
            pieces = cut_at_sentences(shards.sentence_bounds(), np.asarray(shards.offsets), capacity - frame)
            return pack_pieces(*pieces, capacity, frame, max_documents)
        packing = pack(np.diff(shards.offsets), capacity, frame, max_documents)
        return tighten(packing, capacity, frame, max_documents)

    return kept(shards, f"rows-{capacity}-{key}", Packing, make)


Arrays = TypeVar("Arrays", bound=NamedTuple)


def kept(shards: Shards, name: str, kind: type[Arrays], make: Callable[[], Arrays]) -> Arrays:
    """Some arrays that are made once and kept beside a part of shards, in a folder of this name."""
    folder = shards.folder / name
    if damage(folder) is None:
        return kind(*(np.load(folder / f"{field}.npy", mmap_mode="r") for field in kind._fields))
    made = make()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        store(made, folder)
    except OSError as e:
        say(f"{shards.folder} cannot be written ({e.strerror}), so how its rows are made is not kept.")
    return made


def store(arrays: NamedTuple, folder: Path) -> None:
    """Write some arrays. Several processes may do so at the same time: each writes its own, the first one stays."""
    mine = folder.with_name(f"{folder.name}.{os.getpid()}")
    with whole_folder(mine) as temporary:
        for name, array in arrays._asdict().items():
            np.save(temporary / f"{name}.npy", array)
    try:
        mine.rename(folder)
    except OSError:
        shutil.rmtree(mine)
        if not folder.is_dir():
            raise


# --- order --------------------------------------------------------------------------------------------------------

ROUNDS = 6


def mix(*numbers: int | np.integer | np.ndarray) -> np.ndarray:
    """64 random-looking bits from any integers, or from arrays of them element by element."""
    state = np.zeros((), dtype=np.uint64)
    for number in numbers:
        value = np.uint64(number % 2**64) if isinstance(number, int) else number.astype(np.uint64)
        state = scramble(state ^ value)
    return np.asarray(state)


def scramble(x: np.ndarray) -> np.ndarray:
    """One step of splitmix64 (Steele, Lea, Flood 2014): every bit of the answer depends on every bit of x."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)  # a new one, which is changed in place from here on
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        return x


def permute(i: np.ndarray, n: int, seed: int | np.integer | np.ndarray) -> np.ndarray:
    """Where each of `i` goes in a random permutation of range(n): any place at once, no list is kept.

    A Feistel network permutes the numbers of so many bits as n - 1 has; one that lands beyond n goes through it again
    until it lands inside, which gives a permutation of range(n). `seed` is one number, or one for each of `i`.
    """
    i = np.asarray(i, dtype=np.int64)
    assert ((i >= 0) & (i < n)).all(), "not in range(n)"
    bits = max((n - 1).bit_length(), 4)
    key = np.broadcast_to(mix(seed, n), i.shape).ravel()
    keys = mix(key, np.arange(ROUNDS)[:, None])  # ROUNDS for each
    out = i.astype(np.uint64).ravel()
    todo = np.arange(len(out))
    while len(todo):
        out[todo] = feistel(out[todo], keys[:, todo], bits)
        todo = todo[out[todo] >= n]
    return out.astype(np.int64).reshape(i.shape)


def feistel(x: np.ndarray, keys: Iterable[np.ndarray], bits: int) -> np.ndarray:
    """A permutation of the numbers of `bits` bits, another one for other keys; their count must be even."""
    many, few = np.uint64(bits - bits // 2), np.uint64(bits // 2)
    left, right = x >> few, x & low_bits(few)
    for k, key in enumerate(keys):
        width = many if k % 2 == 0 else few
        left, right = right, left ^ (scramble(right ^ key) & low_bits(width))
    return left << few | right


def low_bits(count: np.uint64) -> np.uint64:
    return np.uint64(2 ** int(count) - 1)


# --- rows ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Some rows of text. What not everyone needs is None unless it was asked for."""

    tokens: np.ndarray  # (B, T) int64
    doc: np.ndarray  # (B, T) int32: 0, 1, 2 ... within the row, -1 for padding
    position: np.ndarray  # (B, T) int32: place in the piece, 0 for padding
    real: np.ndarray  # (B, T) bool: text, neither frame nor padding
    index: np.ndarray  # type: ignore[assignment]  # (B,) int64: which rows of the stream
    row: np.ndarray | None = None  # (B,) int64: which of the rows that an epoch has once each
    epoch: np.ndarray | None = None  # (B,) int64
    word_start: np.ndarray | None = None  # (B, T) bool: the first token of a word, or of a piece
    sentence_end: np.ndarray | None = None  # (B, T) bool: the last token of a sentence, or of a piece
    salient: np.ndarray | None = None  # (B, T) bool: part of a name, a number, a date
    segment: np.ndarray | None = None  # (B, T) int32: first or second text of a pair
    pair: np.ndarray | None = None  # (B,) int64: 0 where the second text follows the first, 1 where it does not
    fresh: np.ndarray | None = None  # (B,) bool: where rows go on from step to step, those that begin anew


class Line:
    """Pieces of text laid end to end, each with room before and after it for what is put around it."""

    def __init__(
        self, shards: Shards, start_P: np.ndarray, length_P: np.ndarray, before_P: np.ndarray, after_P: np.ndarray
    ) -> None:
        self.shards = shards
        self.cost_P = before_P + length_P + after_P
        self.end_P = np.cumsum(self.cost_P)
        self.begin_P = self.end_P - self.cost_P
        self.first_P, self.last_P = self.begin_P + before_P, self.end_P - after_P - 1  # of text
        self.place_N = np.arange(self.end_P[-1] if len(self.end_P) else 0)
        self.source_N = self.place_N + self.spread(start_P - self.first_P)
        self.tokens_N = np.take(np.asarray(shards.tokens), self.source_N, mode="clip").astype(np.int64)
        self.real_N = np.ones(len(self.place_N), dtype=bool)

    def spread(self, value_P: np.ndarray) -> np.ndarray:
        """What holds for a piece, for each of its places."""
        return np.repeat(value_P, self.cost_P)

    def put(self, place_P: np.ndarray, tokens: tuple[int, ...]) -> None:
        """Put special tokens at some places, one after the other."""
        for k, token in enumerate(tokens):
            self.tokens_N[place_P + k] = token
            self.real_N[place_P + k] = False

    def bit(self, name: str) -> np.ndarray:
        """A bit of the shards for each place of text; where a piece is cut, a word starts and a sentence ends."""
        bit_N = self.shards.bits(name, self.source_N) & self.real_N
        if name == "word_start":
            bit_N[self.first_P] = True
        if name == "sentence_end":
            bit_N[self.last_P] = True
        return bit_N

    def fold(self, pieces_B: np.ndarray, length: int) -> Callable[[np.ndarray, int, type], np.ndarray]:
        """A function that breaks values of the line into rows of so many pieces; the rest of a row stays empty."""
        end_B = np.concatenate([[0], self.end_P])[np.concatenate([[0], np.cumsum(pieces_B)])]
        is_filled = np.arange(length) < np.diff(end_B)[:, None]

        def fold(values_N: np.ndarray, empty: int, dtype: type) -> np.ndarray:
            rows = np.full(is_filled.shape, empty, dtype=dtype)
            rows[is_filled] = values_N
            return rows

        return fold


class Source:
    """An endless stream of rows in which any row can be asked for: row g is always the same row.

    An epoch has every row once, in an order of its own (`shuffle=False`: as they lie in the shards). `bits` names
    what the rows carry besides: "word_start", "sentence_end", "salient".
    """

    num_rows: int
    tokens_used: float  # the share of positions that are not padding

    def __init__(
        self,
        shards: Shards,
        length: int,
        frame: Frame,
        pad: int,
        seed: int,
        shuffle: bool = True,
        allow_short: bool = False,
        bits: tuple[str, ...] = (),
    ) -> None:
        if shards.num_tokens < length and not allow_short:
            raise UserError(
                f"The text has {count(shards.num_tokens, 'token')}, less than one row of {length:,}. "
                f"Choose a shorter --max-seq-length, or give more text."
            )
        shards.demand(bits)
        self.shards, self.length, self.frame, self.pad = shards, length, frame, pad
        self.seed, self.shuffle, self.bits = seed, shuffle, bits

    def rows(self, indices: np.ndarray) -> Rows:
        """The rows at these places of the stream."""
        index_B = np.asarray(indices, dtype=np.int64)
        epoch_B, place_B = np.divmod(index_B, self.num_rows)
        row_B = permute(place_B, self.num_rows, mix(self.seed, epoch_B)) if self.shuffle else place_B
        return self._build(row_B, index_B)._replace(row=row_B, epoch=epoch_B)

    def _build(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        raise NotImplementedError


class RowSource(Source):
    """Rows of packed documents, at most `max_documents` to a row.

    A document that is longer than a row is cut where the row is full; with `split="sentence"` at the end of a
    sentence, as long as a sentence is not longer than a row.
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        frame: Frame,
        pad: int,
        seed: int,
        max_documents: int | None = None,
        shuffle: bool = True,
        allow_short: bool = False,
        bits: tuple[str, ...] = (),
        split: str = "token",
    ) -> None:
        if length <= frame.size:
            raise UserError(f"A row of {length} tokens has no room for text. Choose a longer --max-seq-length.")
        super().__init__(shards, length, frame, pad, seed, shuffle, allow_short, bits)
        self.packing = cached_packing(shards, length, frame.size, max_documents, split)
        self.num_rows = self.packing.num_rows
        start_P, end_P = self.packing.piece_start, self.packing.piece_start + self.packing.piece_length
        frames = len(frame.before) * self._edges(start_P).sum() + len(frame.after) * self._edges(end_P).sum()
        self.tokens_used = (shards.num_tokens + int(frames)) / (self.num_rows * length)

    def _edges(self, place_P: np.ndarray) -> np.ndarray:
        """Where the frame goes: at the edges of documents, or of every piece."""
        if not self.frame.edges_only:
            return np.ones(len(place_P), dtype=bool)
        return self.shards.offsets[np.searchsorted(self.shards.offsets, place_P)] == place_P

    def _build(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Lay the pieces of the rows end to end, then fold the line into rows."""
        first_B = self.packing.row_first[row_B]
        pieces_B = self.packing.row_first[row_B + 1] - first_B
        doc_P = ragged_arange(pieces_B)
        piece_P = np.repeat(first_B, pieces_B) + doc_P
        start_P = self.packing.piece_start[piece_P]
        length_P = self.packing.piece_length[piece_P].astype(np.int64)
        opens_P, closes_P = self._edges(start_P), self._edges(start_P + length_P)
        before, after = self.frame.before, self.frame.after
        line = Line(self.shards, start_P, length_P, len(before) * opens_P, len(after) * closes_P)
        line.put(line.begin_P[opens_P], before)
        line.put(line.last_P[closes_P] + 1, after)
        fold = line.fold(pieces_B, self.length)
        return Rows(
            tokens=fold(line.tokens_N, self.pad, np.int64),
            doc=fold(line.spread(doc_P), -1, np.int32),
            position=fold(line.place_N - line.spread(line.begin_P), 0, np.int32),
            real=fold(line.real_N, False, bool),
            index=index_B,
            **{name: fold(line.bit(name), False, bool) for name in self.bits},
        )
