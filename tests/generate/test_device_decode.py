"""Decoding with all state on the device: the same sequences as token by token, whatever the slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from generate.ends import ending_with
from generate.test_loop import PROMPTS, any_decoder
from torch import Tensor

from firth.commands import generate as commands
from firth.generate import GeneratedSequence, GenerationConfig, device_decode, generate_sequences, loop, stream_text
from firth.generate.cuda_graph import restored
from firth.generate.device_decode import DeviceDecode, DeviceScheduler, kept_decodes, supports_device_decode
from firth.models import Model, ModelConfig
from firth.models.config import ALiBi, LearnedPosition, LoRAConfig, RMSNormConfig, Rotary, Shaw, SlidingWindow, T5Bias
from firth.models.lora import add_lora
from firth.models.presets import bart, gpt, gpt2, llama, t5, t5_v1_1, t5gemma

MODELS: dict[str, ModelConfig] = {
    "gpt, post-norm": gpt(2, 32, 2, 400),
    "gpt2": gpt2(2, 32, 2, 400, position=LearnedPosition(48)),
    "llama, grouped": llama(2, 64, 4, 48, 400, num_kv_heads=2),
    "alibi": any_decoder(ALiBi(), num_heads=2),
    "windows": any_decoder(Rotary(local_theta=100.0), num_heads=2, window=SlidingWindow(4, 2)),
    "windows and buckets": any_decoder(
        T5Bias(8, 10), num_heads=2, window=SlidingWindow(4, 2), norm=RMSNormConfig(1e-5)
    ),
    "shared layers": any_decoder(Rotary(), num_heads=2, num_shared=2),
    "t5": t5(2, 32, 2, 48, 400),
    "t5.1.1": t5_v1_1(2, 32, 2, 48, 400),
    "bart": bart(2, 32, 2, 400, num_decoder_layers=3),
    "t5gemma": t5gemma(2, 32, 2, 48, 400, num_decoder_layers=3),
    "norms of outputs": llama(2, 32, 2, 48, 400, norm_outputs=True, family="firth"),
}


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[GeneratedSequence]]:
    """Decode in `slots` slots, by the state on the device, whatever the device is."""

    def generate(model: Model, prompts: Sequence[list[int]], slots: int = 64, **settings: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(loop, "can_decode_on_device", lambda model, config: True)
            patch.setattr(device_decode, "MAX_SLOTS", slots)
            return generate_sequences(model, prompts, GenerationConfig(**settings))

    return generate


def assert_same(found: Sequence[GeneratedSequence], wanted: Sequence[GeneratedSequence]) -> None:
    assert [(s.tokens, s.finished) for s in found] == [(s.tokens, s.finished) for s in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.score == pytest.approx(theirs.score, abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tokens(name: str, untrained: Any, on_device: Any) -> None:
    model = untrained(MODELS[name])
    assert supports_device_decode(model)
    sampled = dict(temperature=1.0, top_k=50, top_p=0.9, seed=3, num_return_sequences=2)
    for slots, settings in ((64, dict()), (3, sampled)):  # with 3 slots, prompts wait for a free one
        wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=18, **settings))
        assert_same(on_device(model, PROMPTS, slots, max_new_tokens=18, **settings), wanted)


@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.5),
        dict(min_new_tokens=12),
        dict(temperature=0.7, min_p=0.05, repetition_penalty=1.2, seed=7),
        dict(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01, min_new_tokens=12, seed=8),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_the_same_constraints(name: str, settings: dict[str, Any], untrained: Any, on_device: Any) -> None:
    model = untrained(MODELS[name], 1)
    wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=20, **settings))
    assert_same(on_device(model, PROMPTS, 2, max_new_tokens=20, **settings), wanted)


@pytest.mark.parametrize(
    "settings",
    [
        dict(regex="[a-z]{2,6}( [a-z]{2,6})*"),
        dict(choices=["yes", "no", "perhaps"], temperature=1.0, seed=5),
        dict(json_schema={"type": "array", "items": {"type": "integer"}, "maxItems": 3}, temperature=1.0, min_p=0.01),
        dict(regex="a+", repetition_penalty=1.5, min_new_tokens=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_the_same_structured_texts(name: str, settings: dict[str, Any], untrained: Any, on_device: Any) -> None:
    """With two slots, a text starts its grammar while another one is in the middle."""
    model = untrained(MODELS[name], 2)
    wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=20, **settings))
    for slots in (2, 64):
        assert_same(on_device(model, PROMPTS, slots, max_new_tokens=20, **settings), wanted)


@pytest.mark.parametrize("temperature", [1e-320, 1e-38, 1e-10])
def test_a_tiny_temperature_is_greedy(temperature: float, untrained: Any, on_device: Any) -> None:
    model, settings = untrained(MODELS["gpt2"], 2), dict(regex="[a-z]{2,6}( [a-z]{2,6})*", max_new_tokens=8)
    greedy = generate_sequences(model, PROMPTS, GenerationConfig(**settings))
    settings |= dict(temperature=temperature, top_p=0.9)
    assert_same(generate_sequences(model, PROMPTS, GenerationConfig(**settings)), greedy)
    assert_same(on_device(model, PROMPTS, 2, **settings), greedy)


def test_eos_and_budgets_end_sequences(untrained: Any, on_device: Any) -> None:
    """Sequences of different lengths, in fewer slots than sequences."""
    model = untrained(MODELS["llama, grouped"], 2)
    prompts = [[4, i, i + 1, *range(i % 5)] for i in range(40, 52)]
    settings = dict(temperature=1.0, max_new_tokens=24, seed=1)
    free = generate_sequences(model, prompts, GenerationConfig(**settings))
    ((end, _),) = Counter(token for s in free for token in s.tokens).most_common(1)
    model = ending_with(model, end)
    wanted = generate_sequences(model, prompts, GenerationConfig(**settings))
    assert {s.finished for s in wanted} == {True, False}
    assert len({len(s.tokens) for s in wanted}) > 2
    for slots in (1, 4):
        assert_same(on_device(model, prompts, slots, **settings), wanted)


def test_the_cache_grows(untrained: Any, on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained(MODELS["llama, grouped"])
    wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=70, min_new_tokens=70))
    monkeypatch.setattr(device_decode, "INITIAL_NEW_TOKENS", 8)
    assert_same(on_device(model, PROMPTS, max_new_tokens=70, min_new_tokens=70), wanted)
    assert kept_decodes[model].fused.capacity == 128


def test_slots_are_used_again(untrained: Any, on_device: Any) -> None:
    model = untrained(MODELS["t5"])
    first = on_device(model, PROMPTS, max_new_tokens=20)
    kept = kept_decodes[model]
    assert_same(on_device(model, PROMPTS[::-1], max_new_tokens=20), first[::-1])
    assert kept_decodes[model] is kept
    on_device(model, PROMPTS, max_new_tokens=2, temperature=1.0)
    assert kept_decodes[model] is not kept
    kept = kept_decodes[model]
    on_device(model, PROMPTS[1:], max_new_tokens=2, temperature=1.0)
    assert kept_decodes[model] is not kept


def test_stop_strings(untrained: Any, on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained(MODELS["gpt2"], 3)
    free = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=30))
    token = free[0].tokens[9]

    def stop_fn(prompt: int, ids: Sequence[int]) -> bool:
        return token in ids

    wanted = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=30), stop_fn=stop_fn)
    monkeypatch.setattr(loop, "can_decode_on_device", lambda model, config: True)
    monkeypatch.setattr(device_decode, "MAX_SLOTS", 3)
    found = generate_sequences(model, PROMPTS, GenerationConfig(max_new_tokens=30), stop_fn=stop_fn)
    assert len(found[0].tokens) <= 10
    assert_same(found, wanted)


def test_a_captured_step_starts_from_the_same_state(
    untrained: Any, on_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture runs the step, and must leave no trace. Here the graph is the step itself."""
    model = untrained(MODELS["bart"])
    settings = dict(max_new_tokens=18, temperature=1.0, repetition_penalty=1.2)
    wanted = on_device(model, PROMPTS, **settings)

    def capture(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
        with restored(state):
            step()
            step()
        return step

    captured = []
    monkeypatch.setattr(device_decode, "capture_graph", lambda *args: captured.append(1) or capture(*args))
    monkeypatch.setattr(DeviceScheduler, "use_graph", True, raising=False)
    run = DeviceDecode.run
    monkeypatch.setattr(DeviceDecode, "run", lambda self, steps, use_graph: run(self, steps, True))
    kept_decodes.clear()
    assert_same(on_device(model, PROMPTS, 3, **settings), wanted)
    assert captured


def test_other_models_decode_token_by_token(untrained: Any) -> None:
    assert not supports_device_decode(untrained(any_decoder(Shaw(3), num_heads=2)))
    assert not supports_device_decode(untrained(any_decoder(Rotary(), num_heads=4)))  # heads of 8 features
    model = untrained(MODELS["gpt2"])
    add_lora(model, model.config, LoRAConfig(2))
    assert not supports_device_decode(model)


def test_a_seed_gives_the_same_texts_at_any_batch_size(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained("gpt2")
    prompts = ["Water is", "The", "Water is", "A long prompt of more tokens", "The"]
    settings = dict(max_new_tokens=8, temperature=1.0, num_return_sequences=2, seed=4)
    texts = []
    for size in (2, 6, 64):
        monkeypatch.setattr(commands, "MAX_CONCURRENT_SEQUENCES", size)
        texts.append([(r["prompt"], r["text"]) for r in commands.generate_in_batches(model, prompts, settings)])
    assert texts[0] == texts[1] == texts[2]
    assert len(set(texts[0])) == 10
    monkeypatch.setattr(loop, "can_decode_on_device", lambda model, config: True)
    monkeypatch.setattr(device_decode, "MAX_SLOTS", 3)
    assert [(r["prompt"], r["text"]) for r in commands.generate_in_batches(model, prompts, settings)] == texts[0]


def test_a_stream_is_the_same_text(untrained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained("gpt2")
    for settings in (dict(), dict(stop=("e",)), dict(temperature=1.0, seed=5)):
        wanted = "".join(stream_text(model, "Water is", max_new_tokens=15, **settings))
        with monkeypatch.context() as patch:
            patch.setattr(loop, "can_decode_on_device", lambda model, config: True)
            pieces = list(stream_text(model, "Water is", max_new_tokens=15, **settings))
        assert "".join(pieces) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_generates_the_same(name: str, untrained: Any) -> None:
    """Triton kernels in a CUDA graph against modules on the CPU, in float32."""
    model = untrained(MODELS[name])
    for settings in (dict(), dict(temperature=1.0, top_k=50, seed=3, num_return_sequences=2)):
        config = GenerationConfig(max_new_tokens=40, **settings)
        wanted = [generate_sequences(model.cpu(), prompts, config) for prompts in (PROMPTS, PROMPTS[:1])]
        model.cuda()
        for _ in range(2):  # the second call uses the kept slots
            for prompts, sequences in zip((PROMPTS, PROMPTS[:1]), wanted, strict=True):
                assert_same(generate_sequences(model, prompts, config), sequences)
    assert kept_decodes[model].graph is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "t5"])
def test_a_gpu_writes_the_same_structured_texts(name: str, untrained: Any) -> None:
    """Two graphs and a mask of the host per step against token by token on the CPU."""
    model = untrained(MODELS[name])
    for settings in (dict(regex="[a-z]{2,6}( [a-z]{2,6})*"), dict(choices=["yes", "no"], temperature=1.0, seed=3)):
        config = GenerationConfig(max_new_tokens=40, **settings)
        wanted = generate_sequences(model.cpu(), PROMPTS, config)
        model.cuda()
        for _ in range(2):  # the second call uses the kept slots
            assert_same(generate_sequences(model, PROMPTS, config), wanted)
        assert kept_decodes[model].graph is not None
