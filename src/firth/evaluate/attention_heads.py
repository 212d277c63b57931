"""What each attention head does: a small picture, a name, its entropy and its distance.

Heads specialise, and many do one simple thing (Clark et al. 2019, "What Does BERT Look At?", section 3): they attend to
the previous or the next token, to separators, or broadly to all. A head is named after the pattern with most of its
weight:

    previous token, next token, same token    the mean weight of the key at distance -1, +1, 0
    first token                               of the first key, other than for the first query
    separator                                 of special tokens and punctuation after the first key
    same word                                 of other positions with the same token, over the queries that have one
    aligned                                   (cross-attention) of the keys at the same relative position
    broad                                     entropy above 90% of that of equal weights

A pattern needs `MIN_SHARE` of the weight; a head without one has no name. Entropy is the mean over queries, in nats;
distance is the mean of |query - key| under the weights.

The attention mask is read off the weights: a key that no head of a layer gives any weight is masked.

L layers, H heads, T queries, S keys.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from firth.evaluate.attention import attend_to_text, attention_inputs, check_has_attention
from firth.generate.decode_state import require_tokenizer
from firth.models import Model

MIN_SHARE = 0.4  # of a head's weight that a pattern needs to name it
BROAD_ENTROPY = 0.9  # of the entropy of equal weights
ALIGNED_WIDTH = 0.1  # relative distance from the diagonal that counts as aligned
SPACE_MARKS = " \u2581\u0120"  # a space at the beginning of a token, as tokenizers write it


class HeadSummary(NamedTuple):
    """What a head does: the name of its pattern ("" for none), the pattern's share of the weight, and two means."""

    name: str
    share: float
    entropy: float
    distance: float | None  # None: cross-attention


class LayerMask(NamedTuple):
    """The attention mask that some layers share."""

    name: str
    layers: list[int]
    mask: np.ndarray  # (T, S) bool


class HeadKind(NamedTuple):
    """All heads of one kind of attention: encoder, decoder or cross."""

    summaries: list[list[HeadSummary]]  # by layer and head
    pictures: np.ndarray  # (L, H, rows, columns): the largest weight of each cell
    masks: list[LayerMask]


class HeadOverview(NamedTuple):
    """Tokens of a text and of its target, and all heads by kind."""

    tokens: list[str]
    target_tokens: list[str]
    kinds: dict[str, HeadKind]


def overview_heads(
    model: Model, text: str, target: str = "", max_cells: int = 24, permutation: int | None = None
) -> HeadOverview:
    """Run the model over a text and describe every head; pictures have at most `max_cells` rows and columns.

    `permutation` numbers a random order of attention, for XLNet.
    """
    check_has_attention(model)
    tokenizer = require_tokenizer(model)
    ids, target_ids = attention_inputs(model, text, target)
    found = attend_to_text(model, ids, target_ids, bool(target), permutation)
    special = set(tokenizer.vocab.special_ids)
    tokens, target_tokens = ([str(tokenizer.backend.id_to_token(i)) for i in row] for row in (ids, target_ids))
    separators, target_separators = (
        np.array([i in special or is_punctuation(token) for i, token in zip(row, names, strict=True)])
        for row, names in ((ids, tokens), (target_ids, target_tokens))
    )
    kinds = {}
    for kind, layers in found.weights.items():
        weights = [layer[0].float().cpu().numpy() for layer in layers]
        names, is_separator = (
            (target_tokens, target_separators) if kind == "decoder" and target_ids else (tokens, separators)
        )
        kinds[kind] = HeadKind(
            [[summarize_head(head, names, is_separator, kind == "cross") for head in layer] for layer in weights],
            np.stack([[shrink(head, max_cells) for head in layer] for layer in weights]),
            group_masks([np.asarray((layer > 0).any(0)) for layer in weights]),
        )
    return HeadOverview(tokens, target_tokens if target else [], kinds)


def is_punctuation(token: str) -> bool:
    """
    >>> is_punctuation("."), is_punctuation("\u2581,"), is_punctuation("\u2581"), is_punctuation("a.")
    (True, True, False, False)
    """
    marks = token.strip(SPACE_MARKS)
    return bool(marks) and all(unicodedata.category(c).startswith("P") for c in marks)


def summarize_head(
    weights_TS: np.ndarray, tokens: Sequence[str], is_separator_S: np.ndarray, is_cross: bool
) -> HeadSummary:
    """Name one head; `tokens` are those of the keys."""
    T, S = weights_TS.shape
    entropy_T = -(weights_TS * np.log(np.maximum(weights_TS, 1e-12))).sum(1)
    query_T1, key_S = np.arange(T)[:, None], np.arange(S)
    separator = float(weights_TS[:, 1:][:, is_separator_S[1:]].sum(1).mean())
    shares = {"separator": separator, "first token": float(weights_TS[1:, 0].mean()) if T > 1 else 0.0}
    if is_cross:
        near_TS = np.abs(query_T1 / max(T - 1, 1) - key_S / max(S - 1, 1)) <= ALIGNED_WIDTH
        shares["aligned"] = float((weights_TS * near_TS).sum(1).mean())
        distance = None
    else:
        for name, offset in (("previous token", -1), ("same token", 0), ("next token", 1)):
            diagonal = np.diagonal(weights_TS, offset)
            shares[name] = float(diagonal.mean()) if len(diagonal) else 0.0
        names = np.array([token.strip(SPACE_MARKS).lower() for token in tokens])
        same_TS = (names[:, None] == names) & (query_T1 != key_S) & ~is_separator_S
        has_same = same_TS.any(1)
        shares["same word"] = float((weights_TS * same_TS).sum(1)[has_same].mean()) if has_same.any() else 0.0
        distance = float((weights_TS * np.abs(query_T1 - key_S)).sum(1).mean())
    name = max(shares, key=shares.__getitem__)
    num_visible_T = (weights_TS > 0).sum(1)
    open_T = num_visible_T > 1
    evenness = float((entropy_T[open_T] / np.log(num_visible_T[open_T])).mean()) if open_T.any() else 0.0
    if shares[name] < MIN_SHARE:
        name, share = ("broad", evenness) if evenness >= BROAD_ENTROPY else ("", shares[name])
    else:
        share = shares[name]
    return HeadSummary(name, share, float(entropy_T.mean()), distance)


def shrink(weights_TS: np.ndarray, max_cells: int) -> np.ndarray:
    """Return the weights with at most `max_cells` rows and columns; a cell has the largest weight in it.

    >>> shrink(np.array([[1.0, 0, 0, 0.5], [0, 0.2, 0, 0]]), 2)
    array([[1. , 0.5]])
    """
    size = -(-max(weights_TS.shape) // max_cells)
    rows, columns = (-(-n // size) for n in weights_TS.shape)
    padded = np.zeros((rows * size, columns * size))
    padded[: weights_TS.shape[0], : weights_TS.shape[1]] = weights_TS
    return padded.reshape(rows, size, columns, size).max((1, 3))


def group_masks(masks: Sequence[np.ndarray]) -> list[LayerMask]:
    """Group the layers that have the same mask, in order of their first layer."""
    keys = [mask.tobytes() for mask in masks]
    order = sorted(range(len(masks)), key=lambda i: (keys.index(keys[i]), i))
    groups = [list(group) for _, group in groupby(order, key=lambda i: keys[i])]
    return [LayerMask(name_mask(masks[layers[0]]), layers, masks[layers[0]]) for layers in groups]


def name_mask(mask_TS: np.ndarray) -> str:
    """Name a mask by its form.

    >>> [name_mask(np.array(m, bool)) for m in ([[1, 1], [1, 1]], [[1, 0], [1, 1]])]
    ['full', 'causal']
    >>> name_mask(np.abs(np.subtract.outer(range(5), range(5))) <= 1)
    'window: 1 token to each side'
    >>> name_mask(np.array([[1, 1, 0], [1, 1, 0], [1, 1, 1]], bool))
    'prefix of 2, then causal'
    >>> name_mask(np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]], bool))  # in the order 2, 0, 1
    'permutation'
    """
    if mask_TS.all():
        return "full"
    T, S = mask_TS.shape
    if T == S:
        query, key = np.indices((T, S))
        causal = key <= query
        if (mask_TS == causal).all():
            return "causal"
        distance = int(np.abs(query - key)[mask_TS].max(initial=0))
        noun = "token" if distance == 1 else "tokens"
        if (mask_TS == (np.abs(query - key) <= distance)).all():
            return f"window: {distance} {noun} to each side"
        if (mask_TS == (causal & (query - key <= distance))).all():
            return f"causal window: {distance} {noun} back"
        prefix = int(mask_TS[0].sum())
        if (mask_TS == (causal | (key < prefix))).all():
            return f"prefix of {prefix}, then causal"
        # In a permutation a token sees as many tokens as its rank says, and those of no higher rank.
        rank = mask_TS.sum(1)
        if (mask_TS == (rank[None, :] <= rank[:, None])).all():
            return "permutation"
    return "other"
