"""How long a run has taken, all the times together that it was begun."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from firth.core.errors import UserError
from firth.core.files import read_json, write_json

CLOCK_FILE = ".clock"
RUN_RECIPE_FILE = "recipe.yaml"  # a run that has one has begun


class RunClock:
    """The seconds of a run: of this time, and of the times before that it goes on from.

    They are counted by time.monotonic, which nobody sets: neither a clock on the wall that jumps nor a night between
    two times counts. They are noted between stages and when a run is stopped; one that is killed forgets those of its
    stage, and one that is done, or refused before it has begun, needs none. `start_time` is when this time would have begun
    as the only one.
    """

    def __init__(self, folder: Path, resume: bool = False, start_time: float | None = None) -> None:
        self.file, self.earlier_seconds = (
            folder / CLOCK_FILE,
            read_clock_seconds(folder / CLOCK_FILE) if resume else 0.0,
        )
        self.start_time = (time.monotonic() if start_time is None else start_time) - self.earlier_seconds

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.start_time

    def save(self) -> None:
        """Keep what was used so far, for a time after this one. A disk that does not take it stops nothing."""
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
    """The seconds that were used before; none where nothing, or nothing that can be read, says so."""
    try:
        return max(float(read_json(file)["seconds"]), 0.0)
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return 0.0
