"""Seconds from the command to the first step: of a run that begins, and of one that was killed and goes on.

    python benchmarks/resume_time.py bert-tiny --data shards [--turns 3] [--save 5] [--json] [KEY=VALUE ...]

`firth pretrain` is started in a process of its own, and the time runs until the first line of a step is in its log
(on a GPU that comes when the next step is under way). It is killed once its checkpoint is whole, and started again with
--resume. So all is counted that a person waits for: Python and its libraries, shards, rows, model, checkpoint (which is
read twice: checksums, then tensors), what is compiled, and the step itself. Text becomes shards before the clock
starts. KEY=VALUE sets fields of the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from firth import api
from firth.core.console import say, show_table
from firth.lab.prove_resume import file_identity, last_logged_step, wait_until
from firth.tokens import is_shards_folder
from firth.train import TrainingConfig, choose_compute, parse_overrides

WAYS = {"python": "Python and its libraries", "fresh": "a fresh start", "resume": "a resume"}
MANY = 10**6  # steps: more than will be taken


def start(words: Sequence[object]) -> subprocess.Popen[str]:
    """A command of Python in a process of its own, with as many threads as this one."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def command(model: str, data: Path, folder: Path, save: int, overrides: Sequence[str]) -> list[object]:
    steps = [f"--max-steps={MANY}", f"--eval-steps={MANY}", f"--save-steps={save}"]
    return ["-m", "firth", "pretrain", model, *overrides, "--data", data, "--output-dir", folder, *steps, "--resume"]


def until_a_step(words: Sequence[object], folder: Path, after: int, save: int) -> float:
    """Seconds until the log has a step after this one; then the run is killed, once its next checkpoint is whole."""
    log, began = file_identity(folder / "log.jsonl"), time.monotonic()
    process = start(words)
    wait_until(lambda: file_identity(folder / "log.jsonl") != log and last_logged_step(folder) > after, process)
    seconds = time.monotonic() - began
    wait_until(lambda: (folder / f"checkpoint-{after + save}").is_dir(), process)
    process.kill()
    _, said = process.communicate()
    if process.returncode >= 0:
        raise SystemExit(f"the run ended by itself: {said}")
    return seconds


def loading() -> float:
    """Seconds until Python has loaded what the verb needs."""
    began = time.monotonic()
    start(["-c", "import firth.api"]).communicate()
    return time.monotonic() - began


def shards_of(model: str, data: str, folder: Path, overrides: Sequence[str]) -> Path:
    """The shards: those that were named, or those of a run of one step on the text."""
    if is_shards_folder(Path(data)):
        return Path(data)
    say(f"making shards of {data}")
    api.pretrain(model, data, folder, max_steps=1, overrides=parse_overrides(overrides))
    return folder / "data"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", default="pydocs", help="shards, or text; the built-in corpus unless said")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--save", type=int, default=5, help="steps until the checkpoint that is gone on from")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    given = parser.parse_intermixed_args(arguments)
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with TemporaryDirectory(dir=".") as place:
        shards = shards_of(given.model, given.data, Path(place) / "first", given.overrides)
        for turn in range(given.turns):
            folder = Path(place) / f"run-{turn}"
            words = command(given.model, shards, folder, given.save, given.overrides)
            found["python"].append(loading())
            found["fresh"].append(until_a_step(words, folder, 0, given.save))
            say(f"{WAYS['python']} {found['python'][-1]:.1f} s, {WAYS['fresh']} {found['fresh'][-1]:.1f} s")
            found["resume"].append(until_a_step(words, folder, given.save, given.save))
            say(f"{WAYS['resume']} {found['resume'][-1]:.1f} s")
        checkpoint = Path(place) / "run-0" / f"checkpoint-{given.save}"
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    machine = choose_compute(TrainingConfig())
    took = {name: statistics.median(times) for name, times in found.items()}
    rows = [
        (WAYS[name], f"{took[name]:.2f}", f"{min(times):.2f}", f"{max(times):.2f}") for name, times in found.items()
    ]
    show_table(
        f"{given.model}: seconds from the command to the first step ({given.turns} turns; a checkpoint has "
        f"{size / 1e6:,.1f} MB), on {machine}",
        ["", "median", "least", "most"],
        rows,
    )
    if given.json:
        facts = {"model": given.model, "data": given.data, "machine": str(machine), "turns": given.turns}
        print(json.dumps(facts | {"checkpoint_bytes": size, "seconds": took, "each": found}))


if __name__ == "__main__":
    main()
