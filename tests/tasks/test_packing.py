"""Packing of examples into rows, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tasks.small import CPU, WORDS, model_for, parts

from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.packing import pack_texts, round_row_count
from firth.text import Example


def test_first_fit_decreasing() -> None:
    packing = pack_texts([5, 3, 8, 2, 6], 8)
    assert packing.num_rows == 3
    assert packing.padding_share == 0
    whose = packing.scatter(np.repeat([10, 11, 12, 13, 14], [5, 3, 8, 2, 6]), 0)
    assert sorted(map(sorted, whose.tolist())) == [[10] * 5 + [11] * 3, [12] * 8, [13] * 2 + [14] * 6]
    doc, position = packing.document_ids_and_positions()
    for n, size in enumerate([5, 3, 8, 2, 6]):
        row, first = packing.row_index[n], packing.start[n]
        assert whose[row, first : first + size].tolist() == [10 + n] * size
        assert doc[row, first : first + size].tolist() == [packing.document_index[n]] * size
        assert position[row, first : first + size].tolist() == list(range(size))


def test_the_rest_is_padding() -> None:
    packing = pack_texts([6, 5], 8)
    doc, position = packing.document_ids_and_positions()
    assert doc.tolist() == [[0] * 6 + [-1] * 2, [0] * 5 + [-1] * 3]
    assert position.tolist() == [[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert packing.padding_share == 5 / 16


def test_a_single_row_is_not_padded() -> None:
    assert pack_texts([10, 10], 512).width == 32
    assert pack_texts([3], 512).width == 16
    assert pack_texts([3], 8).width == 8
    assert pack_texts([300, 300], 512).width == 512


def test_groups_stay_in_one_row() -> None:
    packing = pack_texts([3, 2, 5, 5, 8, 8], 8, texts_per_group=2)
    assert packing.width == 16
    assert packing.row_index.tolist() == [1, 1, 1, 1, 0, 0]
    assert (np.diff(packing.document_index.reshape(-1, 2), axis=1) == 1).all()


def test_target_slots_follow_the_documents() -> None:
    packing = pack_texts([4, 3, 8], 8)  # the third has a row of its own, then come the first and the second
    width, slot = packing.allocate_slots(np.array([2, 1, 1]))
    assert width == 4  # three, rounded up
    assert slot.tolist() == [4, 5, 6, 0]
    width, slot = packing.allocate_slots(np.array([2, 2, 2]), slots_per_answer=2)
    assert (width, slot.tolist()) == (4, [4, 5, 6, 7, 0, 1])


def test_few_shapes_and_little_padding() -> None:
    rng = np.random.default_rng(0)
    shapes, padding = set(), []
    for _ in range(200):
        packing = pack_texts(rng.integers(5, 60, 256), 128)
        shapes.add(packing.num_rows)
        padding.append(packing.padding_share)
        assert np.bincount(packing.row_index, weights=packing.lengths).max() <= 128
    assert len(shapes) <= 4
    assert np.mean(padding) < 0.08
    assert all(rows <= round_row_count(rows) <= rows * 1.125 for rows in range(1, 2000))


def test_packing_is_reproducible() -> None:
    sizes = np.random.default_rng(1).integers(1, 64, 500)
    first, second = pack_texts(sizes, 64), pack_texts(sizes.copy(), 64)
    assert str(first) == str(second)


def test_a_batch_that_is_made_during_a_prediction_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread collates the next training batch while dev is scored: a resumed run makes it at another moment."""
    config, tokenizer = parts("bert")
    examples = [Example(i, (" ".join(WORDS[: 2 + i % 5]),), "ab"[i % 2]) for i in range(12)]
    task = make_task("classify", examples, tokenizer, config, FinetuneRecipe(max_seq_length=32))
    items, model = task.encode(examples), model_for(task, config)
    alone, logits, meanwhile = task.collate(items), model.logits, []

    def collate_meanwhile(batch: Any) -> Any:
        meanwhile.append(task.collate(items))
        return logits(batch)

    monkeypatch.setattr(model, "logits", collate_meanwhile)
    task.predict(model, items, CPU, 4)
    assert meanwhile
    assert all(np.array_equal(batch.input_ids, alone.input_ids) for batch in meanwhile)
