"""Our fused attention kernel against eager operations.

Run them with `pytest -m gpu`; without a GPU, where triton is installed, with TRITON_INTERPRET=1 (slowly).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from models.test_presets import NEEDS, TINY, some_batch
from torch import Tensor
from torch.testing import assert_close

from firth.models import PRESETS, attention, make_model, with_extras
from firth.models.attention import AttentionSpec, make_attention_spec, make_key_range
from firth.models.kernels.attention import (
    KeyRange,
    fused_attention,
    fused_qkv_attention,
    fused_relative_attention,
    make_dropout_factors,
)
from firth.models.kernels.tiling import triton
from firth.models.position.relative_attention import RelativeScores
from firth.models.two_stream import make_query_stream_spec
from firth.objectives.batch import Batch

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="there is no CUDA device"),
]
B, H = 2, 2


class Case(NamedTuple):
    """Numbers of queries, keys and dimensions per head, and the visibility."""

    T: int
    S: int
    d: int
    mask: bool = False
    bias: bool = False
    causal: bool = False
    dropout: float = 0.0
    share: int = 1  # heads that read the same keys


CASES = {
    "full tiles": Case(128, 128, 64),
    "causal": Case(192, 192, 64, causal=True),
    "short and causal": Case(128, 128, 64, causal=True),
    "causal, parts of tiles": Case(77, 77, 32, causal=True),
    "mask": Case(128, 192, 64, mask=True),
    "bias": Case(128, 128, 64, bias=True),
    "bias and mask, parts of tiles": Case(70, 130, 48, mask=True, bias=True),
    "causal bias": Case(200, 200, 64, bias=True, causal=True),
    "short and causal, bias": Case(100, 100, 64, bias=True, causal=True),
    "dropout": Case(128, 128, 64, dropout=0.3),
    "causal dropout": Case(130, 130, 64, causal=True, dropout=0.1),
    "shared keys": Case(128, 128, 64, share=2),
    "shared keys, causal, dropout, bias": Case(100, 100, 32, causal=True, dropout=0.2, bias=True, share=4),
    "bias and dropout": Case(70, 130, 64, mask=True, bias=True, dropout=0.6),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, bf16: bool) -> None:
    case = CASES[name]
    if INTERPRETED and bf16:
        pytest.skip("numpy has no bfloat16")
    dtype, tolerance = (torch.bfloat16, 1e-2) if bf16 else (torch.float32, 1e-5)
    torch.manual_seed(1)
    T, S, d = case.T, case.S, case.d
    H = heads_of(case)
    shapes = ((T, H), (S, H // case.share), (S, H // case.share))
    q, k, v = (torch.randn(B, n, h, d, device=DEVICE, dtype=dtype).transpose(1, 2) for n, h in shapes)
    given = [q, k, v, torch.randn(1, H, T, S, device=DEVICE)] if case.bias else [q, k, v]
    mask = torch.rand(B, 1, T, S, device=DEVICE) < 0.6 if case.mask else None
    if mask is not None:
        mask[0, 0, 3] = False  # it sees nobody
    torch.manual_seed(2)
    stays = kept(make_dropout_factors(B * H * T, S, case.dropout, q.device), T, S, case.dropout, H)
    dy = torch.randn(B, H, T, d, device=DEVICE)

    mine = [x.clone().requires_grad_() for x in given]
    torch.manual_seed(2)
    bias = mine[3] if case.bias else None
    y = fused_attention(mine[0], mine[1], mine[2], mask, None, bias, case.causal, case.dropout, 0.125)
    y.backward(dy.to(dtype))
    exact = [x.double().requires_grad_() for x in given]
    expected = in_single_operations(case, exact, mask, stays)
    expected.backward(dy.double())
    for a, b in zip([y, *(x.grad for x in mine)], [expected, *(x.grad for x in exact)], strict=True):
        assert a is not None
        assert b is not None
        assert (a.double() - b).norm() < tolerance * b.norm()


@pytest.mark.parametrize("name", ["full tiles", "causal", "causal bias", "causal dropout"])
def test_packed_qkv(name: str) -> None:
    """Queries, keys and values in one tensor: equal outputs, and equal gradients of all three."""
    case = CASES[name]
    torch.manual_seed(4)
    x = torch.randn(B, case.T, 3 * H * case.d, device=DEVICE, requires_grad=True)
    bias = torch.randn(1, H, case.T, case.S, device=DEVICE, requires_grad=True) if case.bias else None
    dy = torch.randn(B, case.T, H * case.d, device=DEVICE)
    rest = (case.causal, case.dropout, 0.125)
    found, wanted = list[Tensor](), list[Tensor]()
    for answers in (found, wanted):
        torch.manual_seed(5)
        x.grad = None
        if answers is found:
            y = fused_qkv_attention(x, x, H, None, None, bias, *rest)
        else:
            q, k, v = (part.unflatten(-1, (H, case.d)).transpose(1, 2) for part in x.chunk(3, -1))
            y = fused_attention(q, k, v, None, None, bias, *rest).transpose(1, 2).flatten(2)
        given = [x] if bias is None else [x, bias]
        answers.extend([y, *torch.autograd.grad(y, given, dy)])
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["full tiles", "bias and mask, parts of tiles", "bias and dropout", "mask"])
def test_packed_kv_of_cross_attention(name: str, compiled: bool) -> None:
    """In one tensor or two: equal outputs and gradients; also with document ids in place of a mask."""
    case = CASES[name]
    torch.manual_seed(6)
    q = torch.randn(B, case.T, H * case.d, device=DEVICE, requires_grad=True)
    both = torch.randn(B, case.S, 2 * H * case.d, device=DEVICE, requires_grad=True)
    bias = torch.randn(1, H, case.T, case.S, device=DEVICE, requires_grad=True) if case.bias else None
    mask, key_range = torch.rand(B, 1, case.T, case.S, device=DEVICE) < 0.6 if case.mask else None, None
    if name == "mask":
        doc, read_doc = (torch.randint(0, 3, (B, n), device=DEVICE).sort(1).values for n in (case.T, case.S))
        mask, key_range = None, make_attention_spec(False, doc, key_document_ids=read_doc).key_range
    rest = (mask, key_range, bias, False, case.dropout, 0.125)

    def packed(q: Tensor, both: Tensor) -> Tensor:
        return fused_qkv_attention(q, both, H, *rest).sin()

    def apart(q: Tensor, both: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (H, case.d)).transpose(1, 2) for x in (q, *both.chunk(2, -1)))
        return fused_attention(*heads, *rest).transpose(1, 2).flatten(2).sin()

    if compiled:
        same = None if INTERPRETED else {"fallback_random": True}  # what is dropped is drawn as without a compiler
        packed = torch.compile(packed, backend="aot_eager" if INTERPRETED else "inductor", options=same)
    found = []
    for way in (packed, apart):
        torch.manual_seed(7)
        y = way(q, both)
        found.append([y, *torch.autograd.grad(y.square().sum(), [q, both] if bias is None else [q, both, bias])])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.stride() == b.stride()


@pytest.fixture
def nothing_unwritten() -> Iterator[None]:
    """Fill new memory with NaN, so that unwritten outputs show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_unwritten")
@pytest.mark.parametrize("T", [128, 100])
@pytest.mark.parametrize("name", ["all", "documents", "mask", "ranks"])
def test_relative_position_scores(name: str, T: int) -> None:
    """Scores of queries and keys by distance: outputs and all gradients, in full and partial tiles."""
    doc, rank = (torch.arange(T, device=DEVICE) // 50).expand(B, T), torch.randperm(T, device=DEVICE).expand(B, T)
    spec = make_attention_spec(False, doc if name in ("documents", "mask") else None, rank if name == "ranks" else None)
    key_range, found = None if name == "mask" else spec.key_range, []
    for ours in (True, False):
        torch.manual_seed(9)
        given = [torch.randn(B, H, T, 32, device=DEVICE, requires_grad=True) for _ in range(3)]
        vectors = [torch.randn(H, 2 * T - 1, 32, device=DEVICE, requires_grad=True) for _ in range(2)]
        q, k, v = given
        scores = RelativeScores(q, T - 1, (q, vectors[0]), (k, vectors[1]))
        if ours:
            y = fused_relative_attention(scores, k, v, spec.mask, key_range, 0.0, 0.1)
        else:
            x = (q @ k.mT + scores.to_dense(T)) * 0.1
            y = (x if spec.mask is None else x.masked_fill(~spec.mask, float("-inf"))).softmax(-1) @ v
        found.append([y, *torch.autograd.grad(y.square().sum(), [*given, *vectors])])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["full tiles", "bias and mask, parts of tiles", "causal, parts of tiles"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled(name: str, packed: bool) -> None:
    """The operator's fake tensors give the compiler shapes and strides."""
    case = CASES[name]
    T = case.S if packed else case.T
    torch.manual_seed(8)
    bias = torch.randn(1, H, T, case.S, device=DEVICE, requires_grad=True) if case.bias else None
    mask = torch.rand(B, 1, T, case.S, device=DEVICE) < 0.6 if case.mask else None
    x = torch.randn(B, case.S, 3 * H * case.d, device=DEVICE, requires_grad=True)

    def attention(x: Tensor, bias: Tensor | None) -> Tensor:
        x, rest = x * 2, (mask, None, bias, case.causal, case.dropout, 0.125)
        if packed:
            return fused_qkv_attention(x, x, H, *rest).sin()
        q, k, v = (part.unflatten(-1, (H, case.d)).transpose(1, 2) for part in x.chunk(3, -1))
        return fused_attention(q[:, :, :T], k, v, *rest).sin()

    found = []
    for program in (attention, torch.compile(attention, backend="aot_eager" if INTERPRETED else "inductor")):
        y = program(x, bias)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x] if bias is None else [x, bias])])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert a.stride() == b.stride()


FAR_CASES = {
    "both ways": Case(320, 320, 32),
    "parts of tiles": Case(250, 330, 32, mask=True),
    "causal": Case(300, 300, 32, causal=True, dropout=0.2),
    "documents": Case(320, 320, 32),
    "causal documents": Case(320, 320, 32, causal=True),
}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", FAR_CASES)
def test_far_keys_share_one_bias(name: str, short: bool) -> None:
    """With and without the shortcut: equal outputs and gradients, also of the bias table."""
    dtype = torch.float32 if not short else torch.float16 if INTERPRETED else torch.bfloat16
    case, far, generator = FAR_CASES[name], 70, torch.Generator(DEVICE).manual_seed(3)
    T, S, d = case.T, case.S, case.d
    distance = torch.arange(S, device=DEVICE) - torch.arange(T, device=DEVICE)[:, None]
    q, k, v = (torch.randn(B, H, n, d, device=DEVICE, generator=generator) for n in (T, S, S))
    table = 3 * torch.randn(H, 2 * far + 1, device=DEVICE, generator=generator)
    mask = torch.rand(B, 1, T, S, device=DEVICE, generator=generator) < 0.6 if case.mask else None
    doc = torch.arange(T, device=DEVICE).expand(B, T) // 150 if "documents" in name else None
    key_range = make_key_range(case.causal, doc, None) if doc is not None else None
    found = []
    for known in (0, far):
        given = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        given.append(table.clone().requires_grad_())  # whose gradient is a sum of many
        bias = given[3][:, distance.clamp(-far, far) + far][None].to(dtype)
        torch.manual_seed(4)
        causal = case.causal and key_range is None
        y = fused_attention(*given[:3], mask, key_range, bias, causal, case.dropout, 0.125, known)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), given)])
    tolerance = 1e-5 if not short else 5e-4 if INTERPRETED else 4e-3
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() < tolerance * b.float().norm()


def test_a_constant_bias_changes_nothing() -> None:
    """In 16 bits too, where near and far tiles could round it differently."""
    dtype, tolerance = (torch.float16, 1e-3) if INTERPRETED else (torch.bfloat16, 5e-3)
    torch.manual_seed(9)
    q, k, v = (torch.randn(1, H, 256, 32, device=DEVICE, dtype=dtype) for _ in range(3))
    bias = torch.full((1, H, 256, 256), 30.3, device=DEVICE, dtype=dtype)
    y, same = (fused_attention(q, k, v, None, None, b, False, 0.0, 0.125, 70) for b in (bias, None))
    assert (y - same).float().norm() < tolerance * same.float().norm()


def heads_of(case: Case) -> int:
    return max(H, case.share)


def kept(numbers: tuple[Tensor | None, Tensor | None], T: int, S: int, dropout: float, H: int = H) -> Tensor:
    """(B, H, T, S): 0 where a weight is dropped, more than 1 elsewhere."""
    row, column = numbers
    if row is None or column is None:
        return torch.ones(B, H, T, S, device=DEVICE)
    product = (row.view(B, H, T, 1) * column).long() & 0xFFFFFFFF  # without the sign
    stays = product >= round(dropout * 2**32)
    assert abs(1 - stays.double().mean().item() - dropout) < 0.02
    return stays / (1 - dropout)


def in_single_operations(case: Case, given: list[Tensor], mask: Tensor | None, stays: Tensor) -> Tensor:
    q, k, v, *bias = given
    k, v = (x.repeat_interleave(case.share, 1) for x in (k, v))
    scores = q @ k.mT * 0.125 + (bias[0] if bias else 0.0)
    sees = torch.ones(1, 1, case.T, case.S, dtype=torch.bool, device=DEVICE) if mask is None else mask
    sees = sees.tril() if case.causal else sees
    return (scores.masked_fill(~sees, -1e30).softmax(-1) * sees * stays) @ v


SIGHTS = (
    "documents",
    "documents with holes",
    "causal documents",
    "ranks",
    "documents and ranks",
    "targets",
    "targets without documents",
    "across",
    "a window",
    "a window of documents",
    "a causal window",
    "a causal window of documents",
)


@pytest.mark.parametrize("T", [300, 320])  # in full tiles, those that see whole ones have no mask
@pytest.mark.parametrize("name", SIGHTS)
def test_key_ranges_equal_a_mask(name: str, T: int) -> None:
    K, d = 20, 32
    torch.manual_seed(3)
    doc = torch.zeros(B, T, dtype=torch.long)
    doc[0, 61:], doc[0, 140:], doc[0, 270:], doc[1, 1:], doc[1, 64:], doc[1, 192:] = 1, 2, -1, 1, 2, 3
    if name == "documents with holes":  # as the mask of a user may have them
        doc[0], doc[0, 130], doc[0, 70] = 0, -1, -1
    rank, positions = torch.randint(0, 6, (B, T)), torch.randint(0, T, (B, K))
    doc, rank, positions = (x.to(DEVICE) for x in (doc, rank, positions))
    near = attention.LocalWindow(torch.arange(T, device=DEVICE), 20)
    specs = {
        "documents": lambda: make_attention_spec(False, doc),
        "documents with holes": lambda: make_attention_spec(False, doc),
        "causal documents": lambda: make_attention_spec(True, doc),
        "ranks": lambda: make_attention_spec(False, None, rank),
        "documents and ranks": lambda: make_attention_spec(False, doc, rank),
        "targets": lambda: make_query_stream_spec(doc, rank, positions),
        "targets without documents": lambda: make_query_stream_spec(None, rank, positions),
        "across": lambda: make_attention_spec(False, doc[:, :K].contiguous(), key_document_ids=doc),
        "a window": lambda: make_attention_spec(False, None, window=near),
        "a window of documents": lambda: make_attention_spec(False, doc, window=near),
        "a causal window": lambda: make_attention_spec(True, None, window=near),
        "a causal window of documents": lambda: make_attention_spec(True, doc, window=near),
    }
    spec = specs[name]()
    assert spec.mask is not None
    q, k, v = (torch.randn(B, H, n, d, device=DEVICE, requires_grad=True) for n in (spec.mask.shape[2], T, T))

    def answers(key_range: KeyRange | None, spec: AttentionSpec = spec) -> list[Tensor]:
        y = fused_attention(q, k, v, spec.mask, key_range, None, False, 0.0, 0.2)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v))]

    for a, b in zip(answers(None), answers(spec.key_range), strict=True):
        assert_close(a, b)


# --- whole models


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in TINY if PRESETS[name].recurrent is None])
def test_models_with_fused_and_eager_attention(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused attention wherever supported, in float32 and without dropout: losses and gradients."""
    config = replace(PRESETS[name], vocab_size=40, dropout=0.0, attention_dropout=0.0, layer_drop=0.0)
    config = with_extras(config, NEEDS.get(config.family, ()))
    torch.manual_seed(6)
    model, batch = make_model(config).to(DEVICE), some_batch(config)
    if config.family == "xlnet":
        batch = batch._replace(token_type_ids=None)  # scores of segments are single operations
    if packed:
        doc = torch.tensor([[0] * 5 + [1] * 3, [0] * 7 + [-1]])
        decoder_doc = None if batch.decoder_input_ids is None else torch.tensor([[0, 0, 0, 1, 1], [0] * 5])
        batch = batch._replace(document_ids=doc[:, : batch.input_ids.shape[1]], decoder_document_ids=decoder_doc)
    batch = Batch(*(None if x is None else x.to(DEVICE) for x in batch))
    ways: list[str] = []

    def can_do(q: Tensor, k: Tensor, spec: AttentionSpec) -> bool:
        return spec.masked_bias is None or spec.bias is not None

    def answers(ours: bool) -> dict[str, Tensor]:
        def kernel(
            device: str,
            spec: AttentionSpec,
            dropout: float,
            is_compiling: bool,
            can_fuse_relative: bool = False,
            can_fuse: bool = False,
            **_: Any,
        ) -> str:
            ways.append("fused" if ours and (can_fuse or (can_fuse_relative and spec.masked_bias is None)) else "eager")
            return ways[-1]

        monkeypatch.setattr(attention, "select_attention_kernel", kernel)
        torch.manual_seed(7)  # what a generator draws
        losses = model.losses(batch)
        model.zero_grad()
        torch.stack([loss / batch.loss_counts[part] for part, loss in losses.items()]).sum().backward()
        return losses | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    monkeypatch.setattr(attention, "has_fused_attention", lambda q: True)
    monkeypatch.setattr(attention, "supports_fused_attention", can_do)
    wanted, found = answers(ours=False), answers(ours=True)
    assert "fused" in ways
    assert found.keys() == wanted.keys()
    for n, value in wanted.items():
        assert_close(found[n], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")
