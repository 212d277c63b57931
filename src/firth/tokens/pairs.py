"""Rows of two texts: one that follows the other or does not, or the two sides of a document."""

# Shapes: D documents, S sentences, C chunks, B rows of a batch, 2 the first and the second text, P = 2B pieces.

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import numpy as np

from firth.console import count, say
from firth.errors import UserError
from firth.tokens.rows import Frame, Line, Rows, Source, kept, mix, ragged_arange
from firth.tokens.shards import Shards

TASKS = {"next": "Next-sentence prediction", "order": "Sentence-order prediction"}

# --- chunks -------------------------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """Sentences that lie one after the other, and which of them together fill a row.

    Sentence s is the tokens edges[s] up to edges[s + 1], document d the sentences doc_first[d] up to
    doc_first[d + 1], and chunk c the sentences chunk_first[c] up to chunk_first[c + 1], all of one document.
    """

    edges: np.ndarray  # (S + 1,) int64
    doc_first: np.ndarray  # (D + 1,) int64
    chunk_first: np.ndarray  # (C + 1,) int64
    usable: np.ndarray  # int64: the chunks of at least two sentences, which can be cut in two


def make_chunks(shards: Shards, room: int) -> Chunks:
    """Add sentences of a document to a chunk until it has `room` tokens, as BERT's published procedure does.

    The chunk that begins at a sentence ends at a known one; all documents follow these steps at the same time.
    """
    edges = shards.sentence_bounds()
    doc_first = np.searchsorted(edges, shards.offsets)
    full_S = np.searchsorted(edges, edges[:-1] + room)
    next_S = np.minimum(full_S, np.repeat(doc_first[1:], np.diff(doc_first)))
    is_begin, is_document = np.zeros(len(edges), dtype=bool), np.zeros(len(edges), dtype=bool)
    is_document[doc_first] = True
    is_begin[-1] = True
    at = doc_first[:-1]
    while len(at):
        is_begin[at] = True
        at = next_S[at]
        at = at[~is_document[at]]
    chunk_first = np.flatnonzero(is_begin)
    return Chunks(edges, doc_first, chunk_first, np.flatnonzero(np.diff(chunk_first) >= 2))


def cached_chunks(shards: Shards, room: int) -> Chunks:
    """The chunks of a part of shards, computed once and kept beside it."""
    key = hashlib.sha256(f"1 {shards.fingerprint}".encode()).hexdigest()[:12]
    return kept(shards, f"chunks-{room}-{key}", Chunks, lambda: make_chunks(shards, room))


# --- truncation ---------------------------------------------------------------------------------------------------


def surplus(length_B2: np.ndarray, room: int) -> np.ndarray:
    """How many tokens each of two texts loses so that both fit: one at a time, from the longer, of equals the second.

    >>> surplus(np.array([[9, 4], [5, 5], [3, 4]]), 8)
    array([[5, 0],
           [1, 1],
           [0, 0]])
    """
    a_B, b_B = length_B2.T
    over_B = np.maximum(a_B + b_B - room, 0)
    alone_B = np.minimum(over_B, np.abs(a_B - b_B))  # until both are equal
    shared_B = over_B - alone_B
    lost_a = np.where(a_B > b_B, alone_B, 0) + shared_B // 2
    return np.stack([lost_a, over_B - lost_a], axis=1)


def heads(key: np.ndarray, tosses: np.ndarray) -> np.ndarray:
    """How many of so many tosses of a fair coin are heads; each key has its own coin."""
    words = -(-tosses // 64)
    which = np.repeat(np.arange(len(tosses)), words)
    number = ragged_arange(words)
    unused = np.maximum(64 * (number + 1) - tosses[which], 0).astype(np.uint64)
    count = np.bitwise_count(mix(key[which], number) >> unused)
    return np.bincount(which, weights=count, minlength=len(tosses)).astype(np.int64)


# --- pairs --------------------------------------------------------------------------------------------------------


class PairSource(Source):
    """Rows of two texts A and B: `frame.before` A `frame.between` B `frame.after`. What is too long is cut.

    - "next" (BERT, section 3.1): the two parts of a chunk, cut at a random end of a sentence; in half of the rows B
      comes from a random sentence of another document instead.
    - "order" (ALBERT, section 3.1): the two parts of a chunk, in half of the rows the second one first.
    - "sides": the two sides of a document; positions start again with B, as in XLM.

    `pair` is 0 for the true pair and 1 for the other. All choices depend on the seed and the index alone.
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        frame: Frame,
        pad: int,
        seed: int,
        kind: str,
        shuffle: bool = True,
        allow_short: bool = False,
        bits: tuple[str, ...] = (),
    ) -> None:
        assert kind in (*TASKS, "sides"), kind
        around = frame.size + len(frame.between)
        if length < around + 2:
            raise UserError(f"A row of {length} tokens has no room for two texts. Choose a longer --max-seq-length.")
        super().__init__(shards, length, frame, pad, seed, shuffle, allow_short, bits)
        self.kind, self.room = kind, length - around
        text = self._find_sides() if kind == "sides" else self._find_chunks()
        self.num_rows = len(text)
        self.tokens_used = float((np.minimum(text, self.room) + around).mean() / length)  # as true pairs fill them

    def _find_sides(self) -> np.ndarray:
        """Find the documents that have two sides; the length of each."""
        splits = self.shards.splits
        if splits is None or not (splits >= 0).any():
            raise UserError(
                f"{part(self.shards)} has {count(self.shards.num_documents, 'document')}, none with two sides. Give "
                "the sides in the columns text_a and text_b of .jsonl; --columns text_a=NAME,text_b=NAME renames them."
            )
        self.two_sided = np.flatnonzero(splits >= 0)
        return np.diff(self.shards.offsets)[self.two_sided]

    def _find_chunks(self) -> np.ndarray:
        """Find the chunks that can be cut in two; the length of each."""
        self.chunks = cached_chunks(self.shards, self.room)
        text = np.diff(self.chunks.edges[self.chunks.chunk_first])
        usable = text[self.chunks.usable]
        self._check_chunks()
        if len(usable) < len(text):
            share = 100 * (1 - usable.sum() / self.shards.num_tokens)
            single = count(len(text) - len(usable), "chunk is", "chunks are")
            say(
                f"{part(self.shards)}: {single} a single sentence (of {len(text):,}), which cannot be cut in two, so "
                f"{share:.1f}% of the text begins no pair."
            )
        return usable

    def _check_chunks(self) -> None:
        where, task, documents = part(self.shards), TASKS[self.kind], self.shards.num_documents
        if self.kind == "next" and documents == 1:
            raise UserError(
                f"{where} is a single document, and {task.lower()} takes its false pairs from other documents. "
                "Give more documents (--documents blank-line splits a file), or take another objective: sop, mlm."
            )
        if not (np.diff(self.chunks.doc_first) > 1).any():
            raise UserError(
                f"{where} has {count(documents, 'document')}, none with two sentences. {task} needs running text: "
                "give documents of several sentences, or take plain mlm."
            )
        if not len(self.chunks.usable):
            raise UserError(
                f"{where} has no two sentences that fit into {self.room} tokens. Choose a longer --max-seq-length."
            )

    def _build(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Choose the two texts of each row, cut them to fit, and lay them end to end."""
        choose = {"next": self._next, "order": self._order, "sides": self._sides}[self.kind]
        start_B2, length_B2, pair_B = choose(row_B, index_B)
        lost_B2 = surplus(length_B2, self.room)
        if self.kind != "sides":
            for text in (0, 1):
                key_B = self._random(f"front {text}", index_B)
                start_B2[:, text] += heads(key_B, lost_B2[:, text])
        return self._lay(start_B2, length_B2 - lost_B2, pair_B, index_B)

    def _next(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start_B2, length_B2 = self._cut(row_B, index_B)
        other_B, other_length_B = self._elsewhere(start_B2[:, 0], self.room - length_B2[:, 0], index_B)
        pair_B = self._below("pair", index_B, 2)
        start_B2[:, 1] = np.where(pair_B, other_B, start_B2[:, 1])
        length_B2[:, 1] = np.where(pair_B, other_length_B, length_B2[:, 1])
        return start_B2, length_B2, pair_B

    def _order(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start_B2, length_B2 = self._cut(row_B, index_B)
        pair_B = self._below("pair", index_B, 2)
        swap_B = pair_B[:, None] == 1
        return np.where(swap_B, start_B2[:, ::-1], start_B2), np.where(swap_B, length_B2[:, ::-1], length_B2), pair_B

    def _sides(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        assert self.shards.splits is not None, "documents with two sides were found"
        document_B = self.two_sided[row_B]
        begin_B, end_B = self.shards.offsets[document_B], self.shards.offsets[document_B + 1]
        middle_B = begin_B + self.shards.splits[document_B]
        return np.stack([begin_B, middle_B], 1), np.stack([middle_B - begin_B, end_B - middle_B], 1), None

    def _cut(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of the two parts of a chunk, cut at a random one of its inner sentence ends."""
        chunk_B = self.chunks.usable[row_B]
        first_B, last_B = self.chunks.chunk_first[chunk_B], self.chunks.chunk_first[chunk_B + 1]
        cut_B = first_B + 1 + self._below("cut", index_B, last_B - first_B - 1)
        edges_B3 = self.chunks.edges[np.stack([first_B, cut_B, last_B], 1)]
        return edges_B3[:, :2].copy(), np.diff(edges_B3)

    def _elsewhere(
        self, start_B: np.ndarray, wanted_B: np.ndarray, index_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of whole sentences from elsewhere, until they have the wanted length or their document ends.

        The first of them is drawn from all sentences but those of the document in which `start_B` lies.
        """
        edges, doc_first = self.chunks.edges, self.chunks.doc_first
        document_B = np.searchsorted(self.shards.offsets, start_B, side="right") - 1
        own_B, own_size_B = doc_first[document_B], doc_first[document_B + 1] - doc_first[document_B]
        sentence_B = self._below("elsewhere", index_B, len(edges) - 1 - own_size_B)
        sentence_B += own_size_B * (sentence_B >= own_B)
        last_B = doc_first[np.searchsorted(doc_first, sentence_B, side="right")]
        begin_B = edges[sentence_B]
        end_B = edges[np.minimum(np.searchsorted(edges, begin_B + wanted_B), last_B)]
        return begin_B, end_B - begin_B

    def _random(self, purpose: str, index_B: np.ndarray) -> np.ndarray:
        """64 random bits for each row, others for every purpose."""
        return mix(self.seed, zlib.crc32(f"pairs: {purpose}".encode()), index_B)

    def _below(self, purpose: str, index_B: np.ndarray, below: int | np.ndarray) -> np.ndarray:
        """A random whole number from 0 to `below` - 1 for each row."""
        return (self._random(purpose, index_B) % np.asarray(below, dtype=np.uint64)).astype(np.int64)

    def _lay(self, start_B2: np.ndarray, length_B2: np.ndarray, pair_B: np.ndarray | None, index_B: np.ndarray) -> Rows:
        frame, size = self.frame, len(index_B)
        before_P, after_P = (
            np.tile(counts, size) for counts in ((len(frame.before), 0), (len(frame.between), len(frame.after)))
        )
        line = Line(self.shards, start_B2.ravel(), length_B2.ravel(), before_P, after_P)
        line.put(line.begin_P[::2], frame.before)
        line.put(line.last_P[::2] + 1, frame.between)
        line.put(line.last_P[1::2] + 1, frame.after)
        restart_P = line.begin_P if self.kind == "sides" else np.repeat(line.begin_P[::2], 2)
        fold = line.fold(np.full(size, 2), self.length)
        return Rows(
            tokens=fold(line.tokens_N, self.pad, np.int64),
            doc=fold(np.zeros_like(line.place_N), -1, np.int32),
            position=fold(line.place_N - line.spread(restart_P), 0, np.int32),
            real=fold(line.real_N, False, bool),
            index=index_B,
            segment=fold(line.spread(np.tile([0, 1], size)), 0, np.int32),
            pair=pair_B,
            **{name: fold(line.bit(name), False, bool) for name in self.bits},
        )


def part(shards: Shards) -> str:
    """What a part of shards is called in a sentence."""
    return "The held-out part of the text" if shards.folder.name == "held_out" else "The text"
