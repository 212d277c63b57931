"""How much of the machine a default `firth pretrain` uses: its tokens/s beside those of `benchmarks/train_speed.py`.

    python benchmarks/default_run.py [--models bert-base gpt2 ...] [--shards DIR ...] [--minutes M] [--same-shape]

The run is what a person types: `firth pretrain MODEL --data SHARDS --output-dir RUN`, in a process of its own, with the
batch, the optimizer and the compilation that it chooses. Its log gives its speed, after the first steps; then it is
killed. `--max-steps` is large, so that the run does not end; `--minutes M` times one that is planned to M minutes. The
other side is the step of `train_speed.py` alone: its own rows, AdamW, random tokens, no loop around it. `--same-shape`
gives it the rows, the row length and the vocabulary of the run. Ratios are those of one machine within minutes; 0.85 is
wanted.

All models compile at the same time, which takes most of it. A run is stopped (SIGSTOP) once it has taken some steps,
and goes on alone while it is timed; the other side waits for its turn too. Without `--shards` the built-in corpus
becomes shards, one set for each kind of tokenizer.
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
WORKLOAD_NAMES = {"bert-base": "bert-base-128"}  # where it is not that of the model
MANY_STEPS = 10**6  # more than will be taken
READY_STEPS = 10  # of a run, after which it waits for its turn
SETTLE_SECONDS = 1.5  # of a run that goes on, before it is timed
POLL_SECONDS = 0.01
START_TIMEOUT_SECONDS = 540
WANTED_RATIO = 0.85
STEPS_PER_TURN = 10


class Waiting(NamedTuple):
    """A process that has compiled its step and waits for its turn, or is on the way there."""

    model: str
    process: subprocess.Popen[str]
    folder: Path  # of its files
    is_ready: Callable[[], bool]


# --- the run


def start_process(words: Sequence[object], folder: Path) -> subprocess.Popen[str]:
    """Start a command of Python; what it says goes to FOLDER.txt, its results come through a pipe."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with open(f"{folder}.txt", "w", encoding="utf-8") as said:
        return subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )


def start_run(model: str, shards: Path, place: Path, minutes: float) -> Waiting:
    folder = place / f"run-{model}"
    length = ["--minutes", minutes] if minutes else ["--max-steps", MANY_STEPS]
    words = ["-m", "firth", "pretrain", model, "--data", shards, "--output-dir", folder, *length]
    return Waiting(model, start_process(words, folder), folder, lambda: last_line(folder).get("step", 0) >= READY_STEPS)


def last_line(run: Path) -> dict[str, Any]:
    """The last whole line of a step in the log of a run; empty before the first."""
    try:
        with open(run / "log.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    found = (json.loads(line) for line in reversed(lines) if line.startswith(b"{") and b'"tokens"' in line)
    return next(found, {})


def tokens_per_second(run: Path, seconds: float) -> float:
    """The speed of a run, between two lines of its log that are at least so many seconds apart."""

    def next_line(tokens: int) -> tuple[float, int]:
        while (line := last_line(run)).get("tokens", 0) <= tokens:
            time.sleep(POLL_SECONDS)
        return time.monotonic(), line["tokens"]

    time.sleep(SETTLE_SECONDS)
    start, first = next_line(last_line(run).get("tokens", 0))
    now, tokens = next_line(first)
    while now - start < seconds:
        now, tokens = next_line(tokens)
    return (tokens - first) / (now - start)


def time_run(run: Waiting, seconds: float) -> float:
    run.process.send_signal(signal.SIGCONT)
    speed = tokens_per_second(run.folder, seconds)
    stop(run.process)
    return speed


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait_for_all(processes: Sequence[Waiting], stops: bool) -> None:
    """Wait until all have compiled; each is stopped there, so that the GPU is free for those that are timed."""
    pending, start = list(processes), time.monotonic()
    while pending:
        for one in [p for p in pending if p.is_ready()]:
            if stops:
                one.process.send_signal(signal.SIGSTOP)
            say(f"{one.model}: compiled after {time.monotonic() - start:.0f} s")
            pending.remove(one)
        for one in pending:
            if one.process.poll() is not None or time.monotonic() - start > START_TIMEOUT_SECONDS:
                said = Path(f"{one.folder}.txt").read_text(encoding="utf-8")[-2000:]
                raise SystemExit(f"{one.model} took no step: {said}")
        time.sleep(POLL_SECONDS)


# --- the step alone


def workload_of(model: str, recipe: Recipe | None) -> Workload:
    """That of train_speed.py; with a recipe, or where it has none, the batch of the run."""
    named = WORKLOADS.get(WORKLOAD_NAMES.get(model, model))
    if named is not None and recipe is None:
        return named
    if recipe is None:
        raise SystemExit(f"{model} has no workload in train_speed.py: pass --same-shape.")
    return Workload(recipe.model, recipe.objective, recipe.per_device_train_batch_size, recipe.max_seq_length)


def reference(model: str, recipe_file: str, ready: Path) -> None:
    """Compile the step, write `ready`, wait for the number of steps, and print the tokens/s of each turn."""
    recipe = load_recipe(Path(recipe_file), Recipe) if recipe_file else None
    compute = choose_compute(DEFAULT_SETTINGS)
    side = make_sides(model, workload_of(model, recipe), compute, compute, DEFAULT_SETTINGS, alone=True, packed=False)[
        OURS
    ]
    turn = STEPS_PER_TURN if compute.device.type == "cuda" else 1
    timed(side.step, [side.batch(i) for i in range(turn)])
    ready.touch()
    steps = int(sys.stdin.readline())
    turns = []
    for first in range(turn, turn + steps, turn):
        seconds, tokens = timed(side.step, [side.batch(i) for i in range(first, first + turn)])
        turns.append(tokens / seconds)
    print(json.dumps(turns), flush=True)


def start_reference(model: str, place: Path, recipe_file: str) -> Waiting:
    folder = place / f"reference-{model}"
    ready = Path(f"{folder}.ready")
    words = [__file__, "--reference", model, "--recipe", recipe_file, "--ready", ready]
    return Waiting(model, start_process(words, folder), folder, ready.exists)


def time_reference(one: Waiting, steps: int) -> float:
    out, _ = one.process.communicate(f"{steps}\n")
    return statistics.median(json.loads(out.splitlines()[-1]))


# --- all of it


def make_shards(models: Sequence[str], given: Sequence[str], place: Path) -> dict[str, Path]:
    """Shards by the kind of their tokenizer: those that are given, and the built-in corpus for the others."""
    shards = {open_shards(Path(folder)).tokenizer.kind: Path(folder) for folder in given}
    for kind in dict.fromkeys(map(kind_of, models)):
        if kind not in shards:
            say(f"making shards of the built-in corpus, {kind}")
            corpus = Corpus(["pydocs"])
            tokenizer = train_tokenizer((d.text for d in islice(corpus, 0, None, 8)), kind, 8192)
            prepare(islice(corpus, 0, None, 3), tokenizer, place / f"shards-{kind}")
            shards[kind] = place / f"shards-{kind}"
    return shards


def kind_of(model: str) -> str:
    recipe = pretraining_recipe(get_preset(model))
    return tokenizer_kind(recipe.model, recipe.objective)


def measure(options: argparse.Namespace, place: Path) -> list[dict[str, Any]]:
    shards = make_shards(options.models, options.shards, place)
    runs = [start_run(model, shards[kind_of(model)], place, options.minutes) for model in options.models]
    others: list[Waiting] = []
    try:
        wait_for_all(runs, stops=True)
        speeds = {run.model: time_run(run, options.seconds) for run in runs}
        recipes = {run.model: run.folder / "recipe.yaml" for run in runs}
        others = [start_reference(m, place, str(recipes[m]) if options.same_shape else "") for m in options.models]
        wait_for_all(others, stops=False)
        alone = {one.model: time_reference(one, options.steps) for one in others}
    finally:
        for one in (*runs, *others):
            if one.process.poll() is None:
                stop(one.process)
    return [result(m, load_recipe(recipes[m], Recipe), speeds[m], alone[m], options.same_shape) for m in options.models]


def result(model: str, recipe: Recipe, speed: float, alone: float, same_shape: bool) -> dict[str, Any]:
    other = workload_of(model, recipe if same_shape else None)
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="presets; default: the five")
    parser.add_argument(
        "--shards", nargs="*", default=[], help="shards, one for each kind of tokenizer; others are made"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="time a run that is planned to so many minutes")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long a run is timed")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of train_speed.py")
    parser.add_argument("--same-shape", action="store_true", help="train_speed.py with the rows of the run")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--reference", default="", help=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ready", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.reference:
        reference(options.reference, options.recipe, options.ready)
        return
    start, compute = time.monotonic(), choose_compute(DEFAULT_SETTINGS)
    with TemporaryDirectory(dir=".") as place:
        found = measure(options, Path(place).absolute())
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
    columns = ["model", "run", "tokens/s", "train_speed.py", "tokens/s", f"ratio ({WANTED_RATIO} wanted)"]
    show_table(f"A default run beside the step alone, on {compute}, {time.monotonic() - start:.0f} s", columns, rows)
    if options.json:
        facts = {"machine": str(compute), "torch": torch.__version__, "seconds": time.monotonic() - start}
        print(json.dumps(facts | {"wanted": WANTED_RATIO, "models": found}))


if __name__ == "__main__":
    main()
