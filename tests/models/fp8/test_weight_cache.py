"""Quantize the weights of many layers at once."""

from __future__ import annotations

import copy

import pytest
import torch
from models.fp8.test_quantize import assert_same_rows
from models.kernels.test_glu import DEVICE, on_a_gpu
from torch import nn

from firth.models.fp8 import weight_cache as module
from firth.models.fp8.linear import Float8Linear
from firth.models.fp8.quantize import eager_quantize_rowwise
from firth.models.fp8.weight_cache import cache_fp8_weights


def some_layers(device: str) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        [Float8Linear(80, 144), Float8Linear(16, 48), Float8Linear(208, 32).bfloat16(), nn.Linear(7, 7)]
    ).to(device)
    with torch.no_grad():
        layers[0].weight[3] *= 100
        layers[0].weight[5] = 0
    return layers


def check(layers: nn.ModuleList) -> None:
    for layer in layers:
        if isinstance(layer, Float8Linear):
            assert layer.fp8_cache is not None
            rows_OI, scale_O, columns_IO = layer.fp8_cache
            assert_same_rows((rows_OI, scale_O), eager_quantize_rowwise(layer.weight.detach().float()))
            assert torch.equal(columns_IO.float(), rows_OI.float().t())


@pytest.mark.gpu
@on_a_gpu
def test_quantize_weights_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_use_triton", lambda x: True)
    layers = some_layers(DEVICE)
    for _ in range(2):
        with cache_fp8_weights(layers):
            check(layers)
        with torch.no_grad():
            layers[1].weight.mul_(-3)  # the next time others are held


def test_cached_weights_are_current_and_temporary() -> None:
    layers = some_layers("cpu")
    first: Float8Linear = layers[0]  # type: ignore[assignment]
    with cache_fp8_weights(layers):
        check(layers)
        cache = first.fp8_cache
    assert first.fp8_cache is None
    with torch.no_grad():
        first.weight.mul_(-3)
    with pytest.raises(ValueError, match="stop"), cache_fp8_weights(layers):
        check(layers)
        assert first.fp8_cache is cache
        raise ValueError("stop")
    assert first.fp8_cache is None


def test_a_layer_gives_the_same_result_with_and_without_the_cache() -> None:
    layer, x = some_layers("cpu")[0].train(), torch.randn(16, 80, requires_grad=True)
    found = []
    for holds in (False, True):
        with cache_fp8_weights(layer if holds else nn.Identity()):
            for start, end in ((0, None), (48, None), (0, 48)):
                y = layer.forward_rows(x, None, start, end)
                found.append([y, *torch.autograd.grad(y.float().square().sum(), (x, layer.weight))])
    for a, b in zip(found[:3], found[3:], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_copies_do_not_share_the_cache() -> None:
    layers = some_layers("cpu")
    with cache_fp8_weights(layers):
        copied = copy.deepcopy(layers)
    assert all(layer.fp8_cache is None and layer.fp8_buffer is None for layer in copied[:3])  # type: ignore[union-attr]
    assert torch.equal(copied[0].weight, layers[0].weight)
