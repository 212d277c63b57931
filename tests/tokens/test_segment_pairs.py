"""Pairs of segments: XLNet's form, half of them consecutive, and streams that go on by half a row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.tokens import Rows, SegmentPairDataset, SegmentStreamDataset, SequenceTemplate
from firth.tokens.shards import Shards

PAD, CLS, SEP = 0, 1, 2
XLNET = SequenceTemplate((), (SEP, CLS), separator_ids=(SEP,), has_token_types=True, last_token_type=2)
ROBERTA = SequenceTemplate((CLS,), (SEP,), separator_ids=(SEP, SEP))
Make = Callable[..., Shards]


def documents_of(rows: Rows, b: int) -> list[tuple[list[int], list[int]]]:
    """Ids and token types of each document of a row."""
    assert rows.token_type_ids is not None
    fields, doc = (rows.input_ids[b], rows.token_type_ids[b]), rows.document_ids[b]
    return [tuple(field[doc == d].tolist() for field in fields) for d in range(doc.max() + 1)]  # type: ignore[misc]


def split_text(ids: list[int]) -> list[list[int]]:
    """The texts between the special tokens."""
    texts: list[list[int]] = [[]]
    for token in ids[:-2]:
        texts[-1].append(token) if token != SEP else texts.append([])
    return texts


def test_rows_have_the_form_of_the_template(make_shards: Make) -> None:
    """Every document of every row is what `apply` makes of its texts; half of the pairs are consecutive."""
    sentences = np.random.default_rng(0).integers(2, 9, (60, 4)).tolist()
    source = SegmentPairDataset(make_shards([*sentences, *[[7]] * 20]), 64, XLNET, PAD, seed=0)
    rows = source.get_rows(np.arange(4 * source.num_rows))
    consecutive: list[bool] = []
    singles = 0
    for b in range(len(rows.input_ids)):
        for ids, token_types in documents_of(rows, b):
            texts = split_text(ids)
            assert (ids, token_types) == XLNET.apply(*texts)
            assert ids[-1] == CLS
            singles += len(texts) == 1
            if len(texts) == 2:
                assert all(np.diff(text).tolist() == [1] * (len(text) - 1) for text in texts), "running text"
                consecutive.append(texts[1][0] == texts[0][-1] + 1)
        is_text = (rows.document_ids[b] >= 0) & (rows.input_ids[b] >= 100)
        assert (rows.maskable[b] == is_text).all(), "no special token is a target"
        for d in range(rows.document_ids[b].max() + 1):
            position = rows.position_ids[b][rows.document_ids[b] == d]
            assert position.tolist() == list(range(len(position)))
    assert singles == 4 * 20, "a text of one sentence stays one text"
    assert np.mean(consecutive) == pytest.approx(0.5, abs=0.08)
    filled = (source.get_rows(np.arange(source.num_rows)).document_ids >= 0).mean()
    assert source.fill_ratio == pytest.approx(filled)


def test_a_cut_is_the_end_of_a_sentence(make_shards: Make) -> None:
    source = SegmentPairDataset(make_shards([[3, 4, 5]]), 16, XLNET, PAD, seed=0, allow_short=True)
    rows = source.get_rows(np.arange(60))
    first_lengths = {len(split_text(ids)[0]) for b in range(60) for ids, _ in documents_of(rows, b)}
    assert first_lengths == {3, 7}
    again = source.get_rows(np.arange(60)[::-1])
    assert (again.input_ids[::-1] == rows.input_ids).all(), "a function of the row's index alone"


def test_other_families_keep_their_form(make_shards: Make) -> None:
    source = SegmentPairDataset(make_shards([[3, 4]]), 16, ROBERTA, PAD, seed=0, allow_short=True)
    rows = source.get_rows(np.arange(1))
    assert rows.token_type_ids is None
    assert rows.input_ids[0, [0, 4, 5, 10]].tolist() == [CLS, SEP, SEP, SEP]


def test_a_stream_goes_on_by_half_a_row_and_ends_with_a_pair(make_shards: Make) -> None:
    sentences = np.random.default_rng(0).integers(2, 6, (30, 5)).tolist()
    source = SegmentStreamDataset(make_shards(sentences), 32, XLNET, PAD, seed=0, num_streams=2, shuffle=False)
    rows = source.get_rows(np.arange(source.num_rows))
    assert rows.token_type_ids is not None
    assert rows.reset_state is not None
    assert rows.reset_state.tolist() == [True] * 2 + [False] * (source.num_rows - 2)
    consecutive = []
    for b in range(source.num_rows):
        half, pair = rows.input_ids[b, :16].tolist(), rows.input_ids[b, 16:]
        filled = rows.document_ids[b, 16:] >= 0
        if not filled.all():  # the end of the text
            continue
        assert pair[-2:].tolist() == [SEP, CLS]
        types = rows.token_type_ids[b]
        assert types[-1] == 2
        assert not rows.maskable[b][rows.input_ids[b] < 100].any()
        (a_end,) = np.flatnonzero(np.diff(types[16:-1]) == 1)  # [SEP], between A and B
        assert pair[a_end] == SEP
        if b + 2 < source.num_rows:  # the next row of the stream begins where the first half ends: with A
            ahead = rows.input_ids[b + 2, : len(pair) - 3].tolist()
            assert pair[:a_end].tolist() == ahead[:a_end]
            consecutive.append(pair[a_end + 1 : -2].tolist() == ahead[a_end:])
        assert half == rows.input_ids[b, :16].tolist()
        assert not types[:16].any()
    assert 0.2 < np.mean(consecutive) < 0.8
    stream = np.concatenate([rows.input_ids[b, :16] for b in range(0, source.num_rows - 2, 2)])
    text = stream[stream >= 100]
    assert np.diff(text).tolist() == [1] * (len(text) - 1), "the first halves are the whole text, once"


def test_half_a_row_must_hold_a_pair(make_shards: Make) -> None:
    with pytest.raises(UserError, match="no room for two texts"):
        SegmentStreamDataset(make_shards([[20, 20]]), 8, XLNET, PAD, seed=0, num_streams=1)
