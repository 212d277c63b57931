"""How long a run has taken, all the times together that it was begun."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from firth.errors import UserError
from firth.files import read_json, write_json

CLOCK = ".clock"
RECIPE = "recipe.yaml"  # a run that has one has begun


class Clock:
    """The seconds of a run: of this time, and of the times before that it goes on from.

    They are counted by time.monotonic, which nobody sets: neither a clock on the wall that jumps nor a night between
    two times counts. They are noted between stages and when a run is stopped; one that is killed forgets those of its
    stage, and one that is done, or refused before it has begun, needs none. `began` is when this time would have begun
    as the only one.
    """

    def __init__(self, folder: Path, resume: bool = False, began: float | None = None) -> None:
        self.file, self.earlier = folder / CLOCK, noted(folder / CLOCK) if resume else 0.0
        self.began = (time.monotonic() if began is None else began) - self.earlier

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self) -> None:
        """Keep what was used so far, for a time after this one. A disk that does not take it stops nothing."""
        with suppress(OSError):
            write_json(self.file, {"seconds": self.seconds})

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        begun = self.earlier > 0 or self.file.with_name(RECIPE).is_file()
        if kind is None or (issubclass(kind, UserError) and not begun):
            with suppress(OSError):
                self.file.unlink(missing_ok=True)
        else:
            self.note()


def noted(file: Path) -> float:
    """The seconds that were used before; none where nothing, or nothing that can be read, says so."""
    try:
        return max(float(read_json(file)["seconds"]), 0.0)
    except (UserError, OSError, KeyError, TypeError, ValueError):
        return 0.0
