"""Adafactor against `transformers`, with T5's settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Theirs

from firth.models import make_model
from firth.models.presets import t5
from firth.train import TrainingConfig
from firth.train.adafactor import Adafactor
from firth.train.optim import make_optimizer


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(7,), (5, 9), (9, 5), (3, 4, 5)])
def test_matches_transformers(shape: tuple[int, ...], weight_decay: float) -> None:
    """Six steps with gradients of very different sizes, some clipped; one weight starts at 0."""
    start = torch.randn(shape) * 0.1 if len(shape) > 1 else torch.zeros(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    mine = Adafactor([{"params": [ours], "weight_decay": weight_decay}], {})
    settings = {"scale_parameter": True, "relative_step": False, "warmup_init": False}
    other = Theirs([theirs], lr=0.01, weight_decay=weight_decay, clip_threshold=1.0, **settings)
    for step in range(6):
        grad = torch.randn(shape) * 10.0 ** (step % 3 - 2)
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.grad = grad.clone()
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert not torch.equal(ours, start)


def test_query_key_and_value_are_scaled_separately() -> None:
    start = torch.cat([torch.randn(4, 6), 0.01 * torch.randn(2, 6), 3 * torch.randn(2, 6)])
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(p.clone()) for p in start.split((4, 2, 2))]
    together = Adafactor([{"params": [whole], "lr": 0.1}], {whole: (4, 2, 2)})
    apart = Adafactor([{"params": parts, "lr": 0.1}], {})
    for _ in range(3):
        whole.grad = torch.randn(8, 6)
        for p, g in zip(parts, whole.grad.split((4, 2, 2)), strict=True):
            p.grad = g.clone()
        together.step()
        apart.step()
    torch.testing.assert_close(whole, torch.cat(parts))  # type: ignore[arg-type]


def test_second_moments_are_factored() -> None:
    model = make_model(t5(1, 32, 2, 64, 100))
    optimizer = make_optimizer(model, TrainingConfig(optim="adafactor"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    kept = sum(value.numel() for state in optimizer.state.values() for value in state.values())
    assert kept < 0.15 * model.num_parameters
