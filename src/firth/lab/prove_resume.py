"""Prove exact resume: SIGKILL a training run at random moments, resume it, and compare all files bit for bit.

A reference run trains without interruption. A second one with the same recipe is killed several times: before its first
step, between steps, and while a checkpoint is being written. Resumed to the end, it must have the same log, the same
data order, the same weights and the same optimizer state.
"""

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
from firth.evaluate.companions import COMPANIONS
from firth.train import Recipe, last_checkpoint, load_recipe, pretrain, read_log, save_recipe

POLL_SECONDS = 0.0005  # between two checks of a condition
MAX_KILL_DELAY_SECONDS = 0.5  # maximum random delay of a kill after its step is logged
WAIT_TIMEOUT_SECONDS = 600  # maximum wait for a step or a checkpoint


def run_resume_proof(recipe: Recipe, folder: Path, kills: int) -> dict[str, Any]:
    """Run a recipe without interruption in `straight/` and with kills in `killed/`; compare all results."""
    if recipe.max_steps < 2 * kills:
        raise UserError(
            f"{format_count(kills, 'kill needs', 'kills need')} at least {2 * kills} steps, "
            f"and --max-steps is {recipe.max_steps}. Raise it or lower --kills."
        )
    start = time.monotonic()
    straight, killed = (replace(recipe, output_dir=str(folder / name)) for name in ("straight", "killed"))
    for run_recipe in (straight, killed):
        save_recipe(run_recipe, recipe_path(run_recipe))
    say("reference run without interruption")
    finish_run(straight)
    say(f"the same run, killed {format_count(kills, 'time')} and resumed each time")
    moments = [kill_run(killed, i, kills, random.Random(f"{recipe.seed} {i}")) for i in iterate_kills(kills)]
    finish_run(killed)
    equal = compare_runs(folder / "straight", folder / "killed")
    results = {
        "output_dir": str(folder),
        "kills": sum(moment.was_running for moment in moments),
        "kills_inside_checkpoint": sum(moment.was_saving for moment in moments),
        "kills_before_a_step": sum(moment.was_running and not moment.last_step for moment in moments),
        "equal": all(equal.values()),
        **equal,
        "log_lines": len(read_log(folder / "straight" / "log.jsonl")),
        "steps": recipe.max_steps,
        "seconds": time.monotonic() - start,
    }
    write_json(folder / "results.json", results)
    return results


class KillMoment(NamedTuple):
    """The state of a run when it was killed."""

    was_running: bool  # it had not finished
    was_saving: bool  # a checkpoint was partly written
    last_step: int  # last logged step since the run was resumed; 0: before its first step


def iterate_kills(num_kills: int) -> Any:
    with progress("killing", "times", num_kills) as bar:
        for i in range(num_kills):
            yield i
            bar.advance()


def kill_run(recipe: Recipe, kill_index: int, num_kills: int, rng: random.Random) -> KillMoment:
    """Start or resume a run, and kill it at a random moment.

    Kills are spread over the run, so that it does not finish before the last. Every second one waits for a checkpoint
    that is being written; some of the others come before the first step.
    """
    folder = Path(recipe.output_dir)
    log, leftovers = file_identity(folder / "log.jsonl"), unfinished_checkpoints(folder)
    target = round(recipe.max_steps * (kill_index + rng.uniform(0, 0.8)) / (num_kills + 1))
    during_save = kill_index % 2 == 1
    process = start_run(recipe)
    if not during_save and rng.random() < 0.2:
        time.sleep(rng.uniform(0.5, 3))
    else:
        wait_until(lambda: file_identity(folder / "log.jsonl") != log and last_logged_step(folder) >= target, process)
        if during_save:
            wait_until(lambda: bool(unfinished_checkpoints(folder) - leftovers), process)
        time.sleep(rng.uniform(0, 0.01 if during_save else MAX_KILL_DELAY_SECONDS))
    process.kill()  # SIGKILL: no handler runs
    process.communicate()
    was_running, has_logged = process.returncode != 0, file_identity(folder / "log.jsonl") != log
    return KillMoment(
        was_running,
        was_running and bool(unfinished_checkpoints(folder) - leftovers),
        last_logged_step(folder) if has_logged else 0,
    )


def unfinished_checkpoints(folder: Path) -> set[tuple[int, int]]:
    """Return the identity of each checkpoint that is being written, or was when a run was killed."""
    return {file_identity(p) for p in folder.glob(".checkpoint-*.tmp")} - {(0, 0)}


def file_identity(path: Path) -> tuple[int, int]:
    """Return numbers that differ for a new file of the same name: a resumed run rewrites its log."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_ino, stat.st_ctime_ns if path.suffix == ".tmp" else 0


def last_logged_step(folder: Path) -> int:
    """Return the last step in the log of a run; 0 without one."""
    log = folder / "log.jsonl"
    lines = read_log(log) if log.is_file() else []
    return int(lines[-1]["step"]) if lines else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for a condition or the end of the process."""
    end = time.monotonic() + WAIT_TIMEOUT_SECONDS
    while not condition() and process.poll() is None:
        if time.monotonic() > end:
            process.kill()
            raise UserError(f"No progress for {WAIT_TIMEOUT_SECONDS} seconds. Use a smaller model or fewer steps.")
        time.sleep(POLL_SECONDS)


def compare_runs(first: Path, second: Path) -> dict[str, bool]:
    """Compare the results of two runs bit for bit."""
    logs = [(folder / "log.jsonl").read_bytes().splitlines() for folder in (first, second)]
    data = [[line.get("data") for line in read_log(folder / "log.jsonl")] for folder in (first, second)]
    checkpoints = [last_checkpoint(folder) for folder in (first, second)]
    states = [
        {f.name: file_sha256(f) for f in (path / "training").glob("*.safetensors")} if path is not None else {}
        for path in checkpoints
    ]
    return {
        "same_log": all(a == b for a, b in zip_longest(*logs)),
        "same_data": data[0] == data[1],
        "same_weights": len({file_sha256(folder / "final" / "model.safetensors") for folder in (first, second)}) == 1,
        "same_optimizer": states[0] == states[1] and bool(states[0]),
    }


# --- processes ----------------------------------------------------------------------------------------------------


def recipe_path(recipe: Recipe) -> Path:
    """Return the path of a run's recipe, beside the run folder."""
    folder = Path(recipe.output_dir)
    return folder.with_name(f"{folder.name}.yaml")


def start_run(recipe: Recipe, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start a process that trains, or resumes from the last whole checkpoint."""
    threads = str(torch.get_num_threads())
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "firth.lab.prove_resume", str(recipe_path(recipe))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, text=True)


def finish_run(recipe: Recipe) -> None:
    """Start or resume a run and wait for its end."""
    process = start_run(recipe, subprocess.PIPE)
    _, stderr = process.communicate()
    if process.returncode:
        raise UserError(
            f"The run in {recipe.output_dir} failed: {stderr.strip().splitlines()[-1] if stderr else 'no message'}"
        )


if __name__ == "__main__":
    pretrain(load_recipe(Path(sys.argv[1]), Recipe), resume=True, companions=COMPANIONS)
