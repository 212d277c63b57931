"""On a GPU: chunked cross-entropy and the whole step against eager operations.

Run them with `pytest -m gpu`. Numbers of rows and tokens are not a multiple of any tile; some labels are ignored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from firth.models import make_model
from firth.models.kernels import cross_entropy
from firth.models.presets import bert, gpt2
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun
from firth.train.optim import make_optimizer
from firth.train.recipe import EngineConfig
from firth.train.step import build_step_runner, train_step
from firth.train.step_record import read_async

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
N, V, E = 300, 5003, 64


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(N, E), torch.randn(V, E) * 0.3, torch.randn(V)
    labels = torch.randint(0, V, (N,))
    labels[::7] = -100
    labels[1], labels[2] = 0, V - 1
    return x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE), labels.to(DEVICE)


def loss_and_gradients(loss: Any, *given: Tensor) -> list[Tensor]:
    given = tuple(t.clone().requires_grad_() for t in given)
    value = loss(*given)
    (value * 0.7).backward()
    return [value.detach(), *(t.grad for t in given if t.grad is not None)]


def plain(labels: Tensor) -> Any:
    return lambda x, w, b: F.cross_entropy(F.linear(x, w, b).float(), labels, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [128, 300])
def test_in_float32(rows: int, padded: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-4 of the largest value of each tensor."""
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda N, P: rows)
    x, weight, bias, labels = numbers()

    def pieces(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return cross_entropy.fused_cross_entropy(x, w, b, labels, padded)

    found = loss_and_gradients(torch.compile(pieces) if compiled else pieces, x, weight, bias)
    for mine, other in zip(found, loss_and_gradients(plain(labels), x, weight, bias), strict=True):
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("padded", [False, True])
def test_in_bfloat16(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error against float32 at most twice that of eager bf16, plus 1% of the largest value."""
    monkeypatch.setattr(cross_entropy, "loss_chunk_rows", lambda N, P: 128)
    x, weight, bias, labels = numbers()

    def half(loss: Any) -> Any:
        def call(*given: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return loss(*given)

        return call

    truth = loss_and_gradients(plain(labels), x, weight, bias)
    usual = loss_and_gradients(half(plain(labels)), x, weight, bias)
    found = loss_and_gradients(
        half(lambda x, w, b: cross_entropy.fused_cross_entropy(x, w, b, labels, padded)), x, weight, bias
    )
    for mine, other, exact in zip(found, usual, truth, strict=True):
        assert mine.dtype == exact.dtype
        assert (mine - exact).abs().max() <= 2 * (other - exact).abs().max() + 0.01 * exact.abs().max()


def test_logits_are_never_materialized() -> None:
    x, weight = (torch.randn(n, 64, device=DEVICE, requires_grad=True) for n in (65536, 50000))
    labels = torch.randint(0, 50000, (65536,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast(DEVICE, torch.bfloat16):
        cross_entropy.fused_cross_entropy(x, weight, None, labels, pad_vocab=True).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.4 * 2 * 65536 * 50048, "bytes of all scores"


# --- the whole step


WAYS = {
    "compiled": {},
    "graphs": {"engine": EngineConfig(cuda_graphs=True)},
    "pieces": {"engine": EngineConfig(fused_loss=True, cuda_graphs=True)},
    "padding": {"engine": EngineConfig(pad_vocabulary=True, fused_loss=False)},
    "no padding": {"engine": EngineConfig(pad_vocabulary=False, fused_loss=False)},
    "bf16 weights": {"engine": EngineConfig(weights="bf16", cuda_graphs=True)},
    "parts": {"engine": EngineConfig(compile_regions=True)},
    "parts, graphs": {"engine": EngineConfig(compile_regions=True, cuda_graphs=True)},
    "parts, bf16 weights": {"engine": EngineConfig(compile_regions=True, weights="bf16")},
    "muon": {"optim": "muon", "engine": EngineConfig(cuda_graphs=True)},
    "adafactor": {"optim": "adafactor", "engine": EngineConfig(cuda_graphs=True)},
}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("way", WAYS)
def test_five_steps_have_equal_losses(way: str, family: str) -> None:
    """In bfloat16, to 2%; optimizers are tested on the CPU."""
    torch.manual_seed(0)
    make = {"bert": bert, "gpt2": gpt2}[family]
    config = make(2, 128, 2, 1001, dropout=0.0, attention_dropout=0.0)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1001, size=(8, 64))
    positions = np.sort(rng.permuted(np.tile(np.arange(64), (8, 1)), axis=1)[:, :10], 1)
    labels = np.roll(tokens, -1, 1) if family == "gpt2" else np.take_along_axis(tokens, positions, 1)
    batch = Batch(tokens, target_positions=None if family == "gpt2" else positions, labels=labels)
    training = TrainingConfig(learning_rate=3e-3, **WAYS[way])  # type: ignore[arg-type]
    cpu = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
    graphs, parts = bool(training.engine.cuda_graphs), training.engine.compile_regions
    gpu = ComputeConfig(torch.device(DEVICE), bf16=True, compile=True, cuda_graphs=graphs, compile_regions=parts)
    found = []
    for compute, own in ((cpu, TrainingConfig(learning_rate=3e-3, optim=training.optim)), (gpu, training)):
        torch.manual_seed(1)
        model = make_model(config).to(compute.device)
        run = TrainingRun(own, compute, model, lambda step: [batch])
        runner, optimizer = build_step_runner(run), make_optimizer(model, own)
        late = [read_async(train_step(run, runner, optimizer, [batch], i, 3e-3)) for i in range(5)]
        found.append([read() for read in late])
    assert found[1] == pytest.approx(found[0], rel=0.02)
    assert found[1][-1] < found[1][0] - 0.1
