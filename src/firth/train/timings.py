"""timings.jsonl: how long steps took, and how long they waited for data.

The log (`log.jsonl`) of a resumed run equals that of an uninterrupted one byte for byte, and times would differ. So
they have a file of their own: one line for about ten seconds of training, with sums over its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from firth.train.compute import ComputeConfig
from firth.train.log import MAX_LOGGED_NUMBER, RunLog
from firth.train.resources import measure_flops

TIMINGS_FILE = "timings.jsonl"
LINE_SECONDS = 10.0  # of training between two lines
SUM_NAMES = ("steps", "tokens", "seconds", "data_wait")  # sums of a line
DEVICE_NUMBERS = ("device_flops", "memory_share")  # facts of a GPU
WARMUP_STEPS = 3  # steps that are not timed: they compile and warm caches


class StepTimings:
    """Measures steps without waiting for the device, and writes a line now and then."""

    def __init__(self, path: Path | None, step: int, compute: ComputeConfig) -> None:
        self.device = compute.device
        self.first_timed_step = step + WARMUP_STEPS
        self.step, self.is_waiting_since = step, 0.0
        self.wait = 0.0  # seconds that the current step waited for its batch
        self.sums = dict.fromkeys(SUM_NAMES, 0.0)  # since the last line
        self.totals = dict(self.sums)
        self.device_facts: dict[str, Any] = {"device": self.device.type}
        if path is not None and self.device.type == "cuda":
            self.device_facts["device_flops"] = measure_flops(self.device)
        self.log = RunLog(path, step) if path is not None else None

    @contextmanager
    def waiting(self, inner: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Enter `inner` to wait for the next batch, and note for how long."""
        self.is_waiting_since = time.monotonic()
        with inner():
            yield
        self.wait = time.monotonic() - self.is_waiting_since

    def end_step(self, step: int, tokens: int) -> None:
        """Note a step that ends now; it began when the loop asked for its batch."""
        self.step = step
        if step <= self.first_timed_step:
            return
        seconds = time.monotonic() - self.is_waiting_since
        for name, value in (("steps", 1), ("tokens", tokens), ("seconds", seconds), ("data_wait", self.wait)):
            self.sums[name] += value
            self.totals[name] += value
        if self.sums["seconds"] >= LINE_SECONDS:
            self.write()

    def write(self) -> None:
        """Append a line for the steps since the last one."""
        if self.log is None or not self.sums["steps"]:
            return
        line: dict[str, Any] = {"step": self.step, **self.sums, **self.device_facts}
        line |= {"steps": int(self.sums["steps"]), "tokens": int(self.sums["tokens"])}
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            line["memory_share"] = torch.cuda.max_memory_allocated(self.device) / total
        self.log.write(**line)
        self.sums = dict.fromkeys(self.sums, 0.0)

    def __enter__(self) -> StepTimings:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.write()
        if self.log is not None:  # lines that a full disk has not taken are given up: no run fails for its timings
            self.log.flush()
            self.log.file.close()


def is_timings_line(line: Any) -> bool:
    """Whether a line has its sums, as numbers, and facts of the device of their kinds: a file may be damaged."""
    if not isinstance(line, dict) or not isinstance(line.get("device", ""), str):
        return False
    numbers = [*(line.get(name) for name in SUM_NAMES), *(line.get(name, 0) for name in DEVICE_NUMBERS)]
    return all(isinstance(value, int | float) and 0 <= value <= MAX_LOGGED_NUMBER for value in numbers)


def sum_timings(lines: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Add up the lines of a run; facts of the device are those of the last line."""
    lines = [line for line in lines if is_timings_line(line)]
    totals = {name: sum(line[name] for line in lines) for name in SUM_NAMES}
    return {**(lines[-1] if lines else {}), **totals}
