"""Runs of several real processes, really killed or stopped: all come back, or all end, and the numbers are the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from firth.core.files import find_corruption

SOURCE = Path(__file__).parents[2] / "src"
STEPS = 60
OPTIONS = [
    *("--vocab-size=400", "--max-seq-length=32", "--per-device-train-batch-size=2", "--gradient-accumulation-steps=2"),
    *(f"--max-steps={STEPS}", "--save-steps=9", "--eval-steps=20", "--no-compile", "--no-bf16"),
    *("model.num_layers=1", "model.dim=32", "model.mlp.dim=64", "model.dropout=0.2"),
]
STARTED: list[subprocess.Popen[str]] = []
ALONE = ("--nproc-per-node=2", "--standalone", "--max-restarts=3", "--monitor-interval=1")


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Leave nothing running, whatever happens: torchrun ends its workers when it is asked to end."""
    yield
    for process in STARTED:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    STARTED.clear()


def start(text: Path, folder: Path, *more: object, launch: Sequence[str] = ALONE) -> subprocess.Popen[str]:
    """`torchrun ... -m firth pretrain ...` as a person starts it."""
    words = [
        "-m",
        "torch.distributed.run",
        *launch,
        "-m",
        "firth",
        "pretrain",
        "bert-tiny",
        "--data",
        text,
        "--output-dir",
        folder,
        *OPTIONS,
        *more,
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    pipe = subprocess.PIPE
    STARTED.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    return STARTED[-1]


def end(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well."""
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def when(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < limit, "nothing happened"
        time.sleep(0.001)


def logged(folder: Path, steps: int) -> Callable[[], bool]:
    log = folder / "log.jsonl"
    return lambda: log.exists() and log.read_bytes().count(b'"loss"') >= steps


def workers(process: subprocess.Popen[str]) -> dict[int, int]:
    """The processes that torchrun has started, by their ranks."""
    found = {}
    for task in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for child in task.read_text().split():
            try:
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            if ranks:
                found[ranks[0]] = int(child)
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert (one / "log.jsonl").read_text() == (other / "log.jsonl").read_text()
    for name in ("final/model.safetensors", "final/config.json", "data/train/tokens.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the workers")
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_killed_workers_come_back(way: str, corpus_file: Path, tmp_path: Path) -> None:
    end(start(corpus_file, tmp_path / "straight", "--parallel", way))
    folder = tmp_path / "killed"
    process = start(corpus_file, folder, "--parallel", way)
    for rank, steps in ((1, 15), (0, 40)):
        when(logged(folder, steps), process)
        os.kill(workers(process)[rank], signal.SIGKILL)
    said = end(process)
    assert said.count("resuming from") == 2, said
    assert_same_run(tmp_path / "straight", folder)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_saves_and_stops_all(number: signal.Signals, corpus_file: Path, tmp_path: Path) -> None:
    """The same command with --resume continues the run."""
    folder = tmp_path / "run"
    process = start(corpus_file, folder, "--parallel=fsdp")
    when(logged(folder, 12), process)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0
    assert said.count("resume with the same command and --resume") == 1, said
    newest = max(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    assert find_corruption(newest) is None
    assert f"stopped at {newest.name.replace('checkpoint-', 'step ')} of {STEPS}" in said
    said = end(start(corpus_file, folder, "--parallel=fsdp", "--resume"))
    assert f"resuming from {newest}" in said
    assert (folder / "final" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_next_start_goes_on_only_with_a_run_of_its_own(corpus_file: Path, tmp_path: Path) -> None:
    """What was refused at first is refused again, and said once."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("seed: 1\n")
    process = start(corpus_file, folder, "--parallel=ddp")
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0
    assert said.count("exists already") == 1, said
    assert [p.name for p in folder.iterdir()] == ["recipe.yaml"]


@pytest.mark.slow
def test_two_machines(corpus_file: Path, tmp_path: Path) -> None:
    """Two torchruns that meet at an address, as on two machines; what comes out is what two processes of one have."""
    end(start(corpus_file, tmp_path / "one", "--parallel=ddp"))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{s.getsockname()[1]}"
    meeting = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two", f"--rdzv-endpoint={place}")
    both = [start(corpus_file, tmp_path / "two", "--parallel=ddp", launch=meeting) for _ in range(2)]
    said = "".join(end(process) for process in both)
    assert said.count("2 processes (ddp)") == 1
    assert_same_run(tmp_path / "one", tmp_path / "two")
