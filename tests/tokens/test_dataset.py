"""Rows hold every token once an epoch, in an order that depends on the seed and the index alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokens.fake_shards import FakeShards

from firth.core.errors import UserError
from firth.tokens.dataset import PackedDataset, Rows
from firth.tokens.shards import Shards
from firth.tokens.template import SequenceTemplate

PAD, CLS, SEP = 0, 1, 2
BERT = SequenceTemplate((CLS,), (SEP,))


def test_rows_by_hand(tmp_path: Path) -> None:
    shards = FakeShards(tmp_path, [5, 3, 2, 7])  # tokens 100..104, 105..107, 108..109, 110..116
    source = PackedDataset(shards, 9, BERT, PAD, seed=0, shuffle=False)
    rows = source.get_rows(np.arange(source.num_rows))
    assert rows.input_ids.tolist() == [
        [CLS, 110, 111, 112, 113, 114, 115, 116, SEP],
        [CLS, 100, 101, 102, 103, 104, SEP, PAD, PAD],
        [CLS, 105, 106, 107, SEP, CLS, 108, 109, SEP],
    ]
    assert rows.document_ids.tolist() == [[0] * 9, [0] * 7 + [-1] * 2, [0] * 5 + [1] * 4]
    assert rows.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 5, 6, 0, 0],
        [0, 1, 2, 3, 4, 0, 1, 2, 3],
    ]
    assert np.array_equal(rows.maskable, rows.input_ids >= 100)
    assert rows.row_index is not None
    assert rows.epoch is not None
    assert (rows.stream_index.tolist(), rows.row_index.tolist(), rows.epoch.tolist()) == (
        [0, 1, 2],
        [0, 1, 2],
        [0, 0, 0],
    )
    filled = rows[:7]
    assert [a.dtype for a in filled if a is not None] == [np.int64, np.int32, np.int32, np.bool_, *[np.int64] * 3]
    assert rows[7:] == (None,) * 6, "fields that were not requested are None"
    assert source.fill_ratio == pytest.approx(25 / 27)


def test_special_tokens_at_the_end_only(tmp_path: Path) -> None:
    source = PackedDataset(FakeShards(tmp_path, [3, 2]), 5, SequenceTemplate((), (SEP,)), PAD, seed=0, shuffle=False)
    assert source.get_rows(np.arange(2)).input_ids.tolist() == [[100, 101, 102, SEP, PAD], [103, 104, SEP, PAD, PAD]]


def test_special_tokens_at_document_edges_only(tmp_path: Path) -> None:
    template = SequenceTemplate((CLS,), (SEP,), document_edges_only=True)
    source = PackedDataset(FakeShards(tmp_path, [11]), 6, template, PAD, seed=0, shuffle=False)
    assert source.get_rows(np.arange(3)).input_ids.tolist() == [
        [CLS, 100, 101, 102, 103, PAD],
        [104, 105, 106, 107, PAD, PAD],
        [108, 109, 110, SEP, PAD, PAD],
    ]
    assert source.fill_ratio == pytest.approx(13 / 18)


def test_a_piece_of_whole_sentences_starts_like_a_document(make_shards: Make) -> None:
    template = SequenceTemplate((CLS,), (SEP,), document_edges_only=True)
    source = PackedDataset(make_shards([[3, 4]]), 6, template, PAD, seed=0, shuffle=False, split_at="sentence")
    assert source.get_rows(np.arange(2)).input_ids.tolist() == [
        [CLS, 103, 104, 105, 106, SEP],
        [CLS, 100, 101, 102, PAD, PAD],
    ]
    assert source.fill_ratio == pytest.approx(10 / 12)


@pytest.mark.parametrize(
    "template", [SequenceTemplate(), BERT, SequenceTemplate((CLS,), (SEP,), document_edges_only=True)]
)
def test_every_token_is_read_once_an_epoch(shards: FakeShards, template: SequenceTemplate) -> None:
    source = PackedDataset(shards, 32, template, PAD, seed=3)
    for epoch in range(2):
        rows = source.get_rows(epoch * source.num_rows + np.arange(source.num_rows))
        assert np.array_equal(np.sort(rows.input_ids[rows.maskable]), np.asarray(shards.tokens))
        assert source.fill_ratio == pytest.approx((rows.document_ids >= 0).mean())


def test_epochs_differ_in_order(shards: FakeShards) -> None:
    source = PackedDataset(shards, 32, BERT, PAD, seed=3)
    first = source.get_rows(np.arange(source.num_rows)).input_ids
    second = source.get_rows(np.arange(source.num_rows) + source.num_rows).input_ids
    other = PackedDataset(shards, 32, BERT, PAD, seed=4).get_rows(np.arange(source.num_rows)).input_ids
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(other.tolist())


def test_a_row_depends_on_its_index_alone(shards: FakeShards) -> None:
    source = PackedDataset(shards, 32, BERT, PAD, seed=3)
    index = np.arange(2 * source.num_rows)  # over the edge of an epoch
    together = source.get_rows(index)
    for g in (len(index) - 1, 0, source.num_rows, 5):
        alone = source.get_rows(np.array([g]))
        for name in Rows._fields[:7]:
            assert np.array_equal(getattr(alone, name)[0], getattr(together, name)[g])
    mixed = source.get_rows(index[::-7])
    assert np.array_equal(mixed.input_ids, together.input_ids[::-7])


def test_positions_restart_with_every_document(shards: FakeShards) -> None:
    source = PackedDataset(shards, 64, BERT, PAD, seed=3)
    rows = source.get_rows(np.arange(source.num_rows))
    assert rows.document_ids.max() > 1
    new = np.diff(rows.document_ids, axis=1, prepend=-1) != 0
    text = rows.document_ids >= 0
    assert (rows.position_ids[new & text] == 0).all()
    assert (rows.input_ids[new & text] == CLS).all()
    steps = np.diff(rows.position_ids, axis=1)
    assert (steps[(~new & text)[:, 1:]] == 1).all()


def test_rows_and_epochs_say_where_a_row_comes_from(shards: FakeShards) -> None:
    source = PackedDataset(shards, 32, BERT, PAD, seed=3)
    rows = source.get_rows(np.arange(2 * source.num_rows))
    assert rows.row_index is not None
    assert rows.epoch is not None
    assert np.array_equal(rows.epoch, np.repeat([0, 1], source.num_rows))
    first, second = rows.row_index.reshape(2, -1)
    assert np.array_equal(np.sort(first), np.arange(source.num_rows))
    assert np.array_equal(
        rows.input_ids[: source.num_rows][np.argsort(first)], rows.input_ids[source.num_rows :][np.argsort(second)]
    )


# --- bits ---------------------------------------------------------------------------------------------------------

Make = Callable[..., Shards]
EVERY_BIT = ("word_start", "sentence_end", "salient")


def test_bits_by_hand(make_shards: Make) -> None:
    shards = make_shards([[2, 3], [1, 2], [7]], words=[0, 1, 4, 5, 7, 8, 11], salient=[1, 2, 9, 10])
    source = PackedDataset(shards, 8, BERT, PAD, seed=0, shuffle=False, token_bits=EVERY_BIT)
    rows = source.get_rows(np.arange(source.num_rows))
    T, F = True, False
    assert rows.input_ids.tolist() == [
        [CLS, 108, 109, 110, 111, 112, 113, SEP],
        [CLS, 100, 101, 102, 103, 104, SEP, PAD],
        [CLS, 105, 106, 107, SEP, CLS, 114, SEP],
    ]
    assert rows.word_start is not None
    assert rows.word_start.tolist() == [
        [F, T, F, F, T, F, F, F],
        [F, T, T, F, F, T, F, F],
        [F, T, F, T, F, F, T, F],  # 114 is inside a word, but begins a piece
    ]
    assert rows.sentence_end is not None
    assert rows.sentence_end.tolist() == [
        [F, F, F, F, F, F, T, F],  # 113 is in the middle of a sentence, but ends a piece
        [F, F, T, F, F, T, F, F],
        [F, T, F, T, F, F, T, F],
    ]
    assert rows.salient is not None
    assert rows.salient.tolist() == [[F, F, T, T, F, F, F, F], [F, F, T, T, F, F, F, F], [F] * 8]


@pytest.mark.parametrize(
    "template", [SequenceTemplate(), BERT, SequenceTemplate((CLS,), (SEP,), document_edges_only=True)]
)
def test_token_bits_equal_those_of_the_shards(make_shards: Make, template: SequenceTemplate) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(1, 15, size=random.integers(1, 9)).tolist() for _ in range(100)]
    size = sum(map(sum, documents))
    marked = {name: np.flatnonzero(random.random(size) < 0.3) for name in ("words", "salient")}
    shards = make_shards(documents, **marked)
    source = PackedDataset(shards, 32, template, PAD, seed=3, token_bits=EVERY_BIT)
    rows = source.get_rows(np.arange(source.num_rows))
    token_index = rows.input_ids - 100
    new = np.diff(rows.document_ids, axis=1, prepend=-2) != 0
    first = rows.maskable & (new | ~np.roll(rows.maskable, 1, axis=1))
    last = rows.maskable & np.roll(~rows.maskable | new, -1, axis=1)
    last[:, -1] = rows.maskable[:, -1]
    is_word, is_salient = (np.isin(np.arange(size), marked[name]) for name in ("words", "salient"))
    is_end = shards.sentence_ends(0, size)
    for bits, expected, forced in (
        (rows.word_start, is_word, first),
        (rows.sentence_end, is_end, last),
        (rows.salient, is_salient, np.zeros_like(first)),
    ):
        assert bits is not None
        assert np.array_equal(bits, rows.maskable & (expected[np.where(rows.maskable, token_index, 0)] | forced))


def test_salient_bits_must_be_there(make_shards: Make) -> None:
    with pytest.raises(UserError, match="firth prepare --salient"):
        PackedDataset(make_shards([[9]]), 8, BERT, PAD, seed=0, token_bits=("salient",))


def test_word_edges_must_say_something(make_shards: Make, capsys: pytest.CaptureFixture[str]) -> None:
    def source(**how: Any) -> PackedDataset:
        return PackedDataset(make_shards([[4], [5]], **how), 8, BERT, PAD, seed=0, token_bits=("word_start",))

    with pytest.raises(UserError, match=r"every document is one word.*wordpiece, byte-bpe or unigram.*`words` column"):
        source(words=[0, 4], kind="unigram")
    with pytest.raises(UserError, match="every token is one word"):
        source(words=range(9), kind="unknown")
    assert source(words=range(9), kind="word").num_rows == 2
    capsys.readouterr()
    source(words=range(9), kind="wordpiece")
    assert "every token is a word" in capsys.readouterr().err
    source(words=[0, 1, 4])
    assert capsys.readouterr().err == ""


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_text_shorter_than_a_row(tmp_path: Path) -> None:
    shards = FakeShards(tmp_path, [5, 3])
    with pytest.raises(UserError, match=r"has 8 tokens, less than one row of 128.*--max-seq-length"):
        PackedDataset(shards, 128, BERT, PAD, seed=0)
    source = PackedDataset(shards, 128, BERT, PAD, seed=0, allow_short=True)
    assert source.num_rows == 1
    assert source.get_rows(np.array([0, 1])).maskable.sum() == 16


def test_rows_too_short_for_text(shards: FakeShards) -> None:
    with pytest.raises(UserError, match="no room for text"):
        PackedDataset(shards, 2, BERT, PAD, seed=0)


# --- several packings


@pytest.mark.parametrize("split_at", ["token", "sentence"])
def test_every_pass_of_several_packings_reads_every_token_once(make_shards: Make, split_at: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 9, (60, 12)).tolist()
    shards = make_shards([row[: 1 + i % 12] for i, row in enumerate(lengths)])
    source = PackedDataset(shards, 32, BERT, PAD, seed=3, split_at=split_at, num_packings=3)
    ends = np.array([*source.load_packings(10**6), source.load_packings(0)[-1] + source.num_rows])
    assert len(set(np.diff(ends).tolist())) > 1, "packings of different sizes, or the test shows little"
    seen = []
    for number in range(4):
        rows = source.get_rows(np.arange(ends[number], ends[number + 1]))
        assert np.array_equal(np.sort(rows.input_ids[rows.maskable]), np.arange(100, 100 + shards.num_tokens))
        assert rows.epoch is not None
        assert set(rows.epoch.tolist()) == {number}
        assert source.passes_of(int(ends[number + 1])) == number + 1
        seen.append({tuple(row) for row in rows.input_ids.tolist()})
    assert seen[0] == seen[3], "the fourth pass has the first packing again, in another order"
    assert len(seen[0] & seen[1]) < len(seen[0]) / 2
    assert source.words_of(int(ends[2])) == pytest.approx(2 * shards.num_words)


def test_the_first_pass_is_that_of_one_packing(shards: FakeShards) -> None:
    one, several = (PackedDataset(shards, 32, BERT, PAD, seed=3, num_packings=n) for n in (1, 5))
    index = np.arange(one.num_rows)
    assert np.array_equal(one.get_rows(index).input_ids, several.get_rows(index).input_ids)
    assert len(several.packings) == 1, "no other packing is computed before its first row is read"
    assert not np.array_equal(
        one.get_rows(index + one.num_rows).input_ids, several.get_rows(index + one.num_rows).input_ids
    )


def test_rows_of_several_packings_do_not_depend_on_earlier_reads(shards: FakeShards) -> None:
    """Random access: a fresh dataset that reads a late row first finds the same one."""
    source = PackedDataset(shards, 32, BERT, PAD, seed=3, num_packings=2)
    index = np.arange(5 * source.num_rows)  # more than two turns
    all_rows = source.get_rows(index)
    for g in (4 * source.num_rows, 0, source.num_rows - 1, source.num_rows, source.num_rows + 3):
        row = PackedDataset(shards, 32, BERT, PAD, seed=3, num_packings=2).get_rows(np.array([g]))
        for name, value in row._asdict().items():
            if value is not None:
                assert np.array_equal(value[0], getattr(all_rows, name)[g]), name
    assert len({tuple(row) for row in all_rows.input_ids[: source.num_rows].tolist()}) == source.num_rows
