"""Dropout by its law, and seeded like everything else."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from firth.models.dropout import Dropout, drop, noise


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_so_many_are_dropped_and_the_mean_stays(rate: float) -> None:
    """A million numbers: the share is right to five standard deviations, also within each of the four 16-bit words."""
    n = noise(torch.Size([1000, 1000]), rate)
    values = n.unique()
    assert_close(values, torch.tensor([0, 1 / (1 - rate)]), rtol=1e-5, atol=0)
    share = (n.view(-1, 4) == 0).float().mean(0)
    assert (share - rate).abs().max() < 5 * (rate * (1 - rate) / 250_000) ** 0.5


def test_neighbours_are_independent() -> None:
    """Both of two neighbours are dropped in a quarter of all cases, whichever of the four words they come from."""
    dropped = noise(torch.Size([1_000_000]), 0.5) == 0
    both = (dropped[:-4] & dropped[1:-3]).view(-1, 4).float().mean(0)
    assert (both - 0.25).abs().max() < 5 * (0.25 * 0.75 / 250_000) ** 0.5


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return noise(torch.Size([3, 7]), 0.5)  # 21 numbers, no whole number of 64-bit words

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def test_the_gradient_is_dropped_where_the_value_is() -> None:
    x = torch.ones(4, 50, requires_grad=True)
    y = drop(x, 0.3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert 0 < int((y == 0).sum()) < 200


def test_only_in_training_and_not_at_rate_0() -> None:
    x = torch.randn(50, 50)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert torch.equal(Dropout(0.0)(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)
