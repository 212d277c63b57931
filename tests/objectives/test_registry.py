"""Every objective by name: tensors, rates, requirements, and errors for values and tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
    Objective,
    PermutationLM,
    PrefixLM,
    SalientSpanCorruption,
    SpanCorruption,
    SpanMasking,
)
from firth.objectives.base import trace_sources
from firth.objectives.registry import describe_objective, name_objective, name_stored_objective
from firth.tokens import PackedDataset, Rows, Shards, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
S0, S1 = 999, 998
x = IGNORE_INDEX
CPU = torch.device("cpu")

Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]
Maker = Callable[..., Rows]
Applier = Callable[..., Batch]
Words_ = Callable[..., Vocabulary]


def test_each_architecture_has_an_objective() -> None:
    assert {shape for objective in OBJECTIVES.values() for shape in objective.architectures} == {
        "encoder",
        "decoder",
        "encoder-decoder",
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_becomes_tensors(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 6, 64, documents=3)
    objective.check(vocab, rows.input_ids.shape[1])
    batch = apply(objective, rows)
    for array, tensor in zip(batch, batch.to(CPU), strict=True):
        assert (array is None) == (tensor is None)
        if array is not None:
            assert tensor.dtype == torch.int64
            assert tensor.tolist() == array.tolist()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sees", ["all", "forward", "backward", "prefix"])
def test_every_visibility_becomes_tensors(sees: Any, rows_for: Maker, apply: Applier) -> None:
    batch = apply(MLM(visibility=sees), rows_for(MLM(), 2, 32)).to(CPU)
    assert batch.input_ids.shape == (2, 32)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_source_indices_of_every_objective(name: str, rows_for: Maker, apply: Applier, vocab: Vocabulary) -> None:
    objective = OBJECTIVES[name]
    rows = rows_for(objective, 12, 64, documents=3)
    batch = apply(objective, rows)
    trace = trace_sources(objective, rows, CounterRNG(1, rows.stream_index, rows.stream_index // 2), vocab)
    for field in Batch._fields:
        ids, source = getattr(batch, field), getattr(trace, field)
        if field not in ("input_ids", "labels", "decoder_input_ids", "encoder_labels", "generator_labels"):
            assert (ids is None and source is None) or (ids == source).all(), field
        elif ids is not None:
            source = source.reshape(len(rows.input_ids), -1)
            assert ((source >= 0) | (source == -1) | (source == IGNORE_INDEX)).all()
            original = np.take_along_axis(rows.input_ids, np.maximum(source, 0), 1)
            assert (ids.reshape(source.shape) == original)[source >= 0].all(), field
            assert ((ids == IGNORE_INDEX).reshape(source.shape) == (source == IGNORE_INDEX)).all()
    assert (trace.labels >= 0).any()


def test_expected_rates(rows_for: Callable[..., Rows]) -> None:
    assert OBJECTIVES["mlm"].expected_rates() == pytest.approx(
        {"targets": 0.15, "masked": 0.8, "random": 0.1, "kept": 0.1}
    )
    assert OBJECTIVES["rtd"].expected_rates() == pytest.approx(
        {"targets": 0.15, "masked": 0.85, "random": 0, "kept": 0.15}
    )
    assert OBJECTIVES["span"].expected_rates()["mean_span"] == pytest.approx(3.8, abs=0.01)
    assert OBJECTIVES["albert"].expected_rates()["mean_span"] == pytest.approx(18 / 11)
    assert OBJECTIVES["nsp"].expected_rates()["pairs"] == OBJECTIVES["sop"].expected_rates()["pairs"] == 0.5
    assert "pairs" not in OBJECTIVES["tlm"].expected_rates()
    assert OBJECTIVES["span-corruption"].expected_rates() == {"targets": 0.15, "mean_span": 3.0}
    full = rows_for(OBJECTIVES["span-corruption"], 4, 64)
    assert OBJECTIVES["span-corruption"].expected_rates(full) == {"targets": 11 / 70, "mean_span": 11 / 4}
    full = rows_for(OBJECTIVES["lm-denoising"], 4, 64)
    assert OBJECTIVES["lm-denoising"].expected_rates(full) == {"targets": 8 / 56, "mean_span": 8 / 3}
    assert OBJECTIVES["permutation-lm"].expected_rates() == {"targets": 1 / 6, "mean_span": 3.0}
    assert OBJECTIVES["bart"].expected_rates() == {"permuted": 1.0, "infilled": 0.3, "mean_span": 3.0}
    assert CLM().expected_rates() == {}


def test_names_to_show() -> None:
    """The share of masked rows follows the passes over the text, and does not change the name."""
    chosen = replace(OBJECTIVES["rtd-mlm-and-clm"], masked_share=0.85)
    assert name_objective(chosen) == name_stored_objective(describe_objective(chosen)) == "rtd-mlm-and-clm"
    assert name_stored_objective(describe_objective(MLM(rate=0.4))) == "MLM"
    assert all(name_stored_objective(describe_objective(known)) == name for name, known in OBJECTIVES.items())


def test_requirements() -> None:
    needs = {name: (o.row_layout, o.token_flags, o.extras) for name, o in OBJECTIVES.items()}
    assert needs["mlm"] == needs["static"] == needs["unilm"] == needs["bilm"] == ("packed", (), ())
    assert needs["whole-word"] == ("packed", ("word_start",), ())
    assert needs["span"] == ("packed", ("word_start",), ("boundary",))
    assert needs["salient"] == needs["salient-spans"] == ("packed", ("word_start", "salient"), ())
    assert needs["nsp"] == ("next", (), ("pair",))
    assert needs["sop"] == ("order", (), ("pair",))
    assert needs["albert"] == ("order", ("word_start",), ("pair",))
    assert needs["tlm"] == ("sides", (), ())
    assert needs["rtd"] == ("packed", (), ("generator",))
    assert needs["permutation-lm"] == ("segments", (), ("query",))
    assert needs["bart"] == ("packed", ("sentence_end",), ())
    assert BARTDenoising(permute=0.0).token_flags == ()


class FakeShards(Shards):
    """Documents of given lengths; every token is another one."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder = folder
        self.offsets = np.cumsum([0, *lengths])
        self._tokens = np.arange(TEXT, TEXT + self.num_tokens).astype(np.uint16)  # type: ignore[assignment]
        self._mapped_files = {}

    fingerprint = "fake"  # type: ignore[assignment]


TEXT = 1000


MANY = Vocabulary(40_000, PAD, UNK, None, END, CLS, SEP, MASK, tuple(range(999, 99, -1)), tuple(range(1000)))


@pytest.mark.parametrize("longest", [4, 30, 600])
@pytest.mark.parametrize("objective", [CLM(), MLM(), SpanCorruption(), SpanCorruption(0.5, 3.0), DecoderDenoising()])
def test_real_rows_have_every_token_once(tmp_path: Path, objective: Any, longest: int) -> None:
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=6000 // longest + 20).tolist()
    width = objective.source_length(64)
    most = objective.max_documents(width)
    template = objective.build_template(MANY)
    source = PackedDataset(
        FakeShards(tmp_path, lengths), width, template, PAD, 1, max_documents_per_row=most, allow_short=True
    )
    rows = source.get_rows(np.arange(source.num_rows))
    batch = objective(rows, CounterRNG(1, rows.stream_index), MANY)
    if isinstance(objective, SpanCorruption) and not isinstance(objective, DecoderDenoising):
        found = np.concatenate([batch.input_ids.ravel(), batch.labels.ravel()])
    elif isinstance(objective, MLM):
        found = batch.input_ids.copy()
        row, slot = np.nonzero(batch.labels != IGNORE_INDEX)
        found[row, batch.target_positions[row, slot]] = batch.labels[row, slot]
    else:
        found = batch.input_ids
    assert np.sort(found[found >= TEXT]).tolist() == list(range(TEXT, TEXT + sum(lengths)))


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 15.0, float("nan")])
@pytest.mark.parametrize("objective", [MLM, SpanCorruption, DecoderDenoising, SalientSpanCorruption])
def test_a_rate_is_a_share(objective: Any, rate: float) -> None:
    with pytest.raises(UserError, match=r"objective\.rate is .*must lie between 0 and 1"):
        objective(rate=rate)


@pytest.mark.parametrize(
    ("objective", "missing", "named"),
    [
        (CLM(), "eos", "end-of-text"),
        (PrefixLM(), "eos", "end-of-text"),
        (BiLM(), "cls", "CLS"),
        (BiLM(), "sep", "SEP"),
        (PermutationLM(), "sep", "SEP"),
        (EncoderDecoderLM(), "eos", "end token"),
        (MLM(), "mask", "mask token"),
        (MLM(), "cls", "CLS"),
        (MLM(), "sep", "SEP"),
        (BARTDenoising(), "mask", "mask token"),
        (BARTDenoising(), "sep", "SEP"),
        (SpanCorruption(), "eos", "end token"),
        (DecoderDenoising(), "eos", "end token"),
        (SalientSpanCorruption(), "eos", "end token"),
        (OBJECTIVES["unilm"], "mask", "mask token"),
    ],
)
def test_a_tokenizer_without_the_token(objective: Objective, missing: str, named: str, vocabulary: Words_) -> None:
    with pytest.raises(UserError, match=named):
        objective.check(vocabulary(**{missing: None}), 128)
    objective.check(vocabulary(), 128)


def test_spans_longer_than_the_noise_of_a_row(vocab: Vocabulary) -> None:
    with pytest.raises(UserError, match=r"15 tokens of noise, fewer than one span of 16.*objective\.mean_span"):
        SpanCorruption(mean_span=16.0).check(vocab, 101)
    SpanCorruption(mean_span=15.0).check(vocab, 101)
    with pytest.raises(UserError, match=r"38 tokens of noise, fewer than one span of 40.*objective\.mean_span"):
        BARTDenoising(mean_span=40.0).check(vocab, 128)
    fewer = r"4 tokens of noise, fewer than one span of 3\.8.*objective\.masking\.max_span_length"
    with pytest.raises(UserError, match=fewer):
        MLM(masking=SpanMasking()).check(vocab, 24)
    MLM(masking=SpanMasking()).check(vocab, 26)  # 3.9 tokens
    with pytest.raises(UserError, match=r"one per 30 tokens, do not fit into rows of 29"):
        PermutationLM().check(vocab, 29)
    PermutationLM().check(vocab, 30)
