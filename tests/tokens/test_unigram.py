"""Unigram: expected counts and best paths equal those of all segmentations, enumerated."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from firth.tokens.unigram import (
    build_word_lattice,
    count_best_pieces,
    find_seed_pieces,
    prune_pieces,
    pruning_losses,
    run_e_step,
    run_m_step,
    train_unigram_pieces,
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
    want = Counter(piece for word, n in COUNTS.items() for piece in max(all_paths(word, scores))[1] * n)
    assert count_best_pieces(state, words).tolist() == [want[piece] for piece in pieces]


def test_losses_of_pruning_equal_those_of_all_paths() -> None:
    words = build_word_lattice(COUNTS, set("".join(COUNTS)))
    state = find_seed_pieces(words)
    state = run_m_step(state, run_e_step(state, words))
    pieces = names(words, state.pieces)
    scores = dict(zip(pieces, state.pieces.scores.tolist(), strict=True))
    counts = dict(zip(pieces, count_best_pieces(state, words).tolist(), strict=True))
    want, total = dict.fromkeys(pieces, 0.0), sum(counts.values())
    for piece in pieces:
        if len(piece) > 1 and (n := counts[piece]):
            instead = max(all_paths(piece, {other: scores[other] for other in pieces if other != piece}))[1]
            log_p = sum(math.log((counts[other] + n) / (total + n * (len(instead) - 1))) for other in instead)
            want[piece] = n * (math.log(n / total) - log_p)
    assert any(want.values())
    assert pruning_losses(state, words) == pytest.approx(np.array([want[piece] for piece in pieces]))


def test_edges_of_dropped_pieces_go_away() -> None:
    words = build_word_lattice(COUNTS, set("".join(COUNTS)))
    state = find_seed_pieces(words)
    kept = state.keep_pieces(state.pieces.lengths != 2)
    found = [names(words, state.pieces)[i] for i in state.edges.pieces]
    assert [piece for piece in found if len(piece) != 2] == [names(words, kept.pieces)[i] for i in kept.edges.pieces]
    assert kept.edges.degrees.sum() == len(kept.edges.pieces) < len(found)
    starts = np.repeat(np.arange(len(words.letters)), kept.edges.degrees)
    lengths = kept.pieces.lengths[kept.edges.pieces]
    assert [words.text[i : i + n] for i, n in zip(starts, lengths, strict=True)] == [p for p in found if len(p) != 2]


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


def test_excluded_strings_are_no_pieces() -> None:
    alphabet = set("".join(COUNTS))
    pieces = dict(train_unigram_pieces(COUNTS, alphabet, 10))
    assert "▁an" in pieces
    others = dict(train_unigram_pieces(COUNTS, alphabet, 10, excluded={"▁an", "<unk>", "b"}))
    assert "▁an" not in others
    assert len(others) == len(pieces) == 10
    assert alphabet <= others.keys()


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
