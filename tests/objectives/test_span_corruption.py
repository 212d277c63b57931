"""Span corruption: the published figures, exact shapes, and nothing lost on the way; also in one row, and of names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.objectives import (
    IGNORE_INDEX,
    Batch,
    CounterRNG,
    DecoderDenoising,
    Objective,
    SalientSpanCorruption,
    SpanCorruption,
    SpanCorruptionAndMLM,
)
from firth.tokens import Rows, SequenceTemplate, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
TEXT = 500  # ids from here on are text, 40,000 of them
SENTINELS = tuple(range(TEXT - 1, 99, -1))
SENTINEL = np.zeros(TEXT + 40_000, bool)
SENTINEL[list(SENTINELS)] = True
SPECIAL = (PAD, END, UNK, CLS, SEP, MASK, BOS, *sorted(SENTINELS))
VOCAB = Vocabulary(len(SENTINEL), PAD, UNK, None, END, CLS, SEP, MASK, SENTINELS, SPECIAL)


def make_rows(layout: list[list[int]], width: int, template: SequenceTemplate) -> Rows:
    """Rows of documents with the given numbers of tokens; each token of a batch is unique."""
    shape = (len(layout), width)
    tokens, doc, position = np.full(shape, PAD), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    maskable, word = np.zeros(shape, bool), TEXT
    before = len(template.prefix_ids)
    for b, lengths in enumerate(layout):
        at = 0
        for d, n in enumerate(lengths):
            end = at + n + template.num_special_tokens()
            tokens[b, at:end] = [*template.prefix_ids, *range(word, word + n), *template.suffix_ids]
            doc[b, at:end], position[b, at:end] = d, np.arange(end - at)
            maskable[b, at + before : at + before + n] = True
            at, word = end, word + n
        assert at <= width
    assert word <= VOCAB.size
    return Rows(tokens, doc, position, maskable, np.arange(len(layout)))


def divide(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """A total cut into parts of at least 1, at random."""
    edges = np.sort(rng.choice(np.arange(1, total), parts - 1, replace=False)).tolist()
    return [b - a for a, b in pairwise([0, *edges, total])]


def apply(objective: Objective, rows: Rows, seed: int = 1) -> Batch:
    return objective(rows, CounterRNG(seed, rows.stream_index), VOCAB)


# --- span corruption: the figures ---------------------------------------------------------------------------------

T5 = SequenceTemplate((), (END,))


def test_the_published_lengths() -> None:
    # 568 tokens of text and the end: 85 are noise in 28 spans, 483 + 28 + 1 are read, 85 + 28 + 1 are written.
    objective = SpanCorruption()
    assert objective.build_template(VOCAB) == T5
    assert objective.source_length(512) == 569
    assert objective.encoder_decoder_lengths(569) == (512, 114)
    batch = apply(objective, make_rows([[568]] * 3, 569, T5))
    assert batch.input_ids.shape == (3, 512)
    assert batch.labels.shape == batch.decoder_input_ids.shape == (3, 114)
    assert SENTINEL[batch.input_ids].sum(1).tolist() == [28] * 3


def test_counts_by_hand() -> None:
    noise, spans = SpanCorruption().noise_counts(np.array([-1, 0, 1, 2, 10, 100, 568]))
    assert noise.tolist() == [0, 0, 0, 1, 2, 15, 85]  # 1.5 is rounded up
    assert spans.tolist() == [0, 0, 0, 1, 1, 5, 28]
    # Some text must remain, and each span has text before it.
    noise, spans = SpanCorruption(rate=0.9, mean_span=3).noise_counts(np.array([2, 4, 100]))
    assert noise.tolist() == [1, 3, 90]
    assert spans.tolist() == [1, 1, 10]


def test_further_documents_cost_noise_and_spans_where_the_target_is_full() -> None:
    filled, docs = np.array([569, 569, 569, 569, 560, 2]), np.array([1, 2, 3, 28, 2, 1])
    noise, spans = SpanCorruption().row_noise_counts(filled, docs, 114)
    assert noise.tolist() == [85, 84, 84, 71, 84, 0]
    assert spans.tolist() == [28, 27, 27, 14, 28, 0]


@pytest.mark.parametrize(("rate", "mean_span"), [(0.15, 3.0), (0.15, 1.0), (0.5, 3.0), (0.5, 32.0), (0.9, 2.0)])
def test_a_source_row_is_as_long_as_the_encoder_allows(rate: float, mean_span: float) -> None:
    objective = SpanCorruption(rate, mean_span)
    for length in (3, 16, 128, 513):
        source = objective.source_length(length)
        assert objective.encoder_decoder_lengths(source)[0] <= length < objective.encoder_decoder_lengths(source + 1)[0]
        assert source >= length


def test_a_row_takes_many_documents_by_default_and_always_one() -> None:
    assert SpanCorruption().max_documents(569) == 28
    assert SpanCorruption().max_documents(2) == 1
    assert SpanCorruption(0.15, 100.0).max_documents(100) == 1


# --- span corruption: invariants ----------------------------------------------------------------------------------


def rebuild(batch: Batch, b: int) -> list[list[int]]:
    """Rebuild the documents of a row from inputs and labels."""
    documents = []
    for d in range(batch.document_ids[b].max() + 1):
        read = batch.input_ids[b][batch.document_ids[b] == d].tolist()
        answer = batch.labels[b][(batch.decoder_document_ids[b] == d) & (batch.labels[b] != IGNORE_INDEX)].tolist()
        documents.append(join(read, answer))
    return documents


def join(read: list[int], answer: list[int]) -> list[int]:
    """Rebuild a document from its text with sentinels and its target."""
    assert answer[-1] == END
    spans: dict[int, list[int]] = {}
    for token in answer[:-1]:
        if SENTINEL[token]:
            span = spans[token] = []
        else:
            span.append(token)
    assert list(spans) == [t for t in read if SENTINEL[t]] == list(SENTINELS[: len(spans)])
    assert all(spans.values()), "no span is empty"
    return [t for token in read for t in spans.get(token, [token])]


def check(objective: SpanCorruption, layout: list[list[int]], width: int, seed: int = 1) -> Batch:
    """Check the invariants of a batch."""
    rows = make_rows(layout, width, T5)
    batch = apply(objective, rows, seed)
    encoder, decoder = objective.encoder_decoder_lengths(width)
    assert batch.input_ids.shape == batch.document_ids.shape == batch.position_ids.shape == (len(layout), encoder)
    assert batch.labels.shape == batch.decoder_input_ids.shape == (len(layout), decoder)
    assert batch.decoder_document_ids.shape == batch.decoder_position_ids.shape == (len(layout), decoder)
    for b, lengths in enumerate(layout):
        source = [rows.input_ids[b][rows.document_ids[b] == d].tolist() for d in range(len(lengths))]
        assert rebuild(batch, b) == source

        targets = batch.labels[b] != IGNORE_INDEX
        for tokens, doc, position in (
            (
                batch.input_ids[b][batch.document_ids[b] >= 0],
                batch.document_ids[b][batch.document_ids[b] >= 0],
                batch.position_ids[b],
            ),
            (batch.labels[b][targets], batch.decoder_document_ids[b][targets], batch.decoder_position_ids[b]),
        ):
            sizes = np.bincount(doc, minlength=len(lengths))
            assert (np.diff(doc) >= 0).all(), "documents stay in order"
            assert position[: len(doc)].tolist() == [p for n in sizes for p in range(n)]
            assert (tokens[np.cumsum(sizes) - 1] == END).all()
        used = int((batch.document_ids[b] >= 0).sum())
        assert (batch.document_ids[b][:used] >= 0).all(), "padding comes last"
        assert (batch.input_ids[b][used:] == PAD).all()
        assert (batch.position_ids[b][used:] == 0).all()

        # The decoder reads its labels shifted right, separately for each document.
        assert targets[: targets.sum()].all(), "padding comes last"
        for d in range(len(lengths)):
            mine = targets & (batch.decoder_document_ids[b] == d)
            assert batch.decoder_input_ids[b][mine].tolist() == [PAD, *batch.labels[b][mine][:-1].tolist()]
        assert np.isin(batch.decoder_document_ids[b], batch.document_ids[b][:used]).all(), (
            "whatever the decoder reads sees some text"
        )
    return batch


def full_rows(count: int, width: int, most: int, seed: int = 0) -> list[list[int]]:
    """Rows without padding, of 1, 2, 3 ... `most` documents."""
    rng = np.random.default_rng(seed)
    return [[1 + n for n in divide(width - 2 * docs, docs, rng)] for docs in (i % most + 1 for i in range(count))]


def test_one_document_to_a_row() -> None:
    # 250 rows, 142,000 tokens of text.
    objective = SpanCorruption()
    for first in range(0, 250, 50):
        batch = check(objective, [[568]] * 50, 569, seed=first)
        assert (batch.document_ids == 0).all()
        assert batch.num_targets == 50 * 114
        assert (SENTINEL[batch.input_ids].sum(1) == 28).all()
        written = (batch.labels >= TEXT).sum(1)
        assert (written == 85).all()  # 15% of 568, in spans of 85 / 28 = 3.04 tokens
        assert (batch.input_ids[:, 0] >= TEXT).all(), "text comes first"
        assert SENTINEL[batch.input_ids[:, -2]].all(), "noise comes last"


@pytest.mark.parametrize(("rate", "mean_span"), [(0.15, 3.0), (0.15, 8.0), (0.3, 3.0)])
@pytest.mark.parametrize("length", [128, 512])
def test_full_rows_have_no_padding_however_many_documents_they_hold(rate: float, mean_span: float, length: int) -> None:
    objective = SpanCorruption(rate, mean_span)
    width = objective.source_length(length)
    most = objective.max_documents(width)
    batch = check(objective, full_rows(56, width, most), width)
    assert batch.input_ids.shape[1] == length
    assert (batch.document_ids >= 0).all()
    docs = batch.document_ids.max(1) + 1
    unused = (batch.labels == IGNORE_INDEX).sum(1)
    assert (unused == (docs - 1) % 2).all()
    # Two further documents cost one token of noise and one span.
    noise, spans = objective.noise_counts(np.asarray(width - 1))
    assert ((batch.labels >= TEXT).sum(1) == noise - docs // 2).all()
    assert (SENTINEL[batch.labels].sum(1) == spans - docs // 2).all()


def test_text_comes_first_and_noise_last_in_each_document() -> None:
    batch = check(SpanCorruption(), full_rows(70, 142, 7), 142)
    for tokens, doc in zip(batch.input_ids, batch.document_ids, strict=True):
        for d in range(doc.max() + 1):
            *read, end = tokens[doc == d]
            assert end == END
            assert read[0] >= TEXT
            assert SENTINEL[read[-1]] or not SENTINEL[read].any()


def test_the_share_of_noise_over_packed_rows() -> None:
    # Rows of 1 to 4 documents: 0, 1, 1 and 2 tokens and spans less than the 85 and 28 of a row of one document.
    noise = spans = text = 0
    for seed in range(6):
        layout = full_rows(40, 569, 4, seed)
        batch = check(SpanCorruption(), layout, 569, seed)
        text += sum(map(sum, layout))
        noise += int((batch.labels >= TEXT).sum())
        spans += int(SENTINEL[batch.input_ids].sum())
    assert text > 130_000
    assert noise == 60 * (85 + 84 + 84 + 83)
    assert spans == 60 * (28 + 27 + 27 + 26)
    assert noise / text == pytest.approx(0.15, abs=0.003)
    assert noise / spans == pytest.approx(3.0, abs=0.15)


@st.composite
def corrupted(draw: Any, kind: type[SpanCorruption]) -> tuple[Any, list[list[int]], int]:
    """An objective, and rows of all sorts for it."""
    rate = draw(st.one_of(st.sampled_from([0.15, 0.5]), st.floats(0.01, 0.95)))
    mean_span = draw(st.one_of(st.sampled_from([1.0, 3.0, 32.0]), st.floats(1, 40)))
    objective = kind(rate, mean_span)
    width = max(objective.source_length(draw(st.integers(6, 160))), 3)
    most = min(objective.max_documents(width) or 1, width // 2)
    layout = []
    for _ in range(draw(st.integers(1, 4))):
        docs = draw(st.one_of(st.just(most), st.integers(1, most)))
        filled = draw(st.one_of(st.just(width), st.integers(2 * docs, width)))
        weights = draw(st.lists(st.sampled_from([0, 0, 1, 1, 9]), min_size=docs, max_size=docs))
        spare = filled - 2 * docs  # beyond one token of text and the end
        lengths = [1 + spare * w // max(sum(weights), 1) for w in weights]
        lengths[-1] += spare - (sum(lengths) - docs)
        layout.append(lengths)
    return objective, layout, width


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_overflows_and_nothing_is_lost(data: st.DataObject) -> None:
    objective, layout, width = data.draw(corrupted(SpanCorruption))
    check(objective, layout, width, seed=data.draw(st.integers(0, 2**32), "seed"))


@pytest.mark.parametrize("has_mask", [True, False])
def test_the_encoder_predicts_masked_tokens_beside_the_spans(has_mask: bool) -> None:
    """Without its masks the batch is that of span corruption; the masks lie on a share of the text beside the spans."""
    vocab = VOCAB if has_mask else replace(VOCAB, mask=None)
    objective, rows = SpanCorruptionAndMLM(mask_rate=0.2), make_rows(full_rows(40, 142, 4), 142, T5)
    rng = CounterRNG(1, rows.stream_index)
    batch, plain = objective(rows, rng, vocab), objective.span_corruption(rows, rng, vocab)
    used_BK = batch.encoder_labels != IGNORE_INDEX
    row_N = np.nonzero(used_BK)[0]
    position_N, label_N = batch.encoder_target_positions[used_BK], batch.encoder_labels[used_BK]
    assert len(set(zip(row_N.tolist(), position_N.tolist(), strict=True))) == len(row_N)
    assert (label_N >= TEXT).all()
    assert (batch.input_ids[row_N, position_N] == (MASK if has_mask else SENTINELS[-1])).all()
    assert not np.isin(label_N, plain.labels).any(), "each token of these rows is unique, and the decoder writes others"
    unmasked = batch.input_ids.copy()
    unmasked[row_N, position_N] = label_N
    assert (unmasked == plain.input_ids).all()
    for field in set(Batch._fields) - {"input_ids", "encoder_target_positions", "encoder_labels"}:
        mine, other = getattr(batch, field), getattr(plain, field)
        assert (mine is None and other is None) or (mine == other).all(), field
    text_B = (plain.input_ids >= TEXT).sum(1)
    assert used_BK.sum(1).tolist() == [int(0.2 * n + 0.5) for n in text_B]
    counts = batch.loss_counts
    assert counts["encoder_targets"] == used_BK.sum()
    assert counts["decoder_targets"] == plain.num_targets
    assert counts["targets"] == counts["encoder_targets"] + counts["decoder_targets"]
    assert batch.num_tokens == plain.num_tokens


def test_a_generator_fills_the_masks_of_some_rows(vocab: Vocabulary) -> None:
    rows = make_rows(full_rows(200, 142, 4), 142, T5)
    rng, plain = CounterRNG(1, rows.stream_index), SpanCorruptionAndMLM(mask_rate=0.2)
    masked, batch = plain(rows, rng, vocab), replace(plain, detected_share=0.7)(rows, rng, vocab)
    is_detected_B = (batch.generator_labels != IGNORE_INDEX).any(1)
    assert is_detected_B.mean() == pytest.approx(0.7, abs=5 * (0.21 / 200) ** 0.5)
    for labels, is_own_B in ((batch.generator_labels, is_detected_B), (batch.encoder_labels, ~is_detected_B)):
        assert (labels == np.where(is_own_B[:, None], masked.encoder_labels, IGNORE_INDEX)).all()
    assert (batch.generator_positions == masked.encoder_target_positions).all()
    assert (batch.input_ids == masked.input_ids).all()
    assert (batch.labels == masked.labels).all()
    assert batch.loss_counts["detected_tokens"] == (batch.document_ids[is_detected_B] >= 0).sum()
    assert plain.extras == ()
    assert replace(plain, detected_share=0.7).extras == ("detector",)
    with pytest.raises(UserError, match=r"detected_share is -1, and must lie between 0 and 1"):
        SpanCorruptionAndMLM(detected_share=-1)


def test_the_last_sentinel_is_free_where_it_stands_for_a_mask() -> None:
    vocab = replace(VOCAB, sentinel_ids=SENTINELS[:28])
    SpanCorruptionAndMLM().check(vocab, 569)  # 28 spans
    SpanCorruptionAndMLM().check(replace(vocab, mask=None), 540)
    with pytest.raises(UserError, match="28 spans, and the tokenizer has 27"):
        SpanCorruptionAndMLM().check(replace(vocab, mask=None), 569)


def test_rows_with_hardly_any_text() -> None:
    # One token cannot be hidden and still have text before it: only the end token is a target.
    batch = check(SpanCorruption(), [[1], [1, 1, 1], [2], [1, 2, 1]], 142)
    assert batch.num_targets == 1 + 3 + 3 + 5


# --- in one row ---------------------------------------------------------------------------------------------------


def rebuild_row(batch: Batch, b: int) -> list[list[int]]:
    """Rebuild the documents of a row that has their targets after them."""
    documents = []
    for d in range(batch.document_ids[b].max() + 1):
        row = batch.input_ids[b][batch.document_ids[b] == d].tolist()
        text = row.index(END) + 1
        documents.append(join(row[:text], row[text:]))
    return documents


def check_row(objective: DecoderDenoising, layout: list[list[int]], width: int, seed: int = 1) -> Batch:
    """Check the invariants of a batch."""
    rows = make_rows(layout, width, T5)
    batch = apply(objective, rows, seed)
    encoder, decoder = objective.encoder_decoder_lengths(width)
    assert batch.input_ids.shape == (len(layout), encoder + decoder)
    assert batch.target_positions.shape == batch.labels.shape == (len(layout), decoder)
    for b, lengths in enumerate(layout):
        assert rebuild_row(batch, b) == [
            rows.input_ids[b][rows.document_ids[b] == d].tolist() for d in range(len(lengths))
        ]
        used = batch.labels[b] != IGNORE_INDEX
        assert (batch.input_ids[b][batch.target_positions[b][used] + 1] == batch.labels[b][used]).all(), (
            "the next token is predicted"
        )
        assert (
            batch.document_ids[b][batch.target_positions[b][used] + 1]
            == batch.document_ids[b][batch.target_positions[b][used]]
        ).all()
        answers = sum(batch.document_ids[b] >= 0) - sum(
            batch.input_ids[b][batch.document_ids[b] == d].tolist().index(END) + 1 for d in range(len(lengths))
        )
        assert used.sum() == answers, "all of the targets, and nothing else"
    return batch


def test_one_row_has_the_published_lengths_of_both_sides() -> None:
    # 568 tokens of text: 512 for the text with its sentinels, 114 for the target.
    assert DecoderDenoising().source_length(626) == 569
    batch = check_row(DecoderDenoising(), [[568]] * 3, 569)
    assert batch.input_ids.shape == (3, 626)
    assert batch.num_targets == 3 * 114
    assert (batch.document_ids == 0).all(), "no padding"


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("length", [64, 256])
def test_one_row_of_many_documents(prefix: bool, length: int) -> None:
    objective = DecoderDenoising(prefix=prefix)
    width = objective.source_length(length)
    assert sum(objective.encoder_decoder_lengths(width)) <= length < sum(objective.encoder_decoder_lengths(width + 1))
    check_row(objective, full_rows(40, width, objective.max_documents(width) or 1), width)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_nothing_overflows_in_one_row(data: st.DataObject) -> None:
    objective, layout, width = data.draw(corrupted(DecoderDenoising))
    check_row(objective, layout, width, seed=data.draw(st.integers(0, 2**32), "seed"))


# --- of names, numbers and dates ----------------------------------------------------------------------------------


def test_salient_spans_rebuild_the_text_too(random_rows: Callable[..., Rows]) -> None:
    layout = [[127], [60, 66], [40, 41, 20], [1, 2, 3, 4], [1]] * 8
    bits = random_rows(layout, 128, T5)
    rows = make_rows(layout, 128, T5)._replace(word_start=bits.word_start, salient=bits.salient)
    objective = SalientSpanCorruption()
    assert objective.source_length(128) == 128
    batch = apply(objective, rows)
    assert batch.input_ids.shape == (40, 128)
    assert batch.labels.shape == (40, 2 * 19 + 4)
    hidden = (batch.labels >= TEXT).sum(1)
    for b, lengths in enumerate(layout):
        assert rebuild(batch, b) == [rows.input_ids[b][rows.document_ids[b] == d].tolist() for d in range(len(lengths))]
        assert hidden[b] <= max(1, int(0.15 * sum(lengths) + 0.5))
    names = rows.input_ids[rows.salient]  # 6% of the text; 15% are targets
    assert np.isin(names, batch.labels).mean() > 0.95, "names come first"
