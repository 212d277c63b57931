"""Batch counts what is read and what is asked, and becomes tensors."""

from __future__ import annotations

import numpy as np
import torch

from firth.objectives import IGNORED, Batch

TOKENS = np.array([[5, 6, 7], [8, 9, 0]])
DOC = np.array([[0, 0, 1], [0, 0, -1]], np.int32)


def test_answers_are_the_labels_that_are_asked() -> None:
    assert Batch(TOKENS, labels=np.array([[6, IGNORED, IGNORED], [9, 4, IGNORED]])).num_answers == 3


def test_a_labelled_row_has_one_answer() -> None:
    assert Batch(TOKENS, target=np.array([1, 0])).num_answers == 2


def test_slots_without_a_target_are_no_answers() -> None:
    assert Batch(TOKENS, target=np.array([[1, 0], [2, IGNORED]])).num_answers == 3
    assert Batch(TOKENS, target=np.array([[1.5, np.nan], [-100.5, 0.0]])).num_answers == 3


def test_a_group_is_one_answer() -> None:
    """Of three choices and two, in either form; and pairs without a target."""
    batch = Batch(TOKENS, target=np.array([[0, 1, 0], [1, 0, 0]]), group=np.array([[4, 4, 4], [2, 2, -1]]))
    assert batch.num_answers == batch.to(torch.device("cpu")).num_answers == 2
    assert batch._replace(target=None).num_answers == 2


def test_a_span_is_one_answer() -> None:
    target = np.zeros((2, 3, 2))
    target[0, 1, 0] = target[0, 2, 1] = target[1, 0, 0] = target[1, 0, 1] = 1
    assert Batch(TOKENS, target=target).num_answers == 2


def test_words_beside_the_answers_are_counted_by_themselves() -> None:
    labels = np.array([[6, 7, IGNORED], [9, IGNORED, IGNORED]])
    batch = Batch(TOKENS, doc=DOC, labels=labels, target=np.array([[1], [0]]))
    assert batch.counts == {"answers": 2, "tokens": 5, "words": 3}


def test_a_decoder_that_reads_a_text_again_reads_it_all() -> None:
    batch = Batch(TOKENS, doc=DOC, target=np.array([[1], [0]]), decoder_tokens=TOKENS, decoder_doc=DOC)
    assert batch.num_tokens == 10


def test_padding_is_not_read() -> None:
    assert Batch(TOKENS).num_tokens == 6
    assert Batch(TOKENS, doc=DOC).num_tokens == 5


def test_a_decoder_reads_one_token_for_each_answer() -> None:
    # Three answers; the fourth place is padding, which passes for a part of its document.
    batch = Batch(
        TOKENS,
        doc=DOC,
        labels=np.array([[6, 1], [1, IGNORED]]),
        decoder_tokens=np.array([[0, 6], [0, 1]]),
        decoder_doc=np.array([[0, 0], [0, 0]]),
    )
    assert batch.num_tokens == 5 + 3


def test_losses_are_means_over_what_a_batch_counts() -> None:
    batch = Batch(TOKENS, doc=DOC, labels=np.array([[6, IGNORED], [9, 4]]))
    assert batch.counts == {"answers": 3, "tokens": 5}
    assert batch._replace(pair=np.array([0, 1])).counts == {"answers": 3, "tokens": 5, "pairs": 2}


def test_two_readings_of_a_row_have_two_answers_for_a_place() -> None:
    labels = np.array([[[6, 7, IGNORED], [IGNORED, 5, 6]], [[9, IGNORED, IGNORED], [IGNORED, 8, IGNORED]]])
    assert Batch(TOKENS, doc=DOC, labels=labels).num_answers == 6


def test_tensors_hold_the_same_numbers_in_types_that_torch_indexes_with() -> None:
    batch = Batch(TOKENS, doc=DOC, target=np.array([0.5, 1.0], np.float32)).to(torch.device("cpu"))
    assert batch.tokens.tolist() == TOKENS.tolist()
    assert batch.doc.tolist() == DOC.tolist()
    assert batch.tokens.dtype == batch.doc.dtype == torch.int64
    assert batch.target.dtype == torch.float32
    assert batch.labels is None
    assert batch.num_tokens == 5
    assert batch._replace(doc=None).num_tokens == 6
