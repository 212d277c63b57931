"""Places by buckets, slopes, turns and vectors: by hand, and against what `transformers` computes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import ModelConfig, make_model
from firth.models.attention import AttentionSpec
from firth.models.config import ALiBi, NoPosition, RopeScaling, Rotary, Shaw, SlidingWindow, T5Bias
from firth.models.position.relative_attention import ShawScore
from firth.models.position.rope import (
    AlibiBias,
    Rope,
    T5BiasTable,
    alibi_slopes,
    rel_shift,
    rope_frequencies,
    t5_bucket,
)
from firth.models.presets import bert, gpt2, t5


def test_buckets_of_what_came_before() -> None:
    """8 buckets up to 16 away: 0 to 3 have one each, then 4-5, 6-7, 8-11, 12 and beyond."""
    back = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 15, 16, 1000])
    wanted = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
    assert t5_bucket(-back, num_buckets=8, max_distance=16, is_bidirectional=False).tolist() == wanted


def test_what_comes_after_counts_as_here_where_nobody_sees_it() -> None:
    assert t5_bucket(torch.tensor([1, 5, 100]), num_buckets=8, max_distance=16, is_bidirectional=False).tolist() == [
        0,
        0,
        0,
    ]


def test_buckets_both_ways() -> None:
    """Half of the 8 buckets for each side: 0, 1, then 2-5 and 6 and beyond share; after is 4 more."""
    distance = torch.tensor([-100, -6, -5, -2, -1, 0, 1, 2, 5, 6, 100])
    wanted = [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]
    assert t5_bucket(distance, num_buckets=8, max_distance=16, is_bidirectional=True).tolist() == wanted


def test_score_of_each_head() -> None:
    score = T5BiasTable(T5Bias(4, 8), num_heads=2, is_bidirectional=False)
    score.table.weight.data = torch.tensor([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0], [3.0, 103.0]])
    first, second = score(3, 3)[0]
    assert first.tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0]]
    assert (second - first).unique().tolist() == [100]


def test_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert len(alibi_slopes(12)) == 12
    assert alibi_slopes(12)[:8] == alibi_slopes(8)
    assert alibi_slopes(12)[8:] == alibi_slopes(16)[0:8:2]


def test_slopes_by_hand() -> None:
    score = AlibiBias(2)(3, 3)[0]
    assert score[0].tolist() == [[-0.0, -0.0625, -0.125], [-0.0625, -0.0, -0.0625], [-0.125, -0.0625, -0.0]]
    assert score[1, 0, 2].item() == -2 * 2**-8


def test_a_turn_by_hand() -> None:
    """Two numbers make one pair: place 3 at one radian a place is a turn by three radians."""
    x, turn = torch.tensor([1.0, 0.0]).repeat(1, 4, 2), Rope(torch.arange(4)[None], torch.tensor([1.0]))
    there = [math.cos(3), math.sin(3)]
    assert_close(turn(x)[0, 3], torch.tensor([*there, *there]))
    assert_close(turn(x, num_heads=1)[0, 3], torch.tensor([*there, 1.0, 0.0]))


def test_only_the_distance_counts_between_turned_vectors() -> None:
    q, k = torch.randn(2, 1, 6, 8).unbind()
    turns = rope_frequencies(10000.0, 8, None, torch.device("cpu"))
    near, far = Rope(torch.arange(6)[None], turns), Rope(torch.arange(100, 106)[None], turns)
    assert_close(near(q) @ near(k).mT, far(q) @ far(k).mT, atol=1e-4, rtol=1e-4)


def test_a_program_computes_its_cosines_once() -> None:
    """Layers share the table: were it no operation of its own, each of them would compute it again."""
    x, turns, calls = torch.randn(2, 6, 16), rope_frequencies(10000.0, 8, None, torch.device("cpu")), []

    def layers(x: Tensor) -> Tensor:
        turn = Rope(torch.arange(6)[None], turns)
        return turn(turn(x))

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    assert_close(torch.compile(layers, backend=compiler)(x), layers(x))
    assert [name for name in calls if "cos" in name] == ["firth.cos_and_sin.default"]


@pytest.mark.parametrize("length", [512, 8192])
def test_stretched_turns_are_those_of_transformers(length: int) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": length,
    }
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=parameters)
    theirs, _ = rope.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    stretch = RopeScaling(32.0, 1.0, 4.0, length)
    assert_close(rope_frequencies(500000.0, 64, stretch, torch.device("cpu")), theirs)


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 4), (4, 4), (3, 7), (5, 2)])
def test_skew(T: int, S: int) -> None:
    """The number of each distance is the distance itself."""
    x = torch.arange(1 - T, S).expand(2, 3, T, T + S - 1)
    assert (rel_shift(x, S) == torch.arange(S)[None, :] - torch.arange(T)[:, None]).all()


def test_shaw_by_hand() -> None:
    config = bert(1, 8, 2, 20, position=Shaw(2))
    score = ShawScore(config, Shaw(2))
    q, k = torch.randn(2, 2, 2, 5, 4).unbind()
    found = score(q, k, AttentionSpec(), None).to_dense(5)
    for i in range(5):
        for j in range(5):
            vector = score.vectors.weight[max(-2, min(2, j - i)) + 2]
            assert_close(found[:, :, i, j], q[:, :, i] @ vector)


MIXTURES: dict[str, ModelConfig] = {
    "bert with rotary": bert(2, 32, 4, 40, position=Rotary()),
    "bert with slopes": bert(2, 32, 4, 40, position=ALiBi()),
    "bert with shaw": bert(2, 32, 4, 40, position=Shaw(3)),
    "bert with buckets": bert(2, 32, 4, 40, position=T5Bias(8, 16)),
    "gpt with buckets": gpt2(2, 32, 4, 40, position=T5Bias(8, 16)),
    "gpt with rotary and shared keys": gpt2(2, 32, 4, 40, position=Rotary(), num_kv_heads=2),
    "gpt with one key and shaw": gpt2(2, 32, 4, 40, position=Shaw(3), num_kv_heads=1),
    "gpt without places": gpt2(2, 32, 4, 40, position=NoPosition()),
    "gpt with a window": gpt2(3, 32, 4, 40, position=Rotary(local_theta=100.0), window=SlidingWindow(4, 2)),
    "bert with a window": bert(3, 32, 4, 40, position=Rotary(), window=SlidingWindow(4, 2)),
    "t5 with rotary": t5(2, 32, 4, 64, 40, position=Rotary()),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_any_mixture_trains_and_documents_of_a_row_are_apart(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(replace(MIXTURES[name], dropout=0.0, attention_dropout=0.0))
    tokens, doc = torch.randint(5, 40, (2, 12)), torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [-1] * 3])
    position = torch.tensor([[*range(5), *range(7)], [*range(9), 0, 0, 0]])
    extra = {"decoder_input_ids": tokens[:, :6]} if model.config.architecture == "encoder-decoder" else {}

    def states(tokens: Tensor, doc: Tensor | None, position: Tensor | None) -> Tensor:
        stack = model.encoder if extra else model.stack  # type: ignore[union-attr]
        return stack(model.embed(tokens, position), doc)  # type: ignore[operator]

    packed = states(tokens, doc, position)
    assert_close(packed[:1, :5], states(tokens[:1, :5], None, None), atol=1e-5, rtol=1e-4)
    assert_close(packed[:1, 5:], states(tokens[:1, 5:], None, None), atol=1e-5, rtol=1e-4)
    assert_close(packed[1:, :9], states(tokens[1:, :9], None, None), atol=1e-5, rtol=1e-4)

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=extra.get("decoder_input_ids", tokens), **extra).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_window_hides_what_is_far_in_its_layers_only() -> None:
    """With one wide layer first and a narrow one after, a far token still comes through; with narrow ones alone not."""
    torch.manual_seed(0)
    base = bert(2, 16, 2, 30, position=Rotary(), window=SlidingWindow(4, 2), dropout=0.0, attention_dropout=0.0)
    tokens = torch.randint(0, 30, (1, 12))
    other = tokens.clone()
    other[0, 11] = (other[0, 11] + 1) % 30

    def differs(config: ModelConfig) -> list[bool]:
        model = make_model(config).eval()
        changed = model(tokens).logits - model(other).logits
        return [bool(x > 1e-7) for x in changed[0].abs().amax(-1)]

    assert all(differs(base))
    stack = make_model(replace(base, num_layers=1)).eval().stack  # type: ignore[union-attr]
    stack.is_local_layer = lambda layer: True  # type: ignore[assignment, method-assign, operator, union-attr]
    x = torch.randn(1, 12, 16)
    y = x.clone()
    y[0, 11] += 1
    changed = (stack(x, None) - stack(y, None))[0].abs().amax(-1) > 1e-7  # type: ignore[operator]
    assert changed.tolist() == [False] * 9 + [True] * 3
