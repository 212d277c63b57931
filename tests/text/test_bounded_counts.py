"""Counts in bounded memory: exact while there is room, fair afterwards."""

from __future__ import annotations

import random

from firth.text.bounded_counts import BoundedCounts


def test_exact_while_there_is_room() -> None:
    counts: BoundedCounts[str] = BoundedCounts(max_keys=10)
    counts.add(["a", "b", "a"])
    counts.add(["a"])
    assert counts.is_exact
    assert (counts.total, counts.num_distinct(), counts.max_undercount) == (4, 2, 0)
    assert [array.tolist() for array in counts.frequency_spectrum()] == [[3, 1], [1, 1]]


def test_equal_counts_come_in_order() -> None:
    counts: BoundedCounts[str] = BoundedCounts(max_keys=10)
    counts.add(["c", "b", "a", "c"])
    assert counts.most_common(2) == [("c", 2), ("a", 1)]
    nothing: BoundedCounts[str] = BoundedCounts(max_keys=10)
    assert nothing.most_common(3) == []


def test_memory_is_bounded_and_the_estimates_are_near() -> None:
    rng = random.Random(0)
    counts: BoundedCounts[str] = BoundedCounts(max_keys=2000)
    frequent = [f"often{i}" for i in range(20)]
    keys = [f"rare{i}" for i in range(20_000)] + 500 * frequent
    rng.shuffle(keys)
    for start in range(0, len(keys), 100):
        counts.add(keys[start : start + 100])
        assert len(counts.counts) <= 2000 + 100
    assert not counts.is_exact
    assert counts.total == 30_000
    assert abs(counts.num_distinct() - 20_020) < 0.15 * 20_020
    assert {key for key, _ in counts.most_common(20)} == set(frequent)
    numbers, weights = counts.frequency_spectrum()
    assert abs(weights[numbers == 1].sum() - 20_000) < 0.15 * 20_000
    assert all(500 - counts.max_undercount <= n <= 500 for _, n in counts.most_common(20))


def test_the_sample_does_not_depend_on_the_order() -> None:
    keys = [f"key{i}" for i in range(5000)]

    def sampled(order: list[str]) -> int:
        counts: BoundedCounts[str] = BoundedCounts(max_keys=500)
        for key in order:
            counts.add([key])
        return counts.num_distinct()

    assert sampled(keys) == sampled(keys[::-1])


def test_fingerprints_can_be_counted() -> None:
    counts: BoundedCounts[bytes] = BoundedCounts(max_keys=8)
    for i in range(100):
        counts.add([bytes([i])])
    assert len(counts.counts) <= 8
