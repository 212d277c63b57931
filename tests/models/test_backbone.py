"""Layer dropout, activation checkpointing, and the dtype of the residual stream."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from firth.models.backbone import Stack
from firth.models.config import ConvolutionConfig
from firth.models.presets import bert, gpt2

CONFIG = bert(4, 16, 2, 20, dropout=0.0, attention_dropout=0.0)


def test_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    stack = Stack(gpt2(3, 16, 2, 20, dropout=0.2, attention_dropout=0.1), 3, is_causal=True).train()
    x, gradients = torch.randn(2, 6, 16), []
    for again in (False, True):
        stack.activation_checkpointing = again
        stack.zero_grad()
        torch.manual_seed(1)
        stack(x, torch.zeros(2, 6, dtype=torch.long)).square().sum().backward()
        gradients.append([p.grad.clone() for p in stack.parameters()])  # type: ignore[union-attr]
    for plain, recomputed in zip(*gradients, strict=True):
        assert_close(plain, recomputed)


def test_layer_dropout_has_its_rate_in_training_only() -> None:
    torch.manual_seed(0)
    stack = Stack(replace(CONFIG, layer_drop=0.3), 1, is_causal=False)
    x = torch.randn(1, 3, 16)
    stack.train()
    left_out = sum(torch.equal(stack(x, None), x) for _ in range(2000)) / 2000
    assert abs(left_out - 0.3) < 0.04
    stack.eval()
    assert not any(torch.equal(stack(x, None), x) for _ in range(20))


def test_residual_stream_keeps_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a norm or a convolution returns float32, as under autocast on a GPU."""
    plain = torch.nn.functional.layer_norm
    monkeypatch.setattr(
        torch.nn.functional,
        "layer_norm",
        lambda x, shape, weight, bias, eps: plain(x.float(), shape, weight.float(), bias.float(), eps),
    )
    stack, kinds = Stack(replace(CONFIG, convolution=ConvolutionConfig()), 3, is_causal=False), list[torch.dtype]()
    for block in stack.blocks:
        block.register_forward_hook(lambda block, given, x: kinds.append(x.dtype))
    for residual in (torch.float32, torch.bfloat16):
        stack.residual_dtype = residual
        with torch.autocast("cpu", torch.bfloat16):
            stack(torch.randn(2, 5, 16), None)
    assert kinds == [torch.float32] * 3 + [torch.bfloat16] * 3


def test_bf16_weights_and_empty_inputs() -> None:
    """In evaluation, where `residual` does not apply."""
    stack, x = Stack(CONFIG, 2, is_causal=False).bfloat16(), torch.randn(1, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert stack(x.bfloat16(), None).dtype == torch.bfloat16
    assert Stack(CONFIG, 2, is_causal=False).to("meta")(x.to("meta"), None).shape == x.shape
