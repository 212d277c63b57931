"""The time that a run has used: monotonic, and added up over resumes."""

from __future__ import annotations

import ast
import importlib
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firth import api
from firth.commands import data_source, shards
from firth.commands import pretrain as pretrain_command
from firth.core.errors import UserError
from firth.lab.prove_resume import compare_runs
from firth.train import ComputeConfig, Recipe, load_recipe, pretrain, read_log
from firth.train import compute as compute_module
from firth.train.clock import CLOCK_FILE, RunClock
from firth.train.compute import (
    busy_cores,
    choose_threads,
    limit_threads,
    process_cores,
    read_core_ticks,
    thread_choices,
)
from firth.train.resume import merge_recipe

clocks = importlib.import_module("firth.train.clock")
pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
replanning = importlib.import_module("firth.train.replan")
schedules = importlib.import_module("firth.train.schedule")
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
SOURCE = Path(__file__).parents[2] / "src" / "firth"
Recipes = Callable[..., Recipe]
SMALL = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
SIZES: dict[str, Any] = {"max_seq_length": 32, "per_device_train_batch_size": 4, "vocab_size": 400}


class Hand:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        for module in (clocks, pretraining, replanning, schedules, pretrain_command):
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
    """2 seconds a step and 1 an evaluation: a minute less 6 evaluations is 27 steps. A resume plans the same steps."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 1.0))
    recipe = recipe_of("bert", minutes=1.0, max_steps=0, eval_rows=4, save_steps=10)

    def stop(step: int, model: Any) -> None:
        if step == 12:
            raise KeyboardInterrupt

    plain = pretraining.TrainingRun
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: plain(*a, **k, hooks=[(1, stop)]))
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe)
    assert planned(recipe) == 27
    monkeypatch.setattr(pretraining, "TrainingRun", plain)
    hand.now += 1e6
    assert pretrain(recipe, resume=True)["steps"] == planned(recipe) == 27


def test_a_resume_counts_the_time_used_before(
    corpus_file: Path, tmp_path: Path, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training the tokenizer took 25 of 60 seconds before the run was stopped: 32 are left for 16 steps of 2."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 1.0))
    plain = data_source.train_run_tokenizer

    def slowly(*given: Any) -> Any:
        found = plain(*given)
        hand.now += 25
        return found

    def stopped(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    words: dict[str, Any] = {"overrides": SMALL, "minutes": 1.0, "eval_rows": 4, **SIZES}
    with monkeypatch.context() as patch:
        patch.setattr(data_source, "train_run_tokenizer", slowly)
        patch.setattr(shards, "prepare_shards", stopped)
        with pytest.raises(KeyboardInterrupt):
            api.pretrain("bert-tiny", corpus_file, tmp_path / "run", **words)
    hand.now += 1e6
    result = api.pretrain("bert-tiny", corpus_file, tmp_path / "run", resume=True, **words)
    assert result["steps"] == 16
    assert result["seconds"] == 25
    again = api.pretrain("bert-tiny", corpus_file, tmp_path / "anew", **words)
    assert again["steps"] == 27


def test_half_of_the_minutes_are_trained_however_long_the_text_took(
    recipe_of: Recipes, hand: Hand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """50 of 60 seconds are over: 30 are left all the same, for 3 evaluations of 1 second and 13 steps of 2."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 1.0))
    recipe = recipe_of("bert", minutes=1.0, max_steps=0, eval_rows=4)
    assert pretrain(recipe, start_time=hand.now - 50)["steps"] == 13
    assert "preparing took 50s of the 1m00s" in (said := capsys.readouterr().err)
    assert "ends 20s late" in said


def test_a_run_is_planned_again_when_its_steps_are_slower_and_resumes_exactly(
    recipe_of: Recipes, tmp_path: Path, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 seconds a step were timed, and 4 pass: at step 8 the plan of 30 steps becomes one of 15."""
    monkeypatch.setattr(pretraining, "time_steps", lambda *given, **named: (2.0, 0.0))
    plain = pretraining.TrainingRun

    def start(name: str, stop_at: int = 0, **fields: Any) -> Recipe:
        def pass_time(step: int, model: Any) -> None:
            hand.now += 4
            if step == stop_at:
                raise KeyboardInterrupt

        recipe = recipe_of(
            "bert", 0.1, output_dir=str(tmp_path / name), minutes=1.0, max_steps=0, save_steps=6, **fields
        )
        monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: plain(*a, **k, hooks=[(1, pass_time)]))
        with pytest.raises(KeyboardInterrupt) if stop_at else nullcontext():
            pretrain(recipe)
        monkeypatch.setattr(pretraining, "TrainingRun", plain)
        return recipe

    straight = start("straight")
    assert planned(straight) == 15
    assert read_log(tmp_path / "straight" / "log.jsonl")[-1]["step"] == 15
    for stop_at in (7, 11):  # before and after the new plan
        stopped = start(f"stopped-{stop_at}", stop_at)
        assert planned(stopped) == (30 if stop_at == 7 else 15)
        assert pretrain(stopped, resume=True)["steps"] == planned(stopped), "a resumed run keeps its last plan"
    assert all(compare_runs(tmp_path / "straight", tmp_path / "stopped-11").values())
    # an interval and a number of steps that the user has set stay
    chosen = load_recipe(Path(start("chosen", eval_steps=5, warmup_steps=2).output_dir) / "recipe.yaml", Recipe)
    assert (chosen.max_steps, chosen.eval_steps, chosen.warmup_steps) == (15, 5, 2)


def test_busy_cores_are_counted_while_this_process_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {0: (10, 50), 1: (20, 100), 2: (5, 5)}
    second = {0: (40, 80), 1: (35, 160), 2: (5, 5)}
    reads = iter([first, second])
    monkeypatch.setattr(compute_module, "read_core_ticks", lambda cores: next(reads))
    assert busy_cores({0, 1, 2}, seconds=0.0) == pytest.approx(30 / 30 + 15 / 60)
    monkeypatch.setattr(compute_module, "read_core_ticks", lambda cores: {})
    monkeypatch.setattr("os.getloadavg", lambda: (6.0, 6.0, 6.0))
    assert busy_cores({0, 1}) == 2, "no more than there are"


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="the system has no /proc/stat")
def test_ticks_of_the_cores_of_this_process_are_read() -> None:
    cores = process_cores()
    ticks = read_core_ticks(cores)
    assert set(ticks) == cores
    assert all(0 <= busy <= total for busy, total in ticks.values())


def test_the_faster_number_of_threads_is_taken_and_recorded(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.getloadavg", lambda: (6.0, 6.0, 6.0))
    monkeypatch.setattr(compute_module, "process_cores", lambda: set(range(8)))
    monkeypatch.setattr(compute_module, "busy_cores", lambda cores: 3.0)
    recipe = recipe_of(minutes=1.0, max_steps=0)
    with limit_threads(8):
        assert thread_choices(recipe, CPU) == [], "the user has set it"
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert thread_choices(replace(recipe, threads=8), CPU) == []
        assert thread_choices(recipe, CPU) == [5, 8], "3 of 8 cores are busy"
        monkeypatch.setattr(compute_module, "busy_cores", lambda cores: 6.2)
        assert thread_choices(recipe, CPU) == [2], "most are busy: nothing to compare"
        assert "other programs use 6.2 of 8 cores: the run uses 2 CPU threads" in capsys.readouterr().err
    monkeypatch.setattr(compute_module, "process_cores", lambda: {0, 1})
    monkeypatch.setattr(compute_module, "busy_cores", lambda cores: 0.2)
    with limit_threads(2):
        assert thread_choices(recipe, CPU) == [1, 2]
        choose_threads([1, 2], lambda: 0.5 * torch.get_num_threads())
        assert torch.get_num_threads() == 1
        assert "1 CPU thread takes 0.500s a step, 2 take 1.000s beside other programs" in capsys.readouterr().err
        choose_threads([1, 2], lambda: 1 / torch.get_num_threads())
        assert torch.get_num_threads() == 2
        assert not capsys.readouterr().err
        # two threads are faster in the one moment in which the other programs sleep
        for load, best in ((6.0, 1), (1.5, 2)):
            monkeypatch.setattr("os.getloadavg", lambda load=load: (load,) * 3)
            two = iter([2.5, 0.6])
            choose_threads([1, 2], lambda two=two: 1.0 if torch.get_num_threads() == 1 else next(two))
            assert torch.get_num_threads() == best
        monkeypatch.setattr("os.getloadavg", lambda: (6.0, 6.0, 6.0))

        def time_steps(*given: Any, threads: Any, **named: Any) -> tuple[float, float]:
            choose_threads(threads, lambda: 0.5 * torch.get_num_threads())
            return 20.0, 0.0

        monkeypatch.setattr(pretraining, "time_steps", time_steps)
        pretrain(recipe)
        assert torch.get_num_threads() == 2, "the run restores the number"
    stored = load_recipe(Path(recipe.output_dir) / "recipe.yaml", Recipe)
    assert stored.threads == 1
    assert merge_recipe(stored, recipe).threads == 1


# Where a wall clock may be looked at: a day that a chat template is told, which a run notes when it begins, and the
# time of an event in a tracker, which no run reads.
ALLOWED = {"tasks/chat.py": {"now"}, "tasks/finetune.py": {"today"}, "train/trackers.py": {"time"}}


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
        file_name = file.relative_to(SOURCE).as_posix()
        assert found <= ALLOWED.get(file_name, set()), file_name
        assert taken <= {"monotonic", "perf_counter", "sleep"}, file_name
