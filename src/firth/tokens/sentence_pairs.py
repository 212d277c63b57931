"""Rows of two texts A and B, for next-sentence and sentence-order prediction and for translation pairs.

Next-sentence prediction (Devlin et al. 2019, section 3.1 and appendix A.2) fills a row as BERT's published code does:

1. Sentences of a document are added to a chunk until it fills a row.
2. A chunk is cut at a random sentence end. A is the first part.
3. In half of the rows B is the second part (label 0). In the other half B starts at a random sentence of another
   document (label 1).
4. A pair that is too long loses one token at a time from the longer text, at its front or its end with equal chance.

Sentence-order prediction (Lan et al. 2020, section 3.1) swaps A and B instead of drawing B elsewhere, so that the topic
alone does not give the answer away.

BERT's code writes the pairs to disk once; here every choice is a hash of (seed, row index, purpose), so pairs differ in
each epoch and need no storage. Step 4 tosses its coins 64 at a time: the heads among n coins are the set bits of n
random bits.
"""

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
    """Consecutive sentences, in chunks that fill a row.

    Item i of each level runs from element i up to element i + 1. A chunk lies in one document.
    """

    sentence_bounds: np.ndarray  # (S + 1,) int64, tokens
    document_first_sentence: np.ndarray  # (D + 1,) int64, sentences
    chunk_first_sentence: np.ndarray  # (C + 1,) int64, sentences
    splittable_chunks: np.ndarray  # int64, indices of the chunks of two sentences or more


def chunk_sentences(shards: Shards, max_text_tokens: int) -> SentenceChunks:
    """Add sentences of a document to a chunk until it has `max_text_tokens` tokens, as BERT's published code does.

    Where a chunk ends depends only on the sentence at which it starts, so all documents advance at the same time.
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
    """Return the chunks of a part of shards; compute them once and store them beside it."""
    key = hashlib.sha256(f"1 {shards.fingerprint}".encode()).hexdigest()[:12]
    return load_or_compute_arrays(
        shards, f"chunks-{max_text_tokens}-{key}", SentenceChunks, lambda: chunk_sentences(shards, max_text_tokens)
    )


# --- truncation ---------------------------------------------------------------------------------------------------


def tokens_to_truncate(length_B2: np.ndarray, max_text_tokens: int) -> np.ndarray:
    """Number of tokens (B, 2) that each text loses so that both fit: one at a time from the longer, else the second.

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
    """Number of heads (B,) among `num_tosses` (B,) tosses of a fair coin, from the key (B,) of each row."""
    num_words = -(-num_tosses // 64)
    row_W = np.repeat(np.arange(len(num_tosses)), num_words)
    word_W = ragged_arange(num_words)
    unused_bits = np.maximum(64 * (word_W + 1) - num_tosses[row_W], 0).astype(np.uint64)
    heads_W = np.bitwise_count(hash_uint64(keys[row_W], word_W) >> unused_bits)
    return np.bincount(row_W, weights=heads_W, minlength=len(num_tosses)).astype(np.int64)


# --- pairs --------------------------------------------------------------------------------------------------------


class SentencePairDataset(RowDataset):
    """Rows of two texts A and B in the pair form of the template, truncated to fit.

    - `pair_task="next"`: the two parts of a chunk; in half of the rows B comes from another document instead.
    - "order": the two parts of a chunk; in half of the rows the second one comes first.
    - "sides": the two sides of a document, as a sentence and its translation. Positions restart with B, as in XLM.

    `Rows.pair_labels` is 0 for the true pair and 1 for the other.
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
        template_size = template.num_special_tokens(2)
        if row_length < template_size + 2:
            raise UserError(
                f"A row of {row_length} tokens has no room for two texts. Choose a longer --max-seq-length."
            )
        super().__init__(shards, row_length, template, pad_id, seed, shuffle, allow_short, token_bits)
        self.pair_task, self.max_text_tokens = pair_task, row_length - template_size
        lengths = self._two_sided_lengths() if pair_task == "sides" else self._chunk_lengths()
        self.num_rows = len(lengths)
        text_tokens = np.minimum(lengths, self.max_text_tokens)  # of true pairs; others differ
        self.fill_ratio = float((text_tokens + template_size).mean() / row_length)

    def _two_sided_lengths(self) -> np.ndarray:
        """Set `two_sided_documents`; return their lengths in tokens."""
        splits = self.shards.first_side_lengths
        if splits is None or not (splits >= 0).any():
            raise UserError(
                f"{describe_part(self.shards)} has {format_count(self.shards.num_documents, 'document')}, none with "
                "two sides. Give the sides in the columns text_a and text_b of .jsonl; --columns "
                "text_a=NAME,text_b=NAME renames them."
            )
        self.two_sided_documents = np.flatnonzero(splits >= 0)
        return np.diff(self.shards.offsets)[self.two_sided_documents]

    def _chunk_lengths(self) -> np.ndarray:
        """Set `chunks`; return the lengths in tokens of those that can be cut in two."""
        self.chunks = cached_sentence_chunks(self.shards, self.max_text_tokens)
        lengths = np.diff(self.chunks.sentence_bounds[self.chunks.chunk_first_sentence])
        usable = lengths[self.chunks.splittable_chunks]
        self._check_chunks()
        if len(usable) < len(lengths):
            share = 100 * (1 - usable.sum() / self.shards.num_tokens)
            single = format_count(len(lengths) - len(usable), "chunk is", "chunks are")
            say(
                f"{describe_part(self.shards)}: {single} a single sentence (of {len(lengths):,}), which cannot be cut "
                f"in two, so {share:.1f}% of the text begins no pair."
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
                f"{where} has {format_count(documents, 'document')}, none with two sentences. {task} needs running "
                "text: give documents of several sentences, or take plain mlm."
            )
        if not len(self.chunks.splittable_chunks):
            raise UserError(
                f"{where} has no two sentences that fit into {self.max_text_tokens} tokens. "
                "Choose a longer --max-seq-length."
            )

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Choose the two texts of each row, truncate them, and lay them end to end."""
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
        """Return start and length (B, 2) of the two parts of each chunk, cut at a random inner sentence end."""
        chunk_B = self.chunks.splittable_chunks[row_B]
        first_B, last_B = self.chunks.chunk_first_sentence[chunk_B], self.chunks.chunk_first_sentence[chunk_B + 1]
        cut_B = first_B + 1 + self._random_below("cut", index_B, last_B - first_B - 1)
        edges_B3 = self.chunks.sentence_bounds[np.stack([first_B, cut_B, last_B], 1)]
        return edges_B3[:, :2].copy(), np.diff(edges_B3)

    def _draw_other_sentences(
        self, start_B: np.ndarray, max_length_B: np.ndarray, index_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return start and length (B,) of sentences of another document, up to `max_length_B` or the document's end.

        The first sentence is drawn from all sentences outside of the document that holds token `start_B`.
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
        """Return 64 random bits for each row, independent for every purpose."""
        return hash_uint64(self.seed, zlib.crc32(f"pairs: {purpose}".encode()), index_B)

    def _random_below(self, purpose: str, index_B: np.ndarray, below: int | np.ndarray) -> np.ndarray:
        """Return a random integer in [0, below) for each row."""
        return (self._random_bits(purpose, index_B) % np.asarray(below, dtype=np.uint64)).astype(np.int64)

    def _assemble_rows(
        self, start_B2: np.ndarray, length_B2: np.ndarray, pair_label_B: np.ndarray | None, index_B: np.ndarray
    ) -> Rows:
        template, size = self.template, len(index_B)
        before_P = np.tile([len(template.prefix_ids), 0], size)
        after_P = np.tile([len(template.separator_ids), len(template.suffix_ids)], size)
        layout = PieceLayout(self.shards, start_B2.ravel(), length_B2.ravel(), before_P, after_P)
        layout.write_special_tokens(layout.begin_P[::2], template.prefix_ids)
        layout.write_special_tokens(layout.text_last_P[::2] + 1, template.separator_ids)
        layout.write_special_tokens(layout.text_last_P[1::2] + 1, template.suffix_ids)
        position_0_P = layout.begin_P if self.pair_task == "sides" else np.repeat(layout.begin_P[::2], 2)
        fold = layout.make_fold_fn(np.full(size, 2), self.row_length)
        return Rows(
            input_ids=fold(layout.input_ids_N, self.pad_id, np.int64),
            document_ids=fold(np.zeros_like(layout.position_N), -1, np.int32),
            position_ids=fold(layout.position_N - layout.expand_pieces(position_0_P), 0, np.int32),
            maskable=fold(layout.maskable_N, False, bool),
            stream_index=index_B,
            token_type_ids=fold(layout.expand_pieces(np.tile([0, 1], size)), 0, np.int32),
            pair_labels=pair_label_B,
            **{name: fold(layout.gather_bit(name), False, bool) for name in self.token_bits},
        )


def describe_part(shards: Shards) -> str:
    """Name of a part of shards in a message."""
    return "The held-out part of the text" if shards.folder.name == "held_out" else "The text"
