"""What each objective promises, counted over more than 100,000 tokens; seeds are fixed, so what passes once passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from firth.objectives import (
    BART,
    IGNORED,
    MLM,
    NAMED,
    Batch,
    Draw,
    Mixture,
    PermutationLM,
    SalientSpans,
    SpanCorruption,
    Spans,
    Weighted,
    choose,
)
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
UNLIKELY = 1e-3

Maker = Callable[..., Rows]
Applier = Callable[..., Batch]


def lawful(values: np.ndarray, law: np.ndarray) -> float:
    """The chance that whole numbers drawn from a law fill its cells at least this unevenly; rare cells are one."""
    expected, counts = law * len(values), np.bincount(values, minlength=len(law))
    assert len(counts) == len(law), "a number that the law does not have"
    assert (counts[law == 0] == 0).all()
    common = expected >= 10
    cells = [np.append(c[common], c[~common].sum()) for c in (counts, expected)]
    few = cells[1][-1] < 1
    return float(stats.chisquare(*(c[:-1] if few else c for c in cells), sum_check=False).pvalue)


def runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each run of a mask: its row, its first place, and the place after its last."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, start = np.nonzero(edges == 1)
    return row, start, np.nonzero(edges == -1)[1]


def count_in(bits: np.ndarray, row: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many bits are set in each run."""
    before = np.pad(np.cumsum(bits, 1), ((0, 0), (1, 0)))
    return before[row, end] - before[row, start]


def asked_mask(batch: Batch) -> np.ndarray:
    mask = np.zeros(batch.tokens.shape, bool)
    row, slot = np.nonzero(batch.labels != IGNORED)
    mask[row, batch.asked[row, slot]] = True
    assert mask.sum() == batch.num_answers, "no place is asked twice"
    return mask


# --- masked tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlm", "whole-word", "span", "salient", "static", "rtd", "unilm", "nsp", "sop", "tlm"]
)
def test_masks_keep_their_promises(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    objective = NAMED[name]
    count = 8000 if name == "span" else 1000  # the tokens of a span share their fate
    rows = rows_for(objective, count, 128, documents=1 if objective.layout != "packed" else 3, missing=9)
    assert rows.real.sum() > 110_000
    batch, asked = apply(name, rows), asked_mask(apply(name, rows))
    promised = MLM().promises() if name == "unilm" else objective.promises()

    assert not asked[~rows.real].any(), "neither frames nor padding are asked"
    assert (batch.tokens[~asked] == rows.tokens[~asked]).all(), "nor is anything else hidden"
    truth, read = rows.tokens[asked], batch.tokens[asked]
    assert (batch.labels[batch.labels != IGNORED] == truth).all()
    assert asked.sum() / rows.real.sum() == pytest.approx(promised["asked"], abs=0.005)

    masked, kept = read == MASK, read == truth
    other = read[~masked & ~kept]
    by_chance = promised["random"] / len(vocab.ordinary)  # a random token that is the true one
    assert masked.mean() == pytest.approx(promised["masked"], abs=0.01)
    assert kept.mean() == pytest.approx(promised["kept"] + by_chance, abs=0.01)
    assert len(other) / len(read) == pytest.approx(promised["random"] - by_chance, abs=0.01)
    assert np.isin(other, vocab.ordinary).all()
    if promised["random"]:
        cells = np.bincount(np.searchsorted(vocab.ordinary, other) * 40 // len(vocab.ordinary), minlength=40)
        assert stats.chisquare(cells, len(other) * cell_sizes(len(vocab.ordinary), 40)).pvalue > UNLIKELY


def cell_sizes(count: int, cells: int) -> np.ndarray:
    """The shares of so many things that fall into each of some cells."""
    return np.bincount(np.arange(count) * cells // count, minlength=cells) / count


def test_words_are_whole_and_each_token_has_its_own_fate(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(NAMED["whole-word"], 1000, 128, documents=3)
    assert rows.word_start is not None
    batch = apply("whole-word", rows)
    asked = asked_mask(batch)
    word = np.cumsum(rows.word_start, 1) + 1000 * rows.index[:, None]
    sizes, hidden = (np.bincount(word[mask], minlength=word.max() + 1) for mask in (rows.real, asked))
    assert ((hidden == 0) | (hidden == sizes)).all()
    assert (hidden > 1).sum() > 1000
    # Two tokens of a word are both masked as often as two independent ones.
    second = asked & ~rows.word_start
    first = np.roll(second, -1, 1)
    both = (batch.tokens[second] == MASK) & (batch.tokens[first] == MASK)
    assert both.mean() == pytest.approx(0.64, abs=0.02)


def word_lengths(rows: Rows, mask: np.ndarray) -> np.ndarray:
    """How many words each run of a mask has."""
    assert rows.word_start is not None
    return count_in(rows.word_start, *runs(mask))


@pytest.mark.parametrize(("length", "documents"), [(128, 1), (512, 1), (128, 4)])
def test_spans_have_lengths_from_the_published_law(
    length: int, documents: int, rows_for: Maker, apply: Applier
) -> None:
    """In words, truncated geometric (SpanBERT, section 3.1), whatever the rows are packed of."""
    rows = rows_for(NAMED["span"], 400_000 // length, length, documents)
    lengths = word_lengths(rows, asked_mask(apply("span", rows)))
    assert len(lengths) > 10_000
    assert lawful(lengths, Spans().law) > UNLIKELY
    assert lengths.mean() == pytest.approx(3.8, abs=0.06)


def test_spans_have_one_fate_and_know_their_surroundings(rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    rows = rows_for(NAMED["span"], 1000, 128, documents=3)
    batch = apply("span", rows)
    asked = asked_mask(batch)
    row, start, end = runs(asked)
    size = end - start
    masked, kept = (count_in(fate, row, start, end) for fate in (batch.tokens == MASK, batch.tokens == rows.tokens))
    assert np.isin(masked, [0, *np.unique(size)]).all()
    assert ((masked == 0) | (masked == size)).all()
    assert ((kept == size) | (kept <= 2)).all(), "a random token may happen to be the true one"
    assert (masked == size).mean() == pytest.approx(0.8, abs=0.02)
    assert (kept == size).mean() == pytest.approx(0.1, abs=0.02)

    used = batch.labels != IGNORED
    before, after, which = (batch.boundary[..., k][used] for k in range(3))
    assert (before == np.repeat(start - 1, size)).all()
    assert (after == np.repeat(end, size)).all()
    assert (which == batch.asked[used] - before - 1).all()
    rows_of = np.nonzero(used)[0]
    assert not asked[rows_of, before].any()
    assert not asked[rows_of, after].any()
    assert (rows.doc[rows_of, before] == rows.doc[rows_of, after]).all()
    assert (batch.boundary[~used] == 0).all()


def test_slots_are_hardly_ever_too_few_for_spans(rows_for: Maker, apply: Applier) -> None:
    batch = apply("span", rows_for(NAMED["span"], 2000, 128))
    assert batch.labels.shape[1] == Spans().slots(0.15, 128)
    assert ((batch.labels != IGNORED).sum(1) > batch.labels.shape[1] - 2).mean() < 0.02


def test_salient_text_is_asked_first(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(NAMED["salient"], 1000, 128, documents=3)
    assert rows.salient is not None
    asked = asked_mask(apply("salient", rows))
    assert rows.salient[rows.real].mean() == pytest.approx(0.06, abs=0.01)
    assert asked[rows.salient].mean() > 0.95
    assert asked[rows.real & ~rows.salient].mean() == pytest.approx((0.15 - 0.06) / 0.94, abs=0.02)


def test_half_of_the_pairs_are_passed_on_as_they_are(rows_for: Maker, apply: Applier) -> None:
    for name in ("nsp", "sop"):
        rows = rows_for(NAMED[name], 200, 64)
        batch = apply(name, rows)
        assert batch.pair is rows.pair
        assert batch.segment is rows.segment
        assert batch.counts["pairs"] == 200


# --- language models ----------------------------------------------------------------------------------------------


def test_permutation_lm_asks_a_sixth_in_short_spans(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(PermutationLM(), 1000, 128, documents=3)
    batch = apply("permutation-lm", rows)
    asked = asked_mask(batch)
    assert (batch.tokens == rows.tokens).all(), "everything is read as it is"
    assert not asked[~rows.real].any()
    assert asked.sum() / rows.real.sum() == pytest.approx(1 / 6, abs=0.005)
    assert ((batch.rank > 0) == asked).all()
    # A window of 6 for a span of 1, and so on: spans of all lengths are equally frequent. Spans that touch are one run.
    _, start, end = runs(asked)
    assert (end - start).max() <= 10
    assert (end - start).mean() == pytest.approx(3.0, abs=0.35)


def test_permutation_lm_with_other_shares(rows_for: Maker, apply: Applier) -> None:
    for share, longest in ((0.3, 1), (0.3, 5), (0.5, 3), (0.85, 4)):
        objective = PermutationLM(share, longest)
        rows = rows_for(objective, 400, 128)
        assert apply(objective, rows).num_answers / rows.real.sum() == pytest.approx(share, abs=0.008)


@pytest.mark.parametrize("name", ["prefix-lm", "encoder-decoder-lm"])
def test_half_of_the_text_is_asked_when_the_prefix_is_random(name: str, rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(NAMED[name], 4000, 64, documents=1)
    assert apply(name, rows).num_answers / (rows.doc >= 0).sum() == pytest.approx(0.5, abs=0.015)


# --- T5 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["span-corruption", "lm-denoising", "prefix-lm-denoising"])
def test_sentinels_rise_in_each_document(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    rows = rows_for(NAMED[name], 400, 512, documents=4)
    batch = apply(name, rows)
    assert rows.real.sum() > 150_000
    one_row = batch.decoder_tokens is None
    sides = [(batch.tokens, batch.doc)] + ([] if one_row else [(batch.labels, batch.decoder_doc)])
    for tokens, doc in sides:
        number = np.where(tokens >= 900, 999 - tokens, -1)
        row, place = np.nonzero(number >= 0)
        key = row * 8 + doc[row, place]
        found = number[row, place]
        new = np.diff(key, prepend=-1) != 0
        again = (found == 0) & ~new
        assert (found[new] == 0).all(), "each document counts from 0"
        assert again.sum() == (new.sum() if one_row else 0), "and where its answers follow in the row, again"
        assert (np.diff(found, prepend=-1)[~new & ~again] == 1).all()
    noise = (batch.labels != IGNORED) & (batch.labels < 900) & (batch.labels >= 7)
    assert noise.sum() / rows.real.sum() == pytest.approx(0.15, abs=0.005)


def test_span_lengths_of_t5_average_three(rows_for: Maker) -> None:
    objective = SpanCorruption()
    rows = rows_for(objective, 250, 512)
    _, start, end = runs(objective.noise(rows, Draw(1, rows.index)))
    assert (end - start).mean() == pytest.approx(85 / 28)


def test_salient_spans_ask_their_share(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(SalientSpans(), 1000, 128, documents=3)
    batch = apply("salient-spans", rows)
    noise = (batch.labels >= 7) & (batch.labels < 900)
    assert noise.sum() / rows.real.sum() == pytest.approx(0.15, abs=0.005)


# --- BART ---------------------------------------------------------------------------------------------------------


def bart(**noise: float) -> BART:
    return BART(**({"permute": 0.0, "infill": 0.0} | noise))  # type: ignore[arg-type]


def inner(tokens: np.ndarray, doc: np.ndarray, d: int) -> list[int]:
    """The text of a document, which must stand in its frame."""
    first, *text, last = tokens[doc == d].tolist()
    assert (first, last) == (CLS, SEP)
    return text


def documents(rows: Rows, batch: Batch) -> list[tuple[int, int, list[int], list[int]]]:
    """Of each document its row, its number, its text before and its text after the noise."""
    return [
        (b, d, inner(rows.tokens[b], rows.doc[b], d), inner(batch.tokens[b], batch.doc[b], d))
        for b in range(len(rows.tokens))
        for d in range(rows.doc[b].max() + 1)
    ]


def sentences(text: list[int], ends: list[bool]) -> list[tuple[int, ...]]:
    cuts = [0, *(i + 1 for i, end in enumerate(ends) if end)]
    return [tuple(text[a:b]) for a, b in pairwise(cuts)]


def test_sentences_are_permuted_and_nothing_else(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BART(), 1000, 128, documents=3)
    assert rows.sentence_end is not None
    batch = apply(bart(permute=1.0), rows)
    assert (batch.tokens[~rows.real] == rows.tokens[~rows.real]).all()
    assert (batch.doc == rows.doc).all()
    moved = 0
    places = np.zeros((3, 3), int)
    for b, d, before, after in documents(rows, batch):
        mine = (rows.doc[b] == d) & rows.real[b]
        units = sentences(before, rows.sentence_end[b][mine].tolist())
        assert sum(units, ()) == tuple(before)
        assert Counter(cut_like(after, units)) == Counter(units)
        moved += before != after
        if len(units) == 3 and len(set(units)) == 3:
            order = cut_like(after, units)
            for i, unit in enumerate(units):
                places[i, order.index(unit)] += 1
    assert moved > 1000
    assert places.sum() > 500
    assert stats.chisquare(places.ravel()).pvalue > UNLIKELY, "any sentence comes to any place"


def cut_like(text: list[int], units: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same units found again in a text that is made of them."""
    left, found = Counter(units), []
    while text:
        fits = [unit for unit in left if tuple(text[: len(unit)]) == unit]
        assert fits, "a sentence was torn"
        unit = max(fits, key=len)
        left -= Counter([unit])
        found.append(unit)
        text = text[len(unit) :]
    return found


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_documents_are_rotated(share: float, rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BART(), 1000, 128, documents=3)
    batch = apply(bart(rotate=share), rows)
    turned, total, where = 0, 0, []
    for _, _, before, after in documents(rows, batch):
        if len(set(before)) < len(before) or len(before) < 20:
            continue
        by = before.index(after[0])
        assert after == before[by:] + before[:by]
        turned, total = turned + (by > 0), total + 1
        where += [by / len(before)] if by else []
    assert turned / total == pytest.approx(share * 0.97, abs=0.06)
    assert stats.kstest(where, "uniform").pvalue > UNLIKELY


def test_a_share_of_the_tokens_is_deleted_or_masked(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BART(), 1000, 128, documents=3)
    deleted = apply(bart(delete=0.15), rows)
    gone = 1 - ((deleted.doc >= 0).sum() - (~rows.real & (rows.doc >= 0)).sum()) / rows.real.sum()
    assert gone == pytest.approx(0.15, abs=0.005)
    for _, _, before, after in documents(rows, deleted)[:300]:
        rest = iter(before)
        assert all(token in rest for token in after), "what remains stands in order"

    masked = apply(bart(mask=0.15), rows)
    changed = masked.tokens != rows.tokens
    assert changed.sum() / rows.real.sum() == pytest.approx(0.15, abs=0.005)
    assert (masked.tokens[changed] == MASK).all()
    assert rows.real[changed].all()


@pytest.mark.parametrize(("length", "documents"), [(128, 1), (512, 1), (128, 4)])
def test_infilling_follows_its_law(
    length: int, documents: int, rows_for: Maker, apply: Applier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask for each span; lengths are Poisson around 3, none included (BART, section 2.2)."""
    drawn = []
    scatter = choose.scatter_spans

    def remember(*words: Any) -> tuple[np.ndarray, np.ndarray]:
        drawn.append(scatter(*words))
        return drawn[-1]

    monkeypatch.setattr(choose, "scatter_spans", remember)
    rows = rows_for(BART(), 200_000 // length, length, documents)
    batch = apply(bart(infill=0.3), rows)
    units, frames = rows.real.sum(1), (~rows.real & (rows.doc >= 0)).sum(1)
    masks = (batch.tokens == MASK).sum(1)
    removed = units - ((batch.doc >= 0).sum(1) - frames - masks)

    lengths = drawn[0][0][drawn[0][0] >= 0]
    assert lawful(lengths, choose.poisson(3.0)) > UNLIKELY
    assert np.mean(lengths == 0) == pytest.approx(np.exp(-3), abs=0.01)
    assert lengths.sum() == removed.sum()
    assert len(lengths) == masks.sum(), "one mask for each span"
    assert removed.sum() / units.sum() == pytest.approx(0.3, abs=0.005)


@pytest.mark.parametrize("count", [1, 4])
def test_lengths_of_infilled_spans_can_be_read_off_the_text(count: int, rows_for: Maker, apply: Applier) -> None:
    """In text that counts upwards a mask shows by its neighbours how much it stands for."""
    rows = rows_for(BART(), 1500, 128, count)
    place = np.cumsum(rows.real, 1) + 6
    rows = rows._replace(tokens=np.where(rows.real, place, rows.tokens))
    batch = apply(bart(infill=0.3), rows)
    found = []
    for _, _, before, after in documents(rows, batch):
        left = before[0] - 1
        bounds = [*after, before[-1] + 1]
        for i, token in enumerate(after):
            if token == MASK:
                assert bounds[i + 1] != MASK, "some text lies between two spans"
                found.append(bounds[i + 1] - left - 1)
            else:
                left = token
    assert len(found) > 15_000
    assert lawful(np.array(found), choose.poisson(3.0)) > UNLIKELY


def test_bart_composed_keeps_all_of_its_shares(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BART(), 1000, 128, documents=2)
    batch = apply(BART(permute=1.0, rotate=0.5, delete=0.1, mask=0.1, infill=0.2), rows)
    frames = (~rows.real & (rows.doc >= 0)).sum()
    masks, text = (batch.tokens == MASK).sum(), (batch.doc >= 0).sum() - frames
    left = rows.real.sum() * 0.9  # after deletion
    spans = left * 0.2 / 3
    assert text == pytest.approx(left * 0.8 + spans, rel=0.02)
    assert masks == pytest.approx(spans + 0.1 * (text - spans), rel=0.03)
    assert (batch.labels[rows.doc >= 0] == rows.tokens[rows.doc >= 0]).all()


# --- mixtures -----------------------------------------------------------------------------------------------------


def share_of(mixture: Any, count: int) -> np.ndarray:
    index = np.arange(count)
    return np.bincount(mixture.part_of(Draw(3, index, index // 4)), minlength=len(mixture.parts)) / count


def test_rows_and_steps_are_dealt_out_by_weight() -> None:
    parts = (Weighted(MLM(), 6.0), Weighted(MLM(rate=0.3), 3.0), Weighted(MLM(rate=0.5), 1.0))
    assert share_of(Mixture(parts), 100_000) == pytest.approx([0.6, 0.3, 0.1], abs=0.005)
    assert share_of(Mixture(parts, per="batch"), 400_000) == pytest.approx([0.6, 0.3, 0.1], abs=0.005)
    assert share_of(NAMED["unilm"], 100_000) == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 6], abs=0.005)
    assert share_of(NAMED["denoisers"], 100_000) == pytest.approx(np.full(5, 0.2), abs=0.005)


def test_a_step_is_of_one_part() -> None:
    parts = (Weighted(MLM()), Weighted(MLM(rate=0.3)))
    index = np.arange(4000)
    of = Mixture(parts, per="batch").part_of(Draw(3, index, index // 4)).reshape(-1, 4)
    assert (of == of[:, :1]).all()
    of = Mixture(parts, per="row").part_of(Draw(3, index, index // 4)).reshape(-1, 4)
    assert (of != of[:, :1]).any()
