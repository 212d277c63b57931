"""log.jsonl: one JSON object per line, written at once, cut back to the checkpoint's step on resume."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from firth.core.console import format_count, warn
from firth.core.files import open_in_place, open_regular, replace_nonfinite, write_text
from firth.train.tracking import TrackedRun, TrackerProcess

# keys of every step
NUMBER_KEYS = (*("learning_rate", "tokens", "targets", "words_seen", "passes", "mask_rate", "grad_norm", "weight_rms"),)
MAX_LOGGED_STEP = 2**53  # larger ones, and numbers that are not finite, are damage
MAX_LOGGED_NUMBER = 1e100
STEP_KEYS = ("step", "loss", *NUMBER_KEYS, "data", "skipped")


class TextProgress(NamedTuple):
    """How much of the text the steps so far have read: a word of the second pass is seen a second time."""

    words_seen: int
    passes: float  # over the whole text


class RunLog:
    """The log of a run that starts or resumes after `step`. Lines of later steps are removed: those steps run again.

    If the disk is full, lines stay in memory and are written with the next ones. A tracker follows the file.
    """

    def __init__(self, path: Path, step: int, tracked_run: TrackedRun | None = None) -> None:
        if path.exists():
            lines, num_damaged = parse_log(path)
            if num_damaged:
                warn(f"{path}: {format_count(num_damaged, 'damaged line is', 'damaged lines are')} removed.")
            kept_lines = [line for line in lines if line["step"] <= step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept_lines))
        self.file = open_in_place(path, append=True, buffering=0)
        self.path, self.pending = path, b""
        self.last_error: OSError | None = None
        self.tracker = TrackerProcess(tracked_run) if tracked_run is not None else None

    def write(self, **facts: Any) -> None:
        self.pending += json.dumps(replace_nonfinite(facts), allow_nan=False).encode() + b"\n"
        self.flush()
        if self.tracker is not None:
            self.tracker.poll()

    def flush(self) -> bool:
        """Write pending lines; return whether all lines are in the file."""
        try:
            while self.pending:
                self.pending = self.pending[self.file.write(self.pending) :]
            self.last_error = None
        except OSError as e:
            if self.last_error is None:
                warn(
                    f"{self.path.name} cannot be written ({e.strerror}): its lines stay in memory. Training continues."
                )
            self.last_error, e.filename = e, str(self.path)
        return not self.pending

    def fsync(self) -> None:
        """Force written lines to the disk, so that they survive a crash of the machine."""
        os.fsync(self.file.fileno())

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        written = self.flush()
        self.file.close()
        if self.tracker is not None:
            self.tracker.close()
        if not written and e is None:
            assert self.last_error is not None
            raise self.last_error


class NullLog:
    """A log that writes nothing, for trial runs and for all processes but the main one."""

    def write(self, **facts: Any) -> None: ...

    def flush(self) -> bool:
        return True

    def fsync(self) -> None: ...

    def __enter__(self) -> NullLog:
        return self

    def __exit__(self, *error: object) -> None: ...


def read_last_losses(path: Path) -> tuple[float, dict[str, float]]:
    """Return the last logged training loss, or NaN, and the losses and accuracies that it consists of."""
    line = next((line for line in reversed(read_log(path)) if line.get("loss") is not None), {"loss": math.nan})
    return line["loss"], {name: value for name, value in line.items() if name not in STEP_KEYS}


def token_loss_name(names: Container[str], prefix: str = "eval_") -> str:
    """Return the name of the loss over tokens among the keys of a log or of results.

    It is `loss` itself where there is no other, and a part of it with NSP, SOP, replaced tokens or span boundaries.
    """
    return next((prefix + name for name in ("mlm_loss", "lm_loss") if prefix + name in names), f"{prefix}loss")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log; skip damaged ones and a last line that a crash truncated."""
    return parse_log(path)[0]


def parse_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines of a log and the number of damaged ones, without a last line that a crash truncated."""
    lines, num_damaged = [], 0
    with open_regular(path) as file:
        *ended, last = file.read().split(b"\n")
    for text in (*ended, last):
        try:
            line = json.loads(text.decode())
        except (ValueError, RecursionError):
            line = None
        if is_log_line(line):
            lines.append(line)
        elif text.strip() and text is not last:
            num_damaged += 1
    return lines, num_damaged


def is_log_line(line: Any) -> bool:
    """Whether a line has a step, and numbers for all losses and counts. A loss that was not finite is None."""
    if not isinstance(line, dict) or type(step := line.get("step")) is not int or abs(step) > MAX_LOGGED_STEP:
        return False
    numbers = (value for name, value in line.items() if name in NUMBER_KEYS or name.endswith("loss"))
    return all(
        value is None or (isinstance(value, int | float) and abs(value) <= MAX_LOGGED_NUMBER) for value in numbers
    )
