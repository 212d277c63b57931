"""Row-wise FP8 quantization kernels against eager operations: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models.kernels.test_glu import DEVICE, INTERPRETED, on_a_gpu
from torch import Tensor

from firth.models.fp8 import quantize as module
from firth.models.fp8.quantize import (
    ACTIVATION_BWD_LAUNCH,
    ACTIVATION_LAUNCH,
    FP8_DTYPE,
    QUANTIZE_LAUNCH,
    quantize_activation,
    quantize_activation_backward,
    quantize_rowwise,
    split_into_powers_of_two,
)
from firth.models.kernels.glu import KERNEL_ACTIVATIONS

WIDTHS = [16, 48, 272, 1072]  # in two pieces exactly, and (1,072) with some of the second left over


def both_ways(monkeypatch: pytest.MonkeyPatch, f: Callable[[], Sequence[Any]]) -> list[Sequence[Any]]:
    """The result of eager operations, and that of the kernel."""
    found = []
    for way in (False, True):
        monkeypatch.setattr(module, "can_use_triton", lambda x, way=way: way)
        found.append(f())
    return found


def assert_same_rows(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Equal scales; a few values may be rounded to the other side."""
    (a8, a), (b8, b) = found, wanted
    assert (a8.dtype, a8.shape, a8.stride()) == (FP8_DTYPE, b8.shape, b8.stride())
    torch.testing.assert_close(a, b, rtol=2e-5, atol=0)
    off = (a8.float() != b8.float()).float().mean()
    if INTERPRETED:  # where what is rounded up to a power of two becomes half of it
        assert off < 0.06
        return
    assert off < 0.02
    torch.testing.assert_close(a8.float(), b8.float(), rtol=0.13, atol=2**-9)


def numbers(M: int, N: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    x = torch.randn(M, N, device=DEVICE) * torch.logspace(-6, 3, M, device=DEVICE)[:, None]
    x[M // 2] = 0
    return x.bfloat16()


@pytest.fixture(params=[1, 7, 64])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Kernel programs for 48 rows: one for all, seven, or one per row."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 1)
    for name in ("QUANTIZE_LAUNCH", "ACTIVATION_LAUNCH", "ACTIVATION_BWD_LAUNCH"):
        monkeypatch.setattr(module, name, getattr(module, name)._replace(programs_per_sm=request.param))
    return min(48, int(request.param))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("factor", [False, True])
def test_quantize_rows(N: int, factor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, times = numbers(48, N), torch.rand(N, device=DEVICE) + 0.5 if factor else None
    wanted, found = both_ways(monkeypatch, lambda: quantize_rowwise(x, times, needs_sums=True))
    assert_same_rows(found[:2], wanted[:2])
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-5, atol=1e-2)
    assert quantize_rowwise(x, times)[2] is None


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("kind", range(len(KERNEL_ACTIVATIONS)))
@pytest.mark.parametrize(("gated", "biased"), [(False, True), (False, False), (True, False)])
def test_quantize_after_an_activation(
    N: int, kind: int, gated: bool, biased: bool, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = (1 + gated) * N
    x, dy = numbers(48, width).clamp(-40, 40), numbers(48, N, 1)
    bias, factor = torch.randn(N, device=DEVICE) if biased else None, torch.rand(width, device=DEVICE) + 0.5
    wanted, found = both_ways(monkeypatch, lambda: quantize_activation(x, bias, kind, gated))
    assert_same_rows(found, wanted)
    wanted, found = both_ways(monkeypatch, lambda: quantize_activation_backward(dy, x, bias, factor, kind, gated))
    assert_same_rows(found[2:4], wanted[2:4])
    for a, b in ((found[0], wanted[0]), (found[1], wanted[1])):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) == (torch.bfloat16, b.shape)
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-30)
    assert len(found[4]) == (programs if biased else 0)
    torch.testing.assert_close(found[4].sum(0), wanted[4].sum(0), rtol=1e-4, atol=1e-2)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter makes numbers in 8 bits of what is none")
def test_nan_stays_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    x = numbers(16, 48)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    for eight, scale, _ in both_ways(monkeypatch, lambda: quantize_rowwise(x)):
        y = eight.float() * scale[:, None]
        assert not y[3, 4].isfinite()
        assert y[5, 6].isnan()
        assert y[[0, 1, 2, 4, *range(6, 16)]].isfinite().all()


@pytest.mark.parametrize(("gated", "biased"), [(False, True), (False, False), (True, False)])
def test_fake_tensors_have_the_right_shapes_and_dtypes(gated: bool, biased: bool) -> None:
    """On a CPU, with eager operations."""
    x, dy = torch.randn(32, 16 * (1 + gated)).bfloat16(), torch.randn(32, 16).bfloat16()
    bias, factor = torch.randn(16) if biased else None, torch.rand(16 * (1 + gated))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(quantize_activation, (x, bias, 0, gated), test_utils=checks)
    torch.library.opcheck(quantize_activation_backward, (dy, x, bias, factor, 0, gated), test_utils=checks)


@pytest.mark.parametrize("shared_bytes", [100_352, 232_448])  # bytes of shared memory: Ada, Hopper
def test_tiles_cover_rows_of_every_width(shared_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "shared_memory_bytes", lambda device: shared_bytes)
    for row in (1_000, 30_000, 114_688, 229_376, 10**6):
        stages = [
            shape.num_stages(row, torch.device("cuda"))
            for shape in (QUANTIZE_LAUNCH, ACTIVATION_LAUNCH, ACTIVATION_BWD_LAUNCH)
        ]
        assert all(n >= 1 and ((n - 1) * row <= shared_bytes - 8192) for n in stages)
    assert ACTIVATION_BWD_LAUNCH.num_stages(1_000, torch.device("cuda")) == ACTIVATION_BWD_LAUNCH.max_stages
    for shape in (QUANTIZE_LAUNCH, ACTIVATION_LAUNCH, ACTIVATION_BWD_LAUNCH):
        for N in range(16, 40_000, 16):
            assert shape.elements_per_warp * shape.num_warps(N) >= N or shape.num_warps(N) == 32
            assert shape.num_warps(N).bit_count() == 1


def test_two_powers_of_two_cover_a_row() -> None:
    for N in range(16, 20000, 16):
        a, b = split_into_powers_of_two(N)
        assert a + b >= N > a
        assert a.bit_count() == b.bit_count() == 1
        assert a + b == N or N.bit_count() > 2
