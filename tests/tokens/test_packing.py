"""Packing puts every token into exactly one row, best fit first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokens.fake_shards import FakeShards

from firth.tokens import packing as packing_module
from firth.tokens import shards as shards_module
from firth.tokens.dataset import PackedDataset
from firth.tokens.packing import RowPacking, fill_row_gaps, pack_documents, random_first_lengths, split_at_sentences
from firth.tokens.template import SequenceTemplate

PAD, CLS, SEP = 0, 1, 2
BERT = SequenceTemplate((CLS,), (SEP,))


def layout(packing: RowPacking) -> list[list[tuple[int, int]]]:
    """The (start, length) of the pieces of each row."""
    pieces = list(zip(packing.piece_start.tolist(), packing.piece_length.tolist(), strict=True))
    edges = packing.row_first.tolist()
    return [pieces[a:b] for a, b in pairwise(edges)]


def test_packing_by_hand() -> None:
    # Costs with one special token: 6, 4, 3, 8. Longest first: 8 alone; 6; 4 not beside 6; 3 beside 4, not 6.
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


def test_max_documents_per_row() -> None:
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
    """Free tokens of the rows after packing one piece at a time, by the definition."""
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


def test_packing_is_cached_beside_the_shards(shards: FakeShards, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
    (folder,) = shards.folder.iterdir()
    assert folder.name.startswith("rows-32-")
    monkeypatch.setattr(packing_module, "pack_documents", None)
    cached = PackedDataset(shards, 32, BERT, PAD, seed=1).packing
    for name in RowPacking._fields:
        assert np.array_equal(getattr(cached, name), getattr(fresh, name))
        assert getattr(cached, name).dtype == getattr(fresh, name).dtype


def test_each_packing_has_its_own_cache(shards: FakeShards) -> None:
    PackedDataset(shards, 32, BERT, PAD, seed=0)
    PackedDataset(shards, 32, SequenceTemplate((), (SEP,)), PAD, seed=0)
    PackedDataset(shards, 32, BERT, PAD, seed=0, max_documents_per_row=2)
    PackedDataset(shards, 64, BERT, PAD, seed=0)
    assert len(list(shards.folder.iterdir())) == 4


def test_a_damaged_packing_is_computed_again(shards: FakeShards) -> None:
    fresh = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
    (folder,) = shards.folder.iterdir()
    (folder / "piece_start.npy").write_bytes(b"")
    for _ in range(2):
        assert np.array_equal(PackedDataset(shards, 32, BERT, PAD, seed=0).packing.piece_start, fresh.piece_start)
    assert (folder / "piece_start.npy").stat().st_size > 0


def test_arrays_that_another_process_has_finished_meanwhile_stay(
    shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs on the same shards begin together: each packs the rows, and the others already read those of the first."""
    held: list[Any] = []  # open files, so that no new file gets their numbers

    def pack_after_another_process(*args: Any) -> RowPacking:
        monkeypatch.undo()
        PackedDataset(shards, 32, BERT, PAD, seed=0)
        held.extend(stack.enter_context(file.open("rb")) for file in sorted(shards.folder.glob("*/*")))
        return split_into_rows(*args)

    split_into_rows = packing_module.pack_documents
    monkeypatch.setattr(packing_module, "pack_documents", pack_after_another_process)
    with ExitStack() as stack:
        late = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
        stored = [file.stat().st_ino for file in sorted(shards.folder.glob("*/*"))]
        assert stored == [os.fstat(file.fileno()).st_ino for file in held]
    assert np.array_equal(late.piece_start, PackedDataset(shards, 32, BERT, PAD, seed=0).packing.piece_start)


def test_arrays_that_vanish_while_they_are_read_are_computed_again(
    shards: FakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = PackedDataset(shards, 32, BERT, PAD, seed=0).packing
    (folder,) = shards.folder.iterdir()
    load = np.load

    def load_too_late(file: Path, **options: Any) -> Any:
        monkeypatch.undo()
        shutil.rmtree(folder)
        return load(file, **options)

    monkeypatch.setattr(np, "load", load_too_late)
    assert np.array_equal(PackedDataset(shards, 32, BERT, PAD, seed=0).packing.piece_start, fresh.piece_start)
    assert folder.is_dir()


def test_what_a_killed_process_left_of_a_packing_is_removed(shards: FakeShards) -> None:
    PackedDataset(shards, 32, BERT, PAD, seed=0)
    (folder,) = shards.folder.iterdir()
    with subprocess.Popen([sys.executable, "-c", "0"]) as ended:
        pass
    shutil.rmtree(folder)
    for name in (f".{folder.name}.{ended.pid}.tmp", f"{folder.name}.{ended.pid}", f".{folder.name}.{os.getppid()}.tmp"):
        (shards.folder / name).mkdir()
    PackedDataset(shards, 32, BERT, PAD, seed=0)
    assert {p.name for p in shards.folder.iterdir()} == {folder.name, f".{folder.name}.{os.getppid()}.tmp"}


def test_shards_that_cannot_be_written_are_fine(
    shards: FakeShards, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shards_module, "save_arrays", refuse)
    source = PackedDataset(shards, 32, BERT, PAD, seed=0)
    assert source.get_rows(np.arange(3)).input_ids.shape == (3, 32)
    assert list(shards.folder.iterdir()) == []
    assert "Permission denied" in capsys.readouterr().err


def test_emptiest_rows_are_dissolved_to_fill_the_others() -> None:
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


def test_filled_rows_respect_max_documents_per_row() -> None:
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


# --- several packings


def test_another_packing_moves_the_cuts_of_long_documents_alone() -> None:
    lengths = np.array([100, 20, 300, 31])
    plain, moved = (pack_documents(lengths, 34, template_size=2, number=n) for n in (0, 1))

    def cuts(packing: RowPacking) -> set[int]:
        return set(packing.piece_start.tolist())

    edges = {0, 100, 120, 420}
    assert cuts(plain) & cuts(moved) == edges, "documents start where they did, and nothing else does"
    assert {100, 420} == {s for s, n in zip(moved.piece_start, moved.piece_length, strict=True) if n in (20, 31)}
    assert moved.piece_length.sum() == lengths.sum()
    assert moved.piece_length.max() <= 32


def test_another_packing_gives_pieces_of_equal_length_other_neighbours() -> None:
    lengths = np.full(40, 10)
    rows = [
        {frozenset(start for start, _ in row) for row in layout(pack_documents(lengths, 32, number=n))}
        for n in (0, 1, 2)
    ]
    assert all(len(pieces) == 14 for pieces in rows)
    assert len(rows[0] & rows[1]) + len(rows[1] & rows[2]) < 4


def test_first_pieces_have_every_length() -> None:
    first = random_first_lengths(100_000, 126, number=7)
    assert first is not None
    counts = np.bincount(first, minlength=127)
    assert counts[:16].sum() == 0
    assert counts[16:] == pytest.approx(100_000 / 111, rel=0.15)
    assert random_first_lengths(3, 5, number=1).tolist() == [5, 5, 5]  # type: ignore[union-attr]
    assert random_first_lengths(3, 5, number=0) is None


def test_another_packing_of_sentences_by_hand() -> None:
    """Sentences of 3, 3, 3, 4 tokens, rows of 8: the first piece takes at most 5 tokens, but one sentence at least."""
    bounds, offsets = np.array([0, 3, 6, 9, 13, 15]), np.array([0, 13, 15])
    assert [x.tolist() for x in split_at_sentences(bounds, offsets, 8)] == [[0, 6, 13], [6, 7, 2]]
    for first, starts in ((5, [0, 3, 9, 13]), (6, [0, 6, 13]), (1, [0, 3, 9, 13])):
        found = split_at_sentences(bounds, offsets, 8, np.array([first, first]))
        assert found[0].tolist() == starts
        assert found[1].tolist() == np.diff([*starts, 15]).tolist()
