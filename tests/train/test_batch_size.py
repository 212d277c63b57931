"""The micro-batch follows from memory, and the global batch stays what it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firth.core.errors import UserError
from firth.tokens import ShardSet
from firth.train import Recipe, load_recipe, pretrain, read_log
from firth.train import batch_size as module
from firth.train.batch_size import MemoryTrial, resolve_batch_size, whole_batch_recipe
from firth.train.distributed import SINGLE_PROCESS
from firth.train.recipe import parse_batch_rows
from firth.train.resume import merge_recipe

Recipes = Callable[..., Recipe]
AUTO: dict[str, Any] = {"per_device_train_batch_size": 0}


def sizes(recipe: Recipe) -> tuple[int, int, int]:
    return recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps, recipe.processes


def resolved(recipe: Recipe, shards: ShardSet) -> tuple[int, int, int]:
    return sizes(resolve_batch_size(recipe, shards, SINGLE_PROCESS))


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"per_device_train_batch_size": 4}, (4, 1, 1)),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}, (4, 3, 1)),
        (AUTO, (128, 1, 1)),  # 4,096 tokens in rows of 32
        (AUTO | {"global_batch_tokens": 32768}, (256, 4, 1)),  # at most 8,192 tokens at once on a CPU
        (AUTO | {"global_batch_tokens": 2048}, (64, 1, 1)),
        (AUTO | {"global_batch_tokens": 5}, (1, 1, 1)),
        (AUTO | {"global_batch_tokens": 2048, "gradient_accumulation_steps": 8}, (8, 8, 1)),
        ({"per_device_train_batch_size": 8, "global_batch_tokens": 2048}, (8, 8, 1)),
        (AUTO | {"global_batch_tokens": 2048, "processes": 4}, (16, 1, 4)),
        (AUTO | {"global_batch_tokens": 2048, "processes": 6}, (10, 1, 6)),  # 60 rows: as many for each
    ],
)
def test_the_split_of_a_global_batch(
    fields: dict[str, Any], wanted: tuple[int, int, int], recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    recipe = recipe_of("bert", **fields)
    recipe.check()
    assert resolved(recipe, shards_of("bert")) == wanted
    assert whole_batch_recipe(recipe).global_batch_size == wanted[0] * wanted[1] * wanted[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"per_device_train_batch_size": 5, "global_batch_tokens": 2048},
        {"per_device_train_batch_size": 8, "global_batch_tokens": 2048, "gradient_accumulation_steps": 2},
        AUTO | {"global_batch_tokens": 2048, "gradient_accumulation_steps": 7},
    ],
)
def test_sizes_that_contradict_each_other(
    fields: dict[str, Any], recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    with pytest.raises(UserError, match=r"64 rows of 32 per device.*do not make"):
        resolved(recipe_of("bert", **fields), shards_of("bert"))


def test_a_batch_that_is_not_whole_rows_is_said(
    recipe_of: Recipes, shards_of: Callable[[str], ShardSet], capsys: pytest.CaptureFixture[str]
) -> None:
    resolved(recipe_of("bert", **AUTO, global_batch_tokens=2100), shards_of("bert"))
    said = capsys.readouterr().err
    assert "2,080 tokens instead of 2,100" in said
    assert "a step computes 1 micro-batch of 65 rows" in said


def test_ramps_are_checked_with_the_chosen_batch(recipe_of: Recipes, shards_of: Callable[[str], ShardSet]) -> None:
    recipe = recipe_of("bert", **AUTO, global_batch_tokens=64, batch_ramp=0.5)
    recipe.check()
    with pytest.raises(UserError, match="2 rows cannot be halved"):
        resolved(recipe, shards_of("bert"))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a GPU with this much free memory measure steps of `fixed` bytes and `per_row` bytes for each row."""

    def set_memory(free: int, fixed: int, per_row: int) -> None:
        monkeypatch.setattr(module, "select_device", lambda *args: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        trial = SimpleNamespace(peak_bytes=lambda rows: fixed + per_row * rows)
        monkeypatch.setattr(module, "MemoryTrial", lambda *args: trial)

    return set_memory


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        (10**9, (256, 1, 1)),  # the global batch at once
        (200_000, (128, 2, 1)),  # 0.8 * 200,000 - 10,000 = 150 rows of 1,000 bytes
        (20_000, (4, 64, 1)),
        (5_000, (1, 256, 1)),  # not even the weights: the run itself says what to do
    ],
)
def test_a_gpu_gets_the_rows_that_fit(
    free: int, wanted: tuple[int, int, int], fake_gpu: Any, recipe_of: Recipes, shards_of: Callable[[str], ShardSet]
) -> None:
    fake_gpu(free, fixed=10_000, per_row=1_000)
    recipe = recipe_of("bert", **AUTO, global_batch_tokens=8192)
    assert resolved(recipe, shards_of("bert")) == wanted


def test_what_cannot_be_measured_on_a_gpu_gets_few_rows(
    fake_gpu: Any, recipe_of: Recipes, shards_of: Callable[[str], ShardSet], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu(10**12, fixed=1, per_row=1)
    recipe = recipe_of("bert", **AUTO, global_batch_tokens=16384, parallel="fsdp", optim="adamw")
    assert resolved(recipe, shards_of("bert")) == (128, 4, 1)
    assert "memory is not measured with --parallel fsdp" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_traced_step_gives_the_activations(
    family: str, recipe_of: Recipes, shards_of: Callable[[str], ShardSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are linear in rows, and less with activation checkpointing; a GPU's trial takes whole steps."""
    trial = MemoryTrial(recipe_of(family, **AUTO), shards_of(family), torch.device("cpu"))
    two, four, eight = (trial.saved_bytes(rows) for rows in (2, 4, 8))
    assert 0 < two < four
    assert eight - four == pytest.approx(2 * (four - two), rel=0.05)
    checkpointed = MemoryTrial(
        recipe_of(family, **AUTO, gradient_checkpointing=True), shards_of(family), torch.device("cpu")
    )
    assert checkpointed.saved_bytes(8) < eight
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    assert trial.peak_bytes(2) == 1000
    assert trial.optimizer.state, "the optimizer state is allocated"


def test_a_cpu_with_little_memory_gets_few_rows(
    recipe_of: Recipes, shards_of: Callable[[str], ShardSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda device: 3_000_000)
    rows, accumulation, _ = resolved(recipe_of("bert", **AUTO), shards_of("bert"))
    assert rows < 64
    assert rows * accumulation == 128


def test_two_small_steps_predict_a_large_one(recipe_of: Recipes, shards_of: Callable[[str], ShardSet]) -> None:
    trial = MemoryTrial(recipe_of("bert", **AUTO), shards_of("bert"), torch.device("cpu"))
    fixed, per_row = module.fit_line(8, trial.saved_bytes(8), trial.saved_bytes(16))
    assert fixed + 64 * per_row == pytest.approx(trial.saved_bytes(64), rel=0.1)


def test_a_run_records_its_split_and_a_resume_repeats_it(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also on a machine that would choose another one: log and weights are bit-equal."""
    monkeypatch.setattr(module, "CPU_MICRO_BATCH_TOKENS", 64)
    recipe = recipe_of("bert", dropout=0.1, **AUTO, global_batch_tokens=128, max_steps=4, eval_steps=2)
    run = Path(recipe.output_dir)
    pretrain(recipe)
    assert sizes(load_recipe(run / "recipe.yaml", Recipe)) == (2, 2, 1)
    shutil.copytree(run, tmp_path / "straight")
    for folder in ("final", "checkpoint-4"):
        shutil.rmtree(run / folder)
    (run / "results.json").unlink()
    monkeypatch.setattr(module, "CPU_MICRO_BATCH_TOKENS", 4096)
    pretrain(recipe, resume=True)
    assert sizes(load_recipe(run / "recipe.yaml", Recipe)) == (2, 2, 1)
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
    assert read_log(run / "log.jsonl")[0]["tokens"] <= 128


def test_a_resumed_run_keeps_its_global_batch(recipe_of: Recipes) -> None:
    saved = recipe_of("bert", global_batch_tokens=1024, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    plain = replace(saved, per_device_train_batch_size=0, gradient_accumulation_steps=1, global_batch_tokens=0)
    assert sizes(merge_recipe(saved, plain)) == (16, 2, 1)
    assert sizes(merge_recipe(saved, replace(plain, global_batch_tokens=1024))) == (16, 2, 1)
    assert merge_recipe(saved, plain).global_batch_tokens == 1024
    assert sizes(merge_recipe(saved, replace(plain, processes=4))) == (16, 2, 1), "32 rows, 8 for each process"
    assert sizes(merge_recipe(saved, replace(plain, per_device_train_batch_size=16))) == (16, 2, 1)
    smaller = replace(plain, per_device_train_batch_size=4)
    with pytest.raises(UserError, match="per_device_train_batch_size: 16 -> 4"):
        merge_recipe(saved, smaller)
    assert sizes(merge_recipe(saved, smaller, allow_change=True)) == (4, 8, 1)
    with pytest.raises(UserError, match="does not divide"):
        merge_recipe(saved, replace(plain, per_device_train_batch_size=5), allow_change=True)
    with pytest.raises(UserError, match="global_batch_tokens: 1024 -> 2048"):
        merge_recipe(saved, replace(plain, global_batch_tokens=2048))
    other = merge_recipe(saved, replace(plain, global_batch_tokens=2048), allow_change=True)
    assert (other.global_batch_tokens, other.per_device_train_batch_size) == (2048, 0), "to be split again"
    by_rows = replace(saved, global_batch_tokens=0)
    assert sizes(merge_recipe(by_rows, plain)) == (16, 2, 1)


@pytest.mark.parametrize("text", ["0", "-1", "much", "1.5"])
def test_neither_rows_nor_auto(text: str) -> None:
    with pytest.raises(UserError, match="neither a whole number of at least 1 nor auto"):
        parse_batch_rows(text, "--per-device-train-batch-size")
