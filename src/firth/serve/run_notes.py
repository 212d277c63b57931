"""The doctor's notes on runs (`firth doctor`), examined in the background and kept until the log changes.

The doctor counts n-grams and makes batches again: seconds of computing, for a run that may need every core itself. So
one run at a time is examined, by a process of its own with Linux's idle priority: it computes when nothing else does,
and neither the run nor the event loop of the server waits for it. However many people watch, a log is examined once.

An idle process still shares caches and memory with the run, and on some machines the core itself. So a run that trains
is examined again, when its log has grown, only after so long that the doctor computes at most a hundredth of the time
on one core. What the run itself finds meanwhile (`findings.json`) is told at once.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.core.files import read_object
from firth.core.parse import parse_json
from firth.core.serialization import from_dict
from firth.serve.idle_process import IdleWorker, last_line, start_idle_process
from firth.serve.runs import LOG_FILE, RECIPE_FILE, RESULTS_FILE, WatchedRun
from firth.train.findings import LEVELS, Finding
from firth.train.live_doctor import FINDINGS_FILE

PAUSE_FACTOR = 100.0  # times the computing time of the last examination, before a running run is examined again
MIN_PAUSE_S = 60.0
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
    ended: float = 0.0
    cpu_seconds: float = 0.0
    began_at: float = 0.0  # Unix time of the last examination's start


class RunNotes(IdleWorker):
    """The notes of all runs, by folder. `examine` returns what `firth doctor --json` prints."""

    def __init__(self, examine: Callable[[Path, Callable[[Any], None]], dict[str, Any]] | None = None) -> None:
        super().__init__("firth-doctor")
        self.examine = examine or examine_at_idle_priority
        self.known: dict[Path, Notes] = {}

    def number(self, folder: Path) -> int:
        """Return how often a run was examined, 0 for never."""
        return self.known[folder].number if folder in self.known else 0

    def read(self, run: WatchedRun) -> dict[str, Any]:
        """Return the notes of a run at once, and let it be examined if its files have changed."""
        stamp, is_running = files_stamp(run.home), run.summary is not None and run.summary.state == "running"
        with self.lock:
            notes = self.known.setdefault(run.home, Notes())
            pause = max(MIN_PAUSE_S, PAUSE_FACTOR * notes.cpu_seconds) if is_running and notes.number else 0.0
            num_waiting = sum(other.is_waiting for other in self.known.values())
            is_due = notes.stamp != stamp and time.monotonic() >= notes.ended + pause
            if is_due and not notes.is_waiting and num_waiting < MAX_WAITING and not self.is_stopped:
                notes.is_waiting = True
                self.worker.submit(self.update, run.home, stamp)
            state = "examining" if notes.is_waiting else "failed" if notes.error else "examined"
            found = {"number": notes.number, "state": state, "error": notes.error, **describe(notes.diagnosis)}
            live = read_live_findings(run.home, notes.began_at) if is_running or not notes.diagnosis else []
            known = {finding["rule"] for finding in found["findings"]}
            new = [finding for finding in live if finding["rule"] not in known]
            if not new:
                return found
            findings = sorted(new + found["findings"], key=lambda finding: LEVELS.index(finding["level"]))
            return found | {"findings": findings}

    def update(self, folder: Path, stamp: Stamp) -> None:
        """Examine a run, in the doctor's thread."""
        began_at, cpu_before, found, error = time.time(), child_cpu_seconds(), dict[str, Any](), ""
        try:
            found = self.examine(folder, self.hold)
        except UserError as e:
            error = str(e)
        except Exception as e:
            error = f"The doctor could not examine this run ({type(e).__name__})."
        with self.lock:
            self.process = None
            number, used = self.known[folder].number + 1, child_cpu_seconds() - cpu_before
            self.known[folder] = Notes(
                number, stamp, found, error, ended=time.monotonic(), cpu_seconds=used, began_at=began_at
            )


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


def examine_at_idle_priority(folder: Path, hold: Callable[[Any], None]) -> dict[str, Any]:
    """Run `firth doctor` in a process that computes when nothing else does; return what it prints."""
    process = start_idle_process(["firth", "doctor", "--json", "--", str(folder)])
    hold(process)
    try:
        printed, said = process.communicate(timeout=MAX_EXAMINATION_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise UserError("The doctor had no time to examine this run: the machine is busy.") from None
    if process.returncode not in (0, 1):  # 1: it has found something
        raise UserError(last_line(said) or "The doctor could not examine this run.")
    found = parse_json(printed, "the doctor's answer")
    if not isinstance(found, dict):
        raise UserError("The doctor could not examine this run.")
    return found
