"""The time that a run has used: monotonic, and added up over resumes."""

from __future__ import annotations

import ast
import importlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from firth import api
from firth.core.errors import UserError
from firth.lab.prove_resume import compare_runs
from firth.train import Recipe, load_recipe, pretrain
from firth.train.clock import CLOCK_FILE, RunClock

clocks = importlib.import_module("firth.train.clock")
pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
SOURCE = Path(__file__).parents[2] / "src" / "firth"
Recipes = Callable[..., Recipe]
SMALL = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_seq_length": 32, "per_device_train_batch_size": 4, "vocab_size": 400}


class Hand:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (clocks, pretraining, api):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def test_time_adds_up_over_resumes_without_the_breaks(tmp_path: Path, hand: Hand) -> None:
    with pytest.raises(KeyboardInterrupt), RunClock(tmp_path) as clock:
        hand.now += 5
        assert clock.elapsed_seconds == 5
        clock.save()
        hand.now += 2
        raise KeyboardInterrupt
    hand.now = 3.0  # the machine was started anew, a year later
    with pytest.raises(KeyboardInterrupt), RunClock(tmp_path, resume=True) as clock:
        hand.now += 10
        assert clock.elapsed_seconds == 17
        raise KeyboardInterrupt
    assert RunClock(tmp_path, resume=True).elapsed_seconds == 17
    assert RunClock(tmp_path, resume=True, start_time=hand.now - 4).elapsed_seconds == 21
    assert RunClock(tmp_path).elapsed_seconds == 0, "a run that begins anew begins at 0"
    for nonsense in ("", "{}", '{"seconds": null}', '{"seconds": -3}', "[]"):
        (tmp_path / CLOCK_FILE).write_text(nonsense)
        assert RunClock(tmp_path, resume=True).elapsed_seconds == 0
    with RunClock(tmp_path) as clock:
        clock.save()
    assert not (tmp_path / CLOCK_FILE).exists(), "a run that is done needs none"
    with pytest.raises(UserError), RunClock(tmp_path) as clock:
        clock.save()
        raise UserError("a wrong option")
    assert not (tmp_path / CLOCK_FILE).exists()


def test_an_error_keeps_the_used_time(tmp_path: Path, hand: Hand) -> None:
    with pytest.raises(KeyboardInterrupt), RunClock(tmp_path):
        hand.now += 5
        raise KeyboardInterrupt
    with pytest.raises(UserError), RunClock(tmp_path, resume=True):
        raise UserError("a wrong option of a run that goes on")
    assert RunClock(tmp_path, resume=True).elapsed_seconds == 5
    (tmp_path / CLOCK_FILE).unlink()
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(UserError), RunClock(tmp_path):
        hand.now += 7
        raise UserError("3 steps in a row were skipped")
    assert RunClock(tmp_path, resume=True).elapsed_seconds == 7


def test_a_disk_error_does_not_stop_the_run(tmp_path: Path, hand: Hand) -> None:
    with RunClock(tmp_path / "nowhere") as clock:
        hand.now += 5
        clock.save()
        assert clock.elapsed_seconds == 5
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A wall clock that jumps by years at every call."""
    rng, seen = random.Random(0), list[float]()

    def look() -> float:
        seen.append(rng.uniform(-1e9, 4e9))
        return seen[-1]

    monkeypatch.setattr(time, "time", look)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * look()))
    return seen


def test_wall_clock_jumps_change_nothing(recipe_of: Recipes, tmp_path: Path, request: Any) -> None:
    fields = dict(dropout=0.1, ema_decay=0.9, max_steps=6, save_steps=2)
    pretrain(recipe_of("bert", output_dir=str(tmp_path / "straight"), **fields))
    request.getfixturevalue("jumping")
    result = pretrain(recipe_of("bert", output_dir=str(tmp_path / "jumped"), **fields))
    assert all(compare_runs(tmp_path / "straight", tmp_path / "jumped").values())
    assert 0 < result["seconds"] < 600


def planned(recipe: Recipe) -> int:
    return load_recipe(Path(recipe.output_dir) / "recipe.yaml", Recipe).max_steps


def test_minutes_use_the_monotonic_clock(
    recipe_of: Recipes, tmp_path: Path, hand: Hand, jumping: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 seconds a step and 1 an evaluation: a minute less 10 evaluations is 25 steps. A resume plans the same steps."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 1.0))
    recipe = recipe_of("bert", minutes=1.0, max_steps=0, eval_rows=4, save_steps=10)

    def stop(step: int, model: Any) -> None:
        if step == 12:
            raise KeyboardInterrupt

    plain = pretraining.TrainingRun
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: plain(*a, **k, hooks=[(1, stop)]))
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe)
    assert planned(recipe) == 25
    monkeypatch.setattr(pretraining, "TrainingRun", plain)
    hand.now += 1e6
    assert pretrain(recipe, resume=True)["steps"] == planned(recipe) == 25


def test_a_resume_counts_the_time_used_before(
    corpus_file: Path, tmp_path: Path, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training the tokenizer took 40 of 60 seconds before the run was stopped: 10 are left for 5 steps of 2."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 1.0))
    plain = api.train_run_tokenizer

    def slowly(*given: Any) -> Any:
        found = plain(*given)
        hand.now += 40
        return found

    def stopped(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    words: dict[str, Any] = {"overrides": SMALL, "minutes": 1.0, "eval_rows": 4, **SIZES}
    with monkeypatch.context() as patch:
        patch.setattr(api, "train_run_tokenizer", slowly)
        patch.setattr(api, "prepare_shards", stopped)
        with pytest.raises(KeyboardInterrupt):
            api.pretrain("bert-tiny", corpus_file, tmp_path / "run", **words)
    hand.now += 1e6
    result = api.pretrain("bert-tiny", corpus_file, tmp_path / "run", resume=True, **words)
    assert result["steps"] == 5
    assert result["seconds"] == 40
    again = api.pretrain("bert-tiny", corpus_file, tmp_path / "anew", **words)
    assert again["steps"] == 25


# Where a wall clock may be looked at: a day that a chat template is told, which a run notes when it begins.
ALLOWED = {"tasks/chat.py": {"now"}, "tasks/finetune.py": {"today"}}


@pytest.mark.parametrize("room", ["train", "tasks", "lab"])
def test_no_module_reads_the_wall_clock(room: str) -> None:
    """No `time.time`, no `datetime`, no file modification times."""
    wall = {"time", "time_ns", "localtime", "gmtime", "now", "today", "utcnow", "st_mtime", "st_mtime_ns", "getmtime"}
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    for file in files:
        found = {n.attr for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Attribute)} & wall
        taken = {
            name.name
            for n in ast.walk(ast.parse(file.read_text()))
            if isinstance(n, ast.ImportFrom) and n.module == "time"
            for name in n.names
        }
        place = file.relative_to(SOURCE).as_posix()
        assert found <= ALLOWED.get(place, set()), place
        assert taken <= {"monotonic", "perf_counter", "sleep"}, place
