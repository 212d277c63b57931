"""Rows hold every token once an epoch, in an order that depends on the seed and the index alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.tokens import dataset as rows_module
from firth.tokens.dataset import (
    PackedDataset,
    RowPacking,
    Rows,
    SequenceTemplate,
    fill_row_gaps,
    hash_uint64,
    pack_documents,
    permute_indices,
    split_at_sentences,
)
from firth.tokens.shards import Shards

PAD, CLS, SEP = 0, 1, 2
BERT = SequenceTemplate((CLS,), (SEP,))


class FakeShards(Shards):
    """Documents of given lengths; the tokens are 100, 101, 102 ... so that each can be told from the others."""

    def __init__(self, folder: Path, lengths: list[int]) -> None:
        self.folder = folder
        self.offsets = np.cumsum([0, *lengths])
        self.tokens = np.arange(100, 100 + self.num_tokens).astype(np.uint16)  # type: ignore[assignment]

    fingerprint = "fake"  # type: ignore[assignment]


@pytest.fixture
def shards(tmp_path: Path) -> FakeShards:
    return FakeShards(tmp_path, np.random.default_rng(0).integers(1, 40, size=200).tolist())


def layout(packing: RowPacking) -> list[list[tuple[int, int]]]:
    """The (start, length) of the pieces of each row."""
    pieces = list(zip(packing.piece_start.tolist(), packing.piece_length.tolist(), strict=True))
    edges = packing.row_first.tolist()
    return [pieces[a:b] for a, b in pairwise(edges)]


# --- packing ------------------------------------------------------------------------------------------------------


def test_packing_by_hand() -> None:
    # Costs with a frame of 1: 6, 4, 3, 8. Longest first: 8 alone; 6; 4 does not fit beside 6; 3 fits beside 4, not 6.
    assert layout(pack_documents(np.array([5, 3, 2, 7]), capacity=8, template_size=1)) == [
        [(10, 7)],
        [(0, 5)],
        [(5, 3), (8, 2)],
    ]


def test_best_fit_takes_the_row_that_it_fills_best() -> None:
    # 7, 6, 3: the 3 fits only beside 7; then 4 fits only beside 6.
    assert layout(pack_documents(np.array([7, 6, 4, 3]), capacity=10)) == [[(0, 7), (17, 3)], [(7, 6), (13, 4)]]
    # The 2 fits beside 7 (leaving 1) and beside 8 (leaving 0): it goes to the 8.
    assert layout(pack_documents(np.array([7, 8, 2]), capacity=10)) == [[(7, 8), (15, 2)], [(0, 7)]]


def test_long_documents_are_cut_into_full_pieces_and_a_remainder() -> None:
    assert layout(pack_documents(np.array([20, 3]), capacity=8, template_size=1)) == [
        [(0, 7)],
        [(7, 7)],
        [(14, 6)],
        [(20, 3)],
    ]
    assert layout(pack_documents(np.array([16]), capacity=8)) == [[(0, 8)], [(8, 8)]]


def test_equal_pieces_share_rows() -> None:
    assert [len(row) for row in layout(pack_documents(np.full(7, 3), capacity=10))] == [3, 3, 1]


def test_at_most_so_many_documents_to_a_row() -> None:
    assert [len(row) for row in layout(pack_documents(np.full(7, 1), capacity=100, max_documents_per_row=3))] == [
        3,
        3,
        1,
    ]
    mixed = pack_documents(np.array([5, 5, 1, 1, 1]), capacity=8, max_documents_per_row=2)
    assert [[length for _, length in row] for row in layout(mixed)] == [[5, 1], [5, 1], [1]]


def test_no_documents() -> None:
    assert pack_documents(np.array([], dtype=np.int64), capacity=8).num_rows == 0


def slow_best_fit(costs: list[int], capacity: int, max_documents: int | None) -> list[int]:
    """The rows' free space after packing one piece at a time, the plain way."""
    free: list[int] = []
    held: list[int] = []
    for cost in sorted(costs, reverse=True):
        open_rows = [
            r for r in range(len(free)) if free[r] >= cost and (max_documents is None or held[r] < max_documents)
        ]
        if not open_rows:
            free.append(capacity)
            held.append(0)
            open_rows = [len(free) - 1]
        best = min(open_rows, key=lambda r: (free[r], -held[r]))
        free[best] -= cost
        held[best] += 1
    return sorted(free)


@pytest.mark.parametrize("max_documents", [None, 1, 4])
@pytest.mark.parametrize("capacity", [16, 64])
def test_packing_equals_best_fit_one_piece_at_a_time(capacity: int, max_documents: int | None) -> None:
    lengths = np.random.default_rng(capacity).geometric(0.08, size=500)
    packing = pack_documents(lengths, capacity, template_size=2, max_documents_per_row=max_documents)
    costs = [[length + 2 for _, length in row] for row in layout(packing)]
    free = sorted(capacity - sum(row) for row in costs)
    assert free == slow_best_fit([cost for row in costs for cost in row], capacity, max_documents)
    assert max_documents is None or max(map(len, costs)) <= max_documents
    covered = np.concatenate([np.arange(start, start + length) for row in layout(packing) for start, length in row])
    assert np.array_equal(np.sort(covered), np.arange(lengths.sum()))


def test_packing_is_kept_beside_the_shards(shards: FakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
    (folder,) = shards.folder.iterdir()
    assert folder.name.startswith("rows-32-")
    monkeypatch.setattr(rows_module, "pack_documents", None)
    kept = PackedDataset(shards, 32, BERT, PAD, seed=1).packing
    for name in RowPacking._fields:
        assert np.array_equal(getattr(kept, name), getattr(fresh, name))
        assert getattr(kept, name).dtype == getattr(fresh, name).dtype


def test_another_packing_is_kept_apart(shards: FakeShards) -> None:
    PackedDataset(shards, 32, BERT, PAD, seed=0)
    PackedDataset(shards, 32, SequenceTemplate((), (SEP,)), PAD, seed=0)
    PackedDataset(shards, 32, BERT, PAD, seed=0, max_documents_per_row=2)
    PackedDataset(shards, 64, BERT, PAD, seed=0)
    assert len(list(shards.folder.iterdir())) == 4


def test_a_damaged_packing_is_made_again(shards: FakeShards) -> None:
    fresh = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
    (folder,) = shards.folder.iterdir()
    (folder / "piece_start.npy").write_bytes(b"")
    for _ in range(2):
        assert np.array_equal(PackedDataset(shards, 32, BERT, PAD, seed=0).packing.piece_start, fresh.piece_start)
    assert (folder / "piece_start.npy").stat().st_size > 0


def test_shards_that_cannot_be_written_are_fine(
    shards: FakeShards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(rows_module, "save_arrays", refuse)
    source = PackedDataset(shards, 32, BERT, PAD, seed=0)
    assert source.get_rows(np.arange(3)).input_ids.shape == (3, 32)
    assert list(shards.folder.iterdir()) == []
    assert "Permission denied" in capsys.readouterr().err


def test_emptiest_rows_are_broken_up_to_fill_the_others() -> None:
    # Four rows of 60 leave 40 each; the last one has 50, which go into two of these gaps, no piece below 16.
    loose = pack_documents(np.array([60, 60, 60, 60, 50]), capacity=100)
    assert len(layout(loose)) == 5
    tight = layout(fill_row_gaps(loose, capacity=100, template_size=0, max_documents_per_row=None))
    assert tight == [[(0, 60), (240, 34)], [(60, 60), (274, 16)], [(120, 60)], [(180, 60)]]
    lengths = np.random.default_rng(0).integers(260, 500, size=3000)
    loose = pack_documents(lengths, 512, template_size=2)
    tight_packing = fill_row_gaps(loose, 512, 2, max_documents_per_row=None)
    assert (lengths.sum() + 2 * len(loose.piece_start)) / (loose.num_rows * 512) < 0.99
    assert (lengths.sum() + 2 * len(tight_packing.piece_start)) / (tight_packing.num_rows * 512) > 0.985
    read = np.sort(np.concatenate([np.arange(a, a + n) for row in layout(tight_packing) for a, n in row]))
    assert np.array_equal(read, np.arange(lengths.sum())), "every token is in exactly one row"
    cost = np.add.reduceat(tight_packing.piece_length + 2, tight_packing.row_first[:-1])
    assert cost.max() <= 512
    assert tight_packing.piece_length.min() >= 16


def test_at_most_so_many_documents_to_a_row_that_is_filled() -> None:
    lengths = np.random.default_rng(0).integers(200, 700, size=1000)
    tight = fill_row_gaps(pack_documents(lengths, 512, 2, max_documents_per_row=2), 512, 2, max_documents_per_row=2)
    assert np.diff(tight.row_first).max() <= 2
    assert tight.piece_length.sum() == lengths.sum()


def test_pieces_of_whole_sentences() -> None:
    # Documents of 12, 3 and 25 tokens; sentences end at 4, 9, 12 | 15 | 20, 40. The last one is too long for a row.
    bounds, offsets = np.array([0, 4, 9, 12, 15, 20, 40]), np.array([0, 12, 15, 40])
    start, length = split_at_sentences(bounds, offsets, max_piece_length=9)
    assert list(zip(start.tolist(), length.tolist(), strict=True)) == [
        (0, 9), (9, 3), (12, 3), (15, 5), (20, 9), (29, 9), (38, 2),
    ]  # fmt: skip


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 1000, 4096, 4097])
def test_permute_is_a_permutation(n: int) -> None:
    for seed in range(3):
        assert np.array_equal(np.sort(permute_indices(np.arange(n), n, seed)), np.arange(n))


def test_permute_depends_on_the_seed_and_on_nothing_else() -> None:
    places = np.arange(1000)
    whole = permute_indices(places, 1000, 5)
    assert np.array_equal(permute_indices(places, 1000, 5), whole)
    assert not np.array_equal(permute_indices(places, 1000, 6), whole)
    assert [int(permute_indices(np.array([i]), 1000, 5)[0]) for i in (999, 0, 17)] == whole[[999, 0, 17]].tolist()
    both = permute_indices(np.array([[3, 4], [3, 4]]), 1000, np.array([[5], [6]]))
    assert both.tolist() == [whole[3:5].tolist(), permute_indices(places, 1000, 6)[3:5].tolist()]


@pytest.mark.parametrize("n", [3, 7, 20])
def test_permute_is_uniform(n: int) -> None:
    """Over many seeds, each place goes everywhere equally often, and so do pairs of neighbours."""
    seeds = np.arange(20_000)
    first, second = permute_indices(np.zeros_like(seeds), n, seeds), permute_indices(np.ones_like(seeds), n, seeds)
    assert np.abs(np.bincount(first, minlength=n) / len(seeds) * n - 1).max() < 0.15
    pairs = np.bincount((second - first) % n, minlength=n)
    assert pairs[0] == 0
    assert np.abs(pairs[1:] / len(seeds) * (n - 1) - 1).max() < 0.15


def test_permute_leaves_no_pattern() -> None:
    where = permute_indices(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(where, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(where[1:], where[:-1])[0, 1]) < 0.02
    assert (where == np.arange(100_000)).sum() < 10


def test_mix() -> None:
    assert hash_uint64(0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 from state 0
    assert len({int(hash_uint64(a, b)) for a in range(-20, 20) for b in range(40)}) == 1600
    assert hash_uint64(3, np.arange(5))[4] == hash_uint64(3, 4)
    assert hash_uint64(-1) == hash_uint64(2**64 - 1)


# --- rows ---------------------------------------------------------------------------------------------------------


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
    assert rows[7:] == (None,) * 6, "what was not asked for is not there"
    assert source.fill_ratio == pytest.approx(25 / 27)


def test_a_frame_at_the_end_only(tmp_path: Path) -> None:
    source = PackedDataset(FakeShards(tmp_path, [3, 2]), 5, SequenceTemplate((), (SEP,)), PAD, seed=0, shuffle=False)
    assert source.get_rows(np.arange(2)).input_ids.tolist() == [[100, 101, 102, SEP, PAD], [103, 104, SEP, PAD, PAD]]


def test_a_frame_at_the_edges_of_documents_only(tmp_path: Path) -> None:
    frame = SequenceTemplate((CLS,), (SEP,), document_edges_only=True)
    source = PackedDataset(FakeShards(tmp_path, [11]), 6, frame, PAD, seed=0, shuffle=False)
    assert source.get_rows(np.arange(3)).input_ids.tolist() == [
        [CLS, 100, 101, 102, 103, PAD],
        [104, 105, 106, 107, PAD, PAD],
        [108, 109, 110, SEP, PAD, PAD],
    ]
    assert source.fill_ratio == pytest.approx(13 / 18)


@pytest.mark.parametrize(
    "frame", [SequenceTemplate(), BERT, SequenceTemplate((CLS,), (SEP,), document_edges_only=True)]
)
def test_every_token_is_read_once_an_epoch(shards: FakeShards, frame: SequenceTemplate) -> None:
    source = PackedDataset(shards, 32, frame, PAD, seed=3)
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
        [F, T, F, T, F, F, T, F],  # 114 goes on with a word, but begins a piece
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
    "frame", [SequenceTemplate(), BERT, SequenceTemplate((CLS,), (SEP,), document_edges_only=True)]
)
def test_bits_are_those_of_the_shards(make_shards: Make, frame: SequenceTemplate) -> None:
    random = np.random.default_rng(0)
    documents = [random.integers(1, 15, size=random.integers(1, 9)).tolist() for _ in range(100)]
    size = sum(map(sum, documents))
    marked = {name: np.flatnonzero(random.random(size) < 0.3) for name in ("words", "salient")}
    shards = make_shards(documents, **marked)
    source = PackedDataset(shards, 32, frame, PAD, seed=3, token_bits=EVERY_BIT)
    rows = source.get_rows(np.arange(source.num_rows))
    places = rows.input_ids - 100
    new = np.diff(rows.document_ids, axis=1, prepend=-2) != 0
    first = rows.maskable & (new | ~np.roll(rows.maskable, 1, axis=1))
    last = rows.maskable & np.roll(~rows.maskable | new, -1, axis=1)
    last[:, -1] = rows.maskable[:, -1]
    is_word, is_salient = (np.isin(np.arange(size), marked[name]) for name in ("words", "salient"))
    is_end = shards.sentence_ends(0, size)
    for found, expected, forced in (
        (rows.word_start, is_word, first),
        (rows.sentence_end, is_end, last),
        (rows.salient, is_salient, np.zeros_like(first)),
    ):
        assert found is not None
        assert np.array_equal(found, rows.maskable & (expected[np.where(rows.maskable, places, 0)] | forced))


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


def test_rows_without_room_for_text(shards: FakeShards) -> None:
    with pytest.raises(UserError, match="no room for text"):
        PackedDataset(shards, 2, BERT, PAD, seed=0)
