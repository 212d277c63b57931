"""Disk errors in the middle and at the end of a run: they are reported, and no partial file counts as complete."""

from __future__ import annotations

import errno
import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from firth.cli.main import report_error
from firth.core.files import find_corruption, write_text
from firth.models import Model
from firth.tokens import ShardSet
from firth.train import ComputeConfig, Recipe, TrainingRun, fit, pretrain
from firth.train.checkpoint import list_checkpoints
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset
from firth.train.loop import FitResult
from firth.train.pretrain import build_pretrain_model

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Recipes = Callable[..., Recipe]
Make = Callable[[str], ShardSet]
Quota = Callable[[int | None], None]


class Judged:
    """A run whose evaluations give these scores, one after each step; its weights are recorded."""

    def __init__(self, recipe: Recipe, shards: ShardSet) -> None:
        self.recipe, self.shards = recipe, shards
        self.weights: dict[int, torch.Tensor] = {}
        self.before: Callable[[int], None] = lambda step: None

    def fit(self, scores: list[float], resume: bool = False, first: int = 1, patience: int = 0) -> FitResult:
        recipe, step = self.recipe, iter(range(first, 100))
        model = build_pretrain_model(recipe, self.shards.tokenizer)

        def evaluate(model: Model) -> dict[str, float]:
            now = next(step)
            self.weights[now] = next(model.parameters()).detach().clone()
            self.before(now)
            return {"score": scores[now - 1]} if now <= len(scores) else {"score": math.nan}

        batches = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, self.shards, False), self.shards.tokenizer)
        run = TrainingRun(recipe, CPU, model, batches, evaluate, Path(recipe.output_dir), score_fn=lambda s: s["score"])
        run.patience = patience
        outcome = fit(run, resume)
        self.kept = next(model.parameters()).detach()
        return outcome


@pytest.fixture
def judged(recipe_of: Recipes, shards_of: Make, tmp_path: Path) -> Callable[..., Judged]:
    def make(**fields: Any) -> Judged:
        (tmp_path / "run").mkdir()
        some: dict[str, Any] = dict(max_steps=6, eval_steps=1, save_steps=100, warmup_steps=0, learning_rate=1e-2)
        return Judged(recipe_of("gpt2", **some | fields), shards_of("gpt2"))

    return make


@pytest.mark.parametrize(
    ("scores", "refused", "best", "said"),
    [
        ([0.1, 0.5, 0.3, 0.2, 0.2, 0.0], (2,), 3, "step 1 stays the best"),  # the next best is kept again
        ([0.1, 0.5, 0.1, 0.1, 0.1, 0.0], (2,), 1, "step 1 stays the best"),  # none is better than what is kept
        ([0.5, 0.4, 0.3, 0.2, 0.2, 0.0], (1,), 2, "none are saved yet"),
        ([0.5, 0.4, 0.3, 0.2, 0.2, 0.0], (1, 2, 3, 4, 5), 6, "none are saved yet"),  # the last weights need no disk
    ],
)
def test_the_best_saved_weights_are_loaded(
    scores: list[float],
    refused: tuple[int, ...],
    best: int,
    said: str,
    quota: Quota,
    judged: Callable[..., Judged],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = judged()
    run.before = lambda step: quota(10_000 if step in refused else None)
    found = run.fit(scores)
    quota(None)
    assert found.best_step == best
    assert torch.equal(run.kept, run.weights[best])
    assert not torch.equal(run.weights[1], run.weights[2]), "or the test shows nothing"
    stderr = capsys.readouterr().err
    assert stderr.count("the best weights could not be saved (File too large)") == len(refused)
    assert said in stderr
    folder = Path(run.recipe.output_dir)
    assert all(find_corruption(kept) is None for kept in folder.glob("best-*"))
    assert not list(folder.glob(".*.tmp"))


def test_patience_counts_from_the_best_evaluation(quota: Quota, judged: Callable[..., Judged]) -> None:
    run = judged()
    run.before = lambda step: quota(10_000 if step == 3 else None)
    found = run.fit([0.1, 0.05, 0.5, 0.05, 0.05, 0.0], patience=2)
    assert (found.steps, found.best_step) == (5, 1), "two that were no better after the third"


def test_each_checkpoint_keeps_its_own_best(judged: Callable[..., Judged], capsys: pytest.CaptureFixture[str]) -> None:
    """checkpoint-6 has a better best than checkpoint-4, from which the run resumes if checkpoint-6 is damaged."""
    run = judged(max_steps=9, save_steps=2)

    def stop(step: int) -> None:
        if step == 8:
            raise KeyboardInterrupt

    run.before = stop
    with pytest.raises(KeyboardInterrupt):
        run.fit([0.1, 0.5, 0.2, 0.2, 0.9, 0.2, 0.2])
    folder = Path(run.recipe.output_dir)
    assert [p.name for p in list_checkpoints(folder)] == ["checkpoint-6", "checkpoint-4"]
    assert sorted(p.name for p in folder.glob("best-*")) == ["best-2", "best-5"]
    (folder / "checkpoint-6" / "model.safetensors").write_bytes(b"")
    run.before = lambda step: None
    found = run.fit([0.0] * 9, resume=True, first=5)
    assert found.best_step == 2
    assert torch.equal(run.kept, run.weights[2])


def test_damaged_best_weights_do_not_end_the_run(
    judged: Callable[..., Judged], capsys: pytest.CaptureFixture[str]
) -> None:
    run = judged()
    folder = Path(run.recipe.output_dir)
    run.before = lambda step: (folder / "best-1" / "trainable.safetensors").write_bytes(b"") if step == 4 else None
    found = run.fit([0.9, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert "keeping the weights of the last step instead of the best ones" in " ".join(capsys.readouterr().err.split())
    assert found.best_step == 6
    assert torch.equal(run.kept, run.weights[6])


# --- at the end


def test_a_failed_write_keeps_the_old_file(quota: Quota, tmp_path: Path) -> None:
    write_text(tmp_path / "results.json", "old")
    quota(1000)
    with pytest.raises(OSError, match="File too large") as refused:
        write_text(tmp_path / "results.json", "x" * 2000)
    quota(None)
    assert refused.value.filename == str(tmp_path / "results.json")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == "old"


@pytest.mark.parametrize("last", ["write_final_model", "write_results"])
def test_a_resume_writes_the_final_files_that_failed(
    last: str,
    quota: Quota,
    recipe_of: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`final/` or `results.json` cannot be written: the message names what is safe, and a resume completes the run."""
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "straight")))
    plain = getattr(pretraining, last)

    def full(*given: Any) -> Any:
        quota(100)
        try:
            return plain(*given)
        finally:
            quota(None)

    recipe = recipe_of("gpt2")
    monkeypatch.setattr(pretraining, last, full)
    with pytest.raises(OSError, match="File too large") as refused:
        pretrain(recipe)
    monkeypatch.setattr(pretraining, last, plain)
    run = Path(recipe.output_dir)
    assert not (run / "results.json").exists()
    assert (run / "final").exists() == (last == "write_results")
    assert not [p for p in run.glob(".*") if p.name not in (".lock", ".clock")]
    capsys.readouterr()
    assert report_error(refused.value) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "File too large" in said
    assert f"{run / 'checkpoint-6'} is whole: " in said
    assert "with the same command and --resume" in said
    assert ("final" if last == "write_final_model" else "results.json") in said
    result = pretrain(recipe, resume=True)
    assert result["loss"] == json.loads((tmp_path / "straight" / "results.json").read_text())["loss"]
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_wrong_path_is_not_reported_as_a_full_disk(
    tmp_path: Path, recipe_of: Recipes, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = replace(recipe_of("gpt2"), data=str(tmp_path / "nowhere"))
    with pytest.raises(Exception, match="nowhere") as wrong:
        pretrain(recipe)
    assert not getattr(wrong.value, "__notes__", [])
    assert not Path(recipe.output_dir).exists()


def test_a_path_in_a_message_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(OSError(errno.ENAMETOOLONG, "File name too long", "x" * 100_000)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: xxx")
    assert len(said) < 1000
