"""Attention masks as one integer per token, the attention rank.

Position i attends to position j where both are in the same document and `rank[j] <= rank[i]`. This one rule covers

    bidirectional   rank 0 everywhere
    causal          rank = position
    prefix LM       rank 0 in the prefix, then 1, 2, 3 ...
    backward        rank = L - 1 - position
    permutation     rank 0 for the context, then a random order of targets and special tokens; a query stream uses `<`

so batches carry (B, L) integers instead of (B, L, L) masks, and attention kernels compare two integers.

Shapes: B rows, L positions.
"""

from __future__ import annotations

import numpy as np

from firth.objectives.counter_rng import CounterRNG
from firth.objectives.noise_mask import is_document_start, stable_argsort


def attention_rank(order_BL: np.ndarray, context_BL: np.ndarray | int) -> np.ndarray:
    """Return the rank of positions that are predicted in `order`, when the first `context` of a document are given.

    >>> attention_rank(np.array([0, 1, 2, 3]), 1), attention_rank(np.array([0, 1, 2, 3]), 3)
    (array([0, 1, 2, 3]), array([0, 0, 0, 1]))
    """
    return np.maximum(order_BL - context_BL + 1, 0)


def document_lengths(doc_BL: np.ndarray, counted_BL: np.ndarray | None = None) -> np.ndarray:
    """Return for each position the length of its document (B, L); with `counted_BL`, the number of these positions."""
    B, L = doc_BL.shape
    id_BL = (doc_BL + 1) + (L + 1) * np.arange(B)[:, None]
    counted = id_BL.ravel() if counted_BL is None else id_BL[counted_BL]
    return np.bincount(counted, minlength=B * (L + 1))[id_BL]


def broadcast_document_start(u_BL: np.ndarray, doc_BL: np.ndarray) -> np.ndarray:
    """Return the value at the start of its document for each position: one random number per document."""
    first_BL = np.maximum.accumulate(np.where(is_document_start(doc_BL), np.arange(doc_BL.shape[1]), 0), 1)
    return np.take_along_axis(u_BL, first_BL, 1)


def sample_prefix_lengths(doc_BL: np.ndarray, rng: CounterRNG) -> np.ndarray:
    """Return for each position a random prefix length of its document, uniform from 1 to its length - 1."""
    u_BL = broadcast_document_start(rng.uniform("prefix", doc_BL.shape[1]), doc_BL)
    return 1 + (u_BL * np.maximum(document_lengths(doc_BL) - 1, 0)).astype(np.int64)


def sample_permutation_ranks(in_order_BL: np.ndarray, rng: CounterRNG) -> np.ndarray:
    """Return ranks for the permutation LM: 0 for the context, then 1, 2, ... for these positions in random order."""
    B, L = in_order_BL.shape
    key_BL = np.where(in_order_BL, rng.uniform("order", L), np.float32(2))
    order_BL = stable_argsort(key_BL)
    rank_BL = np.empty_like(order_BL)
    np.put_along_axis(rank_BL, order_BL, np.broadcast_to(np.arange(1, L + 1), (B, L)), 1)
    return np.where(in_order_BL, rank_BL, 0)


def visibility_matrix(doc_L: np.ndarray | None, rank_L: np.ndarray, strict: bool = False) -> np.ndarray:
    """Return the attention mask of one row (L, L): [i, j] is whether i attends to j; `strict` for a query stream."""
    mask = rank_L[None, :] < rank_L[:, None] if strict else rank_L[None, :] <= rank_L[:, None]
    return mask if doc_L is None else mask & (doc_L[:, None] == doc_L[None, :])
