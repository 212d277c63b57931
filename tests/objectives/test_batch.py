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
