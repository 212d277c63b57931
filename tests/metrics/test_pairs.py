"""Comparisons, by hand, against a plain search, and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import label_ranking_average_precision_score
from torchmetrics.functional.retrieval import retrieval_reciprocal_rank

from firth.core.errors import UserError
from firth.metrics import accuracy_by_group, analogy_correct, best_threshold, minimal_pair_correct, pairs
from firth.metrics.pairs import random_retrieval_scores, retrieval_ranks, retrieval_scores


def test_a_tie_is_wrong() -> None:
    hits = minimal_pair_correct([(-1.0, -2.0), (-3.0, -3.0), (-5.0, -4.0), (float("nan"), -1.0)])
    assert hits.tolist() == [True, False, False, False]


def test_by_group() -> None:
    assert accuracy_by_group([True, True, False, None], ["b", "a", "b", "c"]) == {"b": 0.5, "a": 1.0}
    with pytest.raises(UserError, match="1 predictions for 2 references"):
        accuracy_by_group([True], ["a", "b"])


def test_analogies_of_unknown_words_are_not_asked() -> None:
    assert analogy_correct(["queen", None, "Rome"], ["queen", "x", "Paris"]) == [True, None, False]


def test_retrieval_by_hand() -> None:
    # A's second vector is nearer to B's first than to its own; B's vectors both find theirs.
    scores = retrieval_scores([[1, 0], [3, 2.9]], [[1, 0.2], [0, 7]])
    assert scores == pytest.approx(
        {
            "precision_at_1": 3 / 4,
            "precision_at_1_forward": 1 / 2,
            "precision_at_1_backward": 1,
            "mrr": (1 + 1 / 2 + 1 + 1) / 4,
            "mrr_forward": 3 / 4,
            "mrr_backward": 1,
        }
    )


def test_vectors_that_are_all_alike_find_nothing() -> None:
    scores = retrieval_scores(np.ones((4, 3)), np.ones((4, 3)))
    assert scores["precision_at_1"] == 0
    assert scores["mrr"] == 1 / 4
    assert retrieval_scores(np.zeros((4, 3)), np.ones((4, 3)))["mrr"] == 1 / 4


def test_a_text_of_several_pairs_is_found_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions with one answer, and a question with two: neither answer is a mistake for the other."""
    texts = [("q1", "yes"), ("q2", "yes"), ("q3", "no"), ("q3", "never"), ("q4", "so")]
    a = np.array([[1, 0, 0], [1, 0.1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=float)
    b = np.array([[1, 0, 0.1], [1, 0, 0.1], [0, 1, 0], [0, 1, 0.2], [1, 0, 0]], dtype=float)
    monkeypatch.setattr(pairs, "RANK_BLOCK_ROWS", 2)
    there, back = retrieval_ranks(a, b, texts)
    assert there.tolist() == [2, 2, 1, 1, 4], "`so` is nearer to q1 and q2, and all others are as near to q4"
    assert back.tolist() == [1, 1, 1, 1, 4]
    chance = random_retrieval_scores(texts)
    assert chance["precision_at_1_forward"] == pytest.approx((1 / 4 + 1 / 4 + 1 / 3 + 1 / 3 + 1 / 4) / 5)
    assert chance["mrr_backward"] == pytest.approx((2 * (1 + 1 / 2 + 1 / 3) / 3 + 3 * (25 / 12) / 4) / 5)


def test_a_vector_of_zeros_ranks_last() -> None:
    a = np.eye(4) + 0.1
    b = np.concatenate([a[:3], np.zeros((1, 4))])  # the last partner has no known word
    scores = retrieval_scores(a, b)
    assert scores["precision_at_1_forward"] == scores["precision_at_1_backward"] == 0.75
    assert scores["mrr_forward"] == scores["mrr_backward"] == (3 + 1 / 4) / 4


def test_retrieval_as_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a_ND = rng.normal(size=(25, 6))
    b_ND = a_ND + rng.normal(size=(25, 6))
    whole = retrieval_scores(a_ND, b_ND)
    monkeypatch.setattr(pairs, "RANK_BLOCK_ROWS", 7)
    assert retrieval_scores(a_ND, b_ND) == pytest.approx(whole, abs=1e-12)

    near_NN = (a_ND @ b_ND.T) / np.linalg.norm(a_ND, axis=1)[:, None] / np.linalg.norm(b_ND, axis=1)
    same_NN = np.eye(25)
    assert whole["mrr_forward"] == pytest.approx(label_ranking_average_precision_score(same_NN, near_NN), abs=1e-9)
    assert whole["mrr_backward"] == pytest.approx(label_ranking_average_precision_score(same_NN, near_NN.T), abs=1e-9)
    # torchmetrics wants probabilities, and counts what is not above 0 as not found: the same order, from 0 to 1.
    one_by_one = [
        float(retrieval_reciprocal_rank(torch.tensor((1 + row) / 2), torch.tensor(right).bool()))
        for row, right in zip(near_NN, same_NN, strict=True)
    ]
    assert whole["mrr_forward"] == pytest.approx(np.mean(one_by_one), abs=1e-7)  # in single precision
    assert whole["precision_at_1_forward"] == np.mean(near_NN.argmax(1) == np.arange(25))
    assert whole["precision_at_1_backward"] == np.mean(near_NN.argmax(0) == np.arange(25))


def test_threshold_by_hand() -> None:
    scores, same = [0.1, 0.4, 0.5, 0.9], [False, False, True, True]
    assert best_threshold(scores, same) == pytest.approx(0.45)
    # All the same, all different: at the lowest, just above the highest.
    assert best_threshold([0.2, 0.3], [True, True]) == 0.2
    assert best_threshold([0.2, 0.3], [False, False]) > 0.3
    with pytest.raises(UserError, match="NaN or Inf"):
        best_threshold([0.1, float("nan")], [True, False])


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=30))
def test_no_threshold_is_better_than_the_best(pairs: list[tuple[float, bool]]) -> None:
    scores, same = map(list, zip(*pairs, strict=True))
    best = np.mean((np.array(scores) >= best_threshold(scores, same)) == np.array(same))
    tried = [np.mean([(s >= t) == y for s, y in pairs]) for t in [*scores, 2.0]]
    assert best == pytest.approx(max(tried), abs=1e-9)
