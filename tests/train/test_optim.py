"""The rate by hand, and who is decayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from firth.train import Training
from firth.train.optim import make_optimizer, rate


def rates(**fields: object) -> list[float]:
    training = Training(learning_rate=1.0, max_steps=10, **fields)  # type: ignore[arg-type]
    return [rate(step, training) for step in range(10)]


def test_linear() -> None:
    # four steps up in fifths, then six steps down in sixths
    expected = [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert rates(warmup_steps=4) == pytest.approx(expected)


def test_cosine() -> None:
    found = rates(warmup_steps=0, lr_scheduler_type="cosine")
    assert found[0] == 1
    assert found[5] == pytest.approx(0.5)
    assert found == sorted(found, reverse=True)
    assert found[9] > 0


def test_constant_and_a_warm_up_that_never_ends() -> None:
    assert rates(warmup_steps=2, lr_scheduler_type="constant") == pytest.approx([1 / 3, 2 / 3] + [1] * 8)
    assert rates(warmup_steps=19) == pytest.approx([(i + 1) / 20 for i in range(10)])


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "linear": nn.Linear(3, 2), "norm": nn.LayerNorm(3)})
    optimizer = make_optimizer(model, Training(weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-7))
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 3), (2, 3)]
    assert others["weight_decay"] == 0.0
    assert [tuple(p.shape) for p in others["params"]] == [(2,), (3,), (3,)]
    assert (decayed["betas"], decayed["eps"]) == ((0.8, 0.9), 1e-7)
    assert isinstance(optimizer, torch.optim.AdamW)
