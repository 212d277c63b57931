"""What is read and what is asked, once the noise is chosen.

B rows, L places before corruption, T after, U places of the decoder, K asked slots, X any places.
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
    edge = np.diff(doc_BL, axis=1, prepend=-1, append=-1) != 0
    first_BL, last_BL = text_BL & edge[:, :-1], text_BL & edge[:, 1:]
    opens_BL = noise_BL & (first_BL | ~_shifted(noise_BL, False))
    read_BL = rows.tokens.copy()
    read_BL[opens_BL] = np.asarray(vocab.sentinels)[_count_in_document(opens_BL, first_BL)[opens_BL]]

    keep_BL = text_BL & (~noise_BL | opens_BL)
    doc_BT = _close_up(doc_BL, keep_BL, T, -1)

    # What each place adds to the answer: a sentinel where a span opens, its token in a span, the end at the end.
    said_BX = np.stack([opens_BL, noise_BL, last_BL], 2).reshape(len(doc_BL), -1)
    words_BX = np.stack([read_BL, rows.tokens, np.full_like(read_BL, vocab.eos)], 2).reshape(len(doc_BL), -1)
    labels_BU = _close_up(words_BX, said_BX, U, IGNORED)
    answer_doc_BU = _close_up(np.repeat(doc_BL, 3, 1), said_BX, U, -1)
    before_BU = np.where(answer_doc_BU == _shifted(answer_doc_BU, -1), _shifted(labels_BU, IGNORED), vocab.pad)
    # Padding must see something, or its attention is empty: it passes for a part of the row's last document.
    answer_doc_BU = np.where(answer_doc_BU < 0, doc_BL.max(1)[:, None], answer_doc_BU)
    return Batch(
        tokens=_close_up(read_BL, keep_BL, T, vocab.pad),
        doc=doc_BT,
        position=_place_in_document(doc_BT),
        labels=labels_BU,
        decoder_tokens=np.where(before_BU == IGNORED, vocab.pad, before_BU),
        decoder_doc=answer_doc_BU,
        decoder_position=_place_in_document(answer_doc_BU),
    )


def _close_up(x_BX: np.ndarray, keep_BX: np.ndarray, width: int, empty: int) -> np.ndarray:
    """What is kept of each row, without gaps, in rows of `width`."""
    count_B1 = keep_BX.sum(1, keepdims=True)
    assert count_B1.max(initial=0) <= width, "the objective sees to it that there is room"
    rows = np.full((len(x_BX), width), empty, x_BX.dtype)
    rows[np.arange(width) < count_B1] = x_BX[keep_BX]
    return rows


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
