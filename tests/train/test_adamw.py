"""Fused AdamW that reads a bf16 replica's gradients, against torch: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.kernels.test_glu import DEVICE, INTERPRETED, on_a_gpu
from models.test_presets import some_batch
from torch import Tensor, nn
from torch.testing import assert_close

from firth.models import PRESETS, make_model
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun
from firth.train import adamw as module
from firth.train.adamw import AdamW, can_step_from_replica
from firth.train.bf16_replica import BF16Replica
from firth.train.optim import make_optimizer
from firth.train.recipe import EngineConfig
from firth.train.step import build_step_runner, train_step

SHAPES = [(1,), (7,), (64, 64), (5000,), (3, 4096), (130, 131)]
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "fused": True}


def groups(ps: list[nn.Parameter]) -> list[dict[str, Any]]:
    decayed, others = [p for p in ps if p.ndim > 1], [p for p in ps if p.ndim < 2]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]


def assert_same(ours: AdamW, mine: list[nn.Parameter], theirs: torch.optim.AdamW, other: list[nn.Parameter]) -> None:
    for p, q in zip(mine, other, strict=True):
        assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in ours.state[p].items():
            assert_close(value, theirs.state[q][name], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@on_a_gpu
def test_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clipped gradient, a skipped step, and a weight without a gradient."""
    monkeypatch.setattr(module, "is_fused_step_device", lambda device: True)
    mine, other = parameters(), parameters()
    ours, theirs = AdamW(groups(mine), **SETTINGS), torch.optim.AdamW(groups(other), **SETTINGS)
    replicas = [nn.Parameter(p.detach().bfloat16()) for p in mine]
    for step in range(5):
        share, bad = 0.5 if step % 2 else 1.0, step == 3
        used = range(len(mine) - (step == 2))
        for i in used:
            replicas[i].grad = torch.randn_like(replicas[i]) * (step + 1)
            other[i].grad = replicas[i].grad.float() * share
        pairs = {mine[i]: replicas[i] for i in used}
        assert can_step_from_replica(pairs)
        ours.found_inf = torch.tensor(float(bad), device=DEVICE)  # type: ignore[attr-defined]
        ours.use_replica_gradients(pairs, torch.tensor(share, device=DEVICE))
        ours.step()
        if not bad:
            theirs.step()
        theirs.zero_grad()
        assert all(replica.grad is None for replica in replicas)
        assert_same(ours, mine, theirs, other)
        for p, replica in zip(mine, replicas, strict=True):  # the interpreter does not round to the nearest
            assert_close(replica, p.bfloat16(), rtol=2**-7 if INTERPRETED else 0, atol=0)


@pytest.mark.gpu
@on_a_gpu
def test_loads_the_state_of_torch_adamw() -> None:
    """With gradients of its own, a step equals torch's from the same state."""
    mine, other = parameters(), parameters()
    ours, theirs = AdamW(groups(mine), **SETTINGS), torch.optim.AdamW(groups(other), **SETTINGS)
    replicas = [nn.Parameter(p.detach().bfloat16()) for p in mine]
    for step in range(4):
        for p, q, replica in zip(mine, other, replicas, strict=True):
            grad = torch.randn_like(q).bfloat16()
            q.grad = grad.float()
            replica.grad, p.grad = (grad, None) if step % 2 else (None, grad.float())
        if step % 2:
            ours.use_replica_gradients(dict(zip(mine, replicas, strict=True)), torch.ones((), device=DEVICE))
        ours.step()
        theirs.step()
        assert_same(ours, mine, theirs, other)


@pytest.mark.gpu
@on_a_gpu
def test_steps_of_a_bf16_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients read from the replica equal gradients copied to the master weights, up to rounding.

    The third step has two micro-batches; after the fourth, the master weights are changed from outside.
    """
    config = replace(PRESETS["bert-tiny"], vocab_size=40, dropout=0.0, attention_dropout=0.0)
    batch = Batch(*(None if a is None else a.numpy() for a in some_batch(config)))
    training = TrainingConfig(engine=EngineConfig(weights="bf16"), optim="adamw", max_grad_norm=0.5)
    compute, found, taken = ComputeConfig(torch.device(DEVICE), bf16=True, compile=False), [], list[bool]()
    take = AdamW.use_replica_gradients
    for stays in (False, True):
        monkeypatch.setattr(module, "is_fused_step_device", lambda device, stays=stays: stays)
        monkeypatch.setattr(AdamW, "use_replica_gradients", lambda *given: (taken.append(True), take(*given)))
        torch.manual_seed(1)
        model = make_model(config).to(compute.device)
        run = TrainingRun(training, compute, model, lambda step: [batch])
        runner, optimizer = build_step_runner(run), make_optimizer(model, training)
        assert isinstance(runner, BF16Replica)
        losses = []
        for step in range(5):
            losses.append(train_step(run, runner, optimizer, [batch] * (1 + (step == 2)), step, 1e-3).item())
            with torch.no_grad():
                if INTERPRETED:  # which does not round to the nearest
                    for replica, p in zip(runner.replica.parameters(), model.parameters(), strict=True):
                        replica.copy_(p)
                if step == 3:
                    next(model.parameters()).mul_(0.5)
        found.append((losses, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert len(taken) == 4
    (losses, weights), (others, other_weights) = found
    assert losses == pytest.approx(others, rel=1e-3)
    assert abs(losses[-1] - losses[1]) > 0.1
    assert (weights - other_weights).norm() < 1e-3 * weights.norm()


def test_replica_copies_only_changed_weights() -> None:
    """It skips the copy only if the optimizer has updated both and nothing else changed the master weights since."""
    model = make_model(replace(PRESETS["bert-tiny"], vocab_size=40))
    halved = BF16Replica(model, lambda losses: losses, ComputeConfig(torch.device("cpu"), bf16=False, compile=False))
    mine, exact = next(halved.replica.parameters()), next(model.parameters())
    for both, moved_since, has_them in ((True, False, True), (True, True, False), (False, False, False)):
        halved.begin_step()
        assert torch.equal(mine, exact.bfloat16())
        halved.end_step(both)
        with torch.no_grad():
            mine.zero_()
            if moved_since:
                exact.mul_(0.5)
        halved.begin_step()
        assert bool(mine.any()) is not has_them
        halved.end_step(False)


def test_unsupported_arguments_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.zeros(8, 8))
    replica = nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))
    replica.grad = torch.zeros_like(replica)
    assert not can_step_from_replica({p: replica}), "on a CPU"
    monkeypatch.setattr(module, "is_fused_step_device", lambda device: True)
    monkeypatch.setattr(module, "triton", object())
    assert can_step_from_replica({p: replica})
    assert not can_step_from_replica({})
    wrong: list[Tensor | None] = [None, torch.zeros(8, 16, dtype=torch.bfloat16)[:, ::2]]
    wrong.append(torch.zeros(65, dtype=torch.bfloat16)[1:].view(8, 8))
    for grad in wrong:
        replica.grad = grad
        assert not can_step_from_replica({p: replica})
