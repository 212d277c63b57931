"""Runs that are watched: what is new is read once, a rewritten log is read again, and no name leaves the folder."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from firth.core.errors import UserError
from firth.core.files import write_json, write_text
from firth.models import get_preset
from firth.recipes import SHAPE_RECIPES, pretraining_recipe
from firth.serve import run_events, run_notes, run_samples, runs
from firth.serve.app import make_app
from firth.serve.checkpoint_process import try_sample
from firth.serve.config import ServeConfig
from firth.serve.gate import Gate
from firth.serve.model_server import ModelServer
from firth.serve.run_events import RunEvents
from firth.serve.run_notes import RunNotes
from firth.serve.runs import Locks, RunsFolder, WatchedRun, run_references
from firth.train.findings import Finding
from firth.train.folder import LOCK_FILE
from firth.train.log import RunLog
from firth.train.recipe import save_recipe


@pytest.fixture(autouse=True)
def always_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SCAN_SECONDS", 0.0)
    monkeypatch.setattr(runs, "LIST_SHARE", 1e9)


def make_run(folder: Path, steps: int = 3, max_steps: int = 10) -> Path:
    folder.mkdir(parents=True)
    write_text(folder / "recipe.yaml", f"max_steps: {max_steps}\nmodel: {{family: bert}}\nobjective: {{kind: MLM}}\n")
    with RunLog(folder / "log.jsonl", 0) as log:
        for step in range(1, steps + 1):
            log.write(step=step, loss=8.0 - step, learning_rate=0.1, tokens=100 * step, grad_norm=1.0)
    return folder


def train(folder: Path, seconds: float) -> None:
    """Let a run train for so long."""
    with (folder / "log.jsonl").open("a") as log, (folder / "timings.jsonl").open("a") as timings:
        log.write('{"step": 4, "loss": 4.0}\n')
        timings.write(
            f'{{"step": 4, "steps": 1, "tokens": 10, "seconds": {seconds}, "data_wait": 0.0, "device": "cpu"}}\n'
        )


def open_runs(folder: Path) -> TestClient:
    config = ServeConfig(runs=str(folder))
    return TestClient(Gate(make_app(ModelServer({}, config)), config, 0), "http://localhost")


def read(client: TestClient, name: str, version: int = 0, after: int = 0) -> Any:
    answer = client.get("/runs/log", params={"name": name, "version": version, "after": after})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("facts", ['"tokens": 1e999', '"tokens": 1' + "0" * 400, '"grad_norm": -1e999'])
def test_numbers_without_a_size_are_damage(facts: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "damaged")
    make_run(tmp_path / "whole")
    with (folder / "log.jsonl").open("a") as log:
        log.write(f'{{"step": 4, "loss": 4.0, {facts}}}\n{{"step": 1{"0" * 400}, "loss": 4.0}}\n')
    client = open_runs(tmp_path)
    assert {run["name"]: run["step"] for run in client.get("/runs").json()["runs"]} == {"damaged": 3, "whole": 3}
    assert [row[0] for row in read(client, "damaged")["rows"]] == [1, 2, 3]


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(recipe: dict[str, Any]) -> str:
        return f"{10 // recipe['max_steps']}"

    monkeypatch.setattr(runs, "describe_recipe", describe)
    make_run(tmp_path / "damaged", max_steps=0)
    make_run(tmp_path / "whole")
    assert [run["name"] for run in open_runs(tmp_path).get("/runs").json()["runs"]] == ["whole"]


def test_new_lines_are_sent_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "encoder" / "pretraining")
    make_run(tmp_path / "other", steps=5)
    client = open_runs(tmp_path)
    found = {run["name"]: run for run in client.get("/runs").json()["runs"]}
    assert set(found) == {"encoder/pretraining", "other"}
    assert (found["other"]["step"], found["other"]["max_steps"], found["other"]["loss"]) == (5, 10, 3.0)
    assert found["other"]["kind"] == "bert, MLM"
    first = read(client, "encoder/pretraining")
    assert [row[:2] for row in first["rows"]] == [[1, 7.0], [2, 6.0], [3, 5.0]]
    with (folder / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 4, "eval_loss": 4.5}\n{"step": 5, "loss": 4.0, "tok')
    again = read(client, "encoder/pretraining", first["version"], first["next_row"])
    assert [row[:3] for row in again["rows"]] == [[4, None, 4.5]]
    with (folder / "log.jsonl").open("ab") as log:
        log.write(b'ens": 500}\nnot json\n')
    last = read(client, "encoder/pretraining", again["version"], again["next_row"])
    assert [row[:2] for row in last["rows"]] == [[5, 4.0]]
    assert not read(client, "encoder/pretraining", last["version"], last["next_row"])["rows"]


def test_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=6)
    client = open_runs(tmp_path)
    first = read(client, "run")
    with RunLog(folder / "log.jsonl", 2) as log:  # resumes after step 2
        log.write(step=3, loss=1.0)
    again = read(client, "run", first["version"], first["next_row"])
    assert again["version"] != first["version"]
    assert [row[0] for row in again["rows"]] == [1, 2, 3]


def test_states_and_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    watched = RunsFolder(tmp_path)
    assert watched.list_summaries()[0].state == "stopped"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = [100.0]
        monkeypatch.setattr(runs.time, "monotonic", lambda: now[0])
        watched = RunsFolder(tmp_path)
        watched.list_summaries()
        now[0] += 4.0
        with (folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": 6, "loss": 1.0, "tokens": 600}) + "\n")
        summary = watched.list_summaries()[0]
        assert summary.state == "running"
        assert summary.tokens_per_second == pytest.approx(100.0)
        assert summary.seconds_left == pytest.approx(4.0)  # 4 of 10 steps, one a second
        assert summary.memory_bytes
        assert summary.memory_bytes > 10**6
    write_json(folder / "results.json", {})
    assert watched.list_summaries()[0].state == "finished"


def test_a_long_log_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_ROWS", 50)
    monkeypatch.setattr(runs, "MAX_SENT_ROWS", 20)
    folder = make_run(tmp_path / "run", steps=400)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 400, "eval_loss": 2.5}\n')
    run = WatchedRun("run", folder)
    run.update()
    assert len(run.rows) <= 50
    sent = run.log_after(0, 0).rows
    assert len(sent) <= 22
    assert sent[-1][:3] == [400, None, 2.5]


def test_no_name_leaves_the_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "outside")
    make_run(tmp_path / "inside" / "run")
    (tmp_path / "inside" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "stolen").mkdir()
    (tmp_path / "inside" / "stolen" / "log.jsonl").symlink_to(tmp_path / "outside" / "log.jsonl")
    client = open_runs(tmp_path / "inside")
    assert [run["name"] for run in client.get("/runs").json()["runs"]] == ["run"]
    for name in ("../outside", "link", "stolen", str(tmp_path / "outside"), "run/../../outside"):
        assert client.get("/runs/log", params={"name": name}).status_code == 404
        assert client.post("/runs/samples", json={"run": name, "text": "a"}).status_code == 404
    assert client.post("/tokenize", json={"text": "a"}).json()["error"]["code"] == "no_model"
    with pytest.raises(UserError, match="no such folder"):
        RunsFolder(tmp_path / "nothing")


def test_the_forecast_is_that_of_the_device_that_trains(tmp_path: Path) -> None:
    """The encoder of the sweep on a CPU ended at 4.83 (docs/results.md); the runs of the GPU were larger."""
    folder, data = make_run(tmp_path / "run"), tmp_path / "shards"
    config = replace(get_preset("encoder-2x64"), vocab_size=4096)
    recipe = pretraining_recipe(config, **SHAPE_RECIPES["encoder"], data=str(data), max_steps=27_200)
    save_recipe(recipe, folder / "recipe.yaml")
    data.mkdir()
    write_json(data / "manifest.json", {"metadata": {"unigram_entropy": 6.694, "train": {"tokens": 680_000}}})
    train(folder, 10.0)
    run = WatchedRun("run", folder)
    run.update()
    assert run_references(run)["forecast"] == pytest.approx(4.83, rel=0.02)
    write_text(folder / "timings.jsonl", (folder / "timings.jsonl").read_text().replace("cpu", "cuda"))
    run = WatchedRun("run", folder)
    run.update()
    assert run_references(run) == {"unigrams": 6.694}


def sample_here(folder: Path, checkpoints: Any, text: str, hold: Any) -> Iterator[dict[str, Any]]:
    """What the process of the server does, in this one."""
    for name, step in checkpoints:
        yield try_sample(folder / name, step, text)


def test_checkpoints_are_sampled(tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_samples, "sample_at_idle_priority", sample_here)
    run = make_run(tmp_path / "run")
    for name, model in (("checkpoint-2", "gpt2"), ("checkpoint-10", "bert"), ("final", "gpt2")):
        (run / name).symlink_to(folders[model])
    (run / "checkpoint-10").unlink()
    client = open_runs(tmp_path)
    found = client.post("/runs/samples", json={"run": "run", "text": "the cat"}).json()
    assert found["state"] == "sampled"
    found = found["samples"]
    assert [(sample["checkpoint"], sample["step"]) for sample in found] == [("checkpoint-2", 2), ("final", None)]
    assert found[0]["text"].startswith("the cat")
    assert found[0]["text"] == found[1]["text"]
    other = make_run(tmp_path / "fills")
    (other / "final").symlink_to(folders["bert"])
    (sample,) = client.post("/runs/samples", json={"run": "fills", "text": "the ___ is red"}).json()["samples"]
    assert len(sample["blanks"][0]["guesses"]) == 5
    assert client.get("/runs/log", params={"name": "fills"}).json()["references"] == {}
    # without a text, each model gets one that suits it
    (filled,) = client.post("/runs/samples", json={"run": "fills"}).json()["samples"]
    assert len(filled["blanks"]) == 1
    assert client.post("/runs/samples", json={"run": "run"}).json()["samples"][0]["text"].startswith("The")


def test_one_checkpoint_that_fails_costs_no_other_its_sample(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_samples, "sample_at_idle_priority", sample_here)
    run = make_run(tmp_path / "run")
    (run / "checkpoint-2").mkdir()
    (run / "checkpoint-2" / "config.json").write_text("{}")
    (run / "checkpoint-4").symlink_to(folders["gpt2"])
    client = open_runs(tmp_path)
    broken, whole = client.post("/runs/samples", json={"run": "run", "text": "the cat"}).json()["samples"]
    assert (broken["step"], whole["step"]) == (2, 4)
    assert broken["error"]
    assert (whole["error"], whole["text"][:7]) == ("", "the cat")


def test_a_checkpoint_may_vanish_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"
    kept.mkdir()
    (kept / "config.json").write_text("{}")
    monkeypatch.setattr(run_samples, "list_checkpoints", lambda folder: [kept, gone])
    assert [name for name, _, _ in run_samples.list_sampled_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_samples_that_take_long_come_later(tmp_path: Path) -> None:
    go_on, asked = threading.Event(), list[str]()

    def sample(folder: Path, checkpoints: Any, text: str, hold: Any) -> Iterator[dict[str, Any]]:
        asked.extend(name for name, _ in checkpoints)
        for name, step in checkpoints:
            yield {"checkpoint": name, "step": step, "text": text, "blanks": [], "error": ""}
            go_on.wait(10)
        raise UserError("the machine is busy")

    folder = make_run(tmp_path / "run")
    for step in (1, 2):
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "config.json").write_text("{}")
    store, run = run_samples.SampleStore(sample), WatchedRun("run", folder)
    kept, job = store.request(run, "a")
    assert job is not None
    assert store.request(run, "a")[1] is job  # asked once
    while not store.describe(kept)["samples"]:
        time.sleep(0.001)
    assert [store.describe(kept)["state"], len(store.describe(kept)["samples"])] == ["sampling", 1]
    go_on.set()
    job.result(10)
    found = store.describe(kept)
    assert found["state"] == "sampled"
    assert [sample["text"] for sample in found["samples"]] == ["a", "a"]
    assert store.request(run, "a")[1] is None
    assert asked == ["checkpoint-1", "checkpoint-2"]
    store.stop()


@pytest.mark.slow  # an idle process waits for all others
def test_checkpoints_are_sampled_by_an_idle_process(tmp_path: Path, folders: dict[str, Path]) -> None:
    (tmp_path / "final").symlink_to(folders["gpt2"])
    policies: list[int] = []
    found = list(
        run_samples.sample_at_idle_priority(
            tmp_path, [("final", None)], "the cat", lambda process: policies.append(os.sched_getscheduler(process.pid))
        )
    )
    assert found == [try_sample(tmp_path / "final", None, "the cat")]
    assert policies == [os.SCHED_IDLE]


def test_a_sample_outlives_its_checkpoint(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_samples, "sample_at_idle_priority", sample_here)
    run = make_run(tmp_path / "run")
    (run / "checkpoint-2").symlink_to(folders["gpt2"])
    client = open_runs(tmp_path)
    body = {"run": "run", "text": "the cat"}
    (first,) = client.post("/runs/samples", json=body).json()["samples"]
    (run / "checkpoint-2").unlink()
    (run / "final").symlink_to(folders["gpt2"])
    found = client.post("/runs/samples", json=body).json()["samples"]
    assert [sample["checkpoint"] for sample in found] == ["checkpoint-2", "final"]
    assert found[0] == first


def test_the_samples_of_the_run_itself_are_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    client = open_runs(tmp_path)

    def read_own() -> Any:
        return client.get("/runs/samples", params={"name": "run"}).json()["checkpoints"]

    assert read_own() == []
    sample = {"before": "the ", "after": " is red", "answer": "cat", "guesses": [["dog", 0.25]]}
    for step in (2, 4):
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "seconds": 0.1, "samples": [sample]}) + "\n")
        assert [line["step"] for line in read_own()] == list(range(2, step + 1, 2))
    assert read_own()[0]["samples"] == [{**sample, "text": ""}]
    (folder / "samples.jsonl").unlink()
    (folder / "samples.jsonl").symlink_to(folder / "log.jsonl")
    assert client.get("/runs/samples", params={"name": "../run"}).status_code == 404


def test_finished_and_unwatched_runs_have_a_speed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    line = {"steps": 2, "seconds": 10.0, "data_wait": 0.0, "device": "cuda", "memory_share": 0.25}
    with RunLog(folder / "timings.jsonl", 0) as timings:
        timings.write(step=2, tokens=1000, **line)
        timings.write(step=4, tokens=3000, **line)
    runs_folder = RunsFolder(tmp_path)
    (stopped,) = runs_folder.list_summaries()
    assert (stopped.state, stopped.tokens_per_second, stopped.seconds_left) == ("stopped", 200.0, None)
    assert stopped.device_memory_share == 0.25
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (run,) = RunsFolder(tmp_path).list_summaries()
    assert (run.state, run.tokens_per_second, run.seconds_left) == ("running", 200.0, 30.0)  # 6 of 10 steps
    with RunLog(folder / "timings.jsonl", 2):  # resumes after step 2: the file is another one
        pass
    watched = runs_folder.runs["run"]
    watched.update()
    assert watched.timings.measure() == (100.0, 0.2)


def test_the_lock_of_another_device_is_another_lock(tmp_path: Path) -> None:
    file, other = tmp_path / ".lock", tmp_path / "other"
    file.touch()
    other.touch()
    facts = file.stat()
    major, minor = os.major(facts.st_dev), os.minor(facts.st_dev)
    template = "1: FLOCK  ADVISORY  WRITE {} {:02x}:{:02x}:{} 0 EOF"
    same = Locks([template.format(77, major, minor, facts.st_ino), "2: -> FLOCK damaged"])
    assert (same.holder(file), same.holder(other), same.holder(tmp_path / "none")) == (77, 0, 0)
    # Another device with this inode: the process must have the file itself open.
    foreign = Locks([template.format(os.getpid(), major + 1, minor, facts.st_ino)])
    assert foreign.holder(file) == 0
    with file.open():
        assert foreign.holder(file) == os.getpid()


def test_where_no_locks_are_told_a_fresh_log_is_that_of_a_running_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "read_locks", lambda: Locks(None))
    folder = make_run(tmp_path / "run")
    make_run(tmp_path / "old")
    os.utime(tmp_path / "old" / "log.jsonl", (1e9, 1e9))
    assert {run.name: run.state for run in RunsFolder(tmp_path).list_summaries()} == {
        "run": "running",
        "old": "stopped",
    }
    write_json(folder / "results.json", {})
    assert RunsFolder(tmp_path).list_summaries()[0].state == "finished"


def test_a_seed_trains_under_the_recipe_and_the_lock_of_its_fine_tuning(tmp_path: Path) -> None:
    home = tmp_path / "tuned"
    home.mkdir()
    write_text(home / "recipe.yaml", "task: classify\nmax_steps: 20\n")
    for seed in (0, 1):
        (home / f"seed-{seed}").mkdir()
        with RunLog(home / f"seed-{seed}" / "log.jsonl", 0) as log:
            log.write(step=1, loss=0.7)
    write_json(home / "seed-0" / "results.json", {})
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = {run.name: run for run in RunsFolder(tmp_path).list_summaries()}
    assert {name: run.state for name, run in found.items()} == {"tuned/seed-0": "finished", "tuned/seed-1": "running"}
    assert (found["tuned/seed-1"].kind, found["tuned/seed-1"].max_steps) == ("fine-tuning: classify", 20)


def test_an_old_run_is_looked_at_when_folders_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        make_run(tmp_path / name)
    os.utime(tmp_path / "old" / "log.jsonl", (1e9, 1e9))
    folder = RunsFolder(tmp_path)
    folder.scan()
    folder.next_listing = math.inf
    looked_at: list[str] = []
    monkeypatch.setattr(WatchedRun, "update", lambda run: looked_at.append(run.name))
    folder.scan()
    assert looked_at == ["new"]


# --- events ---------------------------------------------------------------------------------------------------------


def parse_event(text: bytes) -> dict[str, Any]:
    assert text.startswith(b"data: ")
    assert text.endswith(b"\n\n")
    return json.loads(text[6:])


def test_all_who_watch_get_the_same_bytes_of_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "TICK_S", 0.01)
    monkeypatch.setattr(run_events, "IDLE_TICK_S", 0.01)
    folder = make_run(tmp_path / "run")
    events = RunEvents(RunsFolder(tmp_path), RunNotes(), asyncio.to_thread)

    async def watch_twice() -> None:
        streams = [events.watch() for _ in range(3)]
        first = [parse_event(await anext(stream)) for stream in streams]
        assert all(event["all"] and [run["name"] for run in event["runs"]] == ["run"] for event in first)
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)  # nothing has changed: nothing is sent
        with (folder / "log.jsonl").open("a") as log:
            log.write('{"step": 4, "loss": 4.0}\n')
        texts = [await task for task in waiting]
        assert texts[0] is texts[1] is texts[2]
        told = parse_event(texts[0])
        assert told["logs"]["run"] == {"version": 1, "first": 3, "next": 4, "rows": [[4, 4.0, None, None, None, None]]}
        assert [run["step"] for run in told["runs"]] == [4]

        slow, fast = streams[0], streams[1]
        for step in (5, 6):
            with (folder / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": 3.0}) + "\n")
            assert parse_event(await anext(fast))["logs"]["run"]["next"] == step
        assert parse_event(await anext(slow))["all"]  # has missed an event: all runs again
        shutil.rmtree(folder)
        assert parse_event(await anext(fast))["gone"] == ["run"]
        events.close()
        for stream in streams:
            with pytest.raises(StopAsyncIteration):
                while True:
                    await anext(stream)
        assert events.num_watchers == 0

    asyncio.run(watch_twice())


def test_a_sign_of_life_replaces_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "TICK_S", 0.01)
    monkeypatch.setattr(run_events, "IDLE_TICK_S", 0.01)
    folder = make_run(tmp_path / "run")
    events = RunEvents(RunsFolder(tmp_path), RunNotes(), asyncio.to_thread)

    async def watch_slowly() -> None:
        slow, fast = events.watch(), events.watch()
        await anext(slow), await anext(fast)
        with (folder / "log.jsonl").open("a") as log:
            log.write('{"step": 4, "loss": 4.0}\n')
        told = await anext(fast)
        monkeypatch.setattr(run_events, "HEARTBEAT_S", 0.0)
        assert await anext(fast) == run_events.HEARTBEAT
        assert await anext(slow) == told
        events.close()

    asyncio.run(watch_slowly())


def test_a_resumed_log_and_a_burst_of_lines(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=5)
    events = RunEvents(RunsFolder(tmp_path), RunNotes(), asyncio.to_thread)
    assert parse_event(events.collect())["logs"] == {}  # who begins asks /runs/log
    events.sequence = 1
    with (folder / "log.jsonl").open("a") as log:
        log.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(6, 206))
    part = parse_event(events.collect())["logs"]["run"]
    assert (part["first"], part["next"]) == (5, 205)
    assert len(part["rows"]) <= run_events.MAX_EVENT_ROWS + 1
    assert part["rows"][-1][0] == 205
    assert events.collect() == b""
    with RunLog(folder / "log.jsonl", 2) as log:
        log.write(step=3, loss=1.0)
    part = parse_event(events.collect())["logs"]["run"]
    assert (part["version"], part["first"], [row[0] for row in part["rows"]]) == (2, 0, [1, 2, 3])


def test_watching_ends_when_the_server_stops_and_is_no_request(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    config = ServeConfig(runs=str(tmp_path))
    server = ModelServer({}, config)
    gate = Gate(make_app(server), config, 0)
    scope = {"type": "http", "method": "GET", "path": "/runs/events", "raw_path": b"/runs/events", "query_string": b""}
    scope |= {"headers": [(b"host", b"localhost")], "scheme": "http", "server": ("localhost", 80), "root_path": ""}
    sent: list[dict[str, Any]] = []

    async def watch() -> None:
        has_event, requests = asyncio.Event(), [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            return requests.pop() if requests else await asyncio.Future()

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body"):
                has_event.set()

        task = asyncio.ensure_future(gate(dict(scope), receive, send))
        await has_event.wait()
        assert (gate.num_requests, gate.num_watchers) == (0, 1)
        server.end_streams()
        await task
        assert gate.num_watchers == 0

    asyncio.run(asyncio.wait_for(watch(), 20))
    assert sent[0]["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
    assert parse_event(sent[1]["body"])["all"]
    server.stop()


# --- the doctor's notes ---------------------------------------------------------------------------------------------


def test_a_log_is_examined_once_for_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")
    examined: list[Path] = []

    def examine(path: Path, limit: float, hold: Any) -> dict[str, Any]:
        examined.append(path)
        if len(examined) == 3:
            raise UserError("the shards are gone")
        return {"findings": [{"rule": "plateau"}], "references": {"bigram": 3.5}, "rules": 32, "not_examined": []}

    notes, (run,) = RunNotes(examine), RunsFolder(tmp_path).scan().values()

    def read_all() -> dict[str, Any]:
        notes.worker.submit(lambda: None).result()  # what waits is done first
        return notes.read(run)

    assert notes.read(run)["state"] == "examining"
    found = read_all()
    assert (found["state"], found["number"], found["references"]) == ("examined", 1, {"bigram": 3.5})
    assert read_all()["number"] == 1
    assert examined == [folder]
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 4.0}\n')
    run.is_home_training = True
    assert read_all()["state"] == "examined"  # a run that trains is examined again after a pause
    monkeypatch.setattr(run_notes, "DOCTOR_SHARE", math.inf)
    train(folder, 1.0)
    run.update()
    assert read_all()["state"] == "examining"
    assert read_all()["number"] == 2
    write_json(folder / "results.json", {})
    run.is_home_training = False
    read_all()
    found = read_all()
    assert (found["state"], found["error"]) == ("failed", "the shards are gone")
    notes.stop()


def test_what_the_run_itself_has_found_is_told_until_the_doctor_answers(tmp_path: Path) -> None:
    folder, go_on = make_run(tmp_path / "run"), threading.Event()

    def examine(path: Path, limit: float, hold: Any) -> dict[str, Any]:
        go_on.wait(10)
        return {"findings": [], "references": {}, "rules": 32, "not_examined": []}

    notes, (run,) = RunNotes(examine), RunsFolder(tmp_path).scan().values()
    finding = Finding("plateau", "error", "the loss is stuck", {"loss": 5.0}, "Why.", "firth")
    for text, expected in (
        (json.dumps({"step": 3, "findings": [finding.to_dict()]}), [finding.to_dict()]),
        (json.dumps({"findings": [{"rule": 3}]}), []),
        (json.dumps({"findings": [{**finding.to_dict(), "level": "high"}]}), []),
        ("[]", []),
    ):
        (folder / "findings.json").write_text(text)
        found = notes.read(run)
        assert (found["number"], found["state"], found["findings"]) == (0, "examining", expected)
    (folder / "findings.json").write_text(json.dumps({"findings": [finding.to_dict()]}))
    go_on.set()
    notes.worker.submit(lambda: None).result()
    found = notes.read(run)
    assert (found["number"], found["findings"]) == (1, [])
    notes.stop()


def test_a_run_is_examined_for_a_hundredth_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first examination waits as the later ones do, and one that takes too long is ended."""
    folder, used, takes = make_run(tmp_path / "run"), [0.0], [6.0]
    monkeypatch.setattr(run_notes, "child_cpu_seconds", lambda: used[0])

    def examine(path: Path, limit: float, hold: Any) -> dict[str, Any]:
        used[0] += min(takes[0], limit)
        if takes[0] > limit:
            raise run_notes.OutOfTime("it takes too long")
        return {"findings": [{"rule": "plateau", "level": "warning"}], "references": {}, "rules": 32}

    notes, (run,) = RunNotes(examine), RunsFolder(tmp_path).scan().values()
    run.is_home_training = True
    examined, trained = [], 0
    for _ in range(400):
        train(folder, 10.0)
        run.update()
        trained += 10
        if trained == 1700:
            takes[0] = 9.0
        before = used[0]
        notes.read(run)
        notes.worker.submit(lambda: None).result()
        if used[0] > before:
            examined.append((trained, used[0] - before))
        assert used[0] <= 0.01 * trained
        assert notes.read(run)["state"] == ("later" if trained < 800 else "examined")
    # 8 s are expected, 6 s taken; then 9 s, of which 6 are allowed, and later 12
    assert examined == [(800, 6.0), (1200, 6.0), (1800, 6.0), (3000, 9.0), (3600, 9.0)]
    assert notes.read(run)["number"] == 4
    train(folder, 1.0)
    os.truncate(folder / "timings.jsonl", 0)  # it is resumed, and its budget is spent
    run.update()
    notes.read(run)
    assert used[0] == 36.0
    # What the run finds after an examination stands beside the doctor's notes, once, the worst first.
    plateau, rate = (
        Finding(rule, level, rule, {}, "Why.", "firth").to_dict()
        for rule, level in (("plateau", "error"), ("rate-too-high", "error"))
    )
    write_json(folder / "findings.json", {"findings": [plateau, rate]})
    assert [(f["rule"], f["level"]) for f in notes.read(run)["findings"]] == [
        ("rate-too-high", "error"),
        ("plateau", "warning"),
    ]
    os.utime(folder / "findings.json", (0, 0))  # known when the doctor examined the run
    assert [f["rule"] for f in notes.read(run)["findings"]] == ["plateau"]
    run.is_home_training = False
    assert notes.read(run)["state"] == "examining"
    notes.worker.submit(lambda: None).result()
    assert used[0] == 45.0
    notes.stop()


def test_a_finetuning_counts_as_long_as_it_was_seen_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes no timings, and its seeds share one budget, also those that have ended."""
    now, examined, go_on = [1000.0], [], threading.Event()
    monkeypatch.setattr(run_notes.time, "monotonic", lambda: now[0])
    for seed in range(2):
        make_run(tmp_path / "tuned" / f"seed-{seed}")
        (tmp_path / "tuned" / f"seed-{seed}" / "recipe.yaml").unlink()
    write_text(tmp_path / "tuned" / "recipe.yaml", "task: classify\n")
    write_json(tmp_path / "tuned" / "seed-0" / "results.json", {})

    def examine(path: Path, limit: float, hold: Any) -> dict[str, Any]:
        go_on.wait(10)
        examined.append((path.name, round(limit, 6)))
        return {"findings": [], "references": {}, "rules": 32, "not_examined": []}

    with (tmp_path / "tuned" / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        notes, ended, other = RunNotes(examine), *RunsFolder(tmp_path).scan().values()
        assert (ended.summary.state, other.summary.state) == ("finished", "running")
        for now[0], state in ((1000.0, "later"), (1799.0, "later"), (1801.0, "examining")):
            assert [notes.read(run)["state"] for run in (ended, other)] == [state] * 2
        go_on.set()
        notes.worker.submit(lambda: None).result()
    assert examined == [("tuned", 8.01)]
    notes.stop()


@pytest.mark.slow  # an idle process waits for all others
def test_the_doctor_runs_as_an_idle_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that no doctor knows: what the command says is the error, and nothing else of it."""
    folder = make_run(tmp_path / "-run")
    write_text(folder / "recipe.yaml", "vector_size: 16\n")
    monkeypatch.chdir(tmp_path)
    policies: list[int] = []

    def hold(process: Any) -> None:
        policies.append(os.sched_getscheduler(process.pid))

    with pytest.raises(UserError, match="the doctor knows language models and fine-tunings"):
        run_notes.examine_at_idle_priority(Path("-run"), 60.0, hold)
    with pytest.raises(run_notes.OutOfTime):
        run_notes.examine_at_idle_priority(Path("-run"), 0.5, hold)  # importing torch takes longer than a second
    assert policies == [os.SCHED_IDLE] * 2


def test_a_log_that_becomes_a_pipe_holds_nobody(tmp_path: Path) -> None:
    """Opening a pipe waits for a writer, and the list of all runs would wait with it."""
    run = WatchedRun("run", make_run(tmp_path / "run"))
    run.update()
    assert len(run.rows) == 3
    for name in ("log.jsonl", "timings.jsonl", "recipe.yaml"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "run" / name)
    run.update()
    assert len(run.rows) == 3
