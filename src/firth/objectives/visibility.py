"""Who may see whom: one integer per token.

`i` sees `j` when both are in the same document and `rank[j] <= rank[i]`. B rows, L places.
"""

from __future__ import annotations

import numpy as np

from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import is_document_start, stable_argsort


def attention_rank(order_BL: np.ndarray, context_BL: np.ndarray | int) -> np.ndarray:
    """The rank of places that are predicted in some order, when the first `context` of a document come free.

    >>> attention_rank(np.array([0, 1, 2, 3]), 1), attention_rank(np.array([0, 1, 2, 3]), 3)
    (array([0, 1, 2, 3]), array([0, 0, 0, 1]))
    """
    return np.maximum(order_BL - context_BL + 1, 0)


def document_lengths(doc_BL: np.ndarray, counted_BL: np.ndarray | None = None) -> np.ndarray:
    """How many places the document of each place has; with `of`, how many of these."""
    B, L = doc_BL.shape
    id_BL = (doc_BL + 1) + (L + 1) * np.arange(B)[:, None]
    counted = id_BL.ravel() if counted_BL is None else id_BL[counted_BL]
    return np.bincount(counted, minlength=B * (L + 1))[id_BL]


def broadcast_document_start(u_BL: np.ndarray, doc_BL: np.ndarray) -> np.ndarray:
    """One draw for each document: the one that falls on its first place."""
    first_BL = np.maximum.accumulate(np.where(is_document_start(doc_BL), np.arange(doc_BL.shape[1]), 0), 1)
    return np.take_along_axis(u_BL, first_BL, 1)


def sample_prefix_lengths(doc_BL: np.ndarray, rng: CounterRNG) -> np.ndarray:
    """For each place how long the prefix of its document is: any length that leaves something to predict."""
    u_BL = broadcast_document_start(rng.uniform("prefix", doc_BL.shape[1]), doc_BL)
    return 1 + (u_BL * np.maximum(document_lengths(doc_BL) - 1, 0)).astype(np.int64)


def sample_permutation_ranks(target_BL: np.ndarray, rng: CounterRNG) -> np.ndarray:
    """Ranks for permutation LM: 0 for what is read freely, then the targets of the row in random order."""
    B, L = target_BL.shape
    key_BL = np.where(target_BL, rng.uniform("order", L), np.float32(2))
    order_BL = stable_argsort(key_BL)
    place_BL = np.empty_like(order_BL)
    np.put_along_axis(place_BL, order_BL, np.broadcast_to(np.arange(1, L + 1), (B, L)), 1)
    return np.where(target_BL, place_BL, 0)


def visibility_matrix(doc_L: np.ndarray | None, rank_L: np.ndarray, strict: bool = False) -> np.ndarray:
    """Sight written out for one row: [i, j] is whether i sees j; `strict` for a query, which does not see itself."""
    sees = rank_L[None, :] < rank_L[:, None] if strict else rank_L[None, :] <= rank_L[:, None]
    return sees if doc_L is None else sees & (doc_L[:, None] == doc_L[None, :])
