"""The exponential moving average of the weights, by hand and against torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from firth.train.ema import WeightEMA, ema_decay_at


def test_warm_up_forgets_the_initial_weights() -> None:
    assert [ema_decay_at(step, 0.5) for step in range(10)] == pytest.approx(
        [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5]
    )


def test_matches_torch_averaged_model() -> None:
    linear = nn.Linear(3, 2)
    ours = WeightEMA({name: p.detach() for name, p in linear.named_parameters()}, 0.6)
    step = 0
    theirs = AveragedModel(linear, avg_fn=lambda mean, new, _: mean + (1 - ema_decay_at(step, 0.6)) * (new - mean))
    theirs.update_parameters(linear)  # the first one is taken as it is
    for step in range(12):
        with torch.no_grad():
            for p in linear.parameters():
                p.add_(torch.randn_like(p))
        ours.update(step)
        theirs.update_parameters(linear)
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(ours.averages[name], p)


def test_weights_are_swapped_and_restored() -> None:
    weight = torch.tensor([1.0, 2.0])
    average = WeightEMA({"weight": weight}, 0.9)
    weight.copy_(torch.tensor([5.0, 6.0]))
    with average.average_parameters():
        assert weight.tolist() == [1, 2]
    assert weight.tolist() == [5, 6]
    average.apply()
    assert weight.tolist() == [1, 2]


def test_a_skipped_step_does_not_update_it() -> None:
    """The skip flag stays on the device: a `meta` tensor cannot be read, so this shows that nothing synchronizes."""
    weight = torch.tensor([1.0, 2.0])
    average = WeightEMA({"weight": weight}, 0.9)
    weight.copy_(torch.tensor([5.0, 6.0]))
    average.update(3, torch.tensor(1.0))
    assert average.averages["weight"].tolist() == [1, 2]
    average.update(3, torch.tensor(0.0))
    assert average.averages["weight"].tolist() == pytest.approx([1 + 4 * 9 / 13, 2 + 4 * 9 / 13])
    unread = WeightEMA({"weight": torch.empty(3, device="meta")}, 0.9)
    unread.update(0, torch.empty((), device="meta"))
