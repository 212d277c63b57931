"""Skipped steps, out-of-memory errors, and fp16 loss scaling."""

from __future__ import annotations

import copy
import importlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from firth.core.errors import UserError
from firth.models import Model
from firth.objectives import Batch
from firth.tokens import ShardSet
from firth.train import ComputeConfig, Recipe, TrainingConfig, TrainingRun, fit, load_recipe, pretrain, read_log
from firth.train import guard as guards
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset
from firth.train.guard import MIN_HISTORY_STEPS, Guard, StepOutcome, nan_row_medians
from firth.train.held_out import HeldOutLoss
from firth.train.optim import make_optimizer
from firth.train.prefetch import chain_hash, hash_rows
from firth.train.pretrain import build_pretrain_model
from firth.train.step import (
    RecurrentStateDict,
    build_step_runner,
    split_micro_batches,
    train_step,
    update_recurrent_state,
)
from firth.train.step_runner import StepRunner

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
HALF = replace(CPU, fp16=True)
GPU = ComputeConfig(torch.device("cuda"), bf16=False, compile=False)
GRAPHS = replace(GPU, compile=True, cuda_graphs=True)
Recipes = Callable[..., Recipe]
Make = Callable[[str], ShardSet]


def judged(guard: Guard, numbers: Sequence[tuple[float, float]]) -> list[float]:
    return [guard.should_skip(torch.tensor(a), torch.tensor(b), i).item() for i, (a, b) in enumerate(numbers)]


def batches_of(recipe: Recipe, shards: ShardSet) -> Callable[[int], list[Batch]]:
    return make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)


def lines(folder: str | Path) -> list[str]:
    return (Path(folder) / "log.jsonl").read_text().splitlines()


def weights(folder: str | Path) -> bytes:
    return (Path(folder) / "final" / "model.safetensors").read_bytes()


def hashed(micro: Sequence[Batch], before: int) -> int:
    """The data hash that one process logs for a step."""
    return chain_hash(sum(map(hash_rows, micro)), before)


# --- which steps are bad


def test_nan_and_inf_are_skipped() -> None:
    found = judged(Guard(TrainingConfig(), CPU), [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1e9, 1e9)])
    assert found == [0, 1, 1, 0]


def test_a_spike_exceeds_the_median_by_the_factor() -> None:
    """torch's median of 1 to 16 is 8: 32 is four times that, 33 is more."""
    usual = [(float(i), 1.0) for i in range(1, MIN_HISTORY_STEPS + 1)]
    assert judged(Guard(TrainingConfig(spike_factor=4.0), CPU), [*usual, (32.0, 1.0), (1.0, 4.1)]) == [0] * 17 + [1]
    assert judged(Guard(TrainingConfig(spike_factor=4.0), CPU), [*usual, (33.0, 1.0), (33.0, 1.0)]) == [0] * 16 + [1, 1]
    assert judged(Guard(TrainingConfig(spike_factor=4.0), CPU), [*usual[1:], (1e6, 1.0)]) == [0] * 16, (
        "too few were seen"
    )


def test_medians_ignore_nan() -> None:
    rows = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    for i in range(8):
        rows[i, torch.randperm(16)[: 2 * i + 1]] = math.nan
    rows[0, :] = math.nan
    assert torch.equal(nan_row_medians(rows).nan_to_num(-9.0), rows.nanmedian(1).values.nan_to_num(-9.0))


def test_history_is_in_the_state_dict() -> None:
    one, other = Guard(TrainingConfig(spike_factor=4.0), CPU), Guard(TrainingConfig(spike_factor=4.0), CPU)
    judged(one, [(1.0, 1.0)] * MIN_HISTORY_STEPS)
    other.load_state_dict(one.state_dict())
    assert other.should_skip(torch.tensor(5.0), torch.tensor(1.0), MIN_HISTORY_STEPS) == 1
    assert Guard(TrainingConfig(), CPU).state_dict() == {}


def test_skip_reasons() -> None:
    assert StepOutcome(1.0, 1.0, 0.0, 1.0).skip_reason is None
    assert StepOutcome(math.nan, 1.0, 1.0, 1.0).skip_reason == "the loss is nan"
    assert StepOutcome(1.0, math.inf, 1.0, 1.0).skip_reason == "the gradient is inf"
    assert "spike" in str(StepOutcome(9.0, 1.0, 1.0, 1.0).skip_reason)
    assert StepOutcome(1.0, math.inf, 1.0, 2.0**16).is_fp16_overflow
    assert not StepOutcome(1.0, math.inf, 1.0, 1.0).is_fp16_overflow
    assert not StepOutcome(math.nan, math.inf, 1.0, 2.0**16).is_fp16_overflow


@pytest.mark.parametrize("optim", ["adamw", "muon", "adafactor", "lamb"])
def test_a_skipped_step_changes_nothing(optim: str, recipe_of: Recipes, shards_of: Make) -> None:
    """Good, bad, good equals good, good: weights and optimizer state, bit for bit. Also if the first step is bad."""
    recipe = recipe_of("bert", optim=optim, weight_decay=0.1)
    shards = shards_of("bert")
    batches, start = batches_of(recipe, shards), build_pretrain_model(recipe, shards.tokenizer)

    def after(steps: Sequence[int], bad: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = copy.deepcopy(start)
        run, optimizer = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe)
        guard = Guard(recipe, CPU)
        for step in steps:
            factor = math.nan if step in bad else 1.0

            def losses(batch: Any, factor: float = factor) -> dict[str, torch.Tensor]:
                return {name: factor * value for name, value in model.losses(batch).items()}

            train_step(run, StepRunner(model, losses, run.compute), optimizer, batches(step), step, 1e-2, None, guard)
            assert guard.last_outcome[2] == (step in bad)
        states = [v for p in model.parameters() for v in optimizer.state[p].values()]
        return [p.detach() for p in model.parameters()], states

    expected = after([1, 2], [])
    for steps, bad in (([1, 0, 2], [0]), ([0, 1, 2, 3], [0, 3])):
        for ours, theirs in zip(after(steps, bad), expected, strict=True):
            assert all(map(torch.equal, ours, theirs))


def test_a_skipped_step_keeps_the_recurrent_state() -> None:
    old, new = {"a": torch.ones(2, 3)}, {"a": torch.full((2, 3), math.nan), "b": torch.full((2, 1), math.nan)}
    carry: RecurrentStateDict = dict(old)
    update_recurrent_state(carry, dict(new), torch.tensor(1.0))
    assert torch.equal(carry["a"], old["a"])
    assert torch.equal(carry["b"], torch.zeros(2, 1))
    update_recurrent_state(carry, {"a": torch.full((2, 3), 7.0)}, torch.tensor(0.0))
    assert list(carry) == ["a"]
    assert (carry["a"] == 7).all()
    kept = torch.ones(2, 3)
    update_recurrent_state(carry, {"a": kept}, None)
    kept.fill_(8)  # as a graph does with what the last step left
    assert (carry["a"] == 1).all()


# --- a run with text that breaks it


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch, recipe_of: Recipes, shards_of: Make) -> Callable[[Sequence[int]], None]:
    """Make the loss NaN on the text of these steps, whenever it is read."""

    def spoil(steps: Sequence[int]) -> None:
        batches = batches_of(recipe_of("gpt2"), shards_of("gpt2"))
        wrong = [torch.from_numpy(batches(step)[0].input_ids).long() for step in steps]

        def make(*given: Any, **named: Any) -> TrainingRun:
            run = TrainingRun(*given, **named)
            model = run.model

            def losses(batch: Any) -> dict[str, torch.Tensor]:
                factor = math.nan if any(torch.equal(batch.input_ids.cpu(), w) for w in wrong) else 1.0
                return {name: factor * value for name, value in model.losses(batch).items()}

            run.loss_fn = losses
            return run

        monkeypatch.setattr(pretraining, "TrainingRun", make)

    return spoil


def test_a_nan_step_is_skipped_and_logged(recipe_of: Recipes, poison: Any, capsys: pytest.CaptureFixture[str]) -> None:
    poison([2])
    recipe = recipe_of("gpt2", logging_steps=2, eval_steps=6)
    result = pretrain(recipe)
    found = [line for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "data" in line]
    assert [line["step"] for line in found] == [2, 3, 4, 6]
    assert found[1]["skipped"] == "the loss is nan"
    assert "loss" not in found[1]
    assert all("skipped" not in line for line in found if line["step"] != 3)
    assert math.isfinite(result["loss"])
    assert capsys.readouterr().err.count("step 3 is skipped") == 1


def test_nan_weights_are_not_saved(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of("gpt2", max_steps=3, eval_steps=1)
    step = torch.optim.AdamW.step

    def spoilt(self: Any, closure: Any = None) -> None:
        step(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].fill_(math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", spoilt)
    with pytest.raises(UserError, match=r"Weights contain NaN or Inf .* final/ is not written"):
        pretrain(recipe)
    assert not (Path(recipe.output_dir) / "final").exists()
    for line in (Path(recipe.output_dir) / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_skipped_step_does_not_update_the_ema(recipe_of: Recipes, poison: Any) -> None:
    """The EMA moves at every other step, also after the skipped one."""
    poison([2])
    recipe = recipe_of("gpt2", ema_decay=0.9, save_steps=1, save_total_limit=0, eval_steps=6)
    pretrain(recipe)
    means = [load_file(Path(recipe.output_dir) / f"checkpoint-{i}/training/average.safetensors") for i in range(1, 7)]
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(means)]
    assert moved == [True, False, True, True, True], "only step 3 was skipped"


def test_a_diverged_run_names_the_text_and_rewinds(recipe_of: Recipes, poison: Any, tmp_path: Path) -> None:
    poison([3, 4, 5])
    fields = dict(dropout=0.2, max_steps=9, max_bad_steps=3, save_total_limit=0, eval_steps=100)
    for name in ("straight", "stopped"):
        recipe = recipe_of("gpt2", output_dir=str(tmp_path / name), **fields)
        with pytest.raises(UserError) as stopped:
            pretrain(recipe)
        said = str(stopped.value)
        assert "3 steps in a row were skipped, from step 4 on: the loss is nan at step 6" in said
        assert "contains NaN or Inf in embed.tokens, " in said
        assert "blocks.0" in said
        assert any(word in said for word in ("the", "river", "otter", "garden"))
        assert "--rewind 0" in said
    with pytest.raises(UserError, match="no intact checkpoint 4 steps before step 4"):
        pretrain(recipe, resume=True, rewind=4)

    pretrain(replace(recipe, output_dir=str(tmp_path / "straight")), resume=True, rewind=1)
    stored = load_recipe(tmp_path / "straight" / "recipe.yaml", Recipe)
    assert stored.skips == ((2, 4),)
    found = read_log(tmp_path / "straight" / "log.jsonl")
    assert not any("skipped" in line for line in found)
    assert {"step": 2, "rewound_from": 6, "passed_over": 4} in found
    assert [line["step"] for line in found if "loss" in line] == list(range(1, 10))

    # a further resume passes over the same text
    broken, make = tmp_path / "stopped", pretraining.TrainingRun

    def stop(step: int, model: Model) -> None:
        if step == 5:
            raise KeyboardInterrupt

    pretraining.TrainingRun = lambda *a, **k: make(*a, **k, hooks=[(1, stop)])
    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain(recipe, resume=True, rewind=1)
    finally:
        pretraining.TrainingRun = make
    pretrain(recipe, resume=True)
    assert lines(broken) == lines(tmp_path / "straight")
    assert weights(broken) == weights(tmp_path / "straight")


def test_rewinding_a_run_without_steps_raises(recipe_of: Recipes) -> None:
    recipe = recipe_of("gpt2")
    for back, why in ((0, "no logged steps to rewind"), (-1, "at least 0")):
        with pytest.raises(UserError, match=why):
            pretrain(recipe, resume=True, rewind=back)


# --- the data


def test_the_data_hash_does_not_depend_on_the_split(recipe_of: Recipes, shards_of: Make) -> None:
    batches = batches_of(recipe_of("bert", per_device_train_batch_size=8), shards_of("bert"))
    whole = batches(0)
    assert hashed(whole, 0) == hashed(split_micro_batches(whole, 1), 0) == hashed(split_micro_batches(whole, 3), 0)
    assert hashed(whole, 0) != hashed(whole, 1)
    assert hashed(whole, 0) != hashed(batches(1), 0)
    labels = whole[0].labels.copy()
    labels[-1, -1] += 1
    assert hashed([whole[0]._replace(labels=labels)], 0) != hashed(whole, 0)
    hashed(
        [whole[0]._replace(target_positions=whole[0].target_positions[:, :0])], 0
    )  # a batch without targets is allowed


# --- memory


def short_of_memory(model: Model, rows: int) -> Callable[[Any], dict[str, torch.Tensor]]:
    """A loss that runs out of memory above this many rows."""

    def losses(batch: Any) -> dict[str, torch.Tensor]:
        if len(batch.input_ids) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model.losses(batch)

    return losses


@pytest.mark.parametrize("rows", [1, 3])
def test_smaller_micro_batches_give_the_same_gradient(
    rows: int, recipe_of: Recipes, shards_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("bert", per_device_train_batch_size=6, gradient_accumulation_steps=2)
    shards = shards_of("bert")
    model, batches = build_pretrain_model(recipe, shards.tokenizer), batches_of(recipe, shards)
    seen: list[list[torch.Tensor]] = []

    class Watch(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    run, optimizer = TrainingRun(recipe, CPU, model, batches), Watch(model.parameters(), lr=0.0)
    expected = [
        train_step(run, StepRunner(model, model.losses, run.compute), optimizer, batches(i), i, 0.0).item()
        for i in range(2)
    ]
    found = [
        train_step(
            run, StepRunner(model, short_of_memory(model, rows), run.compute), optimizer, batches(i), i, 0.0
        ).item()
        for i in range(2)
    ]
    assert found == pytest.approx(expected, rel=1e-6)
    for i in range(2):
        for a, b in zip(seen[i], seen[i + 2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    said = capsys.readouterr().err
    assert f"micro-batches have {rows} rows" in said
    assert said.count("out of memory") == {1: 3, 3: 1}[rows], "each size is said once, and kept for the next step"


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_out_of_memory_in_an_evaluation_halves_its_batches(
    family: str,
    recipe_of: Recipes,
    shards_of: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe, shards = recipe_of(family, per_device_train_batch_size=6), shards_of(family)
    model = build_pretrain_model(recipe, shards.tokenizer)
    rows = make_row_dataset(recipe, shards, held_out=True)
    wanted = HeldOutLoss(recipe, rows, shards.tokenizer, CPU)(model)["eval_loss"]
    evaluate, whole = HeldOutLoss(recipe, rows, shards.tokenizer, CPU), model.losses
    model.losses = lambda batch, **_: whole(batch) if len(batch.input_ids) <= 2 else no_room()  # type: ignore[method-assign]
    assert evaluate(model)["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert "evaluations use batches of 2 rows" in capsys.readouterr().err
    model.losses = lambda batch, **_: no_room()  # type: ignore[method-assign]
    with pytest.raises(UserError, match="Out of memory in an evaluation"):
        evaluate(model)


def no_room() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_out_of_memory_in_the_optimizer_names_a_smaller_one(recipe_of: Recipes, shards_of: Make) -> None:
    recipe, shards = recipe_of("bert"), shards_of("bert")
    model, batches = build_pretrain_model(recipe, shards.tokenizer), batches_of(recipe, shards)

    class Large(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            no_room()

    with pytest.raises(UserError, match="--optim adafactor needs little"):
        train_step(
            TrainingRun(recipe, CPU, model, batches),
            StepRunner(model, model.losses, CPU),
            Large(model.parameters(), lr=0.1),
            batches(0),
            0,
            0.1,
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_smaller_micro_batches_with_cuda_graphs_give_the_same_gradient(recipe_of: Recipes, shards_of: Make) -> None:
    """A replay overwrites the memory that the previous replay left."""
    recipe, shards = recipe_of("bert", per_device_train_batch_size=8), shards_of("bert")
    batches = batches_of(recipe, shards)
    found: list[list[torch.Tensor]] = []
    for compute, halvings in ((GPU, 0), (GRAPHS, 2)):
        model = build_pretrain_model(recipe, shards.tokenizer).to("cuda")
        run, optimizer = TrainingRun(recipe, compute, model, batches), torch.optim.SGD(model.parameters(), lr=0.1)
        run.halvings = halvings
        runner = build_step_runner(run)
        for i in range(4):
            train_step(run, runner, optimizer, batches(i), i, 0.1)
        found.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_out_of_memory_with_one_row_raises(recipe_of: Recipes, shards_of: Make) -> None:
    recipe, shards = recipe_of("bert"), shards_of("bert")
    model, batches = build_pretrain_model(recipe, shards.tokenizer), batches_of(recipe, shards)
    run, optimizer = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe)
    with pytest.raises(UserError, match=r"one row per micro-batch.*--max-seq-length"):
        train_step(run, StepRunner(model, short_of_memory(model, 0), run.compute), optimizer, batches(0), 0, 0.0)
    together = [b._replace(group_ids=np.zeros((4, 1), int)) for b in batches(0)]
    run.halvings = 0
    with pytest.raises(UserError, match="contrasted with each other"):
        train_step(run, StepRunner(model, short_of_memory(model, 2), run.compute), optimizer, together, 0, 0.0)

    def other(batch: Any) -> dict[str, torch.Tensor]:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        train_step(run, StepRunner(model, other, run.compute), optimizer, batches(0), 0, 0.0)


def test_a_resumed_run_keeps_its_micro_batch_size(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout is seeded per micro-batch, so a run with another split would differ."""

    def make(*given: Any, hooks: Any = (), **named: Any) -> TrainingRun:
        run = TrainingRun(*given, **named, hooks=list(hooks))
        run.loss_fn = short_of_memory(run.model, 2 if not run.halvings else 4)
        return run

    def stop(step: int, model: Model) -> None:
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pretraining, "TrainingRun", make)
    pretrain(recipe_of("bert", dropout=0.2, output_dir=str(tmp_path / "straight")))
    stopped = recipe_of("bert", dropout=0.2, output_dir=str(tmp_path / "stopped"))
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: make(*a, **k, hooks=[(1, stop)]))
    with pytest.raises(KeyboardInterrupt):
        pretrain(stopped)
    monkeypatch.setattr(pretraining, "TrainingRun", TrainingRun)  # now there is room, and the split stays all the same
    pretrain(stopped, resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


# --- float16


def test_float16_loss_is_close_to_float32(recipe_of: Recipes, shards_of: Make) -> None:
    recipe, shards = recipe_of("gpt2", max_steps=8, warmup_steps=1, learning_rate=1e-2), shards_of("gpt2")
    start, batches = build_pretrain_model(recipe, shards.tokenizer), batches_of(recipe, shards)
    losses = [fit(TrainingRun(recipe, compute, copy.deepcopy(start), batches)).loss for compute in (CPU, HALF)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


def test_loss_scale_falls_until_it_fits_and_is_resumed(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overflows of a scale that is far too large do not end the run."""
    monkeypatch.setattr(guards, "INIT_LOSS_SCALE", 2.0**40)
    fields = dict(fp16=True, bf16=None, max_steps=40, max_bad_steps=2, save_steps=10, eval_steps=100, dropout=0.1)
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "straight"), **fields))
    found = read_log(tmp_path / "straight" / "log.jsonl")
    skipped = [line["step"] for line in found if "skipped" in line]
    assert 2 < len(skipped) < 30
    assert skipped == list(range(1, len(skipped) + 1))
    assert "is skipped" not in capsys.readouterr().err

    def stop(step: int, model: Model) -> None:
        if step == 13:
            raise KeyboardInterrupt

    recipe = recipe_of("gpt2", output_dir=str(tmp_path / "stopped"), **fields)
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, stop)]))
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe)
    monkeypatch.setattr(pretraining, "TrainingRun", TrainingRun)
    pretrain(recipe, resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_loss_scale_grows_after_steps_without_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "SCALE_GROWTH_STEPS", 3)
    guard, scales = Guard(TrainingConfig(), HALF), []
    for norm in (math.inf, 1.0, 1.0, 1.0, 1.0, math.inf):
        guard.should_skip(torch.tensor(1.0), torch.tensor(norm), 0)
        assert guard.loss_scale is not None
        scales.append(math.log2(guard.loss_scale.item()))
    assert scales == [15, 15, 15, 16, 16, 15]


def test_invalid_options_raise(recipe_of: Recipes) -> None:
    for fields, why in (
        ({"spike_factor": 0.5}, "more than 1"),
        ({"max_bad_steps": 0}, "at least 1"),
        ({"fp16": True, "bf16": True}, "choose one"),
    ):
        with pytest.raises(UserError, match=why):
            recipe_of("bert", **fields).check()
