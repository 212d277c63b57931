"""Fused gated activations against eager operations: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models.kernels import glu as module
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.glu import KERNEL_ACTIVATIONS, GatedActivation, gated_activation
from firth.models.kernels.tiling import triton

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
on_a_gpu = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device")


def plain(x: Tensor, activation: str) -> Tensor:
    gate, h = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * h


def answers(function: object, x: Tensor, *rest: object) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y: Tensor = function(x, *rest)  # type: ignore[operator]
    (y.float() * torch.linspace(-1, 1, y.shape[-1], device=y.device)).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def numbers(n: int) -> Tensor:
    torch.manual_seed(0)
    x = 3 * torch.randn(3, 5, 2 * n)
    x[0, 0, :4] = torch.tensor([0.0, -30.0, 30.0, 1e-4])
    return x


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("n", [48, 1152])
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_kernel_values_and_gradients(activation: str, n: int) -> None:
    x = numbers(n).to(DEVICE)
    for found, wanted in zip(answers(GatedActivation.apply, x, activation), answers(plain, x, activation), strict=True):
        assert_close(found, wanted, atol=2e-5, rtol=2e-5)
    exact = answers(plain, x.bfloat16().float(), activation)
    for found, wanted in zip(answers(GatedActivation.apply, x.bfloat16(), activation), exact, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_compiled(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_use_fast_activation", lambda x: True)
    torch._dynamo.reset()
    x = numbers(64).to(DEVICE)
    program = torch.compile(gated_activation, backend="aot_eager" if INTERPRETED else "inductor", fullgraph=True)
    for found, wanted in zip(answers(program, x, activation), answers(plain, x, activation), strict=True):
        assert_close(found, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("activation", ["relu", *KERNEL_ACTIVATIONS])
def test_cpu_uses_eager_operations(activation: str) -> None:
    x = numbers(8)
    for found, wanted in zip(answers(gated_activation, x, activation), answers(plain, x, activation), strict=True):
        assert torch.equal(found, wanted)
