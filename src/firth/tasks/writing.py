"""Texts and the answers to them in packed rows, for models that write; and how likely each answer is.

N texts, B rows, T places, K asked places, A tokens of all answers, D model width.
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
    asked: np.ndarray  # (N,) how many tokens each text is asked for

    def sums(self, value_A: np.ndarray) -> np.ndarray:
        """(N,): the sum over the answer of each text."""
        text_A = np.repeat(np.arange(len(self.asked)), self.asked)
        return np.bincount(text_A, weights=value_A, minlength=len(self.asked))


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
    sources: Sequence[Ids], answers: Sequence[Ids], length: int, pad: int, start: int, room: Sequence[int] | None = None
) -> Laid:
    """Texts for an encoder, and answers for its decoder: a text and its answer are the same document of the same row.

    Rows hold up to `length` on either side. `room` is what the answers may take, so that other answers to the same
    texts can stand in the same rows.
    """
    read_N, write_N = np.array([len(ids) for ids in sources]), np.array([len(ids) for ids in answers])
    shared = pack(np.maximum(read_N, write_N if room is None else np.asarray(room)), length)
    read, write = beside(shared, read_N), beside(shared, write_N)
    doc_BT, position_BT = read.documents()
    doc_BU, position_BU = write.documents()
    last_B = np.bincount(shared.row, minlength=shared.num_rows) - 1
    batch = Batch(
        read.lay(np.concatenate(sources), pad),
        doc=doc_BT,
        position=position_BT,
        labels=write.lay(np.concatenate(answers), IGNORED),
        decoder_tokens=write.lay(np.concatenate([[start, *ids[:-1]] for ids in answers]), pad),
        # Padding comes last and a decoder does not look ahead: as a part of the last answer it has a text to read.
        decoder_doc=np.where(doc_BU < 0, last_B[:, None], doc_BU),
        decoder_position=position_BU,
    )
    return Laid(batch, write.flat, write_N)


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
            x = model.read(batch, encoded)  # type: ignore[call-arg]
        slot_A = torch.from_numpy(laid.slot).to(machine.device)
        x_AD, label_A = x.flatten(0, 1)[slot_A], batch.labels.flatten()[slot_A]
        logp, right = [], []
        rows = max(1, PIECE // model.config.vocab_size)
        for x_PD, label_P in zip(x_AD.split(rows), label_A.split(rows), strict=True):
            logits_PV = model.head(x_PD, model.embed.tokens.weight).float()
            logp.append(logits_PV.log_softmax(-1).gather(1, label_P[:, None])[:, 0])
            right.append(logits_PV.argmax(-1) == label_P)
    return torch.cat(logp).cpu().numpy(), torch.cat(right).cpu().numpy(), encoded
