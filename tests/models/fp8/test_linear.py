"""FP8 linear layers against the same layers in floating point."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from models.kernels.test_glu import on_a_gpu
from torch import Tensor, nn

from firth.models.fp8.linear import Float8Linear, float8_mlp
from firth.models.fp8.quantize import quantize_rowwise
from firth.models.kernels.activation import ACTIVATIONS
from firth.models.kernels.glu import KERNEL_ACTIVATIONS

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_a_gpu])]


def far(x: Tensor, y: Tensor) -> float:
    return float((x.detach().float() - y.detach().float()).norm() / y.detach().float().norm())


def in_eight(x: Tensor) -> Tensor:
    """Quantize to FP8 and dequantize."""
    x8, scale, _ = quantize_rowwise(x.detach())
    return x8.float() * scale[:, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_matmul_equals_that_of_dequantized_inputs(size: float, device: str) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(32, 48) * size, torch.randn(64, 48) * 0.02, torch.randn(64) * size
    x[3] *= 100  # each row has a scale of its own
    w[5] /= 100
    dy = (torch.randn(32, 64) * 1e-8).bfloat16().to(device)
    x, w, b = (a.to(device).requires_grad_() for a in (x, w, b))
    layer = Float8Linear(48, 64).to(device)
    layer.weight, layer.bias = nn.Parameter(w.detach()), nn.Parameter(b.detach())
    w, b = layer.weight, layer.bias
    y = layer(x)
    dx, dw, db = torch.autograd.grad(y, (x, w, b), dy.float())
    x8, w8, scale = in_eight(x.bfloat16()), in_eight(w), quantize_rowwise(w.detach())[1]
    dy8 = in_eight(dy.float() * scale) / scale  # in 8 bits it has the scales of the weights that it meets
    whole = F.linear(x, w, b), *torch.autograd.grad(F.linear(x, w, b), (x, w, b), dy.float())
    exact = x8 @ w8.T + b, dy8 @ w8, dy.float().T @ x, dy.float().sum(0)
    for mine, rounded, true in zip((y, dx, dw, db), exact, whole, strict=True):
        assert far(mine, rounded) < 5e-3  # bfloat16
        assert far(mine, true) < 0.05  # 8 bits
    assert {a.dtype for a in (y, dx, dw, db)} == {torch.float32}
    with torch.autocast(device, torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def layers(gated: bool, bias: bool, device: str) -> tuple[Tensor, Float8Linear, Float8Linear]:
    torch.manual_seed(1)
    up, down = Float8Linear(48, (1 + gated) * 96, bias=bias), Float8Linear(96, 64, bias=bias)
    with torch.no_grad():
        for p in (*up.parameters(), *down.parameters()):
            p *= 3
    return torch.randn(4, 16, 48, device=device, requires_grad=True), up.to(device), down.to(device)


def found_with(y: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("activation", "compiled"),
    [*((name, False) for name in KERNEL_ACTIVATIONS), ("gelu", True)]
    + [pytest.param(name, True, marks=pytest.mark.slow) for name in KERNEL_ACTIVATIONS if name != "gelu"],
)
@pytest.mark.parametrize(("gated", "bias"), [(False, True), (False, False), (True, False)])
def test_fused_mlp_equals_two_linear_layers(
    gated: bool, bias: bool, activation: str, compiled: bool, device: str
) -> None:
    """With an activation in between: outputs and all gradients agree with the exact layers up to FP8 rounding."""
    torch._dynamo.reset()
    x, up, down = layers(gated, bias, device)
    leaves = (x, *up.parameters(), *down.parameters())
    between = gated_or_not(F.linear(x, up.weight, up.bias), activation, gated)
    wanted = found_with(F.linear(between, down.weight, down.bias), leaves)

    def program(x: Tensor) -> Tensor:
        y = float8_mlp(up, down, x, activation, gated)
        assert y is not None
        return y

    if compiled:
        program = torch.compile(program, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    found = found_with(program(x), leaves)
    assert [a.shape for a in found] == [a.shape for a in wanted]
    assert {a.dtype for a in found} == {torch.float32}, "as of linear maps, where nobody asks for less"
    for a, b in zip(found, wanted, strict=True):
        assert far(a, b) < 0.08
    one_by_one = found_with(down(gated_or_not(up(x), activation, gated)), leaves)
    for a, b in zip(found, one_by_one, strict=True):
        assert far(a, b) < 0.04  # a compiler rounds to bfloat16 less often, which may decide on which side 8 bits are


def gated_or_not(x: Tensor, activation: str, gated: bool) -> Tensor:
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, value = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * value


def test_unsupported_mlps_use_separate_layers() -> None:
    x, up, down = layers(False, True, "cpu")
    assert float8_mlp(up, down, x, "gelu", False) is not None
    assert float8_mlp(up, down, x, "relu", False) is None
    assert float8_mlp(up, down, x[:, :15], "gelu", False) is None
    assert float8_mlp(nn.Linear(48, 96), down, x, "gelu", False) is None
    assert float8_mlp(up.eval(), down.eval(), x, "gelu", False) is None
    x, up, down = layers(True, True, "cpu")
    assert float8_mlp(up, down, x, "gelu", True) is None


def test_rows_not_a_multiple_of_16_are_exact() -> None:
    layer, x = Float8Linear(48, 64), torch.randn(16, 48)
    assert torch.equal(layer.forward_rows(x, None, 0, 24), F.linear(x, layer.weight[:24]))
    assert not torch.equal(layer.forward_rows(x, None, 0, 32), F.linear(x, layer.weight[:32]))


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_slices_with_biases(device: str) -> None:
    """As keys and values use them; in bfloat16, without rounding beforehand."""
    torch._dynamo.reset()
    layer = Float8Linear(48, 64).to(device, torch.bfloat16)
    x = torch.randn(16, 48, device=device, dtype=torch.bfloat16, requires_grad=True)

    def some_rows(x: Tensor) -> Tensor:
        return layer.forward_rows(x, layer.bias[16:48], 16, 48)

    backend = "aot_eager" if device == "cpu" else "inductor"
    y = torch.compile(some_rows, backend=backend, fullgraph=True)(x)
    leaves = x, layer.weight, layer.bias
    wanted = F.linear(x, layer.weight, layer.bias)[:, 16:48]
    ones = torch.ones_like(y)
    for a, b in zip(
        (y, *torch.autograd.grad(y, leaves, ones)), (wanted, *torch.autograd.grad(wanted, leaves, ones)), strict=True
    ):
        assert far(a, b) < 0.05


def test_small_gradients_do_not_underflow() -> None:
    layer, x = Float8Linear(48, 64), torch.randn(16, 48, requires_grad=True)
    (exact,) = torch.autograd.grad(F.linear(x, layer.weight), x, torch.ones(16, 64))
    (found,) = torch.autograd.grad(layer(x), x, torch.full((16, 64), 1e-16))
    assert far(found * 1e16, exact) < 0.05


def test_frozen_weights_have_no_gradient() -> None:
    x, up, down = layers(False, True, "cpu")
    up.weight.requires_grad_(False)
    down.weight.requires_grad_(False)
    y = float8_mlp(up, down, x, "gelu", False)
    assert y is not None
    (up(x).sum() + y.sum()).backward()
    assert [p.grad is None for p in (up.weight, down.weight, up.bias, down.bias, x)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_zero_rows_stay_zero_and_nan_stays_nan() -> None:
    x = torch.zeros(16, 16)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    eight, scale, _ = quantize_rowwise(x)
    y = eight.float() * scale[:, None]
    assert not y[[0, 1, 2, 4]].any()
    assert not y[3, 4].isfinite()
    assert y[5, 6].isnan()
