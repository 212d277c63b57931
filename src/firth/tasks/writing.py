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
from firth.objectives import IGNORED, Batch
from firth.tasks.packing import NARROWEST, Packing, pack, power_of_two
from firth.tokens.rows import ragged_arange
from firth.train import Machine

Ids = Sequence[int]
PIECE = 2**24  # logits that are held at once: 64 MB of float32


class Line(NamedTuple):
    """A text as a decoder reads it, and the places at which it is asked for the next token."""

    ids: Ids
    asked: Sequence[int]


class Laid(NamedTuple):
    """A batch, and where the answers stand in its labels laid end to end: token by token, text after text."""

    batch: Batch
    slot: np.ndarray  # (A,)
    asked: np.ndarray  # (M,) how many tokens each answer has
    # Where texts have several answers:
    asking: np.ndarray | None = None  # (B, U) which text a place of the decoder reads
    same: np.ndarray | None = None  # (A,) the first token of the same text after the same words: their states are one

    def sums(self, value_A: np.ndarray) -> np.ndarray:
        """(M,): the sum over each answer."""
        answer_A = np.repeat(np.arange(len(self.asked)), self.asked)
        return np.bincount(answer_A, weights=value_A, minlength=len(self.asked))


def lay_lines(lines: Sequence[Line], length: int, pad: int) -> Laid:
    """Texts for a decoder in rows of `length`."""
    packing = pack([len(line.ids) for line in lines], length)
    doc_BT, position_BT = packing.documents()
    tokens_BT = packing.lay(np.concatenate([line.ids for line in lines]), pad)
    count_N = np.array([len(line.asked) for line in lines])
    width, slot_A = packing.slots(count_N)
    asked = [np.asarray(line.asked, np.int64) for line in lines]
    asked_BK = np.zeros((packing.num_rows, width), np.int64)
    asked_BK.reshape(-1)[slot_A] = np.concatenate(asked) + np.repeat(packing.first, count_N)
    labels_BK = np.full_like(asked_BK, IGNORED)
    answers = [np.asarray(line.ids)[places + 1] for line, places in zip(lines, asked, strict=True)]
    labels_BK.reshape(-1)[slot_A] = np.concatenate(answers)
    return Laid(Batch(tokens_BT, doc=doc_BT, position=position_BT, asked=asked_BK, labels=labels_BK), slot_A, count_N)


def lay_pairs(
    sources: Sequence[Ids],
    answers: Sequence[Sequence[Ids]],
    length: int,
    pad: int,
    start: int,
    room: Sequence[int] | None = None,
) -> Laid:
    """Texts for an encoder, and answers for its decoder: a text and its answer are the same document of the same row.

    Where a text has several answers each is a document of its own, and all of them read the text. Rows hold up to
    `length` on either side. `room` is what the answers may take, so that other answers to the same texts can stand in
    the same rows.
    """
    each = [ids for some in answers for ids in some]
    asked_M, count_N = np.array([len(ids) for ids in each]), np.array([len(some) for some in answers])
    most, which_A = count_N.max(), np.repeat(ragged_arange(count_N), asked_M)
    read_N, write_N = np.array([len(ids) for ids in sources]), np.array([sum(map(len, some)) for some in answers])
    shared = pack(np.maximum(read_N, write_N if room is None else np.asarray(room)), length)
    read, write = beside(shared, read_N), beside(shared, write_N)
    doc_BT, position_BT = read.documents()
    doc_BU, _ = write.documents()
    last_B = np.bincount(shared.row, minlength=shared.num_rows) - 1
    # Padding comes last and a decoder does not look ahead: as a part of the last answer it has a text to read.
    text_BU = np.where(doc_BU < 0, last_B[:, None], doc_BU)
    batch = Batch(
        read.lay(np.concatenate(sources), pad),
        doc=doc_BT,
        position=position_BT,
        labels=write.lay(np.concatenate(each), IGNORED),
        decoder_tokens=write.lay(np.concatenate([[start, *ids[:-1]] for ids in each]), pad),
        decoder_doc=text_BU * most + write.lay(which_A, most - 1),
        decoder_position=write.lay(ragged_arange(asked_M), 0),
    )
    if most == 1:
        return Laid(batch, write.flat, asked_M)
    return Laid(batch, write.flat, asked_M, text_BU, same_beginnings(answers))


def same_beginnings(answers: Sequence[Sequence[Ids]]) -> np.ndarray:
    """(A,) for each token of all answers the first one of the same text that comes after the same words.

    >>> same_beginnings([[[1, 2], [1, 3]], [[1, 2]]]).tolist()
    [0, 1, 0, 1, 4, 5]
    """
    found: list[int] = []
    for some in answers:
        first: dict[tuple[int, ...], int] = {}
        for ids in some:
            found += [first.setdefault(tuple(ids[:n]), len(found) + n) for n in range(len(ids))]
    return np.array(found)


def beside(packing: Packing, size_N: np.ndarray) -> Packing:
    """Texts of other sizes in the same rows and in the same order, in rows that are as wide as these need."""
    order = np.lexsort((packing.doc, packing.row))
    used_B = np.bincount(packing.row, weights=size_N, minlength=packing.num_rows).astype(np.int64)
    first_N = np.empty_like(size_N)
    before_B = np.cumsum(used_B) - used_B
    first_N[order] = np.cumsum(size_N[order]) - size_N[order] - before_B[packing.row[order]]
    return packing._replace(width=few_wide(int(used_B.max())), size=size_N, first=first_N)


def few_wide(n: int) -> int:
    """The next width that is allowed: four of them up to each power of two, so that few shapes occur.

    >>> [few_wide(n) for n in (3, 17, 33, 41, 100, 300)]
    [16, 20, 40, 48, 112, 320]
    """
    step = max(1, power_of_two(n) // 8)
    return max(NARROWEST, -(-n // step) * step)


@torch.no_grad()
def foresee(
    model: Model, laid: Laid, machine: Machine, encoded: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
    """(A,) twice: the log-probability of each token of the answers, and whether it was the likeliest.

    The third is what an encoder has made of the texts, to be given again with other answers to them.
    """
    batch = laid.batch.to(machine.device)
    with machine.precision():
        if batch.decoder_tokens is None:
            x = model.asked_states(batch)
        else:
            encoded = model.encode(batch) if encoded is None else encoded  # type: ignore[operator]
            asking = None if laid.asking is None else torch.from_numpy(laid.asking).to(machine.device)
            x = model.read(batch, encoded, asking)  # type: ignore[call-arg]
        first_S, of_A = np.unique(np.arange(len(laid.slot)) if laid.same is None else laid.same, return_inverse=True)
        slot_S, label_A = laid.slot[first_S], laid.batch.labels.reshape(-1)[laid.slot]
        x_SD = x.flatten(0, 1)[torch.from_numpy(slot_S).to(machine.device)]
        found, rows = np.empty((2, len(of_A)), np.float32), max(1, PIECE // model.config.vocab_size)
        for i, x_PD in enumerate(x_SD.split(rows)):
            logits_PV = model.head(x_PD, model.embed.tokens.weight).float()
            here = np.flatnonzero(of_A // rows == i)
            row, label = (torch.from_numpy(a[here]).to(machine.device) for a in (of_A % rows, label_A))
            logp = logits_PV[row, label] - logits_PV.logsumexp(-1)[row]
            found[:, here] = torch.stack([logp, logits_PV.argmax(-1)[row] == label]).cpu().numpy()
    return found[0], found[1] > 0, encoded
