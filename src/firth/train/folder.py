"""The run folder: locked while a run writes to it, never overwritten without `--overwrite`."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from firth.core.console import warn
from firth.core.errors import UserError
from firth.core.files import (
    MANIFEST_FILE,
    check_utf8_name,
    check_writable,
    iter_foreign_files,
    open_in_place,
    read_manifest,
    remove_path,
)
from firth.train.checkpoint import remove_folder
from firth.train.clock import CLOCK_FILE
from firth.train.distributed import DistContext
from firth.train.tracking import TENSORBOARD_FOLDER, TRACKER_FILE

LOCK_FILE = ".lock"
PROVE_RESUME_FILES = ("straight.yaml", "killed.yaml")  # the recipes of a proof (prove-resume)
DATA_NOTES_FILE = "notes.json"  # rows of labelled files that were dropped or changed, and why
RUN_FILES = (
    *(
        "recipe.yaml",
        "source.json",
        "log.jsonl",
        "timings.jsonl",
        "samples.jsonl",
        "findings.json",
        "results.json",
        "predictions.jsonl",
        "finetuning.json",
        *("learning_rate.json", "search.json", "search.html", "reference.json", "adapt.json"),
        *("teacher.json", "teacher.npy", "augmented.json", "augmented.jsonl"),
        "report.html",
        LOCK_FILE,
        CLOCK_FILE,
        TRACKER_FILE,
    ),
    *PROVE_RESUME_FILES,
    DATA_NOTES_FILE,
)
RUN_FOLDERS = (
    "final",
    "adapter",
    "best-*",
    "seed-*",
    "evaluate-*",
    "tokenizer",
    "data",
    "phrases-*",
    "counts",
    "encoder",
    "decoder",
    "encoder-decoder",
    TENSORBOARD_FOLDER,
)
# Folders that quickstart, prove-resume and finetune --against write inside their own.
STAGE_FOLDERS = (
    *("start-*", "pretraining", "pretrained-*", "counted-*", "scratch-*", "straight", "killed"),
    *("finetuned", "scratch", "against"),
)
LEFTOVER_PATTERNS = (".*.tmp", ".*.old")  # left by a killed writer
UNFINISHED_PATTERNS = (".*.part", ".*.journal", ".*.seen")  # unfinished shards, which a resumed run completes
PREPARED_FILES = ("source.json", "tokenizer", "data", CLOCK_FILE)  # written before training starts


@contextmanager
def run_folder(
    path: Path, resume: bool = False, overwrite: bool = False, inputs: Sequence[str | Path] = ()
) -> Iterator[Path]:
    """Create and lock a run folder. An existing one needs `resume`, or `overwrite`, which removes a run's files.

    `inputs` are the paths that the run reads: they must not lie in a folder that is overwritten. After an error a new,
    empty folder is removed. A folder that holds only prepared data is reused.
    """
    check_run_folder(path, resume, overwrite, inputs)
    new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open_in_place(path / LOCK_FILE, allow_hard_links=True)
    except OSError as e:
        raise UserError(f"{path} cannot be written: {e.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is in use by another run.") from None
        if overwrite and not resume:
            clear_run_folder(path)
        for leftover in filter(is_leftover, list(path.iterdir())):
            remove_path(leftover)
        if resume:
            set_aside_damaged(path)
        try:
            yield path
        except BaseException:
            if new and {p.name for p in path.iterdir()} <= {LOCK_FILE, CLOCK_FILE, "source.json"}:
                shutil.rmtree(path, ignore_errors=True)
            raise


def set_aside_damaged(path: Path) -> None:
    """Rename models, tokenizers and shards of a run whose manifest cannot be read: the run writes them again.

    They may hold files of a user, so they are not removed. Checkpoints stay: resume reports and skips damaged ones.
    """
    manifests = [*path.glob(f"*/{MANIFEST_FILE}"), *path.glob(f"*/*/{MANIFEST_FILE}")]
    for folder in (manifest.parent for manifest in manifests):
        if not has_output_name(folder) or folder.match("checkpoint-*") or folder.is_symlink():
            continue
        try:
            read_manifest(folder)
        except UserError:
            free = next(n for n in count(1) if not folder.with_name(f"{folder.name}.damaged-{n}").exists())
            kept = folder.rename(folder.with_name(f"{folder.name}.damaged-{free}"))
            warn(f"{folder / MANIFEST_FILE} cannot be read: the folder is now {kept.name}, and is written again.")


@contextmanager
def shared_run_folder(
    dist_context: DistContext,
    path: Path,
    resume: bool = False,
    overwrite: bool = False,
    inputs: Sequence[str | Path] = (),
) -> Iterator[Path]:
    """Lock the folder in the main process; the other processes wait for it."""
    with dist_context.enter_on_main(run_folder(path, resume, overwrite, inputs)):
        dist_context.mark_started(str(path))
        dist_context.barrier()
        yield path


def check_run_folder(path: Path, resume: bool, overwrite: bool, inputs: Sequence[str | Path]) -> None:
    """Raise UserError if a run must not write to this folder."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; --output-dir needs a folder.")
    check_utf8_name(path)
    check_writable(path)
    if not path.is_dir() or not [p for p in path.iterdir() if p.name not in (LOCK_FILE, CLOCK_FILE)]:
        return
    if has_only_prepared_data(path) and not overwrite:
        return
    if not overwrite and any((path / name).exists() for name in PROVE_RESUME_FILES):
        raise UserError(f"{path} exists already, with a proof of `prove-resume`. --overwrite makes it again.")
    if not (resume or overwrite):
        raise UserError(f"{path} exists already. --resume continues the run in it, --overwrite starts it again.")
    if resume and (path / "recipe.yaml").is_file():
        refuse_linked_folders(path)
        return
    is_run = resume or (path / LOCK_FILE).exists()  # without it, files of these names are a user's
    if foreign := sorted(p.name for p in path.iterdir() if not (is_run and is_run_output(p, not resume))):
        raise UserError(
            f"{path} holds files that no run of Firth wrote, or that were changed since ({', '.join(foreign[:3])}). "
            "Choose another --output-dir, or move them away."
        )
    for needed in (Path(name) for name in inputs if name):
        if overwrite and not resume and needed.exists() and needed.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{needed} lies in {path}, which --overwrite would remove. Choose another --output-dir.")


def refuse_linked_folders(path: Path) -> None:
    """Raise UserError for a link at the place of a folder that the run writes into: it would write elsewhere."""
    for parent, folders, _ in os.walk(path):  # follows no links
        for folder in (Path(parent, name) for name in folders):
            if folder.is_symlink() and has_output_name(folder):
                raise UserError(f"{folder} is a link to another folder. Remove the link, or move the folder back.")


def has_only_prepared_data(path: Path) -> bool:
    """Whether a run stopped in this folder while it prepared its text, before training."""
    others = [p for p in path.iterdir() if p.name not in (*PREPARED_FILES, LOCK_FILE) and not is_leftover(p)]
    others = [p for p in others if not is_unfinished(p)]
    return (
        (path / "source.json").is_file()
        and not others
        and all(is_run_output(p, compare_content=False) for p in path.iterdir())
    )


def is_unfinished(p: Path) -> bool:
    """Whether these are unfinished shards of a run, or their journal."""
    return any(p.match(pattern) for pattern in UNFINISHED_PATTERNS) and has_output_name(p.with_name(p.stem[1:]))


def is_leftover(p: Path) -> bool:
    """Whether a killed writer left this path: the temporary or the old name of a run's file or folder."""
    return any(p.match(pattern) for pattern in LEFTOVER_PATTERNS) and has_output_name(p.with_name(p.stem[1:]))


def has_output_name(p: Path) -> bool:
    """Whether a run writes files or folders of this name; in `data` they have the names of the sources of a mix."""
    patterns = (*RUN_FILES, *RUN_FOLDERS, *STAGE_FOLDERS, "checkpoint-*")
    in_mix = p.parent.name == "data" and not (p.parent / LOCK_FILE).exists()
    return in_mix or any(p.match(pattern) for pattern in patterns)


def is_run_output(p: Path, compare_content: bool = True) -> bool:
    """Whether a run wrote this path: a file by its name, a folder by its name and its manifest.

    `compare_content` reads the files of folders and compares them with the checksums of the manifest.
    """
    if is_leftover(p) or is_unfinished(p):
        return True
    if p.is_symlink() or not p.is_dir():
        is_event_file = p.parent.name == TENSORBOARD_FOLDER and p.match("events.out.tfevents.*")
        return (p.name in RUN_FILES or is_event_file) and not p.is_symlink()
    if not has_output_name(p):
        return False
    if (p / MANIFEST_FILE).exists() or p.match("checkpoint-*"):
        return next(iter_foreign_files(p, compare_content), None) is None
    return all(is_run_output(inner, compare_content) for inner in p.iterdir())


def clear_run_folder(path: Path) -> None:
    """Remove everything but the lock; `check_run_folder` has verified that only a run's files are here."""
    for p in list(path.iterdir()):
        if p.is_dir():
            remove_folder(p)
        elif p.name != LOCK_FILE:
            p.unlink()
