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

from firth.core.console import format_count, progress, say
from firth.core.errors import UserError
from firth.core.files import file_sha256, write_json
from firth.train import Recipe, last_checkpoint, load_recipe, pretrain, read_log, save_recipe

POLL_SECONDS = 0.0005  # seconds between two looks
MAX_KILL_DELAY_SECONDS = 0.5  # seconds at most from the moment that was waited for to a kill
WAIT_TIMEOUT_SECONDS = 600  # seconds in which a run must come to the next moment


def run_resume_proof(recipe: Recipe, folder: Path, kills: int) -> dict[str, Any]:
    """Run a recipe undisturbed in `straight/`, and in `killed/` with so many kills; compare all that they leave."""
    if recipe.max_steps < 2 * kills:
        raise UserError(
            f"{format_count(kills, 'kill needs', 'kills need')} at least {2 * kills} steps, "
            f"and there are {recipe.max_steps}: --max-steps."
        )
    began = time.monotonic()
    straight, killed = (replace(recipe, output_dir=str(folder / name)) for name in ("straight", "killed"))
    for one in (straight, killed):
        save_recipe(one, recipe_path(one))
    say("one run that nobody disturbs")
    finish_run(straight)
    say(f"and one that is killed {format_count(kills, 'time')}, and goes on each time")
    moments = [kill_run(killed, i, kills, random.Random(f"{recipe.seed} {i}")) for i in iterate_kills(kills)]
    finish_run(killed)
    found = compare_runs(folder / "straight", folder / "killed")
    results = {
        "output_dir": str(folder),
        "kills": sum(moment.was_running for moment in moments),
        "kills_inside_checkpoint": sum(moment.was_saving for moment in moments),
        "kills_before_a_step": sum(moment.was_running and not moment.last_step for moment in moments),
        "equal": all(found.values()),
        **found,
        "log_lines": len(read_log(folder / "straight" / "log.jsonl")),
        "steps": recipe.max_steps,
        "seconds": time.monotonic() - began,
    }
    write_json(folder / "results.json", results)
    return results


class KillMoment(NamedTuple):
    """When a run was killed."""

    was_running: bool  # it had not ended by itself
    was_saving: bool  # a checkpoint was half written
    last_step: int  # that the log had come to since the run went on; 0: before its first step


def iterate_kills(num_kills: int) -> Any:
    with progress("killing", "times", num_kills) as shown:
        for i in range(num_kills):
            yield i
            shown.advance()


def kill_run(recipe: Recipe, kill_index: int, num_kills: int, rng: random.Random) -> KillMoment:
    """Start or go on with a run, and kill it at a random moment.

    Kills are spread over the run, so that it does not end before the last. Every second one waits until a checkpoint
    is being written; some of the others come before the first step.
    """
    folder = Path(recipe.output_dir)
    log, left = file_identity(folder / "log.jsonl"), unfinished_checkpoints(folder)
    target = round(recipe.max_steps * (kill_index + rng.uniform(0, 0.8)) / (num_kills + 1))
    aimed = kill_index % 2 == 1
    process = start_run(recipe)
    if not aimed and rng.random() < 0.2:
        time.sleep(rng.uniform(0.5, 3))
    else:
        wait_until(lambda: file_identity(folder / "log.jsonl") != log and last_logged_step(folder) >= target, process)
        if aimed:
            wait_until(lambda: bool(unfinished_checkpoints(folder) - left), process)
        time.sleep(rng.uniform(0, 0.01 if aimed else MAX_KILL_DELAY_SECONDS))
    process.kill()  # SIGKILL: no handler, no tidying up
    process.communicate()
    alive, began = process.returncode != 0, file_identity(folder / "log.jsonl") != log
    return KillMoment(
        alive, alive and bool(unfinished_checkpoints(folder) - left), last_logged_step(folder) if began else 0
    )


def unfinished_checkpoints(folder: Path) -> set[tuple[int, int]]:
    """Checkpoints that are being written, or were when a run was killed; each by what tells it from any other."""
    return {file_identity(p) for p in folder.glob(".checkpoint-*.tmp")} - {(0, 0)}


def file_identity(path: Path) -> tuple[int, int]:
    """What tells a file or folder from one that had its name before: a run that goes on writes its log anew."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_ctime_ns if path.suffix == ".tmp" else 0


def last_logged_step(folder: Path) -> int:
    """How far the log of a run has come."""
    log = folder / "log.jsonl"
    lines = read_log(log) if log.is_file() else []
    return int(lines[-1]["step"]) if lines else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until something is so, or the process has ended."""
    end = time.monotonic() + WAIT_TIMEOUT_SECONDS
    while not condition() and process.poll() is None:
        if time.monotonic() > end:
            process.kill()
            raise UserError(
                f"Nothing happened for {WAIT_TIMEOUT_SECONDS} seconds. Take a smaller model or fewer steps."
            )
        time.sleep(POLL_SECONDS)


def compare_runs(first: Path, second: Path) -> dict[str, bool]:
    """What two runs have left, bit for bit."""
    logs = [(folder / "log.jsonl").read_bytes().splitlines() for folder in (first, second)]
    data = [[line.get("data") for line in read_log(folder / "log.jsonl")] for folder in (first, second)]
    ends = [last_checkpoint(folder) for folder in (first, second)]
    states = [
        {f.name: file_sha256(f) for f in (end / "training").glob("*.safetensors")} if end is not None else {}
        for end in ends
    ]
    return {
        "same_log": all(a == b for a, b in zip_longest(*logs)),
        "same_data": data[0] == data[1],
        "same_weights": len({file_sha256(folder / "final" / "model.safetensors") for folder in (first, second)}) == 1,
        "same_optimizer": states[0] == states[1] and bool(states[0]),
    }


# --- the runs themselves ----------------------------------------------------------------------------------------------


def recipe_path(recipe: Recipe) -> Path:
    """Where the recipe of a run waits for it, beside the folder of the run."""
    folder = Path(recipe.output_dir)
    return folder.with_name(f"{folder.name}.yaml")


def start_run(recipe: Recipe, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """A run in a process of its own, which goes on from the last whole checkpoint. `stderr` is where its words go."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "firth.lab.prove_resume", str(recipe_path(recipe))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, text=True)


def finish_run(recipe: Recipe) -> None:
    """Let a run come to its end."""
    process = start_run(recipe, subprocess.PIPE)
    _, said = process.communicate()
    if process.returncode:
        raise UserError(
            f"The run in {recipe.output_dir} failed: {said.strip().splitlines()[-1] if said else 'silently'}"
        )


if __name__ == "__main__":
    pretrain(load_recipe(Path(sys.argv[1]), Recipe), resume=True)
