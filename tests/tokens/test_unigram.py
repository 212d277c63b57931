"""Unigram: expected counts and best paths equal those of all segmentations, enumerated."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from firth.tokens.unigram import (
    build_word_lattice,
    find_seed_pieces,
    prune_pieces,
    run_e_step,
    run_m_step,
    train_unigram_pieces,
    viterbi_paths,
)

COUNTS = {"▁banana": 3, "▁bandana": 2, "▁an": 7, "▁ban": 1, "▁x": 1}


def all_paths(word: str, scores: dict[str, float]) -> list[tuple[float, list[str]]]:
    found = []
    for n in range(len(word)):
        for cuts in combinations(range(1, len(word)), n):
            pieces = [word[a:b] for a, b in zip((0, *cuts), (*cuts, len(word)), strict=True)]
            if all(piece in scores for piece in pieces):
                found.append((sum(scores[piece] for piece in pieces), pieces))
    return found


def names(words, pieces) -> list[str]:  # type: ignore[no-untyped-def]
    return [words.text[i : i + n] for i, n in zip(pieces.text_offsets.tolist(), pieces.lengths.tolist(), strict=True)]


def test_seeds_are_repeated_and_not_always_part_of_the_same() -> None:
    words = build_word_lattice({"▁cab": 1, "▁cabs": 1, "▁tab": 5}, set("▁cabst"))
    assert set(names(words, find_seed_pieces(words).pieces)) == set("▁cabst") | {"▁cab", "▁tab", "ab"}


def test_expected_counts_equal_those_of_all_paths() -> None:
    words = build_word_lattice(COUNTS, set("".join(COUNTS)))
    state = find_seed_pieces(words)
    pieces = names(words, state.pieces)
    scores = dict(zip(pieces, state.pieces.scores.tolist(), strict=True))
    want: Counter[str] = Counter()
    for word, count in COUNTS.items():
        paths = all_paths(word, scores)
        total = sum(math.exp(score) for score, _ in paths)
        for score, path in paths:
            for piece in path:
                want[piece] += count * math.exp(score) / total  # type: ignore[assignment]
    assert run_e_step(state, words) == pytest.approx(np.array([want[piece] for piece in pieces]))


def test_best_paths_are_the_best_of_all() -> None:
    words = build_word_lattice(COUNTS, set("".join(COUNTS)))
    state = find_seed_pieces(words)
    state = run_m_step(state, run_e_step(state, words))
    pieces = names(words, state.pieces)
    scores = dict(zip(pieces, state.pieces.scores.tolist(), strict=True))
    path = viterbi_paths(state.by_end, state.pieces.scores, np.flatnonzero(words.chars == 0), words.positions)
    got = Counter(pieces[i] for i in path.pieces)
    assert got == Counter(piece for word in COUNTS for piece in max(all_paths(word, scores))[1])


def test_pruning_keeps_characters_and_the_most_useful_pieces() -> None:
    counts = {"▁the": 1000, "▁zebra": 2, "▁there": 10}
    words = build_word_lattice(counts, set("".join(counts)))
    state = find_seed_pieces(words)
    state = run_m_step(state, run_e_step(state, words))
    letters = len(set("".join(counts)))
    assert "▁the" in names(words, prune_pieces(state, words, letters + 1).pieces)
    assert len(prune_pieces(state, words, letters + 1).pieces.text_offsets) == letters + 1


def test_learned_pieces() -> None:
    pieces = dict(train_unigram_pieces(COUNTS, set("".join(COUNTS)) | {"q"}, 10))
    assert len(pieces) == 10
    assert set("▁bandxq") <= pieces.keys()
    assert "▁an" in pieces
    assert pieces["q"] == min(pieces.values())
    assert sum(math.exp(score) for piece, score in pieces.items() if piece != "q") == pytest.approx(1, abs=0.2)


def test_the_order_of_the_words_does_not_matter() -> None:
    backwards = dict(reversed(COUNTS.items()))
    assert train_unigram_pieces(backwards, set("".join(COUNTS)), 14) == train_unigram_pieces(
        COUNTS, set("".join(COUNTS)), 14
    )


def test_long_words_and_characters_that_are_not_in_the_alphabet() -> None:
    counts = {"ab" * 50: 4, "a\0b?ab": 2}
    pieces = dict(train_unigram_pieces(counts, {"a", "b"}, 5))
    assert set("".join(pieces)) == {"a", "b"}
    assert max(map(len, pieces)) > 2
