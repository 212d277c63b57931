"""Compare the tokens/s of a default `firth pretrain` with those of the training step alone (`train_speed.py`).

    python benchmarks/default_run.py [--models bert-base gpt2 ...] [--shards DIR ...] [--minutes M] [--same-shape]

The run is what a user types: `firth pretrain MODEL --data SHARDS --output-dir RUN`, in a process of its own, with the
batch, the optimizer and the compilation that it chooses. Its speed is read from its log, after the first steps; then it
is killed. `--max-steps` is large, so that the run does not end; `--minutes M` times a run that is planned for M
minutes. The reference is the step of `train_speed.py`: its own batch shape, AdamW, random tokens, no training loop.
`--same-shape` gives it the batch size, row length and vocabulary of the run. The target ratio is 0.85.

All models compile at the same time, which takes most of the time. A run is paused (SIGSTOP) after its first steps, and
resumes alone while it is timed; the references are timed one by one too. Without `--shards` the built-in corpus is
tokenized, once for each kind of tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from train_speed import DEFAULT_SETTINGS, OURS, WORKLOADS, Workload, make_sides, timed

from firth.core.console import say, show_table
from firth.models import get_preset
from firth.recipes import pretraining_recipe, tokenizer_kind
from firth.text import Corpus
from firth.tokens import open_shards, prepare, train_tokenizer
from firth.train import Recipe, choose_compute, load_recipe

MODELS = ("bert-base", "modernbert-base", "gpt2", "t5.1.1-base", "bart-base")
WORKLOAD_NAMES = {"bert-base": "bert-base-128"}  # workloads of train_speed.py with another name
UNREACHED_STEPS = 10**6  # steps: the run is killed before
READY_STEPS = 10  # steps of a run before it is paused
SETTLE_SECONDS = 1.5  # between resuming a run and timing it
POLL_SECONDS = 0.01
START_TIMEOUT_SECONDS = 540
TARGET_RATIO = 0.85
STEPS_PER_TURN = 10


class PausedProcess(NamedTuple):
    """A process that compiles its step and then waits to be timed."""

    model: str
    process: subprocess.Popen[str]
    folder: Path  # of its files
    is_ready: Callable[[], bool]


# --- the run


def start_process(command: Sequence[object], folder: Path) -> subprocess.Popen[str]:
    """Start Python with these arguments; stderr goes to FOLDER.txt, stdout to a pipe."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with open(f"{folder}.txt", "w", encoding="utf-8") as stderr_file:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            text=True,
        )


def start_run(model: str, shards: Path, workspace: Path, minutes: float) -> PausedProcess:
    folder = workspace / f"run-{model}"
    length = ["--minutes", minutes] if minutes else ["--max-steps", UNREACHED_STEPS]
    command = ["-m", "firth", "pretrain", model, "--data", shards, "--output-dir", folder, *length]
    return PausedProcess(
        model, start_process(command, folder), folder, lambda: last_line(folder).get("step", 0) >= READY_STEPS
    )


def last_line(run: Path) -> dict[str, Any]:
    """Return the last complete training line of a run's log; empty before the first."""
    try:
        with open(run / "log.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    found = (json.loads(line) for line in reversed(lines) if line.startswith(b"{") and b'"tokens"' in line)
    return next(found, {})


def tokens_per_second(run: PausedProcess, seconds: float) -> float:
    """Return the speed of a run between two lines of its log at least `seconds` apart."""

    def next_line(tokens: int) -> tuple[float, int]:
        while (line := last_line(run.folder)).get("tokens", 0) <= tokens:
            if run.process.poll() is not None:
                raise SystemExit(f"{run.model} ended before it was timed: {read_messages(run)}")
            time.sleep(POLL_SECONDS)
        return time.monotonic(), line["tokens"]

    time.sleep(SETTLE_SECONDS)
    start, first = next_line(last_line(run.folder).get("tokens", 0))
    now, tokens = next_line(first)
    while now - start < seconds:
        now, tokens = next_line(tokens)
    return (tokens - first) / (now - start)


def time_run(run: PausedProcess, seconds: float) -> float:
    run.process.send_signal(signal.SIGCONT)
    speed = tokens_per_second(run, seconds)
    stop(run.process)
    return speed


def read_messages(one: PausedProcess) -> str:
    """Return the end of what a process wrote to stderr."""
    return Path(f"{one.folder}.txt").read_text(encoding="utf-8")[-2000:]


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait_for_all(processes: Sequence[PausedProcess], stops: bool) -> None:
    """Wait until all have compiled; with `stops`, pause each one then, so that the GPU is free for timing."""
    pending, start = list(processes), time.monotonic()
    while pending:
        for one in [p for p in pending if p.is_ready()]:
            if stops:
                one.process.send_signal(signal.SIGSTOP)
            say(f"{one.model}: compiled after {time.monotonic() - start:.0f} s")
            pending.remove(one)
        for one in pending:
            if one.process.poll() is not None or time.monotonic() - start > START_TIMEOUT_SECONDS:
                raise SystemExit(f"{one.model} ended or timed out before it was ready: {read_messages(one)}")
        time.sleep(POLL_SECONDS)


# --- the step alone


def reference_workload(model: str, recipe: Recipe | None) -> Workload:
    """Return the workload of train_speed.py, or with a recipe the batch of the run."""
    named = WORKLOADS.get(WORKLOAD_NAMES.get(model, model))
    if named is not None and recipe is None:
        return named
    if recipe is None:
        raise SystemExit(f"{model} has no workload in train_speed.py: pass --same-shape.")
    return Workload(recipe.model, recipe.objective, recipe.per_device_train_batch_size, recipe.max_seq_length)


def reference(model: str, recipe_file: str, ready: Path) -> None:
    """Compile the step, create `ready`, read the number of steps from stdin, and print the tokens/s of each turn."""
    recipe = load_recipe(Path(recipe_file), Recipe) if recipe_file else None
    compute = choose_compute(DEFAULT_SETTINGS)
    workload = reference_workload(model, recipe)
    side = make_sides(model, workload, compute, compute, DEFAULT_SETTINGS, alone=True, packed=False)[OURS]
    steps_per_turn = STEPS_PER_TURN if compute.device.type == "cuda" else 1
    timed(side.step, [side.batch(i) for i in range(steps_per_turn)])
    ready.touch()
    steps = int(sys.stdin.readline())
    speeds = []
    for first in range(steps_per_turn, steps_per_turn + steps, steps_per_turn):
        seconds, tokens = timed(side.step, [side.batch(i) for i in range(first, first + steps_per_turn)])
        speeds.append(tokens / seconds)
    print(json.dumps(speeds), flush=True)


def start_reference(model: str, workspace: Path, recipe_file: str) -> PausedProcess:
    folder = workspace / f"reference-{model}"
    ready = Path(f"{folder}.ready")
    command = [__file__, "--reference", model, "--recipe", recipe_file, "--ready", ready]
    return PausedProcess(model, start_process(command, folder), folder, ready.exists)


def time_reference(one: PausedProcess, steps: int) -> float:
    out, _ = one.process.communicate(f"{steps}\n")
    return statistics.median(json.loads(out.splitlines()[-1]))


# --- both


def make_shards(models: Sequence[str], given: Sequence[str], workspace: Path) -> dict[str, Path]:
    """Return shards by kind of tokenizer: the given ones, and the built-in corpus for other kinds."""
    shards = {open_shards(Path(folder)).tokenizer.kind: Path(folder) for folder in given}
    for kind in dict.fromkeys(map(tokenizer_kind_of, models)):
        if kind not in shards:
            say(f"tokenizing the built-in corpus, {kind}")
            corpus = Corpus(["pydocs"])
            tokenizer = train_tokenizer((d.text for d in islice(corpus, 0, None, 8)), kind, 8192)
            prepare(islice(corpus, 0, None, 3), tokenizer, workspace / f"shards-{kind}")
            shards[kind] = workspace / f"shards-{kind}"
    return shards


def tokenizer_kind_of(model: str) -> str:
    recipe = pretraining_recipe(get_preset(model))
    return tokenizer_kind(recipe.model, recipe.objective)


def measure(args: argparse.Namespace, workspace: Path) -> list[dict[str, Any]]:
    shards = make_shards(args.models, args.shards, workspace)
    runs = [start_run(model, shards[tokenizer_kind_of(model)], workspace, args.minutes) for model in args.models]
    others: list[PausedProcess] = []
    try:
        wait_for_all(runs, stops=True)
        speeds = {run.model: time_run(run, args.seconds) for run in runs}
        recipes = {run.model: run.folder / "recipe.yaml" for run in runs}
        others = [start_reference(m, workspace, str(recipes[m]) if args.same_shape else "") for m in args.models]
        wait_for_all(others, stops=False)
        alone = {one.model: time_reference(one, args.steps) for one in others}
    finally:
        for one in (*runs, *others):
            if one.process.poll() is None:
                stop(one.process)
    return [result(m, load_recipe(recipes[m], Recipe), speeds[m], alone[m], args.same_shape) for m in args.models]


def result(model: str, recipe: Recipe, speed: float, alone: float, same_shape: bool) -> dict[str, Any]:
    other = reference_workload(model, recipe if same_shape else None)
    return {
        "model": model,
        "rows": recipe.per_device_train_batch_size,
        "length": recipe.max_seq_length,
        "micro_batches": recipe.gradient_accumulation_steps,
        "optim": recipe.optim,
        "tokens_per_second": speed,
        "train_speed_rows": other.rows,
        "train_speed_length": other.length,
        "train_speed_tokens_per_second": alone,
        "ratio": speed / alone,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"presets ({' '.join(MODELS)})")
    parser.add_argument(
        "--shards",
        nargs="*",
        default=[],
        help="shards, one folder per kind of tokenizer (made from the built-in corpus)",
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="time a run planned for this many minutes (0: by --max-steps)"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="time each run for this long (6)")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of the reference (40)")
    parser.add_argument("--same-shape", action="store_true", help="give the reference the batch shape of the run")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--reference", default="", help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.reference:
        reference(args.reference, args.recipe, args.ready)
        return
    start, compute = time.monotonic(), choose_compute(DEFAULT_SETTINGS)
    with TemporaryDirectory(dir=".") as workspace:
        found = measure(args, Path(workspace).absolute())
    rows = [
        (
            r["model"],
            f"{r['micro_batches']} x {r['rows']} x {r['length']}, {r['optim']}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['train_speed_rows']} x {r['train_speed_length']}",
            f"{r['train_speed_tokens_per_second']:,.0f}",
            f"{r['ratio']:.2f}",
        )
        for r in found
    ]
    columns = ["model", "run", "tokens/s", "train_speed.py", "tokens/s", f"ratio (target: {TARGET_RATIO})"]
    show_table(f"A default run beside the step alone, on {compute}, {time.monotonic() - start:.0f} s", columns, rows)
    if args.json:
        facts = {"machine": str(compute), "torch": torch.__version__, "seconds": time.monotonic() - start}
        print(json.dumps(facts | {"target_ratio": TARGET_RATIO, "models": found}))


if __name__ == "__main__":
    main()
