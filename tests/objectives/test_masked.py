"""MLM with every masking scheme: inputs, labels, boundaries and ranks by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.objectives import (
    IGNORE_INDEX,
    MLM,
    OBJECTIVES,
    Batch,
    CounterRNG,
    PermutationLM,
    SalientSpanMasking,
    SpanMasking,
    WholeWordMasking,
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


FATES: dict[str, Any] = {"fate": [[0.5, 0.85, 0.95]], "other": [[0, 43, 0]]}  # masked, 50, kept


def test_mlm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 14 S | C 20 21 22 S", width=12)
    # 30% of eight tokens are 2.4: two. Slots for 30% of twelve: four.
    keys = [[0, 0.5, 0.1, 0.6, 0.7, 0.8, 0, 0, 0.9, 0.2, 0.9, 0]]
    batch = MLM(rate=0.3)(rows, written(rows, tokens=keys, **FATES), vocab)
    assert batch.target_positions.tolist() == [[2, 9, 0, 0]]
    assert batch.labels.tolist() == [[11, 21, x, x]]
    assert batch.input_ids.tolist() == [[CLS, 10, MASK, 12, 13, 14, SEP, CLS, 20, 50, 22, SEP]]
    assert batch.document_ids is rows.document_ids
    assert batch.position_ids is rows.position_ids
    assert batch.attention_rank is batch.token_type_ids is batch.span_boundaries is batch.pair_labels is None


def test_the_mask_rate_follows_the_run(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 14 15 16 17 S")
    keys = [[0, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]
    objective = MLM(rate=0.5, rate_end=0.25, mask_prob=1.0, random_prob=0.0)
    shapes, read = set(), []
    for progress in (0.0, 0.5, 1.0):
        draws = replace(written(rows, tokens=keys, fate=[[0.5] * 5]), progress=progress)
        batch = objective(rows, draws, vocab)
        shapes.add(batch.labels.shape)
        read.append([batch.labels[0].tolist(), (batch.input_ids == MASK).sum()])
    assert shapes == {(1, 5)}  # half of ten positions, at every step
    # 50%, 37.5% and 25% of eight tokens
    assert read == [[[14, 15, 16, 17, x], 4], [[15, 16, 17, x, x], 3], [[16, 17, x, x, x], 2]]


@pytest.mark.parametrize("masking", [noise_mask.TokenMasking(), WholeWordMasking(), SpanMasking()])
def test_a_changing_mask_rate_over_many_rows(masking: Any, rows_for: Maker, vocab: Vocabulary) -> None:
    objective = MLM(rate=0.1, rate_end=0.3, masking=masking)
    rows = rows_for(objective, 64, 256, documents=2)
    for progress in (0.0, 0.25, 1.0):
        batch = objective(rows, CounterRNG(0, rows.stream_index, progress=progress), vocab)
        expected = 0.1 + 0.2 * progress
        constant = MLM(rate=expected, masking=masking)(rows, CounterRNG(0, rows.stream_index), vocab)
        assert batch.num_targets / rows.maskable.sum() == pytest.approx(expected, rel=0.05)
        assert (batch.input_ids == constant.input_ids).all()  # the masks of a run with this rate
        assert batch.labels.shape[1] == masking.num_slots(0.3, 256)


def test_a_mask_rate_that_changes_is_refused_with_fixed_masks() -> None:
    with pytest.raises(UserError, match="leave one out"):
        MLM(rate=0.3, rate_end=0.15, num_static_masks=10)
    with pytest.raises(UserError, match=r"rate_end is 1\.5"):
        MLM(rate_end=1.5)


def test_mlm_of_whole_words(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 +11 12 13 +14 +15 S")
    # Half of six tokens are three: the word of three, each token with its own draw.
    keys = [[0, 0.8, 0, 0.6, 0.1]]
    batch = MLM(rate=0.5, masking=WholeWordMasking())(rows, written(rows, words=keys, **FATES), vocab)
    assert batch.target_positions.tolist() == [[4, 5, 6, 0]]
    assert batch.labels.tolist() == [[13, 14, 15, x]]
    assert batch.input_ids.tolist() == [[CLS, 10, 11, 12, MASK, 50, 15, SEP]]


@pytest.mark.parametrize(("fate", "read"), [(0.1, [MASK, MASK, MASK]), (0.85, [50, 51, 52]), (0.95, [12, 13, 14])])
def test_mlm_of_spans(
    picture: Picture,
    written: Writer,
    vocab: Vocabulary,
    monkeypatch: pytest.MonkeyPatch,
    fate: float,
    read: list[int],
) -> None:
    rows = picture("C 10 +11 12 13 +14 15 S")
    lengths_and_starts = np.array([[2]]), np.array([[1]])  # two words from the second on
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: lengths_and_starts)
    draw = written(rows, fate=[[fate, 0.5, 0.5]], other=[[43, 44, 45]])
    batch = MLM(rate=0.4, masking=SpanMasking(max_span_length=1), targets="boundary")(rows, draw, vocab)
    assert batch.target_positions.tolist() == [[3, 4, 5, 0, 0]]
    assert batch.labels.tolist() == [[12, 13, 14, x, x]]
    assert batch.input_ids.tolist() == [[CLS, 10, 11, *read, 15, SEP]], "one draw for the span"
    assert batch.span_boundaries.tolist() == [[[2, 6, 0], [2, 6, 1], [2, 6, 2], [0, 0, 0], [0, 0, 0]]]


def test_mlm_of_salient_spans(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11! +12! 13 14 S")
    # Half of five tokens are three: the name, then the word with the lowest key. Side by side they are one span.
    draw = written(rows, words=[[0, 0.5, 0.9, 0, 0.7, 0.3]], fate=[[0.1, 0.95, 0.95]], other=[[0, 0, 0]])
    batch = MLM(rate=0.5, masking=SalientSpanMasking())(rows, draw, vocab)
    assert batch.target_positions.tolist() == [[2, 3, 5, 0]]
    assert batch.labels.tolist() == [[11, 12, 14, x]]
    assert batch.input_ids.tolist() == [[CLS, 10, MASK, MASK, 13, 14, SEP]]
    assert batch.span_boundaries is None


def test_span_boundaries_of_single_tokens(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 S")
    draw = written(rows, tokens=[[0, 0.1, 0.2, 0.9, 0.9]], **FATES)
    batch = MLM(rate=0.5, targets="boundary")(rows, draw, vocab)
    assert batch.span_boundaries.tolist() == [[[0, 3, 0], [0, 3, 1], [0, 0, 0]]]
    assert batch.input_ids.tolist() == [[CLS, MASK, 50, 12, 13, SEP]], "each token has its own draw"


def test_replaced_token_detection_has_an_mlm_batch(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 S")
    draw = written(rows, tokens=[[0, 0.1, 0.2, 0.9, 0.9]], fate=[[0.84, 0.86]])
    batch = OBJECTIVES["rtd"](rows, draw, vocab)  # 85% masked, the rest kept (ELECTRA, section 3.1 and appendix A)
    assert batch.input_ids.tolist() == [[CLS, MASK, 11, 12, 13, SEP]]
    assert batch.labels.tolist() == [[10]]
    assert batch.span_boundaries is None


def test_visibility_of_mlm(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 S | C 20 S")
    draw = written(rows, tokens=[[0.9] * 7], prefix=[[0.4, 0, 0, 0, 0.9]], **FATES)
    ways = {sees: MLM(visibility=sees)(rows, draw, vocab) for sees in ("all", "forward", "backward", "prefix")}  # type: ignore[arg-type]
    assert ways["all"].attention_rank is None
    assert ways["forward"].attention_rank.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert ways["backward"].attention_rank.tolist() == [[6, 5, 4, 3, 2, 1, 0]]
    # Prefixes of 1 + 0.4 * 3 and of 1 + 0.9 * 2 are both two long; what follows is the second segment.
    assert ways["prefix"].attention_rank.tolist() == [[0, 0, 1, 2, 0, 0, 1]]
    assert ways["prefix"].token_type_ids.tolist() == [[0, 0, 1, 1, 0, 0, 1]]
    assert ways["all"].token_type_ids is ways["forward"].token_type_ids is ways["backward"].token_type_ids is None
    assert len({ways[sees].input_ids.tobytes() for sees in ways}) == 1, "the noise is the same"


@pytest.mark.parametrize("name", ["nsp", "sop", "tlm"])
def test_pairs_pass_through(name: str, picture: Picture, apply: Applier) -> None:
    rows = picture("C 10 11 S 20 21 22 S", "C 30 S 40 S", width=9)
    segment = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]], np.int32)
    pair = None if name == "tlm" else np.array([0, 1])
    batch = apply(name, rows._replace(token_type_ids=segment, pair_labels=pair))
    assert batch.token_type_ids is segment
    assert batch.pair_labels is pair
    assert (batch.labels != x).sum(1).tolist() == [1, 1]
    assert batch.loss_counts == {"targets": 2, "tokens": 13} | ({} if pair is None else {"pairs": 2})


def test_static_masks_repeat_after_num_static_masks_epochs(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(MLM(), 20, 64)

    def in_epoch(epoch: int, copies: int = 10) -> np.ndarray:
        # The stream continues: a row has another index in every epoch.
        later = rows._replace(stream_index=rows.stream_index + 20 * epoch, epoch=np.full(20, epoch))
        return apply(MLM(num_static_masks=copies), later).target_positions

    first = [in_epoch(epoch) for epoch in range(10)]
    for epoch in range(10):
        assert (in_epoch(epoch + 10) == first[epoch]).all()
        assert all((first[epoch] != first[other]).any(1).all() for other in range(epoch)), "ten different ones"
    assert (in_epoch(3, copies=1) == in_epoch(0, copies=1)).all(), "one copy is the same in every epoch"
    assert (in_epoch(10, copies=0) != in_epoch(0, copies=0)).any(1).all(), "without copies all are new"


def test_static_masks_follow_their_row_through_the_stream(rows_for: Maker, apply: Applier, slice_rows: Any) -> None:
    rows = rows_for(MLM(), 20, 64)
    shuffled = slice_rows(rows, np.random.default_rng(0).permutation(20))
    moved = shuffled._replace(stream_index=20 + np.arange(20), epoch=np.full(20, 10))
    assert (apply("static", moved).input_ids == apply("static", rows).input_ids[shuffled.row_index]).all()


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.8, -0.1), (0.8, 0.3), (float("nan"), 0.1)])
def test_mask_and_random_add_up_to_at_most_one(shares: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"objective\.mask_prob and objective\.random_prob"):
        MLM(mask_prob=shares[0], random_prob=shares[1])
    MLM(mask_prob=0.9, random_prob=0.1)


def test_static_masks_and_span_lengths_are_not_negative() -> None:
    with pytest.raises(UserError, match=r"objective\.num_static_masks"):
        MLM(num_static_masks=-1)
    with pytest.raises(UserError, match=r"objective\.max_span_length"):
        PermutationLM(max_span_length=0)
