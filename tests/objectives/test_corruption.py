"""Inputs and labels by hand, and the rates of BERT's noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from firth.objectives import IGNORE_INDEX, BARTDenoising, Batch, CounterRNG, TokenMasking, corruption, noise_mask
from firth.objectives.corruption import NoisyText, TargetSlots
from firth.tokens import Rows, Vocabulary

PAD, END, UNK, CLS, SEP, MASK, BOS = range(7)
S0, S1, S2 = 999, 998, 997  # sentinels count down from the end of the vocabulary, as in T5
x = IGNORE_INDEX

Picture = Callable[..., Rows]
Writer = Callable[..., CounterRNG]


# --- MLM ----------------------------------------------------------------------------------------------------------


def test_select_targets_by_hand() -> None:
    mask = np.array([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0]], bool)
    targets = corruption.select_targets(mask, 4)
    assert targets.positions.tolist() == [[1, 3, 4, 0], [0, 0, 0, 0]]
    assert targets.is_used.tolist() == [[True, True, True, False], [False] * 4]
    with pytest.raises(AssertionError):
        corruption.select_targets(mask, 2)


TOKENS = np.array([[10, 11, 12, 13, 14], [20, 21, 22, 23, PAD]])
TARGETS = TargetSlots(np.array([[0, 2, 4], [1, 3, 0]]), np.array([[True, True, True], [True, True, False]]))


def test_mlm_noise_by_hand(vocab: Vocabulary, picture: Picture, written: Writer) -> None:
    # The ordinary ids are 7, 8, 9 ...: ordinary[k] = 7 + k.
    draw = written(picture("10", "20"), fate=[[0.79, 0.81, 0.95], [0.89, 0.91, 0.1]], other=[[5, 6, 7], [0, 8, 9]])
    read, labels = corruption.apply_mlm_noise(TOKENS, TARGETS, draw, vocab, mask_prob=0.8, random_prob=0.1)
    assert read.tolist() == [[MASK, 11, 13, 13, 14], [20, 7, 22, 23, PAD]]
    assert labels.tolist() == [[10, 12, 14], [21, 23, x]]
    assert TOKENS.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 23, PAD]], "the rows themselves stay as they are"


def test_targets_of_a_span_share_the_outcome_but_not_the_random_token(
    vocab: Vocabulary, picture: Picture, written: Writer
) -> None:
    unit = np.array([[0, 0, 1], [0, 0, 0]])
    draw = written(picture("10", "20"), fate=[[0.1, 0.99, 0.5], [0.85, 0.1, 0.1]], other=[[5, 6, 7], [0, 8, 9]])
    read, _ = corruption.apply_mlm_noise(TOKENS, TARGETS, draw, vocab, 0.8, 0.1, unit)
    assert read.tolist() == [[MASK, 11, MASK, 13, 14], [20, 7, 22, 15, PAD]]


def hidden(vocab: Vocabulary, mask: float, random: float) -> tuple[np.ndarray, ...]:
    """150,000 targets in rows that also have padding and unused slots."""
    rng = np.random.default_rng(0)
    maskable = np.arange(100) < rng.integers(50, 101, size=12_000)[:, None]
    tokens = np.where(maskable, rng.choice(vocab.non_special_ids, size=maskable.shape), PAD)
    draw = CounterRNG(3, np.arange(len(tokens)))
    rows = Rows(tokens, maskable - 1, maskable - 1, maskable, draw.index)
    targets = corruption.select_targets(TokenMasking()(rows, 0.18, draw), 18)
    read, labels = corruption.apply_mlm_noise(tokens, targets, draw, vocab, mask, random)
    return tokens, targets.positions, targets.is_used, read, labels


def test_eighty_ten_ten(vocab: Vocabulary) -> None:
    _, targets, used, read, labels = hidden(vocab, mask=0.8, random=0.1)
    truth, seen = labels[used], np.take_along_axis(read, targets, 1)[used]
    assert len(truth) > 150_000
    assert not used.all()
    masked, kept = seen == MASK, seen == truth
    assert masked.mean() == pytest.approx(0.8, abs=0.005)
    assert kept.mean() == pytest.approx(0.1, abs=0.005)
    assert (~masked & ~kept).mean() == pytest.approx(0.1, abs=0.005)

    replaced = seen[~masked & ~kept]
    assert np.isin(replaced, vocab.non_special_ids).all()
    counts = np.bincount(replaced, minlength=vocab.size)[vocab.non_special_ids]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_labels_are_right_and_nothing_else_changes(vocab: Vocabulary) -> None:
    tokens, targets, used, read, labels = hidden(vocab, mask=0.8, random=0.1)
    assert (labels == np.where(used, np.take_along_axis(tokens, targets, 1), IGNORE_INDEX)).all()
    touched = np.zeros(tokens.shape, bool)
    rows = np.broadcast_to(np.arange(len(tokens))[:, None], targets.shape)
    touched[rows[used], targets[used]] = True
    assert (read[~touched] == tokens[~touched]).all()
    assert (read[touched] != tokens[touched]).mean() > 0.85


@pytest.mark.parametrize(("mask", "random"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_extreme_probabilities(vocab: Vocabulary, mask: float, random: float) -> None:
    _, targets, used, read, labels = hidden(vocab, mask, random)
    seen = np.take_along_axis(read, targets, 1)[used]
    assert (seen == MASK).all() == (mask == 1)
    assert (seen == labels[used]).all() == (mask + random == 0)
    assert ((seen != MASK) & (seen != labels[used])).mean() == pytest.approx(random, abs=0.002)


def test_target_spans_by_hand() -> None:
    mask = np.array([[0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1, 1, 0]], bool)
    number, around = corruption.find_target_spans(mask, corruption.select_targets(mask, 4))
    assert number.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0]]
    assert around.tolist() == [
        [[0, 3, 0], [0, 3, 1], [4, 6, 0], [0, 0, 0]],
        [[2, 6, 0], [2, 6, 1], [2, 6, 2], [0, 0, 0]],
    ]


# --- sentinels ----------------------------------------------------------------------------------------------------


def starred(picture: Picture, *rows: str, width: int | None = None) -> tuple[Rows, np.ndarray]:
    """Rows from pictures in which noise has a star, and the mask of the stars."""
    made = picture(*(row.replace("*", "!") for row in rows), width=width)
    assert made.salient is not None
    return made._replace(salient=None), made.salient


def test_the_published_example(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10* 11* 12 13 14* 15 E")
    batch = corruption.sentinel_batch(rows, noise, 6, 6, vocab)
    assert batch.input_ids.tolist() == [[S0, 12, 13, S1, 15, END]]
    assert batch.labels.tolist() == [[S0, 10, 11, S1, 14, END]]
    assert batch.decoder_input_ids.tolist() == [[PAD, S0, 10, 11, S1, 14]]
    assert batch.document_ids.tolist() == batch.decoder_document_ids.tolist() == [[0] * 6]
    assert batch.position_ids.tolist() == batch.decoder_position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch.target_positions is None


def test_several_documents_and_padding(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10 11* 12 13* 14* E | 20 21 22* E | 30 E", "40 41* E", width=14)
    batch = corruption.sentinel_batch(rows, noise, 13, 11, vocab)
    p = PAD
    assert batch.input_ids.tolist() == [
        [10, S0, 12, S1, END, 20, 21, S0, END, 30, END, p, p],
        [40, S0, END, p, p, p, p, p, p, p, p, p, p],
    ]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, -1, -1], [0, 0, 0] + [-1] * 10]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 0, 0], [0, 1, 2] + [0] * 10]
    assert batch.labels.tolist() == [
        [S0, 11, S1, 13, 14, END, S0, 22, END, END, x],
        [S0, 41, END] + [x] * 8,
    ]
    # Each document begins with padding. Positions after a row's last label are not predicted and may hold anything.
    assert batch.decoder_input_ids[0, :10].tolist() == [p, S0, 11, S1, 13, 14, p, S0, 22, p]
    assert batch.decoder_input_ids[1, :3].tolist() == [p, S0, 41]
    assert np.isin(batch.decoder_input_ids[batch.labels == IGNORE_INDEX], [PAD, END]).all()
    assert batch.decoder_document_ids.tolist() == [[0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2], [0] * 11]
    assert batch.decoder_position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1], list(range(11))]


def test_noise_on_both_sides_of_a_document_boundary_is_two_spans(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10 11* | 20* 21")
    batch = corruption.sentinel_batch(rows, noise, 4, 6, vocab)
    assert batch.input_ids.tolist() == [[10, S0, S0, 21]]
    assert batch.labels.tolist() == [[S0, 11, END, S0, 20, END]]


def test_all_sentinels_can_be_used(vocabulary: Callable[..., Vocabulary], picture: Picture) -> None:
    rows, noise = starred(picture, "10 11* 12 13* 14 15* E")
    batch = corruption.sentinel_batch(rows, noise, 7, 7, vocabulary(sentinel_ids=(S0, S1, S2)))
    assert batch.input_ids.tolist() == [[10, S0, 12, S1, 14, S2, END]]
    assert batch.labels.tolist() == [[S0, 11, S1, 13, S2, 15, END]]


def test_the_target_of_a_document_without_noise_is_its_end_token(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10 11 E")
    batch = corruption.sentinel_batch(rows, noise, 3, 2, vocab)
    assert batch.input_ids.tolist() == [[10, 11, END]]
    assert batch.labels.tolist() == [[END, x]]
    assert batch.decoder_document_ids.tolist() == [[0, 0]]


def test_rows_stay_as_they_are(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10* 11* 12 13 14* 15 E")
    corruption.sentinel_batch(rows, noise, 6, 6, vocab)
    corruption.decoder_denoising_batch(rows, noise, 12, 6, vocab, is_prefix_lm=True)
    assert rows.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, END]]


@pytest.mark.parametrize(("encoder", "decoder"), [(5, 6), (6, 5)])
def test_a_side_that_is_too_short_is_an_assertion(
    vocab: Vocabulary, picture: Picture, encoder: int, decoder: int
) -> None:
    rows, noise = starred(picture, "10* 11* 12 13 14* 15 E")
    with pytest.raises(AssertionError):
        corruption.sentinel_batch(rows, noise, encoder, decoder, vocab)


# --- one stack ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [False, True])
def test_the_published_example_in_one_row(vocab: Vocabulary, picture: Picture, prefix: bool) -> None:
    rows, noise = starred(picture, "10* 11* 12 13 14* 15 E")
    batch = corruption.decoder_denoising_batch(rows, noise, 13, 7, vocab, prefix)
    assert batch.input_ids.tolist() == [[S0, 12, 13, S1, 15, END, S0, 10, 11, S1, 14, END, PAD]]
    # The end of the text predicts the first target token; the last one predicts nothing.
    assert batch.target_positions.tolist() == [[5, 6, 7, 8, 9, 10, 0]]
    assert batch.labels.tolist() == [[S0, 10, 11, S1, 14, END, x]]
    assert batch.document_ids.tolist() == [[0] * 12 + [-1]]
    assert batch.position_ids.tolist() == [[*range(12), 0]]
    if prefix:
        assert batch.attention_rank[0, :12].tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    else:
        assert batch.attention_rank is None


def test_each_document_has_its_target_right_after_it(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10 11* 12 E | 20 E | 30 31* E", width=11)
    batch = corruption.decoder_denoising_batch(rows, noise, 16, 9, vocab, is_prefix_lm=True)
    E = END
    assert batch.input_ids.tolist() == [[10, S0, 12, E, S0, 11, E, 20, E, E, 30, S0, E, S0, 31, E]]
    assert batch.document_ids.tolist() == [[0] * 7 + [1] * 3 + [2] * 6]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0, 1, 2, 3, 4, 5]]
    assert batch.attention_rank.tolist() == [[0, 0, 0, 0, 1, 2, 3, 0, 0, 1, 0, 0, 0, 1, 2, 3]]
    assert batch.target_positions.tolist() == [[3, 4, 5, 8, 12, 13, 14, 0, 0]]
    assert batch.labels.tolist() == [[S0, 11, E, E, S0, 31, E, x, x]]


def test_a_row_that_is_too_short_for_both_is_our_mistake(vocab: Vocabulary, picture: Picture) -> None:
    rows, noise = starred(picture, "10* 11* 12 13 14* 15 E")
    with pytest.raises(AssertionError):
        corruption.decoder_denoising_batch(rows, noise, 11, 7, vocab, is_prefix_lm=False)


# --- prefix and rest ----------------------------------------------------------------------------------------------


def test_prefix_and_rest_by_hand(vocab: Vocabulary, picture: Picture) -> None:
    rows = picture("10 11 12 13 E | 20 21 E", "30 E", width=9)
    prefix = np.array([[2] * 5 + [1] * 3 + [1], [1] * 9])
    batch = corruption.split_prefix_batch(rows, prefix, vocab)
    p, E = PAD, END
    assert batch.input_ids.tolist() == [[10, 11, E, 20, E, p, p, p, p], [30, E] + [p] * 7]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1, -1], [0, 0] + [-1] * 7]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0, 0], [0, 1] + [0] * 7]
    assert batch.labels.tolist() == [[12, 13, E, 21, E, x, x, x, x], [E] + [x] * 8]
    assert batch.decoder_input_ids[0, :5].tolist() == [p, 12, 13, p, 21]
    assert batch.decoder_input_ids[1, 0] == p
    assert batch.decoder_document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1], [0] * 9]
    assert batch.decoder_position_ids[0, :5].tolist() == [0, 1, 2, 0, 1]


def test_the_decoder_input_of_every_document_begins_with_the_start_token() -> None:
    labels, doc = np.array([[5, 6, 7, 8, x]]), np.array([[0, 0, 1, 1, -1]])
    batch = corruption.encoder_decoder_batch(
        np.array([[1, 2, 3]]), np.array([[0, 1, -1]]), labels, doc, start_token_id=4, pad_token_id=0
    )
    assert batch.decoder_input_ids.tolist() == [[4, 5, 4, 7, 0]]
    assert batch.decoder_document_ids.tolist() == [[0, 0, 1, 1, 1]], "padding counts as part of the last document"
    assert batch.decoder_position_ids.tolist() == [[0, 1, 0, 1, 2]]


# --- BART's noise -------------------------------------------------------------------------------------------------


def text_of(rows: Rows) -> NoisyText:
    return NoisyText(rows.input_ids, rows.document_ids, rows.maskable)


def test_sentences_are_permuted_inside_their_document(picture: Picture, written: Writer) -> None:
    rows = picture("C 10 11. 12. 13 14 15. S | C 20. 21. S", "C 30. 31. S", width=13)
    # One key for each sentence, at its first token: 13 14 15, then 10 11, then 12. Of the second row's document,
    # no sentence moves.
    draw = written(
        rows,
        sentences=[[0, 0.5, 0, 0.9, 0.1, 0, 0, 0, 0, 0.7, 0.2, 0], [0, 0.9, 0.1]],
        permuted=[[0.0, 1, 1, 1, 1, 1, 1, 1, 0.3], [0.6]],
    )
    text = corruption.permute_sentences(text_of(rows), rows.sentence_end, 0.5, draw)
    assert text.input_ids.tolist() == [
        [CLS, 13, 14, 15, 10, 11, 12, SEP, CLS, 21, 20, SEP, PAD],
        [CLS, 30, 31, SEP] + [PAD] * 9,
    ]
    assert text.document_ids is rows.document_ids
    assert text.maskable is rows.maskable


def test_sentences_with_equal_keys_stay_whole_and_in_order(picture: Picture, written: Writer) -> None:
    rows = picture("C 10 11. 12 13. 14. S")
    draw = written(rows, sentences=[[0, 0.5, 0, 0.5, 0, 0.1]], permuted=[[0.0]])
    text = corruption.permute_sentences(text_of(rows), rows.sentence_end, 1.0, draw)
    assert text.input_ids.tolist() == [[CLS, 14, 10, 11, 12, 13, SEP]]


def test_no_sentence_continues_in_the_next_document() -> None:
    """Even without a special token between the two, and where no sentence ends."""
    doc = np.array([[0, 0, 0, 0, 1, 1, 1, 1]])
    ends = np.isin(np.arange(8), [1, 5, 7])[None]
    text = NoisyText(np.arange(10, 18)[None], doc, doc >= 0)
    found = {
        tuple(corruption.permute_sentences(text, ends, 1.0, CounterRNG(seed, np.array([0]))).input_ids[0])
        for seed in range(20)
    }
    firsts, seconds = [(10, 11, 12, 13), (12, 13, 10, 11)], [(14, 15, 16, 17), (16, 17, 14, 15)]
    assert found == {first + second for first in firsts for second in seconds}


def test_documents_rotate_between_their_special_tokens(picture: Picture, written: Writer) -> None:
    rows = picture("C 10 11 12 13 S | C 20 21 S | C 30 31 S")
    # The first begins at its token 0.5 * 4 = 2, the second at 0.9 * 2, that is 1, and the third is not chosen.
    draw = written(
        rows,
        rotation=[[0.5, 0, 0, 0, 0, 0, 0.9, 0, 0, 0, 0.9]],
        rotated=[[0.1, 1, 1, 1, 1, 1, 0.2, 1, 1, 1, 0.7]],
    )
    text = corruption.rotate_documents(text_of(rows), 0.5, draw)
    assert text.input_ids.tolist() == [[CLS, 12, 13, 10, 11, SEP, CLS, 21, 20, SEP, CLS, 30, 31, SEP]]


def test_mask_and_delete_tokens(vocab: Vocabulary, picture: Picture) -> None:
    rows = picture("C 10 11 12 S | C 20 S", width=9)
    mask = np.array([[0, 1, 0, 1, 0, 0, 1, 0, 0]], bool)
    masked = corruption.mask_tokens(text_of(rows), mask, vocab)
    assert masked.input_ids.tolist() == [[CLS, MASK, 11, MASK, SEP, CLS, MASK, SEP, PAD]]
    deleted = corruption.delete_tokens(text_of(rows), mask, PAD)
    assert deleted.input_ids.tolist() == [[CLS, 11, SEP, CLS, SEP, PAD, PAD, PAD, PAD]]
    assert deleted.document_ids.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1, -1]]
    assert deleted.maskable.astype(int).tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert rows.input_ids.tolist() == [[CLS, 10, 11, 12, SEP, CLS, 20, SEP, PAD]]


def infilled(
    rows: Rows, spans: list[list[tuple[int, int]]], monkeypatch: pytest.MonkeyPatch, vocab: Vocabulary
) -> Batch:
    """BART's batch with these spans infilled, each given by its first token and its length; rows of one document."""
    start, length = (np.array([[span[k] for span in row] for row in spans]) for k in (0, 1))
    monkeypatch.setattr(noise_mask, "sample_span_starts_and_lengths", lambda *_: (length, start))
    return BARTDenoising(permute=0.0)(rows, CounterRNG(0, rows.stream_index), vocab)


def test_a_span_becomes_one_mask_and_no_span_another_one(
    vocab: Vocabulary, picture: Picture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = picture("C 10 11 12 13 14 15 S", "C 20 21 22 S", width=8)
    # 11 12 13 and 15 go; in the second row a mask comes before 20 and another one at the end.
    batch = infilled(rows, [[(1, 3), (5, 1)], [(0, 0), (3, 0)]], monkeypatch, vocab)
    assert batch.input_ids.tolist() == [
        [CLS, 10, MASK, 14, MASK, SEP, PAD, PAD],
        [CLS, MASK, 20, 21, 22, MASK, SEP, PAD],
    ]
    assert batch.document_ids.tolist() == [[0] * 6 + [-1] * 2, [0] * 7 + [-1]]


def test_text_does_not_grow_over_its_row(vocab: Vocabulary, picture: Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = picture("C 10 11 12 S")
    batch = infilled(rows, [[(0, 0), (2, 0)]], monkeypatch, vocab)
    assert batch.input_ids.tolist() == rows.input_ids.tolist()
    # A span of two leaves a free position for one more mask.
    rows = picture("C 10 11 12 13 S")
    batch = infilled(rows, [[(0, 0), (2, 2), (4, 0)]], monkeypatch, vocab)
    assert batch.input_ids.tolist() == [[CLS, MASK, 10, 11, MASK, SEP]]
