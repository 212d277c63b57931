"""Encoder-decoder LM and BART by hand; checks of spans and sentinels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.objectives import (
    IGNORE_INDEX,
    BARTDenoising,
    Batch,
    CounterRNG,
    DecoderDenoising,
    EncoderDecoderLM,
    Objective,
    SalientSpanCorruption,
    SpanCorruption,
    noise_mask,
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


def test_encoder_decoder_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("10 11 12 13 E | 20 21 E", width=9)
    batch = EncoderDecoderLM()(rows, written(rows, prefix=[[0.5, 0, 0, 0, 0, 0.4]]), vocab)
    p = PAD
    assert batch.input_ids.tolist() == [[10, 11, 12, END, 20, END, p, p, p]]
    assert batch.labels.tolist() == [[13, END, 21, END, x, x, x, x, x]]
    assert batch.decoder_input_ids[0, :4].tolist() == [p, 13, p, 21]
    assert batch.decoder_document_ids[0, :4].tolist() == [0, 0, 1, 1]


def bart(**noise: float) -> BARTDenoising:
    return BARTDenoising(**({"permute": 0.0, "infill": 0.0} | noise))  # type: ignore[arg-type]


def test_labels_of_bart_are_the_whole_text(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11. 12. S | C 20. S", width=9)
    draw = written(rows, sentences=[[0, 0.5, 0, 0.1]], permuted=[[0.0] * 9])
    batch = bart(permute=1.0)(rows, draw, vocab)
    assert batch.input_ids.tolist() == [[CLS, 12, 10, 11, SEP, CLS, 20, SEP, PAD]]
    assert batch.document_ids.tolist() == [[0] * 5 + [1] * 3 + [-1]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0]]
    assert batch.labels.tolist() == [[CLS, 10, 11, 12, SEP, CLS, 20, SEP, x]]
    assert batch.decoder_input_ids.tolist() == [[SEP, CLS, 10, 11, 12, SEP, CLS, 20, PAD]]
    assert batch.decoder_document_ids.tolist() == [[0] * 5 + [1] * 4]
    assert batch.decoder_position_ids[0, :8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert rows.input_ids.tolist() == [[CLS, 10, 11, 12, SEP, CLS, 20, SEP, PAD]]


def test_each_noise_of_bart_alone(
    picture: Picture, written: Writer, vocab: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = picture("C 10 11 12 13 S")
    keys = [[0, 0.1, 0.8, 0.2, 0.9]]
    lengths_and_starts = np.array([[2, 0]]), np.array([[1, 4]])
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: lengths_and_starts)
    draw = written(rows, deleted=keys, masked=keys, rotation=[[0.3]], rotated=[[0.0]])
    read = {
        name: noise(rows, draw, vocab).input_ids.tolist()
        for name, noise in {
            "delete": bart(delete=0.5),
            "mask": bart(mask=0.5),
            "rotate": bart(rotate=1.0),
            "infill": bart(infill=0.5),
        }.items()
    }
    assert read == {
        "delete": [[CLS, 11, 13, SEP, PAD, PAD]],
        "mask": [[CLS, MASK, 11, MASK, 13, SEP]],
        "rotate": [[CLS, 11, 12, 13, 10, SEP]],
        "infill": [[CLS, 10, MASK, 13, MASK, SEP]],
    }


def test_all_noises_of_bart_together(
    picture: Picture, written: Writer, vocab: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = picture("C 10 11. 12. 13 14. S")
    lengths_and_starts = np.array([[2]]), np.array([[1]])
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: lengths_and_starts)
    draw = written(
        rows,
        sentences=[[0, 0.9, 0, 0.1, 0.5]],  # 12, 13 14, 10 11
        permuted=[[0.0]],
        rotation=[[0.3]],  # by one: 13 14 10 11 12
        rotated=[[0.0]],
        deleted=[[0, 0.9, 0.9, 0.1, 0.9, 0.9]],  # 10 goes: 13 14 11 12
        masked=[[0, 0.5, 0.9, 0.1]],  # after the span 14 11 has become a mask: 12
    )
    batch = BARTDenoising(permute=1, rotate=1, delete=0.2, mask=0.3, infill=0.5)(rows, draw, vocab)
    assert batch.input_ids.tolist() == [[CLS, 13, MASK, MASK, SEP, PAD, PAD]]
    assert batch.labels.tolist() == [[CLS, 10, 11, 12, 13, 14, SEP]]


@pytest.mark.parametrize("mean_span", [0.9, 0.0, -3.0, float("nan")])
def test_a_span_has_at_least_one_token(mean_span: float) -> None:
    with pytest.raises(UserError, match=r"objective\.mean_span"):
        SpanCorruption(mean_span=mean_span)


@pytest.mark.parametrize("noise", ["permute", "rotate", "delete", "mask", "infill"])
@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_noise_of_bart_is_a_share(noise: str, share: float) -> None:
    with pytest.raises(UserError, match=rf"objective\.{noise}"):
        BARTDenoising(**{noise: share})  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [{"delete": 1.0}, {"mask": 1.0}, {"infill": 1.0}])
def test_bart_leaves_some_text(noise: dict[str, float]) -> None:
    with pytest.raises(UserError, match="leave some text"):
        BARTDenoising(**noise)  # type: ignore[arg-type]


def test_bart_without_noise() -> None:
    with pytest.raises(UserError, match="without any noise"):
        bart()
    with pytest.raises(UserError, match=r"objective\.mean_span"):
        BARTDenoising(mean_span=0.0)


@pytest.mark.parametrize("mean_span", [0.5, 30.0, 100.0])
def test_bart_takes_the_spans_that_it_allows(mean_span: float, rows_for: Maker, apply: Applier) -> None:
    objective = BARTDenoising(mean_span=mean_span)
    batch = apply(objective, rows_for(objective, 4, 512))
    assert (batch.input_ids == MASK).any()


@pytest.mark.parametrize("objective", [SpanCorruption(), DecoderDenoising(), SalientSpanCorruption()])
def test_a_tokenizer_without_sentinels(objective: Objective, vocabulary: Words_) -> None:
    with pytest.raises(UserError, match="sentinel"):
        objective.check(vocabulary(sentinel_ids=()), 128)


def test_more_spans_than_sentinels(vocabulary: Words_) -> None:
    few, enough = (vocabulary(sentinel_ids=tuple(range(999, 999 - n, -1))) for n in (4, 5))
    SpanCorruption().check(enough, 101)  # 15 tokens of noise in five spans
    with pytest.raises(UserError, match="5 spans, and the tokenizer has 4 sentinels"):
        SpanCorruption().check(few, 101)
    with pytest.raises(UserError, match=r"15 spans, and the tokenizer has 5 sentinels. Lower objective\.rate, or"):
        SalientSpanCorruption().check(enough, 100)
