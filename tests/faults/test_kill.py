"""Real runs, really killed: what comes out is what would have come out."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firth import api
from firth.cli.main import main
from firth.core.files import find_corruption

SOURCE = Path(__file__).parents[2] / "src"
STEPS = 150
OPTIONS = [
    *("--vocab-size=400", "--max-seq-length=32", "--per-device-train-batch-size=2", "--gradient-accumulation-steps=2"),
    *(f"--max-steps={STEPS}", "--save-steps=9", "--eval-steps=50", "--no-compile", "--no-bf16"),
    *("model.num_layers=1", "model.dim=32", "model.mlp.dim=64", "model.dropout=0.2"),
]


def start(*words: object) -> subprocess.Popen[str]:
    """`python -m firth ...` in a process of its own."""
    threads = str(torch.get_num_threads())  # as in this process: equality to the bit is promised for that alone
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    command = [sys.executable, "-m", "firth", *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def run(*words: object) -> str:
    """To the end; what it said."""
    process = start(*words)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def pretraining(text: Path, folder: Path, model: str = "bert-tiny") -> list[object]:
    return ["pretrain", model, "--data", text, "--output-dir", folder, *OPTIONS]


def when(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something is the case while the process still works."""
    end = time.monotonic() + 300
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended before its time: {process.stderr.read() if process.stderr else ''}")
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def kill_when(condition: Callable[[], bool], *words: object) -> None:
    process = start(*words)
    try:
        when(condition, process)
    finally:
        process.kill()  # SIGKILL: no handler, no tidying up
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def logged(folder: Path, steps: int) -> Callable[[], bool]:
    """The log has come so far."""

    def condition() -> bool:
        log = folder / "log.jsonl"
        return log.exists() and log.read_bytes().count(b'"loss"') >= steps

    return condition


def there(folder: Path, pattern: str) -> Callable[[], bool]:
    return lambda: any(folder.glob(pattern))


def assert_same_run(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert (one / "log.jsonl").read_text() == (other / "log.jsonl").read_text()
    for name in ("final/model.safetensors", "final/tokenizer.json", "final/config.json", "data/train/tokens.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    results = [json.loads((folder / "results.json").read_text()) for folder in (one, other)]
    for name in ("steps", "loss", "eval_loss", "tokens", "parameters", "unigram_entropy"):
        assert results[0][name] == results[1][name]
    for folder in (one, other):
        assert not list(folder.glob(".*.tmp"))
        assert not list(folder.glob(".*.old"))


def here(*words: object) -> None:
    """The same verb in this process, undisturbed: that saves the time to start another one."""
    before = sys.argv
    sys.argv = ["firth", *map(str, words)]
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    assert not end.value.code


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stopped_again_and_again(everywhere: bool, corpus_file: Path, tmp_path: Path) -> None:
    """Each stop costs the start of a process. Shorter tests stop a run while its tokenizer is made, and by Ctrl-C;
    test_kill_prepare.py kills it while the shards are made.
    """
    here(*pretraining(corpus_file, tmp_path / "straight"))
    folder = tmp_path / "run"
    words = [*pretraining(corpus_file, folder), "--resume"]
    if everywhere:
        kill_when(there(folder, ".tokenizer.tmp"), *words)  # while the tokenizer is made
        kill_when(there(folder, ".data.part"), *words)  # while the shards are made
    kill_when(logged(folder, random.randint(12, 40)), *words)  # anywhere
    if everywhere:
        stop_when(logged(folder, 45), folder, *words)
    stop_when(logged(folder, 70), folder, *words, number=signal.SIGTERM)  # as before a machine is taken away
    kill_when(there(folder, ".checkpoint-1[0-9][0-9].tmp"), *words)  # while a checkpoint is written
    here(*words)
    assert_same_run(folder, tmp_path / "straight")


def stop_when(
    condition: Callable[[], bool], folder: Path, *words: object, number: signal.Signals = signal.SIGINT
) -> None:
    """It saves where it stops, and says how to go on."""
    process = start(*words)
    when(condition, process)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert "--resume" in said
    assert "Traceback" not in said
    newest = max(folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    assert find_corruption(newest) is None
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    assert newest.name == f"checkpoint-{last['step']}"
    assert f"step {last['step']} of {STEPS}" in said


def test_ctrl_c_before_there_is_anything_to_save(corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(*pretraining(corpus_file, folder))
    when(there(folder, ".tokenizer.tmp"), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in said


def test_a_killed_finetuning_gives_the_same_scores(quiet: Path, tmp_path: Path) -> None:
    rows = [(f"the {w} {v} by the {p}", w) for w in ("cat", "dog") for p in ("river", "mill") for v in ("slept", "sat")]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    files = ["--task=classify", "--train", data, "--dev", data, "--seeds=2", "--max-steps=60", "--save-steps=10"]
    files += ["--unfreeze-every=15", "--layer-decay=0.9", "--lr-scheduler-type=slanted-triangle", "--eval-steps=8"]
    here("finetune", quiet / "final", *files, "--output-dir", tmp_path / "straight")
    words = ["finetune", quiet / "final", *files, "--output-dir", tmp_path / "killed", "--resume"]
    kill_when(logged(tmp_path / "killed" / "seed-1", random.randint(12, 40)), *words)
    assert (tmp_path / "killed" / "seed-0" / "results.json").exists()
    here(*words)
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("straight", "killed")]
    for result in found:
        del result["output_dir"], result["predictions"], result["seconds"], result["examples_per_second"]
    assert found[0] == found[1]
    for name in ("final/model.safetensors", "predictions.jsonl", "seed-1/log.jsonl"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()


# --- damaged checkpoints, in this process


@pytest.fixture(scope="session")
def quiet(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that nobody disturbed, made in this process."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    go(corpus_file, folder)
    return folder


def go(text: Path, folder: Path, resume: bool = False) -> None:
    small = {"model.num_layers": 1, "model.dim": 32, "model.mlp.dim": 64}
    sizes = {"max_steps": 12, "save_steps": 4, "max_seq_length": 32, "per_device_train_batch_size": 4}
    api.pretrain("gpt2-tiny", text, folder, vocab_size=400, overrides=small, resume=resume, **sizes)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "name"),
    [
        (cut_short, "model.safetensors"),
        (flip_a_bit, "model.safetensors"),
        (flip_a_bit, "training/optimizer.safetensors"),
        (Path.unlink, "training/state.json"),
        (cut_short, "manifest.json"),
        (Path.unlink, "manifest.json"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(
    harm: Callable[[Path], None],
    name: str,
    quiet: Path,
    corpus_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(quiet, folder)
    shutil.rmtree(folder / "final")
    (folder / "results.json").unlink()
    harm(folder / "checkpoint-12" / name)
    go(corpus_file, folder, resume=True)
    said = capsys.readouterr().err
    assert "checkpoint-12 is damaged" in said
    assert "resuming from" in said
    assert "checkpoint-8" in said
    assert_same_run(folder, quiet)
    assert find_corruption(folder / "checkpoint-12") is None


def test_without_a_whole_checkpoint_it_begins_anew(quiet: Path, corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(quiet, folder)
    shutil.rmtree(folder / "final")
    for checkpoint in folder.glob("checkpoint-*"):
        flip_a_bit(checkpoint / "model.safetensors")
    go(corpus_file, folder, resume=True)
    assert_same_run(folder, quiet)


def test_a_run_that_was_moved_goes_on(quiet: Path, corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    shutil.copytree(quiet, folder)
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoint-12")
    go(corpus_file, folder, resume=True)
    assert_same_run(folder, quiet)


def test_damaged_shards_are_made_again(quiet: Path, corpus_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(quiet, folder)
    shutil.rmtree(folder / "final")
    shutil.rmtree(folder / "checkpoint-12")
    flip_a_bit(folder / "data" / "train" / "tokens.bin")
    go(corpus_file, folder, resume=True)
    assert_same_run(folder, quiet)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert-tiny", "gpt2-tiny", "t5-tiny"])
def test_killed_at_any_moment(model: str, corpus_file: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    run(*pretraining(corpus_file, tmp_path / "straight", model))
    took, folder = time.monotonic() - began, tmp_path / "killed"
    words = [*pretraining(corpus_file, folder, model), "--resume"]
    killed = 0
    for _ in range(8):
        process = start(*words)
        time.sleep(random.uniform(0.3, 0.9) * took)
        alive = process.poll() is None  # a run that had ended by itself was not killed
        process.kill()
        process.communicate()
        killed += alive
        if not killed:  # the machine was slower when it was timed
            shutil.rmtree(folder)
            took /= 2
    print(f"{model}: {killed} of 8 found the run alive")
    assert killed
    run(*words)
    assert_same_run(folder, tmp_path / "straight")
