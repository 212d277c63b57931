"""Metrics of comparisons, from 0 to 1: minimal pairs, analogies, retrieval, and similarity thresholds.

N examples, M rows of a block, D dimensions of a vector.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Sequence

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


def retrieval_ranks(
    vectors_a: ArrayLike, vectors_b: ArrayLike, texts: Sequence[Sequence[Hashable]] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two (N,) arrays of ranks from 1: of B's vector i for the query A i, and of A's vector i for the query B i.

    `texts` are the two texts of each pair. A text of several pairs is one key, and one that is right for all of its
    partners: where many questions have one answer, it is found for each of them. Default: all texts differ.
    """
    a_ND, b_ND = _normalize_rows(vectors_a), _normalize_rows(vectors_b)
    check_same_length(a_ND, b_ND)
    a_N, b_N = _number_texts(texts, len(a_ND))
    return _partner_ranks(a_ND, b_ND, a_N, b_N), _partner_ranks(b_ND, a_ND, b_N, a_N)


def random_retrieval_scores(texts: Sequence[Sequence[Hashable]]) -> dict[str, float]:
    """Return the expected scores of random vectors, which put the partner at every rank with the same probability.

    >>> random_retrieval_scores([("a", "x"), ("b", "x"), ("c", "y")])["precision_at_1_forward"]
    0.5
    """
    a_N, b_N = _number_texts(texts, len(texts))
    sizes = {"_forward": _num_ranks(a_N, b_N), "_backward": _num_ranks(b_N, a_N)}
    sizes = {"": np.concatenate([*sizes.values()]), **sizes}
    harmonic = np.cumsum(1 / np.arange(1, len(texts) + 1))
    precision = {f"precision_at_1{suffix}": float(np.mean(1 / size_N)) for suffix, size_N in sizes.items()}
    return precision | {f"mrr{suffix}": float(np.mean(harmonic[n - 1] / n)) for suffix, n in sizes.items()}


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


def _number_texts(
    texts: Sequence[Sequence[Hashable]] | None, num_pairs: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two (N,) arrays: each side's texts by number, equal for equal texts."""
    if texts is None:
        return np.arange(num_pairs), np.arange(num_pairs)
    numbers: tuple[dict[Hashable, int], ...] = ({}, {})
    number_N2 = [[known.setdefault(x, len(known)) for known, x in zip(numbers, pair, strict=True)] for pair in texts]
    a_N, b_N = np.array(number_N2, dtype=np.int64).T
    return a_N, b_N


def _find_partners(query_N: NDArray[np.int64], key_N: NDArray[np.int64]) -> dict[int, set[int]]:
    """Return the keys that are right for each query."""
    partners: dict[int, set[int]] = defaultdict(set)
    for query, key in zip(query_N.tolist(), key_N.tolist(), strict=True):
        partners[query].add(key)
    return partners


def _num_ranks(query_N: NDArray[np.int64], key_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """(N,) ranks that a key can have for its query: among those that are not right for it."""
    partners, num_keys = _find_partners(query_N, key_N), len(np.unique(key_N))
    return np.array([num_keys - len(partners[query]) + 1 for query in query_N.tolist()])


def _partner_ranks(
    query_ND: NDArray[np.float64], key_ND: NDArray[np.float64], query_N: NDArray[np.int64], key_N: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(N,) rank, from 1, of key i for query i; computed in blocks to avoid an (N, N) array. K distinct keys."""
    key_KD = key_ND[np.unique(key_N, return_index=True)[1]]
    partners, ranks = _find_partners(query_N, key_N), []
    for start in range(0, len(query_ND), RANK_BLOCK_ROWS):
        rows = slice(start, start + RANK_BLOCK_ROWS)
        similarity_MK = query_ND[rows] @ key_KD.T
        right_M = similarity_MK[np.arange(len(similarity_MK)), key_N[rows]]
        for similarity_K, query in zip(similarity_MK, query_N[rows].tolist(), strict=True):
            similarity_K[[*partners[query]]] = -np.inf  # another right key is not before this one
        rank_M = 1 + (similarity_MK >= right_M[:, None]).sum(1)  # a key that is NaN is behind the right one
        ranks.append(np.where(np.isnan(right_M), len(key_KD), rank_M))
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
