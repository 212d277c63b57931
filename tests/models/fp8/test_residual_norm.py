"""An FP8 linear layer fused with dropout, residual addition and norm, against eager operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from models.fp8.test_linear import DEVICES, far
from models.fp8.test_quantize import WIDTHS, assert_same_rows
from models.kernels.test_glu import DEVICE, on_a_gpu
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from firth.models import PRESETS, make_model
from firth.models.fp8 import residual_norm as module
from firth.models.fp8.convert import convert_to_fp8
from firth.models.fp8.linear import Float8Linear, float8_mlp
from firth.models.fp8.residual_norm import ResidualNormEpilogue, make_residual_norm, residual_norm_backward
from firth.models.kernels.dropout import Dropout, mask_from_factors, random_odd_factors
from firth.objectives import Batch


def what_comes_back(N: int, more: bool, rate: float, dtype: torch.dtype, device: str) -> tuple[list[Any], Tensor]:
    """Arguments of the norm's backward kernel, and the gradient of the sum by autograd."""
    torch.manual_seed(0)
    M = 48
    sizes = torch.logspace(-6, 3, M)[:, None]
    dy, second, sums = ((torch.randn(M, N) * size).to(device, torch.bfloat16) for size in (sizes, sizes, 3.0))
    sums = (sums.to(dtype) + 1).requires_grad_()
    second = second if more else None
    weight, bias, factor = ((torch.rand(N) + 0.5).to(device) for _ in range(3))
    y, mean, spread = torch.native_layer_norm(sums.float(), [N], weight, bias, 1e-5)
    error = dy.float() if second is None else dy.float() + second.float()
    (wanted,) = torch.autograd.grad(y, sums, error)
    row, column = (random_odd_factors((n,), torch.device(device)) if rate else None for n in (M, N))
    facts = mean.detach().flatten(), spread.detach().flatten(), weight, row, column, factor, rate
    return [dy, second, sums.detach(), *facts], wanted


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("N", [*WIDTHS, 768])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("each", [1, 7, 64])
def test_norm_backward_kernel(
    N: int, more: bool, rate: float, dtype: torch.dtype, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NORM_BWD_LAUNCH", module.NORM_BWD_LAUNCH._replace(programs_per_sm=each))
    monkeypatch.setattr("firth.models.fp8.quantize.num_multiprocessors", lambda device: 1)
    arguments, exact = what_comes_back(N, more, rate, dtype, DEVICE)
    found = []
    for way in (False, True):
        monkeypatch.setattr(module, "can_use_triton", lambda x, way=way: way)
        found.append(residual_norm_backward(*arguments))
    one, two = found
    assert [a.dtype for a in one] == [a.dtype for a in two]
    assert [a.shape for a in one[:4]] == [a.shape for a in two[:4]]
    for a, b in zip(one[:2], two[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4 * float(b.abs().max()) if len(b) else 0)
    assert far(two[0], exact) < 6e-3
    assert_same_rows(two[2:4], one[2:4])
    assert len(two[4]) == min(48, each)
    torch.testing.assert_close(two[4].sum(0), one[4].sum(0), rtol=1e-4, atol=1e-3 * float(one[4].abs().max()))


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fake_tensors_have_the_right_shapes_and_dtypes(more: bool, rate: float, dtype: torch.dtype) -> None:
    arguments, exact = what_comes_back(48, more, rate, dtype, "cpu")
    for dy in (arguments[0], arguments[0].t().contiguous().t()):
        torch.library.opcheck(
            residual_norm_backward, (dy, *arguments[1:]), test_utils=("test_schema", "test_faketensor")
        )
    assert far(residual_norm_backward(*arguments)[0], exact) < 4e-3


MAPS = ["one", "two"]


def some_maps(name: str, device: str) -> tuple[list[nn.Module], Callable[..., Tensor], Callable[[Tensor], Tensor]]:
    """Modules; a function that applies them to `x` in FP8, with an epilogue or not; and the exact one."""
    if name == "one":
        only = Float8Linear(48, 64).to(device)
        return [only], only, lambda x: F.linear(x, only.weight, only.bias)
    up, down = Float8Linear(48, 96).to(device), Float8Linear(96, 64).to(device)

    def exact(x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up.weight, up.bias)), down.weight, down.bias)

    return [up, down], lambda x, *end: float8_mlp(up, down, x, "gelu", False, *end), exact


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("times", "rate", "compiled"),
    [(1, 0.0, False), (1, 0.3, False), (2, 0.0, False), (2, 0.3, False), (2, 0.3, True)]
    + [pytest.param(times, rate, True, marks=pytest.mark.slow) for times, rate in ((1, 0.0), (1, 0.3), (2, 0.0))],
)
@pytest.mark.parametrize("name", MAPS)
def test_fused_epilogue(name: str, times: int, rate: float, compiled: bool, device: str) -> None:
    """Outputs and all gradients equal those of linear layer, dropout, residual addition and norm in sequence."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    modules, by_eight, exact = some_maps(name, device)
    norm = nn.LayerNorm(64, device=device)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    x, before = (torch.randn(4, 16, n, device=device, requires_grad=True) for n in (48, 64))
    row, column = (random_odd_factors((n,), torch.device(device)) if rate else None for n in (64, 64))
    kept = (
        mask_from_factors(row[:, None], column, rate).view(4, 16, 64) if row is not None and column is not None else 1.0
    )
    leaves = x, before, *(p for m in (*modules, norm) for p in m.parameters())
    readers = [torch.randn(4, 16, 64, device=device) for _ in range(times)]

    def with_end(x: Tensor, before: Tensor) -> Tensor:
        end = ResidualNormEpilogue(before.reshape(-1, 64), norm.weight, norm.bias, row, column, rate, norm.eps, times)
        found = by_eight(x, end)
        assert len(found) == times
        return sum(((y * reader).square().sum() for y, reader in zip(found, readers, strict=True)), torch.zeros(()))

    def one_by_one(maps: Callable[[Tensor], Tensor]) -> Tensor:
        y = norm(before + kept * maps(x))
        return sum(((y * reader).square().sum() for reader in readers), torch.zeros(()))

    if compiled:
        with_end = torch.compile(with_end, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    found = torch.autograd.grad(with_end(x, before), leaves)
    for maps, tolerance in ((by_eight, 0.05), (exact, 0.08)):  # on which side 8 bits are may differ
        wanted = torch.autograd.grad(one_by_one(maps), leaves)
        for a, b in zip(found, wanted, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert far(a, b) < tolerance


@pytest.mark.slow
def test_gradients_of_both_outputs_are_added_in_the_kernel() -> None:
    """Between the halves of a block and between compiled blocks, no sum of gradients is materialized."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make_model(replace(PRESETS["bert-tiny"], num_layers=3, vocab_size=64, dropout=0.0, attention_dropout=0.0))
    convert_to_fp8(model, torch.device("cpu"))
    tokens = torch.randint(5, 64, (2, 16))
    batch = Batch(tokens, target_positions=torch.tensor([[1, 2, 3], [5, 7, 9]]), labels=tokens[:, :3])
    calls: list[bool] = []

    def look(graph: Any, inputs: Any) -> Any:
        found = [node for node in graph.graph.nodes if "residual_norm_backward" in str(node.target)]
        calls.extend(node.args[1] is not None for node in found)
        return make_boxed_func(graph)

    program = torch.compile(model.loss, backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    ps, found = list(model.parameters()), []
    for call in (model.train().loss, program):
        found.append(torch.autograd.grad(call(batch), ps))
    assert calls == [False, True, True, True, True, True], "from the last norm, which one reads, to the first"
    for a, b in zip(*found, strict=True):
        assert far(a, b) < 0.02 or b.norm() < 1e-5


def test_which_layers_have_an_epilogue() -> None:
    before, drop = torch.randn(2, 16, 64), Dropout(0.1)
    end = make_residual_norm(before, nn.LayerNorm(64), drop, 2)
    assert end is not None
    assert (end.residual.shape, end.dropout_p, end.num_outputs) == ((32, 64), 0.1, 2)
    assert end.drop_rows is not None
    assert len(end.drop_rows) == 32
    assert make_residual_norm(before, nn.LayerNorm(64), Dropout(0.0), 1).drop_rows is None  # type: ignore[union-attr]
    assert make_residual_norm(before, nn.LayerNorm(64), Dropout(0.1).eval(), 1).drop_rows is None  # type: ignore[union-attr]
    assert make_residual_norm(before, nn.LayerNorm(64, bias=False), drop, 1) is None
    assert make_residual_norm(before, nn.RMSNorm(64), drop, 1) is None
    assert make_residual_norm(before, nn.Identity(), drop, 1) is None
