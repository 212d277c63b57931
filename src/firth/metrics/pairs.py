"""Comparisons: the better of two sentences, the nearest of many vectors, the same meaning or not; from 0 to 1."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firth.core.errors import UserError
from firth.metrics.classification import check_same_length

# N examples, M rows of one block, D numbers in a vector.
RANK_BLOCK_ROWS = 1024


def minimal_pair_correct(scores: ArrayLike) -> NDArray[np.bool_]:
    """For each minimal pair (score of the good sentence, of the bad one), whether the good one wins.

    A tie is wrong: a model that sees no difference has not chosen.
    """
    score_N2 = np.asarray(scores, dtype=np.float64)
    check_same_length(score_N2, score_N2)
    assert score_N2.shape == (len(score_N2), 2), "a pair has two scores"
    return score_N2[:, 0] > score_N2[:, 1]


def analogy_correct(predictions: Sequence[str | None], references: Sequence[str]) -> list[bool | None]:
    """For each analogy, whether its fourth word was found; None where the model does not know the words."""
    check_same_length(predictions, references)
    return [None if p is None else p == r for p, r in zip(predictions, references, strict=True)]


def accuracy_by_group(correct: Sequence[bool | None] | NDArray[np.bool_], groups: Sequence[str]) -> dict[str, float]:
    """The accuracy of each group, in the order in which they come; None counts as not asked.

    >>> accuracy_by_group([True, False, True, None], ["verbs", "verbs", "nouns", "nouns"])
    {'verbs': 0.5, 'nouns': 1.0}
    """
    check_same_length(correct, groups)
    found: dict[str, list[bool]] = {}
    for hit, group in zip(correct, groups, strict=True):
        if hit is not None:
            found.setdefault(group, []).append(bool(hit))
    return {group: statistics.fmean(values) for group, values in found.items()}


def retrieval_scores(vectors_a: ArrayLike, vectors_b: ArrayLike) -> dict[str, float]:
    """How often the vector of B that is nearest (by cosine) to vector i of A is B's i-th, and the other way round.

    `mrr` is the mean of 1 / the rank of the right one. Whatever is just as near as the right one stands before it.
    """
    return scores_from_ranks(*retrieval_ranks(vectors_a, vectors_b))


def retrieval_ranks(vectors_a: ArrayLike, vectors_b: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(N,) twice, from 1: the rank of B's i-th vector among those near A's i-th, and the other way round."""
    a_ND, b_ND = _normalize_rows(vectors_a), _normalize_rows(vectors_b)
    check_same_length(a_ND, b_ND)
    return _diagonal_ranks(a_ND, b_ND), _diagonal_ranks(b_ND, a_ND)


def scores_from_ranks(forward_N: NDArray[np.int64], backward_N: NDArray[np.int64]) -> dict[str, float]:
    """What `retrieval_scores` says, from the ranks."""
    both_N = np.concatenate([forward_N, backward_N])
    ranks = {"": both_N, "_forward": forward_N, "_backward": backward_N}
    first = {f"precision_at_1{way}": float(np.mean(rank_N == 1)) for way, rank_N in ranks.items()}
    return first | {f"mrr{way}": float(np.mean(1 / rank_N)) for way, rank_N in ranks.items()}


def _normalize_rows(vectors: ArrayLike) -> NDArray[np.float64]:
    """Vectors of length 1; a vector of zeros points nowhere (nan), so it is found last."""
    vector_ND = np.asarray(vectors, dtype=np.float64)
    assert vector_ND.ndim == 2, "one vector for each text"
    with np.errstate(invalid="ignore"):
        return vector_ND / np.linalg.norm(vector_ND, axis=1, keepdims=True)


def _diagonal_ranks(query_ND: NDArray[np.float64], key_ND: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rank, from 1, of key i for query i; block by block, so that no (N, N) array is held."""
    ranks = []
    for start in range(0, len(query_ND), RANK_BLOCK_ROWS):
        near_MN = query_ND[start : start + RANK_BLOCK_ROWS] @ key_ND.T
        row_M = np.arange(len(near_MN))
        right_M = near_MN[row_M, start + row_M]
        ranks.append(len(key_ND) - (near_MN < right_M[:, None]).sum(1))
    return np.concatenate(ranks)


def best_threshold(scores: ArrayLike, is_same: Sequence[bool]) -> float:
    """The threshold on similarity that best tells `is_same` from different: same means at or above it.

    It lies midway between two scores, and is the lowest of equally good ones.
    """
    score_N, same_N = np.asarray(scores, dtype=np.float64), np.asarray(is_same, dtype=bool)
    check_same_length(score_N, same_N)
    if not np.isfinite(score_N).all():
        raise UserError("Some similarity is not a number: there is no best threshold.")
    order = np.argsort(score_N, kind="stable")
    score_N, same_N = score_N[order], same_N[order]
    # right[k]: how many are right if the k lowest are called different.
    right = np.concatenate([[0], np.cumsum(~same_N)]) + same_N.sum() - np.concatenate([[0], np.cumsum(same_N)])
    possible = np.concatenate([[True], score_N[1:] > score_N[:-1], [True]])
    k = int(np.argmax(np.where(possible, right, -1)))
    if k == 0:
        return float(score_N[0])
    if k == len(score_N):
        return float(np.nextafter(score_N[-1], np.inf))
    below, above = score_N[k - 1], score_N[k]
    middle = (below + above) / 2
    return float(middle if below < middle else above)


def threshold_accuracy(
    train_scores: ArrayLike, train_is_same: Sequence[bool], scores: ArrayLike, is_same: Sequence[bool]
) -> tuple[float, float]:
    """The accuracy on one set of the threshold that is best on another (train), and that threshold."""
    threshold = best_threshold(train_scores, train_is_same)
    score_N = np.asarray(scores, dtype=np.float64)
    check_same_length(score_N, is_same)
    return float(np.mean((score_N >= threshold) == np.asarray(is_same, dtype=bool))), threshold
