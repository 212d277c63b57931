"""Models with FP8 linear layers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models.fp8.test_linear import DEVICES, far
from torch import Tensor, nn
from torch.testing import assert_close

from firth.core.errors import UserError
from firth.models import make_model
from firth.models.config import MLPConfig
from firth.models.fp8 import linear
from firth.models.fp8.convert import convert_to_fp8
from firth.models.fp8.linear import Float8Linear
from firth.models.fp8.weight_cache import cache_fp8_weights
from firth.models.presets import bart, bert, deberta, gpt2, llama, t5, t5_v1_1
from firth.objectives.batch import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun
from firth.train.optim import make_optimizer
from firth.train.recipe import EngineConfig
from firth.train.step import build_step_runner, train_step

CPU = torch.device("cpu")


def test_only_training_uses_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """All linear layers of the blocks except those whose width is not a multiple of 16; evaluation is exact."""
    torch.manual_seed(0)
    model = make_model(bert(2, 32, 2, 100, mlp=MLPConfig(72, "gelu"), dropout=0.0, attention_dropout=0.0)).eval()
    reference = copy.deepcopy(model)
    convert_to_fp8(model, CPU)
    kinds = {name: type(layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert {name.rpartition(".")[2] for name, kind in kinds.items() if kind is Float8Linear} == {"qkv", "out"}
    assert "4 layers stay out of FP8" in " ".join(capsys.readouterr().err.split())
    tokens = torch.randint(5, 100, (4, 16))
    assert_close(model(tokens).logits, reference(tokens).logits, rtol=0, atol=0)
    found = model.train()(tokens).logits
    assert 0 < far(found.detach(), reference.train()(tokens).logits.detach()) < 0.2
    odd = torch.randint(5, 100, (1, 15))  # not a multiple of 16 positions either
    assert_close(model(odd).logits, reference(odd).logits, rtol=0, atol=0)


MODELS = {
    "bert": bert(2, 32, 2, 50),
    "gpt2": gpt2(2, 32, 2, vocab_size=50),
    "llama": llama(2, 32, 2, 48, vocab_size=50),
    "t5": t5_v1_1(2, 32, 2, 48, vocab_size=50),
    "relu": t5(2, 32, 2, 48, vocab_size=50),
    "bart": bart(2, 32, 2, vocab_size=50),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_every_block_matmul_is_fp8(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; gradients equal those of the exact model up to FP8 rounding."""
    config = replace(MODELS[name], dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(3)
    model = make_model(config).train().to(device)
    reference = copy.deepcopy(model)
    tokens = torch.randint(5, 50, (4, 16), device=device)
    batch = Batch(tokens, labels=tokens.roll(-1, 1))
    if config.architecture == "encoder":
        batch = Batch(tokens, target_positions=torch.arange(16, device=device).expand(4, 16), labels=tokens)
    if config.architecture == "encoder-decoder":
        batch = batch._replace(decoder_input_ids=tokens)
    convert_to_fp8(model, torch.device(device))
    calls, product = [], linear.scaled_matmul
    monkeypatch.setattr(linear, "scaled_matmul", lambda *given: calls.append(given) or product(*given))

    def gradients(model: nn.Module) -> dict[str, Tensor]:
        with cache_fp8_weights(model):
            sum(model.losses(batch).values()).backward()  # type: ignore[operator]
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    found, wanted = gradients(model), gradients(reference)
    layers = sum(isinstance(layer, Float8Linear) for layer in model.modules())
    crossing = sum(name.endswith("cross.qkv") for name, _ in model.named_modules())  # queries; keys and values
    assert len(calls) == 2 * (layers + crossing)
    assert found.keys() == wanted.keys()
    limit = 0.3 if name in ("t5", "relu") else 0.1  # before T5 has learned, its scores are large
    assert far(*(torch.cat([grads[key].flatten() for key in wanted]) for grads in (found, wanted))) < limit


@pytest.mark.parametrize("fields", [{}, {"engine": EngineConfig(weights="bf16")}])
def test_weights_are_quantized_once_per_step(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model, or by its bf16 replica after a copy of the weights."""
    torch.manual_seed(0)
    model, settings = make_model(MODELS["bert"]), TrainingConfig(fp8=True, learning_rate=0.1, **fields)
    run = TrainingRun(settings, ComputeConfig(CPU, bf16=False, compile=False), model, lambda step: [])
    runner, optimizer, seen = build_step_runner(run), make_optimizer(model, settings), list[Tensor]()
    tokens = np.random.default_rng(0).integers(5, 50, (4, 16))
    batch = Batch(tokens, target_positions=np.tile(np.arange(4), (4, 1)), labels=tokens[:, :4])
    part = Float8Linear.forward_rows

    def watched(layer: Float8Linear, *given: Any, **more: Any) -> Tensor:
        assert layer.fp8_cache is not None
        w = layer.weight.detach().float().clone()
        assert far(layer.fp8_cache.data.float() * layer.fp8_cache.scale[:, None], w) < 0.05
        seen.append(w)
        return part(layer, *given, **more)

    monkeypatch.setattr(Float8Linear, "forward_rows", watched)
    for step in range(2):
        train_step(run, runner, optimizer, [batch], step, 0.1)
    assert not torch.equal(seen[0], seen[len(seen) // 2]), "the second step has other weights"


def test_mlp_dropout_is_applied() -> None:
    model = make_model(replace(MODELS["t5"], dropout=0.5))
    convert_to_fp8(model, CPU)
    mlp = model.encoder.blocks[0].mlp
    x = torch.randn(16, 32)
    assert not torch.equal(mlp.train()(x), mlp(x))
    mlp.drop.p = 0.0
    assert torch.equal(mlp(x), mlp(x))


@pytest.mark.parametrize(("name", "shape"), [("deberta", (4, 16)), ("t5", (1, 24)), ("bart", (2, 24))])
def test_with_float32_activations(name: str, shape: tuple[int, int]) -> None:
    """Matmuls whose rows are not a multiple of 16 stay exact and mix with FP8 ones."""
    config = deberta(2, 32, 2, vocab_size=50) if name == "deberta" else MODELS[name]
    torch.manual_seed(0)
    model = make_model(replace(config, dropout=0.0, attention_dropout=0.0)).train()
    convert_to_fp8(model, CPU)
    tokens = torch.randint(5, 50, shape)
    batch = Batch(tokens, target_positions=torch.arange(4).expand(len(tokens), 4), labels=tokens[:, :4])
    if name != "deberta":
        batch = Batch(tokens, decoder_input_ids=tokens[:, :16], labels=tokens[:, :16])
    sum(model.losses(batch).values()).backward()  # type: ignore[operator]
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_model_is_converted_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(MODELS["bert"])
    convert_to_fp8(model, CPU)
    convert_to_fp8(model, CPU)
    assert sum(isinstance(layer, Float8Linear) for layer in model.modules()) == 8


def test_unsupported_settings_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"fp16": True}, {"parallel": "fsdp"}):
        with pytest.raises(UserError, match="fp8"):
            TrainingConfig(fp8=True, max_steps=1, **other).check()  # type: ignore[arg-type]
    with pytest.raises(UserError, match="widths are multiples of 16, and this model has none"):
        convert_to_fp8(make_model(gpt2(1, 24, 2, vocab_size=50)), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an older GPU")
    with pytest.raises(UserError, match="an older GPU has no FP8 matmuls"):
        convert_to_fp8(make_model(gpt2(1, 32, 2, vocab_size=50)), torch.device("cuda"))
