"""Random numbers depend on the seed, the row and the purpose alone, and are as even as they should be."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from scipy import stats

from firth.objectives import CounterRNG

ROWS, WIDTH = 400, 300  # 120,000 numbers
UNLIKELY = 1e-3  # seeds are fixed: what passes once passes always


def draw(seed: int = 1, rows: int = ROWS) -> CounterRNG:
    return CounterRNG(seed, np.arange(rows))


def evenness(table: np.ndarray) -> float:
    """The chance that equally likely cells are filled at least this unevenly."""
    return float(stats.chisquare(np.ravel(table)).pvalue)


def joint(a: np.ndarray, b: np.ndarray, bins: int = 10) -> np.ndarray:
    """How often each pair of tenths occurs together."""
    pair = np.floor(a * bins).astype(int) * bins + np.floor(b * bins).astype(int)
    return np.bincount(pair.ravel(), minlength=bins * bins)


# --- a pure function ----------------------------------------------------------------------------------------------


def by_definition(seed: int, purpose: str, row: int, position: int) -> int:
    """The 64 bits of one number, with Python's own integers."""
    state, full = 0, 2**64
    for number in (seed, zlib.crc32(purpose.encode()), row, position):
        x = ((state ^ number % full) + 0x9E3779B97F4A7C15) % full
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % full
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % full
        state = x ^ (x >> 31)
    return state


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63])
def test_numbers_follow_their_definition(seed: int) -> None:
    index = np.array([0, 5, 2**40])
    bits = [[by_definition(seed, "noise", row, position) for position in range(4)] for row in index.tolist()]
    expected = [[(b >> 40) / 2**24 for b in row] for row in bits]
    assert CounterRNG(seed, index).uniform("noise", 4).tolist() == expected
    expected = [[(b >> 32) * 1000 >> 32 for b in row] for row in bits]
    assert CounterRNG(seed, index).integers("noise", 4, 1000).tolist() == expected


def test_rows_in_any_order_or_one_at_a_time_get_the_same() -> None:
    index = np.array([3, 1_000_003, 0, 12])
    together = CounterRNG(5, index)
    for i, row in enumerate(index):
        alone = CounterRNG(5, np.array([row]))
        assert (alone.uniform("a", 9) == together.uniform("a", 9)[i]).all()
        assert (alone.integers("a", 9, 77) == together.integers("a", 9, 77)[i]).all()
    assert (CounterRNG(5, index[::-1]).uniform("a", 9) == together.uniform("a", 9)[::-1]).all()


def test_a_wider_draw_begins_with_the_narrower_one() -> None:
    assert (draw().uniform("a", 20)[:, :7] == draw().uniform("a", 7)).all()


def test_uniform_at_equals_uniform() -> None:
    row, position = np.array([7, 0, 7, 399]), np.array([0, 5, 299, 12])
    assert (
        draw().uniform_at("tokens", row, position).tolist() == draw().uniform("tokens", WIDTH)[row, position].tolist()
    )


def test_drawing_again_changes_nothing() -> None:
    d = draw()
    first = d.uniform("a", WIDTH)
    d.uniform("b", WIDTH)
    d.integers("a", WIDTH, 10)
    assert (d.uniform("a", WIDTH) == first).all()


def test_the_step_changes_no_number() -> None:
    """It says only which rows are a batch; what is drawn once for a batch takes it for the index."""
    plain, stepped = draw(), CounterRNG(1, np.arange(ROWS), np.arange(ROWS) // 8)
    assert (plain.uniform("a", 9) == stepped.uniform("a", 9)).all()


# --- distributions ------------------------------------------------------------------------------------------------


def test_uniform_is_even_and_inside_its_bounds() -> None:
    u = draw().uniform("a", WIDTH)
    assert u.shape == (ROWS, WIDTH)
    assert u.dtype == np.float32
    assert u.min() >= 0
    assert u.max() < 1
    assert evenness(np.bincount(np.floor(u * 100).astype(int).ravel(), minlength=100)) > UNLIKELY
    low_bits = (u * 2**24).astype(np.int64) % 64
    assert evenness(np.bincount(low_bits.ravel(), minlength=64)) > UNLIKELY


def test_purposes_seeds_rows_and_columns_are_independent() -> None:
    u = draw().uniform("tokens", WIDTH)
    assert evenness(joint(u, draw().uniform("fate", WIDTH))) > UNLIKELY
    assert evenness(joint(u, draw(seed=2).uniform("tokens", WIDTH))) > UNLIKELY
    assert evenness(joint(u[:-1], u[1:])) > UNLIKELY
    assert evenness(joint(u[:, :-1], u[:, 1:])) > UNLIKELY


def test_the_seed_and_the_row_cannot_be_exchanged() -> None:
    assert (CounterRNG(1, np.array([2])).uniform("a", 8) != CounterRNG(2, np.array([1])).uniform("a", 8)).all()


@pytest.mark.parametrize("below", [2, 7, 1000, 1024])
def test_integers_are_unbiased(below: int) -> None:
    x = draw().integers("a", WIDTH, below)
    assert x.dtype == np.int64
    assert x.min() >= 0
    assert x.max() < below
    assert evenness(np.bincount(x.ravel(), minlength=below)) > UNLIKELY


def test_integers_reach_both_ends_of_a_large_vocabulary() -> None:
    x = draw().integers("a", WIDTH, 250_000)
    assert x.min() < 100
    assert x.max() >= 249_900
    assert evenness(np.bincount(x.ravel() // 2500, minlength=100)) > UNLIKELY
    assert (draw().integers("a", 5, 1) == 0).all()
