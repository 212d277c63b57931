"""What is read and what is asked, once the noise is chosen.

B rows, L places before corruption, T after, U places of the decoder, K asked slots, X any places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from firth.objectives.batch import IGNORED, Batch
from firth.objectives.choose import Documents, count_in_document, first_of_document, inside, order, shifted
from firth.objectives.draw import Draw
from firth.objectives.sight import document_lengths, per_document
from firth.tokens import Rows, Vocabulary
from firth.tokens.rows import ragged_arange

# --- masks --------------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """The places that are asked (B, K), rising, and which of the slots are used."""

    place: np.ndarray
    used: np.ndarray


def ask(mask_BL: np.ndarray, K: int) -> Asked:
    """The places of a mask in slots of a fixed number."""
    place_BL = np.broadcast_to(np.arange(mask_BL.shape[1]), mask_BL.shape)
    used_BK = np.arange(K) < mask_BL.sum(1, keepdims=True)
    return Asked(_close_up(place_BL, mask_BL, K, 0), used_BK)


def hide(
    tokens_BL: np.ndarray,
    asked: Asked,
    draw: Draw,
    vocab: Vocabulary,
    mask: float,
    random: float,
    unit_BK: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """BERT's noise: a share of the chosen becomes [MASK], a share any real token, the rest is kept.

    Slots with the same `unit` share one fate. Returns what is read (B, L) and the answers (B, K).
    """
    assert vocab.mask is not None, "the objective asks for it before"
    B, K = asked.place.shape
    truth_BK = np.take_along_axis(tokens_BL, asked.place, 1)
    fate_BK = draw.uniform("fate", K)
    if unit_BK is not None:
        fate_BK = np.take_along_axis(fate_BK, unit_BK, 1)
    read_BK = np.where(fate_BK < mask, vocab.mask, truth_BK)
    if random:
        any_BK = vocab.ordinary[draw.integers("other", K, len(vocab.ordinary))]
        read_BK = np.where((fate_BK >= mask) & (fate_BK < mask + random), any_BK, read_BK)
    read_BL = tokens_BL.copy()
    flat_BK = asked.place + tokens_BL.shape[1] * np.arange(B)[:, None]
    read_BL.reshape(-1)[flat_BK[asked.used]] = read_BK[asked.used]
    return read_BL, np.where(asked.used, truth_BK, IGNORED)


def runs(mask_BL: np.ndarray, asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """The spans that asked places belong to: their number in the row (B, K), and their surroundings (B, K, 3).

    Surroundings are the last place before the span, the first one after it, and which place of it this one is.
    """
    L = mask_BL.shape[1]
    place = np.arange(L)
    opens_BL = mask_BL & ~shifted(mask_BL, False)
    first_BL = np.maximum.accumulate(np.where(opens_BL, place, 0), 1)
    after_BL = np.minimum.accumulate(np.where(mask_BL, L, place)[:, ::-1], 1)[:, ::-1]
    number_BL = np.maximum(np.cumsum(opens_BL, 1) - 1, 0)
    number_BK, first_BK, after_BK = (np.take_along_axis(x, asked.place, 1) for x in (number_BL, first_BL, after_BL))
    around_BK3 = np.stack([first_BK - 1, after_BK, asked.place - first_BK], 2)
    return np.where(asked.used, number_BK, 0), np.where(asked.used[:, :, None], around_BK3, 0)


# --- sentinels ----------------------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """What the two sides of a corrupted row are made of, before they are laid out.

    Each place of the source adds its token to the text where `keep` says so, and to the answer so many of `words`
    as `said` has (B, 3 L).
    """

    read: np.ndarray
    keep: np.ndarray
    words: np.ndarray
    said: np.ndarray


def spans_and_answers(rows: Rows, noise_BL: np.ndarray, vocab: Vocabulary) -> Sides:
    """T5's corruption: each noise span becomes one sentinel, and the answer is sentinel, span, sentinel, span, end.

    Every document of a row counts its sentinels from 0.
    """
    assert vocab.eos is not None, "the objective asks for it before"
    text_BL = rows.doc >= 0
    first_BL, last_BL = first_of_document(rows.doc), _last_of_document(rows.doc)
    opens_BL = noise_BL & (first_BL | ~shifted(noise_BL, False))
    read_BL = rows.tokens.copy()
    read_BL[opens_BL] = np.asarray(vocab.sentinels)[count_in_document(opens_BL, first_BL)[opens_BL]]
    # What each place adds to the answer: a sentinel where a span opens, its token in a span, the end at the end.
    said_BX = np.stack([opens_BL, noise_BL, last_BL], 2).reshape(len(read_BL), -1)
    words_BX = np.stack([read_BL, rows.tokens, np.full_like(read_BL, vocab.eos)], 2).reshape(len(read_BL), -1)
    return Sides(read_BL, text_BL & (~noise_BL | opens_BL), words_BX, said_BX)


def sentinels(rows: Rows, noise_BL: np.ndarray, T: int, U: int, vocab: Vocabulary) -> Batch:
    """Text with sentinels for an encoder of T places, and the answers for a decoder of U."""
    sides = spans_and_answers(rows, noise_BL, vocab)
    doc_BT = _close_up(rows.doc, sides.keep, T, -1)
    tokens_BT = _close_up(sides.read, sides.keep, T, vocab.pad)
    labels_BU = _close_up(sides.words, sides.said, U, IGNORED)
    answer_doc_BU = _close_up(np.repeat(rows.doc, 3, 1), sides.said, U, -1)
    return two_sides(tokens_BT, doc_BT, labels_BU, answer_doc_BU, vocab.pad, vocab.pad)


def two_sides(
    tokens_BT: np.ndarray, doc_BT: np.ndarray, labels_BU: np.ndarray, doc_BU: np.ndarray, start: int, pad: int
) -> Batch:
    """A batch for an encoder-decoder: the decoder reads `start` and then what it should have said so far."""
    before_BU = np.where(doc_BU == shifted(doc_BU, -1), shifted(labels_BU, IGNORED), start)
    # Padding must see something, or its attention is empty: it passes for a part of the row's last document.
    last_B1 = doc_BT.max(1, keepdims=True)
    full_BU = np.where(doc_BU < 0, last_B1, doc_BU)
    return Batch(
        tokens=tokens_BT,
        doc=doc_BT,
        position=_place_in_document(doc_BT),
        labels=labels_BU,
        decoder_tokens=np.where((before_BU == IGNORED) | (doc_BU < 0), pad, before_BU),
        decoder_doc=full_BU,
        decoder_position=_place_in_document(full_BU),
    )


def one_stack(rows: Rows, noise_BL: np.ndarray, T: int, K: int, vocab: Vocabulary, prefix: bool) -> Batch:
    """Each document's text with sentinels and, right after it, its answers, in one row of T; only answers are asked.

    With `prefix` the text sees all of itself, else it is read in order like the answers.
    """
    sides = spans_and_answers(rows, noise_BL, vocab)
    doc_BX = np.concatenate([rows.doc, np.repeat(rows.doc, 3, 1)], 1)
    keep_BX = np.concatenate([sides.keep, sides.said], 1)
    words_BX = np.concatenate([sides.read, sides.words], 1)
    answer_BX = np.broadcast_to(np.arange(doc_BX.shape[1]) >= rows.doc.shape[1], doc_BX.shape)
    key_BX = np.where(keep_BX, doc_BX, 2**15 - 1).astype(np.int16)
    order_BT = np.argsort(key_BX, axis=1, kind="stable")[:, :T]  # document by document, its text, then its answers
    kept_BT = np.take_along_axis(keep_BX, order_BT, 1)
    assert kept_BT.sum() == keep_BX.sum(), "the objective sees to it that there is room"
    tokens_BT, doc_BT = (np.take_along_axis(x, order_BT, 1) for x in (words_BX, doc_BX))
    tokens_BT, doc_BT = np.where(kept_BT, tokens_BT, vocab.pad), np.where(kept_BT, doc_BT, -1)
    answer_BT = np.take_along_axis(answer_BX, order_BT, 1) & kept_BT
    ahead_BT = np.append(answer_BT[:, 1:], np.zeros((len(answer_BT), 1), bool), 1)  # the next token is an answer
    asked = ask(ahead_BT, K)
    labels_BK = np.take_along_axis(tokens_BT, np.minimum(asked.place + 1, T - 1), 1)
    started_BT = count_in_document(answer_BT, first_of_document(doc_BT)) + answer_BT
    return Batch(
        tokens=tokens_BT,
        doc=doc_BT,
        position=_place_in_document(doc_BT),
        rank=started_BT if prefix else None,
        asked=asked.place,
        labels=np.where(asked.used, labels_BK, IGNORED),
    )


def prefix_and_rest(rows: Rows, prefix_BL: np.ndarray, vocab: Vocabulary) -> Batch:
    """The first tokens of each document for the encoder, with an end of their own, and the rest for the decoder."""
    assert vocab.eos is not None, "the objective asks for it before"
    L = rows.tokens.shape[1]
    text_BL = rows.doc >= 0
    read_BL = text_BL & (rows.position < prefix_BL)
    ends_BL = read_BL & (rows.position == prefix_BL - 1)
    words_BX = np.stack([rows.tokens, np.full_like(rows.tokens, vocab.eos)], 2).reshape(len(rows.tokens), -1)
    keep_BX = np.stack([read_BL, ends_BL], 2).reshape(len(rows.tokens), -1)
    rest_BL = text_BL & ~read_BL
    return two_sides(
        _close_up(words_BX, keep_BX, L, vocab.pad),
        _close_up(np.repeat(rows.doc, 2, 1), keep_BX, L, -1),
        _close_up(rows.tokens, rest_BL, L, IGNORED),
        _close_up(rows.doc, rest_BL, L, -1),
        vocab.pad,
        vocab.pad,
    )


# --- BART's noise: each takes a text and gives one that is not longer ---------------------------------------------


class Text(NamedTuple):
    """A text while it is being corrupted, (B, L) each."""

    tokens: np.ndarray
    doc: np.ndarray
    real: np.ndarray


def permute_sentences(text: Text, sentence_end_BL: np.ndarray, share: float, draw: Draw) -> Text:
    """The sentences of a share of the documents in random order; frames stay where they are."""
    L = text.doc.shape[1]
    opens_BL = first_of_document(text.doc)
    begins_BL = text.real & (~shifted(text.real, False) | shifted(sentence_end_BL, False) | opens_BL)
    goes_on_BL = text.real & ~begins_BL
    ends_BL = text.real & ~np.append(goes_on_BL[:, 1:], np.zeros((len(begins_BL), 1), bool), 1)
    first_N, last_N = np.flatnonzero(begins_BL), np.flatnonzero(ends_BL)
    first_S = np.flatnonzero(opens_BL)
    chosen_S = draw.at("permuted", *np.divmod(first_S, L)) < share
    document_N = np.searchsorted(first_S, first_N, side="right") - 1
    moves_N = chosen_S[document_N]
    first_N, length_N, document_N = first_N[moves_N], (last_N - first_N + 1)[moves_N], document_N[moves_N]
    order_N = np.lexsort((draw.at("sentences", *np.divmod(first_N, L)), document_N))  # equal ones as they stood
    tokens_BL = text.tokens.copy()
    to, of = places(first_N, length_N), places(first_N[order_N], length_N[order_N])
    tokens_BL.reshape(-1)[to] = text.tokens.reshape(-1)[of]
    return text._replace(tokens=tokens_BL)


def places(first_N: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    """Those of some stretches, one stretch after the other."""
    return np.repeat(first_N, length_N) + ragged_arange(length_N)


def rotate(text: Text, share: float, draw: Draw) -> Text:
    """A share of the documents begin at a random token, and what was before it comes last."""
    place_BL = count_in_document(text.real, first_of_document(text.doc))
    length_BL = np.maximum(document_lengths(text.doc, text.real), 1)
    u_BL = per_document(draw.uniform("rotation", text.doc.shape[1]), text.doc)
    key_BL = (place_BL - (u_BL * length_BL).astype(np.int64)) % length_BL / length_BL
    chosen_BL = per_document(draw.uniform("rotated", text.doc.shape[1]), text.doc) < share
    moved_BL = text.real & chosen_BL
    # Places that move are ordered among themselves, so that everything else stays where it is.
    order_BL = order(key_BL, np.where(moved_BL, text.doc, 2**15))
    tokens_BL, count_B1 = text.tokens.copy(), moved_BL.sum(1, keepdims=True)
    tokens_BL[moved_BL] = np.take_along_axis(text.tokens, order_BL, 1)[np.arange(text.doc.shape[1]) < count_B1]
    return text._replace(tokens=tokens_BL)


def mask_or_delete(text: Text, mask_BL: np.ndarray, delete: bool, vocab: Vocabulary) -> Text:
    """Single tokens become a mask, or go without a trace."""
    assert vocab.mask is not None, "the objective asks for it before"
    if not delete:
        return text._replace(tokens=np.where(mask_BL, vocab.mask, text.tokens))
    return _keep(text, (text.doc >= 0) & ~mask_BL, vocab.pad)


def infill(text: Text, law: np.ndarray, share: float, draw: Draw, vocab: Vocabulary) -> Text:
    """A share of the text goes in spans with lengths from `law`; each becomes one mask, also one of no length."""
    assert vocab.mask is not None, "the objective asks for it before"
    B, L = text.doc.shape
    documents = Documents(text.doc, text.real)
    start_SM, length_SM = documents.scatter(law, share, draw)
    document_BL, place_BL = documents.number_BL, documents.before_BL
    hidden_BL = inside(start_SM, length_SM, L + 1)[document_BL, place_BL] & text.real
    opens_BL = hidden_BL & ~shifted(hidden_BL, False)
    keep_BL = (text.doc >= 0) & (~hidden_BL | opens_BL)
    put_SX = np.zeros((len(start_SM), L + 1), bool)
    number, span = np.nonzero(length_SM == 0)
    put_SX[number, start_SM[number, span]] = True
    after_BL = shifted(text.real, False) & (text.doc >= 0)  # what follows the last word of a document
    put_BL = put_SX[document_BL, place_BL] & (text.real | after_BL)
    put_BL &= np.cumsum(put_BL, 1) <= L - keep_BL.sum(1, keepdims=True)  # never longer than before
    # Each place adds a mask where one is put before it, and itself where it is kept.
    added_BX = np.stack([put_BL, keep_BL], 2).reshape(B, -1)
    at_N = np.flatnonzero(added_BX)
    place_N, itself_N = at_N >> 1, (at_N & 1).astype(bool)
    tokens_N = np.where(itself_N & ~hidden_BL.ravel()[place_N], text.tokens.ravel()[place_N], vocab.mask)
    filled_BL = np.arange(L) < added_BX.sum(1, keepdims=True)
    closed = Text(np.full_like(text.tokens, vocab.pad), np.full_like(text.doc, -1), np.zeros_like(text.real))
    closed.tokens[filled_BL] = tokens_N
    closed.doc[filled_BL], closed.real[filled_BL] = text.doc.ravel()[place_N], text.real.ravel()[place_N]
    return closed


def _keep(text: Text, keep_BL: np.ndarray, pad: int) -> Text:
    width = keep_BL.shape[1]
    return Text(*(_close_up(x, keep_BL, width, empty) for x, empty in zip(text, (pad, -1, 0), strict=True)))


# --- small things -------------------------------------------------------------------------------------------------


def _close_up(x_BX: np.ndarray, keep_BX: np.ndarray, width: int, empty: int) -> np.ndarray:
    """What is kept of each row, without gaps, in rows of `width`."""
    count_B1 = keep_BX.sum(1, keepdims=True)
    assert count_B1.max(initial=0) <= width, "the objective sees to it that there is room"
    rows = np.full((len(x_BX), width), empty, x_BX.dtype)
    rows[np.arange(width) < count_B1] = x_BX[keep_BX]
    return rows


def _last_of_document(doc_BL: np.ndarray) -> np.ndarray:
    """The last place of each document; padding has none."""
    return first_of_document(doc_BL[:, ::-1])[:, ::-1]


def _place_in_document(doc_BT: np.ndarray) -> np.ndarray:
    place = np.arange(doc_BT.shape[1])
    first = np.maximum.accumulate(np.where(doc_BT != shifted(doc_BT, -2), place, 0), 1)
    return np.where(doc_BT < 0, 0, place - first)
