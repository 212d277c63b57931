"""A Ray cluster writes the bytes of one process, also when its machines are killed."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tokens.test_cluster import STOPPING, ShuffledEngine, contents, make_texts, recording

from firth import api
from firth.core.errors import UserError
from firth.core.files import check_output_folder, find_corruption
from firth.tokens import load_tokenizer, train_tokenizer
from firth.tokens.cluster import plan
from firth.tokens.cluster import prepare as module
from firth.tokens.cluster.ray_engine import exported_path, import_ray, start_with_patience
from firth.tokens.cluster.store import open_filesystem

TEXTS = make_texts(400)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:200]))
    (folder / "b.txt").write_text("\n\n".join(TEXTS[200:]))
    train_tokenizer(TEXTS[:50], "wordpiece", 300).save(folder / "tok")
    return folder


def paths(source: Path) -> list[Path]:
    return [source / "a.jsonl", source / "b.txt"]


# --- options --------------------------------------------------------------------------------------------------------


def test_the_extra_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(UserError, match=r"needs the extra ray\. Install it: .* -m pip install 'firth\[ray\]'"):
        api.prepare(paths(source), source / "tok", tmp_path / "s", engine="ray")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "spark"}, "--engine spark is unknown"),
        ({"address": "auto"}, "--address needs --engine ray"),
        ({"document_timeout": 5.0}, "--document-timeout needs --engine ray"),
        ({"engine": "ray", "document_timeout": -1.0}, "must be at least 0"),
        ({"engine": "ray", "max_memory": 10**9}, "--max-memory is for one machine"),
        ({"engine": "ray", "dry_run": True}, "--dry-run is for one machine"),
    ],
)
def test_options_that_do_not_fit(source: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        api.prepare(paths(source), source / "tok", tmp_path / "s", **options)


def test_object_storage_needs_the_engine(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="s3://bucket/text: object storage needs --engine ray"):
        api.prepare(["s3://bucket/text"], source / "tok", tmp_path / "s")


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> ShuffledEngine:
    """An engine of this process in place of Ray, which dies after two tasks."""
    engine = ShuffledEngine(0, dies_after=2)
    monkeypatch.setattr("firth.commands.engine.open_ray_engine", lambda *_: nullcontext(engine))
    return engine


def test_the_sample_for_a_tokenizer_is_resumed(
    source: Path, tmp_path: Path, no_ray: ShuffledEngine, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options: dict[str, Any] = {"kind": "byte-bpe", "vocab_size": 300, "max_memory": 40 * 10_000, "seed": 1}
    one = api.tokenizer(paths(source), tmp_path / "one", **options)
    options |= {"engine": "ray", "document_timeout": 0.0}
    with pytest.raises(KeyboardInterrupt):
        api.tokenizer(paths(source), tmp_path / "many", **options)
    assert "--resume continues from there" in capsys.readouterr().err
    tasks = sys.modules["firth.tokens.cluster.tasks"].TASKS
    computed = list[tuple[str, int]]()
    for kind, function in list(tasks.items()):
        monkeypatch.setitem(tasks, kind, recording(function, computed))
    no_ray.dies_after = None
    many = api.tokenizer(paths(source), tmp_path / "many", resume=True, **options)
    assert many["fingerprint"] == one["fingerprint"]
    assert not set(no_ray.ran[:2]) & set(computed), "finished tasks are kept"
    with pytest.raises(UserError, match="--resume needs --engine ray"):
        api.tokenizer(paths(source), tmp_path / "t", resume=True)


def test_a_tokenizer_on_object_storage(
    source: Path, tmp_path: Path, no_ray: ShuffledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"kind": "byte-bpe", "vocab_size": 300}
    with pytest.raises(UserError, match="s3://b/tok: object storage needs --engine ray"):
        api.tokenizer(paths(source), "s3://b/tok", **options)
    with pytest.raises(UserError, match=r"s3:/b/tok is on object storage"):
        check_output_folder(Path("s3://b/tok"), "--output-dir")
    assert list(tmp_path.iterdir()) == []
    no_ray.dies_after = None
    found = api.tokenizer(paths(source), "memory://away/tok", engine="ray", document_timeout=0.0, **options)
    assert found["copied_to"] == "memory://away/tok"
    filesystem, path = open_filesystem("memory://away/tok")
    filesystem.get(path, str(tmp_path / "tok"), recursive=True)
    assert load_tokenizer(tmp_path / "tok").fingerprint == found["fingerprint"]
    assert find_corruption(tmp_path / "tok") is None


# --- clusters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Three machines with one core each, which are processes of this one. The first one stays: it has the state."""
    pytest.importorskip("ray")
    ray = import_ray()
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("lib")
    (folder / "sitecustomize.py").write_text(STOPPING)
    with exported_path(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        head = {"num_cpus": 1, "include_dashboard": False}
        cluster = start_with_patience(lambda: Cluster(initialize_head=True, head_node_args=head))
        for _ in range(2):
            start_with_patience(lambda: cluster.add_node(num_cpus=1))
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(autouse=True)
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TASK_BYTES", 10_000)
    monkeypatch.setattr(module, "INPUT_BYTES_PER_RANGE", 50_000)


@pytest.mark.slow
def test_machines_that_are_killed_change_nothing(cluster: Any, source: Path, tmp_path: Path) -> None:
    """The command runs in a thread, since Ray starts a new machine in the main thread only."""
    api.prepare(paths(source), source / "tok", tmp_path / "one", dedup="near", held_out=0.2)
    rng, num_killed = random.Random(0), 0
    options: dict[str, Any] = {"engine": "ray", "document_timeout": 60, "dedup": "near", "held_out": 0.2}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(api.prepare, paths(source), source / "tok", tmp_path / "many", **options)
        while not running.done():
            time.sleep(rng.uniform(2, 6))
            if not running.done():
                node = rng.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
                cluster.remove_node(node, allow_graceful=False)
                num_killed += 1
                start_with_patience(lambda: cluster.add_node(num_cpus=1))
        result = running.result()
    assert num_killed >= 2, "machines were killed while tasks ran"
    found, expected = contents(tmp_path / "many"), contents(tmp_path / "one")
    assert {name for name in found if found[name] != expected.get(name)} <= {".verified.json"}
    assert found.keys() == expected.keys()
    assert result["duplicates"] > 100
    assert "skipped" not in result, "no document is blamed for a lost machine"


@pytest.mark.slow
def test_documents_that_hang_or_kill_a_worker(cluster: Any, source: Path, tmp_path: Path, capfd: Any) -> None:
    words = ("HANG read", "KILL read", "HANG tokenize", "KILL tokenize", "OK")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{word} heron"}) + "\n" for word in words))
    result = api.prepare(
        [tmp_path / "a.jsonl"], source / "tok", tmp_path / "s", engine="ray", document_timeout=4, held_out=0.0
    )
    reasons = ["no progress within 4 s", "the process died (SIGKILL)"] * 2
    assert [skipped["reason"] for skipped in result["skipped"]] == reasons
    assert result["documents"] == 1
    said = " ".join(capfd.readouterr().err.split())
    assert all(reason in said for reason in reasons), said


@pytest.mark.slow
def test_errors_of_the_text_come_back(cluster: Any, source: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{broken\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:2: "):
        api.prepare([tmp_path / "bad.jsonl"], source / "tok", tmp_path / "s", engine="ray", document_timeout=0)


@pytest.mark.slow
def test_a_tokenizer_from_a_sample_of_the_cluster(cluster: Any, source: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "byte-bpe", "vocab_size": 400, "max_memory": 40 * 30_000, "seed": 1}
    one = api.tokenizer(paths(source), tmp_path / "one", **options)
    many = api.tokenizer(paths(source), tmp_path / "many", engine="ray", document_timeout=30.0, **options)
    assert one["fingerprint"] == many["fingerprint"]
