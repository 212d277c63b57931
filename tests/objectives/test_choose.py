"""Which tokens are noise: exact numbers, allowed places, and all ways equally likely."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from firth.objectives import Draw, choose

UNLIKELY = 1e-3  # seeds are fixed: what passes once passes always


def draw(rows: int, seed: int = 1) -> Draw:
    return Draw(seed, np.arange(rows))


def evenness(counts: np.ndarray) -> float:
    """The chance that equally likely cells are filled at least this unevenly."""
    return float(stats.chisquare(np.ravel(counts)).pvalue)


def alike(a: np.ndarray, b: np.ndarray) -> float:
    """The chance that two samples from one law differ at least this much, counted in up to ten cells."""
    edges = np.unique(np.quantile(np.concatenate([a, b]), np.arange(0.1, 1, 0.1)))
    table = [np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) for x in (a, b)]
    return float(stats.chi2_contingency([np.array(row)[np.sum(table, 0) > 0] for row in table]).pvalue)


# --- single tokens ------------------------------------------------------------------------------------------------


def first_real(*counts: int, width: int = 20) -> np.ndarray:
    return np.arange(width) < np.array(counts)[:, None]


def test_the_share_is_exact_and_text_has_at_least_one() -> None:
    # 15% of 0, 1, 3, 10, 16, 20 tokens: none, at least one, at least one, 1.5 is rounded up, 2.4 down, 3.
    _, used = choose.tokens(first_real(0, 1, 3, 10, 16, 20), 0.15, draw(6))
    assert used.sum(1).tolist() == [0, 1, 1, 2, 2, 3]


def test_places_are_real_and_rise_and_unused_slots_come_last() -> None:
    real = np.random.default_rng(0).random((500, 40)) < np.linspace(0, 1, 500)[:, None]
    asked, used = choose.tokens(real, 0.3, draw(500))
    assert asked.shape == used.shape == (500, 12)
    for row, places, slots in zip(real, asked, used, strict=True):
        n = slots.sum()
        assert slots.tolist() == [True] * n + [False] * (12 - n)
        assert all(a < b for a, b in pairwise(places[:n]))
        assert row[places[:n]].all()
        assert (places[n:] == 0).all()


def test_the_number_of_slots_depends_on_the_width_alone() -> None:
    for rows in (1, 7):
        for real in (np.zeros((rows, 128), bool), np.ones((rows, 128), bool)):
            assert choose.tokens(real, 0.15, draw(rows))[0].shape == (rows, 19)
    assert choose.slots(0.15, 128) == 19
    assert choose.slots(0.15, 2) == 1


@pytest.mark.parametrize("rate", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_extreme_rates_and_widths(rate: float, width: int) -> None:
    asked, used = choose.tokens(np.ones((3, width), bool), rate, draw(3))
    expected = max(1, int(rate * width + 0.5))
    assert asked.shape == (3, expected)
    assert used.all()


def test_every_set_of_places_is_equally_likely() -> None:
    # Two of the six real places, with places between them that are not real: 15 sets.
    real = np.tile([True, False, True, True, False, True, True, True], (120_000, 1))
    asked, used = choose.tokens(real, 1 / 3, draw(len(real)))
    assert (used.sum(1) == 2).all()
    sets = {pair: i for i, pair in enumerate(combinations([0, 2, 3, 5, 6, 7], 2))}
    found = [sets[tuple(pair)] for pair in asked[:, :2].tolist()]
    assert evenness(np.bincount(found, minlength=15)) > UNLIKELY


def test_tokens_of_a_row_do_not_depend_on_the_others() -> None:
    real = np.random.default_rng(1).random((32, 50)) < 0.8
    asked, used = choose.tokens(real, 0.15, draw(32))
    for i in (0, 9, 31):
        alone, alone_used = choose.tokens(real[[i]], 0.15, Draw(1, np.array([i])))
        assert (alone[0] == asked[i]).all()
        assert (alone_used[0] == used[i]).all()


# --- spans --------------------------------------------------------------------------------------------------------


def layout(*rows: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of so many real tokens, each followed by an end token; then padding. Returns `doc` and `real`."""
    doc, real = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), bool)
    for b, lengths in enumerate(rows):
        at = 0
        for d, n in enumerate(lengths):
            doc[b, at : at + n + 1], real[b, at : at + n] = d, True
            at += n + 1
    return doc, real


def spans(rows: list[list[int]], width: int, noise: int, count: int, seed: int = 1) -> np.ndarray:
    """The same numbers of noise tokens and spans for all rows."""
    doc, real = layout(*rows, width=width)
    every = np.ones(len(rows), np.int64)
    return choose.spans(doc, real, noise * every, count * every, draw(len(rows), seed))


def runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the spans of one row."""
    steps = np.diff(np.concatenate([[0], mask.astype(int), [0]]))
    starts = np.flatnonzero(steps == 1)
    return starts, np.flatnonzero(steps == -1) - starts


@pytest.mark.parametrize(
    ("lengths", "noise", "count", "expected"),
    [
        ([2], 1, 1, ".X|"),  # text first, noise last
        ([3], 2, 1, ".XX|"),
        ([4], 2, 2, ".X.X|"),
        ([2, 2], 2, 2, ".X|.X|"),
        ([1, 2, 1], 1, 1, ".|.X|.|"),  # a single token stays text
        ([1, 1], 2, 2, ".|.|"),
        ([3], 3, 1, ".XX|"),  # more than fits: what fits
        ([4], 4, 4, ".XXX|"),  # and rather fewer spans than less noise
        ([9, 2], 8, 1, ".XXXXXXXX|..|"),  # one span for more noise than the short document can hold
        ([2, 9], 8, 1, "..|.XXXXXXXX|"),
        ([3, 5, 4], 7, 2, "...|.XXXX|.XXX|"),
    ],
)
def test_spans_where_there_is_only_one_way(lengths: list[int], noise: int, count: int, expected: str) -> None:
    padding = "  "
    for mask in spans([lengths] * 20, len(expected + padding), noise, count):
        assert [place == "X" for place in expected + padding] == mask.tolist()


def test_every_way_is_equally_likely() -> None:
    # Eight tokens, three of them noise in two spans: noise 1+2 or 2+1, text 1+4, 2+3, 3+2 or 4+1, so eight masks.
    masks = spans([[8]] * 100_000, 9, noise=3, count=2)
    ways, counts = np.unique(masks, axis=0, return_counts=True)
    drawn = {"".join(".X"[m] for m in way[:8]) for way in ways.astype(int)}
    assert drawn == {
        f"{'.' * t}{'X' * n}{'.' * (5 - t)}{'X' * (3 - n)}" for t in (1, 2, 3, 4) for n in (1, 2)
    }  # fmt: skip
    assert evenness(counts) > UNLIKELY


def published_mask(length: int, noise: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """The published law in its own words: shuffle the marks that open a segment, alternate text and noise."""

    def segments(total: int) -> list[int]:
        opens = np.arange(total - 1) < count - 1
        rng.shuffle(opens)
        edges = [0, *(np.flatnonzero(opens) + 1).tolist(), total]
        return [b - a for a, b in pairwise(edges)]

    mask: list[bool] = []
    for text, hidden in zip(segments(length - noise), segments(noise), strict=True):
        mask += [False] * text + [True] * hidden
    return np.array(mask)


def test_spans_follow_the_published_law() -> None:
    length, noise, count, rows = 100, 15, 5, 4000
    ours = spans([[length]] * rows, length + 1, noise, count)
    rng = np.random.default_rng(0)
    theirs = [published_mask(length, noise, count, rng) for _ in range(rows)]
    our_runs, their_runs = ([runs(mask) for mask in masks] for masks in (ours, theirs))
    for which in (0, 2, 4):  # one span of each row, so that the cells are independent
        starts, sizes = ([np.array([row[k][which] for row in r]) for r in (our_runs, their_runs)] for k in (0, 1))
        assert alike(*starts) > UNLIKELY
        assert alike(*sizes) > UNLIKELY


def some_rows(count: int, width: int, seed: int = 0) -> list[list[int]]:
    """Rows of up to six documents that fill most of the row."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        edges = np.unique([0, *rng.integers(1, width // 4, size=rng.integers(0, 6)) * 4, width - rng.integers(0, 3)])
        rows.append((np.diff(edges) - 1).tolist())
    return rows


@pytest.mark.parametrize(("noise", "count"), [(21, 7), (21, 1), (52, 50), (70, 50)])
def test_the_numbers_of_a_row_are_exact_and_no_span_crosses_an_edge(noise: int, count: int) -> None:
    rows = some_rows(1000, 142)
    doc, real = layout(*rows, width=142)
    mask = spans(rows, 142, noise, count)
    assert (mask.sum(1) == noise).all()
    assert not mask[~real].any()
    for b, lengths in enumerate(rows):
        starts, sizes = runs(mask[b])
        assert len(starts) == count
        assert all(doc[b, s] == doc[b, s + n - 1] for s, n in zip(starts, sizes, strict=True))
        ends = np.cumsum(np.array(lengths) + 1) - 1
        for n, end in zip(lengths, ends, strict=True):
            part = mask[b, end - n : end]
            assert not part[0], "text comes first"
            assert part[-1] or not part.any(), "noise comes last"


def test_documents_of_every_length_get_their_share_of_the_noise() -> None:
    lengths = [16, 80, 20, 24]
    mask = spans([lengths] * 4000, 144, noise=21, count=7)
    for n, end in zip(lengths, np.cumsum(np.array(lengths) + 1) - 1, strict=True):
        assert mask[:, end - n : end].mean() == pytest.approx(21 / 140, abs=0.006)


def test_what_is_left_over_goes_to_any_document() -> None:
    # A span for each, and a third token of noise for either.
    mask = spans([[4, 4]] * 4000, 10, noise=3, count=2)
    assert (mask.sum(1) == 3).all()
    assert (mask[:, :4].sum(1) == 2).mean() == pytest.approx(0.5, abs=0.03)


def test_noise_that_does_not_fit_goes_to_another_document() -> None:
    # Eight spans: two fill the first document, whose share of the ninth token must go to the second.
    mask = spans([[4, 13]] * 200, 19, noise=9, count=8)
    assert (mask[:, :4] == [False, True, False, True]).all()
    assert (mask[:, 5:].sum(1) == 7).all()


class Coarse(Draw):
    """Only quarters, so that many numbers are equal."""

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        return np.floor(super().uniform(purpose, width) * 4) / 4


def test_equal_keys_go_by_place_so_that_every_machine_agrees() -> None:
    draw = Coarse(0, np.arange(20))
    asked, _ = choose.tokens(np.ones((20, 200), bool), 0.15, draw)
    for places, keys in zip(asked.tolist(), draw.uniform("tokens", 200).tolist(), strict=True):
        assert places == sorted(sorted(range(200), key=lambda i: (keys[i], i))[:30])

    doc, real = layout(*[[100, 99]] * 20, width=201)
    noise, count = np.full(20, 60), np.full(20, 20)
    together = choose.spans(doc, real, noise, count, draw)
    for i in range(20):
        one = slice(i, i + 1)
        assert (
            choose.spans(doc[one], real[one], noise[one], count[one], Coarse(0, np.array([i]))) == together[i]
        ).all()


def test_spans_of_a_row_do_not_depend_on_the_others() -> None:
    rows = some_rows(40, 142)
    doc, real = layout(*rows, width=142)
    noise, count = np.arange(40) % 8 + 8, np.arange(40) % 8 + 1
    together = choose.spans(doc, real, noise, count, draw(40))
    for i in range(40):
        one = slice(i, i + 1)
        alone = choose.spans(doc[one], real[one], noise[one], count[one], Draw(1, np.array([i])))
        assert (alone[0] == together[i]).all()
