"""Trackers: each line of the log reaches them once, and whatever they do, the run goes on."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.core.files import read_json
from firth.train import Recipe, load_recipe, pretrain, tracking
from firth.train.folder import check_run_folder
from firth.train.log import RunLog, read_log
from firth.train.recipe import describe_tracked_run
from firth.train.resume import merge_recipe, truncate_log
from firth.train.trackers import wandb_mode
from firth.train.tracking import TrackedRun, check_tracker, wait_for_trackers

CONFIG = {"seed": 0, "model.dim": 32, "checkpoint": None, "skips": [[1, 2]]}
WAIT_SECONDS = 120.0  # a tracker that is imported for the first time, on a busy machine

FAKE_TRACKER = """
import json, os, sys, time

def write(**facts):
    with open(os.environ["FAKE_TRACKER_FILE"], "a") as file:
        file.write(json.dumps(facts) + "\\n")

class Run:
    def log(self, metrics, step):
        if "{fault}" == "log":
            raise OSError("the server is gone\\nand more")
        write(step=step, **metrics)
    def finish(self):
        write(finished=True)

def init(**settings):
    print("noise on stdout")
    if "{fault}" == "hang":
        time.sleep(1000)
    if "{fault}" == "exit":
        os._exit(3)
    write(init=[settings["name"], settings["group"], settings["resume"]], config=settings["config"])
    return Run()
"""


@pytest.fixture
def fake_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Callable[[], list[Any]]]]:
    """Install a package named trackio that writes what it gets to a file, or has a fault; return a reader of it."""
    file = tmp_path / "tracked.jsonl"
    monkeypatch.setenv("FAKE_TRACKER_FILE", str(file))
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    def install(fault: str = "") -> Callable[[], list[Any]]:
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "trackio.py").write_text(FAKE_TRACKER.replace("{fault}", fault))

        def read() -> list[Any]:
            wait_for_trackers(WAIT_SECONDS)
            return [json.loads(line) for line in file.read_text().splitlines()]

        return read

    yield install
    for left in tracking._closed:
        if left.process is not None:
            left.process.kill()
            left.process.wait()
    tracking._closed.clear()


def tracked(tracker: str, folder: Path) -> TrackedRun:
    folder.mkdir(exist_ok=True)
    return TrackedRun(tracker, str(folder), "topics/seed-0", "topics", CONFIG)


def write_steps(run: TrackedRun, first: int, last: int) -> None:
    """Log some steps, as a run does that starts or resumes after step `first`."""
    with RunLog(Path(run.folder) / "log.jsonl", first, run) as log:
        for step in range(first + 1, last + 1):
            log.write(step=step, loss=10 / step, grad_norm=float("nan"), tokens=64 * step, data="0a1b", skipped="why")
        log.write(step=last, eval_loss=last / 2)


EXPECTED = {
    "loss": {step: 10 / step for step in range(1, 6)},
    "tokens": {step: 64.0 * step for step in range(1, 6)},
    "eval_loss": {3: 1.5, 5: 2.5},
}


# --- the real packages, read by their own readers


def read_tensorboard(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert all(len(dict(points)) == len(points) for points in scalars.values()), "each step once"
    (config,) = events.Tensors("config")
    return {tag: dict(points) for tag, points in scalars.items()}, config.tensor_proto.string_val[0].decode()


def read_trackio(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    from trackio.sqlite_storage import SQLiteStorage

    name = read_json(folder / "tracker.json")["id"]
    assert SQLiteStorage.get_runs("firth") == [name]
    config = SQLiteStorage.get_run_config("firth", name)
    assert config["_Group"] == "topics"
    found: dict[str, dict[int, float]] = {}
    for line in SQLiteStorage.get_logs("firth", name):
        for metric in set(line) - {"step", "timestamp"}:
            assert line["step"] not in found.setdefault(metric, {}), "each step once"
            found[metric][line["step"]] = line[metric]
    return found, str(config)


def read_wandb(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, dict[int, float]] = {}
    config = ""
    for file in sorted(Path("wandb").glob("offline-run-*/*.wandb")):
        for data in read_leveldb_log(file):
            record = Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                assert record.run.run_id == read_json(folder / "tracker.json")["id"]
                assert (record.run.display_name, record.run.run_group) == ("topics/seed-0", "topics")
                config += "".join(f"{item.key}: {item.value_json}\n" for item in record.run.config.update)
            items = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
            for metric in (name for name in items if not name.startswith("_")):
                found.setdefault(metric, {})[items["_step"]] = items[metric]
    return found, config


def read_leveldb_log(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B: 7 bytes, then LevelDB's log format in blocks of 32 KB."""
    data, record = path.read_bytes(), b""
    file = io.BytesIO(data)
    file.seek(7)
    while (left := 32768 - file.tell() % 32768) and file.tell() + 7 <= len(data):
        if left < 7:
            file.seek(left, os.SEEK_CUR)
            continue
        _, size, kind = struct.unpack("<IHB", file.read(7))
        record += file.read(size)
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def read_mlflow(folder: Path) -> tuple[dict[str, dict[int, float]], str]:
    import mlflow

    mlflow.set_tracking_uri("sqlite:///mlflow.db")
    client = mlflow.MlflowClient()
    run = client.get_run(read_json(folder / "tracker.json")["id"])
    assert (run.info.run_name, run.info.status, run.data.tags["group"]) == ("topics/seed-0", "FINISHED", "topics")
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert all(len({m.step for m in points}) == len(points) for points in history.values()), "each step once"
    return {name: {m.step: m.value for m in points} for name, points in history.items()}, str(run.data.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "read"),
    [
        ("tensorboard", read_tensorboard),
        ("trackio", read_trackio),
        ("wandb", read_wandb),
        ("mlflow", read_mlflow),
    ],
)
def test_trackers_get_the_names_of_the_log_offline(
    tracker: str, read: Callable[[Path], tuple[Any, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of three steps resumes after its second: the same run of the tracker, each step once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # trackio reads it when it is imported
    pytest.importorskip(tracker)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        monkeypatch.delenv(name, raising=False)
    run = tracked(tracker, tmp_path / "run")
    ids = set()
    for first in (0, 2):
        write_steps(run, first, first + 3)
        wait_for_trackers(WAIT_SECONDS)
        ids.add(read_json(tmp_path / "run" / "tracker.json")["id"])
    assert len(ids) == 1
    found, config = read(tmp_path / "run")
    assert {name: points for name, points in found.items() if name in EXPECTED} == {
        name: {step: pytest.approx(x) for step, x in points.items()} for name, points in EXPECTED.items()
    }
    assert set(found) == set(EXPECTED), "no name that the log does not have, and no text"
    assert "model.dim" in config


# --- a stand-in for a package, which the tests have on every machine


def test_a_run_and_its_resumed_half_are_one_run(
    fake_tracker: Callable[..., Any], recipe_of: Callable[..., Recipe], tmp_path: Path
) -> None:
    read = fake_tracker()
    recipe = recipe_of(max_steps=4, report_to="trackio")
    pretrain(recipe)
    first = read()
    (name, group, resume), config = first[0]["init"], first[0]["config"]
    assert (name.rsplit("-", 1)[0], group, resume) == ("run", "run", "allow")
    assert config["max_steps"] == 4
    assert config["model.dim"] == 32
    lines = [line for line in first if "step" in line]
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert [{k: v for k, v in line.items() if k != "data"} for line in log] == lines
    assert first[-1] == {"finished": True}

    pretrain(replace(recipe, max_steps=6), resume=True, allow_change=True)
    second = read()[len(first) :]
    assert second[0]["init"][0] == name
    assert [line["step"] for line in second if "loss" in line] == [5, 6]


def test_a_tracker_that_joins_late_gets_the_whole_log(fake_tracker: Callable[..., Any], tmp_path: Path) -> None:
    run = tracked("trackio", tmp_path / "run")
    with RunLog(tmp_path / "run" / "log.jsonl", 0) as log:
        for step in (1, 2):
            log.write(step=step, loss=1.0, data="0a")
    read = fake_tracker()
    write_steps(run, 2, 3)
    assert [line["step"] for line in read() if "loss" in line] == [1, 2, 3]


def test_a_rewound_run_is_a_new_run(fake_tracker: Callable[..., Any], tmp_path: Path) -> None:
    """No tracker can take back what it was sent, and the steps after a rewind are others."""
    read, run = fake_tracker(), tracked("trackio", tmp_path / "run")
    write_steps(run, 0, 3)
    before = read()
    truncate_log(tmp_path / "run", 1, 3)
    write_steps(run, 1, 2)
    after = read()[len(before) :]
    assert after[0]["init"][0] != before[0]["init"][0]
    assert [line["step"] for line in after if "loss" in line] == [1, 2]


@pytest.mark.parametrize(
    ("fault", "message"), [("log", "(OSError: the server is gone)"), ("exit", "(its process ended with code 3)")]
)
def test_a_tracker_that_fails_costs_one_line(
    fault: str, message: str, fake_tracker: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tracker(fault)
    run = tracked("trackio", tmp_path / "run")
    with RunLog(tmp_path / "run" / "log.jsonl", 0, run) as log:
        log.write(step=1, loss=1.0, data="0a")
        assert log.tracker is not None
        assert log.tracker.process is not None
        log.tracker.process.wait(WAIT_SECONDS)
        for step in (2, 3):
            log.write(step=step, loss=1.0, data="0a")
    wait_for_trackers(0)
    said = capsys.readouterr().err
    assert said.count("trackio stopped") == 1
    assert message in said
    assert len(read_log(tmp_path / "run" / "log.jsonl")) == 3


def test_a_tracker_that_hangs_is_left_behind(
    fake_tracker: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_tracker("hang")
    began = time.monotonic()
    run = tracked("trackio", tmp_path / "run")
    with RunLog(tmp_path / "run" / "log.jsonl", 0, run) as log:
        for step in range(1, 2000):
            log.write(step=step, loss=1.0, data="0a")
        assert log.tracker is not None
    process = log.tracker.process
    assert process is not None
    wait_for_trackers(0.1)
    assert time.monotonic() - began < 5
    assert "trackio has not got all lines yet" in capsys.readouterr().err
    assert process.poll() is None
    process.kill()
    process.wait()


def test_what_a_command_refuses_and_what_a_resumed_run_may_change(
    recipe_of: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--report-to wandb needs the package wandb. Install it: .*pip install wandb"):
        recipe_of(report_to="wandb").check()
    check_tracker("none")
    saved, asked = recipe_of(), recipe_of(report_to="tensorboard")
    assert merge_recipe(saved, asked).report_to == "tensorboard"


def test_seeds_are_runs_of_one_group(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_of(report_to="wandb")
    seeds = [describe_tracked_run(recipe, tmp_path / "run" / f"seed-{i}") for i in (0, 1)]
    assert [(run.name, run.group) for run in seeds if run] == [("run/seed-0", "run"), ("run/seed-1", "run")]
    alone = describe_tracked_run(recipe, tmp_path / "run")
    assert alone is not None
    assert (alone.name, alone.group) == ("run", "run")
    assert describe_tracked_run(recipe_of(), tmp_path / "run") is None


def test_wandb_is_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_mode() == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_event_files_belong_to_the_run(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    """--overwrite removes them, and no other file in their folder."""
    folder = Path(pretrain(recipe_of(max_steps=1))["output_dir"])
    assert load_recipe(folder / "recipe.yaml", Recipe).report_to == "none"
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out.tfevents.1.host.2.0").write_bytes(b"")
    (folder / "tracker.json").write_text("{}")
    check_run_folder(folder, False, True, [])
    (folder / "tensorboard" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="tensorboard"):
        check_run_folder(folder, False, True, [])
