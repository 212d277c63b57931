"""Streams read every token once an epoch, and each continues from row to row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.tokens.dataset import Rows
from firth.tokens.shards import Shards
from firth.tokens.stream import StreamDataset
from firth.tokens.template import SequenceTemplate

PAD, BEGIN, END = 0, 1, 2
PLAIN, FRAMED = SequenceTemplate(), SequenceTemplate((BEGIN,), (END,))
Make = Callable[..., Shards]


def epoch(source: StreamDataset, number: int = 0) -> Rows:
    return source.get_rows(np.arange(source.num_rows) + number * source.num_rows)


def streams(source: StreamDataset, number: int = 0) -> list[list[int]]:
    """The tokens that each stream reads in an epoch, without padding."""
    tokens, doc = epoch(source, number).input_ids, epoch(source, number).document_ids
    return [
        tokens[stream :: source.num_streams][doc[stream :: source.num_streams] >= 0].tolist()
        for stream in range(source.num_streams)
    ]


def test_by_hand(make_shards: Make) -> None:
    """Documents of 3 and 4 tokens, two special tokens each: eleven positions, five in one stream, six in the other."""
    source = StreamDataset(make_shards([[3], [4]]), 3, FRAMED, PAD, seed=0, num_streams=2, shuffle=False)
    assert source.num_rows == 4
    rows = source.get_rows(np.arange(6))
    assert rows.input_ids.tolist() == [
        [BEGIN, 100, 101],  # step 0
        [BEGIN, 103, 104],
        [102, END, PAD],  # step 1
        [105, 106, END],
        [BEGIN, 100, 101],  # the next epoch
        [BEGIN, 103, 104],
    ]
    assert rows.document_ids.tolist() == [[0] * 3, [0] * 3, [0, 0, -1], [0] * 3, [0] * 3, [0] * 3]
    assert rows.position_ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert rows.maskable[:4].tolist() == [
        [False, True, True],
        [False, True, True],
        [True, False, False],
        [True, True, False],
    ]
    assert rows.reset_state is not None
    assert rows.row_index is not None
    assert rows.epoch is not None
    assert rows.reset_state.tolist() == [True, True, False, False, True, True]
    assert rows.row_index.tolist() == [0, 1, 2, 3, 0, 1]
    assert rows.epoch.tolist() == [0, 0, 0, 0, 1, 1]
    assert source.fill_ratio == 11 / 12


@pytest.mark.parametrize("template", [PLAIN, FRAMED])
@pytest.mark.parametrize("num_streams", [1, 3, 7])
def test_every_token_once_an_epoch(num_streams: int, template: SequenceTemplate, make_shards: Make) -> None:
    shards = make_shards([[n] for n in (5, 40, 1, 13, 2, 2, 31, 8)])
    source = StreamDataset(shards, 4, template, PAD, seed=3, num_streams=num_streams)
    for number in range(3):
        read = np.concatenate(streams(source, number))
        text = read[read >= 100]
        assert np.sort(text).tolist() == list(range(100, 100 + shards.num_tokens))
        assert len(read) - len(text) == 8 * template.num_special_tokens()
        sizes = [len(stream) for stream in streams(source, number)]
        assert max(sizes) - min(sizes) <= 1, "all streams read as much"


def test_streams_continue_and_documents_are_whole(make_shards: Make) -> None:
    """The streams of an epoch, concatenated, are the documents in some order, each from its start to its end."""
    shards = make_shards([[n] for n in (5, 40, 1, 13, 2, 2, 31, 8)])
    source = StreamDataset(shards, 4, FRAMED, PAD, seed=3, num_streams=5)
    orders = []
    for number in range(3):
        line = [token for stream in streams(source, number) for token in stream]
        starts = [i for i, token in enumerate(line) if token == BEGIN]
        documents = [line[a + 1 : b - 1] for a, b in zip(starts, [*starts[1:], len(line)], strict=True)]
        assert all(line[b - 1] == END for b in [*starts[1:], len(line)])
        assert all(doc == list(range(doc[0], doc[0] + len(doc))) for doc in documents)
        orders.append([doc[0] for doc in documents])
    assert len({tuple(order) for order in orders}) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1


def test_any_row_at_once(make_shards: Make) -> None:
    """Rows of any epoch in any order are the rows of the stream; another seed is another order."""
    shards = make_shards([[n] for n in (5, 9, 7, 13, 2, 11)])
    source = StreamDataset(shards, 4, FRAMED, PAD, seed=1, num_streams=3, token_bits=("word_start", "sentence_end"))
    index = np.random.default_rng(0).permutation(3 * source.num_rows)
    whole, some = source.get_rows(np.sort(index)), source.get_rows(index)
    for name, value in whole._asdict().items():
        if value is not None:
            assert np.array_equal(value[index], getattr(some, name)), name
    other = StreamDataset(shards, 4, FRAMED, PAD, seed=2, num_streams=3)
    assert not np.array_equal(epoch(other).input_ids, epoch(source).input_ids)


def test_token_bits_follow_the_text_and_a_cut_is_a_boundary(make_shards: Make) -> None:
    shards = make_shards([[3, 3], [2]], words=[0, 2, 3, 6])
    source = StreamDataset(
        shards, 4, FRAMED, PAD, 0, num_streams=1, shuffle=False, token_bits=("word_start", "sentence_end")
    )
    rows = epoch(source)
    assert rows.input_ids.tolist() == [[1, 100, 101, 102], [103, 104, 105, 2], [1, 106, 107, 2]]
    assert rows.word_start is not None
    assert rows.sentence_end is not None
    assert rows.word_start.astype(int).tolist() == [[0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert rows.sentence_end.astype(int).tolist() == [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0]]
    cut = StreamDataset(make_shards([[6]], words=[0, 1]), 4, PLAIN, PAD, 0, num_streams=1, token_bits=("word_start",))
    assert epoch(cut).word_start.astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]  # type: ignore[union-attr]


def test_too_little_text_for_the_streams(make_shards: Make) -> None:
    with pytest.raises(UserError, match=r"20 tokens, too few for 8 rows of 3 .*--per-device-train-batch-size"):
        StreamDataset(make_shards([[20]]), 3, PLAIN, PAD, seed=0, num_streams=8)
    rows = StreamDataset(make_shards([[2]]), 3, PLAIN, PAD, seed=0, num_streams=3, allow_short=True).get_rows(
        np.arange(3)
    )
    assert rows.input_ids.tolist() == [[PAD] * 3, [100, PAD, PAD], [101, PAD, PAD]]
