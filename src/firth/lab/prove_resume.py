"""Kill a real run again and again, and show that what comes out is what would have come out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firth.console import count, progress, say
from firth.errors import UserError
from firth.files import checksum, write_json
from firth.train import Recipe, last_checkpoint, load_recipe, pretrain, read_log, save_recipe

POLL = 0.0005  # seconds between two looks
LONGEST = 0.5  # seconds at most from the moment that was waited for to a kill
PATIENCE = 600  # seconds in which a run must come to the next moment


def prove(recipe: Recipe, folder: Path, kills: int) -> dict[str, Any]:
    """Run a recipe undisturbed in `straight/`, and in `killed/` with so many kills; compare all that they leave."""
    if recipe.max_steps < 2 * kills:
        raise UserError(
            f"{count(kills, 'kill needs', 'kills need')} at least {2 * kills} steps, "
            f"and there are {recipe.max_steps}: --max-steps."
        )
    began = time.monotonic()
    straight, killed = (replace(recipe, output_dir=str(folder / name)) for name in ("straight", "killed"))
    for one in (straight, killed):
        save_recipe(one, place_of(one))
    say("one run that nobody disturbs")
    finish(straight)
    say(f"and one that is killed {count(kills, 'time')}, and goes on each time")
    moments = [kill(killed, i, kills, random.Random(f"{recipe.seed} {i}")) for i in progress_over(kills)]
    finish(killed)
    found = compare(folder / "straight", folder / "killed")
    results = {
        "output_dir": str(folder),
        "kills": sum(moment.alive for moment in moments),
        "kills_inside_checkpoint": sum(moment.writing for moment in moments),
        "kills_before_a_step": sum(moment.alive and not moment.step for moment in moments),
        "equal": all(found.values()),
        **found,
        "log_lines": len(read_log(folder / "straight" / "log.jsonl")),
        "steps": recipe.max_steps,
        "seconds": time.monotonic() - began,
    }
    write_json(folder / "results.json", results)
    return results


class Moment(NamedTuple):
    """When a run was killed."""

    alive: bool  # it had not ended by itself
    writing: bool  # a checkpoint was half written
    step: int  # that the log had come to since the run went on; 0: before its first step


def progress_over(kills: int) -> Any:
    with progress("killing", "times", kills) as shown:
        for i in range(kills):
            yield i
            shown.advance()


def kill(recipe: Recipe, number: int, kills: int, rng: random.Random) -> Moment:
    """Start or go on with a run, and kill it at a random moment.

    Kills are spread over the run, so that it does not end before the last. Every second one waits until a checkpoint
    is being written; some of the others come before the first step.
    """
    folder = Path(recipe.output_dir)
    log, left = identity(folder / "log.jsonl"), unfinished(folder)
    target = round(recipe.max_steps * (number + rng.uniform(0, 0.8)) / (kills + 1))
    aimed = number % 2 == 1
    process = start(recipe)
    if not aimed and rng.random() < 0.2:
        time.sleep(rng.uniform(0.5, 3))
    else:
        wait(lambda: identity(folder / "log.jsonl") != log and last_step(folder) >= target, process)
        if aimed:
            wait(lambda: bool(unfinished(folder) - left), process)
        time.sleep(rng.uniform(0, 0.01 if aimed else LONGEST))
    process.kill()  # SIGKILL: no handler, no tidying up
    process.communicate()
    alive, began = process.returncode != 0, identity(folder / "log.jsonl") != log
    return Moment(alive, alive and bool(unfinished(folder) - left), last_step(folder) if began else 0)


def unfinished(folder: Path) -> set[tuple[int, int]]:
    """Checkpoints that are being written, or were when a run was killed; each by what tells it from any other."""
    return {identity(p) for p in folder.glob(".checkpoint-*.tmp")} - {(0, 0)}


def identity(path: Path) -> tuple[int, int]:
    """What tells a file or folder from one that had its name before: a run that goes on writes its log anew."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_ctime_ns if path.suffix == ".tmp" else 0


def last_step(folder: Path) -> int:
    """How far the log of a run has come."""
    log = folder / "log.jsonl"
    lines = read_log(log) if log.is_file() else []
    return int(lines[-1]["step"]) if lines else 0


def wait(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until something is so, or the process has ended."""
    end = time.monotonic() + PATIENCE
    while not condition() and process.poll() is None:
        if time.monotonic() > end:
            process.kill()
            raise UserError(f"Nothing happened for {PATIENCE} seconds. Take a smaller model or fewer steps.")
        time.sleep(POLL)


def compare(one: Path, other: Path) -> dict[str, bool]:
    """What two runs have left, bit for bit."""
    logs = [(folder / "log.jsonl").read_bytes().splitlines() for folder in (one, other)]
    data = [[line.get("data") for line in read_log(folder / "log.jsonl")] for folder in (one, other)]
    ends = [last_checkpoint(folder) for folder in (one, other)]
    states = [
        {f.name: checksum(f) for f in (end / "training").glob("*.safetensors")} if end is not None else {}
        for end in ends
    ]
    return {
        "same_log": all(a == b for a, b in zip_longest(*logs)),
        "same_data": data[0] == data[1],
        "same_weights": len({checksum(folder / "final" / "model.safetensors") for folder in (one, other)}) == 1,
        "same_optimizer": states[0] == states[1] and bool(states[0]),
    }


# --- the runs themselves ----------------------------------------------------------------------------------------------


def place_of(recipe: Recipe) -> Path:
    """Where the recipe of a run waits for it, beside the folder of the run."""
    folder = Path(recipe.output_dir)
    return folder.with_name(f"{folder.name}.yaml")


def start(recipe: Recipe, told: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """A run in a process of its own, which goes on from the last whole checkpoint. `told` is where its words go."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "firth.lab.prove_resume", str(place_of(recipe))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=told, text=True)


def finish(recipe: Recipe) -> None:
    """Let a run come to its end."""
    process = start(recipe, subprocess.PIPE)
    _, said = process.communicate()
    if process.returncode:
        raise UserError(
            f"The run in {recipe.output_dir} failed: {said.strip().splitlines()[-1] if said else 'silently'}"
        )


if __name__ == "__main__":
    pretrain(load_recipe(Path(sys.argv[1]), Recipe), resume=True)
