"""Near duplicates are found, others are left alone, and memory is bounded."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.text import minhash as module
from firth.text.minhash import MinHashIndex, minhash_signature
from firth.text.shingles import hash_word_ngrams, hash_words

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from near_duplicates import measure, plant_duplicates


def test_words_by_hand() -> None:
    one, two = hash_words("The Heron, the heron."), hash_words("heron the")
    assert one.tolist() == [two[1], two[0], two[1], two[0]]
    assert len(hash_words("我喜欢你 and you")) == 6
    assert len(hash_words("हिन्दी में")) == 2
    assert len(hash_words(" ,.!\n")) == len(hash_words("")) == 0
    assert hash_words("a" * 200).tolist() != hash_words("a" * 201).tolist()


def test_runs_by_hand() -> None:
    words = hash_words("a b c d a b c")
    three = hash_word_ngrams(words, 3)
    assert len(three) == 5
    assert three[0] == three[4]
    assert len(set(three.tolist())) == 4
    assert len(hash_word_ngrams(words, 9)) == 1
    assert len(hash_word_ngrams(words[:0], 3)) == 0


def test_a_signature_stays_the_same_in_every_version() -> None:
    assert minhash_signature("the quick brown fox jumps over the lazy dog")[:6].tolist() == [145, 132, 222, 97, 225, 67]


def test_signatures_agree_as_often_as_texts_are_alike() -> None:
    planted = plant_duplicates(200, 300, unambiguous=False)
    originals, copies = planted.texts[:200], planted.texts[200:]
    marks = np.stack([minhash_signature(text) for text in originals])
    alike = np.array([(marks == minhash_signature(copy)).mean(axis=1).max() for copy in copies])
    assert np.abs(alike - planted.jaccard_indices[200:]).mean() < 0.04


def test_planted_duplicates_are_found() -> None:
    found = measure(MinHashIndex().check_and_add, plant_duplicates(600, 150))
    assert found["precision"] >= 0.95
    assert found["recall"] >= 0.95


def test_the_first_stays() -> None:
    near = MinHashIndex()
    text = " ".join(f"word{i}" for i in range(100))
    assert [near.check_and_add(t) for t in (text, text.upper() + "!", text + " more", "another text", "")] == [
        0,
        1,
        1,
        0,
        0,
    ]
    assert near.num_duplicates == 2
    assert [near.check_and_add(t) for t in ("...", "!!!", "...")] == [False, False, True]  # without words: only itself


def test_tables_grow_and_forget_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIAL_CAPACITY_TEXTS", 16)
    texts = [" ".join(f"{i}w{j}" for j in range(20)) for i in range(500)]
    near = MinHashIndex()
    assert not any(near.check_and_add(text) for text in texts)
    assert near.capacity == 512
    assert all(near.check_and_add(text) for text in texts)
    assert near.num_evicted == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIAL_CAPACITY_TEXTS", 16)
    texts = [" ".join(f"{i}w{j}" for j in range(20)) for i in range(500)]
    near = MinHashIndex(max_bytes=64 * module.INDEX_BYTES_PER_TEXT)
    assert not any(near.check_and_add(text) for text in texts)
    arrays = (near.signatures, near.is_kept, near.links, near.heads)
    assert sum(array.nbytes for array in arrays) <= 64 * module.INDEX_BYTES_PER_TEXT
    assert near.num_evicted == 500 - 64
    assert all(near.check_and_add(text) for text in texts[-50:])
    assert not near.check_and_add(texts[0])


def flag_by_definition(signatures: list[np.ndarray]) -> list[bool]:
    """Compare each text with the first 8 texts of each of its buckets, as the docstring of the module says."""
    buckets, flags = dict[tuple[int, int], list[int]](), list[bool]()
    for i, signature in enumerate(signatures):
        mine = [buckets.setdefault((band, int(v)), []) for band, v in enumerate(signature.view(np.uint64))]
        kept = {j for bucket in mine for j in bucket if not flags[j]}
        flags.append(any((signatures[j] == signature).sum() >= module.min_matching_bytes(0.8) for j in kept))
        for bucket in mine:
            bucket.extend([i] * (len(bucket) < module.TEXTS_PER_BUCKET))
    return flags


def alike_signatures(num: int, num_groups: int) -> list[np.ndarray]:
    """Signatures in groups, with 0 to 59 of 128 bytes drawn anew: some are near duplicates, many share a band."""
    rng = np.random.default_rng(0)
    groups, found = rng.integers(256, size=(num_groups, 128), dtype=np.uint8), []
    for _ in range(num):
        signature = groups[rng.integers(num_groups)].copy()
        changed = rng.permutation(128)[: rng.integers(60)]
        signature[changed] = rng.integers(256, size=len(changed), dtype=np.uint8)
        found.append(signature)
    return found


@pytest.mark.parametrize("num_groups", [5, 40])
def test_the_index_follows_its_definition(num_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INITIAL_CAPACITY_TEXTS", 16)
    signatures, near = alike_signatures(500, num_groups), MinHashIndex()
    flags = [near.check_and_add_signature(signature) for signature in signatures]
    assert flags == flag_by_definition(signatures)
    assert 100 < near.num_duplicates == sum(flags) < 450


def test_threshold() -> None:
    with pytest.raises(UserError, match=r"must be from 0\.5 to 1"):
        MinHashIndex(threshold=0.2)
    words = [f"w{i}" for i in range(200)]
    copy = " ".join([*words[:180], *(f"x{i}" for i in range(20))])  # 176 of 216 runs: 0.81
    for threshold, expected in ((0.6, True), (0.95, False)):
        near = MinHashIndex(threshold)
        assert not near.check_and_add(" ".join(words))
        assert near.check_and_add(copy) is expected
