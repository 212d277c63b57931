"""Attention specs, kernel selection, and attention by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import attention
from firth.models.attention import Attention, AttentionSpec, LocalWindow, attend, make_attention_spec
from firth.models.kernels import attention as fused
from firth.models.kernels import tiling
from firth.models.kernels.attention import make_kernel_mask, with_tile_bounds
from firth.models.presets import bert, t5
from firth.models.two_stream import make_query_stream_spec
from firth.train.deterministic import deterministic_mode


def rows(mask: torch.Tensor | None) -> list[str]:
    """The first row's mask as strings, x where attention is allowed."""
    assert mask is not None
    return ["".join("x" if sees else "." for sees in line) for line in mask[0, 0].tolist()]


def test_no_mask() -> None:
    assert make_attention_spec(False, None) == AttentionSpec(is_causal=False)
    assert make_attention_spec(True, None) == AttentionSpec(is_causal=True)


def test_causal_needs_no_mask() -> None:
    """Eager operations mask scores; our kernel compares positions."""
    score, position_ids = torch.randn(1, 2, 4, 4), torch.arange(4)[None]
    spec = make_attention_spec(True, None, score_bias=score, bias_max_distance=3)
    assert spec.mask_is_causal
    assert spec.mask is not None
    mask, key_range, bias, causal, *rest = spec.kernel_args(torch.float32, 0.1, 1.0)
    assert (mask, key_range, causal, rest) == (None, None, True, [0.1, 1.0, 3])
    assert bias is score
    for more in (
        {"document_ids": position_ids * 0},
        {"attention_rank": position_ids},
        {"window": LocalWindow(position_ids[0], 1)},
    ):
        other = make_attention_spec(True, **{"document_ids": None, "score_bias": score} | more)
        assert not other.mask_is_causal
        assert other.kernel_args(torch.float32, 0.0, 1.0)[0] is other.mask
        assert not other.kernel_args(torch.float32, 0.0, 1.0)[3]


def test_document_mask() -> None:
    doc = torch.tensor([[0, 0, 1, -1]])
    assert rows(make_attention_spec(False, doc).mask) == ["xx..", "xx..", "..x.", "...x"]
    causal = make_attention_spec(True, doc)
    assert rows(causal.mask) == ["x...", "xx..", "..x.", "...x"]
    assert not causal.is_causal


def test_prefix_rank() -> None:
    """A bidirectional prefix of two, then causal."""
    rank = torch.tensor([[0, 0, 1, 2]])
    assert rows(make_attention_spec(True, None, rank).mask) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows(make_attention_spec(True, torch.tensor([[0, 0, 0, 1]]), rank).mask) == ["xx..", "xx..", "xxx.", "...x"]


def test_cross_attention_mask() -> None:
    spec = make_attention_spec(False, torch.tensor([[0, 1]]), key_document_ids=torch.tensor([[0, 0, 1, -1]]))
    assert rows(spec.mask) == ["xx..", "..x."]


SPECS = {
    "documents": lambda doc, rank, positions: make_attention_spec(False, doc),
    "causal documents": lambda doc, rank, positions: make_attention_spec(True, doc),
    "ranks": lambda doc, rank, positions: make_attention_spec(True, None, rank),
    "documents and ranks": lambda doc, rank, positions: make_attention_spec(False, doc, rank),
    "across": lambda doc, rank, positions: make_attention_spec(False, doc[:, 3:9], key_document_ids=doc),
    "earlier": lambda doc, rank, positions: make_query_stream_spec(doc, rank, positions),
    "earlier without documents": lambda doc, rank, positions: make_query_stream_spec(None, rank, positions),
    "at positions": lambda doc, rank, positions: make_attention_spec(False, doc, rank).at_positions(positions),
    "a window": lambda doc, rank, positions: make_attention_spec(False, None, window=LocalWindow(torch.arange(30), 4)),
    "a causal window": lambda doc, rank, positions: make_attention_spec(
        True, None, window=LocalWindow(torch.arange(30), 4)
    ),
    "a window in documents": lambda doc, rank, positions: make_attention_spec(
        False, doc, window=LocalWindow(torch.arange(30), 4)
    ),
    "a causal window in documents": lambda doc, rank, positions: make_attention_spec(
        True, doc, window=LocalWindow(torch.arange(30), 4)
    ),
    "a window wider than the row": lambda doc, rank, positions: make_attention_spec(
        False, doc, window=LocalWindow(torch.arange(30), 2**40)
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_key_ranges_equal_the_mask(name: str) -> None:
    doc = torch.randint(-1, 4, (2, 30)).sort(1).values
    rank, positions = torch.randint(0, 30, (2, 30)), torch.randint(0, 30, (2, 7))
    spec = SPECS[name](doc, rank, positions)
    assert spec.key_range is not None
    assert spec.mask is not None
    said = [x for x in spec.key_range[:3] if x is not None]
    assert len({x.data_ptr() for x in said}) == len(said), "inputs of a program are apart"
    assert {x.dtype for x in said} == {torch.int32}
    key, low, size = spec.key_range[:3]
    above = key[:, None] - low[:, :, None]
    assert torch.equal((above >= 0) & (above < (1 if size is None else size[:, :, None])), spec.mask[:, 0])


def test_when_key_ranges_exist() -> None:
    """Not for windows of ranks, nor if document ids and ranks exceed 32 bits."""
    long = torch.zeros(1, attention.MAX_KEY_RANGE_TOKENS + 1, dtype=torch.long)
    assert attention.make_key_range(False, long, None) is None
    near, zeros = LocalWindow(torch.arange(4), 1), torch.zeros(1, 4, dtype=torch.long)
    assert make_attention_spec(False, zeros, zeros, window=near).key_range is None
    assert make_attention_spec(False, zeros, window=near).key_range is not None
    most = torch.full((1, attention.MAX_KEY_RANGE_TOKENS), attention.MAX_KEY_RANGE_TOKENS - 1)
    key_range = attention.make_key_range(False, most, most)
    assert key_range is not None
    assert key_range.start.min() > 0
    assert key_range.length is not None
    assert (key_range.length == attention.MAX_KEY_RANGE_TOKENS).all()
    assert (key_range.key_ids - key_range.start == attention.MAX_KEY_RANGE_TOKENS - 1).all()


@pytest.mark.parametrize("name", SPECS)
def test_tiles_cover_all_visible_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of 4 positions, the last one partial."""
    monkeypatch.setattr(fused, "TILE_TOKENS", 4)
    doc = torch.randint(-1, 9, (2, 30)).sort(1).values
    spec = SPECS[name](doc, torch.randint(0, 30, (2, 30)), torch.randint(0, 30, (2, 7)))
    assert spec.mask is not None
    T, S = spec.mask.shape[2:]
    kernel_mask = make_kernel_mask(None, spec.key_range, 2)
    for mask_BTS, found in ((spec.mask[:, 0], kernel_mask.key_bounds), (spec.mask[:, 0].mT, kernel_mask.query_bounds)):
        assert found is not None
        for b, mask_TS in enumerate(mask_BTS.expand(2, -1, -1)):
            for n, tile in enumerate(mask_TS.split(4)):
                sees = tile.any(0).nonzero()
                first, end, begin, stop = found[:, b, n].tolist()
                assert not len(sees) or (first <= sees.min() and sees.max() < end)
                assert begin == stop == 0 or first <= begin < stop <= end
                assert tile[:, begin:stop].all(), "there is something that it does not see"
    if name in ("documents", "a window"):
        assert kernel_mask.key_bounds is not None
        assert (kernel_mask.key_bounds[1] - kernel_mask.key_bounds[0]).sum() < 2 * T * S / 4, "less than all"


def test_invisible_tiles_are_skipped() -> None:
    """For documents of 100, 92 and 108 positions and a window within them."""
    doc = torch.tensor([[0] * 100 + [1] * 92 + [2] * 108])
    seen = make_kernel_mask(None, make_attention_spec(False, doc).key_range, 1).key_bounds
    assert seen is not None
    assert seen[:, 0].tolist() == [
        [0, 0, 64, 192, 192],
        [128, 192, 192, 300, 300],
        [0, 0, 128, 192, 192],
        [64, 0, 192, 300, 300],
    ]
    causal = make_kernel_mask(None, make_attention_spec(True, doc).key_range, 1)
    assert causal.key_bounds is not None
    assert causal.query_bounds is not None
    assert causal.key_bounds[1, 0].tolist() == [64, 128, 192, 256, 300]
    assert causal.query_bounds[:2, 0].tolist() == [[0, 64, 128, 192, 256], [128, 192, 192, 300, 300]]
    narrow = make_kernel_mask(
        None, make_attention_spec(False, None, window=LocalWindow(torch.arange(300), 20)).key_range, 2
    ).key_bounds
    assert narrow is not None
    assert narrow[:2, 1].tolist() == [[0, 0, 64, 128, 192], [128, 192, 256, 300, 300]]


def test_select_attention_kernel() -> None:
    """Ours for dropout, a trained bias, packed rows and cross-attention; else SDPA, or eager."""
    packed = make_attention_spec(False, torch.zeros(1, 2, dtype=torch.long))
    biased = make_attention_spec(False, None, score_bias=torch.zeros(1, 1, 2, 2))
    own_scores = make_attention_spec(False, None)._replace(masked_bias=torch.zeros(2, 1, 2, 2))
    choices: list[tuple[Any, str]] = [
        (("cuda", make_attention_spec(True, None), 0.1, True, False, True), "fused"),
        (("cuda", make_attention_spec(True, None), 0.1, False, False, True), "sdpa"),
        (("cuda", make_attention_spec(True, None), 0.0, True, False, True), "sdpa"),
        (("cuda", make_attention_spec(True, None), 0.1, True, False, False), "sdpa"),
        (("cuda", biased, 0.0, True, False, True), "fused"),
        (("cuda", packed, 0.0, True, False, True), "fused"),
        (("cuda", packed, 0.0, False, False, True), "sdpa"),
        (("cuda", packed._replace(key_range=None), 0.0, True, False, True), "sdpa"),
        (("cuda", make_attention_spec(False, None), 0.0, True, False, True), "sdpa"),
        (("cuda", make_attention_spec(False, None), 0.0, True, False, True, True), "fused"),
        (("cuda", make_attention_spec(False, None), 0.0, False, False, True, True), "sdpa"),
        (("cuda", biased, 0.0, True, False, False), "sdpa"),
        (("cuda", own_scores, 0.0, True, False, False), "eager"),
        (("cuda", own_scores, 0.0, False, False, False), "sdpa"),
        (("cuda", AttentionSpec(), 0.0, True, True, False), "fused"),
        (("cuda", biased, 0.0, True, True, False), "sdpa"),
        (("cuda", AttentionSpec(attentions=[]), 0.1, True, True, True), "eager"),
        (("cpu", AttentionSpec(), 0.1, False, False, False), "eager"),
        (("cpu", AttentionSpec(), 0.1, True, False, False), "sdpa"),
        (("cpu", AttentionSpec(), 0.0, False, False, False), "sdpa"),
    ]
    for given, wanted in choices:
        assert attention.select_attention_kernel(*given) == wanted, given


def test_head_sizes_that_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory per block: 227 KB on an H100 or H200, 163 on an A100, 99 on an RTX 4090, 63 on a T4."""

    def fits(kilobytes: int, d: int, size: int) -> bool:
        monkeypatch.setattr(tiling, "shared_memory_bytes", lambda device: kilobytes * 1024)
        query = SimpleNamespace(shape=(1, 1, 1, d), device=torch.device("cuda", 0), element_size=lambda: size)
        return tiling.has_fused_attention(query)  # type: ignore[arg-type]

    monkeypatch.setattr(tiling, "triton", object())
    assert [fits(227, d, 2) for d in (8, 16, 64, 96, 128, 136)] == [False, True, True, True, True, False]
    assert [fits(227, d, 4) for d in (64, 80, 128)] == [True, False, False]
    assert [fits(163, d, 2) for d in (64, 128)] == [True, True]
    assert [fits(99, d, 2) for d in (64, 128)] == [True, False]
    assert [fits(63, d, 2) for d in (16, 32)] == [True, False]


def test_can_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_fused_attention", lambda q: True)
    q, k = torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16), torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16)
    bias = torch.zeros(1, 4, 6, 6)
    biased, causal = make_attention_spec(False, None, score_bias=bias), make_attention_spec(True, None)
    assert attention.supports_fused_attention(q, k, AttentionSpec())
    assert attention.supports_fused_attention(q, k, biased)
    assert attention.supports_fused_attention(q, k, causal)
    assert not attention.supports_fused_attention(q.float(), k.float(), AttentionSpec())
    assert attention.supports_fused_attention(q, k[:, :2], AttentionSpec()), "heads that share keys"
    assert not attention.supports_fused_attention(q[:, :, :3], k, causal), "the queries begin later"
    assert not attention.supports_fused_attention(q, k, attention.add_score_bias(biased, bias.expand(2, -1, -1, -1))), (
        "scores of each row"
    )
    assert not attention.supports_fused_attention(q, k, AttentionSpec(update_cache=lambda k, v: (k, v)))
    assert not attention.supports_fused_attention(q, k, AttentionSpec(allow_fused=False)), "a switch"
    learns = make_attention_spec(False, None, score_bias=bias.clone().requires_grad_())
    with deterministic_mode(True):
        assert not attention.supports_fused_attention(q, k, learns)
        assert attention.supports_fused_attention(q, k, biased)
        assert attention.supports_fused_attention(q, k, causal)


def test_bias_is_masked() -> None:
    score = torch.arange(4.0).view(1, 1, 2, 2)
    inf = math.inf
    assert make_attention_spec(True, None, score_bias=score).masked_bias.tolist() == [[[[0, -inf], [2, 3]]]]  # type: ignore[union-attr]
    assert make_attention_spec(False, None, score_bias=score).masked_bias is score
    apart = make_attention_spec(False, torch.tensor([[0, 1]]), score_bias=score).masked_bias
    assert apart.tolist() == [[[[0, -inf], [-inf, 3]]]]  # type: ignore[union-attr]


def test_attention_by_hand() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    doc = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1]])
    score = torch.randn(1, 4, 5, 5)
    weights = q @ k.transpose(-1, -2) * 0.3 + score
    allowed = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    wanted = weights.masked_fill(~allowed, -math.inf).softmax(-1) @ v
    assert_close(attend(q, k, v, make_attention_spec(True, doc, score_bias=score), dropout=0.0, scale=0.3), wanted)


def test_cross_attention_to_itself_is_self_attention() -> None:
    for config in (bert(1, 32, 4, 10), t5(1, 32, 4, 48, 10, head_dim=6)):
        attention = Attention(config).eval()
        x = torch.randn(2, 5, 32)
        assert_close(attention(x, AttentionSpec(), x), attention(x, AttentionSpec()))


def test_empty_rows_give_zero_and_finite_gradients() -> None:
    """A padded position of a decoder whose encoder has no padding."""
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    spec = make_attention_spec(False, torch.tensor([[0, 0, -1]]), key_document_ids=torch.tensor([[0, 0, 0]]))
    y = attend(q, k, v, spec, 0.0, 1.0)
    y.sum().backward()
    assert y[0, :, 2].abs().max() == 0
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))  # type: ignore[union-attr]


DOC, READ = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 0, 0, -2]])  # two of DOC find nothing to read in READ


@pytest.mark.parametrize("case", ["all", "causal", "documents", "causal documents", "read", "score", "causal score"])
def test_dropout_path_equals_sdpa_at_rate_0(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of the dropout path, with nothing dropped, against SDPA."""
    score = torch.randn(1, 2, 4, 4, requires_grad=True)
    spec = make_attention_spec(
        is_causal="causal" in case,
        document_ids=None if case in ("all", "causal") else DOC,
        key_document_ids=READ if case == "read" else None,
        score_bias=score if "score" in case else None,
    )
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))

    def value_and_gradients(dropout: float) -> list[Tensor | None]:
        y = attend(q, k, v, spec, dropout, 0.3)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v, score), retain_graph=True, allow_unused=True)]

    wanted = value_and_gradients(0.0)
    monkeypatch.setattr(attention, "fast_dropout", lambda x, p: x)
    for mine, theirs in zip(value_and_gradients(0.1), wanted, strict=True):
        assert_close(mine, theirs)


def test_dropout_applies_to_attention_weights() -> None:
    """Four keys with equal scores and v = 1: four weights of 1/4, each times 0 or 2."""
    q, k, v = torch.zeros(1, 1, 1000, 8), torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 1)
    y = attend(q, k, v, AttentionSpec(), dropout=0.5, scale=1.0)
    assert set(y.flatten().tolist()) == {0.0, 0.5, 1.0, 1.5, 2.0}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_keys_equal_repeated_keys(kv_heads: int, masked: bool) -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, kv_heads, 6, 8), torch.randn(2, kv_heads, 6, 8)
    spec = make_attention_spec(True, torch.tensor([[0, 0, 1, 1, 1, -1]]).expand(2, 6) if masked else None)
    times = 4 // kv_heads
    wanted = attend(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), spec, 0.0, 0.3)
    assert_close(attend(q, k, v, spec, 0.0, 0.3), wanted)
    assert_close(attention.eager_attention(q, k, v, spec, 0.0, 0.3), wanted)


def test_attention_weights_are_returned() -> None:
    seen: list[Tensor] = []
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    spec = make_attention_spec(True, None)
    y = attend(q, k, v, spec._replace(attentions=seen), 0.0, 0.5)
    assert_close(y, attend(q, k, v, spec, 0.0, 0.5))
    (weights,) = seen
    assert_close(weights @ v, y)
    assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    assert (weights.triu(1) == 0).all()


def test_layer_bias_is_added_with_any_spec() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    more, doc = torch.randn(2, 2, 5, 5), torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    static = torch.randn(1, 2, 5, 5)
    scores = q @ k.mT * 0.5 + more
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    same = (doc[:, :, None] == doc[:, None, :])[:, None]
    cases = {
        "nothing": (make_attention_spec(False, None), scores),
        "causal": (make_attention_spec(True, None), scores.masked_fill(~lower, -math.inf)),
        "documents": (make_attention_spec(False, doc), scores.masked_fill(~same, -math.inf)),
        "both": (
            make_attention_spec(True, doc, score_bias=static),
            (scores + static).masked_fill(~(same & lower), -math.inf),
        ),
    }
    for name, (spec, wanted) in cases.items():
        found = attend(q, k, v, attention.add_score_bias(spec, more), 0.0, 0.5)
        assert_close(found, wanted.softmax(-1) @ v, msg=name)


def test_fully_visible_tiles() -> None:
    """The tile ranges of the kernel for tiles of 64 positions, against a mask of all positions."""
    torch.manual_seed(0)
    T, N = 320, 5
    doc = torch.zeros(6, T, dtype=torch.long)
    doc[1, 64:], doc[2, 100:], doc[2, 256:], doc[3, 7], doc[4, 300:], doc[5] = 1, 1, 2, -1, -1, torch.arange(T)
    rank, near = torch.randint(0, 3, (6, T)), LocalWindow(torch.arange(T), 40)
    specs = (
        make_attention_spec(False, doc),
        make_attention_spec(True, doc),
        make_attention_spec(False, doc, window=near),
        make_attention_spec(False, doc, rank),
        make_attention_spec(False, None, rank),
    )
    for spec in specs:
        assert spec.key_range is not None
        assert spec.mask is not None
        key_range, mask = with_tile_bounds(spec.key_range), spec.mask[:, 0].expand(6, T, T).view(6, N, 64, N, 64)
        whole = mask.all(4).all(2)
        for found, sees in ((key_range.key_bounds, whole), (key_range.query_bounds, whole.mT)):
            assert found is not None
            at = torch.arange(N) * 64
            claimed = (at >= found[2][:, :, None]) & (at < found[3][:, :, None])
            assert not (claimed & ~sees).any(), "a tile that is not visible is taken for visible"
            if spec.key_range.length is None:
                assert claimed[[0, 1, 2, 4]].equal(sees[[0, 1, 2, 4]]), "documents that stand together have all"
    documents = with_tile_bounds(specs[0].key_range) if specs[0].key_range is not None else None
    assert documents is not None
    assert documents.key_bounds is not None
    assert documents.key_bounds[2:, 0].tolist() == [[0] * N, [T] * N]
    assert documents.key_bounds[2:, 3].tolist() == [[0, *[64] * 4], [0, *[T] * 4]], "a hole in the first tile"
