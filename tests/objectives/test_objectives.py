"""Every objective: what it reads and what it asks, by hand; what it promises; and what it refuses."""

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
    Mixture,
    Objective,
    PermutationLM,
    PrefixLM,
    SalientSpanCorruption,
    SalientSpanMasking,
    SpanCorruption,
    SpanMasking,
    WeightedObjective,
    WholeWordMasking,
    noise_mask,
)
from firth.tokens import PackedDataset, Rows, SequenceTemplate, Shards, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
S0, S1 = 999, 998
x = IGNORE_INDEX
CPU = torch.device("cpu")

Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]
Maker = Callable[..., Rows]
Applier = Callable[..., Batch]
Words_ = Callable[..., Vocabulary]


# --- language models ----------------------------------------------------------------------------------------------


def test_clm_by_hand(picture: Picture, apply: Applier) -> None:
    # Two documents share the first row. The second row's document was cut, so it has no end.
    rows = picture("E 10 11 E | E 20 E", "30 31 32 33 34 35 36 37 38", width=9)
    batch = apply(CLM(), rows)
    assert batch.labels.tolist() == [[10, 11, END, x, 20, END, x, x, x], [31, 32, 33, 34, 35, 36, 37, 38, x]]
    assert batch.input_ids is rows.input_ids
    assert batch.document_ids is rows.document_ids
    assert batch.position_ids is rows.position_ids
    assert batch.target_positions is None
    assert batch.attention_rank is None
    assert batch.num_targets == 5 + 8
    assert batch.num_tokens == 7 + 9


def test_clm_across_the_edges_of_documents(picture: Picture, apply: Applier) -> None:
    rows = picture("E 10 11 E | E 20 E", width=9)
    batch = apply(CLM(across_documents=True), rows)
    assert batch.labels.tolist() == [[10, 11, END, END, 20, END, x, x, x]]
    assert batch.document_ids.tolist() == [[0] * 7 + [-1] * 2]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 0]]
    assert batch.input_ids is rows.input_ids


def test_clm_begins_and_ends_a_document_with_what_the_tokenizer_has(vocabulary: Words_) -> None:
    assert CLM().build_template(vocabulary(bos=None)) == SequenceTemplate((END,), (END,), document_edges_only=True)
    assert CLM().build_template(vocabulary(bos=BOS)) == SequenceTemplate((BOS,), (END,), document_edges_only=True)


def test_prefix_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("E 10 11 12 E | E 20 E", width=9)
    # The first prefix is three long, E 10 11; the second one, E.
    batch = PrefixLM()(rows, written(rows, prefix=[[0.5, 0, 0, 0, 0, 0.1]]), vocab)
    assert batch.labels.tolist() == [[x, x, 12, END, x, 20, END, x, x]]
    assert batch.attention_rank[0, :8].tolist() == [0, 0, 0, 1, 2, 0, 1, 2]
    assert batch.input_ids is rows.input_ids


def test_bilm_by_hand(picture: Picture, apply: Applier) -> None:
    rows = picture("C 10 11 S | C 20 S", width=7)
    batch = apply(BiLM(), rows)
    assert batch.labels.tolist() == [
        [
            [10, 11, SEP, x, 20, SEP, x],
            [x, CLS, 10, 11, x, CLS, 20],
        ]
    ]
    assert batch.attention_rank.tolist() == [[[0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0]]]
    assert batch.input_ids.shape == (1, 7)
    assert batch.num_targets == 10


def test_bilm_by_hand_without_padding_answers(picture: Picture, apply: Applier) -> None:
    batch = apply(BiLM(), picture("C 10 S", width=5))
    assert batch.labels.tolist() == [[[10, SEP, x, x, x], [x, CLS, 10, x, x]]]


def test_encoder_decoder_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("10 11 12 13 E | 20 21 E", width=9)
    batch = EncoderDecoderLM()(rows, written(rows, prefix=[[0.5, 0, 0, 0, 0, 0.4]]), vocab)
    p = PAD
    assert batch.input_ids.tolist() == [[10, 11, 12, END, 20, END, p, p, p]]
    assert batch.labels.tolist() == [[13, END, 21, END, x, x, x, x, x]]
    assert batch.decoder_input_ids[0, :4].tolist() == [p, 13, p, 21]
    assert batch.decoder_document_ids[0, :4].tolist() == [0, 0, 1, 1]


def test_permutation_lm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 14 15 16 17 S")
    # A quarter: of the first four tokens the second, of the next four the first; the last is asked first.
    draw = written(rows, span_lengths=[[0, 0]], span_places=[[0.3, 0.0]], order=[[0, 0, 0.9, 0, 0, 0.2]])
    batch = PermutationLM(share=0.25, max_span_length=1)(rows, draw, vocab)
    assert batch.input_ids is rows.input_ids, "everything is read as it is"
    assert batch.target_positions.tolist() == [[2, 5, 0, 0, 0, 0, 0, 0]]  # room for eight
    assert batch.labels.tolist() == [[11, 14, x, x, x, x, x, x]]
    assert batch.attention_rank.tolist() == [[0, 0, 2, 0, 0, 1, 0, 0, 0, 0]]


# --- masked tokens ------------------------------------------------------------------------------------------------

FATES: dict[str, Any] = {"fate": [[0.5, 0.85, 0.95]], "other": [[0, 43, 0]]}  # masked, 50, kept


def test_mlm_by_hand(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 14 S | C 20 21 22 S", width=12)
    # 30% of eight tokens are 2.4: two. Room for 30% of twelve, four.
    keys = [[0, 0.5, 0.1, 0.6, 0.7, 0.8, 0, 0, 0.9, 0.2, 0.9, 0]]
    batch = MLM(rate=0.3)(rows, written(rows, tokens=keys, **FATES), vocab)
    assert batch.target_positions.tolist() == [[2, 9, 0, 0]]
    assert batch.labels.tolist() == [[11, 21, x, x]]
    assert batch.input_ids.tolist() == [[CLS, 10, MASK, 12, 13, 14, SEP, CLS, 20, 50, 22, SEP]]
    assert batch.document_ids is rows.document_ids
    assert batch.position_ids is rows.position_ids
    assert batch.attention_rank is batch.token_type_ids is batch.span_boundaries is batch.pair_labels is None


def test_mlm_of_whole_words(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 +11 12 13 +14 +15 S")
    # Half of six tokens are three: the word of three, each token with a fate of its own.
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
    assert batch.input_ids.tolist() == [[CLS, 10, 11, *read, 15, SEP]], "one fate for the span"
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


def test_mlm_asks_around_single_tokens_too(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 S")
    draw = written(rows, tokens=[[0, 0.1, 0.2, 0.9, 0.9]], **FATES)
    batch = MLM(rate=0.5, targets="boundary")(rows, draw, vocab)
    assert batch.span_boundaries.tolist() == [[[0, 3, 0], [0, 3, 1], [0, 0, 0]]]
    assert batch.input_ids.tolist() == [[CLS, MASK, 50, 12, 13, SEP]], "each token has its own fate"


def test_replaced_tokens_are_asked_of_a_generator_first(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
    rows = picture("C 10 11 12 13 S")
    draw = written(rows, tokens=[[0, 0.1, 0.2, 0.9, 0.9]], fate=[[0.84, 0.86]])
    batch = OBJECTIVES["rtd"](rows, draw, vocab)  # 85% masked, the rest kept (ELECTRA, section 3.1 and appendix A)
    assert batch.input_ids.tolist() == [[CLS, MASK, 11, 12, 13, SEP]]
    assert batch.labels.tolist() == [[10]]
    assert batch.span_boundaries is None


def test_what_mlm_sees(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
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
    assert len({ways[sees].input_ids.tobytes() for sees in ways}) == 1, "what is hidden is the same"


@pytest.mark.parametrize("name", ["nsp", "sop", "tlm"])
def test_pairs_pass_through(name: str, picture: Picture, apply: Applier) -> None:
    rows = picture("C 10 11 S 20 21 22 S", "C 30 S 40 S", width=9)
    segment = np.array([[0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]], np.int32)
    pair = None if name == "tlm" else np.array([0, 1])
    batch = apply(name, rows._replace(token_type_ids=segment, pair_labels=pair))
    assert batch.token_type_ids is segment
    assert batch.pair_labels is pair
    assert (batch.labels != x).sum(1).tolist() == [1, 1]
    assert batch.loss_counts == {"answers": 2, "tokens": 13} | ({} if pair is None else {"pairs": 2})


def test_static_masks_come_back_after_as_many_epochs_as_there_are_copies(rows_for: Maker, apply: Applier) -> None:
    rows = rows_for(MLM(), 20, 64)

    def in_epoch(epoch: int, copies: int = 10) -> np.ndarray:
        # The stream goes on: a row comes at another place in every epoch.
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


# --- BART ---------------------------------------------------------------------------------------------------------


def bart(**noise: float) -> BARTDenoising:
    return BARTDenoising(**({"permute": 0.0, "infill": 0.0} | noise))  # type: ignore[arg-type]


def test_bart_answers_with_the_whole_text(picture: Picture, written: Writer, vocab: Vocabulary) -> None:
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


# --- mixtures -----------------------------------------------------------------------------------------------------


def mixture(*objectives: Any, per: Any = "row", weights: tuple[float, ...] | None = None) -> Mixture:
    parts = zip(objectives, weights or (1.0,) * len(objectives), strict=True)
    return Mixture(tuple(WeightedObjective(objective, weight) for objective, weight in parts), per)


def same_fields(batch: Batch, b: int, alone: Batch) -> None:
    """Row b of a mixture holds what its own objective makes of it, in the first places of each field."""
    empty = {"input_ids": PAD, "decoder_input_ids": PAD, "document_ids": -1, "labels": x}
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
    "names": mixture(SpanCorruption(), SalientSpanCorruption(), EncoderDecoderLM()),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("per", ["row", "batch"])
def test_each_row_of_a_mixture_is_of_one_objective(
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


def test_what_a_part_leaves_to_the_default_is_written_out(rows_for: Maker, apply: Applier) -> None:
    causal = mixture(CLM(), PrefixLM())
    rows = rows_for(causal, 16, 32, documents=2)
    batch, parts = apply(causal, rows), causal.sample_parts(CounterRNG(1, rows.stream_index))
    assert (batch.attention_rank[parts == 0] == np.arange(32)).all(), "a decoder sees what came before"
    unilm = MIXTURES["unilm"]
    rows = rows_for(unilm, 16, 32, documents=2)
    batch, parts = apply(unilm, rows), unilm.sample_parts(CounterRNG(1, rows.stream_index))
    assert (batch.attention_rank[parts == 0] == 0).all(), "an encoder sees all"
    assert (batch.token_type_ids[parts != 1] == 0).all()


@pytest.mark.parametrize(
    "other",
    [MLM(masking=SpanMasking(), targets="boundary"), MLM(targets="replaced"), PermutationLM(), BiLM()],
    ids=["boundary", "replaced", "permutation", "bilm"],
)
def test_what_needs_a_model_of_its_own_is_not_mixed_with_others(other: Any) -> None:
    """A batch says nothing about which of its rows a boundary head, a generator or a second stream is for."""
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


# --- by name ------------------------------------------------------------------------------------------------------


def test_each_shape_has_an_objective_that_knows_it() -> None:
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
def test_every_way_to_see_becomes_tensors(sees: Any, rows_for: Maker, apply: Applier) -> None:
    batch = apply(MLM(visibility=sees), rows_for(MLM(), 2, 32)).to(CPU)
    assert batch.input_ids.shape == (2, 32)


def test_what_each_promises() -> None:
    assert OBJECTIVES["mlm"].expected_rates() == pytest.approx(
        {"asked": 0.15, "masked": 0.8, "random": 0.1, "kept": 0.1}
    )
    assert OBJECTIVES["rtd"].expected_rates() == pytest.approx(
        {"asked": 0.15, "masked": 0.85, "random": 0, "kept": 0.15}
    )
    assert OBJECTIVES["span"].expected_rates()["mean_span"] == pytest.approx(3.8, abs=0.01)
    assert OBJECTIVES["nsp"].expected_rates()["pairs"] == OBJECTIVES["sop"].expected_rates()["pairs"] == 0.5
    assert "pairs" not in OBJECTIVES["tlm"].expected_rates()
    assert OBJECTIVES["span-corruption"].expected_rates() == {"asked": 0.15, "mean_span": 3.0}
    assert OBJECTIVES["permutation-lm"].expected_rates() == {"asked": 1 / 6, "mean_span": 3.0}
    assert OBJECTIVES["bart"].expected_rates() == {"permuted": 1.0, "infilled": 0.3, "mean_span": 3.0}
    assert CLM().expected_rates() == {}


def test_what_each_needs() -> None:
    needs = {name: (o.row_layout, o.token_flags, o.extras) for name, o in OBJECTIVES.items()}
    assert needs["mlm"] == needs["static"] == needs["unilm"] == needs["bilm"] == ("packed", (), ())
    assert needs["whole-word"] == ("packed", ("word_start",), ())
    assert needs["span"] == ("packed", ("word_start",), ("boundary",))
    assert needs["salient"] == needs["salient-spans"] == ("packed", ("word_start", "salient"), ())
    assert needs["nsp"] == ("next", (), ("pair",))
    assert needs["sop"] == ("order", (), ("pair",))
    assert needs["tlm"] == ("sides", (), ())
    assert needs["rtd"] == ("packed", (), ("generator",))
    assert needs["permutation-lm"] == ("packed", (), ("query",))
    assert needs["bart"] == ("packed", ("sentence_end",), ())
    assert bart(infill=0.3).token_flags == ()


class FakeShards(Shards):
    """Documents of given lengths; every token is another one."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder = folder
        self.offsets = np.cumsum([0, *lengths])
        self.tokens = np.arange(TEXT, TEXT + self.num_tokens).astype(np.uint16)  # type: ignore[assignment]

    fingerprint = "fake"  # type: ignore[assignment]


TEXT = 1000
MANY = Vocabulary(40_000, PAD, UNK, None, END, CLS, SEP, MASK, tuple(range(999, 99, -1)), tuple(range(1000)))


@pytest.mark.parametrize("longest", [4, 30, 600])
@pytest.mark.parametrize("objective", [CLM(), MLM(), SpanCorruption(), SpanCorruption(0.5, 3.0), DecoderDenoising()])
def test_real_rows_have_every_token_once(tmp_path: Path, objective: Any, longest: int) -> None:
    lengths = np.random.default_rng(0).integers(1, longest + 1, size=6000 // longest + 20).tolist()
    width = objective.source_length(64)
    most = objective.max_documents(width)
    frame = objective.build_template(MANY)
    source = PackedDataset(
        FakeShards(tmp_path, lengths), width, frame, PAD, 1, max_documents_per_row=most, allow_short=True
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


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 15.0, float("nan")])
@pytest.mark.parametrize("objective", [MLM, SpanCorruption, DecoderDenoising, SalientSpanCorruption])
def test_a_rate_is_a_share(objective: Any, rate: float) -> None:
    with pytest.raises(UserError, match=r"objective\.rate is .*must lie between 0 and 1"):
        objective(rate=rate)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(UserError, match=r"objective\.share is .*must lie between 0 and 1"):
        PermutationLM(share=share)


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.8, -0.1), (0.8, 0.3), (float("nan"), 0.1)])
def test_the_fates_are_shares_of_one_whole(shares: tuple[float, float]) -> None:
    with pytest.raises(UserError, match=r"objective\.mask and objective\.random"):
        MLM(mask=shares[0], random=shares[1])
    MLM(mask=0.9, random=0.1)


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


def test_copies_and_longest_are_not_negative() -> None:
    with pytest.raises(UserError, match=r"objective\.num_static_masks"):
        MLM(num_static_masks=-1)
    with pytest.raises(UserError, match=r"objective\.max_span_length"):
        PermutationLM(max_span_length=0)


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


@pytest.mark.parametrize("objective", [SpanCorruption(), DecoderDenoising(), SalientSpanCorruption()])
def test_a_tokenizer_without_sentinels(objective: Objective, vocabulary: Words_) -> None:
    with pytest.raises(UserError, match="sentinel"):
        objective.check(vocabulary(sentinel_ids=()), 128)


def test_more_spans_than_sentinels(vocabulary: Words_) -> None:
    few, enough = (vocabulary(sentinel_ids=tuple(range(999, 999 - n, -1))) for n in (4, 5))
    SpanCorruption().check(enough, 101)  # 15 tokens of noise in five spans
    with pytest.raises(UserError, match="5 spans, and the tokenizer has 4 sentinels"):
        SpanCorruption().check(few, 101)
    with pytest.raises(UserError, match=r"15 spans, and the tokenizer has 5 sentinels. Lower objective\.rate, or sh"):
        SalientSpanCorruption().check(enough, 100)


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
    with pytest.raises(UserError, match=r"one in 30, do not fit into rows of 29"):
        PermutationLM().check(vocab, 29)
    PermutationLM().check(vocab, 30)


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
        ((MLM(), CLM()), (1.0, 1.0), "no one architecture"),
        ((SpanCorruption(), DecoderDenoising()), (1.0, 1.0), "no one architecture"),
        ((MLM(), MLM(pair="next")), (1.0, 1.0), ""),
        ((MLM(), MLM(pair="translation")), (1.0, 1.0), "cannot be mixed"),
        ((MLM(pair="order"), MLM(pair="next")), (1.0, 1.0), "cannot be mixed"),
    ],
)
def test_what_cannot_be_mixed(objectives: tuple[Any, ...], weights: tuple[float, ...], said: str) -> None:
    with pytest.raises(UserError, match=rf"objective\.parts: .*{said}"):
        mixture(*objectives, weights=weights)


def test_objectives_with_different_frames_cannot_be_mixed(vocab: Vocabulary) -> None:
    for objectives in ((SpanCorruption(), BARTDenoising()), (CLM(), DecoderDenoising())):
        with pytest.raises(UserError, match="different tokens around a text"):
            mixture(*objectives).check(vocab, 128)
