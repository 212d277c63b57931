"""Rows of two segments A and B in the form of XLNet's pretraining: A [SEP] B [SEP] [CLS].

XLNet (Yang et al. 2019, section 2.5) reads two segments, as BERT does, and has no next-sentence prediction: no label
tells whether B follows A. The segments train the relative segment encodings, and rows have the form in which
fine-tuning reads a text or a pair. As in the published program (`data_utils.py`), a text is cut so:

1. As much text as fits is cut at a random sentence end. A is the first part.
2. In half of the pairs B is the second part, in the other half text of the same length from a random sentence on,
   anywhere in the corpus.

Text without a sentence end inside stays one segment here, A [SEP] [CLS]; the published program shortens it and always
adds a B from elsewhere.

`SegmentPairDataset` does this with each piece of a packed row. `SegmentStreamDataset` is for Transformer-XL's memory.
There the published program makes rows of two halves. The first half continues the text of the row before, and only its
hidden states enter the memory (`reuse_len`). The pair fills the second half; A begins where the first half ends. The
next step moves on by half a row, so that it reads the text of A again, as its first half, and never finds a B from
elsewhere in its memory.

Every choice is a hash of (seed, row, piece), so pairs differ in each epoch and nothing is stored.
"""

# Shapes: P pieces, Q segments, B rows of a batch, T positions of a row, J positions of its second half.

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

import numpy as np

from firth.core.errors import UserError
from firth.core.hashing import hash_uint64
from firth.tokens.dataset import PackedDataset, PieceLayout, Rows
from firth.tokens.shards import Shards, load_or_compute_arrays
from firth.tokens.stream import StreamDataset
from firth.tokens.template import SequenceTemplate


class SentenceBounds(NamedTuple):
    bounds: np.ndarray  # (S + 1,) int64: sentence i reaches from token bounds[i] up to bounds[i + 1]


class SegmentCuts(NamedTuple):
    """How texts are cut into A and B; each field has one element per text."""

    a_length: np.ndarray  # tokens of A; all of the text where there is no B
    is_pair: np.ndarray
    b_start: np.ndarray  # index of B's first token in the shards, where B is from elsewhere; else -1


class SegmentCutter:
    """Draws the cuts of texts, from the sentence bounds of a part of shards."""

    def __init__(self, shards: Shards, seed: int) -> None:
        key = hashlib.sha256(f"1 {shards.fingerprint}".encode()).hexdigest()[:12]
        self.bounds = load_or_compute_arrays(
            shards, f"sentences-{key}", SentenceBounds, lambda: SentenceBounds(shards.sentence_bounds())
        ).bounds
        self.num_tokens, self.seed = shards.num_tokens, seed

    def count_cuts(self, start_P: np.ndarray, length_P: np.ndarray) -> np.ndarray:
        """Return the number of sentence ends inside each text of the shards, (P,)."""
        first_P = np.searchsorted(self.bounds, start_P, side="right")
        return np.maximum(np.searchsorted(self.bounds, start_P + length_P, side="left") - first_P, 0)

    def cut_pieces(self, start_P: np.ndarray, length_P: np.ndarray, *key: np.ndarray) -> SegmentCuts:
        """Cut texts of the shards, each with its own random numbers by `key`."""
        count_P = self.count_cuts(start_P, length_P)
        cut_P = np.searchsorted(self.bounds, start_P, side="right") + self.draw_below("cut", count_P, *key)
        a_P = np.where(count_P > 0, self.bounds[np.minimum(cut_P, len(self.bounds) - 1)] - start_P, length_P)
        return self.finish_cuts(a_P, length_P, *key)

    def finish_cuts(self, a_P: np.ndarray, length_P: np.ndarray, *key: np.ndarray) -> SegmentCuts:
        """Decide where B comes from, for texts whose first `a_P` tokens are A."""
        is_pair_P = a_P < length_P
        # A sentence that starts too late in the corpus has not enough text after it.
        num_starts_P = np.searchsorted(self.bounds, self.num_tokens - (length_P - a_P), side="right")
        other_P = self.bounds[self.draw_below("elsewhere", num_starts_P, *key)]
        is_other_P = is_pair_P & (self.draw_below("pair", np.full_like(a_P, 2), *key) == 1)
        return SegmentCuts(a_P, is_pair_P, np.where(is_other_P, other_P, -1))

    def draw_below(self, purpose: str, below_P: np.ndarray, *key: np.ndarray) -> np.ndarray:
        """Return a random integer in [0, below) for each text; 0 where `below` is 0."""
        bits_P = hash_uint64(self.seed, zlib.crc32(f"segments: {purpose}".encode()), *key)
        return (bits_P % np.maximum(below_P, 1).astype(np.uint64)).astype(np.int64)


class SegmentPairDataset(PackedDataset):
    """Packed rows (`PackedDataset`) whose pieces are cut into two segments; see the file's docstring."""

    texts_per_piece = 2

    def _num_special_tokens(self) -> int:
        self.cutter = SegmentCutter(self.shards, self.seed)
        num_pairs = int(np.count_nonzero(self.cutter.count_cuts(self.packing.piece_start, self.packing.piece_length)))
        num_pieces, template = len(self.packing.piece_start), self.template
        return num_pieces * template.num_special_tokens() + num_pairs * len(template.separator_ids)

    def _build_rows(self, row_B: np.ndarray, index_B: np.ndarray) -> Rows:
        """Lay A and B of all pieces end to end, then fold the result into rows."""
        template = self.template
        pieces_B, document_P, start_P, length_P = self.row_pieces(row_B)
        cuts = self.cutter.cut_pieces(start_P, length_P, np.repeat(index_B, pieces_B), document_P)
        b_start_P = np.where(cuts.b_start >= 0, cuts.b_start, start_P + cuts.a_length)
        is_pair_P, keep_P2 = cuts.is_pair, np.stack([np.ones_like(cuts.is_pair), cuts.is_pair], 1)

        def segments(a_P: np.ndarray, b_P: np.ndarray) -> np.ndarray:
            """Interleave the values of A and B; a piece without a B has one."""
            return np.stack(np.broadcast_arrays(a_P, b_P), 1)[keep_P2]

        is_b_Q, ends_Q = segments(np.zeros_like(is_pair_P), is_pair_P), segments(~is_pair_P, is_pair_P)
        layout = PieceLayout(
            self.shards,
            segments(start_P, b_start_P),
            segments(cuts.a_length, length_P - cuts.a_length),
            np.where(is_b_Q, 0, len(template.prefix_ids)),
            np.where(ends_Q, len(template.suffix_ids), len(template.separator_ids)),
        )
        layout.write_special_tokens(layout.begin_P[~is_b_Q], template.prefix_ids)
        layout.write_special_tokens(layout.text_last_P[~ends_Q] + 1, template.separator_ids)
        layout.write_special_tokens(layout.text_last_P[ends_Q] + 1, template.suffix_ids)
        token_types_N = layout.expand_pieces(is_b_Q.astype(np.int64))
        if template.last_token_type is not None:
            token_types_N[layout.end_P[ends_Q] - 1] = template.last_token_type
        position_0_Q = np.maximum.accumulate(np.where(is_b_Q, 0, layout.begin_P))
        row_P = np.repeat(np.arange(len(row_B)), pieces_B)
        segments_B = np.bincount(row_P, weights=1 + is_pair_P, minlength=len(row_B)).astype(np.int64)
        fold = layout.make_fold_fn(segments_B, self.row_length)
        return Rows(
            input_ids=fold(layout.input_ids_N, self.pad_id, np.int64),
            document_ids=fold(layout.expand_pieces(segments(document_P, document_P)), -1, np.int32),
            position_ids=fold(layout.position_N - layout.expand_pieces(position_0_Q), 0, np.int32),
            maskable=fold(layout.maskable_N, False, bool),
            stream_index=index_B,
            token_type_ids=fold(token_types_N, 0, np.int32) if template.has_token_types else None,
            **{name: fold(layout.gather_bit(name), False, bool) for name in self.token_bits},
        )


def reused_length(row_length: int) -> int:
    """Return how many positions of a row the next row continues, and its memory keeps: XLNet's `reuse_len`, a half."""
    return row_length // 2


class SegmentStreamDataset(StreamDataset):
    """Streams (`StreamDataset`) of rows with a pair in their second half; see the file's docstring.

    In the first half the token after a text ([SEP]) ends a document.
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
    ) -> None:
        self.pair_template, stride = template, reused_length(row_length)
        self.max_pair_tokens = row_length - stride - template.num_special_tokens(2)
        if self.max_pair_tokens < 2:
            raise UserError(
                f"Half a row of {row_length} tokens has no room for two texts. Choose a longer --max-seq-length."
            )
        ends = SequenceTemplate((), (template.eos_id,))
        super().__init__(shards, row_length, ends, pad_id, seed, num_streams, shuffle, allow_short, stride=stride)
        self.cutter = SegmentCutter(shards, seed)
        self.fill_ratio = 1.0

    def get_rows(self, indices: np.ndarray) -> Rows:
        """Return the rows at these indices of the stream of rows."""
        self.shards.check_not_cut()
        index_B = np.asarray(indices, dtype=np.int64)
        epoch_B, epoch_step_B, _, first_B = self._locate_rows(index_B)
        R, n = self.stride, self.max_pair_tokens
        position_BX = first_B[:, None] + np.arange(R + n)
        positions = self._locate_positions(epoch_B, position_BX, position_BX < self.total_tokens)
        ids_BX, maskable_BX = self._gather_input_ids(positions), positions.maskable
        n_B = positions.is_filled[:, R:].sum(1)
        cuts = self._cut_tails(self._gather_bit("sentence_end", positions)[:, R:], n_B, index_B)
        source_BJ, special_BJ, token_types_BJ = self._lay_out_tails(cuts, n_B)
        ids_BJ = np.where(source_BJ < 0, special_BJ, np.take_along_axis(ids_BX, R + np.maximum(source_BJ, 0), 1))
        is_text_BJ = source_BJ >= 0
        is_other_BJ = is_text_BJ & (source_BJ >= cuts.a_length[:, None]) & (cuts.b_start >= 0)[:, None]
        other_BJ = np.where(is_other_BJ, (cuts.b_start - cuts.a_length)[:, None] + source_BJ, 0)
        ids_BJ = np.where(is_other_BJ, np.asarray(self.shards.tokens)[other_BJ], ids_BJ)
        maskable_BJ = is_text_BJ & (is_other_BJ | np.take_along_axis(maskable_BX, R + np.maximum(source_BJ, 0), 1))
        is_filled_BT = np.concatenate([positions.is_filled[:, :R], is_text_BJ | (special_BJ >= 0)], 1)
        token_types_BT = np.pad(token_types_BJ, ((0, 0), (R, 0))).astype(np.int32)
        return Rows(
            input_ids=np.where(is_filled_BT, np.concatenate([ids_BX[:, :R], ids_BJ], 1), self.pad_id),
            document_ids=np.where(is_filled_BT, 0, -1).astype(np.int32),
            position_ids=np.where(is_filled_BT, np.arange(self.row_length), 0).astype(np.int32),
            maskable=np.concatenate([maskable_BX[:, :R], maskable_BJ], 1),
            stream_index=index_B,
            row_index=index_B % self.num_rows,
            epoch=epoch_B,
            token_type_ids=token_types_BT if self.pair_template.has_token_types else None,
            reset_state=epoch_step_B == 0,
        )

    def _cut_tails(self, sentence_end_BN: np.ndarray, n_B: np.ndarray, index_B: np.ndarray) -> SegmentCuts:
        """Cut the first `n_B` tokens after the first half at a random sentence end."""
        ends_BN = sentence_end_BN & (np.arange(sentence_end_BN.shape[1]) < n_B[:, None] - 1)
        count_B = ends_BN.sum(1)
        chosen_B = 1 + self.cutter.draw_below("cut", count_B, index_B)
        a_B = 1 + (np.cumsum(ends_BN, 1) == chosen_B[:, None]).argmax(1)
        return self.cutter.finish_cuts(np.where(count_B > 0, a_B, n_B), n_B, index_B)

    def _lay_out_tails(self, cuts: SegmentCuts, n_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for each position of the second half (B, J) its token of the text, its special token, its token type.

        The first two are -1 where there is none.
        """
        template, j_J = self.pair_template, np.arange(self.row_length - self.stride)
        a_end_B1 = len(template.prefix_ids) + cuts.a_length[:, None]
        b_first_B1 = a_end_B1 + len(template.separator_ids) * cuts.is_pair[:, None]
        b_end_B1 = b_first_B1 + (n_B - cuts.a_length)[:, None]
        is_a, is_b = (j_J >= len(template.prefix_ids)) & (j_J < a_end_B1), (j_J >= b_first_B1) & (j_J < b_end_B1)
        source_BJ = np.where(is_a, j_J - len(template.prefix_ids), -1)
        source_BJ = np.where(is_b, cuts.a_length[:, None] + j_J - b_first_B1, source_BJ)
        special_BJ = np.full(source_BJ.shape, -1)
        token_types_BJ = ((j_J >= b_first_B1) & cuts.is_pair[:, None]).astype(np.int64)
        has_text_B, parts = n_B > 0, (template.prefix_ids, template.separator_ids, template.suffix_ids)
        for ids, first, has_B in zip(
            parts, (0, a_end_B1, b_end_B1), (has_text_B, cuts.is_pair, has_text_B), strict=True
        ):
            for k, token in enumerate(ids):
                special_BJ[(j_J == first + k) & has_B[:, None]] = token
        if template.last_token_type is not None:
            token_types_BJ[j_J == b_end_B1 + len(template.suffix_ids) - 1] = template.last_token_type
        return source_BJ, special_BJ, token_types_BJ
