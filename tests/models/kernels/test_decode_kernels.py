"""The kernels of a decode step against one operation after another: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.kernels.test_glu import DEVICE, INTERPRETED, on_a_gpu
from torch import Tensor
from torch.testing import assert_close

from firth.generate.constraint import pack_mask
from firth.models.kernels import decode_attention as attention_module
from firth.models.kernels import decode_choice as choice_module
from firth.models.kernels import decode_linear as linear_module
from firth.models.kernels.decode_attention import decode_attention, decode_attention_reference
from firth.models.kernels.decode_choice import (
    RowState,
    argmax_parts,
    forbid_by_host_mask,
    record_reference,
    record_tokens,
)
from firth.models.kernels.decode_linear import (
    NormArgs,
    SplitHeads,
    add_normalized,
    decode_linear,
    decode_linear_reference,
)

DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]  # the interpreter rounds down to bfloat16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels whatever the device."""
    monkeypatch.setattr(linear_module, "uses_decode_kernels", lambda x: True)
    monkeypatch.setattr(attention_module, "uses_decode_kernels", lambda x: True)
    monkeypatch.setattr(choice_module, "uses_decode_kernels", lambda x: True)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def norm_args(kind: str, K: int, dtype: torch.dtype) -> NormArgs | None:
    if kind == "none":
        return None
    bias = None if kind == "rms" else numbers(K, dtype=dtype)
    return NormArgs(numbers(K, dtype=dtype), bias, 1e-5, kind == "rms")


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert not found.isnan().any()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    assert (found.float() - wanted.float()).norm() <= tolerance * wanted.float().norm()


CASES: dict[str, dict[str, Any]] = {
    "plain": dict(norm="none"),
    "layer norm, GELU": dict(norm="layer", activation="gelu-tanh", bias=True),
    "RMSNorm, gated SiLU": dict(norm="rms", activation="silu", is_gated=True),
    "layer norm, gated GELU with biases": dict(norm="layer", activation="gelu", is_gated=True, bias=True),
    "residual": dict(norm="none", bias=True, residual=True),
    "ReLU": dict(norm="rms", activation="relu"),
    "head": dict(norm="layer", scale=0.125),
}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 2, 40])
@pytest.mark.parametrize("shape", [(96, 64), (50, 48), (33, 160)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_linear(case: str, shape: tuple[int, int], M: int, dtype: torch.dtype, kernels: None) -> None:
    torch.manual_seed(0)
    settings = CASES[case]
    N, K = shape
    rows = 2 * N if settings.get("is_gated") else N
    x, weight = numbers(M, K, dtype=dtype) + 0.5, numbers(rows, K, dtype=dtype) / 8
    arguments = (
        weight,
        numbers(rows, dtype=dtype) if settings.get("bias") else None,
        norm_args(settings["norm"], K, dtype),
        settings.get("activation"),
        settings.get("is_gated", False),
        numbers(M, N, dtype=dtype) if settings.get("residual") else None,
        settings.get("scale", 1.0),
        True,
    )
    found, found_normed = decode_linear(x, *arguments)
    wanted, wanted_normed = decode_linear_reference(x, *arguments)
    assert_near(found, wanted, dtype)
    assert_near(found_normed, wanted_normed, dtype)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 40])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_normalized_output(kind: str, M: int, dtype: torch.dtype, kernels: None) -> None:
    torch.manual_seed(0)
    residual, x, norm = numbers(M, 48, dtype=dtype), numbers(M, 48, dtype=dtype) + 0.5, norm_args(kind, 48, dtype)
    assert norm is not None
    assert_near(add_normalized(residual, x, norm), residual + norm(x), dtype)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("M", [1, 3])
def test_linear_combines_the_parts_of_attention(M: int, kernels: None) -> None:
    torch.manual_seed(0)
    parts = SplitHeads(numbers(4, M, 96), 3 * numbers(4, M, 3))
    parts.lse[1] = -1e30  # a part without keys
    weight, residual = numbers(40, 96), numbers(M, 40)
    found, _ = decode_linear(parts, weight, residual_MN=residual)
    assert_close(found, parts.combine(torch.float32) @ weight.T + residual, atol=1e-4, rtol=1e-4)


ATTENTION: dict[str, dict[str, Any]] = {
    "GPT-2": dict(H=3, G=3, d=16),
    "grouped, RoPE": dict(H=6, G=2, d=32, rope=True),
    "T5": dict(H=2, G=2, d=16, bias=True),
    "window": dict(H=2, G=1, d=16, window=70, rope=True),
    "odd head size": dict(H=2, G=2, d=24, bias=True),
    "cross-attention": dict(H=2, G=2, d=16, is_cross=True),
}


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, parts: int, dtype: torch.dtype, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(attention_module, "num_key_parts", lambda *_: parts)
    case, B, S = ATTENTION[name], 5, 320
    H, G, d = case["H"], case["G"], case["d"]
    is_cross = case.get("is_cross", False)
    qkv = numbers(B, (H if is_cross else H + 2 * G) * d, dtype=dtype)
    k, v = numbers(2, B, G, S, d, dtype=dtype)
    position = torch.tensor([1 if is_cross else 0, 1, 64, 200, 319], device=DEVICE)
    angle = torch.arange(S, device=DEVICE)[:, None] * torch.linspace(0.01, 1.0, d // 2, device=DEVICE)
    rope = torch.cat([angle.cos(), angle.sin()], 1) if case.get("rope") else None
    bias = numbers(H, S, dtype=dtype) if case.get("bias") else None
    rest = (position, d**-0.5, rope, bias, case.get("window"), is_cross)
    caches = [(k.clone(), v.clone()) for _ in range(2)]
    found = decode_attention(qkv, *caches[0], *rest)
    assert isinstance(found, SplitHeads) == (parts > 1)
    if isinstance(found, SplitHeads):
        found = found.combine(dtype)
    assert_near(found, decode_attention_reference(qkv, *caches[1], *rest), dtype)
    for ours, wanted in zip(*caches, strict=True):
        assert_near(ours, wanted, dtype)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (5, 5000)], ids=str)
def test_mask_in_the_memory_of_the_host(shape: tuple[int, int], dtype: torch.dtype, kernels: None) -> None:
    """The host changes its memory between two steps: the second one reads what is there then."""
    torch.manual_seed(0)
    scores, permitted = numbers(*shape, dtype=dtype), torch.rand(shape) < 0.5
    permitted[-1, -1] = False
    pinned = torch.zeros(shape[0], -(-shape[1] // 32), dtype=torch.int32, pin_memory=DEVICE == "cuda")
    assert forbid_by_host_mask(scores, pinned).isneginf().all()
    for changed in (False, True):
        permitted[-1, -1] = changed
        for row, words in zip(permitted, pinned, strict=True):
            words.copy_(torch.from_numpy(pack_mask(row.numpy()).view("int32")))
        wanted = scores.masked_fill(~permitted.to(DEVICE), float("-inf"))
        assert_close(forbid_by_host_mask(scores, pinned), wanted, atol=0, rtol=0)


def test_mask_in_the_memory_of_the_host_without_a_gpu() -> None:
    scores = torch.arange(70.0)[None]
    mask = torch.from_numpy(pack_mask(torch.arange(70).numpy() % 3 == 0).view("int32"))[None]
    assert forbid_by_host_mask(scores, mask)[0].isfinite().nonzero()[:, 0].tolist() == list(range(0, 70, 3))


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("shape", [(1, 3000), (3, 70), (5, 5000)], ids=str)
@pytest.mark.parametrize("num_eos", [0, 2])
def test_choice(shape: tuple[int, int], num_eos: int, kernels: None) -> None:
    """Three tokens in a row: of equal scores the first; EOS and budgets end rows, and then nothing is counted."""
    torch.manual_seed(0)
    B, V = shape
    eos = torch.tensor([7, 11][:num_eos], dtype=torch.long, device=DEVICE)
    states = [
        RowState(
            torch.zeros(B, 5, dtype=torch.long, device=DEVICE),
            torch.zeros(B, dtype=torch.long, device=DEVICE),
            torch.tensor([4, 2, 4, 4, 1][:B], device=DEVICE),
            torch.zeros(B, dtype=torch.bool, device=DEVICE),
            torch.zeros(B, dtype=torch.bool, device=DEVICE),
            torch.arange(B, device=DEVICE) + 3,
            torch.zeros(B, dtype=torch.long, device=DEVICE),
            eos,
        )
        for _ in range(2)
    ]
    for step in range(3):
        scores = torch.randint(0, 50, (B, V), device=DEVICE).float()
        if step == 1:
            scores[0, 11] = 60.0
        told = torch.full((B,), -1, pin_memory=DEVICE == "cuda") if step else None
        token = record_tokens(*argmax_parts(scores), states[0], told)
        wanted = torch.tensor([row.index(max(row)) for row in scores.tolist()], device=DEVICE)
        assert_close(token, wanted)
        if told is not None:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            assert told.tolist() == wanted.tolist()
        record_reference(wanted, states[1])
        for found, expected in zip(*states, strict=True):
            assert_close(found, expected)
    assert states[0].ended[0] == bool(num_eos)
