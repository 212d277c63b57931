"""The process of a tracker: it follows log.jsonl and sends each line once (`tracking.py` starts it).

Standard input is its only tie to the run: the first line describes the run, the end of the input is the end of the
run. The process then sends the rest of the log. A tracker that hangs is ended some minutes later.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from firth.core.errors import MAX_REASON_CHARS, UserError, shorten
from firth.core.files import read_object, write_json
from firth.core.serialization import from_dict
from firth.train.log import is_log_line
from firth.train.trackers import TRACKERS
from firth.train.tracking import TRACKER_FILE, TrackedRun

POLL_SECONDS = 1.0  # between two looks at the log
STATE_SECONDS = 10.0  # between two writes of tracker.json
GRACE_SECONDS = 300.0  # from the end of the run to that of a tracker that hangs


@dataclass(frozen=True)
class TrackerState:
    """tracker.json: the tracker's run, and the last line that it got.

    A step has a line of training and, after it, perhaps one of evaluation.
    """

    tracker: str
    id: str = ""
    step: int = -1
    is_evaluated: bool = False


def main() -> None:
    run = TrackedRun(**json.loads(sys.stdin.buffer.readline()))
    reply, ended = silence_output(), threading.Event()
    threading.Thread(target=watch_run, args=(ended,), daemon=True).start()
    try:
        follow_log(run, ended)
    except Exception as e:
        first_line = str(e).strip().partition("\n")[0]
        os.write(reply, f"{type(e).__name__}: {shorten(first_line, MAX_REASON_CHARS)}".encode())
        os._exit(1)


def silence_output() -> int:
    """Discard what libraries print; return a descriptor for the reply to the run."""
    reply, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    return reply


def watch_run(ended: threading.Event) -> None:
    """Wait for the end of the run, then end a process that hangs."""
    sys.stdin.buffer.read()
    ended.set()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def follow_log(run: TrackedRun, ended: threading.Event) -> None:
    """Send the lines of a log, those that are there and those that come, until the run has ended."""
    folder = Path(run.folder)
    file = folder / TRACKER_FILE
    with folder_lock(folder):
        state = read_state(file, run.tracker)
        tracker = TRACKERS[run.tracker](run, state.id)
        state = replace(state, id=tracker.id)
        write_json(file, asdict(state))
        saved_at = time.monotonic()
        for line in follow_lines(folder / "log.jsonl", ended):
            if line is not None:
                step, is_evaluated = line["step"], "data" not in line
                if (step, is_evaluated) > (state.step, state.is_evaluated):
                    tracker.log(step, numbers(line))
                    state = replace(state, step=step, is_evaluated=is_evaluated)
            else:  # all that is there
                tracker.flush()
                if time.monotonic() - saved_at > STATE_SECONDS:
                    write_json(file, asdict(state))
                    saved_at = time.monotonic()
        tracker.finish()
        write_json(file, asdict(state))


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the tracker of an earlier process of this run, which may still be sending."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_state(path: Path, tracker: str) -> TrackerState:
    """Return the state of this tracker; a new one where the run begins, had another tracker, or the file is damaged."""
    new = TrackerState(tracker)
    try:
        state = from_dict(read_object(path), TrackerState, str(path), is_yaml=False)
    except UserError:
        return new
    return state if state.tracker == tracker else new


def follow_lines(path: Path, ended: threading.Event) -> Iterator[dict[str, Any] | None]:
    """Yield the lines of a log as they come, and None after the last that is there."""
    with open(path, "rb") as file:
        rest = b""
        while True:
            is_complete = ended.is_set()  # before the read: what was written before the end is read
            *lines, rest = (rest + file.read()).split(b"\n")
            for text in lines:
                with suppress(ValueError, RecursionError):
                    line = json.loads(text.decode())
                    if is_log_line(line):
                        yield line
            yield None
            if is_complete:
                return
            ended.wait(POLL_SECONDS)


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line.

    >>> numbers({"step": 3, "loss": 2.5, "tokens": 64, "data": "0a1b2c3d", "grad_norm": None})
    {'loss': 2.5, 'tokens': 64.0}
    """
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


if __name__ == "__main__":
    main()
