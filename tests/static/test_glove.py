from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from firth.static import glove


def found_in(words: np.ndarray, doc: np.ndarray, window: int, num: int) -> dict[tuple[int, int], float]:
    key, value = np.empty(len(words) * window, np.uint64), np.empty(len(words) * window, np.float32)
    n = glove.emit_cooccurrences(words, doc, window, num, key, value)
    records = glove.sum_by_key(key[:n], value[:n])
    first, second = glove.decode_keys(records["key"], num)
    return dict(zip(zip(first.tolist(), second.tolist(), strict=True), records["value"].tolist(), strict=True))


def test_words_that_meet_count_one_over_their_distance() -> None:
    words, doc = np.array([3, 1, 3, 2], np.int32), np.array([0, 0, 0, 1], np.int32)
    assert found_in(words, doc, 5, 4) == {(1, 3): 2.0, (3, 3): 0.5}


@pytest.mark.parametrize("max_records", [40, 10**6])
def test_counting_gives_the_same_in_any_memory(tmp_path: Path, max_records: int) -> None:
    draw = np.random.default_rng(0)
    pieces = [(draw.integers(0, 50, 30).astype(np.uint64), np.ones(30, np.float32)) for _ in range(20)]
    right = Counter(int(k) for key, _ in pieces for k in key)
    records = glove.open_records(glove.count_records(iter(pieces), tmp_path, "pairs", max_records))
    assert dict(zip(records["key"].tolist(), records["value"].tolist(), strict=True)) == right
    assert (np.diff(records["key"].astype(np.int64)) > 0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.bin"]


def test_the_loss_and_the_steps_are_those_of_the_formula() -> None:
    """f(x) (w . c + b + b' - log x)^2 / 2 with AdaGrad, both ways round; a word meets itself once, as often twice."""
    state = glove.init_glove_state(3, 4, seed=1)
    first, second, value = np.array([0, 2]), np.array([1, 2]), np.array([30.0, 120.0], np.float32)
    t = {name: torch.tensor(a) for name, a in state.items()}
    total = 0.0
    for i, j, x in ((0, 1, 30.0), (1, 0, 30.0), (2, 2, 240.0)):
        names = ("words", "contexts", "word_bias", "context_bias")
        leaves = {name: t[name].clone().requires_grad_() for name in names}
        inner = leaves["words"][i] @ leaves["contexts"][j] + leaves["word_bias"][i] + leaves["context_bias"][j]
        loss = 0.5 * min((x / 100) ** 0.75, 1) * (inner - np.log(x)) ** 2
        loss.backward()
        for name, leaf in leaves.items():
            t[name] = t[name] - 0.05 * leaf.grad / t[f"{name}/squares"].sqrt()
            t[f"{name}/squares"] = t[f"{name}/squares"] + leaf.grad**2
        total += loss.item()
    how = (np.float32(0.05), np.float32(100), np.float32(0.75))
    found = glove.train_glove(first, second, value, *state.values(), *how)
    assert found == (pytest.approx(total, rel=1e-5), 3)
    for name, array in state.items():
        np.testing.assert_allclose(array, t[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_arrays_of_a_state_are_in_the_order_that_learning_takes_them() -> None:
    names = ["words", "contexts", "word_bias", "context_bias"]
    assert list(glove.init_glove_state(2, 3, 0)) == [*names, *(f"{name}/squares" for name in names)]
