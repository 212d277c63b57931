"""Measure the seconds from the command to the first step, of a new run and of a run that was killed and resumes.

    python benchmarks/resume_time.py bert-tiny --data shards [--repeats 3] [--save-steps 5] [--json] [KEY=VALUE ...]

Each run is `firth pretrain` in a process of its own, timed until its log has the first step (on a GPU that is when the
next step has been launched). It is killed once its checkpoint is complete, and restarted with --resume. So the time
includes everything that a user waits for: importing libraries, opening shards, rows, model, checkpoint (read twice:
checksums, then tensors), compilation, and the step. Text is tokenized before the clock starts. KEY=VALUE sets recipe
fields.
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

PHASES = {"python": "import", "fresh": "new run", "resume": "resumed run"}
UNREACHED_STEPS = 10**6  # steps: the run is killed before


def start(arguments: Sequence[object]) -> subprocess.Popen[str]:
    """Start Python in a process of its own, with the same number of threads as this one."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def pretrain_command(model: str, data: Path, folder: Path, save: int, overrides: Sequence[str]) -> list[object]:
    steps = [f"--max-steps={UNREACHED_STEPS}", f"--eval-steps={UNREACHED_STEPS}", f"--save-steps={save}"]
    return ["-m", "firth", "pretrain", model, *overrides, "--data", data, "--output-dir", folder, *steps, "--resume"]


def seconds_to_first_step(command: Sequence[object], folder: Path, after: int, save: int) -> float:
    """Return the seconds until the log has a step after `after`; kill the run once its next checkpoint is complete."""
    log, start_time = file_identity(folder / "log.jsonl"), time.monotonic()
    process = start(command)
    wait_until(lambda: file_identity(folder / "log.jsonl") != log and last_logged_step(folder) > after, process)
    seconds = time.monotonic() - start_time
    wait_until(lambda: (folder / f"checkpoint-{after + save}").is_dir(), process)
    process.kill()
    _, stderr = process.communicate()
    if process.returncode >= 0:
        raise SystemExit(f"the run ended before it was killed: {stderr}")
    return seconds


def seconds_to_import() -> float:
    """Return the seconds that importing the API takes."""
    start_time = time.monotonic()
    start(["-c", "import firth.api"]).communicate()
    return time.monotonic() - start_time


def make_shards(model: str, data: str, folder: Path, overrides: Sequence[str]) -> Path:
    """Return the given shards, or those of a run of one step on the given text."""
    if is_shards_folder(Path(data)):
        return Path(data)
    say(f"tokenizing {data}")
    api.pretrain(model, data, folder, max_steps=1, overrides=parse_overrides(overrides))
    return folder / "data"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="recipe fields")
    parser.add_argument("--data", default="pydocs", help="shards or text (pydocs, the built-in corpus)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind; medians are reported (3)")
    parser.add_argument(
        "--save-steps", type=int, default=5, help="step of the checkpoint that the run resumes from (5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    args = parser.parse_intermixed_args(argv)
    seconds: dict[str, list[float]] = {name: [] for name in PHASES}
    with TemporaryDirectory(dir=".") as temporary:
        shards = make_shards(args.model, args.data, Path(temporary) / "first", args.overrides)
        for repeat in range(args.repeats):
            folder = Path(temporary) / f"run-{repeat}"
            command = pretrain_command(args.model, shards, folder, args.save_steps, args.overrides)
            seconds["python"].append(seconds_to_import())
            seconds["fresh"].append(seconds_to_first_step(command, folder, 0, args.save_steps))
            say(f"{PHASES['python']} {seconds['python'][-1]:.1f} s, {PHASES['fresh']} {seconds['fresh'][-1]:.1f} s")
            seconds["resume"].append(seconds_to_first_step(command, folder, args.save_steps, args.save_steps))
            say(f"{PHASES['resume']} {seconds['resume'][-1]:.1f} s")
        checkpoint = Path(temporary) / "run-0" / f"checkpoint-{args.save_steps}"
        size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    compute = choose_compute(TrainingConfig())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        (PHASES[name], f"{medians[name]:.2f}", f"{min(values):.2f}", f"{max(values):.2f}")
        for name, values in seconds.items()
    ]
    show_table(
        f"{args.model}: seconds from the command to the first step ({args.repeats} repeats; checkpoint of "
        f"{size / 1e6:,.1f} MB), on {compute}",
        ["", "median", "min", "max"],
        rows,
    )
    if args.json:
        facts = {"model": args.model, "data": args.data, "machine": str(compute), "repeats": args.repeats}
        print(json.dumps(facts | {"checkpoint_bytes": size, "seconds": medians, "all_seconds": seconds}))


if __name__ == "__main__":
    main()
