"""Who may see whom, and attention by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import attention, fused, tiles
from firth.models.attention import Attention, Near, Sight, attend, see
from firth.models.fused import in_tiles, seen_by
from firth.models.presets import bert, t5
from firth.models.two_stream import see_earlier
from firth.train.deterministic import deterministic


def rows(mask: torch.Tensor | None) -> list[str]:
    """The first row's mask as strings, x where seeing is allowed."""
    assert mask is not None
    return ["".join("x" if sees else "." for sees in line) for line in mask[0, 0].tolist()]


def test_nothing_said() -> None:
    assert see(False, None) == Sight(causal=False)
    assert see(True, None) == Sight(causal=True)


def test_order_needs_no_mask_where_nothing_else_is_said() -> None:
    """A score has to be masked in single operations; our own kernel compares places."""
    score, place = torch.randn(1, 2, 4, 4), torch.arange(4)[None]
    sight = see(True, None, score=score, far=3)
    assert sight.ordered
    assert sight.mask is not None
    mask, reach, bias, causal, *rest = sight.for_kernel(torch.float32, 0.1, 1.0)
    assert (mask, reach, causal, rest) == (None, None, True, [0.1, 1.0, 3])
    assert bias is score
    for more in ({"doc": place * 0}, {"rank": place}, {"near": Near(place[0], 1)}):
        other = see(True, **{"doc": None, "score": score} | more)
        assert not other.ordered
        assert other.for_kernel(torch.float32, 0.0, 1.0)[0] is other.mask
        assert not other.for_kernel(torch.float32, 0.0, 1.0)[3]


def test_documents() -> None:
    doc = torch.tensor([[0, 0, 1, -1]])
    assert rows(see(False, doc).mask) == ["xx..", "xx..", "..x.", "...x"]
    causal = see(True, doc)
    assert rows(causal.mask) == ["x...", "xx..", "..x.", "...x"]
    assert not causal.causal


def test_rank() -> None:
    """A prefix of two that sees itself, then causal."""
    rank = torch.tensor([[0, 0, 1, 2]])
    assert rows(see(True, None, rank).mask) == ["xx..", "xx..", "xxx.", "xxxx"]
    assert rows(see(True, torch.tensor([[0, 0, 0, 1]]), rank).mask) == ["xx..", "xx..", "xxx.", "...x"]


def test_reading_another_sequence() -> None:
    sight = see(False, torch.tensor([[0, 1]]), read_doc=torch.tensor([[0, 0, 1, -1]]))
    assert rows(sight.mask) == ["xx..", "..x."]


SIGHTS = {
    "documents": lambda doc, rank, asked: see(False, doc),
    "causal documents": lambda doc, rank, asked: see(True, doc),
    "ranks": lambda doc, rank, asked: see(True, None, rank),
    "documents and ranks": lambda doc, rank, asked: see(False, doc, rank),
    "across": lambda doc, rank, asked: see(False, doc[:, 3:9], read_doc=doc),
    "earlier": lambda doc, rank, asked: see_earlier(doc, rank, asked),
    "earlier without documents": lambda doc, rank, asked: see_earlier(None, rank, asked),
    "at places": lambda doc, rank, asked: see(False, doc, rank).at(asked),
    "a window": lambda doc, rank, asked: see(False, None, near=Near(torch.arange(30), 4)),
    "a causal window": lambda doc, rank, asked: see(True, None, near=Near(torch.arange(30), 4)),
    "a window in documents": lambda doc, rank, asked: see(False, doc, near=Near(torch.arange(30), 4)),
    "a causal window in documents": lambda doc, rank, asked: see(True, doc, near=Near(torch.arange(30), 4)),
    "a window wider than the row": lambda doc, rank, asked: see(False, doc, near=Near(torch.arange(30), 2**40)),
}


@pytest.mark.parametrize("name", SIGHTS)
def test_few_numbers_say_what_a_mask_says(name: str) -> None:
    doc = torch.randint(-1, 4, (2, 30)).sort(1).values
    rank, asked = torch.randint(0, 30, (2, 30)), torch.randint(0, 30, (2, 7))
    sight = SIGHTS[name](doc, rank, asked)
    assert sight.reach is not None
    assert sight.mask is not None
    said = [x for x in sight.reach[:3] if x is not None]
    assert len({x.data_ptr() for x in said}) == len(said), "inputs of a program are apart"
    assert {x.dtype for x in said} == {torch.int32}
    key, low, size = sight.reach[:3]
    above = key[:, None] - low[:, :, None]
    assert torch.equal((above >= 0) & (above < (1 if size is None else size[:, :, None])), sight.mask[:, 0])


def test_few_numbers_where_they_suffice() -> None:
    """Not for windows of ranks, nor where documents and ranks do not fit together into 32 bits."""
    long = torch.zeros(1, attention.MANY_PLACES + 1, dtype=torch.long)
    assert attention.make_reach(False, long, None) is None
    near, zeros = Near(torch.arange(4), 1), torch.zeros(1, 4, dtype=torch.long)
    assert see(False, zeros, zeros, near=near).reach is None
    assert see(False, zeros, near=near).reach is not None
    most = torch.full((1, attention.MANY_PLACES), attention.MANY_PLACES - 1)
    reach = attention.make_reach(False, most, most)
    assert reach is not None
    assert reach.low.min() > 0
    assert reach.size is not None
    assert (reach.size == attention.MANY_PLACES).all()
    assert (reach.key - reach.low == attention.MANY_PLACES - 1).all()


@pytest.mark.parametrize("name", SIGHTS)
def test_all_that_is_seen_is_in_the_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of 4 places, the last one cut: each goes at least through what it sees."""
    monkeypatch.setattr(fused, "BLOCK", 4)
    doc = torch.randint(-1, 9, (2, 30)).sort(1).values
    sight = SIGHTS[name](doc, torch.randint(0, 30, (2, 30)), torch.randint(0, 30, (2, 7)))
    assert sight.mask is not None
    T, S = sight.mask.shape[2:]
    who = seen_by(None, sight.reach, 2)
    for mask_BTS, found in ((sight.mask[:, 0], who.seen), (sight.mask[:, 0].mT, who.seeing)):
        assert found is not None
        for b, mask_TS in enumerate(mask_BTS.expand(2, -1, -1)):
            for n, tile in enumerate(mask_TS.split(4)):
                sees = tile.any(0).nonzero()
                first, end, begin, stop = found[:, b, n].tolist()
                assert not len(sees) or (first <= sees.min() and sees.max() < end)
                assert begin == stop == 0 or first <= begin < stop <= end
                assert tile[:, begin:stop].all(), "there is something that it does not see"
    if name in ("documents", "a window"):
        assert who.seen is not None
        assert (who.seen[1] - who.seen[0]).sum() < 2 * T * S / 4, "less than all"


def test_tiles_that_nobody_sees_are_left_out() -> None:
    """Between which places something is seen, by documents of 100, 92 and 108 places and by a window in them."""
    doc = torch.tensor([[0] * 100 + [1] * 92 + [2] * 108])
    seen = seen_by(None, see(False, doc).reach, 1).seen
    assert seen is not None
    assert seen[:, 0].tolist() == [
        [0, 0, 64, 192, 192],
        [128, 192, 192, 300, 300],
        [0, 0, 128, 192, 192],
        [64, 0, 192, 300, 300],
    ]
    causal = seen_by(None, see(True, doc).reach, 1)
    assert causal.seen is not None
    assert causal.seeing is not None
    assert causal.seen[1, 0].tolist() == [64, 128, 192, 256, 300]
    assert causal.seeing[:2, 0].tolist() == [[0, 64, 128, 192, 256], [128, 192, 192, 300, 300]]
    narrow = seen_by(None, see(False, None, near=Near(torch.arange(300), 20)).reach, 2).seen
    assert narrow is not None
    assert narrow[:2, 1].tolist() == [[0, 0, 64, 128, 192], [128, 192, 256, 300, 300]]


def test_which_kernel() -> None:
    """Our own where it can: for dropout, a bias that learns, packed rows, another sequence. Else SDPA, or plainly."""
    packed = see(False, torch.zeros(1, 2, dtype=torch.long))
    biased = see(False, None, score=torch.zeros(1, 1, 2, 2))
    own_scores = see(False, None)._replace(score=torch.zeros(2, 1, 2, 2))
    choices: list[tuple[Any, str]] = [
        (("cuda", see(True, None), 0.1, True, False, True), "fused"),
        (("cuda", see(True, None), 0.1, False, False, True), "sdpa"),
        (("cuda", see(True, None), 0.0, True, False, True), "sdpa"),
        (("cuda", see(True, None), 0.1, True, False, False), "sdpa"),
        (("cuda", biased, 0.0, True, False, True), "fused"),
        (("cuda", packed, 0.0, True, False, True), "fused"),
        (("cuda", packed, 0.0, False, False, True), "sdpa"),
        (("cuda", packed._replace(reach=None), 0.0, True, False, True), "sdpa"),
        (("cuda", see(False, None), 0.0, True, False, True), "sdpa"),
        (("cuda", see(False, None), 0.0, True, False, True, True), "fused"),
        (("cuda", see(False, None), 0.0, False, False, True, True), "sdpa"),
        (("cuda", biased, 0.0, True, False, False), "sdpa"),
        (("cuda", own_scores, 0.0, True, False, False), "plain"),
        (("cuda", own_scores, 0.0, False, False, False), "sdpa"),
        (("cuda", Sight(), 0.0, True, True, False), "fused"),
        (("cuda", biased, 0.0, True, True, False), "sdpa"),
        (("cuda", Sight(seen=[]), 0.1, True, True, True), "plain"),
        (("cpu", Sight(), 0.1, False, False, False), "plain"),
        (("cpu", Sight(), 0.1, True, False, False), "sdpa"),
        (("cpu", Sight(), 0.0, False, False, False), "sdpa"),
    ]
    for given, wanted in choices:
        assert attention.kernel(*given) == wanted, given


def test_which_heads_fit_into_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the memory for a program's tiles: 227 KB on an H100 or H200, 163 on an A100, 99 on an RTX 4090, 63 on a T4."""

    def fits(kilobytes: int, d: int, size: int) -> bool:
        monkeypatch.setattr(tiles, "shared_memory", lambda device: kilobytes * 1024)
        query = SimpleNamespace(shape=(1, 1, 1, d), device=torch.device("cuda", 0), element_size=lambda: size)
        return tiles.can_fuse(query)  # type: ignore[arg-type]

    monkeypatch.setattr(tiles, "triton", object())
    assert [fits(227, d, 2) for d in (8, 16, 64, 96, 128, 136)] == [False, True, True, True, True, False]
    assert [fits(227, d, 4) for d in (64, 80, 128)] == [True, False, False]
    assert [fits(163, d, 2) for d in (64, 128)] == [True, True]
    assert [fits(99, d, 2) for d in (64, 128)] == [True, False]
    assert [fits(63, d, 2) for d in (16, 32)] == [True, False]


def test_what_our_kernel_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "can_fuse", lambda q: True)
    q, k = torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16), torch.zeros(2, 4, 6, 16, dtype=torch.bfloat16)
    bias = torch.zeros(1, 4, 6, 6)
    biased, causal = see(False, None, score=bias), see(True, None)
    assert attention.can_do(q, k, Sight())
    assert attention.can_do(q, k, biased)
    assert attention.can_do(q, k, causal)
    assert not attention.can_do(q.float(), k.float(), Sight())
    assert attention.can_do(q, k[:, :2], Sight()), "heads that share keys"
    assert not attention.can_do(q[:, :, :3], k, causal), "who asks begins later"
    assert not attention.can_do(q, k, attention.add_score(biased, bias.expand(2, -1, -1, -1))), "scores of each row"
    assert not attention.can_do(q, k, Sight(keep=lambda k, v: (k, v)))
    assert not attention.can_do(q, k, Sight(own=False)), "a switch"
    learns = see(False, None, score=bias.clone().requires_grad_())
    with deterministic(True):
        assert not attention.can_do(q, k, learns)
        assert attention.can_do(q, k, biased)
        assert attention.can_do(q, k, causal)


def test_score_is_closed_where_nothing_is_seen() -> None:
    score = torch.arange(4.0).view(1, 1, 2, 2)
    inf = math.inf
    assert see(True, None, score=score).score.tolist() == [[[[0, -inf], [2, 3]]]]  # type: ignore[union-attr]
    assert see(False, None, score=score).score is score
    apart = see(False, torch.tensor([[0, 1]]), score=score).score
    assert apart.tolist() == [[[[0, -inf], [-inf, 3]]]]  # type: ignore[union-attr]


def test_attention_by_hand() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind()
    doc = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, -1]])
    score = torch.randn(1, 4, 5, 5)
    weights = q @ k.transpose(-1, -2) * 0.3 + score
    allowed = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    wanted = weights.masked_fill(~allowed, -math.inf).softmax(-1) @ v
    assert_close(attend(q, k, v, see(True, doc, score=score), dropout=0.0, scale=0.3), wanted)


def test_cross_attention_with_itself_is_self_attention() -> None:
    for config in (bert(1, 32, 4, 10), t5(1, 32, 4, 48, 10, head_dim=6)):
        attention = Attention(config).eval()
        x = torch.randn(2, 5, 32)
        assert_close(attention(x, Sight(), x), attention(x, Sight()))


def test_one_who_sees_nobody_gets_nothing_and_breaks_nothing() -> None:
    """A padded place of a decoder whose encoder has no padding."""
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    sight = see(False, torch.tensor([[0, 0, -1]]), read_doc=torch.tensor([[0, 0, 0]]))
    y = attend(q, k, v, sight, 0.0, 1.0)
    y.sum().backward()
    assert y[0, :, 2].abs().max() == 0
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v))  # type: ignore[union-attr]


DOC, READ = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 0, 0, -2]])  # two of DOC find nothing to read in READ


@pytest.mark.parametrize("case", ["all", "causal", "documents", "causal documents", "read", "score", "causal score"])
def test_with_dropout_it_is_the_same_attention(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of the path for dropout, with nothing dropped, against SDPA."""
    score = torch.randn(1, 2, 4, 4, requires_grad=True)
    sight = see(
        causal="causal" in case,
        doc=None if case in ("all", "causal") else DOC,
        read_doc=READ if case == "read" else None,
        score=score if "score" in case else None,
    )
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))

    def value_and_gradients(dropout: float) -> list[Tensor | None]:
        y = attend(q, k, v, sight, dropout, 0.3)
        return [y, *torch.autograd.grad(y.square().sum(), (q, k, v, score), retain_graph=True, allow_unused=True)]

    wanted = value_and_gradients(0.0)
    monkeypatch.setattr(attention, "drop", lambda x, rate: x)
    for mine, theirs in zip(value_and_gradients(0.1), wanted, strict=True):
        assert_close(mine, theirs)


def test_dropout_drops_weights() -> None:
    """Four places with equal scores and v = 1: what remains of four weights of 1/4, each times 0 or 2."""
    q, k, v = torch.zeros(1, 1, 1000, 8), torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 1)
    y = attend(q, k, v, Sight(), dropout=0.5, scale=1.0)
    assert set(y.flatten().tolist()) == {0.0, 0.5, 1.0, 1.5, 2.0}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_shared_keys_are_repeated_keys(kv_heads: int, masked: bool) -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, kv_heads, 6, 8), torch.randn(2, kv_heads, 6, 8)
    sight = see(True, torch.tensor([[0, 0, 1, 1, 1, -1]]).expand(2, 6) if masked else None)
    times = 4 // kv_heads
    wanted = attend(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), sight, 0.0, 0.3)
    assert_close(attend(q, k, v, sight, 0.0, 0.3), wanted)
    assert_close(attention.plain(q, k, v, sight, 0.0, 0.3), wanted)


def test_weights_can_be_seen() -> None:
    seen: list[Tensor] = []
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    sight = see(True, None)
    y = attend(q, k, v, sight._replace(seen=seen), 0.0, 0.5)
    assert_close(y, attend(q, k, v, sight, 0.0, 0.5))
    (weights,) = seen
    assert_close(weights @ v, y)
    assert_close(weights.sum(-1), torch.ones(2, 2, 5))
    assert (weights.triu(1) == 0).all()


def test_scores_of_a_layer_are_added_under_any_sight() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    more, doc = torch.randn(2, 2, 5, 5), torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    static = torch.randn(1, 2, 5, 5)
    scores = q @ k.mT * 0.5 + more
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    same = (doc[:, :, None] == doc[:, None, :])[:, None]
    cases = {
        "nothing": (see(False, None), scores),
        "causal": (see(True, None), scores.masked_fill(~lower, -math.inf)),
        "documents": (see(False, doc), scores.masked_fill(~same, -math.inf)),
        "both": (see(True, doc, score=static), (scores + static).masked_fill(~(same & lower), -math.inf)),
    }
    for name, (sight, wanted) in cases.items():
        found = attend(q, k, v, attention.add_score(sight, more), 0.0, 0.5)
        assert_close(found, wanted.softmax(-1) @ v, msg=name)


def test_tiles_that_see_all() -> None:
    """What kernels are told of tiles of 64 places, against a mask of all places."""
    torch.manual_seed(0)
    T, N = 320, 5
    doc = torch.zeros(6, T, dtype=torch.long)
    doc[1, 64:], doc[2, 100:], doc[2, 256:], doc[3, 7], doc[4, 300:], doc[5] = 1, 1, 2, -1, -1, torch.arange(T)
    rank, near = torch.randint(0, 3, (6, T)), Near(torch.arange(T), 40)
    sights = see(False, doc), see(True, doc), see(False, doc, near=near), see(False, doc, rank), see(False, None, rank)
    for sight in sights:
        assert sight.reach is not None
        assert sight.mask is not None
        reach, mask = in_tiles(sight.reach), sight.mask[:, 0].expand(6, T, T).view(6, N, 64, N, 64)
        whole = mask.all(4).all(2)
        for found, sees in ((reach.seen, whole), (reach.seeing, whole.mT)):
            assert found is not None
            at = torch.arange(N) * 64
            told = (at >= found[2][:, :, None]) & (at < found[3][:, :, None])
            assert not (told & ~sees).any(), "something that is not seen is taken for seen"
            if sight.reach.size is None:
                assert told[[0, 1, 2, 4]].equal(sees[[0, 1, 2, 4]]), "documents that stand together have all"
    documents = in_tiles(sights[0].reach) if sights[0].reach is not None else None
    assert documents is not None
    assert documents.seen is not None
    assert documents.seen[2:, 0].tolist() == [[0] * N, [T] * N]
    assert documents.seen[2:, 3].tolist() == [[0, *[64] * 4], [0, *[T] * 4]], "a hole in the first tile"
