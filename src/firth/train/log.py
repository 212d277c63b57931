"""log.jsonl: one line per event, flushed at once, cut back on resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from firth.files import write_text


class Log:
    """The log of a run that goes on after `step`: lines of later steps belong to work that was lost, and are cut."""

    def __init__(self, path: Path, step: int) -> None:
        if path.exists():
            kept = [line for line in read_log(path) if line["step"] <= step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, **facts: Any) -> None:
        self.file.write(json.dumps(facts) + "\n")
        self.file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.file.close()


def last_loss(path: Path) -> float:
    """The training loss that was logged last."""
    return next((line["loss"] for line in reversed(read_log(path)) if "loss" in line), math.nan)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a last one that a crash cut short is left out."""
    lines = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if isinstance(line, dict) and "step" in line]
