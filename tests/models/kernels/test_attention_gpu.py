"""On a GPU: the selected attention kernel against eager operations.

Run them with `pytest -m gpu`. Row lengths are not a multiple of any tile; rows hold several documents and padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from firth.models.attention import AttentionSpec
from firth.models.backbone import Stack
from firth.models.config import (
    ALiBi,
    Disentangled,
    ModelConfig,
    NoPosition,
    Position,
    Rotary,
    Shaw,
    SlidingWindow,
    T5Bias,
    TransformerXL,
)
from firth.models.position.xl_memory import XLMemory
from firth.models.presets import bert
from firth.models.two_stream import make_query_stream_spec

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]
B, T, H, D, M = 3, 150, 4, 128, 70


class Case(NamedTuple):
    """A kind of visibility: position scheme and fields of the batch."""

    position: Position = NoPosition()
    causal: bool = False
    doc: bool = False
    rank: bool = False
    segment: bool = False
    memory: bool = False
    targets: bool = False  # by the query stream, at target positions only
    changes: dict[str, Any] = {}  # noqa: RUF012, never changed


CASES = {
    "all": Case(),
    "causal": Case(causal=True),
    "documents": Case(doc=True),
    "causal documents": Case(causal=True, doc=True),
    "ranks": Case(rank=True),
    "documents and ranks": Case(doc=True, rank=True),
    "rotary": Case(Rotary(), causal=True, doc=True),
    "buckets": Case(T5Bias(), doc=True),
    "causal buckets": Case(T5Bias(), causal=True),
    "buckets that end soon": Case(T5Bias(16, 40)),
    "causal buckets that end soon": Case(T5Bias(16, 40), causal=True),
    "buckets that end soon, documents": Case(T5Bias(16, 40), doc=True),
    "slopes": Case(ALiBi(), doc=True),
    "causal slopes": Case(ALiBi(), causal=True),
    "window": Case(doc=True, changes={"window": SlidingWindow(32, 1000)}),
    "shared keys": Case(causal=True, changes={"num_kv_heads": 2}),
    "shared keys, documents": Case(causal=True, doc=True, changes={"num_kv_heads": 1}),
    "shaw": Case(Shaw(8), doc=True),
    "disentangled": Case(Disentangled(max_distance=64), doc=True),
    "disentangled, all": Case(Disentangled(max_distance=64)),
    "disentangled, buckets": Case(
        Disentangled(max_distance=64, num_buckets=32, share_projections=True, norm_embeddings=True), doc=True
    ),
    "disentangled, targets": Case(Disentangled(max_distance=64), doc=True, rank=True, targets=True),
    "transformer-xl": Case(TransformerXL(), doc=True),
    "transformer-xl, causal": Case(TransformerXL(), causal=True),
    "transformer-xl, ranks": Case(TransformerXL(), doc=True, rank=True),
    "transformer-xl, segments": Case(TransformerXL(relative_segments=True), doc=True, segment=True),
    "transformer-xl, memory": Case(TransformerXL(), doc=True, memory=True),
    "transformer-xl, causal memory": Case(TransformerXL(), causal=True, memory=True),
    "transformer-xl, targets": Case(
        TransformerXL(relative_segments=True), doc=True, rank=True, segment=True, targets=True
    ),
}


def make_stack(case: Case) -> Stack:
    config: ModelConfig = bert(2, D, H, 20, position=case.position, dropout=0.0, attention_dropout=0.0, **case.changes)
    stack = Stack(config, 2, case.causal).to(DEVICE)
    torch.manual_seed(3)
    with torch.no_grad():
        for p in stack.parameters():
            p.normal_(0, 0.15)
    return stack


def rows() -> dict[str, Tensor]:
    """Two documents and padding; one document; three, one of them a single token."""
    doc = torch.zeros(B, T, dtype=torch.long)
    doc[0, 61:], doc[0, 140:], doc[2, 1:], doc[2, 64:] = 1, -1, 1, 2
    g = torch.Generator().manual_seed(5)
    made = {"doc": doc, "rank": torch.randint(0, 6, (B, T), generator=g), "segment": (torch.arange(T) > 70).long()}
    return {name: value.expand(B, T).to(DEVICE) for name, value in made.items()}


def answers(stack: Stack, case: Case, plain: bool, bf16: bool, compiled: bool) -> list[Tensor]:
    """The output of one attention layer, and the gradients of all inputs and weights."""
    seen: list[Tensor] | None = [] if plain else None
    torch.manual_seed(7)
    x, past = torch.randn(B, T, D, device=DEVICE, requires_grad=True), torch.randn(B, M, D, device=DEVICE)
    stack.zero_grad()
    stack.memory = None
    if case.memory:
        stack.memory = XLMemory(M)
        stack.memory.states = {0: past}
    attention = torch.compile(stack.blocks[0].attention) if compiled else stack.blocks[0].attention
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        spec, query, content = what_is_seen(stack, case, x, past, seen)
        y = attention(query, spec, content)
    (y.float() * torch.linspace(-1, 1, D, device=DEVICE)).square().sum().backward()
    assert not plain or seen, "only single operations know the weights"
    found = {n: p.grad for n, p in stack.named_parameters() if p.grad is not None}
    assert {"blocks.0.attention.qkv.weight", "blocks.0.attention.out.weight"} <= found.keys()
    assert x.grad is not None
    return [y.detach().float(), x.grad.clone(), *(grad.clone() for grad in found.values())]


def what_is_seen(
    stack: Stack, case: Case, x: Tensor, past: Tensor, seen: list[Tensor] | None
) -> tuple[AttentionSpec, Tensor, Tensor | None]:
    """The attention spec, the queries, and the keys if they are another sequence."""
    batch = rows()
    doc, rank, segment = (batch[name] if getattr(case, name) else None for name in ("doc", "rank", "segment"))
    wide, narrow = stack.attention_specs(x, doc, rank, attentions=seen, token_type_ids=segment)
    spec = wide if stack.config.window is None else narrow
    if case.memory:
        return spec, x, torch.cat([past, x], 1)
    if not case.targets:
        return spec, x, None
    assert rank is not None
    targets = torch.tensor([[3, 149, 64, 0, 0], [9, 10, 11, 100, 63], [0, 1, 148, 65, 2]], device=DEVICE)
    earlier = make_query_stream_spec(doc, rank, targets)._replace(
        relative_positions=wide.relative_positions.at_positions(targets), attentions=seen
    )
    return earlier, x[torch.arange(B, device=DEVICE)[:, None], targets], x


def size(x: Tensor, others: list[Tensor]) -> Tensor:
    """The largest absolute value, or a hundredth of the largest of all tensors: some gradients are 0 up to rounding."""
    return torch.maximum(x.abs().max(), 0.01 * torch.stack([other.abs().max() for other in others]).max())


def compiled_too(names: list[str]) -> list[Any]:
    """All cases, and some of them compiled as well, which takes a while."""
    some = (
        "documents",
        "buckets",
        "disentangled",
        "transformer-xl",
        "transformer-xl, targets",
        "transformer-xl, segments",
    )
    return [*((name, False) for name in names), *((name, True) for name in some)]


@pytest.mark.parametrize(("name", "compiled"), compiled_too(list(CASES)))
def test_in_float32(name: str, compiled: bool) -> None:
    """To 1e-4 of the largest value of each tensor (`size`)."""
    case = CASES[name]
    stack = make_stack(case)
    wanted = answers(stack, case, plain=True, bf16=False, compiled=False)
    found = answers(stack, case, plain=False, bf16=False, compiled=compiled)
    for mine, other in zip(found, wanted, strict=True):
        assert mine.isfinite().all()
        assert (mine - other).abs().max() <= 1e-4 * size(other, wanted)


@pytest.mark.parametrize(("name", "compiled"), compiled_too(list(CASES)))
def test_in_bfloat16(name: str, compiled: bool) -> None:
    """Error against float32 at most twice that of eager bf16, plus 1% of the largest value."""
    case = CASES[name]
    stack = make_stack(case)
    truth = answers(stack, case, plain=True, bf16=False, compiled=False)
    plain = answers(stack, case, plain=True, bf16=True, compiled=False)
    found = answers(stack, case, plain=False, bf16=True, compiled=compiled)
    for mine, other, exact in zip(found, plain, truth, strict=True):
        assert mine.isfinite().all()
        usual = (other - exact).abs().max()
        assert (mine - exact).abs().max() <= 2 * usual + 0.01 * size(exact, truth)
