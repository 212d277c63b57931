"""A map of words in their context: one vector per occurrence and layer, projected to two dimensions.

The vector of an occurrence is the mean hidden state of its tokens. Principal component analysis (PCA) projects the
vectors of a layer onto the two directions with the largest variance; the shares of the variance tell how much of the
picture is true. Two occurrences that lie close to each other may differ in the directions that are not drawn, so
neighbours are those of the whole vectors, by cosine.

N occurrences, D model width, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from firth.core.errors import UserError, quote
from firth.evaluate.embed import all_layer_hidden_states, apply_template, normalize_rows, read_encoding
from firth.evaluate.likelihood import resolve_max_length
from firth.evaluate.predict_input import WORD_PATTERN
from firth.generate.decode_state import eval_mode, require_tokenizer
from firth.models import Model, make_sequence_template
from firth.objectives import Batch

MAX_WORDS = 300  # occurrences on one map
NUM_NEIGHBOURS = 6


class MappedOccurrence(NamedTuple):
    """A word of a text: its characters [start, end)."""

    text: int
    word: str
    start: int
    end: int


class NearOccurrence(NamedTuple):
    occurrence: int
    cosine: float


class LayerMap(NamedTuple):
    """The occurrences in two dimensions, the share of the variance of each, and the neighbours of each occurrence."""

    points: np.ndarray  # (N, 2)
    shares: np.ndarray  # (2,)
    neighbours: list[list[NearOccurrence]]


class WordMap(NamedTuple):
    occurrences: list[MappedOccurrence]
    layers: list[LayerMap]  # 0 is the embedding


def find_mapped_words(texts: Sequence[str], words: Sequence[str] | None) -> list[MappedOccurrence]:
    """Find these words in the texts, in upper or lower case; without `words`, all words but punctuation."""
    wanted = None if words is None else {word.lower() for word in words}
    found = [
        MappedOccurrence(i, match[0], match.start(), match.end())
        for i, text in enumerate(texts)
        for match in WORD_PATTERN.finditer(text)
        if (match[0].lower() in wanted if wanted is not None else any(c.isalnum() for c in match[0]))
    ]
    if not found:
        named = "" if words is None else f": none of {', '.join(map(quote, words[:5]))} occurs"
        raise UserError(f"There is no word to map{named}.")
    if len(found) > MAX_WORDS:
        raise UserError(
            f"{len(found):,} words, and a map shows at most {MAX_WORDS}. Name some words, or give less text."
        )
    return found


def map_words(model: Model, texts: Sequence[str], occurrences: Sequence[MappedOccurrence]) -> WordMap:
    """Map occurrences of words in every layer of a model."""
    vectors = layer_word_vectors(model, texts, occurrences)
    layers: list[LayerMap] = []
    for x_ND in vectors:
        points, shares = project_to_plane(x_ND)
        if layers:  # a component has no sign of its own: keep that of the layer below
            points *= np.where((points * layers[-1].points).sum(0) < 0, -1.0, 1.0)
        layers.append(LayerMap(points, shares, find_neighbours(x_ND)))
    return WordMap(list(occurrences), layers)


@torch.no_grad()
def layer_word_vectors(model: Model, texts: Sequence[str], occurrences: Sequence[MappedOccurrence]) -> list[np.ndarray]:
    """Return the vectors (N, D) of all occurrences, for each layer."""
    tokenizer = require_tokenizer(model)
    template, limit = make_sequence_template(model.config, tokenizer.vocab), resolve_max_length(model, 0)
    rows: dict[int, list[np.ndarray]] = {}
    with eval_mode(model):
        for number, (text, encoding) in enumerate(zip(texts, tokenizer.encode_with_offsets(texts), strict=True)):
            own = [(n, word) for n, word in enumerate(occurrences) if word.text == number]
            if not own:
                continue
            ids, offsets = read_encoding(tokenizer, encoding)
            input_ids, token_types = apply_template(template, ids)
            if len(input_ids) > limit:
                raise UserError(
                    f"Text {number + 1} has {len(input_ids):,} tokens, and the model reads at most {limit:,}."
                )
            batch = Batch(
                np.array([input_ids]),
                document_ids=np.zeros((1, len(input_ids)), np.int64),
                token_type_ids=None if token_types is None else np.array([token_types]),
            ).to(model.embed.tokens.weight.device)
            states = [state[0].float().cpu().numpy() for state in all_layer_hidden_states(model, batch)]
            for n, word in own:
                inside = [i for i, (b, e) in enumerate(offsets) if b < word.end and e > word.start]
                if not inside:
                    raise UserError(f"{quote(word.word)} in {text[:40]!r} has no token.")
                at = [len(template.prefix_ids) + i for i in inside]
                rows[n] = [state[at].mean(0) for state in states]
    return [np.stack([rows[n][layer] for n in range(len(occurrences))]) for layer in range(len(rows[0]))]


def project_to_plane(x_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first two principal components (N, 2), and the share of the variance of each.

    >>> points, shares = project_to_plane(np.array([[0.0, 0, 1], [2, 0, 1], [4, 0, 1]]))
    >>> abs(points[:, 0]).round(3).tolist(), shares.round(3).tolist()
    ([2.0, 0.0, 2.0], [1.0, 0.0])
    """
    centred = (x_ND - x_ND.mean(0)).astype(np.float64)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    points, shares = np.zeros((len(x_ND), 2)), np.zeros(2)
    num = min(2, len(s))
    points[:, :num] = u[:, :num] * s[:num]
    shares[:num] = s[:num] ** 2 / max(float((s**2).sum()), 1e-12)
    return points, shares


def find_neighbours(x_ND: np.ndarray, count: int = NUM_NEIGHBOURS) -> list[list[NearOccurrence]]:
    """Return the nearest other occurrences of each by cosine."""
    unit = normalize_rows(x_ND)
    cosine_NN = unit @ unit.T
    np.fill_diagonal(cosine_NN, -np.inf)
    order = np.argsort(-cosine_NN, axis=1, kind="stable")[:, : min(count, len(x_ND) - 1)]
    return [[NearOccurrence(int(j), float(cosine_NN[i, j])) for j in row] for i, row in enumerate(order)]
