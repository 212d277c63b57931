"""The loop against one written by hand, splits of the batch, exact resume, the log."""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firth.core.errors import UserError
from firth.core.files import find_corruption
from firth.models import (
    MOBILEBERT_DISTILLATION,
    KnowledgeTransfer,
    Model,
    load_model,
    make_model,
    read_tensors,
    with_extras,
)
from firth.models.attention import Attention
from firth.models.config import SentencePairHead, SpanBoundaryHead
from firth.models.presets import bert, ib_bert, mobilebert
from firth.objectives import MLM, Batch, CLMThenMLM, CounterRNG
from firth.text import Corpus, Document
from firth.tokens import ShardSet, load_tokenizer, open_shards, prepare, train_tokenizer
from firth.train import (
    ComputeConfig,
    Interrupted,
    Recipe,
    TrainingConfig,
    TrainingRun,
    fit,
    load_recipe,
    pretrain,
    read_log,
)
from firth.train.dataloader import (
    make_batch,
    make_batch_rng,
    make_held_out_dataset,
    make_pretrain_batch_fn,
    make_row_dataset,
    open_recipe_shards,
)
from firth.train.distributed import DistContext
from firth.train.held_out import HeldOutLoss, choose_eval_rows
from firth.train.optim import learning_rate_at
from firth.train.prefetch import prefetch_batches
from firth.train.pretrain import build_pretrain_model
from firth.train.recipe import EngineConfig
from firth.train.speed import SpeedMeter
from firth.train.step import dropout_seed, train_step
from firth.train.step_runner import StepRunner

FAMILIES = ("bert", "gpt2", "t5")
pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Recipes = Callable[..., Recipe]
Make = Callable[[str], ShardSet]


def lines(run: str | Path) -> list[str]:
    return (Path(run) / "log.jsonl").read_text().splitlines()


def weights(run: str | Path) -> bytes:
    return (Path(run) / "final" / "model.safetensors").read_bytes()


def batches_of(recipe: Recipe, shards: ShardSet) -> Callable[[int], list[Batch]]:
    return make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)


def gradient(model: Model, micro: Sequence[Batch], limit: float = 0.0) -> tuple[float, list[torch.Tensor]]:
    """The loss and the gradient of one step, recorded by an optimizer that does nothing."""
    seen: list[torch.Tensor] = []

    class Watch(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

    run = TrainingRun(TrainingConfig(max_grad_norm=limit), CPU, model, lambda step: micro)
    total = train_step(
        run, StepRunner(model, model.losses, run.compute), Watch(model.parameters(), lr=0.0), micro, 0, 0.0
    )
    return total.item(), seen


@pytest.mark.parametrize("family", FAMILIES)
def test_three_families_lower_their_loss(family: str, recipe_of: Recipes) -> None:
    recipe = recipe_of(family, max_steps=30, learning_rate=1e-2, save_steps=100)
    pretrain(recipe)
    losses = [line["loss"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line]
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5


def test_the_loop_equals_a_hand_written_one(recipe_of: Recipes, shards_of: Make) -> None:
    fields = dict(max_steps=4, warmup_steps=2, eval_steps=4)
    recipe = recipe_of("bert", optim="adamw", learning_rate=1e-2, weight_decay=0.1, **fields)
    shards = shards_of("bert")
    batches, theirs = batches_of(recipe, shards), build_pretrain_model(recipe, shards.tokenizer)
    ours = copy.deepcopy(theirs)
    outcome = fit(TrainingRun(recipe, CPU, ours, batches))

    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, fused=False)
    for step, lr in enumerate([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2 / 2]):
        (batch,) = batches(step)
        batch = batch.to(CPU.device)
        logits = theirs.logits(batch)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_split_of_the_batch_gives_the_same_gradient(family: str, recipe_of: Recipes, shards_of: Make) -> None:
    recipe = recipe_of(family, per_device_train_batch_size=8)
    shards = shards_of(family)
    model = build_pretrain_model(recipe, shards.tokenizer)
    whole = batches_of(recipe, shards)(0)
    loss, expected = gradient(model, whole)
    for size in (1, 2, 4):
        split = batches_of(
            replace(recipe, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size), shards
        )(0)
        found_loss, found = gradient(model, split)
        assert found_loss == pytest.approx(loss, rel=1e-5)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_micro_batches_are_weighted_by_their_targets() -> None:
    """Five targets in one and one in the other: the mean is over six, not over two means."""
    model = make_model(bert(1, 32, 2, 20, dropout=0.0, attention_dropout=0.0))
    tokens = np.arange(12).reshape(2, 6) + 5
    positions = np.tile(np.arange(6), (2, 1))
    labels = np.array([[5, 6, 7, 8, 9, -100], [-100, -100, -100, 11, -100, -100]])
    whole = Batch(tokens, target_positions=positions, labels=labels)
    halves = [Batch(tokens[i : i + 1], target_positions=positions[i : i + 1], labels=labels[i : i + 1]) for i in (0, 1)]
    assert [b.num_targets for b in halves] == [5, 1]
    logits = model.logits(whole.to(CPU.device)).flatten(0, 1)
    mean = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels).flatten(), ignore_index=-100).item()
    loss, expected = gradient(model, [whole])
    split_loss, split = gradient(model, halves)
    assert loss == pytest.approx(mean, rel=1e-5)
    assert split_loss == pytest.approx(mean, rel=1e-5)
    for a, b in zip(split, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_each_loss_is_averaged_over_its_own_count() -> None:
    """Four rows with 3, 1, 0 and 2 targets and one pair each: as one, two and four micro-batches."""
    model = make_model(
        bert(1, 32, 2, 20, dropout=0.0, attention_dropout=0.0, extras=(SentencePairHead(), SpanBoundaryHead()))
    )
    tokens = np.arange(24).reshape(4, 6) % 13 + 5
    labels = np.array([[5, 6, 7], [9, -100, -100], [-100, -100, -100], [-100, 11, 12]])
    around = np.tile(np.array([[0, 4, 0], [0, 4, 1], [0, 4, 2]]), (4, 1, 1))
    positions = np.tile(np.arange(1, 4), (4, 1))
    whole = Batch(
        tokens, target_positions=positions, labels=labels, span_boundaries=around, pair_labels=np.array([0, 1, 1, 0])
    )

    def split(size: int) -> list[Batch]:
        return [Batch(*(None if a is None else a[i : i + size] for a in whole)) for i in range(0, 4, size)]

    parts = model.losses(whole.to(CPU.device))
    by_hand = parts["targets"].item() / 6 + parts["pairs"].item() / 4
    loss, expected = gradient(model, [whole])
    assert loss == pytest.approx(by_hand, rel=1e-6)
    for size in (1, 2):
        found_loss, found = gradient(model, split(size))
        assert found_loss == pytest.approx(by_hand, rel=1e-6)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_loss_without_targets_is_0() -> None:
    """A step without a target still trains on its sentence pairs."""
    model = make_model(bert(1, 32, 2, 20, dropout=0.0, attention_dropout=0.0, extras=(SentencePairHead(),)))
    batch = Batch(
        np.array([[5, 6]]), target_positions=np.array([[0]]), labels=np.array([[-100]]), pair_labels=np.array([1])
    )
    loss, _ = gradient(model, [batch])
    assert loss == pytest.approx(model.losses(batch.to(CPU.device))["pairs"].item(), rel=1e-6)


def test_gradients_are_clipped(recipe_of: Recipes, shards_of: Make) -> None:
    shards = shards_of("bert")
    model = build_pretrain_model(recipe_of("bert"), shards.tokenizer)
    micro = batches_of(recipe_of("bert"), shards)(0)

    def norm(limit: float) -> float:
        _, found = gradient(model, micro, limit)
        return torch.cat([g.flatten() for g in found]).norm().item()

    assert norm(0.0) > 1e-2
    assert norm(1e-3) == pytest.approx(1e-3, rel=1e-3)


def test_the_seed_determines_the_run(recipe_of: Recipes, tmp_path: Path) -> None:
    found = {}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(recipe_of("gpt2", dropout=0.1, seed=seed, max_steps=3, output_dir=str(tmp_path / name)))
        found[name] = weights(tmp_path / name), lines(tmp_path / name)
    assert found["a"] == found["b"]
    assert found["a"][0] != found["c"][0]
    assert found["a"][1] != found["c"][1]


def test_the_log(recipe_of: Recipes) -> None:
    recipe = recipe_of("gpt2", max_steps=5, eval_steps=2, warmup_steps=1)
    result = pretrain(recipe)
    found = read_log(Path(recipe.output_dir) / "log.jsonl")
    steps = [line for line in found if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert all(
        [name for name in line if name != "weight_rms"]
        == ["step", "loss", "learning_rate", "tokens", "targets", "words_seen", "passes", "grad_norm", "data"]
        for line in steps
    )
    assert ["weight_rms" in line for line in steps] == [False] * 4 + [recipe.optim == "muon"]
    training = replace(recipe, max_steps=5)
    assert [line["learning_rate"] for line in steps] == [learning_rate_at(i, training) for i in range(5)]
    tokens = [line["tokens"] for line in steps]
    assert tokens == sorted(tokens)
    assert 0 < tokens[0] <= 4 * 32
    evaluations = [line for line in found if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4, 5]
    assert result["loss"] == steps[-1]["loss"]
    assert result["eval_loss"] == evaluations[-1]["eval_loss"]
    assert result["steps"] == 5
    assert json.loads((Path(recipe.output_dir) / "results.json").read_text()) == result


def test_logging_steps(recipe_of: Recipes) -> None:
    recipe = recipe_of("gpt2", max_steps=5, logging_steps=2)
    pretrain(recipe)
    assert [line["step"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line] == [2, 4, 5]


def test_eval_loss_is_the_mean_over_all_targets(recipe_of: Recipes, shards_of: Make) -> None:
    recipe = recipe_of("bert", per_device_train_batch_size=3, eval_rows=7)
    shards = shards_of("bert")
    model = build_pretrain_model(recipe, shards.tokenizer)
    rows = make_row_dataset(recipe, shards, held_out=True)
    assert rows.num_rows > 3, "more than one batch, or the test shows nothing"
    found = HeldOutLoss(recipe, rows, shards.tokenizer, CPU)(model)["eval_loss"]

    index = choose_eval_rows(recipe, rows)
    batch = recipe.objective(rows.get_rows(index), CounterRNG(recipe.seed, index), shards.tokenizer.vocab).to(
        CPU.device
    )
    with torch.no_grad():
        logits = model.eval().logits(batch).flatten(0, 1)
    labels = batch.labels.flatten()
    by_hand = [-logits[i].log_softmax(-1)[k].item() for i, k in enumerate(labels.tolist()) if k != -100]
    assert found == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_evaluations_read_rows_from_all_of_the_held_out_text(recipe_of: Recipes, tmp_path: Path) -> None:
    """Two files of one word each: the first rows would all be of one of them. Every seed reads the same rows."""
    words = [Document(" ".join([word] * (20 + i % 50)), "") for word in ("oak", "elm") for i in range(400)]
    tokenizer = train_tokenizer((d.text for d in words), "wordpiece", 100)
    prepare(words, tokenizer, tmp_path / "shards", held_out_share=0.5, dedup="none")
    shards, recipe = open_shards(tmp_path / "shards"), recipe_of("bert", eval_rows=40)
    rows = make_row_dataset(recipe, shards, held_out=True)
    index = choose_eval_rows(recipe, rows)
    assert len({*index.tolist()}) == 40 < rows.num_rows
    counts = [(rows.get_rows(index).input_ids == tokenizer.encode(word)[0]).sum() for word in ("oak", "elm")]
    assert 0.6 < counts[0] / counts[1] < 1.6
    for other in (replace(recipe, seed=1), replace(recipe, per_device_train_batch_size=2)):
        np.testing.assert_array_equal(choose_eval_rows(other, rows), index)
    everything = replace(recipe, eval_rows=10**6)
    np.testing.assert_array_equal(choose_eval_rows(everything, rows), np.arange(rows.num_rows))
    np.testing.assert_array_equal(choose_eval_rows(replace(recipe, order="stream"), rows), np.arange(40))


def test_evaluation_sampling_is_seeded(recipe_of: Recipes, shards_of: Make) -> None:
    """ELECTRA's generator samples: repeated evaluations give equal numbers, and each loss has its own mean."""
    shards = shards_of("bert")
    recipe = recipe_of("bert", per_device_train_batch_size=3, eval_rows=7)
    recipe = replace(recipe, model=with_extras(recipe.model, ("generator",)))
    rows = make_row_dataset(recipe, shards, held_out=True)
    model = build_pretrain_model(recipe, shards.tokenizer)
    evaluate = HeldOutLoss(recipe, rows, shards.tokenizer, CPU)
    torch.manual_seed(1)
    found = evaluate(model)["eval_loss"]
    torch.manual_seed(2)
    assert evaluate(model)["eval_loss"] == found

    answers, tokens, num_targets, num_tokens = 0.0, 0.0, 0, 0
    for first in range(0, min(7, rows.num_rows), 3):
        index = choose_eval_rows(recipe, rows)[first : first + 3]
        batch = recipe.objective(rows.get_rows(index), make_batch_rng(recipe, index), shards.tokenizer.vocab)
        torch.manual_seed(dropout_seed(recipe.seed, first, 0))
        with torch.no_grad():
            parts = model.losses(batch.to(CPU.device))
        answers, tokens = answers + parts["targets"].item(), tokens + parts["tokens"].item()
        num_targets, num_tokens = num_targets + batch.num_targets, num_tokens + batch.num_tokens
    assert found == pytest.approx(answers / num_targets + tokens / num_tokens, rel=1e-6)


def test_random_numbers_depend_on_the_step(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", per_device_train_batch_size=2, gradient_accumulation_steps=2, seed=5)
    found = make_batch_rng(recipe, np.arange(2, 9))
    assert found.seed == 5
    assert found.step is not None
    assert found.step.tolist() == [0, 0, 1, 1, 1, 1, 2]


def test_a_checkpoint_records_its_objective(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("bert", max_steps=2)
    pretrain(recipe)
    run = Path(recipe.output_dir)
    for folder in (run / "final", run / "checkpoint-2"):
        note = json.loads((folder / "config.json").read_text())["firth_objective"]
        assert (note["name"], note["kind"], note["rate"]) == ("mlm", "MLM", 0.15)
    load_model(run / "final").save(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_text() == (run / "final" / "config.json").read_text()
    changed = build_pretrain_model(
        replace(recipe, objective=replace(recipe.objective, rate=0.3)), load_tokenizer(run / "final")
    )
    assert changed.objective is not None
    assert (changed.objective["name"], changed.objective["rate"]) == (None, 0.3)


def test_continued_pretraining_keeps_the_eos_tokens(recipe_of: Recipes, tmp_path: Path) -> None:
    recipe = recipe_of("gpt2", max_steps=1)
    model = build_pretrain_model(recipe, open_shards(Path(recipe.data)).tokenizer)
    model.eos_token_ids = (3, 7)
    model.save(tmp_path / "taught")
    pretrain(replace(recipe, checkpoint=str(tmp_path / "taught"), output_dir=str(tmp_path / "more")))
    assert load_model(tmp_path / "more" / "final").eos_token_ids == (3, 7)


# --- stop and resume


class Stop(Exception):  # noqa: N818
    """Raised to interrupt a run."""


def stop_at(step: int) -> Callable[[int, Model], None]:
    def hook(now: int, model: Model) -> None:
        if now == step:
            raise Stop

    return hook


@pytest.mark.parametrize("family", FAMILIES)
def test_a_resumed_run_equals_an_uninterrupted_one(
    family: str, recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(dropout=0.2, gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=7, eval_steps=3)
    straight = recipe_of(family, output_dir=str(tmp_path / "straight"), **fields)
    pretrain(straight)
    stopped = recipe_of(family, output_dir=str(tmp_path / "stopped"), **fields)
    for step in (1, 3, 6):  # before the first checkpoint, one step after a checkpoint, on a checkpoint
        monkeypatch.setattr(
            pretraining, "TrainingRun", lambda *a, at=step, **k: TrainingRun(*a, **k, hooks=[(1, stop_at(at))])
        )
        with pytest.raises(Stop):
            pretrain(stopped, resume=True)
    monkeypatch.undo()
    pretrain(stopped, resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_a_changing_mask_rate_is_logged_and_resumes(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(objective=MLM(rate=0.4, rate_end=0.2), max_steps=4, save_steps=1)
    straight, stopped = (recipe_of("bert", output_dir=str(tmp_path / name), **fields) for name in ("straight", "half"))
    pretrain(straight)
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, stop_at(3))]))
    with pytest.raises(Stop):
        pretrain(stopped, resume=True)
    monkeypatch.undo()
    pretrain(stopped, resume=True)
    assert lines(tmp_path / "half") == lines(tmp_path / "straight")
    assert weights(tmp_path / "half") == weights(tmp_path / "straight")
    log = read_log(tmp_path / "straight" / "log.jsonl")
    assert [line["mask_rate"] for line in log if "loss" in line] == pytest.approx([0.4, 0.35, 0.3, 0.25])
    held_out = log[-1]["eval_loss"]  # at the rate of the end: that of a run with this rate throughout
    constant = replace(straight, objective=MLM(rate=0.2))
    shards = open_recipe_shards(constant)
    rows = make_held_out_dataset(constant, shards)
    assert rows is not None
    evaluate = HeldOutLoss(constant, rows, shards.tokenizer, CPU)
    assert evaluate(load_model(tmp_path / "straight" / "final"))["eval_loss"] == pytest.approx(held_out, rel=1e-6)


def test_minutes_are_planned_once_where_the_mask_rate_follows_the_steps(recipe_of: Recipes) -> None:
    plain = recipe_of("bert", minutes=1.0)
    assert pretraining.can_replan(plain)
    assert not pretraining.can_replan(replace(plain, objective=MLM(rate=0.3, rate_end=0.15)))
    assert not pretraining.can_replan(replace(plain, objective=CLMThenMLM()))


def test_a_run_that_starts_as_a_causal_model_times_both_phases(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first quarter has a label at every position; the run ends as an encoder."""
    timed: list[int] = []

    def time_steps(recipe: Recipe, compute: Any, model: Model, batch_fn: Any, *rest: Any, **k: Any) -> Any:
        timed.append(batch_fn(0)[0].labels.shape[1])
        return (6.0 if timed[-1] == 32 else 2.0), 0.0  # 3 seconds a step on average

    monkeypatch.setattr(pretraining, "time_steps", time_steps)
    recipe = recipe_of("bert", objective=CLMThenMLM(), max_steps=8, minutes=1.0)
    results = pretrain(recipe)
    assert timed == [32, MLM().num_slots(32)]
    assert results["steps"] == 8
    assert "eval_mlm_accuracy" in results
    assert load_model(Path(recipe.output_dir) / "final").config.prompt_form == "causal"


def test_a_run_with_an_unused_head_resumes(recipe_of: Recipes, tmp_path: Path) -> None:
    """A pair head with an objective without pairs: the optimizer has no state for it, before and after."""
    straight = recipe_of("bert", output_dir=str(tmp_path / "straight"))
    straight = replace(straight, model=with_extras(straight.model, ("pair",)))
    pretrain(straight)
    shutil.copytree(tmp_path / "straight", tmp_path / "stopped")
    for name in ("results.json", "final", "checkpoint-6"):
        gone = tmp_path / "stopped" / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    pretrain(replace(straight, output_dir=str(tmp_path / "stopped")), resume=True)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_a_run_killed_after_its_last_step_writes_its_results(recipe_of: Recipes) -> None:
    """Killed between the last checkpoint and results.json."""
    recipe = recipe_of("bert", max_steps=4)
    expected = pretrain(recipe)
    run = Path(recipe.output_dir)
    before = lines(run), weights(run)
    (run / "results.json").unlink()
    for file in (run / "final").iterdir():
        file.unlink()
    (run / "final").rmdir()
    result = pretrain(recipe, resume=True)
    assert (lines(run), weights(run)) == before
    assert (result["loss"], result["eval_loss"], result["steps"]) == (expected["loss"], expected["eval_loss"], 4)


def test_resuming_a_finished_run_changes_nothing(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=2)
    expected = pretrain(recipe)
    before = weights(recipe.output_dir)
    assert pretrain(recipe, resume=True) == expected
    assert weights(recipe.output_dir) == before


def test_another_recipe_raises_and_changes_nothing(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=2)
    pretrain(recipe)
    before = lines(recipe.output_dir)
    with pytest.raises(UserError, match=r"learning_rate: 0.004 -> 0.5.*--allow-change"):
        pretrain(replace(recipe, learning_rate=0.5), resume=True)
    assert lines(recipe.output_dir) == before


def test_an_allowed_change_is_reported_and_saved(recipe_of: Recipes, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of("bert", max_steps=4, eval_steps=2, warmup_steps=1)
    pretrain(recipe)
    run = Path(recipe.output_dir)
    before = lines(run)
    longer = replace(recipe, max_steps=6, learning_rate=0.5)
    assert pretrain(longer, resume=True, allow_change=True)["steps"] == 6
    said = capsys.readouterr().err
    assert "the recipe differs: learning_rate: 0.004 -> 0.5; max_steps: 4 -> 6" in said
    assert lines(run)[: len(before)] == before
    assert json.loads(lines(run)[-2])["learning_rate"] == learning_rate_at(5, longer)
    stored = load_recipe(run / "recipe.yaml", Recipe)
    assert (stored.max_steps, stored.learning_rate) == (6, 0.5)
    pretrain(longer, resume=True)  # from now on this is the recipe
    for fixed in ({"optim": "adamw"}, {"ema_decay": 0.9}, {"model": replace(recipe.model, num_layers=2)}):
        with pytest.raises(UserError, match=f"{next(iter(fixed))}.*restore the saved values"):
            pretrain(replace(longer, **fixed), resume=True, allow_change=True)


def test_changed_shards_raise(
    recipe_of: Recipes, shards_of: Make, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "shards"
    shutil.copytree(shards_of("bert").folder, data)
    recipe = recipe_of("bert", max_steps=2, data=str(data))
    pretrain(recipe)
    (Path(recipe.output_dir) / "results.json").unlink()
    tokens = data / "train" / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]]))
    with pytest.raises(UserError, match=r"damaged: train/tokens.bin does not match"):
        pretrain(recipe, resume=True)
    shutil.rmtree(data)
    prepare(Corpus([corpus_file]), load_tokenizer(shards_of("bert").folder / "tokenizer"), data, 0.2)
    with pytest.raises(UserError, match=r"not what it was .*--allow-change"):
        pretrain(recipe, resume=True)
    pretrain(recipe, resume=True, allow_change=True)
    assert "reads other shards" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_saves_a_checkpoint(
    number: int, code: int, recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = recipe_of("gpt2", dropout=0.2, output_dir=str(tmp_path / "straight"), save_steps=100)
    pretrain(straight)
    recipe = recipe_of("gpt2", dropout=0.2, save_steps=100)

    def press(step: int, model: Model) -> None:
        if step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, press)]))
    with pytest.raises(Interrupted, match="step 3 of 6") as stopped:
        pretrain(recipe)
    assert stopped.value.code == code
    assert [p.name for p in Path(recipe.output_dir).glob("checkpoint-*")] == ["checkpoint-3"]
    monkeypatch.undo()
    pretrain(recipe, resume=True)
    assert weights(recipe.output_dir) == weights(tmp_path / "straight")


HANG_SECONDS = 600


def assert_obeys_sigterm(child: int, stuck: Path) -> None:
    """Stop a child process that hangs for HANG_SECONDS once `stuck` exists: it must not wait that long."""
    while not stuck.exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    began = time.monotonic()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    assert time.monotonic() - began < HANG_SECONDS / 2, "3 s and the checkpoint, even on a busy machine"


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_a_signal_is_obeyed_during_a_long_step(
    where: str, recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends without waiting for the step; what is saved resumes as if it had never stopped."""
    fields = dict(dropout=0.2, save_steps=100, eval_steps=5, warmup_steps=0)
    pretrain(recipe_of("gpt2", **fields, output_dir=str(tmp_path / "straight")))
    recipe, stuck = recipe_of("gpt2", **fields), tmp_path / "stuck"

    def hang(*_: object) -> dict[str, float]:
        stuck.touch()
        time.sleep(HANG_SECONDS)
        return {}

    def slow_run(*args: object, **fields: object) -> TrainingRun:
        run = TrainingRun(*args, **fields)  # type: ignore[arg-type]
        if where == "step":
            run.before_step = lambda step: hang() if step == 3 else None
        else:
            run.evaluate = hang
        return run

    monkeypatch.setattr(pretraining, "TrainingRun", slow_run)
    child = os.fork()
    if not child:
        pretrain(recipe)
        os._exit(0)
    assert_obeys_sigterm(child, stuck)
    saved = [p.name for p in Path(recipe.output_dir).glob("checkpoint-*")]
    assert saved == (["checkpoint-3"] if where == "step" else [])  # no evaluation is left out of a resumed run
    monkeypatch.undo()
    pretrain(recipe, resume=True)
    assert weights(recipe.output_dir) == weights(tmp_path / "straight")


@pytest.mark.parametrize(("rank", "hangs_at"), [(0, 3), (1, 0)])
def test_a_signal_is_obeyed_during_a_long_step_of_several_processes(
    rank: int,
    hangs_at: int,
    recipe_of: Recipes,
    shards_of: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 of DDP saves without the others, which compute or wait in a collective."""
    loop = importlib.import_module("firth.train.loop")
    assert loop.STOP_GRACE_SECONDS + loop.PEER_GRACE_SECONDS < 5
    monkeypatch.setattr(loop, "STOP_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(loop, "PEER_GRACE_SECONDS", 0.1)
    recipe = recipe_of("gpt2", max_steps=6, save_steps=100, eval_steps=100, warmup_steps=0)
    shards, folder, stuck = shards_of("gpt2"), tmp_path / "run", tmp_path / "stuck"
    folder.mkdir()

    class Several(DistContext):
        world_size = 2

        def broadcast(self, value: Any) -> Any:
            if stuck.exists():
                time.sleep(HANG_SECONDS)  # the others do not come
            return value

    def hang(step: int) -> None:
        if step == hangs_at:
            stuck.touch()
            time.sleep(HANG_SECONDS)

    child = os.fork()
    if not child:
        several = Several()
        several.rank, several.strategy = rank, "ddp"
        model = build_pretrain_model(recipe, shards.tokenizer)
        run = TrainingRun(recipe, replace(CPU, dist_context=several), model, batches_of(recipe, shards), folder=folder)
        run.before_step = hang
        fit(run)
        os._exit(0)
    assert_obeys_sigterm(child, stuck)
    checkpoints = [p.name for p in folder.glob("checkpoint-*")]
    assert checkpoints == ([] if rank else ["checkpoint-3"])
    assert all(find_corruption(folder / name) is None for name in checkpoints)


def test_a_signal_during_the_collective_is_not_lost(recipe_of: Recipes, shards_of: Make, tmp_path: Path) -> None:
    """It arrives after this rank has voted to continue, so the run stops after the next step."""
    recipe = recipe_of("gpt2", max_steps=6, save_steps=100, eval_steps=100, warmup_steps=0)
    agreed: list[int] = []

    class Late(DistContext):
        def all_reduce_max(self, number: int) -> int:
            agreed.append(number)
            if len(agreed) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return number

    shards = shards_of("gpt2")
    model, compute = build_pretrain_model(recipe, shards.tokenizer), replace(CPU, dist_context=Late())
    with pytest.raises(Interrupted, match="stopped at step 3 of 6") as stopped:
        fit(TrainingRun(recipe, compute, model, batches_of(recipe, shards), folder=tmp_path))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert agreed == [0, 0, signal.SIGTERM]
    assert (tmp_path / "checkpoint-3").is_dir()


def test_nan_losses_stop_the_run(recipe_of: Recipes) -> None:
    recipe = recipe_of("gpt2", max_steps=6, save_steps=1, logging_steps=100, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step .*--learning-rate"):
        pretrain(recipe)
    assert not (Path(recipe.output_dir) / "final").exists()


def test_minutes_determine_the_steps(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining.time_steps, "__defaults__", (None, 0.05, None, None, ()))
    recipe = recipe_of("bert", max_steps=0, minutes=0.02, save_steps=1000)
    result = pretrain(recipe)
    stored = load_recipe(Path(recipe.output_dir) / "recipe.yaml", Recipe)
    assert stored.max_steps == result["steps"] >= 1
    assert stored.minutes == 0.02
    assert result["seconds"] < 60, "planned for 1.2 seconds"
    # the same command resumes with the same number of steps
    assert pretrain(recipe, resume=True)["steps"] == stored.max_steps


def test_dropout_depends_on_step_and_micro_batch() -> None:
    seeds = {dropout_seed(seed, step, micro) for seed in range(4) for step in range(10) for micro in range(4)}
    assert len(seeds) == 160
    assert all(0 <= s < 2**63 for s in seeds)


def test_distillation_trains_and_resumes(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a teacher of two layers to a student of one."""
    teacher = recipe_of(output_dir=str(tmp_path / "teacher"))
    pretrain(replace(teacher, model=replace(teacher.model, num_layers=2)))
    fields = dict(teacher=str(tmp_path / "teacher" / "final"), dropout=0.2)
    pretrain(recipe_of(output_dir=str(tmp_path / "straight"), **fields))
    stopped = recipe_of(output_dir=str(tmp_path / "stopped"), **fields)
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, stop_at(3))]))
    with pytest.raises(Stop):
        pretrain(stopped)
    monkeypatch.undo()
    pretrain(stopped, resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")
    pretrain(recipe_of(output_dir=str(tmp_path / "alone"), dropout=0.2))
    assert lines(tmp_path / "alone") != lines(tmp_path / "straight")
    taught = pretraining.load_teacher(recipe_of(engine=EngineConfig(fused_attention=False), **fields), CPU)
    assert taught is not None
    assert [m.allow_fused for m in taught.modules() if isinstance(m, Attention)] == [False, False]


def test_a_student_does_not_repeat_the_masks_of_its_teacher(recipe_of: Recipes) -> None:
    """Same seed and rows, other masks: 12% of the masks agree by chance. Held-out masks are the same."""
    teacher, student = recipe_of(), recipe_of(teacher="somewhere")
    shards = open_recipe_shards(teacher)
    rows = make_row_dataset(teacher, shards, held_out=False)
    indices, vocab = np.arange(min(rows.num_rows, 32)), shards.tokenizer.vocab
    a, b = (make_batch(recipe, rows, indices, vocab, step=0) for recipe in (teacher, student))
    np.testing.assert_array_equal(a.document_ids, b.document_ids)
    masked = [batch.input_ids == vocab.mask for batch in (a, b)]
    both = (masked[0] & masked[1]).sum() / masked[0].sum()
    assert 0.05 < both < 0.25
    chain = replace(student, model=replace(student.model, num_layers=student.model.num_layers + 1))
    assert len({recipe.noise_seed for recipe in (teacher, student, chain)}) == 3
    model, losses = make_model(teacher.model), []
    for recipe in (teacher, student):
        losses.append(HeldOutLoss(recipe, rows, shards.tokenizer, CPU)(model))
    assert losses[0] == losses[1]


def test_knowledge_transfer_resumes_in_any_stage(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers one after the other, then distillation, with LAMB; embeddings wait for distillation."""
    given = recipe_of(output_dir=str(tmp_path / "teacher"), optim="lamb", max_steps=1)
    size = given.model.vocab_size
    pretrain(replace(given, model=ib_bert(2, 16, 2, 24, 8, size), warm_start="none"))
    fields = dict(teacher=str(tmp_path / "teacher" / "final"), optim="lamb", learning_rate=0.01, warm_start="none")
    fields |= dict(knowledge_transfer=KnowledgeTransfer("progressive", share=0.7))

    def student(folder: str) -> Recipe:
        made = recipe_of(output_dir=str(tmp_path / folder), **fields)
        return replace(made, model=mobilebert(2, 16, 2, 8, 8, size), distillation=MOBILEBERT_DISTILLATION)

    pretrain(student("straight"))
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, stop_at(3))]))
    with pytest.raises(Stop):
        pretrain(student("stopped"))
    monkeypatch.undo()
    theirs, mine = (read_tensors(tmp_path / name) for name in ("teacher/final", "stopped/checkpoint-2"))
    assert torch.equal(theirs["embed.tokens.weight"], mine["mobilebert.embeddings.word_embeddings.weight"])
    pretrain(student("stopped"), resume=True)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "straight")


def test_an_incompatible_teacher_raises(recipe_of: Recipes, tmp_path: Path) -> None:
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "gpt2"), max_steps=1))
    with pytest.raises(UserError, match="needs an encoder as student"):
        pretrain(recipe_of(teacher=str(tmp_path / "gpt2" / "final")))


def test_activation_checkpointing_changes_nothing(recipe_of: Recipes, tmp_path: Path) -> None:
    pretrain(recipe_of(output_dir=str(tmp_path / "once"), dropout=0.2))
    pretrain(recipe_of(output_dir=str(tmp_path / "twice"), dropout=0.2, gradient_checkpointing=True))
    assert lines(tmp_path / "once") == lines(tmp_path / "twice")


def test_speed_excludes_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens a step: a minute for the first three, which compile, then two steps a second."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    speed = SpeedMeter(step=40, tokens=400)
    for step, passed in ((41, 50.0), (42, 59.0), (43, 60.0)):
        now = 100.0 + passed
        assert not speed.is_warmed_up
        assert speed.measure(step, 10 * step) == ((10 * step - 400) / passed, passed / (step - 40))
        speed.end_warmup(step, 10 * step)
    assert speed.is_warmed_up
    assert speed.measure(43, 430) == (0.5, 20.0)  # a run that ends here
    now += 5
    assert speed.measure(53, 530) == (20.0, 0.5)


def test_out_of_memory_is_reported() -> None:
    def batches(step: int) -> Sequence[Batch]:
        raise MemoryError

    with pytest.raises(UserError, match="lower --per-device-train-batch-size"):
        next(prefetch_batches(batches, 0, lambda: 2))
