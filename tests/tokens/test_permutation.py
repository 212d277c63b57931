"""The permutation is one-to-one, random, and a function of index and seed alone."""

from __future__ import annotations

import numpy as np
import pytest

from firth.tokens.permutation import permute_indices


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 1000, 4096, 4097])
def test_permute_is_a_permutation(n: int) -> None:
    for seed in range(3):
        assert np.array_equal(np.sort(permute_indices(np.arange(n), n, seed)), np.arange(n))


def test_permute_depends_on_the_seed_and_on_nothing_else() -> None:
    indices = np.arange(1000)
    permuted = permute_indices(indices, 1000, 5)
    assert np.array_equal(permute_indices(indices, 1000, 5), permuted)
    assert not np.array_equal(permute_indices(indices, 1000, 6), permuted)
    assert [int(permute_indices(np.array([i]), 1000, 5)[0]) for i in (999, 0, 17)] == permuted[[999, 0, 17]].tolist()
    both = permute_indices(np.array([[3, 4], [3, 4]]), 1000, np.array([[5], [6]]))
    assert both.tolist() == [permuted[3:5].tolist(), permute_indices(indices, 1000, 6)[3:5].tolist()]


@pytest.mark.parametrize("n", [3, 7, 20])
def test_permute_is_uniform(n: int) -> None:
    """Over many seeds, each index maps to every value equally often, and so do pairs of neighbours."""
    seeds = np.arange(20_000)
    first, second = permute_indices(np.zeros_like(seeds), n, seeds), permute_indices(np.ones_like(seeds), n, seeds)
    assert np.abs(np.bincount(first, minlength=n) / len(seeds) * n - 1).max() < 0.15
    pairs = np.bincount((second - first) % n, minlength=n)
    assert pairs[0] == 0
    assert np.abs(pairs[1:] / len(seeds) * (n - 1) - 1).max() < 0.15


def test_permute_leaves_no_pattern() -> None:
    permuted = permute_indices(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(permuted, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(permuted[1:], permuted[:-1])[0, 1]) < 0.02
    assert (permuted == np.arange(100_000)).sum() < 10
