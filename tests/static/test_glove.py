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


def test_cooccurrences_count_one_over_distance() -> None:
    words, doc = np.array([3, 1, 3, 2], np.int32), np.array([0, 0, 0, 1], np.int32)
    assert found_in(words, doc, 5, 4) == {(1, 3): 2.0, (3, 3): 0.5}


@pytest.mark.parametrize("max_records", [40, 10**6])
def test_counts_do_not_depend_on_the_memory_limit(tmp_path: Path, max_records: int) -> None:
    draw = np.random.default_rng(0)
    pieces = [(draw.integers(0, 50, 30).astype(np.uint64), np.ones(30, np.float32)) for _ in range(20)]
    right = Counter(int(k) for key, _ in pieces for k in key)
    records = glove.open_records(glove.count_records(iter(pieces), tmp_path, "pairs", max_records))
    assert dict(zip(records["key"].tolist(), records["value"].tolist(), strict=True)) == right
    assert (np.diff(records["key"].astype(np.int64)) > 0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["pairs.bin"]


@pytest.mark.parametrize(("eta", "largest"), [(0.05, 0.1), (0.5, 60.0)])
def test_the_loss_and_the_steps_are_those_of_the_published_program(eta: float, largest: float) -> None:
    """f(x) (w . c + b + b' - log x)^2 / 2; both directions; a word meets itself once, as often twice.

    AdaGrad of the published glove.c: vectors have rate eta, and their squares sum (eta gradient)^2; biases have rate 1.
    Gradients are clipped to 100 in each element, which the large vectors of the second case reach.
    """
    state = glove.init_glove_state(3, 4, seed=1)
    for name in ("words", "contexts"):
        state[name] *= largest * 8
    first, second, value = np.array([0, 2]), np.array([1, 2]), np.array([30.0, 120.0], np.float32)
    t = {name: torch.tensor(a, dtype=torch.float64) for name, a in state.items()}
    rates, total = {"words": eta, "contexts": eta, "word_bias": 1.0, "context_bias": 1.0}, 0.0
    for i, j, x in ((0, 1, 30.0), (1, 0, 30.0), (2, 2, 240.0)):
        leaves = {name: t[name].clone().requires_grad_() for name in rates}
        inner = leaves["words"][i] @ leaves["contexts"][j] + leaves["word_bias"][i] + leaves["context_bias"][j]
        loss = 0.5 * min((x / 100) ** 0.75, 1) * (inner - np.log(x)) ** 2
        loss.backward()
        for name, leaf in leaves.items():
            step = rates[name] * leaf.grad.clamp(-100, 100)
            t[name] = t[name] - step / t[f"{name}/squares"].sqrt()
            t[f"{name}/squares"] = t[f"{name}/squares"] + step**2
        total += loss.item()
    how = (np.float32(eta), np.float32(100), np.float32(0.75))
    found = glove.train_glove(first, second, value, *state.values(), *how)
    assert found == (pytest.approx(total, rel=1e-5), 3)
    for name, array in state.items():
        np.testing.assert_allclose(array, t[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("eta", [0.5, 50.0])
def test_a_run_that_diverges_stays_finite(eta: float) -> None:
    draw = np.random.default_rng(0)
    first, second = np.triu_indices(60)
    value = np.exp(draw.normal(4, 3, len(first))).astype(np.float32)
    state = glove.init_glove_state(60, 50, seed=0)
    how = (np.float32(eta), np.float32(100), np.float32(0.75))
    for _ in range(5):
        total, num = glove.train_glove(first, second, value, *state.values(), *how)
        assert np.isfinite(total)
        assert all(np.isfinite(array).all() for array in state.values())
    assert total / num > 3 * glove.untrained_loss(value, 100, 0.75)


def test_the_loss_of_vectors_that_are_zero() -> None:
    """A count of x_max has weight 1, a count of 1 has the logarithm 0."""
    assert glove.untrained_loss(np.array([100, 1], np.float32), 100, 0.75) == pytest.approx(np.log(100) ** 2 / 4)


def test_state_arrays_are_in_the_order_of_the_arguments() -> None:
    names = ["words", "contexts", "word_bias", "context_bias"]
    assert list(glove.init_glove_state(2, 3, 0)) == [*names, *(f"{name}/squares" for name in names)]
