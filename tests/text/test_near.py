"""Near duplicates are found, others are left alone, and memory is bounded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from firth.errors import UserError
from firth.text import near as module
from firth.text.near import NearDuplicates, signature
from firth.text.shingles import runs, word_numbers

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from near_duplicates import measure, plant


def test_words_by_hand() -> None:
    one, two = word_numbers("The Heron, the heron."), word_numbers("heron the")
    assert one.tolist() == [two[1], two[0], two[1], two[0]]
    assert len(word_numbers("我喜欢你 and you")) == 6
    assert len(word_numbers("हिन्दी में")) == 2
    assert len(word_numbers(" ,.!\n")) == len(word_numbers("")) == 0
    assert word_numbers("a" * 200).tolist() != word_numbers("a" * 201).tolist()


def test_runs_by_hand() -> None:
    words = word_numbers("a b c d a b c")
    three = runs(words, 3)
    assert len(three) == 5
    assert three[0] == three[4]
    assert len(set(three.tolist())) == 4
    assert len(runs(words, 9)) == 1
    assert len(runs(words[:0], 3)) == 0


def test_a_signature_stays_the_same_in_every_version() -> None:
    assert signature("the quick brown fox jumps over the lazy dog")[:6].tolist() == [145, 132, 222, 97, 225, 67]


def test_signatures_agree_as_often_as_texts_are_alike() -> None:
    planted = plant(200, 300, clear=False)
    originals, copies = planted.texts[:200], planted.texts[200:]
    marks = np.stack([signature(text) for text in originals])
    alike = np.array([(marks == signature(copy)).mean(axis=1).max() for copy in copies])
    assert np.abs(alike - planted.likeness[200:]).mean() < 0.04


def test_planted_duplicates_are_found() -> None:
    found = measure(NearDuplicates().seen, plant(600, 150))
    assert found["precision"] >= 0.95
    assert found["recall"] >= 0.95


def test_the_first_stays() -> None:
    near = NearDuplicates()
    text = " ".join(f"word{i}" for i in range(100))
    assert [near.seen(t) for t in (text, text.upper() + "!", text + " more", "another text", "")] == [0, 1, 1, 0, 0]
    assert near.duplicates == 2
    assert [near.seen(t) for t in ("...", "!!!", "...")] == [False, False, True]  # without words: only itself


def test_tables_grow_and_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 16)
    texts = [" ".join(f"{i}w{j}" for j in range(20)) for i in range(500)]
    near = NearDuplicates()
    assert not any(near.seen(text) for text in texts)
    assert near.size == 512
    assert all(near.seen(text) for text in texts)
    assert near.forgotten == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 16)
    texts = [" ".join(f"{i}w{j}" for j in range(20)) for i in range(500)]
    near = NearDuplicates(max_memory=64 * module.BYTES_PER_TEXT)
    assert not any(near.seen(text) for text in texts)
    assert near.signatures.nbytes + near.tables.nbytes <= 64 * module.BYTES_PER_TEXT
    assert near.forgotten == 500 - 64
    assert all(near.seen(text) for text in texts[-50:])
    assert not near.seen(texts[0])


def test_threshold() -> None:
    with pytest.raises(UserError, match=r"must be from 0\.5 to 1"):
        NearDuplicates(threshold=0.2)
    words = [f"w{i}" for i in range(200)]
    copy = " ".join([*words[:180], *(f"x{i}" for i in range(20))])  # 176 of 216 runs: 0.81
    for threshold, expected in ((0.6, True), (0.95, False)):
        near = NearDuplicates(threshold)
        assert not near.seen(" ".join(words))
        assert near.seen(copy) is expected
