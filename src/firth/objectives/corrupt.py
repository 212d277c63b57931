"""What is read and what is asked, once the noise is chosen.

B rows, L places before corruption, T after, U places of the decoder, K asked slots.
"""

from __future__ import annotations

import numpy as np

from firth.objectives.batch import IGNORED, Batch
from firth.objectives.draw import Draw
from firth.tokens import Rows, Vocabulary


def hide(
    tokens_BL: np.ndarray,
    asked_BK: np.ndarray,
    used_BK: np.ndarray,
    draw: Draw,
    vocab: Vocabulary,
    mask: float,
    random: float,
) -> tuple[np.ndarray, np.ndarray]:
    """BERT's noise: a share of the chosen becomes [MASK], a share any real token, the rest is kept.

    Returns what is read (B, L) and the answers (B, K).
    """
    K = asked_BK.shape[1]
    truth_BK = np.take_along_axis(tokens_BL, asked_BK, 1)
    fate_BK = draw.uniform("fate", K)
    ordinary = vocab.ordinary
    other_BK = ordinary[draw.integers("other", K, len(ordinary))]
    assert vocab.mask is not None, "the objective asks for it before"
    read_BK = np.where(fate_BK < mask, vocab.mask, np.where(fate_BK < mask + random, other_BK, truth_BK))
    read_BL = tokens_BL.copy()
    row = np.broadcast_to(np.arange(len(tokens_BL))[:, None], asked_BK.shape)
    read_BL[row[used_BK], asked_BK[used_BK]] = read_BK[used_BK]
    return read_BL, np.where(used_BK, truth_BK, IGNORED)


def sentinels(rows: Rows, noise_BL: np.ndarray, T: int, U: int, vocab: Vocabulary) -> Batch:
    """T5's corruption: each noise span becomes one sentinel, and the answer is sentinel, span, sentinel, span, end.

    Every document of a row counts its sentinels from 0 and has its own answer in the decoder's row.
    """
    assert vocab.eos is not None, "the objective asks for it before"
    doc_BL = rows.doc
    text_BL = doc_BL >= 0
    opens_BL = noise_BL & ~_shifted(noise_BL, False)
    first_BL = text_BL & (doc_BL != _shifted(doc_BL, -1))
    last_BL = text_BL & (doc_BL != np.roll(np.pad(doc_BL, ((0, 0), (0, 1)), constant_values=-1), -1, 1)[:, :-1])
    sentinel_BL = np.asarray(vocab.sentinels)[_count_in_document(opens_BL, first_BL)]

    keep_BL = text_BL & (~noise_BL | opens_BL)
    row, _ = np.nonzero(keep_BL)
    place = (np.cumsum(keep_BL, 1) - 1)[keep_BL]
    tokens_BT = np.full((len(doc_BL), T), vocab.pad, np.int64)
    doc_BT = np.full((len(doc_BL), T), -1, np.int64)
    tokens_BT[row, place] = np.where(opens_BL, sentinel_BL, rows.tokens)[keep_BL]
    doc_BT[row, place] = doc_BL[keep_BL]

    said_BL = noise_BL.astype(np.int64) + opens_BL + last_BL
    at_BL = np.cumsum(said_BL, 1) - said_BL
    labels_BU = np.full((len(doc_BL), U), IGNORED, np.int64)
    answer_doc_BU = np.broadcast_to(doc_BL.max(1)[:, None], (len(doc_BL), U)).copy()  # padding: any that it may see
    for which, offset, value in (
        (opens_BL, 0, sentinel_BL),
        (noise_BL, opens_BL, rows.tokens),
        (last_BL, noise_BL.astype(np.int64) + opens_BL, vocab.eos),
    ):
        row, _ = np.nonzero(which)
        at = (at_BL + offset)[which]
        labels_BU[row, at] = np.broadcast_to(value, doc_BL.shape)[which]
        answer_doc_BU[row, at] = doc_BL[which]
    starts_BU = answer_doc_BU != _shifted(answer_doc_BU, -1)
    before_BU = np.where(starts_BU, vocab.pad, _shifted(labels_BU, vocab.pad))
    return Batch(
        tokens=tokens_BT,
        doc=doc_BT,
        position=_place_in_document(doc_BT),
        labels=labels_BU,
        decoder_tokens=np.where(before_BU == IGNORED, vocab.pad, before_BU),
        decoder_doc=answer_doc_BU,
        decoder_position=_place_in_document(answer_doc_BU),
    )


def _shifted(x_BL: np.ndarray, first: int | bool) -> np.ndarray:
    """What stands one place to the left."""
    return np.concatenate([np.full_like(x_BL[:, :1], first), x_BL[:, :-1]], 1)


def _count_in_document(event_BL: np.ndarray, first_BL: np.ndarray) -> np.ndarray:
    """How many events came before, inside the document."""
    before = np.cumsum(event_BL, 1) - event_BL
    return before - np.maximum.accumulate(np.where(first_BL, before, 0), 1)


def _place_in_document(doc_BT: np.ndarray) -> np.ndarray:
    place = np.arange(doc_BT.shape[1])
    first = np.maximum.accumulate(np.where(doc_BT != _shifted(doc_BT, -2), place, 0), 1)
    return np.where(doc_BT < 0, 0, place - first)
