"""PPMI token embeddings."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from firth.models import get_preset, make_model, ppmi
from firth.models.config import FanInInit, NormalInit
from firth.models.ppmi import (
    CONTEXT_EXPONENT,
    cooccurrence_matrix,
    embedding_std,
    ppmi_matrix,
    ppmi_vectors,
    warm_start_embeddings,
)


def shards(*documents: list[int]) -> SimpleNamespace:
    lengths = [len(d) for d in documents]
    return SimpleNamespace(
        tokens=np.concatenate([np.array(d, dtype=np.uint16) for d in documents]),
        offsets=np.cumsum([0, *lengths]),
        num_documents=len(documents),
    )


def test_counts_fall_with_distance_and_stay_within_documents() -> None:
    counts = cooccurrence_matrix(shards([0, 1, 2], [2, 1]), vocab_size=4, window=2).toarray()
    # document one: 0-1 and 1-2 side by side, 0-2 two apart; document two: 2-1; nothing across (2, 2)
    assert counts.tolist() == [[0, 1, 0.5, 0], [1, 0, 2, 0], [0.5, 2, 0, 0], [0, 0, 0, 0]]


def test_long_corpora_are_sampled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other chunk of four tokens; no pair crosses the border of two chunks."""
    monkeypatch.setattr(ppmi, "MAX_COUNTED_TOKENS", 10)
    monkeypatch.setattr(ppmi, "SAMPLE_CHUNK_TOKENS", 4)
    counts = cooccurrence_matrix(shards(list(range(20))), vocab_size=20, window=1).toarray()
    assert sorted(zip(*np.nonzero(np.triu(counts)), strict=True)) == [
        (i, i + 1) for first in (0, 8, 16) for i in range(first, first + 3)
    ]


def test_tokens_without_cooccurrences_get_random_vectors() -> None:
    model = make_model(replace(get_preset("bert-tiny"), vocab_size=40, dim=8, num_heads=2))
    before = model.embed.tokens.weight.clone()
    warm_start_embeddings(model, shards([5], [6], [7]))  # type: ignore[arg-type]
    assert torch.equal(model.embed.tokens.weight, before)


def test_unused_special_tokens_get_distinct_vectors() -> None:
    """T5's sentinels: equal initial vectors take many steps to separate."""
    text = np.random.default_rng(0).integers(0, 30, 2000).tolist()
    vectors = ppmi_vectors(shards(text), vocab_size=40, dim=16)  # type: ignore[arg-type]
    of_marks = vectors[30:]
    alike = np.corrcoef(of_marks)[np.triu_indices(10, 1)]
    assert np.abs(alike).max() < 0.9
    assert 0.5 < of_marks.std() / vectors[:30].std() < 2


def test_ppmi_by_hand() -> None:
    counts = cooccurrence_matrix(shards([0, 1], [0, 1], [2, 3]), vocab_size=4, window=1)
    found = ppmi_matrix(counts).toarray()
    # 0 meets only 1: p(1|0) = 1, and 1 has 2^.75 of the smoothed context counts
    share = 2**CONTEXT_EXPONENT / (2 * 2**CONTEXT_EXPONENT + 2)
    assert found[0, 1] == pytest.approx(math.log(1 / share), rel=1e-5)
    assert found[2, 3] == pytest.approx(math.log((2 * 2**CONTEXT_EXPONENT + 2) / 1), rel=1e-5)
    assert (found >= 0).all()


def test_tokens_with_the_same_contexts_are_similar() -> None:
    draw = np.random.default_rng(0)
    # 0 and 1 stand among 4..7, 2 and 3 among 8..11
    documents = [[int(draw.integers(4, 8)), int(draw.integers(0, 2)), int(draw.integers(4, 8))] for _ in range(300)] + [
        [int(draw.integers(8, 12)), int(draw.integers(2, 4)), int(draw.integers(8, 12))] for _ in range(300)
    ]
    vectors = ppmi_vectors(shards(*documents), vocab_size=12, dim=4)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near = unit @ unit.T
    assert near[0, 1] > 0.8
    assert near[2, 3] > 0.8
    assert near[0, 2] < 0.3
    assert vectors.std() == pytest.approx(1, abs=1e-3)


def test_embeddings_are_reproducible() -> None:
    text = shards([5, 6, 7, 8, 9] * 20, [9, 7, 5] * 10)
    assert ppmi_vectors(text, vocab_size=10, dim=16).shape == (10, 16)  # type: ignore[arg-type]
    models = [make_model(replace(get_preset("bert-tiny"), vocab_size=40, dim=8, num_heads=2)) for _ in range(2)]
    for model in models:
        warm_start_embeddings(model, text)  # type: ignore[arg-type]
    first, second = (m.embed.tokens.weight for m in models)
    assert torch.equal(first, second)
    assert first.std().item() == pytest.approx(0.1, rel=0.1)


def test_initial_logits_do_not_grow_with_width() -> None:
    assert embedding_std(NormalInit(0.02), 64) == embedding_std(NormalInit(0.02), 128) == pytest.approx(0.1)
    assert embedding_std(NormalInit(0.02), 512) * 512**0.5 == pytest.approx(0.1 * 128**0.5)
    assert embedding_std(NormalInit(0.02), 2**14) == 0.02
    assert embedding_std(FanInInit(), 512) == 1.0
