"""The folder of a run: refused when it holds something, locked while it is written."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from firth.errors import UserError
from firth.train.checkpoint import remove_folder

OURS = ("recipe.yaml", "log.jsonl", "results.json", "predictions.jsonl", "report.html", ".lock")
OUR_FOLDERS = ("checkpoint-*", "final", "seed-*", "tokenizer", "data", "pretrained", ".*.tmp", ".*.old")


@contextmanager
def run_folder(path: Path, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Hold a run's folder. An existing one needs `resume` (go on) or `overwrite` (what a run wrote is removed)."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; --output-dir needs a folder.")
    held = [p for p in path.iterdir() if p.name != ".lock"] if path.is_dir() else []
    if held and not (resume or overwrite):
        raise UserError(f"{path} exists already. --resume goes on with the run in it, --overwrite starts it anew.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "w")  # noqa: SIM115
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another run.") from None
        if overwrite and not resume:
            clear(path)
        yield path


def clear(path: Path) -> None:
    """Remove what a run wrote, and nothing else."""
    ours = {p for pattern in OUR_FOLDERS for p in path.glob(pattern) if p.is_dir()}
    foreign = [p.name for p in path.iterdir() if p not in ours and p.name not in OURS]
    if foreign:
        raise UserError(
            f"{path} holds files that no run of Firth wrote ({', '.join(sorted(foreign)[:3])}): "
            "it is not overwritten. Name another --output-dir."
        )
    for folder in ours:
        remove_folder(folder)
    for name in OURS:
        if name != ".lock":
            (path / name).unlink(missing_ok=True)
