"""Packing: which pieces of text share a row.

Rows of a batch have one length T, and documents do not. One document per row and padding after it wastes most of the
computation: attention and MLP cost the same at a padded position. Concatenating all documents and cutting every T
tokens wastes nothing, but cuts nearly every row's first and last document. Packing does neither:

1. A document longer than a row is cut into full pieces and a remainder (`split_documents`), or into whole sentences
   (`split_at_sentences`).
2. The pieces are packed best-fit decreasing (Johnson 1973; for language models: Ding et al. 2024, "Fewer Truncations
   Improve Language Modeling", section 3): the longest first, each into the row where it leaves the fewest free tokens.
3. If more than `MAX_PADDING_SHARE` of the positions are still padding, the emptiest rows are dissolved and their text
   fills the gaps of the others (`fill_row_gaps`). That cuts a few documents more; pieces of whole sentences are not
   cut.

Every token is in exactly one row. Documents of a row must not attend to each other (Krell et al. 2021, "Efficient
Sequence Packing without Cross-contamination"), so `dataset.py` gives each position its document id and a position that
restarts at 0 with each document. A model then computes the same as for each document in a row of its own.

The Python loop runs once per distinct length, not once per piece: `best_fit_decreasing` packs all pieces of one length
at once. The result is cached beside the shards (`cached_packing`), so a run computes it once and memory-maps it later.

A text that is read many times in one packing shows a model the same cuts in every pass: the token after a cut is never
predicted from the text before it. So there are several packings of one text, by number. Packing 0 is as above. In any
other one a document longer than a row has a first piece of random length, which moves all its cuts, and pieces of equal
length are packed in random order, which gives a row other neighbours. Both are functions of the packing's number and
the index of the document or piece.
"""

# Shapes: D documents, S sentences, P pieces, R rows.

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np

from firth.core.hashing import hash_uint64
from firth.tokens.shards import Shards, load_or_compute_arrays

PACKING_VERSION = 2  # part of the cache key: raise it when the algorithm changes
MAX_PADDING_SHARE = 0.01  # share of positions: below it, `fill_row_gaps` cuts no more documents
MIN_GAP_TOKENS = 32  # tokens of text: a smaller gap is not worth cutting a document for
MIN_PIECE_TOKENS = MIN_GAP_TOKENS // 2  # tokens of text: no scraps of a word or two where a document is cut
GAP_USE_SHARE = 0.9  # share of the gaps that text is expected to fill; the rest is lost at their ends


class RowPacking(NamedTuple):
    """The pieces of each row: row r holds pieces[row_first[r] : row_first[r + 1]]."""

    piece_start: np.ndarray  # (P,) int64, index of the first token in the shards
    piece_length: np.ndarray  # (P,) int32, tokens
    row_first: np.ndarray  # (R + 1,) int64

    @property
    def num_rows(self) -> int:
        return len(self.row_first) - 1


def cached_packing(
    shards: Shards,
    capacity: int,
    template_size: int,
    max_documents_per_row: int | None,
    split_at: str = "token",
    number: int = 0,
) -> RowPacking:
    """Return packing `number` of `shards` into rows of `capacity` tokens; compute it once and store it beside them."""
    key = hashlib.sha256(
        f"{PACKING_VERSION} {shards.fingerprint} {template_size} {max_documents_per_row} {split_at}"
        f"{f' {number}' if number else ''}".encode()
    ).hexdigest()[:12]

    def compute() -> RowPacking:
        if split_at == "sentence":
            offsets, longest = np.asarray(shards.offsets), capacity - template_size
            first_D = random_first_lengths(len(offsets) - 1, longest, number)
            pieces = split_at_sentences(shards.sentence_bounds(), offsets, longest, first_D)
            return pack_pieces(*pieces, capacity, template_size, max_documents_per_row, number)
        packing = pack_documents(np.diff(shards.offsets), capacity, template_size, max_documents_per_row, number)
        return fill_row_gaps(packing, capacity, template_size, max_documents_per_row)

    return load_or_compute_arrays(shards, f"rows-{capacity}-{key}", RowPacking, compute)


def pack_documents(
    lengths_D: np.ndarray,
    capacity: int,
    template_size: int = 0,
    max_documents_per_row: int | None = None,
    number: int = 0,
) -> RowPacking:
    """Return packing `number` of documents, which lie end to end in the shards, into rows of `capacity` tokens.

    A piece occupies its length plus `template_size` special tokens. `max_documents_per_row=None`: no limit.
    """
    assert capacity > template_size, "a row must hold text"
    first_D = random_first_lengths(len(lengths_D), capacity - template_size, number)
    pieces = split_documents(np.asarray(lengths_D, dtype=np.int64), capacity - template_size, first_D)
    return pack_pieces(*pieces, capacity, template_size, max_documents_per_row, number)


def pack_pieces(
    start_P: np.ndarray,
    length_P: np.ndarray,
    capacity: int,
    template_size: int,
    max_documents_per_row: int | None,
    number: int = 0,
) -> RowPacking:
    """Pack pieces of text. Those of equal length are taken in their order in packing 0, else in random order."""
    random_P = hash_uint64(number, zlib.crc32(b"order of pieces"), np.arange(len(length_P)))
    order = np.lexsort((random_P, -length_P)) if number else np.argsort(-length_P, kind="stable")
    row_P, num_rows = best_fit_decreasing(length_P[order] + template_size, capacity, max_documents_per_row)
    by_row = np.argsort(row_P, kind="stable")
    order = order[by_row]
    return RowPacking(
        piece_start=start_P[order],
        piece_length=length_P[order].astype(np.int32),
        row_first=np.searchsorted(row_P[by_row], np.arange(num_rows + 1)).astype(np.int64),
    )


# --- cutting ------------------------------------------------------------------------------------------------------


def random_first_lengths(num_documents: int, max_piece_length: int, number: int) -> np.ndarray | None:
    """Return the length of the first piece of each document that is cut, (D,); None for packing 0, which fills rows.

    Lengths are uniform, from `MIN_PIECE_TOKENS` to `max_piece_length`.
    """
    if not number:
        return None
    least = min(MIN_PIECE_TOKENS, max_piece_length)
    bits_D = hash_uint64(number, zlib.crc32(b"first piece"), np.arange(num_documents))
    return (bits_D % np.uint64(max_piece_length - least + 1)).astype(np.int64) + least


def split_documents(
    lengths_D: np.ndarray, max_piece_length: int, first_D: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length (P,) of the pieces: full ones of `max_piece_length`, and each document's remainder.

    `first_D` are the lengths of the first pieces of documents longer than `max_piece_length`; default: full ones.

    >>> [x.tolist() for x in split_documents(np.array([20, 3]), 8)]
    [[0, 8, 16, 20], [8, 8, 4, 3]]
    >>> [x.tolist() for x in split_documents(np.array([20, 3]), 8, np.array([5, 5]))]
    [[0, 5, 13, 20], [5, 8, 7, 3]]
    """
    missing_D = np.zeros_like(lengths_D)  # tokens that the first piece lacks of a full one
    if first_D is not None:
        missing_D = np.where(lengths_D > max_piece_length, max_piece_length - first_D, 0)
    num_pieces_D = -(-(lengths_D + missing_D) // max_piece_length)
    document_P = np.repeat(np.arange(len(lengths_D)), num_pieces_D)
    end_P = (ragged_arange(num_pieces_D) + 1) * max_piece_length - missing_D[document_P]
    offset_P = np.maximum(end_P - max_piece_length, 0)
    start_P = (np.cumsum(lengths_D) - lengths_D)[document_P] + offset_P
    return start_P, np.minimum(lengths_D[document_P], end_P) - offset_P


def split_at_sentences(
    sentence_bounds: np.ndarray,
    document_offsets: np.ndarray,
    max_piece_length: int,
    first_D: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length (P,) of pieces that are whole sentences of one document, as many as fit.

    `sentence_bounds` (S + 1,) and `document_offsets` (D + 1,) are token indices. A sentence longer than
    `max_piece_length` is cut. `first_D` are the most tokens of the first piece of documents longer than
    `max_piece_length`; its first sentence is always in it.
    """
    edges = np.append(split_documents(np.diff(sentence_bounds), max_piece_length)[0], sentence_bounds[-1])
    document_first = np.searchsorted(edges, document_offsets)
    next_S = np.searchsorted(edges, edges[:-1] + max_piece_length, side="right") - 1
    next_S = np.minimum(next_S, np.repeat(document_first[1:], np.diff(document_first)))
    if first_D is not None:
        is_cut_D = np.diff(document_offsets) > max_piece_length
        opening = document_first[:-1][is_cut_D]
        last = np.searchsorted(edges, edges[opening] + first_D[is_cut_D], side="right") - 1
        next_S[opening] = np.maximum(last, opening + 1)
    is_document, is_start = np.zeros(len(edges), dtype=bool), np.zeros(len(edges), dtype=bool)
    is_document[document_first] = True
    sentences = np.unique(document_first[:-1])
    while len(sentences):  # one piece further in all documents at the same time
        is_start[sentences] = True
        sentences = next_S[sentences]
        sentences = sentences[~is_document[sentences]]
    start_P = edges[is_start]
    return start_P, np.diff(start_P, append=sentence_bounds[-1])


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """Concatenate np.arange(count) for each count.

    >>> ragged_arange(np.array([3, 0, 2]))
    array([0, 1, 2, 0, 1])
    """
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


# --- best fit -----------------------------------------------------------------------------------------------------


def best_fit_decreasing(cost_P: np.ndarray, capacity: int, max_pieces_per_row: int | None) -> tuple[np.ndarray, int]:
    """Return the row of each piece (P,) and the number of rows; `cost_P` is sorted, the largest first.

    Open rows lie in buckets by their free tokens. Pieces of equal cost are placed together: the best row for one of
    them stays the best row for the next until it is full, so one bucket takes many pieces at once.
    """
    row_P = np.empty(len(cost_P), dtype=np.int64)
    open_rows = OpenRows(capacity)
    costs, counts = np.unique(cost_P, return_counts=True)
    first = 0
    for cost, left in zip(costs[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free, pieces = open_rows.best_bucket(cost)
            fit = free // cost if max_pieces_per_row is None else min(free // cost, max_pieces_per_row - pieces)
            rows = open_rows.take_rows(free, pieces, -(-left // fit))
            placed = min(left, len(rows) * fit)
            # a batch of fine-tuning is packed in every step, mostly one piece at a time
            row_P[first : first + placed] = rows[0] if placed == 1 else np.repeat(rows, fit)[:placed]
            first, left = first + placed, left - placed
            partly = placed % fit  # pieces of the last row, if fewer than fit
            full = len(rows) - (partly > 0)
            for group, added in ((rows[:full], fit), (rows[full:], partly)):
                if max_pieces_per_row is None or pieces + added < max_pieces_per_row:
                    total = 0 if max_pieces_per_row is None else pieces + added
                    open_rows.put_rows(group, free - added * cost, total)
    return row_P, open_rows.num_rows


class OpenRows:
    """Rows with free tokens, in buckets by their free tokens and, if pieces per row are limited, by their pieces."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_rows = 0
        self.buckets: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        self.nonempty_mask = 0  # bit f is set if rows with f free tokens exist

    def best_bucket(self, cost: int) -> tuple[int, int]:
        """Return (free tokens, pieces) of the bucket with the fewest free tokens that suffice; else of a new row.

        Of rows with equally many free tokens, those with the most pieces come first: the others can take more later.
        """
        large_enough = self.nonempty_mask >> cost
        if not large_enough:
            return self.capacity, 0
        free_tokens = cost + (large_enough & -large_enough).bit_length() - 1  # the lowest set bit
        return free_tokens, max(self.buckets[free_tokens])

    def take_rows(self, free_tokens: int, num_pieces: int, max_rows: int) -> list[int]:
        """Remove up to `max_rows` rows from a bucket; open new rows if the bucket is empty."""
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


# --- gaps ---------------------------------------------------------------------------------------------------------


def fill_row_gaps(
    packing: RowPacking, capacity: int, template_size: int, max_documents_per_row: int | None
) -> RowPacking:
    """Dissolve the emptiest rows into the gaps of the others until at most `MAX_PADDING_SHARE` is padding.

    Documents all longer than half a row need this: no two of them fit together. As many rows are dissolved as the gaps
    can hold; pieces are cut to the gaps.
    """
    num_rows, pieces_R = packing.num_rows, np.diff(packing.row_first)
    row_P = np.repeat(np.arange(num_rows), pieces_R)
    text_R = np.bincount(row_P, packing.piece_length, minlength=num_rows).astype(np.int64)
    free_R = capacity - text_R - template_size * pieces_R
    if free_R.sum() <= MAX_PADDING_SHARE * num_rows * capacity:
        return packing
    is_gap = (free_R >= MIN_GAP_TOKENS + template_size) & (pieces_R < (max_documents_per_row or capacity))
    order = np.argsort(-free_R, kind="stable")
    gap_R = np.where(is_gap, free_R - template_size, 0)[order]
    # The text of the dissolved rows must fit into the gaps of the rest.
    fits = np.cumsum(text_R[order]) <= GAP_USE_SHARE * (gap_R.sum() - np.cumsum(gap_R))
    dissolved, rest = order[: fits.sum()], order[fits.sum() :]
    if not len(dissolved):
        return packing
    is_moved = np.isin(row_P, dissolved)
    gaps = RowGaps(
        [(r, int(free_R[r]) - template_size, int(pieces_R[r])) for r in rest[is_gap[rest]].tolist()],
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
    if tighter.num_rows >= num_rows:
        return packing
    return fill_row_gaps(tighter, capacity, template_size, max_documents_per_row)


class RowGaps:
    """Free tokens at the ends of rows, the largest gap first, and the pieces that are placed there."""

    def __init__(self, gaps: list[tuple[int, int, int]], template_size: int, next_row: int) -> None:
        self.gaps = deque(gaps)  # (row, free tokens for text, pieces in the row)
        self.template_size, self.next_row = template_size, next_row
        self.placed: list[tuple[int, int, int]] = []  # (row, start, length)

    def place_piece(self, start: int, length: int, max_documents_per_row: int | None) -> None:
        """Place a piece, cut to the gaps; a remainder without a gap gets a row of its own."""
        while length and self.gaps:
            row, free_tokens, pieces = self.gaps.popleft()
            # A piece that is cut leaves at least MIN_PIECE_TOKENS.
            taken = length if length <= free_tokens else min(free_tokens, length - MIN_PIECE_TOKENS)
            self.placed.append((row, start, taken))
            start, length = start + taken, length - taken
            still_free = free_tokens - taken - self.template_size
            if still_free >= MIN_GAP_TOKENS and (max_documents_per_row is None or pieces + 1 < max_documents_per_row):
                self.gaps.appendleft((row, still_free, pieces + 1))
        if length:
            self.placed.append((self.next_row, start, length))
            self.next_row += 1
