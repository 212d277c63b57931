"""Trackers: TensorBoard, trackio, Weights & Biases or MLflow show the log of a run while it trains.

`log.jsonl` is the one log of a run, and a tracker is one of its readers. It is a process of its own
(`tracker_process.py`) that follows the file, as `tail -f` does. So

- training never waits for a tracker: imports, slow networks and hanging servers cost time in the other process;
- all trackers get the names of the log (`loss`, `eval_loss`, `learning_rate`), and nothing else;
- `tracker.json` beside the log has the tracker's run and the last line that it got. A resumed run continues the same
  run of the tracker, and sends what is missing: lines that a killed process left behind too.

A pipe holds the two processes together. Its end tells the tracker that the run has stopped, by whatever cause; the
tracker sends the rest of the log and exits.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal

from firth.core.console import say, warn
from firth.core.errors import UserError

TrackerName = Literal["none", "tensorboard", "trackio", "wandb", "mlflow"]
TRACKER_FILE = "tracker.json"  # of a run folder: the tracker's run, and the last line that it got
TENSORBOARD_FOLDER = "tensorboard"  # of a run folder
EXIT_WAIT_SECONDS = 10.0  # how long the end of a program waits for its trackers, all together
_closed: list[TrackerProcess] = []  # trackers of runs that have ended


@dataclass(frozen=True)
class TrackedRun:
    """A run as its tracker shows it: `name`, and the `group` of a run of several seeds."""

    tracker: str  # tensorboard, trackio, wandb or mlflow
    folder: str
    name: str
    group: str
    config: dict[str, Any]  # the recipe, by dotted names


def check_tracker(tracker: str) -> None:
    """Raise a UserError, before anything is computed, if the package of a tracker is missing."""
    if tracker != "none" and find_spec(tracker) is None:
        raise UserError(
            f"--report-to {tracker} needs the package {tracker}. Install it: {sys.executable} -m pip install {tracker}"
        )


class TrackerProcess:
    """A process that follows the log of a run and sends its lines to a tracker.

    Nothing here waits or raises: a tracker that fails costs one warning.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.tracker, self.is_closed, self.has_failed = run.tracker, False, False
        self.process: subprocess.Popen[bytes] | None = None
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "firth.train.tracker_process"]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self.process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(asdict(run)).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            self.fail(str(e.strerror or e))

    def fail(self, reason: str) -> None:
        self.has_failed = True
        warn(
            f"{self.tracker} stopped ({reason}). The run continues, and log.jsonl has all of it; --resume sends the "
            "lines that are missing."
        )

    def poll(self) -> None:
        """Warn, once, if the process has failed."""
        if self.process is not None and not self.has_failed and self.process.poll() is not None:
            assert self.process.stdout is not None
            reason = self.process.stdout.read().decode("utf-8", "replace").strip()
            if self.process.returncode or not self.is_closed:
                self.fail(reason or f"its process ended with code {self.process.returncode}")

    def close(self) -> None:
        """Tell the process that the log is complete. It sends the rest, and the program's end waits for it a while."""
        if self.process is None or self.is_closed:
            return
        self.poll()
        self.is_closed = True
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        if not _closed:
            atexit.register(wait_for_trackers)
        _closed.append(self)


def wait_for_trackers(seconds: float = EXIT_WAIT_SECONDS) -> None:
    """Wait until the trackers of ended runs have sent everything; after `seconds` they go on alone."""
    end = time.monotonic() + seconds
    for tracker in _closed:
        assert tracker.process is not None
        with suppress(subprocess.TimeoutExpired):
            tracker.process.wait(max(end - time.monotonic(), 0.0))
        tracker.poll()
    slow = sorted({tracker.tracker for tracker in _closed if tracker.process and tracker.process.poll() is None})
    if slow:
        say(f"{', '.join(slow)} has not got all lines yet: its process goes on for some minutes, in the background.")
    _closed.clear()
