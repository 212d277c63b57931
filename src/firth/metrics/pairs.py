"""Metrics of comparisons, from 0 to 1: minimal pairs, analogies, retrieval, and similarity thresholds.

N examples, M rows of a block, D dimensions of a vector.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.core.errors import UserError
from firth.metrics.classification import check_same_length

RANK_BLOCK_ROWS = 1024  # rows of the similarity matrix in memory at once


def minimal_pair_correct(scores: ArrayLike) -> NDArray[np.bool_]:
    """(N,) whether the good sentence of each minimal pair (good score, bad score) has the higher score.

    A tie is wrong, since the model has made no choice.
    """
    score_N2 = np.asarray(scores, dtype=np.float64)
    check_same_length(score_N2, score_N2)
    assert score_N2.shape == (len(score_N2), 2), "a pair has two scores"
    return score_N2[:, 0] > score_N2[:, 1]


def analogy_correct(predictions: Sequence[str | None], references: Sequence[str]) -> list[bool | None]:
    """Return whether the fourth word of each analogy is right; None if a word is not in the vocabulary."""
    check_same_length(predictions, references)
    return [None if p is None else p == r for p, r in zip(predictions, references, strict=True)]


def accuracy_by_group(correct: Sequence[bool | None] | NDArray[np.bool_], groups: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of each group in order of first occurrence; None is not counted.

    >>> accuracy_by_group([True, False, True, None], ["verbs", "verbs", "nouns", "nouns"])
    {'verbs': 0.5, 'nouns': 1.0}
    """
    check_same_length(correct, groups)
    by_group: dict[str, list[bool]] = {}
    for hit, group in zip(correct, groups, strict=True):
        if hit is not None:
            by_group.setdefault(group, []).append(bool(hit))
    return {group: statistics.fmean(values) for group, values in by_group.items()}


def retrieval_scores(vectors_a: ArrayLike, vectors_b: ArrayLike) -> dict[str, float]:
    """Return precision at 1 and mean reciprocal rank of retrieving B's vector i for A's vector i, and in reverse.

    Vectors are ranked by cosine similarity. Ties rank before the right vector.
    """
    return scores_from_ranks(*retrieval_ranks(vectors_a, vectors_b))


def retrieval_ranks(vectors_a: ArrayLike, vectors_b: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two (N,) arrays of ranks from 1: of B's vector i for the query A i, and of A's vector i for the query B i."""
    a_ND, b_ND = _normalize_rows(vectors_a), _normalize_rows(vectors_b)
    check_same_length(a_ND, b_ND)
    return _diagonal_ranks(a_ND, b_ND), _diagonal_ranks(b_ND, a_ND)


def scores_from_ranks(forward_N: NDArray[np.int64], backward_N: NDArray[np.int64]) -> dict[str, float]:
    """Return `retrieval_scores` from the ranks."""
    both_N = np.concatenate([forward_N, backward_N])
    ranks = {"": both_N, "_forward": forward_N, "_backward": backward_N}
    precision = {f"precision_at_1{suffix}": float(np.mean(rank_N == 1)) for suffix, rank_N in ranks.items()}
    return precision | {f"mrr{suffix}": float(np.mean(1 / rank_N)) for suffix, rank_N in ranks.items()}


def _normalize_rows(vectors: ArrayLike) -> NDArray[np.float64]:
    """Scale rows to length 1; a zero vector becomes NaN, which ranks last."""
    vector_ND = np.asarray(vectors, dtype=np.float64)
    assert vector_ND.ndim == 2, "one vector for each text"
    with np.errstate(invalid="ignore"):
        return vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)


def _diagonal_ranks(query_ND: NDArray[np.float64], key_ND: NDArray[np.float64]) -> NDArray[np.int64]:
    """(N,) rank, from 1, of key i for query i; computed in blocks to avoid an (N, N) array."""
    ranks = []
    for start in range(0, len(query_ND), RANK_BLOCK_ROWS):
        similarity_MN = query_ND[start : start + RANK_BLOCK_ROWS] @ key_ND.T
        row_M = np.arange(len(similarity_MN))
        right_M = similarity_MN[row_M, start + row_M]
        rank_M = (similarity_MN >= right_M[:, None]).sum(1)  # a key that is NaN is behind the right one
        ranks.append(np.where(np.isnan(right_M), len(key_ND), rank_M))
    return np.concatenate(ranks)


def best_threshold(scores: ArrayLike, is_same: Sequence[bool]) -> float:
    """Return the similarity threshold with the highest accuracy: pairs at or above it count as the same.

    It is midway between two scores, and the lowest of several equally good ones.
    """
    score_N, same_N = np.asarray(scores, dtype=np.float64), np.asarray(is_same, dtype=bool)
    check_same_length(score_N, same_N)
    if not np.isfinite(score_N).all():
        raise UserError("A similarity is NaN or Inf: there is no best threshold.")
    order = np.argsort(score_N, kind="stable")
    score_N, same_N = score_N[order], same_N[order]
    # num_correct[k]: correct pairs if the k lowest scores count as different
    num_correct = np.concatenate([[0], np.cumsum(~same_N)]) + same_N.sum() - np.concatenate([[0], np.cumsum(same_N)])
    possible = np.concatenate([[True], score_N[1:] > score_N[:-1], [True]])
    k = int(np.argmax(np.where(possible, num_correct, -1)))
    if k == 0:
        return float(score_N[0])
    if k == len(score_N):
        return float(np.nextafter(score_N[-1], np.inf))
    below, above = score_N[k - 1], score_N[k]
    middle = (below + above) / 2
    return float(middle if below < middle else above)
