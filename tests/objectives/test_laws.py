"""Rates and distributions of each objective over more than 100,000 tokens; seeds are fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from firth.objectives import (
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    BARTDenoising,
    Batch,
    CounterRNG,
    Mixture,
    NgramMasking,
    PermutationLM,
    SalientSpanCorruption,
    SpanCorruption,
    SpanMasking,
    WeightedObjective,
    noise_mask,
)
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
UNLIKELY = 1e-3

Maker = Callable[..., Rows]
Applier = Callable[..., Batch]


def lawful(values: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of a chi-squared test of integers against a distribution; rare cells are merged."""
    expected, counts = law * len(values), np.bincount(values, minlength=len(law))
    assert len(counts) == len(law), "a number outside the distribution"
    assert (counts[law == 0] == 0).all()
    common = expected >= 10
    cells = [np.append(c[common], c[~common].sum()) for c in (counts, expected)]
    few = cells[1][-1] < 1
    return float(stats.chisquare(*(c[:-1] if few else c for c in cells), sum_check=False).pvalue)


def runs(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row, the first position and the position after the last of each run of a mask."""
    edges = np.diff(np.pad(mask.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    row, start = np.nonzero(edges == 1)
    return row, start, np.nonzero(edges == -1)[1]


def count_in(bits: np.ndarray, row: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """How many bits are set in each run."""
    before = np.pad(np.cumsum(bits, 1), ((0, 0), (1, 0)))
    return before[row, end] - before[row, start]


def target_mask(batch: Batch) -> np.ndarray:
    mask = np.zeros(batch.input_ids.shape, bool)
    row, slot = np.nonzero(batch.labels != IGNORE_INDEX)
    mask[row, batch.target_positions[row, slot]] = True
    assert mask.sum() == batch.num_targets, "no position is predicted twice"
    return mask


# --- masked tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlm", "whole-word", "span", "salient", "static", "rtd", "unilm", "nsp", "sop", "albert", "tlm"]
)
def test_mlm_rates(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    objective = OBJECTIVES[name]
    count = 8000 if name == "span" else 1000  # the tokens of a span share their fate
    rows = rows_for(objective, count, 128, documents=1 if objective.row_layout != "packed" else 3, missing=9)
    assert rows.maskable.sum() > 110_000
    batch, targets = apply(name, rows), target_mask(apply(name, rows))
    promised = MLM().expected_rates() if name == "unilm" else objective.expected_rates()

    assert not targets[~rows.maskable].any(), "neither special tokens nor padding are targets"
    assert (batch.input_ids[~targets] == rows.input_ids[~targets]).all(), "nothing else changes"
    truth, read = rows.input_ids[targets], batch.input_ids[targets]
    assert (batch.labels[batch.labels != IGNORE_INDEX] == truth).all()
    assert targets.sum() / rows.maskable.sum() == pytest.approx(promised["targets"], abs=0.005)

    masked, kept = read == MASK, read == truth
    other = read[~masked & ~kept]
    by_chance = promised["random"] / len(vocab.non_special_ids)  # a random token that is the true one
    assert masked.mean() == pytest.approx(promised["masked"], abs=0.01)
    assert kept.mean() == pytest.approx(promised["kept"] + by_chance, abs=0.01)
    assert len(other) / len(read) == pytest.approx(promised["random"] - by_chance, abs=0.01)
    assert np.isin(other, vocab.non_special_ids).all()
    if promised["random"]:
        cells = np.bincount(
            np.searchsorted(vocab.non_special_ids, other) * 40 // len(vocab.non_special_ids), minlength=40
        )
        assert stats.chisquare(cells, len(other) * cell_sizes(len(vocab.non_special_ids), 40)).pvalue > UNLIKELY


def cell_sizes(count: int, cells: int) -> np.ndarray:
    """Return the share of each cell."""
    return np.bincount(np.arange(count) * cells // count, minlength=cells) / count


def test_words_are_whole_and_each_token_has_its_own_draw(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(OBJECTIVES["whole-word"], 1000, 128, documents=3)
    assert rows.word_start is not None
    batch = apply("whole-word", rows)
    targets = target_mask(batch)
    word = np.cumsum(rows.word_start, 1) + 1000 * rows.stream_index[:, None]
    sizes, hidden = (np.bincount(word[mask], minlength=word.max() + 1) for mask in (rows.maskable, targets))
    assert ((hidden == 0) | (hidden == sizes)).all()
    assert (hidden > 1).sum() > 1000
    # Two tokens of a word are both masked as often as two independent ones.
    second = targets & ~rows.word_start
    first = np.roll(second, -1, 1)
    both = (batch.input_ids[second] == MASK) & (batch.input_ids[first] == MASK)
    assert both.mean() == pytest.approx(0.64, abs=0.02)


def word_lengths(rows: Rows, mask: np.ndarray) -> np.ndarray:
    """How many words each run of a mask has."""
    assert rows.word_start is not None
    return count_in(rows.word_start, *runs(mask))


@pytest.mark.parametrize(("length", "documents"), [(128, 1), (512, 1), (128, 4)])
def test_span_lengths_have_the_published_distribution(
    length: int, documents: int, rows_for: Maker, apply: Applier
) -> None:
    """In words, truncated geometric (SpanBERT, section 3.1), whatever the rows are packed of."""
    rows = rows_for(OBJECTIVES["span"], 400_000 // length, length, documents)
    lengths = word_lengths(rows, target_mask(apply("span", rows)))
    assert len(lengths) > 10_000
    assert lawful(lengths, SpanMasking().length_probs) > UNLIKELY
    assert lengths.mean() == pytest.approx(3.8, abs=0.06)


def test_ngrams_of_albert_have_the_published_distribution(rows_for: Maker, apply: Applier) -> None:
    """p(n) = (1/n) / sum_k (1/k) for n = 1, 2, 3 words (ALBERT, section 4.1), and 15% of each text of a pair."""
    assert NgramMasking().length_probs.tolist() == pytest.approx([0, 6 / 11, 3 / 11, 2 / 11])
    rows = rows_for(OBJECTIVES["albert"], 3000, 128)
    second, gap = (rows.position_ids > 60).astype(np.int32), rows.position_ids == 60  # [SEP] between the two texts
    starts = rows.word_start | (rows.maskable & (rows.position_ids == 61))
    rows = rows._replace(token_type_ids=second, maskable=rows.maskable & ~gap, word_start=starts & ~gap)
    batch = apply("albert", rows)
    targets = target_mask(batch)
    lengths = word_lengths(rows, targets)
    assert len(lengths) > 20_000
    assert lawful(lengths, NgramMasking().length_probs) > UNLIKELY
    for text in (0, 1):
        here = rows.maskable & (second == text)
        assert targets[here].mean() == pytest.approx(0.15, abs=0.003)
    # Two tokens of an n-gram are both masked as often as two independent ones.
    pairs = targets[:, 1:] & targets[:, :-1]
    masked = batch.input_ids == MASK
    assert (masked[:, 1:] & masked[:, :-1])[pairs].mean() == pytest.approx(0.64, abs=0.01)


def test_spans_have_one_draw_and_right_boundaries(rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    rows = rows_for(OBJECTIVES["span"], 1000, 128, documents=3)
    batch = apply("span", rows)
    targets = target_mask(batch)
    row, start, end = runs(targets)
    size = end - start
    masked, kept = (
        count_in(fate, row, start, end) for fate in (batch.input_ids == MASK, batch.input_ids == rows.input_ids)
    )
    assert np.isin(masked, [0, *np.unique(size)]).all()
    assert ((masked == 0) | (masked == size)).all()
    assert ((kept == size) | (kept <= 2)).all(), "a random token may happen to be the true one"
    assert (masked == size).mean() == pytest.approx(0.8, abs=0.02)
    assert (kept == size).mean() == pytest.approx(0.1, abs=0.02)

    used = batch.labels != IGNORE_INDEX
    before, after, which = (batch.span_boundaries[..., k][used] for k in range(3))
    assert (before == np.repeat(start - 1, size)).all()
    assert (after == np.repeat(end, size)).all()
    assert (which == batch.target_positions[used] - before - 1).all()
    rows_of = np.nonzero(used)[0]
    assert not targets[rows_of, before].any()
    assert not targets[rows_of, after].any()
    assert (rows.document_ids[rows_of, before] == rows.document_ids[rows_of, after]).all()
    assert (batch.span_boundaries[~used] == 0).all()


def test_slots_are_hardly_ever_too_few_for_spans(rows_for: Maker, apply: Applier) -> None:
    batch = apply("span", rows_for(OBJECTIVES["span"], 2000, 128))
    assert batch.labels.shape[1] == SpanMasking().num_slots(0.15, 128)
    assert ((batch.labels != IGNORE_INDEX).sum(1) > batch.labels.shape[1] - 2).mean() < 0.02
    batch = apply("albert", rows_for(OBJECTIVES["albert"], 2000, 128))
    assert batch.labels.shape[1] == NgramMasking().num_slots(0.15, 128) == 27
    assert ((batch.labels != IGNORE_INDEX).sum(1) > batch.labels.shape[1] - 2).mean() < 0.03


def test_salient_text_is_masked_first(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(OBJECTIVES["salient"], 1000, 128, documents=3)
    assert rows.salient is not None
    targets = target_mask(apply("salient", rows))
    assert rows.salient[rows.maskable].mean() == pytest.approx(0.06, abs=0.01)
    assert targets[rows.salient].mean() > 0.95
    assert targets[rows.maskable & ~rows.salient].mean() == pytest.approx((0.15 - 0.06) / 0.94, abs=0.02)


def test_pair_labels_are_kept(rows_for: Maker, apply: Applier) -> None:
    for name in ("nsp", "sop"):
        rows = rows_for(OBJECTIVES[name], 200, 64)
        batch = apply(name, rows)
        assert batch.pair_labels is rows.pair_labels
        assert batch.token_type_ids is rows.token_type_ids
        assert batch.loss_counts["pairs"] == 200


# --- language models ----------------------------------------------------------------------------------------------


def test_permutation_lm_predicts_a_sixth_in_short_spans(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(PermutationLM(), 1000, 128, documents=3)
    batch = apply("permutation-lm", rows)
    targets = target_mask(batch)
    assert (batch.input_ids == rows.input_ids).all(), "everything is read as it is"
    assert not targets[~rows.maskable].any()
    assert targets.sum() / rows.maskable.sum() == pytest.approx(1 / 6, abs=0.005)
    is_special = ~rows.maskable & (rows.document_ids >= 0)
    assert ((batch.attention_rank > 0) == targets | is_special).all(), "[SEP] and [CLS] have their turns too"
    # A window of 6 for a span of 1, and so on: spans of all lengths are equally frequent. Spans that touch are one run.
    _, start, end = runs(targets)
    assert (end - start).max() <= 10
    assert (end - start).mean() == pytest.approx(3.0, abs=0.35)


def test_permutation_lm_with_other_shares(rows_for: Maker, apply: Applier) -> None:
    for share, longest in ((0.3, 1), (0.3, 5), (0.5, 3), (0.85, 4)):
        objective = PermutationLM(share, longest)
        rows = rows_for(objective, 400, 128)
        assert apply(objective, rows).num_targets / rows.maskable.sum() == pytest.approx(share, abs=0.008)


@pytest.mark.parametrize("name", ["prefix-lm", "encoder-decoder-lm"])
def test_half_of_the_text_is_predicted_after_a_random_prefix(name: str, rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(OBJECTIVES[name], 4000, 64, documents=1)
    assert apply(name, rows).num_targets / (rows.document_ids >= 0).sum() == pytest.approx(0.5, abs=0.015)


# --- T5 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["span-corruption", "lm-denoising", "prefix-lm-denoising"])
def test_sentinels_rise_in_each_document(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    rows = rows_for(OBJECTIVES[name], 400, 512, documents=4)
    batch = apply(name, rows)
    assert rows.maskable.sum() > 150_000
    one_row = batch.decoder_input_ids is None
    sides = [(batch.input_ids, batch.document_ids)] + ([] if one_row else [(batch.labels, batch.decoder_document_ids)])
    for tokens, doc in sides:
        number = np.where(tokens >= 900, 999 - tokens, -1)
        row, position = np.nonzero(number >= 0)
        key = row * 8 + doc[row, position]
        found = number[row, position]
        new = np.diff(key, prepend=-1) != 0
        again = (found == 0) & ~new
        assert (found[new] == 0).all(), "each document counts from 0"
        assert again.sum() == (new.sum() if one_row else 0), "and again in the target part of the row"
        assert (np.diff(found, prepend=-1)[~new & ~again] == 1).all()
    noise = (batch.labels != IGNORE_INDEX) & (batch.labels < 900) & (batch.labels >= 7)
    assert noise.sum() / rows.maskable.sum() == pytest.approx(0.15, abs=0.005)


def test_span_lengths_of_t5_average_three(rows_for: Maker) -> None:
    objective = SpanCorruption()
    rows = rows_for(objective, 250, 512)
    _, start, end = runs(objective.build_noise_mask(rows, CounterRNG(1, rows.stream_index)))
    assert (end - start).mean() == pytest.approx(85 / 28)


def test_salient_spans_have_their_rate(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(SalientSpanCorruption(), 1000, 128, documents=3)
    batch = apply("salient-spans", rows)
    noise = (batch.labels >= 7) & (batch.labels < 900)
    assert noise.sum() / rows.maskable.sum() == pytest.approx(0.15, abs=0.005)


# --- BART ---------------------------------------------------------------------------------------------------------


def bart(**noise: float) -> BARTDenoising:
    return BARTDenoising(**({"permute": 0.0, "infill": 0.0} | noise))  # type: ignore[arg-type]


def inner(tokens: np.ndarray, doc: np.ndarray, d: int) -> list[int]:
    """Return the text of a document, which must lie between its special tokens."""
    first, *text, last = tokens[doc == d].tolist()
    assert (first, last) == (CLS, SEP)
    return text


def documents(rows: Rows, batch: Batch) -> list[tuple[int, int, list[int], list[int]]]:
    """Of each document its row, its number, its text before and its text after the noise."""
    return [
        (b, d, inner(rows.input_ids[b], rows.document_ids[b], d), inner(batch.input_ids[b], batch.document_ids[b], d))
        for b in range(len(rows.input_ids))
        for d in range(rows.document_ids[b].max() + 1)
    ]


def sentences(text: list[int], ends: list[bool]) -> list[tuple[int, ...]]:
    cuts = [0, *(i + 1 for i, end in enumerate(ends) if end)]
    return [tuple(text[a:b]) for a, b in pairwise(cuts)]


def test_sentences_are_permuted_and_nothing_else(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BARTDenoising(), 1000, 128, documents=3)
    assert rows.sentence_end is not None
    batch = apply(bart(permute=1.0), rows)
    assert (batch.input_ids[~rows.maskable] == rows.input_ids[~rows.maskable]).all()
    assert (batch.document_ids == rows.document_ids).all()
    moved = 0
    counts_by_position = np.zeros((3, 3), int)
    for b, d, before, after in documents(rows, batch):
        mine = (rows.document_ids[b] == d) & rows.maskable[b]
        units = sentences(before, rows.sentence_end[b][mine].tolist())
        assert sum(units, ()) == tuple(before)
        assert Counter(cut_like(after, units)) == Counter(units)
        moved += before != after
        if len(units) == 3 and len(set(units)) == 3:
            order = cut_like(after, units)
            for i, unit in enumerate(units):
                counts_by_position[i, order.index(unit)] += 1
    assert moved > 1000
    assert counts_by_position.sum() > 500
    assert stats.chisquare(counts_by_position.ravel()).pvalue > UNLIKELY, "any sentence can move to any position"


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
    rows = rows_for(BARTDenoising(), 1000, 128, documents=3)
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
    rows = rows_for(BARTDenoising(), 1000, 128, documents=3)
    deleted = apply(bart(delete=0.15), rows)
    gone = (
        1
        - ((deleted.document_ids >= 0).sum() - (~rows.maskable & (rows.document_ids >= 0)).sum()) / rows.maskable.sum()
    )
    assert gone == pytest.approx(0.15, abs=0.005)
    for _, _, before, after in documents(rows, deleted)[:300]:
        rest = iter(before)
        assert all(token in rest for token in after), "the rest keeps its order"

    masked = apply(bart(mask=0.15), rows)
    changed = masked.input_ids != rows.input_ids
    assert changed.sum() / rows.maskable.sum() == pytest.approx(0.15, abs=0.005)
    assert (masked.input_ids[changed] == MASK).all()
    assert rows.maskable[changed].all()


@pytest.mark.parametrize(("length", "documents"), [(128, 1), (512, 1), (128, 4)])
def test_infilled_spans_have_their_distribution(
    length: int, documents: int, rows_for: Maker, apply: Applier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask for each span; lengths are Poisson around 3, none included (BART, section 2.2)."""
    drawn = []
    scatter = noise_mask.sample_span_starts_and_lengths

    def remember(*words: Any) -> tuple[np.ndarray, np.ndarray]:
        drawn.append(scatter(*words))
        return drawn[-1]

    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", remember)
    rows = rows_for(BARTDenoising(), 200_000 // length, length, documents)
    batch = apply(bart(infill=0.3), rows)
    units, num_special = rows.maskable.sum(1), (~rows.maskable & (rows.document_ids >= 0)).sum(1)
    masks = (batch.input_ids == MASK).sum(1)
    removed = units - ((batch.document_ids >= 0).sum(1) - num_special - masks)

    lengths = drawn[0][0][drawn[0][0] >= 0]
    assert lawful(lengths, noise_mask.poisson_length_probs(3.0)) > UNLIKELY
    assert np.mean(lengths == 0) == pytest.approx(np.exp(-3), abs=0.01)
    assert lengths.sum() == removed.sum()
    assert len(lengths) == masks.sum(), "one mask for each span"
    assert removed.sum() / units.sum() == pytest.approx(0.3, abs=0.005)


@pytest.mark.parametrize("count", [1, 4])
def test_lengths_of_infilled_spans_can_be_read_off_the_text(count: int, rows_for: Maker, apply: Applier) -> None:
    """In text that counts upwards the neighbours of a mask give the length of its span."""
    rows = rows_for(BARTDenoising(), 1500, 128, count)
    position = np.cumsum(rows.maskable, 1) + 6
    rows = rows._replace(input_ids=np.where(rows.maskable, position, rows.input_ids))
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
    assert lawful(np.array(found), noise_mask.poisson_length_probs(3.0)) > UNLIKELY


def test_bart_with_all_noises_keeps_its_rates(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(BARTDenoising(), 1000, 128, documents=2)
    batch = apply(BARTDenoising(permute=1.0, rotate=0.5, delete=0.1, mask=0.1, infill=0.2), rows)
    num_special = (~rows.maskable & (rows.document_ids >= 0)).sum()
    masks, text = (batch.input_ids == MASK).sum(), (batch.document_ids >= 0).sum() - num_special
    left = rows.maskable.sum() * 0.9  # after deletion
    spans = left * 0.2 / 3
    assert text == pytest.approx(left * 0.8 + spans, rel=0.02)
    assert masks == pytest.approx(spans + 0.1 * (text - spans), rel=0.03)
    assert (batch.labels[rows.document_ids >= 0] == rows.input_ids[rows.document_ids >= 0]).all()


# --- mixtures -----------------------------------------------------------------------------------------------------


def share_of(mixture: Any, count: int) -> np.ndarray:
    index = np.arange(count)
    return np.bincount(mixture.sample_parts(CounterRNG(3, index, index // 4)), minlength=len(mixture.parts)) / count


def test_rows_and_steps_are_dealt_out_by_weight() -> None:
    parts = (
        WeightedObjective(MLM(), 6.0),
        WeightedObjective(MLM(rate=0.3), 3.0),
        WeightedObjective(MLM(rate=0.5), 1.0),
    )
    assert share_of(Mixture(parts), 100_000) == pytest.approx([0.6, 0.3, 0.1], abs=0.005)
    assert share_of(Mixture(parts, sample_per="batch"), 400_000) == pytest.approx([0.6, 0.3, 0.1], abs=0.005)
    assert share_of(OBJECTIVES["unilm"], 100_000) == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 6], abs=0.005)
    assert share_of(OBJECTIVES["denoisers"], 100_000) == pytest.approx(np.full(5, 0.2), abs=0.005)


def test_a_step_has_one_part() -> None:
    parts = (WeightedObjective(MLM()), WeightedObjective(MLM(rate=0.3)))
    index = np.arange(4000)
    of = Mixture(parts, sample_per="batch").sample_parts(CounterRNG(3, index, index // 4)).reshape(-1, 4)
    assert (of == of[:, :1]).all()
    of = Mixture(parts, sample_per="row").sample_parts(CounterRNG(3, index, index // 4)).reshape(-1, 4)
    assert (of != of[:, :1]).any()
