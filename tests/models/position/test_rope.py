"""RoPE by hand and against `transformers`; and every position encoding in architectures that it was not made for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from firth.models import ModelConfig, make_model
from firth.models.config import ALiBi, NoPosition, RopeScaling, Rotary, Shaw, SlidingWindow, T5Bias
from firth.models.position.rope import Rope, rope_frequencies
from firth.models.presets import bert, gpt2, t5


def test_a_rotation_by_hand() -> None:
    """Head size 2 is one pair: position 3 at one radian per position is a rotation by three radians."""
    x, rope = torch.tensor([1.0, 0.0]).repeat(1, 4, 2), Rope(torch.arange(4)[None], torch.tensor([1.0]))
    rotated = [math.cos(3), math.sin(3)]
    assert_close(rope(x)[0, 3], torch.tensor([*rotated, *rotated]))
    assert_close(rope(x, num_heads=1)[0, 3], torch.tensor([*rotated, 1.0, 0.0]))


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 6, 8).unbind()
    frequencies = rope_frequencies(10000.0, 8, None, torch.device("cpu"))
    near, far = Rope(torch.arange(6)[None], frequencies), Rope(torch.arange(100, 106)[None], frequencies)
    assert_close(near(q) @ near(k).mT, far(q) @ far(k).mT, atol=1e-4, rtol=1e-4)


def test_a_compiled_graph_computes_its_cosines_once() -> None:
    """Layers share the table. Without an op of its own, the compiler would compute it in each of them."""
    x, frequencies, targets = torch.randn(2, 6, 16), rope_frequencies(10000.0, 8, None, torch.device("cpu")), []

    def layers(x: Tensor) -> Tensor:
        rope = Rope(torch.arange(6)[None], frequencies)
        return rope(rope(x))

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    assert_close(torch.compile(layers, backend=compiler)(x), layers(x))
    assert [name for name in targets if "cos" in name] == ["firth.cos_and_sin.default"]


@pytest.mark.parametrize("length", [512, 8192])
def test_scaled_frequencies_are_those_of_transformers(length: int) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
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
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    scaling = RopeScaling(32.0, 1.0, 4.0, length)
    assert_close(rope_frequencies(500000.0, 64, scaling, torch.device("cpu")), theirs)


MIXTURES: dict[str, ModelConfig] = {
    "bert with rotary": bert(2, 32, 4, 40, position=Rotary()),
    "bert with alibi": bert(2, 32, 4, 40, position=ALiBi()),
    "bert with shaw": bert(2, 32, 4, 40, position=Shaw(3)),
    "bert with t5 bias": bert(2, 32, 4, 40, position=T5Bias(8, 16)),
    "gpt with t5 bias": gpt2(2, 32, 4, 40, position=T5Bias(8, 16)),
    "gpt with rotary and grouped queries": gpt2(2, 32, 4, 40, position=Rotary(), num_kv_heads=2),
    "gpt with one key and shaw": gpt2(2, 32, 4, 40, position=Shaw(3), num_kv_heads=1),
    "gpt without positions": gpt2(2, 32, 4, 40, position=NoPosition()),
    "gpt with a window": gpt2(3, 32, 4, 40, position=Rotary(local_theta=100.0), window=SlidingWindow(4, 2)),
    "bert with a window": bert(3, 32, 4, 40, position=Rotary(), window=SlidingWindow(4, 2)),
    "t5 with rotary": t5(2, 32, 4, 64, 40, position=Rotary()),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_any_mixture_trains_and_packed_documents_are_independent(name: str) -> None:
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


def test_a_window_hides_far_keys_in_its_layers_only() -> None:
    """A far token passes through a global layer followed by a local one, but not through a local layer alone."""
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
