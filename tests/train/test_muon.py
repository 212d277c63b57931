"""Muon against torch's own, and against its definition by singular values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from firth.models import make_model
from firth.models.presets import bert, gpt2, llama, t5_v1_1
from firth.train import TrainingConfig
from firth.train.muon import NEWTON_SCHULZ_COEFFICIENTS, NEWTON_SCHULZ_STEPS, Muon, hidden_matrices, orthogonalize
from firth.train.optim import learning_rate_at, make_optimizer


def by_singular_values(x: torch.Tensor) -> torch.Tensor:
    """The Newton-Schulz iteration is a polynomial of the singular values alone."""
    u, s, v = torch.linalg.svd((x / x.norm()).double(), full_matrices=False)
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = a * s + b * s**3 + c * s**5
    return ((u * s) @ v).float()


def test_singular_values_are_close_to_1() -> None:
    x = torch.randn(3, 6, 10)
    found = orthogonalize(x)
    for mine, other in zip(found, x, strict=True):
        torch.testing.assert_close(mine, by_singular_values(other), rtol=1e-3, atol=1e-4)
        assert ((torch.linalg.svdvals(mine) > 0.5) & (torch.linalg.svdvals(mine) < 1.5)).all()
    assert orthogonalize(torch.zeros(1, 2, 3)).abs().max() == 0


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_matches_torch_muon(shape: tuple[int, int]) -> None:
    """Five steps; torch iterates in bfloat16, and so do we here."""
    start, grads = torch.randn(shape), torch.randn(5, *shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    group: dict[str, Any] = {"params": [ours], "weight_decay": 0.1, "muon": True}
    mine = Muon([group], {}, 0.9, dtype=torch.bfloat16, lr=0.02)
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for grad in grads:
        for p, optimizer in ((ours, mine), (theirs, other)):
            p.grad = grad.clone()
            optimizer.step()
    moved = (theirs - start).abs().max()
    assert moved > 0.02
    assert (ours - theirs).abs().max() < 0.02 * moved


def test_query_key_and_value_are_orthogonalised_separately() -> None:
    whole = nn.Parameter(torch.randn(12, 6))
    parts = [nn.Parameter(p.detach().clone()) for p in whole.split((6, 3, 3))]
    grad = torch.randn(12, 6)
    together = Muon([{"params": [whole], "weight_decay": 0.0, "muon": True}], {whole: (6, 3, 3)}, 0.95, lr=0.1)
    apart = Muon([{"params": parts, "weight_decay": 0.0, "muon": True}], {}, 0.95, lr=0.1)
    whole.grad = grad
    for p, g in zip(parts, grad.split((6, 3, 3)), strict=True):
        p.grad = g.clone()
    together.step()
    apart.step()
    torch.testing.assert_close(whole, torch.cat(parts))  # type: ignore[arg-type]


def test_which_parameters_use_muon() -> None:
    model = make_model(llama(2, 16, 4, 32, 40, num_kv_heads=2))
    names = dict(model.named_parameters())
    found = hidden_matrices(model)
    assert found[names["stack.blocks.1.attention.qkv.weight"]] == (16, 8, 8)
    assert found[names["stack.blocks.0.mlp.up.weight"]] == (32, 32)
    assert found[names["stack.blocks.0.mlp.down.weight"]] == (16,)
    assert {p for name, p in names.items() if ".blocks." in name and p.ndim == 2} == found.keys()
    for config in (bert(1, 16, 2, 40), gpt2(1, 16, 2, 40), t5_v1_1(1, 16, 2, 32, 40)):
        model = make_model(config)
        beside = {name for name, p in model.named_parameters() if p not in hidden_matrices(model)}
        assert {"embed.tokens.weight"} <= beside
        assert not any(name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight")) for name in beside)


def test_other_parameters_use_adamw_with_its_own_rate() -> None:
    torch.manual_seed(0)
    training = TrainingConfig(optim="muon", learning_rate=1e-3, muon_learning_rate=2e-2, max_steps=10, warmup_steps=0)
    model = make_model(gpt2(1, 16, 2, 40, dropout=0.0, attention_dropout=0.0))
    copied = make_model(gpt2(1, 16, 2, 40, dropout=0.0, attention_dropout=0.0))
    copied.load_state_dict(model.state_dict())
    mine = make_optimizer(model, training)
    other = make_optimizer(copied, TrainingConfig(learning_rate=1e-3, max_steps=10, warmup_steps=0))
    for p, q in zip(model.parameters(), copied.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    for optimizer in (mine, other):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(0, training) * group["scale"]
        optimizer.step()
    assert [group["lr"] for group in mine.param_groups if group["muon"]] == pytest.approx([2e-2])
    hidden, equal = hidden_matrices(model), []
    for (name, p), q in zip(model.named_parameters(), copied.parameters(), strict=True):
        equal.append((name, p in hidden, torch.equal(p, q)))
    assert all(same != muon for _, muon, same in equal), equal
    assert [set(mine.state[p]) for p in hidden] == [{"momentum_buffer"}] * len(hidden)
