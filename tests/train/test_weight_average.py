"""Averages of the weights, by hand and against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from firth.core.errors import UserError
from firth.train.recipe import TrainingConfig
from firth.train.weight_average import TailAverage, WeightEMA, ema_decay_at, first_averaged_step

TEN = TrainingConfig(max_steps=10)


def move(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p))


def test_warm_up_forgets_the_initial_weights() -> None:
    assert [ema_decay_at(step, 0.5) for step in range(10)] == pytest.approx(
        [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5]
    )


def test_ema_matches_torch_averaged_model() -> None:
    linear = nn.Linear(3, 2)
    ours = WeightEMA({name: p.detach() for name, p in linear.named_parameters()}, 0.6)
    step = 0
    theirs = AveragedModel(linear, avg_fn=lambda mean, new, _: mean + (1 - ema_decay_at(step, 0.6)) * (new - mean))
    theirs.update_parameters(linear)  # the first one is taken as it is
    for step in range(12):
        move(linear)
        ours.update(step, TEN)
        theirs.update_parameters(linear)
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(ours.averages[name], p)


@pytest.mark.parametrize(("share", "steps", "first"), [(0.3, 10, 7), (0.25, 10, 8), (1e-9, 10, 9), (0.999, 10, 1)])
def test_the_tail_is_a_share_of_the_run(share: float, steps: int, first: int) -> None:
    assert first_averaged_step(TrainingConfig(max_steps=steps, tail_average=share)) == first


def test_tail_average_matches_torch_stochastic_weight_averaging() -> None:
    linear, training = nn.Linear(3, 2), TrainingConfig(max_steps=10, tail_average=0.4)
    ours = TailAverage({name: p.detach() for name, p in linear.named_parameters()})
    theirs = AveragedModel(linear, avg_fn=get_swa_avg_fn())
    for step in range(10):
        move(linear)
        ours.update(step, training)
        if step >= 6:
            theirs.update_parameters(linear)
    assert ours.count == 4
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(ours.averages[name], p)


def test_a_longer_plan_starts_the_tail_anew() -> None:
    weight = torch.zeros(1)
    average = TailAverage({"weight": weight})
    for step in range(20):
        weight.fill_(step + 1)
        average.update(step, TrainingConfig(max_steps=10 if step < 8 else 20, tail_average=0.3))
    assert (average.count, average.averages["weight"].item()) == (6, pytest.approx((15 + 20) / 2))


def test_weights_are_swapped_and_restored() -> None:
    weight = torch.tensor([1.0, 2.0])
    average = TailAverage({"weight": weight})
    late = TrainingConfig(max_steps=2, tail_average=0.5)
    weight.copy_(torch.tensor([3.0, 4.0]))
    average.update(0, late)
    with average.average_parameters():
        assert weight.tolist() == [3, 4], "the tail has not begun: the weights themselves"
    average.update(1, late)
    weight.copy_(torch.tensor([5.0, 6.0]))
    with average.average_parameters():
        assert weight.tolist() == [3, 4]
    assert weight.tolist() == [5, 6]
    average.apply()
    assert weight.tolist() == [3, 4]


def test_a_skipped_step_does_not_update_an_ema() -> None:
    """The skip flag stays on the device: a `meta` tensor cannot be read, so this shows that nothing synchronizes."""
    weight = torch.tensor([1.0, 2.0])
    average = WeightEMA({"weight": weight}, 0.9)
    weight.copy_(torch.tensor([5.0, 6.0]))
    average.update(3, TEN, torch.tensor(1.0))
    assert average.averages["weight"].tolist() == [1, 2]
    average.update(3, TEN, torch.tensor(0.0))
    assert average.averages["weight"].tolist() == pytest.approx([1 + 4 * 9 / 13, 2 + 4 * 9 / 13])
    unread = WeightEMA({"weight": torch.empty(3, device="meta")}, 0.9)
    unread.update(0, TEN, torch.empty((), device="meta"))


def test_two_averages_are_refused() -> None:
    with pytest.raises(UserError, match="leave one out"):
        TrainingConfig(ema_decay=0.9, tail_average=0.2).check()
