"""Fused bias and activation against eager operations: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models.kernels.test_glu import DEVICE, INTERPRETED, on_a_gpu
from torch import Tensor, nn
from torch.testing import assert_close
from train.test_regional_compile import FAMILIES, batch_for

from firth.models import get_preset, make_model
from firth.models.kernels import bias_act as module
from firth.models.kernels import glu
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.bias_act import BiasActivation, linear_activation
from firth.models.kernels.glu import KERNEL_ACTIVATIONS


def gradients(y: Tensor, *leaves: Tensor) -> list[Tensor]:
    """The output, and the gradients of the inputs."""
    return [y.detach(), *torch.autograd.grad((y.float() * weights(y)).sum(), leaves)]


def weights(y: Tensor) -> Tensor:
    return torch.linspace(-1, 2, y.numel(), device=y.device).view_as(y)


def numbers(rows: int, n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, bias = 3 * torch.randn(3, rows, n, device=DEVICE), torch.randn(n, device=DEVICE)
    x[0, 0, :4] = torch.tensor([0.0, -30.0, 30.0, 1e-4])
    return x, bias


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize(("rows", "n"), [(5, 48), (100, 264)])  # fewer and more than a tile has, both ways
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
@pytest.mark.parametrize("single", [False, True])
def test_kernel_values_and_gradients(single: bool, activation: str, rows: int, n: int) -> None:
    x, bias = (a.requires_grad_() for a in numbers(rows, n))
    wanted = gradients(ACTIVATIONS[activation](x + bias), x, bias)
    for a, b in zip(gradients(BiasActivation.apply(x, bias, activation, single), x, bias), wanted, strict=True):
        assert_close(a, b, atol=2e-4, rtol=2e-5)
    half = x.detach().bfloat16().requires_grad_()
    exact = half.detach().float().requires_grad_()
    wanted = gradients(ACTIVATIONS[activation](exact + bias), exact, bias)
    found = gradients(BiasActivation.apply(half, bias, activation, single), half, bias)
    assert [a.dtype for a in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for a, b in zip(found, wanted, strict=True):
        assert (a.float() - b).norm() < 2**-8 * b.norm()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_compiled(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_use_fast_activation", lambda x: True)
    torch._dynamo.reset()
    x, linear = numbers(5, 16)[0].requires_grad_(), nn.Linear(16, 64).to(DEVICE)
    program = torch.compile(linear_activation, backend="aot_eager" if INTERPRETED else "inductor", fullgraph=True)
    leaves = (x, linear.weight, linear.bias)
    wanted = gradients(ACTIVATIONS[activation](linear(x)), *leaves)
    for a, b in zip(gradients(program(linear, x, activation), *leaves), wanted, strict=True):
        assert_close(a, b, atol=2e-4, rtol=2e-5)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = gradients(program(linear, x, activation), *leaves)
    assert [a.dtype for a in found] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    for a, b in zip(found, wanted, strict=True):
        assert (a.float() - b).norm() < 0.02 * b.norm()


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_model_loss_and_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fused kernels, also those of gated activations."""
    config = replace(get_preset(f"{family}-tiny"), vocab_size=300, num_layers=2, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    model, batch = make_model(config).to(DEVICE), batch_for(config.architecture, 0).to(torch.device(DEVICE))

    def learned() -> list[Tensor]:
        loss = model.loss(batch)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    wanted, calls = learned(), 0

    def is_quick(x: Tensor) -> bool:
        nonlocal calls
        calls += 1
        return True

    for kind in (module, glu):
        monkeypatch.setattr(kind, "can_use_fast_activation", is_quick)
    found = learned()
    assert calls >= config.num_layers
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", *KERNEL_ACTIVATIONS])
def test_cpu_uses_eager_operations(activation: str, bias: bool) -> None:
    x, linear = torch.randn(3, 5, 8), nn.Linear(8, 16, bias=bias)
    assert torch.equal(linear_activation(linear, x, activation), ACTIVATIONS[activation](linear(x)))


def test_other_linear_modules_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_use_fast_activation", lambda x: True)
    x, odd = torch.randn(3, 8), nn.Sequential(nn.Linear(8, 16))
    assert torch.equal(linear_activation(odd, x, "gelu"), ACTIVATIONS["gelu"](odd(x)))
    without = nn.Linear(8, 16, bias=False)
    assert torch.equal(linear_activation(without, x, "gelu"), ACTIVATIONS["gelu"](without(x)))
