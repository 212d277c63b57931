"""Ramps, EMA, bf16 replicas, early compilation and late losses in the one loop: exact resume and equal numbers."""

from __future__ import annotations

import copy
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from firth.core.errors import UserError
from firth.core.files import read_manifest
from firth.models import Model, Stack, get_preset, load_model, make_model
from firth.models.attention import Attention
from firth.models.config import ClassificationHead, RegressionHead, SpanHead
from firth.objectives import Batch, CounterRNG
from firth.recipes import pretraining_recipe as recipe_for
from firth.text import Document
from firth.tokens import Rows, ShardSet, Vocabulary, prepare
from firth.train import (
    ComputeConfig,
    Recipe,
    TrainingConfig,
    TrainingRun,
    choose_compute,
    fit,
    load_recipe,
    pretrain,
    read_log,
)
from firth.train import loop as loops
from firth.train.bf16_replica import BF16Replica
from firth.train.dataloader import make_pretrain_batch_fn, make_ramp_datasets, make_row_dataset, single_stage_recipe
from firth.train.distributed import SINGLE_PROCESS, DistContext, check_device
from firth.train.pretrain import build_pretrain_model
from firth.train.ramp import ramp_stages
from firth.train.recipe import EngineConfig
from firth.train.resume import extend_skips, merge_recipe
from firth.train.step import build_step_runner, train_step
from firth.train.step_runner import StepRunner

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Recipes = Callable[..., Recipe]
Make = Callable[[str], ShardSet]

WAYS: dict[str, dict[str, Any]] = {
    "muon": {"optim": "muon", "muon_learning_rate": 0.02},
    "adafactor": {"optim": "adafactor", "learning_rate": 0.01},
    "average": {"ema_decay": 0.9},
    "batch ramp": {"batch_ramp": 0.7, "batch_doublings": 2},
    "length ramp": {"length_ramp": 0.7, "length_doublings": 1},
    "both ramps, micro-batches": {"length_ramp": 0.5, "batch_ramp": 0.9, "gradient_accumulation_steps": 2},
    "bf16 weights": {"engine": EngineConfig(weights="bf16")},
    "bf16 weights, adamw": {"engine": EngineConfig(weights="bf16"), "optim": "adamw"},
    "products in 8 bits": {"fp8": True},
    "products in 8 bits, bf16 weights": {"fp8": True, "engine": EngineConfig(weights="bf16")},
    "wsd": {"lr_scheduler_type": "wsd", "wsd_decay": 0.4},
    "tail average, cautious decay to zero": {
        "tail_average": 0.6,  # from step 3 on: one resume before it, one in it
        "optim": "muon",
        "weight_decay": 0.3,
        "weight_decay_schedule": "to-zero",
        "cautious_weight_decay": True,
    },
    "several packings": {  # three passes
        "num_packings": 2,
        "per_device_train_batch_size": 192,
        "weight_decay_schedule": "constant",
    },
    "all": {
        "optim": "muon",
        "ema_decay": 0.9,
        "batch_ramp": 0.5,
        "length_ramp": 0.8,
        "engine": EngineConfig(weights="bf16"),
    },
}


def lines(run: str | Path) -> list[str]:
    return (Path(run) / "log.jsonl").read_text().splitlines()


def weights(run: str | Path, name: str = "final") -> bytes:
    return (Path(run) / name / "model.safetensors").read_bytes()


class Stop(Exception):  # noqa: N818
    """Raised to interrupt a run."""


def stop_at(step: int) -> Callable[[int, Model], None]:
    def hook(now: int, model: Model) -> None:
        if now == step:
            raise Stop

    return hook


# The other ways cover these.
SLOW_WAYS = ("muon", "average", "batch ramp", "length ramp", "bf16 weights", "products in 8 bits, bf16 weights")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow if way in SLOW_WAYS else ()) for way in WAYS])
def test_a_resumed_run_equals_an_uninterrupted_one(
    way: str, recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(dropout=0.2, max_steps=7, eval_steps=3, max_seq_length=32) | WAYS[way]
    family = "t5" if way == "adafactor" else "bert"
    pretrain(recipe_of(family, output_dir=str(tmp_path / "straight"), **fields))
    stopped = recipe_of(family, output_dir=str(tmp_path / "stopped"), **fields)
    for step in (3, 6):  # one step after a checkpoint, on a checkpoint
        monkeypatch.setattr(
            pretraining, "TrainingRun", lambda *a, at=step, **k: TrainingRun(*a, **k, hooks=[(1, stop_at(at))])
        )
        with pytest.raises(Stop):
            pretrain(stopped, resume=True)
    monkeypatch.undo()
    pretrain(stopped, resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


@pytest.mark.parametrize("way", ["muon", "adafactor"])
def test_every_optimizer_lowers_the_loss(way: str, recipe_of: Recipes) -> None:
    rate = {"muon": 5e-3, "adafactor": 5e-2}[way]
    recipe = recipe_of("gpt2", max_steps=30, save_steps=100, **WAYS[way] | {"learning_rate": rate})
    pretrain(recipe)
    losses = [line["loss"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


# --- the mean of the weights


def test_ema_weights_are_evaluated_and_saved(recipe_of: Recipes, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"max_steps": 5, "save_steps": 1, "save_total_limit": 0, "eval_steps": 5}
    fields |= {"learning_rate": 1e-2, "warm_start": "none"}
    recipe = recipe_of(ema_decay=0.8, **fields)
    result = pretrain(recipe)
    plain = recipe_of(output_dir=str(tmp_path / "plain"), **fields)
    other = pretrain(plain)
    run = Path(recipe.output_dir)
    assert weights(run, "checkpoint-5") == weights(plain.output_dir, "checkpoint-5"), "it changes no step"
    assert result["loss"] == other["loss"]
    assert result["eval_loss"] != other["eval_loss"]
    torch.manual_seed(recipe.seed)
    mean = make_model(recipe.model).embed.tokens.weight.detach()
    for step in range(5):
        now = load_model(run / f"checkpoint-{step + 1}").embed.tokens.weight.detach()
        mean = mean + (1 - min(0.8, (1 + step) / (10 + step))) * (now - mean)
        kept = load_file(run / f"checkpoint-{step + 1}" / "training" / "average.safetensors")
        torch.testing.assert_close(kept["embed.tokens.weight"], mean)
    torch.testing.assert_close(load_model(run / "final").embed.tokens.weight.detach(), mean)


def test_load_best_restores_the_ema_of_the_best_evaluation(recipe_of: Recipes, shards_of: Make, tmp_path: Path) -> None:
    """Neither the raw weights nor a later EMA."""
    shards = shards_of("bert")
    recipe = recipe_of(ema_decay=0.8, max_steps=4, eval_steps=1, warmup_steps=0, learning_rate=1e-2, save_steps=1)
    batches = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)
    model, judged = build_pretrain_model(recipe, shards.tokenizer), []

    def evaluate(now: Model) -> dict[str, float]:
        judged.append(now.embed.tokens.weight.detach().clone())
        return {"score": [1.0, 3.0, 2.0, 0.0][len(judged) - 1] if len(judged) < 5 else 3.0}

    run = TrainingRun(recipe, CPU, model, batches, evaluate, tmp_path, score_fn=lambda scores: scores["score"])
    assert fit(run).best_step == 2
    assert torch.equal(model.embed.tokens.weight, judged[1])
    kept = load_file(tmp_path / "checkpoint-4" / "training" / "average.safetensors")
    assert torch.equal(kept["embed.tokens.weight"], judged[3])


def test_a_pretraining_that_learns_its_text_by_heart_ends_with_its_best_weights(
    recipe_of: Recipes, shards_of: Make, corpus_file: Path, tmp_path: Path
) -> None:
    small, run = tmp_path / "small", tmp_path / "run"
    words, rng = corpus_file.read_text().split(), np.random.default_rng(0)
    prepare(
        (
            Document(" ".join(rng.choice(words, 60)), "") for _ in range(12)
        ),  # nothing to learn but the words' frequencies
        shards_of("gpt2").tokenizer,
        small,
        held_out_share=0.5,
    )
    fields = {"data": str(small), "max_steps": 20, "eval_steps": 4, "save_steps": 10, "learning_rate": 2e-2}
    recipe = recipe_of("gpt2", per_device_train_batch_size=8, **fields)
    last = pretrain(replace(recipe, output_dir=str(tmp_path / "last"), load_best=False))
    found = pretrain(recipe)
    log = read_log(run / "log.jsonl")
    losses = {line["step"]: line["eval_loss"] for line in log if "eval_loss" in line}
    passes = {line["step"]: line["passes"] for line in log if "passes" in line}
    best = min((step for step in losses if passes[step] >= 1), key=losses.__getitem__)
    assert best < 20, "it overfits"
    assert (last["eval_loss"], "best_step" in last) == (losses[20], False)
    assert (found["eval_loss"], found["best_step"]) == (pytest.approx(losses[best], abs=1e-6), best)
    assert [path.name for path in run.glob("best-*")] == [f"best-{best}"], "for a longer run"
    weights = load_file(run / "final" / "model.safetensors")
    assert read_manifest(run / "final")["step"] == best
    # a longer run goes on from the last weights, and still compares with the best
    longer = pretrain(replace(recipe, max_steps=24), resume=True, allow_change=True)
    assert (longer["steps"], longer["best_step"], longer["eval_loss"]) == (24, best, found["eval_loss"])
    assert all(torch.equal(weights[name], value) for name, value in load_file(run / "final/model.safetensors").items())
    # without the comparison it ends with its last weights
    last = pretrain(replace(recipe, max_steps=28, load_best=False), resume=True, allow_change=True)
    assert ("best_step" in last, read_manifest(run / "final")["step"]) == (False, 28)
    assert not torch.equal(
        weights["transformer.wte.weight"], load_file(run / "final/model.safetensors")["transformer.wte.weight"]
    )


def test_a_finished_run_that_goes_on_writes_its_model_again(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=2)
    pretrain(recipe)
    file = Path(recipe.output_dir) / "final" / "model.safetensors"
    before = file.read_bytes()
    pretrain(recipe, resume=True)
    assert file.read_bytes() == before
    pretrain(replace(recipe, max_steps=4), resume=True, allow_change=True)
    assert file.read_bytes() != before


# --- weights in bfloat16


def test_master_weights_receive_the_replicas_gradients(recipe_of: Recipes, shards_of: Make) -> None:
    shards = shards_of("bert")
    recipe = recipe_of(engine=EngineConfig(weights="bf16"), gradient_accumulation_steps=2)
    model = build_pretrain_model(recipe, shards.tokenizer)
    exact = copy.deepcopy(model)
    micro = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)(0)
    run = TrainingRun(recipe, CPU, model, lambda step: micro)
    runner = build_step_runner(run)
    assert isinstance(runner, BF16Replica)
    assert {p.dtype for p in runner.replica.parameters()} == {torch.bfloat16}
    seen: list[torch.Tensor] = []

    class Watch(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    total = train_step(run, runner, Watch(model.parameters(), lr=0.0), micro, 0, 0.0)
    plain = TrainingRun(
        replace(recipe, engine=EngineConfig(weights="float32"), max_grad_norm=0.0), CPU, exact, lambda step: micro
    )
    wanted: list[torch.Tensor] = []

    class See(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            wanted.extend(p.grad.clone() for p in exact.parameters() if p.grad is not None)

    true = train_step(plain, StepRunner(exact, exact.losses, CPU), See(exact.parameters(), lr=0.0), micro, 0, 0.0)
    assert total.item() == pytest.approx(true.item(), rel=0.01)
    assert len(seen) == len(wanted)
    assert {g.dtype for g in seen} == {torch.float32}
    a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (seen, wanted))
    assert torch.cosine_similarity(a, b, 0) > 0.999
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), exact.parameters(), strict=True))


FAMILIES = (
    *("bert-tiny", "roberta-tiny", "spanbert-tiny", "albert-tiny", "electra-tiny", "modernbert-tiny", "deberta-tiny"),
    *("deberta-v3-tiny", "xlnet-tiny", "gpt2-tiny", "llama-tiny", "t5-tiny", "bart-tiny", "unilm-tiny"),
)


FAST_FAMILIES = ("bert-tiny", "t5-tiny")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST_FAMILIES else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_runs_in_bfloat16(name: str) -> None:
    """No module insists on float32; the loss is within 2% of float32, and all parameters get gradients."""
    recipe = recipe_for(replace(get_preset(name), vocab_size=200))
    sentinels = tuple(range(199, 99, -1))
    vocab = Vocabulary(200, 0, 1, 2, 3, 4, 5, 6, sentinels, special_ids=(*range(7), *reversed(sentinels)))
    rng, B, L = np.random.default_rng(0), 2, recipe.objective.source_length(32)
    tokens = vocab.non_special_ids[rng.integers(len(vocab.non_special_ids), size=(B, L))]
    doc = np.tile(np.arange(L, dtype=np.int32) * 2 // L, (B, 1))
    position = np.tile(np.arange(L, dtype=np.int32) % -(-L // 2), (B, 1))
    edge = np.tile(np.arange(L) % 4 == 0, (B, 1))
    optional: dict[str, Any] = dict.fromkeys(recipe.objective.token_flags, edge)
    if recipe.objective.row_layout != "packed":
        optional |= {"token_type_ids": doc, "pair_labels": np.array([0, 1])}
    rows = Rows(tokens, doc, position, np.ones((B, L), bool), np.arange(B), np.arange(B), np.zeros(B, int), **optional)
    batch = recipe.objective(rows, CounterRNG(0, np.arange(B), np.zeros(B, int)), vocab).to(torch.device("cpu"))
    torch.manual_seed(0)
    model = make_model(recipe.model).eval()
    losses = BF16Replica(model, lambda losses: losses, CPU)
    losses.begin_step()
    assert not losses.replica.training
    torch.manual_seed(1)
    found = sum(part for name, part in losses.loss_fn(batch).items() if "/" not in name)
    torch.manual_seed(1)
    wanted = sum(model.losses(batch).values())
    assert found.item() == pytest.approx(wanted.item(), rel=0.02)
    found.backward()
    losses.accumulate_gradients()
    assert sum(p.grad is not None for p in model.parameters()) > 5
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model.train()
    losses.begin_step()
    sum(losses.loss_fn(batch).values()).backward()  # with dropout


@pytest.mark.parametrize(
    "head", [ClassificationHead(("a", "b")), RegressionHead(), SpanHead()], ids=lambda head: type(head).__name__
)
def test_task_heads_run_in_bfloat16(head: Any) -> None:
    torch.manual_seed(0)
    model = make_model(replace(get_preset("bert-tiny"), vocab_size=50, head=head)).eval()
    tokens, positions = torch.randint(5, 50, (2, 16)), torch.tensor([[0, 8], [0, 8]])
    target = torch.tensor([[0, 1], [1, -100]])
    if isinstance(head, RegressionHead):
        target = torch.tensor([[0.5, 1.0], [0.2, float("nan")]])
    if isinstance(head, SpanHead):
        target = torch.zeros(2, 16, 2, dtype=torch.long)
        target[:, 3, 0] = target[:, 5, 1] = 1
    batch = Batch(
        tokens,
        torch.zeros_like(tokens),
        target_positions=None if isinstance(head, SpanHead) else positions,
        task_labels=target,
    )
    losses = BF16Replica(model, lambda losses: losses, CPU)
    losses.begin_step()
    found, wanted = (sum(loss(batch).values()) for loss in (losses.loss_fn, model.losses))
    assert found.item() == pytest.approx(wanted.item(), rel=0.03)
    found.backward()
    losses.accumulate_gradients()
    assert model.head.out.weight.grad.abs().max() > 0


# --- ramps


def test_each_row_length_of_a_ramp_has_its_own_stream(recipe_of: Recipes, shards_of: Make) -> None:
    shards = shards_of("bert")
    recipe = recipe_of(max_steps=10, length_ramp=0.5, length_doublings=1, batch_ramp=0.2, batch_doublings=1)
    rows = make_row_dataset(recipe, shards, held_out=False)
    batches = make_pretrain_batch_fn(recipe, rows, shards.tokenizer, make_ramp_datasets(recipe, shards))
    shapes = [[b.input_ids.shape for b in batches(step)] for step in range(10)]
    assert shapes == [[(4, 16)]] * 2 + [[(8, 16)]] * 3 + [[(4, 32)]] * 5
    full = make_pretrain_batch_fn(replace(recipe, length_ramp=0.0, batch_ramp=0.0), rows, shards.tokenizer)
    for mine, other in zip(batches(5)[0], full(0)[0], strict=True):
        assert mine is None or mine.shape == other.shape
    (first,), (again,) = batches(5), full(0)
    text = np.where(first.input_ids == again.input_ids, 1, 0).mean()
    assert text > 0.6, "the first row of full length is the first row of the stream; noise differs at most"
    begun = single_stage_recipe(recipe, ramp_stages(recipe)[0])
    early = make_pretrain_batch_fn(begun, make_row_dataset(begun, shards, held_out=False), shards.tokenizer)
    assert all(np.array_equal(a, b) for a, b in zip(early(1)[0], batches(1)[0], strict=True) if a is not None)


def test_a_rewind_keeps_the_ramp_and_repeats_no_row(recipe_of: Recipes, shards_of: Make) -> None:
    """Ten steps; back from 10 to 4, and from 8 to 2: no row that was read comes again."""
    shards = shards_of("bert")
    ramp = recipe_of(max_steps=16, batch_ramp=0.4, batch_doublings=1, length_ramp=0.6, length_doublings=1)

    def read(skips: tuple[tuple[int, int], ...], steps: range) -> list[tuple[int, list[int]]]:
        found: list[tuple[int, list[int]]] = []

        class Noting:
            def __init__(self, source: Any) -> None:
                self.source = source

            def get_rows(self, indices: np.ndarray) -> Any:
                found.append((self.source.row_length, indices.tolist()))
                return self.source.get_rows(indices)

        full = Noting(make_row_dataset(ramp, shards, held_out=False))
        shorter: Any = {length: Noting(source) for length, source in make_ramp_datasets(ramp, shards).items()}
        batches = make_pretrain_batch_fn(replace(ramp, skips=skips), full, shards.tokenizer, shorter)  # type: ignore[arg-type]
        for step in steps:
            batches(step)
        return found

    once, twice = extend_skips((), 4, 10), extend_skips(extend_skips((), 4, 10), 2, 8)
    parts = [read((), range(10)), read(once, range(4, 8)), read(twice, range(2, 16))]
    rows = [(length, row) for part in parts for length, index in part for row in index]
    assert len(rows) == len(set(rows))
    plain = read((), range(16))
    assert [(length, len(index)) for length, index in parts[2]] == [(length, len(index)) for length, index in plain[2:]]
    assert len({length for length, _ in plain}) == 2


def test_minutes_account_for_the_shorter_steps_of_a_ramp(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[int, int]] = []

    def trial(training: Recipe, compute: ComputeConfig, model: Model, batches: Any, *_: Any, **more: Any) -> Any:
        rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
        assert batches(0)[0].input_ids.shape == (training.per_device_train_batch_size, training.max_seq_length)
        timed.append((rows, training.max_seq_length))
        return 0.1 * rows, 0.0

    monkeypatch.setattr(pretraining, "time_steps", trial)
    recipe = recipe_of(max_steps=0, minutes=50, batch_ramp=0.5, batch_doublings=2, save_steps=1000, eval_steps=1000)
    monkeypatch.setattr(pretraining, "fit", lambda *a, **k: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        pretrain(recipe)
    assert timed == [(1, 32), (2, 32), (4, 32)]
    steps = load_recipe(Path(recipe.output_dir) / "recipe.yaml", Recipe).max_steps
    seconds = 0.25 * 0.1 + 0.25 * 0.2 + 0.5 * 0.4
    assert 0.9 * 3000 / seconds < steps <= 3000 / seconds


def test_epochs_account_for_the_smaller_batches_of_a_ramp(recipe_of: Recipes, shards_of: Make) -> None:
    recipe = recipe_of(max_steps=0, num_train_epochs=0.3, batch_ramp=1.0, batch_doublings=1, save_steps=1000)
    rows = make_row_dataset(recipe, shards_of("bert"), held_out=False).num_rows
    steps = pretrain(recipe)["steps"]
    assert steps == int(np.ceil(0.3 * rows / (2 + 1e-9)))


# --- the first step comes soon


@pytest.mark.parametrize(
    "more", [{"ema_decay": 0.9}, {"engine": EngineConfig(weights="bf16"), "gradient_accumulation_steps": 2}]
)
def test_compilation_overlaps_the_ppmi_initialization(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Compiling ahead leaves no trace: the run is bit-equal to one without it."""
    monkeypatch.setattr(pretraining, "choose_compute", lambda *_: replace(CPU, compile=True))
    monkeypatch.setattr(torch, "compile", lambda losses, **_: losses)
    first, rehearsed = pretraining.ppmi_embeddings, Event()
    made = []

    def slowly(*given: Any) -> np.ndarray:
        assert rehearsed.wait(300), "nobody goes on without them"
        made.append(first(*given))
        return made[-1]

    def rehearse(*given: Any) -> None:
        usual(*given)
        assert not made
        rehearsed.set()

    usual = loops.compile_ahead
    monkeypatch.setattr(pretraining, "ppmi_embeddings", slowly)
    monkeypatch.setattr(loops, "compile_ahead", rehearse)
    recipe = recipe_of(warm_start="ppmi", dropout=0.2, **more)
    pretrain(replace(recipe, output_dir=str(tmp_path / "beside")))
    assert len(made) == 1
    assert made[0].any()

    monkeypatch.setattr(loops, "compile_ahead", lambda *_: pytest.fail("nothing to wait for"))

    def after_all(run: TrainingRun, resume: bool) -> Any:
        assert run.deferred_init is not None
        run.deferred_init()
        run.deferred_init = None
        return fit(run, resume)

    monkeypatch.setattr(pretraining, "fit", after_all)
    pretrain(replace(recipe, output_dir=str(tmp_path / "before")))
    assert lines(tmp_path / "beside") == lines(tmp_path / "before")
    assert weights(tmp_path / "beside") == weights(tmp_path / "before")


def test_distributed_runs_initialize_before_they_compile(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also FSDP with one process: sharded parameters cannot be filled later."""
    monkeypatch.setattr(
        pretraining, "choose_compute", lambda recipe, world: replace(CPU, compile=True, dist_context=world)
    )
    found: list[bool] = []

    def look(run: TrainingRun, resume: bool) -> Any:
        found.append(run.deferred_init is None)
        raise Stop

    monkeypatch.setattr(pretraining, "fit", look)
    for world in (SINGLE_PROCESS, DistContext()):
        monkeypatch.setattr(pretraining, "init_distributed", lambda recipe, world=world: world)
        with pytest.raises(Stop):
            pretrain(recipe_of(warm_start="ppmi"), overwrite=True)
    assert found == [False, True]


def test_steps_are_timed_after_background_work_ends(recipe_of: Recipes, shards_of: Make) -> None:
    recipe, steps = recipe_of(), list[object]()
    model = build_pretrain_model(recipe, shards_of("bert").tokenizer)
    batches = make_pretrain_batch_fn(
        recipe, make_row_dataset(recipe, shards_of("bert"), held_out=False), shards_of("bert").tokenizer
    )

    def read(step: int) -> Any:
        steps.append(step)
        return batches(step)

    pretraining.time_steps(recipe, CPU, model, read, None, seconds=0.0, wait_ready=lambda: steps.append("ready"))
    assert steps == [0, 1, 2, "ready", *range(3, 9)]


# --- the device never waits


def test_losses_read_one_step_late_are_equal(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(max_steps=7, eval_steps=3, save_steps=4, logging_steps=1)
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "at-once"), **fields))
    monkeypatch.setattr(loops, "defers_loss_reads", lambda compute: True)
    ahead: list[int] = []
    written: list[int] = []
    before = loops.train_step
    monkeypatch.setattr(loops, "train_step", lambda *a: ahead.append(a[4]) or before(*a))
    write = loops.RunLog.write
    monkeypatch.setattr(
        loops.RunLog,
        "write",
        lambda self, **facts: (
            self.path.name == "log.jsonl" and written.append((facts["step"], ahead[-1] + 1)),
            write(self, **facts),
        ),
    )
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "late"), **fields))
    assert lines(tmp_path / "late") == lines(tmp_path / "at-once")
    assert weights(tmp_path / "late") == weights(tmp_path / "at-once")
    # (step, last step that was begun): a step later, but at once before an evaluation and a checkpoint
    assert written == [(1, 2), (2, 3), (3, 3), (3, 3), (4, 4), (5, 6), (6, 6), (6, 6), (7, 7), (7, 7)]


def test_a_late_nan_loss_is_reported_with_its_step(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "defers_loss_reads", lambda compute: True)
    recipe = recipe_of("gpt2", max_steps=9, save_steps=100, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step \d"):
        pretrain(recipe)
    logged = [line["step"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line]
    assert logged == list(range(1, len(logged) + 1))
    assert not list(Path(recipe.output_dir).glob("checkpoint-*"))


def test_a_late_nan_loss_is_never_checkpointed(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "defers_loss_reads", lambda compute: True)
    recipe = recipe_of("gpt2", max_steps=6, save_steps=1, logging_steps=100, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step (\d)") as e:
        pretrain(recipe)
    step = int(str(e.value).split("at step ")[1][0])
    assert {p.name for p in Path(recipe.output_dir).glob("checkpoint-*")} <= {f"checkpoint-{i}" for i in range(1, step)}


# --- what was compiled


def test_the_compile_cache_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FIRTH_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    choose_compute(TrainingConfig(compile=False))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    choose_compute(TrainingConfig(compile=True))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    choose_compute(TrainingConfig(compile=True))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"


def test_engine_flags_reach_every_head_and_layer(recipe_of: Recipes, shards_of: Make) -> None:
    recipe = recipe_of(
        engine=EngineConfig(fused_loss=False, pad_vocabulary=True, fused_attention=False, residual="float32")
    )
    assert recipe_of().engine.residual == "bf16"
    model = build_pretrain_model(recipe, shards_of("bert").tokenizer)
    build_step_runner(TrainingRun(recipe, CPU, model, lambda step: []))
    assert (model.head.use_fused_loss, model.head.pad_vocab) == (False, True)
    assert [m.allow_fused for m in model.modules() if isinstance(m, Attention)] == [False] * recipe.model.num_layers
    residuals = []
    for wanted in (recipe, recipe_of()):
        build_step_runner(TrainingRun(wanted, CPU, model, lambda step: []))
        residuals += [m.residual_dtype for m in model.modules() if isinstance(m, Stack)]
    assert residuals == [torch.float32, torch.bfloat16]


def test_an_unpadded_vocabulary_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("firth.train.compute"), "select_device", lambda *_: torch.device("cpu"))
    for fused_loss, said in ((None, True), (True, True), (False, False)):
        choose_compute(TrainingConfig(engine=EngineConfig(pad_vocabulary=True, fused_loss=fused_loss)))
        assert ("pad_vocabulary changes nothing" in capsys.readouterr().err) == said


def test_missing_devices(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An explicit device raises before a folder exists; a preferred one is reported; none is silent."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for chosen, said in (("", ""), ("-1", ""), ("7", " (CUDA_VISIBLE_DEVICES is 7)")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        with pytest.raises(UserError, match=re.escape(f"--device cuda: torch finds no GPU here{said}. ")):
            pretrain(recipe_of(device="cuda", output_dir=str(tmp_path / "run")))
        assert not (tmp_path / "run").exists()
        capsys.readouterr()
        assert choose_compute(TrainingConfig()).device.type == "cpu"
        assert capsys.readouterr().err == (f"note: torch finds no GPU here{said}: the CPU computes.\n" if said else "")
        choose_compute(TrainingConfig(device="cpu"))
        assert not capsys.readouterr().err


def test_device_cpu_ignores_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compute = choose_compute(TrainingConfig(device="cpu"))
    assert (compute.device.type, compute.bf16, compute.compile) == ("cpu", False, False)
    check_device(TrainingConfig(device="cpu"))
    with pytest.raises(UserError, match="for one process where there are GPUs"):
        check_device(TrainingConfig(device="cpu", parallel="ddp"))


def test_a_run_resumes_on_another_device(recipe_of: Recipes) -> None:
    assert merge_recipe(recipe_of(device="cuda"), recipe_of(device="cpu")).device == "cpu"


def test_which_steps_use_cuda_graphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a GPU: compiled steps of one micro-batch by default, others on request where possible."""
    devices = importlib.import_module("firth.train.compute")
    assert not choose_compute(TrainingConfig(compile=False, engine=EngineConfig(cuda_graphs=True))).cuda_graphs
    assert "no CUDA graphs: there is no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(devices, "select_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    assert choose_compute(TrainingConfig()).cuda_graphs
    assert not choose_compute(TrainingConfig(gradient_accumulation_steps=2)).cuda_graphs
    assert not choose_compute(TrainingConfig(engine=EngineConfig(cuda_graphs=False))).cuda_graphs
    assert not choose_compute(TrainingConfig(compile=False)).cuda_graphs
    assert choose_compute(TrainingConfig(compile=False, engine=EngineConfig(cuda_graphs=True))).cuda_graphs
    assert not capsys.readouterr().err
    for cannot in (
        TrainingConfig(engine=EngineConfig(weights="bf16")),
        TrainingConfig(gradient_checkpointing=True),
        recipe_for(get_preset("ulmfit-tiny")),
    ):
        recorded = replace(cannot, compile=False, engine=replace(cannot.engine, cuda_graphs=True))
        assert not choose_compute(recorded).cuda_graphs
        assert "no CUDA graphs: " in capsys.readouterr().err
