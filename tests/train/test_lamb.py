"""LAMB: Adam's direction, at the length of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from firth.train.lamb import Lamb


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_matrix_moves_as_by_adamw_but_by_its_own_norm(weight_decay: float) -> None:
    """Algorithm 2 of the paper, with torch's AdamW for the moments: its step at rate 1 is the update U."""
    ours, other = nn.Parameter(torch.randn(5, 9)), nn.Parameter(torch.zeros(5, 9))
    lamb = Lamb([{"params": [ours], "weight_decay": weight_decay}], {}, (0.9, 0.98), 1e-6)
    adam = torch.optim.AdamW([other], lr=1.0, betas=(0.9, 0.98), eps=1e-6, weight_decay=weight_decay)
    for step in range(5):
        before, rate = ours.detach().clone(), 0.01 / (step + 1)
        ours.grad = torch.randn(5, 9) * 10.0 ** (step % 3 - 2)
        other.data, other.grad = before.clone(), ours.grad.clone()
        lamb.param_groups[0]["lr"] = rate
        lamb.step()
        adam.step()
        update = before - other.detach()
        torch.testing.assert_close(ours.detach(), before - rate * before.norm() / update.norm() * update)


def test_vectors_and_zeros_move_as_by_adamw() -> None:
    """Biases have the trust ratio 1; so has a matrix of zeros, which else would never move."""
    for start in (torch.randn(7), torch.zeros(3, 4)):
        ours, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        lamb = Lamb([{"params": [ours], "lr": 0.01}], {}, (0.9, 0.999), 1e-8)
        adam = torch.optim.AdamW([other], lr=0.01, weight_decay=0.0)
        ours.grad = torch.randn_like(start)
        other.grad = ours.grad.clone()
        lamb.step()
        adam.step()
        torch.testing.assert_close(ours, other)


def test_query_key_and_value_have_trust_ratios_of_their_own() -> None:
    start = torch.cat([torch.randn(4, 6), 0.01 * torch.randn(2, 6), 3 * torch.randn(2, 6)])
    whole = nn.Parameter(start.clone())
    whole.grad = torch.randn(8, 6)
    Lamb([{"params": [whole], "lr": 0.1}], {whole: (4, 2, 2)}).step()
    for old, new in zip(start.split((4, 2, 2)), whole.detach().split((4, 2, 2)), strict=True):
        assert (new - old).norm() == pytest.approx(0.1 * old.norm().item(), rel=1e-5)
