"""GELU by fewer operations, against that of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from firth.models.activation import ACTIVATIONS, Gelu


@pytest.mark.parametrize("tanh", [False, True])
def test_values_and_gradients(tanh: bool) -> None:
    """As near to the truth as PyTorch's own in float32."""
    exact = torch.linspace(-12, 12, 20001, dtype=torch.float64, requires_grad=True)
    single = exact.detach().float().requires_grad_()
    wanted, found = F.gelu(exact, approximate="tanh" if tanh else "none"), Gelu.apply(single, tanh)
    wanted.sum().backward()
    found.sum().backward()
    assert exact.grad is not None
    assert single.grad is not None
    assert (found - wanted).abs().max() < 1e-6
    assert (single.grad - exact.grad).abs().max() < 3e-6


@pytest.mark.parametrize("tanh", [False, True])
def test_in_bfloat16(tanh: bool) -> None:
    """Rounded once, at the end: within one step of the nearest number."""
    x = torch.linspace(-5, 5, 2001).bfloat16()
    wanted = F.gelu(x.double(), approximate="tanh" if tanh else "none")
    assert ((Gelu.apply(x, tanh) - wanted).abs() <= 2**-8 * wanted.abs() + 1e-6).all()


def test_far_away() -> None:
    x = torch.tensor([-float("inf"), -1e30, -100.0, 100.0, 1e30])
    assert Gelu.apply(x[1:], False).tolist() == [0.0, 0.0, 100.0, x[-1].item()]


def test_a_cpu_takes_pytorchs() -> None:
    x = torch.randn(100)
    assert torch.equal(ACTIVATIONS["gelu"](x), F.gelu(x))
    assert torch.equal(ACTIVATIONS["gelu-tanh"](x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tanh", [False, True])
def test_a_program_learns_in_every_precision(tanh: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-5, 5, 201).to(dtype)
    program = torch.compile(lambda x: Gelu.apply(x, tanh), backend="aot_eager", fullgraph=True)
    one, other = x.clone().requires_grad_(), x.float().requires_grad_()
    program(one).sum().backward()
    F.gelu(other, approximate="tanh" if tanh else "none").sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert_close(one.grad.float(), other.grad, atol=3e-6 if dtype == torch.float32 else 5e-3, rtol=0)
