"""Texts and the answers to them in packed rows, for models that write; and how likely each answer is.

N texts, M answers, B rows, T places, U of a decoder, K asked places, A tokens of all answers, S states that foresee
them, P of these at once, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from firth.models import Model
from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks.packing import MIN_ROW_TOKENS, TextPacking, next_power_of_two, pack_texts
from firth.tokens import TokenIds
from firth.tokens.packing import ragged_arange
from firth.train import ComputeConfig

MAX_ANSWER_CHUNK_LOGITS = 2**24  # logits that are held at once: 64 MB of float32


class DecoderExample(NamedTuple):
    """A text as a decoder reads it, and the places at which it is asked for the next token."""

    ids: TokenIds
    target_positions: Sequence[int]


class PackedAnswers(NamedTuple):
    """A batch, and where the answers stand in its labels laid end to end: token by token, text after text."""

    batch: Batch
    label_slots: np.ndarray  # (A,)
    answer_lengths: np.ndarray  # (M,) how many tokens each answer has
    # Where texts have several answers:
    source_index: np.ndarray | None = None  # (B, U) which text a place of the decoder reads
    shared_prefix: np.ndarray | None = (
        None  # (A,) the first token of the same text after the same words: their states are one
    )

    def sum_by_answer(self, value_A: np.ndarray) -> np.ndarray:
        """(M,): the sum over each answer."""
        answer_A = np.repeat(np.arange(len(self.answer_lengths)), self.answer_lengths)
        return np.bincount(answer_A, weights=value_A, minlength=len(self.answer_lengths))


def pack_decoder_examples(examples: Sequence[DecoderExample], row_tokens: int, pad_id: int) -> PackedAnswers:
    """Texts for a decoder in rows of `row_tokens`."""
    packing = pack_texts([len(line.ids) for line in examples], row_tokens)
    doc_BT, position_BT = packing.document_ids_and_positions()
    tokens_BT = packing.scatter(np.concatenate([line.ids for line in examples]), pad_id)
    count_N = np.array([len(line.target_positions) for line in examples])
    width, slot_A = packing.allocate_slots(count_N)
    asked = [np.asarray(line.target_positions, np.int64) for line in examples]
    asked_BK = np.zeros((packing.num_rows, width), np.int64)
    asked_BK.reshape(-1)[slot_A] = np.concatenate(asked) + np.repeat(packing.start, count_N)
    labels_BK = np.full_like(asked_BK, IGNORE_INDEX)
    answers = [np.asarray(line.ids)[places + 1] for line, places in zip(examples, asked, strict=True)]
    labels_BK.reshape(-1)[slot_A] = np.concatenate(answers)
    return PackedAnswers(
        Batch(tokens_BT, document_ids=doc_BT, position_ids=position_BT, target_positions=asked_BK, labels=labels_BK),
        slot_A,
        count_N,
    )


def pack_seq2seq_examples(
    sources: Sequence[TokenIds],
    answers: Sequence[Sequence[TokenIds]],
    row_tokens: int,
    pad_id: int,
    decoder_start_id: int,
    reserved_tokens: Sequence[int] | None = None,
) -> PackedAnswers:
    """Texts for an encoder, and answers for its decoder: a text and its answer are the same document of the same row.

    Where a text has several answers each is a document of its own, and all of them read the text. Rows hold up to
    `row_tokens` on either side. `reserved_tokens` is what the answers may take, so that other answers to the same texts can stand in
    the same rows.
    """
    each = [ids for some in answers for ids in some]
    asked_M, count_N = np.array([len(ids) for ids in each]), np.array([len(some) for some in answers])
    most, which_A = count_N.max(), np.repeat(ragged_arange(count_N), asked_M)
    read_N, write_N = np.array([len(ids) for ids in sources]), np.array([sum(map(len, some)) for some in answers])
    shared = pack_texts(
        np.maximum(read_N, write_N if reserved_tokens is None else np.asarray(reserved_tokens)), row_tokens
    )
    read, write = pack_alongside(shared, read_N), pack_alongside(shared, write_N)
    doc_BT, position_BT = read.document_ids_and_positions()
    doc_BU, _ = write.document_ids_and_positions()
    last_B = np.bincount(shared.row_index, minlength=shared.num_rows) - 1
    # Padding comes last and a decoder does not look ahead: as a part of the last answer it has a text to read.
    text_BU = np.where(doc_BU < 0, last_B[:, None], doc_BU)
    batch = Batch(
        read.scatter(np.concatenate(sources), pad_id),
        document_ids=doc_BT,
        position_ids=position_BT,
        labels=write.scatter(np.concatenate(each), IGNORE_INDEX),
        decoder_input_ids=write.scatter(np.concatenate([[decoder_start_id, *ids[:-1]] for ids in each]), pad_id),
        decoder_document_ids=text_BU * most + write.scatter(which_A, most - 1),
        decoder_position_ids=write.scatter(ragged_arange(asked_M), 0),
    )
    if most == 1:
        return PackedAnswers(batch, write.flat_positions, asked_M)
    return PackedAnswers(batch, write.flat_positions, asked_M, text_BU, index_shared_prefixes(answers))


def index_shared_prefixes(answers: Sequence[Sequence[TokenIds]]) -> np.ndarray:
    """(A,) for each token of all answers the first one of the same text that comes after the same words.

    >>> index_shared_prefixes([[[1, 2], [1, 3]], [[1, 2]]]).tolist()
    [0, 1, 0, 1, 4, 5]
    """
    found: list[int] = []
    for some in answers:
        first: dict[tuple[int, ...], int] = {}
        for ids in some:
            found += [first.setdefault(tuple(ids[:n]), len(found) + n) for n in range(len(ids))]
    return np.array(found)


def pack_alongside(packing: TextPacking, length_N: np.ndarray) -> TextPacking:
    """Texts of other sizes in the same rows and in the same order, in rows that are as wide as these need."""
    order = np.lexsort((packing.document_index, packing.row_index))
    used_B = np.bincount(packing.row_index, weights=length_N, minlength=packing.num_rows).astype(np.int64)
    first_N = np.empty_like(length_N)
    before_B = np.cumsum(used_B) - used_B
    first_N[order] = np.cumsum(length_N[order]) - length_N[order] - before_B[packing.row_index[order]]
    return packing._replace(width=round_row_width(int(used_B.max())), lengths=length_N, start=first_N)


def round_row_width(n: int) -> int:
    """The next width that is allowed: four of them up to each power of two, so that few shapes occur.

    >>> [round_row_width(n) for n in (3, 17, 33, 41, 100, 300)]
    [16, 20, 40, 48, 112, 320]
    """
    step = max(1, next_power_of_two(n) // 8)
    return max(MIN_ROW_TOKENS, -(-n // step) * step)


@torch.no_grad()
def score_answers(
    model: Model, packed: PackedAnswers, compute: ComputeConfig, encoder_states: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
    """(A,) twice: the log-probability of each token of the answers, and whether it was the likeliest.

    The third is what an encoder has made of the texts, to be given again with other answers to them.
    """
    batch = packed.batch.to(compute.device)
    with compute.autocast():
        if batch.decoder_input_ids is None:
            x = model.target_hidden_states(batch)
        else:
            encoder_states = model.encode(batch) if encoder_states is None else encoder_states  # type: ignore[operator]
            asking = None if packed.source_index is None else torch.from_numpy(packed.source_index).to(compute.device)
            x = model.hidden_states(batch, encoder_states, asking)  # type: ignore[call-arg]
        first_S, of_A = np.unique(
            np.arange(len(packed.label_slots)) if packed.shared_prefix is None else packed.shared_prefix,
            return_inverse=True,
        )
        slot_S, label_A = packed.label_slots[first_S], packed.batch.labels.reshape(-1)[packed.label_slots]
        x_SD = x.flatten(0, 1)[torch.from_numpy(slot_S).to(compute.device)]
        found, rows = np.empty((2, len(of_A)), np.float32), max(1, MAX_ANSWER_CHUNK_LOGITS // model.config.vocab_size)
        for i, x_PD in enumerate(x_SD.split(rows)):
            logits_PV = model.head(x_PD, model.embed.tokens.weight).float()
            here = np.flatnonzero(of_A // rows == i)
            row, label = (torch.from_numpy(a[here]).to(compute.device) for a in (of_A % rows, label_A))
            logp = logits_PV[row, label] - logits_PV.logsumexp(-1)[row]
            found[:, here] = torch.stack([logp, logits_PV.argmax(-1)[row] == label]).cpu().numpy()
    return found[0], found[1] > 0, encoder_states
