"""Batch and length ramps: stages by hand, and no row twice within an epoch."""

from __future__ import annotations

from typing import Any

import pytest

from firth.core.errors import UserError
from firth.models import get_preset
from firth.recipes import pretraining_recipe
from firth.train import Recipe
from firth.train.ramp import Stage, first_row_of_step, mean_batch_rows, ramp_stages, stage_at, stage_shares
from firth.train.recipe import EngineConfig


def recipe(**fields: Any) -> Recipe:
    small = dict(max_steps=100, max_seq_length=64, per_device_train_batch_size=16)
    return pretraining_recipe(get_preset("bert-tiny"), **small | fields)


def test_no_ramp_by_default() -> None:
    assert ramp_stages(recipe(gradient_accumulation_steps=3)) == [Stage(0, 64, 16, 3, 0)]
    assert mean_batch_rows(recipe(gradient_accumulation_steps=3)) == 48


def test_a_batch_ramp_with_two_doublings() -> None:
    found = ramp_stages(recipe(batch_ramp=0.4))
    assert found == [Stage(0, 64, 4, 1, 0), Stage(20, 64, 8, 1, 80), Stage(40, 64, 16, 1, 240)]
    assert mean_batch_rows(recipe(batch_ramp=0.4)) == pytest.approx(0.2 * 4 + 0.2 * 8 + 0.6 * 16)


def test_a_batch_ramp_adds_micro_batches_before_it_enlarges_them() -> None:
    found = ramp_stages(recipe(batch_ramp=0.3, batch_doublings=3, gradient_accumulation_steps=4))
    assert [(s.first_step, s.micro_batch_rows, s.num_micro_batches) for s in found] == [
        (0, 8, 1),
        (10, 16, 1),
        (20, 16, 2),
        (30, 16, 4),
    ]
    assert {s.micro_batch_rows for s in found[1:]} == {16}, "one shape"


def test_a_length_ramp_keeps_the_tokens_per_step() -> None:
    found = ramp_stages(recipe(length_ramp=0.5, length_doublings=1))
    assert found == [Stage(0, 32, 32, 1, 0), Stage(50, 64, 16, 1, 0)]
    assert mean_batch_rows(recipe(length_ramp=0.5, length_doublings=1)) == 16


@pytest.mark.parametrize("accumulation", [1, 3])
def test_each_row_is_read_once_and_in_order(accumulation: int) -> None:
    r = recipe(batch_ramp=0.37, length_ramp=0.61, gradient_accumulation_steps=accumulation)
    found = ramp_stages(r)
    following: dict[int, int] = {}
    sizes = []
    for step in range(r.max_steps):
        stage = stage_at(found, step)
        assert first_row_of_step(stage, step) == following.get(stage.seq_length, 0)
        following[stage.seq_length] = first_row_of_step(stage, step) + stage.step_rows
        sizes.append(stage.step_rows * stage.seq_length)
    assert sorted(following) == [16, 32, 64]
    assert sizes == sorted(sizes), "a step never reads less than the one before"
    assert sum(share for _, share in stage_shares(r)) == pytest.approx(1)
    assert mean_batch_rows(r) == pytest.approx(sum(sizes) / 64 / 100)


def test_an_unplanned_run_has_the_same_shares() -> None:
    planned, open_ = (stage_shares(recipe(max_steps=n, batch_ramp=0.4, length_ramp=0.2)) for n in (1000, 0))
    assert [share for _, share in planned] == pytest.approx([share for _, share in open_])
    assert [s[1:4] for s, _ in planned] == [s[1:4] for s, _ in open_]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_ramp": 1.5}, "batch_ramp is 1.5"),
        ({"length_ramp": -0.1}, "length_ramp is -0.1"),
        ({"length_ramp": 0.1, "length_doublings": 0}, "length_doublings is 0"),
        ({"batch_ramp": 0.1, "batch_doublings": 5}, "16 rows cannot be halved that often"),
        ({"length_ramp": 0.1, "length_doublings": 4}, "64 tokens cannot be halved that often"),
        ({"batch_ramp": 0.1, "order": "stream"}, "order=stream"),
        ({"optim": "adamw", "muon_learning_rate": 0.1}, "muon_learning_rate needs --optim muon"),
        ({"wsd_decay": 1.2}, "wsd_decay"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"muon_momentum": 1.0}, "muon_momentum"),
        ({"engine": EngineConfig(weights="bf16"), "teacher": "x"}, "weights=bf16"),
    ],
)
def test_invalid_ramps_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**fields).check()
