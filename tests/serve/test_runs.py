"""Runs that are watched: what is new is read once, a rewritten log is read again, and no name leaves the folder."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from firth.core.errors import UserError
from firth.core.files import write_json, write_text
from firth.serve import runs
from firth.serve.app import make_app
from firth.serve.config import ServeConfig
from firth.serve.gate import Gate
from firth.serve.model_server import ModelServer
from firth.serve.runs import RunsFolder, WatchedRun
from firth.train.log import RunLog


@pytest.fixture(autouse=True)
def always_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SCAN_SECONDS", 0.0)


def make_run(folder: Path, steps: int = 3, max_steps: int = 10) -> Path:
    folder.mkdir(parents=True)
    write_text(folder / "recipe.yaml", f"max_steps: {max_steps}\nmodel: {{family: bert}}\nobjective: {{kind: MLM}}\n")
    with RunLog(folder / "log.jsonl", 0) as log:
        for step in range(1, steps + 1):
            log.write(step=step, loss=8.0 - step, learning_rate=0.1, tokens=100 * step, grad_norm=1.0)
    return folder


def open_runs(folder: Path) -> TestClient:
    config = ServeConfig(runs=str(folder))
    return TestClient(Gate(make_app(ModelServer({}, config)), config, 0), "http://localhost")


def read(client: TestClient, name: str, version: int = 0, after: int = 0) -> Any:
    answer = client.get("/runs/log", params={"name": name, "version": version, "after": after})
    assert answer.status_code == 200, answer.text
    return answer.json()


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


def test_checkpoints_are_sampled(tmp_path: Path, folders: dict[str, Path]) -> None:
    run = make_run(tmp_path / "run")
    for name, model in (("checkpoint-2", "gpt2"), ("checkpoint-10", "bert"), ("final", "gpt2")):
        (run / name).symlink_to(folders[model])
    (run / "checkpoint-10").unlink()
    client = open_runs(tmp_path)
    found = client.post("/runs/samples", json={"run": "run", "text": "the cat"}).json()["samples"]
    assert [(sample["checkpoint"], sample["step"]) for sample in found] == [("checkpoint-2", 2), ("final", None)]
    assert found[0]["text"].startswith("the cat")
    assert found[0]["text"] == found[1]["text"]
    other = make_run(tmp_path / "fills")
    (other / "final").symlink_to(folders["bert"])
    (sample,) = client.post("/runs/samples", json={"run": "fills", "text": "the ___ is red"}).json()["samples"]
    assert len(sample["blanks"][0]["guesses"]) == 5
    assert client.get("/runs/log", params={"name": "fills"}).json()["references"] == {}
