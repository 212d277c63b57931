"""Rows of two texts: one that follows the other or does not, or the two sides of a document."""

# Shapes: D documents, S sentences, C chunks, B rows of a batch, 2 the first and the second text, P = 2B pieces.

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import numpy as np

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.tokens.dataset import PieceLayout, RowDataset, Rows
from firth.tokens.packing import ragged_arange
from firth.tokens.shards import Shards, load_or_compute_arrays
from firth.tokens.template import SequenceTemplate

PAIR_TASKS = {"next": "Next-sentence prediction", "order": "Sentence-order prediction"}

# --- chunks -------------------------------------------------------------------------------------------------------


class SentenceChunks(NamedTuple):
    """Sentences that lie one after the other, and which of them together fill a row.

    Sentence s is the tokens edges[s] up to edges[s + 1], document d the sentences doc_first[d] up to
    doc_first[d + 1], and chunk c the sentences chunk_first[c] up to chunk_first[c + 1], all of one document.
    """

    sentence_bounds: np.ndarray  # (S + 1,) int64
    document_first_sentence: np.ndarray  # (D + 1,) int64
    chunk_first_sentence: np.ndarray  # (C + 1,) int64
    splittable_chunks: np.ndarray  # int64: the chunks of at least two sentences, which can be cut in two


def chunk_sentences(shards: Shards, max_text_tokens: int) -> SentenceChunks:
    """Add sentences of a document to a chunk until it has `max_text_tokens` tokens, as BERT's published procedure does.

    The chunk that begins at a sentence ends at a known one; all documents follow these steps at the same time.
    """
    edges = shards.sentence_bounds()
    doc_first = np.searchsorted(edges, shards.offsets)
    full_S = np.searchsorted(edges, edges[:-1] + max_text_tokens)
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
    return SentenceChunks(edges, doc_first, chunk_first, np.flatnonzero(np.diff(chunk_first) >= 2))


def cached_sentence_chunks(shards: Shards, max_text_tokens: int) -> SentenceChunks:
    """The chunks of a part of shards, computed once and kept beside it."""
    key = hashlib.sha256(f"1 {shards.fingerprint}".encode()).hexdigest()[:12]
    return load_or_compute_arrays(
        shards, f"chunks-{max_text_tokens}-{key}", SentenceChunks, lambda: chunk_sentences(shards, max_text_tokens)
    )


# --- truncation ---------------------------------------------------------------------------------------------------


def tokens_to_truncate(length_B2: np.ndarray, max_text_tokens: int) -> np.ndarray:
    """How many tokens each of two texts loses so that both fit: one at a time, from the longer, of equals the second.

    >>> tokens_to_truncate(np.array([[9, 4], [5, 5], [3, 4]]), 8)
    array([[5, 0],
           [1, 1],
           [0, 0]])
    """
    a_B, b_B = length_B2.T
    over_B = np.maximum(a_B + b_B - max_text_tokens, 0)
    alone_B = np.minimum(over_B, np.abs(a_B - b_B))  # until both are equal
    shared_B = over_B - alone_B
    lost_a = np.where(a_B > b_B, alone_B, 0) + shared_B // 2
    return np.stack([lost_a, over_B - lost_a], axis=1)


def count_coin_heads(keys: np.ndarray, num_tosses: np.ndarray) -> np.ndarray:
    """How many of so many tosses of a fair coin are heads; each key has its own coin."""
    words = -(-num_tosses // 64)
    which = np.repeat(np.arange(len(num_tosses)), words)
    number = ragged_arange(words)
    unused = np.maximum(64 * (number + 1) - num_tosses[which], 0).astype(np.uint64)
    count = np.bitwise_count(hash_uint64(keys[which], number) >> unused)
    return np.bincount(which, weights=count, minlength=len(num_tosses)).astype(np.int64)


# --- pairs --------------------------------------------------------------------------------------------------------


class SentencePairDataset(RowDataset):
    """Rows of two texts A and B: `template.prefix_ids` A `template.separator_ids` B `template.suffix_ids`. What is too long is cut.

    - "next" (BERT, section 3.1): the two parts of a chunk, cut at a random end of a sentence; in half of the rows B
      comes from a random sentence of another document instead.
    - "order" (ALBERT, section 3.1): the two parts of a chunk, in half of the rows the second one first.
    - "sides": the two sides of a document; positions start again with B, as in XLM.

    `pair` is 0 for the true pair and 1 for the other. All choices depend on the seed and the index alone.
    """

    def __init__(
        self,
        shards: Shards,
        row_length: int,
        template: SequenceTemplate,
        pad_id: int,
        seed: int,
        pair_task: str,
        shuffle: bool = True,
        allow_short: bool = False,
        token_bits: tuple[str, ...] = (),
    ) -> None:
        assert pair_task in (*PAIR_TASKS, "sides"), pair_task
        around = template.num_special_tokens(2)
        if row_length < around + 2:
            raise UserError(
                f"A row of {row_length} tokens has no room for two texts. Choose a longer --max-seq-length."
            )
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.pair_task, self.max_text_tokens = pair_task, row_length - around
        text = self._two_sided_lengths() if pair_task == "sides" else self._chunk_lengths()
        self.num_rows = len(text)
        self.fill_ratio = float(
            (np.minimum(text, self.max_text_tokens) + around).mean() / row_length
        )  # as true pairs fill them

    def _two_sided_lengths(self) -> np.ndarray:
        """Find the documents that have two sides; the length of each."""
        splits = self.shards.first_side_lengths
        if splits is None or not (splits >= 0).any():
            raise UserError(
                f"{describe_part(self.shards)} has {format_count(self.shards.num_documents, 'document')}, none with two sides. Give "
                "the sides in the columns text_a and text_b of .jsonl; --columns text_a=NAME,text_b=NAME renames them."
            )
        self.two_sided_documents = np.flatnonzero(splits >= 0)
        return np.diff(self.shards.offsets)[self.two_sided_documents]

    def _chunk_lengths(self) -> np.ndarray:
        """Find the chunks that can be cut in two; the length of each."""
        self.chunks = cached_sentence_chunks(self.shards, self.max_text_tokens)
        text = np.diff(self.chunks.sentence_bounds[self.chunks.chunk_first_sentence])
        usable = text[self.chunks.splittable_chunks]
        self._check_chunks()
        if len(usable) < len(text):
            share = 100 * (1 - usable.sum() / self.shards.num_tokens)
            single = format_count(len(text) - len(usable), "chunk is", "chunks are")
            say(
                f"{describe_part(self.shards)}: {single} a single sentence (of {len(text):,}), which cannot be cut in two, so "
                f"{share:.1f}% of the text begins no pair."
            )
        return usable

    def _check_chunks(self) -> None:
        where, task, documents = describe_part(self.shards), PAIR_TASKS[self.pair_task], self.shards.num_documents
        if self.pair_task == "next" and documents == 1:
            raise UserError(
                f"{where} is a single document, and {task.lower()} takes its false pairs from other documents. "
                "Give more documents (--documents blank-line splits a file), or take another objective: sop, mlm."
            )
        if not (np.diff(self.chunks.document_first_sentence) > 1).any():
            raise UserError(
                f"{where} has {format_count(documents, 'document')}, none with two sentences. {task} needs running text: "
                "give documents of several sentences, or take plain mlm."
            )
        if not len(self.chunks.splittable_chunks):
            raise UserError(
                f"{where} has no two sentences that fit into {self.max_text_tokens} tokens. Choose a longer --max-seq-length."
            )

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Choose the two texts of each row, cut them to fit, and lay them end to end."""
        choose = {
            "next": self._next_sentence_pairs,
            "order": self._sentence_order_pairs,
            "sides": self._document_side_pairs,
        }[self.pair_task]
        start_B2, length_B2, pair_B = choose(row_B, index_B)
        lost_B2 = tokens_to_truncate(length_B2, self.max_text_tokens)
        if self.pair_task != "sides":
            for text in (0, 1):
                key_B = self._random_bits(f"front {text}", index_B)
                start_B2[:, text] += count_coin_heads(key_B, lost_B2[:, text])
        return self._assemble_rows(start_B2, length_B2 - lost_B2, pair_B, index_B)

    def _next_sentence_pairs(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start_B2, length_B2 = self._split_chunks(row_B, index_B)
        other_B, other_length_B = self._draw_other_sentences(
            start_B2[:, 0], self.max_text_tokens - length_B2[:, 0], index_B
        )
        pair_B = self._random_below("pair", index_B, 2)
        start_B2[:, 1] = np.where(pair_B, other_B, start_B2[:, 1])
        length_B2[:, 1] = np.where(pair_B, other_length_B, length_B2[:, 1])
        return start_B2, length_B2, pair_B

    def _sentence_order_pairs(
        self, row_B: np.ndarray, index_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        start_B2, length_B2 = self._split_chunks(row_B, index_B)
        pair_B = self._random_below("pair", index_B, 2)
        swap_B = pair_B[:, None] == 1
        return np.where(swap_B, start_B2[:, ::-1], start_B2), np.where(swap_B, length_B2[:, ::-1], length_B2), pair_B

    def _document_side_pairs(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
        assert self.shards.first_side_lengths is not None, "documents with two sides were found"
        document_B = self.two_sided_documents[row_B]
        begin_B, end_B = self.shards.offsets[document_B], self.shards.offsets[document_B + 1]
        middle_B = begin_B + self.shards.first_side_lengths[document_B]
        return np.stack([begin_B, middle_B], 1), np.stack([middle_B - begin_B, end_B - middle_B], 1), None

    def _split_chunks(self, row_B: np.ndarray, index_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of the two parts of a chunk, cut at a random one of its inner sentence ends."""
        chunk_B = self.chunks.splittable_chunks[row_B]
        first_B, last_B = self.chunks.chunk_first_sentence[chunk_B], self.chunks.chunk_first_sentence[chunk_B + 1]
        cut_B = first_B + 1 + self._random_below("cut", index_B, last_B - first_B - 1)
        edges_B3 = self.chunks.sentence_bounds[np.stack([first_B, cut_B, last_B], 1)]
        return edges_B3[:, :2].copy(), np.diff(edges_B3)

    def _draw_other_sentences(
        self, start_B: np.ndarray, max_length_B: np.ndarray, index_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Start and length of whole sentences from elsewhere, until they have the wanted length or their document ends.

        The first of them is drawn from all sentences but those of the document in which `start_B` lies.
        """
        edges, doc_first = self.chunks.sentence_bounds, self.chunks.document_first_sentence
        document_B = np.searchsorted(self.shards.offsets, start_B, side="right") - 1
        own_B, own_size_B = doc_first[document_B], doc_first[document_B + 1] - doc_first[document_B]
        sentence_B = self._random_below("elsewhere", index_B, len(edges) - 1 - own_size_B)
        sentence_B += own_size_B * (sentence_B >= own_B)
        last_B = doc_first[np.searchsorted(doc_first, sentence_B, side="right")]
        begin_B = edges[sentence_B]
        end_B = edges[np.minimum(np.searchsorted(edges, begin_B + max_length_B), last_B)]
        return begin_B, end_B - begin_B

    def _random_bits(self, purpose: str, index_B: np.ndarray) -> np.ndarray:
        """64 random bits for each row, others for every purpose."""
        return hash_uint64(self.seed, zlib.crc32(f"pairs: {purpose}".encode()), index_B)

    def _random_below(self, purpose: str, index_B: np.ndarray, below: int | np.ndarray) -> np.ndarray:
        """A random whole number from 0 to `below` - 1 for each row."""
        return (self._random_bits(purpose, index_B) % np.asarray(below, dtype=np.uint64)).astype(np.int64)

    def _assemble_rows(
        self, start_B2: np.ndarray, length_B2: np.ndarray, pair_label_B: np.ndarray | None, index_B: np.ndarray
    ) -> Rows:
        frame, size = self.template, len(index_B)
        before_P, after_P = (
            np.tile(counts, size)
            for counts in ((len(frame.prefix_ids), 0), (len(frame.separator_ids), len(frame.suffix_ids)))
        )
        line = PieceLayout(self.shards, start_B2.ravel(), length_B2.ravel(), before_P, after_P)
        line.write_special_tokens(line.begin_P[::2], frame.prefix_ids)
        line.write_special_tokens(line.text_last_P[::2] + 1, frame.separator_ids)
        line.write_special_tokens(line.text_last_P[1::2] + 1, frame.suffix_ids)
        restart_P = line.begin_P if self.pair_task == "sides" else np.repeat(line.begin_P[::2], 2)
        fold = line.make_fold_fn(np.full(size, 2), self.row_length)
        return Rows(
            input_ids=fold(line.input_ids_N, self.pad_id, np.int64),
            document_ids=fold(np.zeros_like(line.position_N), -1, np.int32),
            position_ids=fold(line.position_N - line.expand_pieces(restart_P), 0, np.int32),
            maskable=fold(line.maskable_N, False, bool),
            stream_index=index_B,
            token_type_ids=fold(line.expand_pieces(np.tile([0, 1], size)), 0, np.int32),
            pair_labels=pair_label_B,
            **{name: fold(line.gather_bit(name), False, bool) for name in self.token_bits},
        )


def describe_part(shards: Shards) -> str:
    """What a part of shards is called in a sentence."""
    return "The held-out part of the text" if shards.folder.name == "held_out" else "The text"
