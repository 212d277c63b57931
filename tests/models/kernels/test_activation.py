"""Activations with fewer operations, against PyTorch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from firth.models.kernels.activation import ACTIVATIONS, SIGMOID_POLYNOMIALS, SigmoidActivation


@pytest.mark.parametrize("name", SIGMOID_POLYNOMIALS)
def test_values_and_gradients(name: str) -> None:
    """About as close to float64 as float32 can be."""
    exact = torch.linspace(-12, 12, 20001, dtype=torch.float64, requires_grad=True)
    single = exact.detach().float().requires_grad_()
    wanted, found = ACTIVATIONS[name](exact), SigmoidActivation.apply(single, name)
    wanted.sum().backward()
    found.sum().backward()
    assert exact.grad is not None
    assert single.grad is not None
    assert (found - wanted).abs().max() < 2e-6
    assert (single.grad - exact.grad).abs().max() < 4e-6


@pytest.mark.parametrize("name", SIGMOID_POLYNOMIALS)
def test_in_bfloat16(name: str) -> None:
    """Rounded once, at the end: within one unit in the last place."""
    x = torch.linspace(-5, 5, 2001).bfloat16()
    wanted = ACTIVATIONS[name](x.double())
    assert ((SigmoidActivation.apply(x, name) - wanted).abs() <= 2**-8 * wanted.abs() + 2e-6).all()


@pytest.mark.parametrize("name", SIGMOID_POLYNOMIALS)
def test_large_inputs(name: str) -> None:
    x = torch.tensor([-1e30, -100.0, 100.0, 1e30], requires_grad=True)
    found = SigmoidActivation.apply(x, name)
    found.sum().backward()
    assert_close(found, torch.tensor([0.0, 0.0, 100.0, 1e30]))
    assert_close(x.grad, torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_cpu_uses_pytorch() -> None:
    x = torch.randn(100)
    assert torch.equal(ACTIVATIONS["gelu"](x), F.gelu(x))
    assert torch.equal(ACTIVATIONS["gelu-tanh"](x), F.gelu(x, approximate="tanh"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SIGMOID_POLYNOMIALS)
def test_compiled_gradients_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-5, 5, 201).to(dtype)
    program = torch.compile(lambda x: SigmoidActivation.apply(x, name), backend="aot_eager", fullgraph=True)
    one, other = x.clone().requires_grad_(), x.float().requires_grad_()
    program(one).sum().backward()
    ACTIVATIONS[name](other).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    assert_close(one.grad.float(), other.grad, atol=4e-6 if dtype == torch.float32 else 5e-3, rtol=0)
