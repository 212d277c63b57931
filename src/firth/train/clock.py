"""Elapsed time of a run over all its resumes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from firth.core.errors import UserError
from firth.core.files import read_json, write_json

CLOCK_FILE = ".clock"
RUN_RECIPE_FILE = "recipe.yaml"  # exists once a run has started


class RunClock:
    """Seconds that a run has used, with those before a resume.

    time.monotonic counts them, so neither a changed system clock nor the pause before a resume counts. The total is
    saved between stages and when a run is stopped; a killed run loses the seconds of its stage. A finished run, or one
    that fails before it starts, removes the file. `start_time` is shifted back by the earlier seconds.
    """

    def __init__(self, folder: Path, resume: bool = False, start_time: float | None = None) -> None:
        self.file = folder / CLOCK_FILE
        self.earlier_seconds = read_clock_seconds(self.file) if resume else 0.0
        self.start_time = (time.monotonic() if start_time is None else start_time) - self.earlier_seconds

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.start_time

    def save(self) -> None:
        """Save the elapsed seconds for a resume; a disk error is ignored."""
        with suppress(OSError):
            write_json(self.file, {"seconds": self.elapsed_seconds})

    def __enter__(self) -> RunClock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        begun = self.earlier_seconds > 0 or self.file.with_name(RUN_RECIPE_FILE).is_file()
        if kind is None or (issubclass(kind, UserError) and not begun):
            with suppress(OSError):
                self.file.unlink(missing_ok=True)
        else:
            self.save()


def read_clock_seconds(file: Path) -> float:
    """Return the saved seconds, 0 where the file is missing or invalid."""
    try:
        return max(float(read_json(file)["seconds"]), 0.0)
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return 0.0
