"""The doctor's notes on runs (`firth doctor`), examined in the background and kept until the log changes.

The doctor counts n-grams and makes batches again: seconds of computing, for a run that may need every core itself. So
one run at a time is examined, by a process of its own with Linux's idle priority: it computes when nothing else does,
and neither the run nor the event loop of the server waits for it. However many people watch, a log is examined once.

An idle process still shares caches and memory with the run, and on some machines the core itself. So the doctor
computes for at most a hundredth of the time that a run has trained, by its timings or since it was seen to train: the
first examination of a run that trains waits until it has trained 100 times as long as an examination takes, and each
further one as long again. One that takes longer is ended, and waits twice as long. A run that has ended is examined at
once. What the run itself finds meanwhile (`findings.json`) is told at once.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.core.files import read_object
from firth.core.parse import parse_json
from firth.core.serialization import from_dict
from firth.serve.idle_process import IdleWorker, last_line, limit_cpu_seconds, start_idle_process
from firth.serve.runs import LOG_FILE, RECIPE_FILE, RESULTS_FILE, WatchedRun
from firth.train.findings import LEVELS, Finding
from firth.train.live_doctor import FINDINGS_FILE

DOCTOR_SHARE = 0.01  # of the time that a run trains: what its examinations may compute
FIRST_EXAMINATION_S = 8.0  # what an examination computes, before one is known (6 to 7 in docs/history.md)
MIN_EXAMINATION_S = 1.0  # the unit of a process's limit
MAX_EXAMINATION_S = 3600.0  # an idle process may wait long for its turn
MAX_WAITING = 20  # runs that wait to be examined

Stamp = tuple[Any, ...]


@dataclass
class Notes:
    """What is known about one run."""

    number: int = 0  # of examinations
    stamp: Stamp = ()  # the files that were examined
    diagnosis: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_waiting: bool = False
    began_at: float = 0.0  # Unix time of the last examination's start
    used_seconds: float = 0.0  # of computing, by all examinations while the run trained
    watched_from: float = math.nan  # on the monotonic clock: since when the run was seen to train
    expected_seconds: float = FIRST_EXAMINATION_S  # of computing, of the next examination


class RunNotes(IdleWorker):
    """The notes of all runs, by folder. `examine` returns what `firth doctor --json` prints."""

    def __init__(self, examine: Callable[[Path, float, Callable[[Any], None]], dict[str, Any]] | None = None) -> None:
        super().__init__("firth-doctor")
        self.examine = examine or examine_at_idle_priority
        self.known: dict[Path, Notes] = {}

    def number(self, folder: Path) -> int:
        """Return how often a run was examined, 0 for never."""
        return self.known[folder].number if folder in self.known else 0

    def read(self, run: WatchedRun) -> dict[str, Any]:
        """Return the notes of a run at once, and let it be examined if its files have changed."""
        stamp, is_running, now = files_stamp(run.home), run.is_home_training, time.monotonic()
        with self.lock:
            notes = self.known.setdefault(run.home, Notes())
            if not is_running:
                notes.watched_from = math.nan
            elif math.isnan(notes.watched_from):
                notes.watched_from = now
            # a fine-tuning writes no timings
            trained = max(run.timings.seconds, now - notes.watched_from) if is_running else math.inf
            limit = DOCTOR_SHARE * trained - notes.used_seconds
            num_waiting = sum(other.is_waiting for other in self.known.values())
            is_due = notes.stamp != stamp and limit >= notes.expected_seconds
            if is_due and not notes.is_waiting and num_waiting < MAX_WAITING and not self.is_stopped:
                notes.is_waiting = True
                self.worker.submit(self.update, run, stamp, limit)
            state = "failed" if notes.error else "examined" if notes.number else "examining" if is_due else "later"
            state = "examining" if notes.is_waiting else state
            found = {"number": notes.number, "state": state, "error": notes.error, **describe(notes.diagnosis)}
            live = read_live_findings(run.home, notes.began_at) if is_running or not notes.diagnosis else []
            known = {finding["rule"] for finding in found["findings"]}
            new = [finding for finding in live if finding["rule"] not in known]
            if not new:
                return found
            findings = sorted(new + found["findings"], key=lambda finding: LEVELS.index(finding["level"]))
            return found | {"findings": findings}

    def update(self, run: WatchedRun, stamp: Stamp, limit: float) -> None:
        """Examine a run, in the doctor's thread, for at most so many seconds of computing."""
        began_at, cpu_before, found, error, was_cut = time.time(), child_cpu_seconds(), dict[str, Any](), "", False
        try:
            found = self.examine(run.home, limit, self.hold)
        except OutOfTime:
            was_cut = True
        except UserError as e:
            error = str(e)
        except Exception as e:
            error = f"The doctor could not examine this run ({type(e).__name__})."
        with self.lock:
            self.process, old, used = None, self.known[run.home], child_cpu_seconds() - cpu_before
            self.known[run.home] = replace(
                old if was_cut else Notes(old.number + 1, stamp, found, error, began_at=began_at),
                is_waiting=False,
                watched_from=old.watched_from,
                used_seconds=old.used_seconds + (used if limit < math.inf else 0.0),
                expected_seconds=max(MIN_EXAMINATION_S, 2 * used if was_cut else used),
            )


class OutOfTime(UserError):  # noqa: N818, named for what is wrong
    """An examination would take more computing than it may."""


def child_cpu_seconds() -> float:
    """Return the computing time of all processes that this one has started and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def describe(diagnosis: dict[str, Any]) -> dict[str, Any]:
    names = ("findings", "references", "rules", "not_examined")
    return {name: diagnosis.get(name, {} if name == "references" else 0 if name == "rules" else []) for name in names}


def read_live_findings(folder: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return what the run itself has found (`train/live_doctor.py`) and written since a time.

    Nothing where the file is not one of these.
    """
    try:
        if (folder / FINDINGS_FILE).stat().st_mtime < since:
            return []
        found = read_object(folder / FINDINGS_FILE)["findings"]
        findings = from_dict({"findings": found}, LiveFindings, FINDINGS_FILE).findings
    except (UserError, OSError, KeyError):
        return []
    return [finding.to_dict() for finding in findings if finding.level in LEVELS]


@dataclass(frozen=True)
class LiveFindings:
    """The content of the file."""

    findings: tuple[Finding, ...]


def files_stamp(folder: Path) -> Stamp:
    """Return what changes when a run has something new: sizes and times of its logs, recipe and results."""
    files = [folder / name for name in (LOG_FILE, RECIPE_FILE, RESULTS_FILE)] + sorted(
        folder.glob(f"seed-*/{LOG_FILE}")
    )
    found = []
    for file in files:
        try:
            facts = file.stat()
        except OSError:
            continue
        found.append((file.name, facts.st_ino, facts.st_size, facts.st_mtime_ns if file.name != LOG_FILE else 0))
    return tuple(found)


def examine_at_idle_priority(folder: Path, limit: float, hold: Callable[[Any], None]) -> dict[str, Any]:
    """Run `firth doctor` in a process that computes when nothing else does; return what it prints.

    It may compute for `limit` seconds.
    """
    process = start_idle_process(["firth", "doctor", "--json", "--", str(folder)])
    hold(process)
    limit_cpu_seconds(process.pid, limit)
    try:
        printed, said = process.communicate(timeout=MAX_EXAMINATION_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise UserError("The doctor had no time to examine this run: the machine is busy.") from None
    if process.returncode == -signal.SIGXCPU and limit < math.inf:
        raise OutOfTime("The doctor takes long for this run: it waits until the run has trained for longer.")
    if process.returncode not in (0, 1):  # 1: it has found something
        raise UserError(last_line(said) or "The doctor could not examine this run.")
    found = parse_json(printed, "the doctor's answer")
    if not isinstance(found, dict):
        raise UserError("The doctor could not examine this run.")
    return found
