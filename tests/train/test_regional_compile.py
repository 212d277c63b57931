"""Regional compilation: one program per kind of block, with the same numbers as eager mode."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from firth.core.errors import UserError
from firth.models import Model, block, get_preset, make_model, regional_compile
from firth.models.kernels.activation import ACTIVATIONS
from firth.objectives import Batch
from firth.train import ComputeConfig, TrainingConfig, TrainingRun, choose_compute, compute
from firth.train.compute import preload_compiler
from firth.train.optim import make_optimizer
from firth.train.recipe import EngineConfig
from firth.train.step import build_step_runner, compute_gradients, recompute_in_backward, train_step

CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
PARTS = replace(CPU, compile=True, compile_regions=True)


class Counter:
    """A compiler backend that runs graphs eagerly and counts them."""

    programs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> object:
        self.programs += 1
        return graph


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    found = Counter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=found))
    monkeypatch.setattr(regional_compile, "_compiled_regions", {})
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def batch_for(shape: str, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(7, 300, size=(4, 24))
    doc = np.tile(np.arange(24) // 12, (4, 1))
    if shape == "encoder-decoder":
        labels = rng.integers(7, 300, size=(4, 8))
        return Batch(
            tokens,
            document_ids=np.zeros_like(doc),
            decoder_input_ids=labels,
            decoder_document_ids=labels * 0,
            labels=labels,
        )
    if shape == "decoder":
        return Batch(
            tokens, document_ids=doc, position_ids=np.tile(np.arange(24) % 12, (4, 1)), labels=np.roll(tokens, -1, 1)
        )
    positions = np.sort(rng.permuted(np.tile(np.arange(24), (4, 1)), axis=1)[:, :5], 1)
    return Batch(tokens, document_ids=doc, target_positions=positions, labels=np.take_along_axis(tokens, positions, 1))


def three_steps(layers: int, family: str, compute: ComputeConfig, fp8: bool = False) -> tuple[list[float], Model]:
    config = replace(
        get_preset(f"{family}-tiny"), vocab_size=300, num_layers=layers, dropout=0.0, attention_dropout=0.0
    )
    torch.manual_seed(0)
    model, settings = make_model(config), TrainingConfig(learning_rate=1e-2, fp8=fp8)
    run = TrainingRun(settings, compute, model, lambda step: [])
    runner, optimizer = build_step_runner(run), make_optimizer(model, settings)
    steps = [batch_for(config.architecture, i) for i in range(3)]
    return [train_step(run, runner, optimizer, [b], i, 1e-2).item() for i, b in enumerate(steps)], model


FAMILIES = ["bert", "gpt2", "llama", "modernbert", "deberta", "albert", "t5", "bart"]
FAST_FAMILIES = ("bert",)
WAYS = [
    pytest.param(family, fp8, marks=() if family in FAST_FAMILIES and not fp8 else pytest.mark.slow)
    for family, fp8 in [(family, False) for family in FAMILIES] + [("bert", True), ("llama", True), ("t5", True)]
]


@pytest.mark.parametrize(("family", "fp8"), WAYS)
def test_compiled_regions_give_equal_steps_with_few_programs(family: str, fp8: bool, compiler: Counter) -> None:
    few, more = (2, 3) if fp8 else (6, 9)  # a CPU takes long in 8 bits
    plain, _ = three_steps(few, family, CPU, fp8)
    assert compiler.programs == 0
    parts, model = three_steps(few, family, PARTS, fp8)
    assert parts == pytest.approx(plain, rel=1e-3 if fp8 else 1e-5)
    made = compiler.programs
    assert made >= 3
    model.eval().loss(batch_for(model.config.architecture, 3).to(CPU.device))
    assert compiler.programs == made, "what judges a model waits for no compiler"
    torch._dynamo.reset()
    three_steps(more, family, PARTS, fp8)
    assert compiler.programs == 2 * made, "as many for more layers"


@pytest.mark.slow
def test_with_activation_checkpointing_and_bf16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, and with a partitioner that saves other tensors for the backward pass than eager mode does."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(regional_compile, "_compiled_regions", {})
    torch._dynamo.reset()
    found = {}
    for name, fields in {
        "parts": {},
        "twice": {"gradient_checkpointing": True},
        "half": {"engine": EngineConfig(weights="bf16")},
    }.items():
        rate = 0.0 if name == "half" else 0.1
        config = replace(get_preset("gpt2-tiny"), vocab_size=300, dropout=rate, attention_dropout=rate)
        torch.manual_seed(0)
        model = make_model(config)
        settings = TrainingConfig(learning_rate=1e-2, **fields)  # type: ignore[arg-type]
        run = TrainingRun(settings, PARTS, model, lambda step: [])
        runner, optimizer = build_step_runner(run), make_optimizer(model, settings)
        steps = [batch_for("decoder", i) for i in range(3)]
        found[name] = [train_step(run, runner, optimizer, [b], i, 1e-2).item() for i, b in enumerate(steps)]
    torch._dynamo.reset()
    assert found["twice"] == pytest.approx(found["parts"], rel=1e-5)
    assert found["half"] == pytest.approx(found["parts"], rel=5e-2)


@pytest.mark.parametrize("parts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_recompute_saves_less_for_the_same_gradients(parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's partitioner chooses what is saved, for the whole step or for each region."""
    backend = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", backend)
    config = replace(get_preset("llama-tiny"), vocab_size=300)
    batch, kept, grads = batch_for("decoder", 0), [], []
    monkeypatch.setattr(regional_compile, "_compiled_regions", {})
    torch._dynamo.reset()
    for lean in (False, True):
        torch.manual_seed(0)
        model, found = make_model(config), dict[int, int]()

        def keep(x: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        run = TrainingRun(
            TrainingConfig(engine=EngineConfig(recompute=lean)),
            replace(PARTS, compile_regions=parts),
            model,
            lambda step: [],
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            compute_gradients(run, build_step_runner(run), [batch], 0, {})
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept.append(sum(size for at, size in found.items() if at not in weights))
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    torch._dynamo.reset()
    assert kept[1] < 0.8 * kept[0], "the second one compiles anew"
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("lean", [False, True])
def test_recompute_covers_decomposed_activations(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decomposed operations can be recomputed; a custom kernel would be saved."""
    ways: list[bool] = []

    def activated(linear: nn.Module, x: torch.Tensor, activation: str, is_eager: bool = False) -> torch.Tensor:
        ways.append(is_eager)
        return ACTIVATIONS[activation](linear(x))

    monkeypatch.setattr(block, "linear_activation", activated)
    model = make_model(replace(get_preset("gpt2-tiny"), vocab_size=300))
    run = TrainingRun(TrainingConfig(engine=EngineConfig(recompute=lean)), CPU, model, lambda step: [])
    compute_gradients(run, build_step_runner(run), [batch_for("decoder", 0)], 0, {})
    assert ways == [lean] * model.config.num_layers


def test_large_models_recompute_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    model, ways = make_model(replace(get_preset("llama-tiny"), vocab_size=300)), []
    for many, lean, setting in ((7, None, PARTS), (10**9, None, PARTS), (10**9, False, PARTS), (10**9, None, CPU)):
        monkeypatch.setattr(Model, "num_parameters", many)
        with recompute_in_backward(
            TrainingRun(TrainingConfig(engine=EngineConfig(recompute=lean)), setting, model, lambda step: [])
        ):
            ways.append(not config.ban_recompute_materialized_backward)
    assert ways == [False, True, False, False]
    assert config.ban_recompute_materialized_backward


def test_compile_errors_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: object, inputs: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=refuse))
    monkeypatch.setattr(regional_compile, "_compiled_regions", {})
    torch._dynamo.reset()
    with pytest.raises(UserError, match=r"cannot be compiled here: .*no compiler.* Pass --no-compile"):
        three_steps(1, "gpt2", PARTS)
    torch._dynamo.reset()


def test_which_runs_compile_regions() -> None:
    assert not choose_compute(TrainingConfig(compile=True)).compile_regions
    assert choose_compute(TrainingConfig(compile=True, engine=EngineConfig(compile_regions=True))).compile_regions
    assert choose_compute(TrainingConfig(engine=EngineConfig(compile_regions=True))).compile_regions
    assert not choose_compute(TrainingConfig(compile=False, engine=EngineConfig(compile_regions=True))).compile_regions
    assert "compiled in parts" in str(
        choose_compute(TrainingConfig(compile=True, engine=EngineConfig(compile_regions=True)))
    )
    assert not choose_compute(TrainingConfig(compile=True, minutes=3)).compile_regions, "it gains nothing on a CPU"


def test_a_short_gpu_run_compiles_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "select_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    def parts(**fields: Any) -> bool:
        return choose_compute(TrainingConfig(**fields)).compile_regions

    assert parts(minutes=3)
    assert parts(minutes=15)
    assert not parts(minutes=16)
    assert not parts()
    assert not parts(minutes=3, engine=EngineConfig(compile_regions=False))
    assert not parts(minutes=3, compile=False)
    assert not parts(minutes=3, engine=EngineConfig(cuda_graphs=True))
    assert not parts(minutes=3, engine=EngineConfig(weights="bf16")), "it would lose its graphs"
    assert parts(minutes=3, engine=EngineConfig(weights="bf16"), gradient_accumulation_steps=2), "it has none"


@pytest.mark.parametrize("compiles", [False, True])
def test_the_compiler_is_imported_while_the_block_runs(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, begun = list[str](), Event()

    def import_slowly(name: str) -> None:
        assert begun.wait(300), "the block does not wait for it"
        imported.append(name)

    monkeypatch.setattr(compute, "import_module", import_slowly)
    with preload_compiler(replace(CPU, compile=compiles)):
        assert not imported
        begun.set()
    assert imported == ["torch._inductor.compile_fx"] * compiles


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [False, True])
def test_the_compiler_is_imported_in_the_background(compiles: bool) -> None:
    """In a process of its own, since other tests of this one have compiled."""
    code = f"""
import sys, torch
from firth.train.compute import ComputeConfig, preload_compiler
assert "torch._inductor.compile_fx" not in sys.modules
with preload_compiler(ComputeConfig(torch.device("cpu"), bf16=False, compile={compiles})):
    pass
assert ("torch._inductor.compile_fx" in sys.modules) == {compiles}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
