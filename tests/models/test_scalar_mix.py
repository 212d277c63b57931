"""The scalar mix of layers."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from firth.models import ScalarMix


def test_initial_weights_are_equal() -> None:
    states = list(torch.randn(3, 2, 4, 8).unbind())
    assert_close(ScalarMix(3)(states), sum(states) / 3)


def test_weights_by_softmax_times_gamma() -> None:
    mix = ScalarMix(2)
    mix.weights.data, mix.gamma.data = torch.tensor([0.0, 1.0]), torch.tensor(3.0)
    a, b = torch.randn(2, 1, 2, 3).unbind()
    share = torch.tensor([0.0, 1.0]).softmax(0)
    assert_close(mix([a, b]), 3 * (share[0] * a + share[1] * b))


def test_layer_norm_before_mixing() -> None:
    a, b = torch.randn(1, 2, 8), 100 * torch.randn(1, 2, 8)
    mixed = ScalarMix(2, do_layer_norm=True)([a, b])
    assert_close(mixed, ScalarMix(2, do_layer_norm=True)([a, b / 100]), atol=1e-3, rtol=1e-3)
