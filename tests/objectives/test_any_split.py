"""Invariants for any rows and any split of them: the same noise and fixed shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firth.objectives import (
    CLM,
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    BARTDenoising,
    Batch,
    BiLM,
    CounterRNG,
    DecoderDenoising,
    EncoderDecoderLM,
    Mixture,
    Objective,
    PermutationLM,
    PrefixLM,
    SalientSpanCorruption,
    SalientSpanMasking,
    SpanCorruption,
    SpanMasking,
    TokenMasking,
    WeightedObjective,
    WholeWordMasking,
)
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)

Maker = Callable[..., Rows]
Slicer = Callable[[Rows, Any], Rows]


def batch_of(objective: Objective, rows: Rows, vocab: Vocabulary, seed: int = 1, step: int = 8) -> Batch:
    return objective(rows, CounterRNG(seed, rows.stream_index, rows.stream_index // step), vocab)


def same_rows(part: Batch, whole: Batch, some: Any) -> bool:
    return all(
        (a is None and b is None) or (a.shape[1:] == b.shape[1:] and bool((a == b[some]).all()))
        for a, b in zip(part, whole, strict=True)
    )


# --- any split of the rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("processes", [2, 8])
def test_any_number_of_processes_makes_the_same_batch(
    name: str, processes: int, rows_for: Maker, slice_rows: Slicer, vocab: Vocabulary
) -> None:
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 32, 64, documents=3 if objective.row_layout == "packed" else 1, missing=20)
    whole = batch_of(objective, rows, vocab)
    for process in range(processes):
        for some in (slice(process, None, processes), np.arange(32) // (32 // processes) == process):
            assert same_rows(batch_of(objective, slice_rows(rows, some), vocab), whole, some)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_resumed_run_makes_the_same_batches(
    name: str, rows_for: Maker, slice_rows: Slicer, vocab: Vocabulary
) -> None:
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 32, 64, documents=3 if objective.row_layout == "packed" else 1, missing=20)
    straight = [batch_of(objective, slice_rows(rows, slice(i, i + 8)), vocab) for i in range(0, 32, 8)]
    for start in (3, 1, 2):  # whatever was made before
        again = batch_of(objective, slice_rows(rows, slice(8 * start, 8 * start + 8)), vocab)
        assert same_rows(again, straight[start], slice(None))
    one_at_a_time = [batch_of(objective, slice_rows(rows, [i]), vocab) for i in range(7, -1, -1)]
    for i, alone in zip(range(7, -1, -1), one_at_a_time, strict=True):
        assert same_rows(alone, straight[0], [i])


@pytest.mark.parametrize(
    "name", [name for name in OBJECTIVES if name not in ("clm", "autoencoder", "bilm", "clm-then-mlm")]
)
def test_another_seed_or_row_index_gives_other_noise(name: str, rows_for: Maker, vocab: Vocabulary) -> None:
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 16, 64)
    first = batch_of(objective, rows, vocab)
    moved = rows._replace(stream_index=rows.stream_index + 16, row_index=rows.stream_index + 16)
    for other in (batch_of(objective, rows, vocab, seed=2), batch_of(objective, moved, vocab)):
        assert first.input_ids.shape == other.input_ids.shape
        assert (first.labels != other.labels).any() or (first.input_ids != other.input_ids).any()


# --- any rows, rates and seeds ------------------------------------------------------------------------------------

rates = st.one_of(st.just(0.15), st.floats(0.02, 0.9))
shares = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))
choosers = st.one_of(
    st.just(TokenMasking()),
    st.just(WholeWordMasking()),
    st.just(SalientSpanMasking()),
    st.builds(SpanMasking, st.floats(0.05, 0.9), st.integers(1, 12)),
)
masked = st.builds(
    MLM,
    rate=rates,
    mask_prob=st.sampled_from([0.0, 0.8, 1.0]),
    random_prob=st.just(0.0),
    masking=choosers,
    targets=st.sampled_from(["tokens", "boundary", "replaced"]),
    visibility=st.sampled_from(["all", "forward", "backward", "prefix"]),
    num_static_masks=st.sampled_from([0, 1, 10]),
)
corrupted = st.builds(SpanCorruption, rates, st.floats(1, 20))
barts = st.builds(
    BARTDenoising,
    permute=shares,
    rotate=shares,
    delete=st.floats(0, 0.9),
    mask=st.floats(0, 0.9),
    infill=st.floats(0.01, 0.9),
    mean_span=st.floats(0.2, 20),
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "clm": st.builds(CLM, st.booleans()),
    "prefix": st.builds(PrefixLM),
    "bilm": st.builds(BiLM),
    "encoder-decoder": st.builds(EncoderDecoderLM),
    "permutation": st.builds(
        PermutationLM, st.one_of(st.sampled_from([1 / 6, 0.3, 0.7]), st.floats(0.02, 0.95)), st.integers(1, 8)
    ),
    "mlm": masked,
    "corruption": corrupted,
    "one-stack": st.builds(DecoderDenoising, rates, st.floats(1, 20), st.booleans()),
    "salient": st.builds(SalientSpanCorruption, rates),
    "bart": barts,
    "masks": st.builds(
        lambda objectives, per: Mixture(tuple(map(WeightedObjective, objectives)), per),
        st.lists(
            st.builds(MLM, rate=rates, visibility=st.sampled_from(["all", "forward", "prefix"])), min_size=1, max_size=3
        ),
        st.sampled_from(["row", "batch"]),
    ),
    "mixed": st.builds(
        lambda first, rest: Mixture((WeightedObjective(first), *(WeightedObjective(r, 2.0) for r in rest))),
        st.builds(EncoderDecoderLM),
        st.lists(corrupted, min_size=1, max_size=3),
    ),
}


@st.composite
def layouts(draw: Any, width: int, template: int, most: int | None) -> list[list[int]]:
    """Rows of all sorts: of one document or many, full or nearly empty."""
    limit = max(1, min(width // (template + 1), most or 9, 9))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        docs = draw(st.one_of(st.just(1), st.just(limit), st.integers(1, limit)))
        filled = draw(st.one_of(st.just(width), st.integers(docs * (template + 1), width)))
        weights = draw(st.lists(st.sampled_from([0, 1, 1, 9]), min_size=docs, max_size=docs))
        spare = filled - docs * (template + 1)
        lengths = [1 + spare * w // max(sum(weights), 1) for w in weights]
        lengths[-1] += spare - (sum(lengths) - docs)
        rows.append(lengths)
    return rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_holds_for_any_rows(
    kind: str, data: st.DataObject, random_rows: Maker, slice_rows: Slicer, vocabulary: Callable[..., Vocabulary]
) -> None:
    objective = data.draw(KINDS[kind], "objective")
    sentinels = tuple(range(999, 699, -1))
    vocab = vocabulary(sentinel_ids=sentinels)
    vocab = Vocabulary(**(vars(vocab) | {"special_ids": (*range(7), *sorted(sentinels))}))
    template = objective.build_template(vocab)
    width = max(objective.source_length(data.draw(st.one_of(st.just(64), st.integers(6, 100)), "length")), 6)
    layout = data.draw(layouts(width, template.num_special_tokens(), objective.max_documents(width)), "layout")
    seed = data.draw(st.integers(0, 2**32), "seed")
    rows = random_rows(layout, width, template, seed % 1000)
    rows = rows._replace(input_ids=np.where(rows.maskable, rows.input_ids % 600 + 7, rows.input_ids))
    batch = batch_of(objective, rows, vocab, seed, step=2)

    full = random_rows([[width - template.num_special_tokens()]], width, template)
    for a, b in zip(batch, batch_of(objective, full, vocab, seed, step=2), strict=True):
        assert (a is None) == (b is None)
        assert a is None or a.shape[1:] == b.shape[1:], "shapes do not depend on the rows"
    for i in range(len(layout)):
        assert same_rows(batch_of(objective, slice_rows(rows, [i]), vocab, seed, step=2), batch, [i])
    check(batch, rows, vocab)


def check(batch: Batch, rows: Rows, vocab: Vocabulary) -> None:
    """Check the invariants of every batch of every objective."""
    B, T = batch.input_ids.shape
    assert batch.document_ids.shape == batch.position_ids.shape == (B, T)
    read = batch.document_ids >= 0
    assert (np.diff(read.astype(int), axis=1) <= 0).all(), "padding comes last"
    assert (batch.input_ids[~read] == PAD).all()
    assert (batch.position_ids[~read] == 0).all()
    labels = batch.labels[batch.labels != IGNORE_INDEX]
    assert ((labels > 0) & (labels < vocab.size)).all()
    assert (batch.labels != MASK).all()
    assert (batch.input_ids >= 0).all()
    assert (batch.input_ids < vocab.size).all()
    for b in range(B):
        for d in range(batch.document_ids[b].max() + 1):
            mine = batch.document_ids[b] == d
            if (batch.document_ids[b].max() == rows.document_ids[b].max()) or mine.any():
                assert batch.position_ids[b][mine].tolist() == list(range(mine.sum()))
    if batch.target_positions is not None:
        used = batch.labels != IGNORE_INDEX
        assert (np.diff(used.astype(int), axis=-1) <= 0).all(), "unused slots come last"
        assert np.take_along_axis(batch.document_ids, batch.target_positions, 1)[used].min(initial=0) >= 0
        positions = batch.target_positions + T * np.arange(B)[:, None]
        assert len(set(positions[used].tolist())) == used.sum(), "no position is predicted twice"
    if batch.decoder_input_ids is not None:
        assert batch.decoder_input_ids.shape == batch.decoder_document_ids.shape == batch.labels.shape
        assert (batch.decoder_document_ids[batch.labels != IGNORE_INDEX] >= 0).all()
        for b in range(B):
            assert np.isin(batch.decoder_document_ids[b], batch.document_ids[b]).all(), (
                "whatever the decoder reads sees some text"
            )
