"""Batch counts tokens and targets, and becomes tensors."""

from __future__ import annotations

import numpy as np
import torch

from firth.objectives import IGNORE_INDEX, Batch

TOKENS = np.array([[5, 6, 7], [8, 9, 0]])
DOC = np.array([[0, 0, 1], [0, 0, -1]], np.int32)


def test_num_targets_counts_labels() -> None:
    assert Batch(TOKENS, labels=np.array([[6, IGNORE_INDEX, IGNORE_INDEX], [9, 4, IGNORE_INDEX]])).num_targets == 3


def test_a_labelled_row_has_one_target() -> None:
    assert Batch(TOKENS, task_labels=np.array([1, 0])).num_targets == 2


def test_unused_slots_are_not_counted() -> None:
    assert Batch(TOKENS, task_labels=np.array([[1, 0], [2, IGNORE_INDEX]])).num_targets == 3
    assert Batch(TOKENS, task_labels=np.array([[1.5, np.nan], [-100.5, 0.0]])).num_targets == 3


def test_a_group_is_one_target() -> None:
    """Of three choices and two, in either form; and pairs without a target."""
    batch = Batch(TOKENS, task_labels=np.array([[0, 1, 0], [1, 0, 0]]), group_ids=np.array([[4, 4, 4], [2, 2, -1]]))
    assert batch.num_targets == batch.to(torch.device("cpu")).num_targets == 2
    assert batch._replace(task_labels=None).num_targets == 2


def test_an_answer_span_is_one_target() -> None:
    target = np.zeros((2, 3, 2))
    target[0, 1, 0] = target[0, 2, 1] = target[1, 0, 0] = target[1, 0, 1] = 1
    assert Batch(TOKENS, task_labels=target).num_targets == 2


def test_lm_labels_beside_task_labels_are_counted_apart() -> None:
    labels = np.array([[6, 7, IGNORE_INDEX], [9, IGNORE_INDEX, IGNORE_INDEX]])
    batch = Batch(TOKENS, document_ids=DOC, labels=labels, task_labels=np.array([[1], [0]]))
    assert batch.loss_counts == {"targets": 2, "tokens": 5, "lm_targets": 3}


def test_a_decoder_that_reads_a_text_again_reads_it_all() -> None:
    batch = Batch(
        TOKENS, document_ids=DOC, task_labels=np.array([[1], [0]]), decoder_input_ids=TOKENS, decoder_document_ids=DOC
    )
    assert batch.num_tokens == 10


def test_padding_is_not_read() -> None:
    assert Batch(TOKENS).num_tokens == 6
    assert Batch(TOKENS, document_ids=DOC).num_tokens == 5


def test_a_decoder_reads_one_token_per_label() -> None:
    # Three labels; the fourth position is padding, which counts as part of its document.
    batch = Batch(
        TOKENS,
        document_ids=DOC,
        labels=np.array([[6, 1], [1, IGNORE_INDEX]]),
        decoder_input_ids=np.array([[0, 6], [0, 1]]),
        decoder_document_ids=np.array([[0, 0], [0, 0]]),
    )
    assert batch.num_tokens == 5 + 3


def test_losses_are_means_over_what_a_batch_counts() -> None:
    batch = Batch(TOKENS, document_ids=DOC, labels=np.array([[6, IGNORE_INDEX], [9, 4]]))
    assert batch.loss_counts == {"targets": 3, "tokens": 5}
    assert batch._replace(pair_labels=np.array([0, 1])).loss_counts == {"targets": 3, "tokens": 5, "pairs": 2}


def test_a_bidirectional_lm_has_two_labels_per_position() -> None:
    labels = np.array(
        [
            [[6, 7, IGNORE_INDEX], [IGNORE_INDEX, 5, 6]],
            [[9, IGNORE_INDEX, IGNORE_INDEX], [IGNORE_INDEX, 8, IGNORE_INDEX]],
        ]
    )
    assert Batch(TOKENS, document_ids=DOC, labels=labels).num_targets == 6


def test_tensors_hold_the_same_numbers_in_types_that_torch_indexes_with() -> None:
    batch = Batch(TOKENS, document_ids=DOC, task_labels=np.array([0.5, 1.0], np.float32)).to(torch.device("cpu"))
    assert batch.input_ids.tolist() == TOKENS.tolist()
    assert batch.document_ids.tolist() == DOC.tolist()
    assert batch.input_ids.dtype == batch.document_ids.dtype == torch.int64
    assert batch.task_labels.dtype == torch.float32
    assert batch.labels is None
    assert batch.num_tokens == 5
    assert batch._replace(document_ids=None).num_tokens == 6
