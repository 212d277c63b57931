"""Mixtures: each row is the row of one part, and parts that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
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
    PermutationLM,
    PrefixLM,
    SalientSpanCorruption,
    SalientSpanMasking,
    SpanCorruption,
    SpanCorruptionAndMLM,
    SpanMasking,
    WeightedObjective,
    WholeWordMasking,
)
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
S0, S1 = 999, 998
x = IGNORE_INDEX
CPU = torch.device("cpu")

Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]
Maker = Callable[..., Rows]
Applier = Callable[..., Batch]
Words_ = Callable[..., Vocabulary]


def mixture(*objectives: Any, per: Any = "row", weights: tuple[float, ...] | None = None) -> Mixture:
    parts = zip(objectives, weights or (1.0,) * len(objectives), strict=True)
    return Mixture(tuple(WeightedObjective(objective, weight) for objective, weight in parts), per)


def same_fields(batch: Batch, b: int, alone: Batch) -> None:
    """Row b of a mixture equals the row of its own objective, up to padding at the end of each field."""
    empty = {"input_ids": PAD, "decoder_input_ids": PAD, "document_ids": -1, "labels": x, "encoder_labels": x}
    for name, field in zip(Batch._fields, alone, strict=True):
        if field is None:
            continue
        mixed, own = getattr(batch, name)[b], field[0]
        inner = tuple(slice(n) for n in own.shape)
        assert (mixed[inner] == own).all(), name
        rest = mixed.copy()
        rest[inner] = empty.get(name, 0)
        if name == "decoder_document_ids":
            assert (mixed[len(own) :] == own[-1]).all()
        elif name != "decoder_position_ids":
            assert (rest == empty.get(name, 0)).all(), name


MIXTURES: dict[str, Mixture] = {
    "unilm": OBJECTIVES["unilm"],  # type: ignore[dict-item]
    "denoisers": OBJECTIVES["denoisers"],  # type: ignore[dict-item]
    "widths": mixture(MLM(rate=0.15), MLM(rate=0.4), MLM(masking=SpanMasking())),
    "one-stack": mixture(DecoderDenoising(), DecoderDenoising(0.5, 8.0, prefix=True)),
    "clm": mixture(CLM(), PrefixLM(), CLM(across_documents=True)),
    "bart": mixture(BARTDenoising(), BARTDenoising(permute=0.0)),
    "masked-too": mixture(SpanCorruptionAndMLM(), SpanCorruption(), SpanCorruptionAndMLM(mask_rate=0.4)),
    "names": mixture(SpanCorruption(), SalientSpanCorruption(), EncoderDecoderLM()),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("per", ["row", "batch"])
def test_each_row_of_a_mixture_has_one_objective(
    name: str, per: Any, rows_for: Maker, apply: Applier, slice_rows: Any
) -> None:
    mixed = replace(MIXTURES[name], sample_per=per)
    rows = rows_for(mixed, 60, 64, documents=3)
    parts = mixed.sample_parts(CounterRNG(1, rows.stream_index, rows.stream_index // 2))
    assert set(parts) == set(range(len(mixed.parts)))
    if per == "batch":
        assert (parts[::2] == parts[1::2]).all(), "two rows are a step"
    batch = apply(mixed, rows)
    for b, part in enumerate(parts):
        same_fields(batch, b, apply(mixed.parts[part].objective, slice_rows(rows, [b])))


def test_fields_that_a_part_leaves_none_get_their_default(rows_for: Maker, apply: Applier) -> None:
    causal = mixture(CLM(), PrefixLM())
    rows = rows_for(causal, 16, 32, documents=2)
    batch, parts = apply(causal, rows), causal.sample_parts(CounterRNG(1, rows.stream_index))
    assert (batch.attention_rank[parts == 0] == np.arange(32)).all(), "a decoder attends causally"
    unilm = MIXTURES["unilm"]
    rows = rows_for(unilm, 16, 32, documents=2)
    batch, parts = apply(unilm, rows), unilm.sample_parts(CounterRNG(1, rows.stream_index))
    assert (batch.attention_rank[parts == 0] == 0).all(), "an encoder attends to all"
    assert (batch.token_type_ids[parts != 1] == 0).all()


@pytest.mark.parametrize(
    "other",
    [MLM(masking=SpanMasking(), targets="boundary"), MLM(targets="replaced"), PermutationLM(), BiLM()],
    ids=["boundary", "replaced", "permutation", "bilm"],
)
def test_objectives_with_different_heads_are_not_mixed(other: Any) -> None:
    """A batch does not say which of its rows need a boundary head, a generator or a second stream."""
    with pytest.raises(UserError, match=r"objective\.parts"):
        mixture(other, MLM())


def test_a_mixture_needs_what_its_parts_need() -> None:
    mixed = mixture(MLM(masking=WholeWordMasking()), MLM(masking=SalientSpanMasking()), MLM())
    assert mixed.token_flags == ("word_start", "salient")
    assert mixed.architectures == ("encoder",)
    assert mixture(SpanCorruption(), SalientSpanCorruption()).max_documents(100) == 4
    assert MIXTURES["denoisers"].source_length(128) == 128
    assert mixture(SpanCorruption(), SpanCorruption(0.5)).source_length(128) == 142
    assert MIXTURES["unilm"].expected_rates() == pytest.approx(
        {"part 1": 1 / 3, "part 2": 1 / 3, "part 3": 1 / 6, "part 4": 1 / 6}
    )


def test_a_mixture_checks_its_parts(vocab: Vocabulary) -> None:
    with pytest.raises(UserError, match="fewer than one span of 16"):
        mixture(SpanCorruption(), SpanCorruption(mean_span=16.0)).check(vocab, 101)


@pytest.mark.parametrize(
    ("objectives", "weights", "said"),
    [
        ((), (), "needs objectives"),
        ((MLM(), MLM(rate=0.3)), (1.0, 0.0), "weight of more than 0"),
        ((MLM(), MLM(rate=0.3)), (1.0, -1.0), "weight of more than 0"),
        ((MLM(), MLM(rate=0.3)), (1.0, float("nan")), "weight of more than 0"),
        ((MLM(), CLM()), (1.0, 1.0), "no architecture"),
        ((SpanCorruption(), DecoderDenoising()), (1.0, 1.0), "no architecture"),
        ((MLM(), MLM(pair="next")), (1.0, 1.0), ""),
        ((MLM(), MLM(pair="translation")), (1.0, 1.0), "cannot be mixed"),
        ((MLM(pair="order"), MLM(pair="next")), (1.0, 1.0), "cannot be mixed"),
    ],
)
def test_mixtures_that_are_refused(objectives: tuple[Any, ...], weights: tuple[float, ...], said: str) -> None:
    with pytest.raises(UserError, match=rf"objective\.parts: .*{said}"):
        mixture(*objectives, weights=weights)


def test_objectives_with_different_templates_are_not_mixed(vocab: Vocabulary) -> None:
    for objectives in ((SpanCorruption(), BARTDenoising()), (CLM(), DecoderDenoising())):
        with pytest.raises(UserError, match="different special tokens around a text"):
            mixture(*objectives).check(vocab, 128)


def test_rows_without_masked_tokens_have_no_labels_of_the_encoder(rows_for: Maker, apply: Applier) -> None:
    mixed = MIXTURES["masked-too"]
    rows = rows_for(mixed, 30, 64)
    batch, parts = apply(mixed, rows), mixed.sample_parts(CounterRNG(1, rows.stream_index))
    assert (batch.encoder_labels[parts == 1] == x).all()
    assert ((batch.encoder_labels != x).any(1) == (parts != 1)).all()
