"""Noise masks: exact counts, allowed positions, published distributions, uniform choices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy import stats

from firth.core.errors import UserError
from firth.objectives import (
    CounterRNG,
    NgramMasking,
    SalientSpanMasking,
    SpanMasking,
    TokenMasking,
    WholeWordMasking,
    noise_mask,
)
from firth.tokens import Rows, SequenceTemplate

UNLIKELY = 1e-3  # seeds are fixed: what passes once passes always
BERT = SequenceTemplate((3,), (4,))


def draw(rows: int, seed: int = 1) -> CounterRNG:
    return CounterRNG(seed, np.arange(rows))


def evenness(counts: np.ndarray) -> float:
    """The chance that equally likely cells are filled at least this unevenly."""
    return float(stats.chisquare(np.ravel(counts)).pvalue)


def alike(a: np.ndarray, b: np.ndarray) -> float:
    """Return the p-value of a test that two samples have the same distribution, in up to ten cells."""
    edges = np.unique(np.quantile(np.concatenate([a, b]), np.arange(0.1, 1, 0.1)))
    table = [np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1) for x in (a, b)]
    return float(stats.chi2_contingency([np.array(row)[np.sum(table, 0) > 0] for row in table]).pvalue)


def lawful(values: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of a chi-squared test of integers against a distribution; rare cells are merged."""
    expected = law * len(values)
    common = expected >= 10
    counts = np.bincount(values, minlength=len(law))
    assert len(counts) == len(law), "a number outside the distribution"
    cells = [np.append(x[common], x[~common].sum()) for x in (counts, expected)]
    cells = [c[:-1] for c in cells] if cells[1][-1] < 1e-9 else cells
    return float(stats.chisquare(*cells).pvalue)


# --- single tokens ------------------------------------------------------------------------------------------------


def bare(maskable: np.ndarray) -> Rows:
    """Rows of which only the text matters."""
    doc = np.where(maskable, 0, -1).astype(np.int32)
    return Rows(np.zeros(maskable.shape, np.int64), doc, doc, maskable, np.arange(len(maskable)))


def tokens(maskable: np.ndarray, rate: float, seed: int = 1) -> np.ndarray:
    return TokenMasking()(bare(maskable), rate, draw(len(maskable), seed))


def first_real(*counts: int, width: int = 20) -> np.ndarray:
    return np.arange(width) < np.array(counts)[:, None]


def test_tokens_by_hand(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10 11 12 13 14 S", "C 20 21 S | C 22 S")
    # 40% of five tokens are two, of three one. The lowest keys of all are where there is no text.
    keys = [[0.0, 0.5, 0.2, 0.9, 0.1, 0.3, 0.0], [0.0, 0.8, 0.7, 0.0, 0.0, 0.6, 0.0]]
    assert TokenMasking()(rows, 0.4, written(rows, tokens=keys)).astype(int).tolist() == [
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
    ]


def test_the_share_is_exact_and_text_has_at_least_one() -> None:
    # 15% of 0, 1, 3, 10, 16, 20 tokens: none, at least one, at least one, 1.5 is rounded up, 2.4 down, 3.
    assert tokens(first_real(0, 1, 3, 10, 16, 20), 0.15).sum(1).tolist() == [0, 1, 1, 2, 2, 3]


def test_only_text_is_chosen() -> None:
    maskable = np.random.default_rng(0).random((500, 40)) < np.linspace(0, 1, 500)[:, None]
    assert not tokens(maskable, 0.3)[~maskable].any()


def test_the_number_of_slots_depends_on_the_width_alone() -> None:
    assert [noise_mask.num_target_slots(0.15, n) for n in (128, 512, 2, 10)] == [19, 77, 1, 2]
    for chooser in (TokenMasking(), WholeWordMasking(), SalientSpanMasking()):
        assert chooser.num_slots(0.15, 128) == 19
    assert SpanMasking(max_span_length=10).num_slots(0.15, 128) == 24 + 10
    assert SpanMasking(max_span_length=10).num_slots(0.9, 12) == 12


@pytest.mark.parametrize("rate", [0.001, 0.5, 0.999])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_extreme_rates_and_widths(rate: float, width: int) -> None:
    assert (tokens(np.ones((3, width), bool), rate).sum(1) == max(1, int(rate * width + 0.5))).all()


def test_every_set_of_positions_is_equally_likely() -> None:
    # Two of the six maskable positions, with others between them: 15 sets.
    maskable = np.tile([True, False, True, True, False, True, True, True], (120_000, 1))
    mask = tokens(maskable, 1 / 3)
    assert (mask.sum(1) == 2).all()
    sets = {pair: i for i, pair in enumerate(combinations([0, 2, 3, 5, 6, 7], 2))}
    found = [sets[tuple(pair)] for pair in np.nonzero(mask)[1].reshape(-1, 2).tolist()]
    assert evenness(np.bincount(found, minlength=15)) > UNLIKELY


class Coarse(CounterRNG):
    """Only quarters, so that many numbers are equal."""

    def uniform(self, purpose: str, width: int) -> np.ndarray:
        return np.floor(super().uniform(purpose, width) * 4) / 4


def test_equal_keys_are_ordered_by_position() -> None:
    coarse = Coarse(0, np.arange(20))
    mask = TokenMasking()(bare(np.ones((20, 200), bool)), 0.15, coarse)
    for masked, keys in zip(mask, coarse.uniform("tokens", 200).tolist(), strict=True):
        assert np.flatnonzero(masked).tolist() == sorted(sorted(range(200), key=lambda i: (keys[i], i))[:30])

    doc, maskable = layout(*[[100, 99]] * 20, width=201)
    noise, count = np.full(20, 60), np.full(20, 20)
    together = noise_mask.t5_noise_mask(doc, maskable, noise, count, coarse)
    for i in range(20):
        one = slice(i, i + 1)
        alone = noise_mask.t5_noise_mask(doc[one], maskable[one], noise[one], count[one], Coarse(0, np.array([i])))
        assert (alone == together[i]).all()


# --- whole words, salient spans -----------------------------------------------------------------------------------


def test_words_by_hand(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10 +11 12 13 +14 +15 16 S")
    # Half of seven tokens are four. The word of three comes first, the word of two no longer fits, then one does.
    keys = [[0, 0.2, 0, 0.4, 0.1, 0, 0, 0.5, 0]]
    assert WholeWordMasking()(rows, 0.5, written(rows, words=keys)).astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0]
    ]
    # Of two tokens the word of two comes first and fills the row.
    assert WholeWordMasking()(rows, 0.3, written(rows, words=keys)).astype(int).tolist() == [
        [0, 1, 1, 0, 0, 0, 0, 0, 0]
    ]


def test_words_end_with_their_document(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10 11 S | C 12 +13 S")
    keys = [[0, 0.5, 0.1, 0, 0, 0.2, 0, 0]]
    assert WholeWordMasking()(rows, 0.25, written(rows, words=keys)).astype(int).tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]
    assert WholeWordMasking()(rows, 0.75, written(rows, words=keys)).astype(int).tolist() == [[0, 0, 1, 0, 0, 1, 1, 0]]


def test_a_word_that_is_longer_than_all_slots_stays(
    picture: Callable[..., Rows], written: Callable[..., CounterRNG]
) -> None:
    rows = picture("C 10 +11 +12 +13 S")
    assert not WholeWordMasking()(rows, 0.5, written(rows, words=[[0.0] * 6])).any()


def greedy(units: list[list[int]], keys: list[float], count: int) -> list[int]:
    """By definition: in the order of their keys, every unit that still fits."""
    taken: list[int] = []
    for _, unit in sorted(zip(keys, units, strict=True)):
        if len(taken) + len(unit) <= count:
            taken += unit
    return sorted(taken)


def words_of(rows: Rows, b: int) -> list[list[int]]:
    """Return the positions of each word."""
    words: list[list[int]] = []
    for position in np.flatnonzero(rows.maskable[b]).tolist():
        if rows.word_start[b, position]:
            words.append([])
        words[-1].append(position)
    return words


def test_words_are_taken_by_their_keys_while_they_fit(random_rows: Callable[..., Rows]) -> None:
    rows = random_rows([[60], [30, 20, 4], [7], [1, 1, 1]] * 25, 64, BERT)
    mask, keys = WholeWordMasking()(rows, 0.15, draw(100)), draw(100).uniform("words", 64)
    for b in range(100):
        words = words_of(rows, b)
        count = max(1, int(0.15 * rows.maskable[b].sum() + 0.5))
        assert np.flatnonzero(mask[b]).tolist() == greedy(words, [float(keys[b, word[0]]) for word in words], count)


def test_salient_by_hand(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10 11! +12! 13! 14 +15 16 S", "C 20 21 S | C 22! S")
    # The run 11 12 13 is one unit, in spite of its words; the remaining slots go to other words.
    keys = [[0.0, 0.3, 0.9, 0.0, 0.0, 0.1, 0.0, 0.2, 0.0], [0.0, 0.2, 0.1, 0.0, 0.0, 0.9, 0.0]]
    draws = written(rows, words=keys)
    assert SalientSpanMasking()(rows, 0.6, draws).astype(int).tolist() == [  # 4 of 7 and 2 of 3
        [0, 0, 1, 1, 1, 0, 0, 1, 0],
        [0, 0, 1, 0, 0, 1, 0, 0, 0],
    ]
    assert SalientSpanMasking()(rows, 0.3, draws).astype(
        int
    ).tolist() == [  # 2 of 7: the run does not fit, the word of two does
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
    ]


def test_salient_runs_end_with_their_document(picture: Callable[..., Rows], written: Callable[..., CounterRNG]) -> None:
    rows = picture("C 10! S | C 11! S | C 12 13 S")
    keys = [[0, 0.5, 0, 0, 0.1, 0, 0, 0, 0, 0]]
    assert np.flatnonzero(SalientSpanMasking()(rows, 0.25, written(rows, words=keys))).tolist() == [4]


def test_salient_spans_come_before_anything_else(random_rows: Callable[..., Rows]) -> None:
    rows = random_rows([[126], [62, 62]] * 200, 128, BERT)
    mask = SalientSpanMasking()(rows, 0.15, draw(400))
    assert rows.salient is not None
    run = rows.salient & ~noise_mask.shift_right(rows.salient, False)
    whole = np.cumsum(run, 1) * rows.salient
    for b in range(400):
        lengths = np.bincount(whole[b][rows.salient[b]])[1:]
        hidden = np.bincount(whole[b][mask[b] & rows.salient[b]], minlength=len(lengths) + 1)[1:]
        assert ((hidden == lengths) | (hidden == 0)).all(), "a run is whole"
        left = 19 - hidden.sum()
        assert (lengths[hidden == 0] > left).all(), "words that are not taken do not fit"
        assert mask[b].sum() == 19


# --- spans of random length ---------------------------------------------------------------------------------------


def test_span_lengths_are_the_published_ones() -> None:
    # Geometric with p = 0.2, cut off at 10: the mean that the paper gives is 3.8 (SpanBERT, section 3.1).
    law = SpanMasking().length_probs
    assert law[0] == 0
    assert law.sum() == pytest.approx(1)
    assert law[2:] / law[1:-1] == pytest.approx(np.full(9, 0.8))
    assert SpanMasking().mean_length == pytest.approx(3.8, abs=0.01)
    assert SpanMasking(p=0.5, max_span_length=2).length_probs.tolist() == pytest.approx([0, 2 / 3, 1 / 3])


@pytest.mark.parametrize("mean", [0.5, 1.0, 3.0, 30.0, 100.0])
def test_poisson(mean: float) -> None:
    law = noise_mask.poisson_length_probs(mean)
    assert law == pytest.approx(stats.poisson.pmf(np.arange(len(law)), mean), abs=1e-9)
    assert law.sum() == pytest.approx(1)


def test_inside_by_hand() -> None:
    start, length = np.array([[0, 3, 7], [1, 2, 9]]), np.array([[2, 1, 3], [0, -1, -1]])
    assert noise_mask.spans_to_mask(start, length, 9).astype(int).tolist() == [[1, 1, 0, 1, 0, 0, 0, 1, 1], [0] * 9]


def test_spans_are_of_whole_words(picture: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = picture("C 10 +11 12 13 +14 +15 16 17 S", "C 20 21 22 23 S")
    spans = np.array([[2, 1], [1, -1]]), np.array([[1, 4], [3, 0]])  # lengths and starts, in words
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: spans)
    assert SpanMasking(max_span_length=4)(rows, 0.3, draw(2)).astype(int).tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    ]


def test_the_last_spans_go_where_the_slots_are_full(
    picture: Callable[..., Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = picture("C 10 +11 12 13 +14 +15 16 17 S", "C 20 21 22 23 S")
    spans = np.array([[1, 1, 1], [1, -1, -1]]), np.array([[0, 2, 4], [3, 0, 0]])
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: spans)
    # Slots for three tokens (1.25 * 0.15 * 10, and the longest): the span of three words is broken, so it goes.
    assert SpanMasking(max_span_length=1).num_slots(0.15, 10) == 3
    assert SpanMasking(max_span_length=1)(rows, 0.15, draw(2)).astype(int).tolist() == [
        [0, 1, 1, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 0],
    ]


LAWS = {
    "geometric": SpanMasking().length_probs,
    "poisson": noise_mask.poisson_length_probs(3.0),
    "short": noise_mask.poisson_length_probs(0.5),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("units", [40, 126, 510])
def test_sampled_spans_keep_their_distribution_and_rate(law: str, units: int) -> None:
    rows, rate = 100_000 // units, 0.2
    units_B = np.full(rows, units)
    length, start = noise_mask.sample_span_starts_and_lengths(LAWS[law], rate * units_B, units_B, draw(rows))
    used = length >= 0
    assert lawful(length[used], LAWS[law]) > UNLIKELY
    spread = 3 * length[used].std() / (rate * units)  # of the sum of a row, at most
    assert length[used].sum() / units_B.sum() == pytest.approx(rate, abs=max(0.005, rate * spread / rows**0.5))
    for b in range(rows):
        first, size = start[b][used[b]], length[b][used[b]]
        assert (first[1:] > first[:-1] + size[:-1]).all(), "some text lies between two spans"
        assert (first >= 0).all()
        assert (first + size <= units).all()


def test_scattered_spans_lie_anywhere() -> None:
    units = np.full(4000, 60)
    length, start = noise_mask.sample_span_starts_and_lengths(
        SpanMasking().length_probs, 0.15 * units, units, draw(4000)
    )
    covered = noise_mask.spans_to_mask(start, length, 60).mean(0)
    assert covered[8:-8] == pytest.approx(np.full(44, covered[8:-8].mean()), abs=0.025)
    assert covered.min() > 0.03


def test_a_row_with_little_text_gets_what_fits() -> None:
    units = np.array([0, 1, 2, 3, 500])
    length, start = noise_mask.sample_span_starts_and_lengths(
        noise_mask.poisson_length_probs(3.0), 0.9 * units, units, draw(5)
    )
    for n, sizes, starts in zip(units, length, start, strict=True):
        used = sizes >= 0
        assert (starts[used] + sizes[used] <= n).all()
    assert (length[0] < 0).all()


def test_scattered_spans_of_a_row_do_not_depend_on_the_others() -> None:
    units = np.array([400, 30, 12, 100] * 10)
    length, start = noise_mask.sample_span_starts_and_lengths(SpanMasking().length_probs, 0.15 * units, units, draw(40))
    for i in range(40):
        n, used = units[i : i + 1], length[i] >= 0
        alone, starts = noise_mask.sample_span_starts_and_lengths(
            SpanMasking().length_probs, 0.15 * n, n, CounterRNG(1, np.array([i]))
        )
        assert alone[0][alone[0] >= 0].tolist() == length[i][used].tolist()
        assert starts[0][alone[0] >= 0].tolist() == start[i][used].tolist()


def test_windows_by_hand(written: Callable[..., CounterRNG]) -> None:
    # A quarter: windows of 4, 8 and 4 for spans of 1, 2 and 1. Two positions at the start and a later one are not text.
    maskable = np.array([[0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]], bool)
    draws = written(bare(maskable), span_lengths=[[0, 1, 0]], span_places=[[0.5, 0.8, 0.0]])
    # The third token of the first four; of the next eight the sixth and seventh, that is the tenth and eleventh.
    assert noise_mask.sample_windowed_spans(maskable, 0.25, 2, draws).astype(int).tolist() == [
        [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0]
    ]


@pytest.mark.parametrize(("share", "longest"), [(1 / 6, 5), (0.25, 1), (0.3, 1), (0.3, 5), (0.7, 3), (0.9, 5)])
def test_windows_have_their_rate(share: float, longest: int) -> None:
    maskable = np.ones((800, 128), bool)
    assert noise_mask.sample_windowed_spans(maskable, share, longest, draw(800)).mean() == pytest.approx(
        share, abs=0.005
    )


@pytest.mark.parametrize("changes", [{"p": 0.0}, {"p": 1.0}, {"p": float("nan")}, {"max_span_length": 0}])
def test_span_lengths_that_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"objective\.masking\.p"):
        SpanMasking(**changes)  # type: ignore[arg-type]


# --- all of them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chooser", [TokenMasking(), WholeWordMasking(), SalientSpanMasking(), SpanMasking(), NgramMasking()]
)
def test_noise_of_a_row_does_not_depend_on_the_others(
    chooser: TokenMasking | WholeWordMasking | SalientSpanMasking | SpanMasking | NgramMasking,
    random_rows: Callable[..., Rows],
    slice_rows: Callable[..., Rows],
) -> None:
    rows = random_rows([[62], [20, 20], [3], [40, 9]] * 5, 64, BERT)
    together = chooser(rows, 0.15, draw(20))
    for i in range(20):
        alone = chooser(slice_rows(rows, [i]), 0.15, CounterRNG(1, np.array([i])))
        assert (alone[0] == together[i]).all()


# --- T5's spans ---------------------------------------------------------------------------------------------------


def layout(*rows: list[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `doc` and `maskable` of documents with the given numbers of tokens and an end token each, then padding."""
    doc, maskable = np.full((len(rows), width), -1, np.int32), np.zeros((len(rows), width), bool)
    for b, lengths in enumerate(rows):
        at = 0
        for d, n in enumerate(lengths):
            doc[b, at : at + n + 1], maskable[b, at : at + n] = d, True
            at += n + 1
    return doc, maskable


def spans(rows: list[list[int]], width: int, noise: int, count: int, seed: int = 1) -> np.ndarray:
    """The same numbers of noise tokens and spans for all rows."""
    doc, maskable = layout(*rows, width=width)
    every = np.ones(len(rows), np.int64)
    return noise_mask.t5_noise_mask(doc, maskable, noise * every, count * every, draw(len(rows), seed))


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
        assert [position == "X" for position in expected + padding] == mask.tolist()


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
    """The published algorithm: shuffle the marks that open a segment, alternate text and noise."""

    def segments(total: int) -> list[int]:
        opens = np.arange(total - 1) < count - 1
        rng.shuffle(opens)
        edges = [0, *(np.flatnonzero(opens) + 1).tolist(), total]
        return [b - a for a, b in pairwise(edges)]

    mask: list[bool] = []
    for text, hidden in zip(segments(length - noise), segments(noise), strict=True):
        mask += [False] * text + [True] * hidden
    return np.array(mask)


def test_t5_spans_have_the_published_distribution() -> None:
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
def test_the_counts_of_a_row_are_exact_and_no_span_crosses_a_document_boundary(noise: int, count: int) -> None:
    rows = some_rows(1000, 142)
    doc, maskable = layout(*rows, width=142)
    mask = spans(rows, 142, noise, count)
    assert (mask.sum(1) == noise).all()
    assert not mask[~maskable].any()
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


def test_spans_of_a_row_do_not_depend_on_the_others() -> None:
    rows = some_rows(40, 142)
    doc, maskable = layout(*rows, width=142)
    noise, count = np.arange(40) % 8 + 8, np.arange(40) % 8 + 1
    together = noise_mask.t5_noise_mask(doc, maskable, noise, count, draw(40))
    for i in range(40):
        one = slice(i, i + 1)
        alone = noise_mask.t5_noise_mask(doc[one], maskable[one], noise[one], count[one], CounterRNG(1, np.array([i])))
        assert (alone[0] == together[i]).all()
