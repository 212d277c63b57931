"""Asynchronous checkpoints, and disk errors while writing them."""

from __future__ import annotations

import errno
import importlib
import json
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from firth.core.files import find_corruption
from firth.models import Model
from firth.train import Recipe, TrainingRun, pretrain, read_log
from firth.train import writer as writers
from firth.train.checkpoint import CheckpointPayload, TrainState, list_checkpoints, save_checkpoint
from firth.train.log import RunLog

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
Recipes = Callable[..., Recipe]


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.suffix == ".safetensors"}


def names(run: str | Path) -> list[str]:
    return [p.name for p in list_checkpoints(Path(run))]


def hooked(monkeypatch: pytest.MonkeyPatch, hook: Callable[[int, Model], None]) -> None:
    monkeypatch.setattr(pretraining, "TrainingRun", lambda *a, **k: TrainingRun(*a, **k, hooks=[(1, hook)]))


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that waits until no checkpoint is pending."""
    known: list[writers.CheckpointWriter] = []
    plain = writers.CheckpointWriter.save

    def save(self: writers.CheckpointWriter, *given: Any, **named: Any) -> None:
        known[:] = [self]
        plain(self, *given, **named)

    monkeypatch.setattr(writers.CheckpointWriter, "save", save)

    def wait() -> None:
        if known and known[0].pending is not None:
            futures.wait([known[0].pending])

    return wait


def test_async_checkpoint_equals_the_synchronous_one(
    recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training steps that run while a checkpoint is written do not change its weights, optimizer state or EMA."""
    fields = dict(save_total_limit=0, save_steps=3, max_steps=8, ema_decay=0.9, dropout=0.1)
    pretrain(recipe_of("bert", output_dir=str(tmp_path / "sync"), async_save=False, **fields))
    next_step = {step: threading.Event() for step in (4, 7)}  # set once that step has been computed

    def save_after_next_step(run: Path, payload: CheckpointPayload, state: TrainState, *rest: Any) -> Path:
        if state.step < 8:
            assert next_step[state.step + 1].wait(timeout=300), "no step ran while the checkpoint was pending"
        return save_checkpoint(run, payload, state, *rest)

    monkeypatch.setattr(writers, "save_checkpoint", save_after_next_step)
    hooked(monkeypatch, lambda step, model: next_step[step].set() if step in next_step else None)
    pretrain(recipe_of("bert", output_dir=str(tmp_path / "async"), **fields))
    assert names(tmp_path / "async") == names(tmp_path / "sync") == ["checkpoint-8", "checkpoint-6", "checkpoint-3"]
    for name in names(tmp_path / "sync"):
        assert find_corruption(tmp_path / "async" / name) is None
        tensors = files(tmp_path / "async" / name)
        assert "training/average.safetensors" in tensors
        assert tensors == files(tmp_path / "sync" / name)
    assert (tmp_path / "async" / "log.jsonl").read_bytes() == (tmp_path / "sync" / "log.jsonl").read_bytes()


def test_one_checkpoint_is_written_at_a_time(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = threading.Lock(), []

    def alone(*given: Any) -> Path:
        most.append(busy.acquire(blocking=False))
        time.sleep(0.05)
        busy.release()
        return save_checkpoint(*given)

    monkeypatch.setattr(writers, "save_checkpoint", alone)
    recipe = recipe_of("bert", save_steps=1, max_steps=4)
    pretrain(recipe)
    assert most == [True] * 4
    assert names(recipe.output_dir) == ["checkpoint-4", "checkpoint-3"]


def test_other_errors_of_the_writing_thread_end_the_run(
    recipe_of: Recipes, settled: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def wrong(*given: Any) -> Path:
        raise ValueError("no such layout")

    def hook(step: int, model: Model) -> None:
        steps.append(step)
        settled()

    monkeypatch.setattr(writers, "save_checkpoint", wrong)
    hooked(monkeypatch, hook)
    with pytest.raises(ValueError, match="no such layout"):
        pretrain(recipe_of("bert", save_steps=2, max_steps=100))
    assert steps[-1] <= 4, "the error is raised at the next step, not at the end"


# --- a disk that is full


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run; the first test makes the run."""
    return tmp_path_factory.mktemp("straight") / "run"


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("size", [150_000, 50_000, 1000])  # the optimizer, the weights, or config.json is refused
def test_a_full_disk_skips_a_checkpoint_but_not_the_run(
    size: int,
    beside: bool,
    straight: Path,
    quota: Callable[[int | None], None],
    settled: Callable[[], None],
    recipe_of: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not straight.exists():
        pretrain(recipe_of("gpt2", output_dir=str(straight), max_steps=8, save_steps=2))
    between: list[list[str]] = []

    def hook(step: int, model: Model) -> None:
        if step in (3, 7):
            settled()
            quota(size if step == 3 else None)
        if step == 7:
            between.append(names(tmp_path / "run"))

    hooked(monkeypatch, hook)
    recipe = recipe_of("gpt2", max_steps=8, save_steps=2, async_save=beside)
    pretrain(recipe)
    assert between == [["checkpoint-2"]], "4 and 6 were refused, and the one before stayed"
    assert names(tmp_path / "run") == ["checkpoint-8", "checkpoint-2"]
    assert all(find_corruption(p) is None for p in list_checkpoints(tmp_path / "run"))
    assert not list((tmp_path / "run").glob(".*.tmp"))
    said = capsys.readouterr().err
    assert "checkpoint-2 is still intact. Training continues" in said or "log.jsonl cannot be written" in said
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (straight / name).read_bytes()


def test_a_disk_that_stays_full_ends_the_run_cleanly(
    quota: Callable[[int | None], None],
    settled: Callable[[], None],
    recipe_of: Recipes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last intact checkpoint stays; after space is freed, a resume completes the same run."""
    fields = dict(max_steps=8, save_steps=2, dropout=0.1)
    pretrain(recipe_of("gpt2", output_dir=str(tmp_path / "straight"), **fields))
    recipe = recipe_of("gpt2", **fields)

    def hook(step: int, model: Model) -> None:
        if step == 5:
            settled()
            quota(50_000)

    hooked(monkeypatch, hook)
    with pytest.raises(OSError, match="File too large"):
        pretrain(recipe)
    quota(None)
    monkeypatch.setattr(pretraining, "TrainingRun", TrainingRun)
    run = tmp_path / "run"
    assert names(run) == ["checkpoint-4", "checkpoint-2"]
    assert find_corruption(run / "checkpoint-4") is None
    assert not (run / "final").exists()
    pretrain(recipe, resume=True)
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_a_read_only_folder_skips_a_checkpoint(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(run: Path, kept: CheckpointPayload, state: TrainState, *rest: Any) -> Path:
        if state.step == 4:
            raise OSError(errno.EROFS, "Read-only file system", str(run))
        return save_checkpoint(run, kept, state, *rest)

    monkeypatch.setattr(writers, "save_checkpoint", refused)
    recipe = recipe_of("gpt2", max_steps=6, save_steps=2)
    pretrain(recipe)
    assert names(recipe.output_dir) == ["checkpoint-6", "checkpoint-2"]
    assert "Read-only file system): checkpoint-2 is still intact" in capsys.readouterr().err


class Stubborn:
    """A file that accepts a few bytes, then none, then all again."""

    def __init__(self, path: Path) -> None:
        self.file, self.room = open(path, "ab", buffering=0), 7  # noqa: SIM115

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_log_lines_are_written_after_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "log.jsonl", 0) as log:
        file = Stubborn(tmp_path / "log.jsonl")
        log.file = file  # type: ignore[assignment]
        for step in (1, 2):
            log.write(step=step)
            assert not log.flush()
        file.room = 10**6
        log.write(step=3)
        assert log.flush()
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert capsys.readouterr().err.count("its lines stay in memory") == 1


def test_a_log_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), RunLog(tmp_path / "log.jsonl", 0) as log:
        log.file = Stubborn(tmp_path / "log.jsonl")  # type: ignore[assignment]
        log.write(step=1)
    assert read_log(tmp_path / "log.jsonl") == []
