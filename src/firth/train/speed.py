"""The speed of a run, in tokens and in steps."""

from __future__ import annotations

import time
from typing import NamedTuple

SPEED_WARMUP_STEPS = 3  # steps left out of the speed: they compile and warm caches


class SpeedMark(NamedTuple):
    timestamp: float
    step: int
    tokens: int


class SpeedMeter:
    """Speed of a run since it started or resumed, without the first steps, which compile."""

    def __init__(self, step: int, tokens: int) -> None:
        self.start = self.baseline = SpeedMark(time.monotonic(), step, tokens)

    def end_warmup(self, step: int, tokens: int) -> None:
        """Measure from here if `step` was the last warm-up step."""
        if step == self.start.step + SPEED_WARMUP_STEPS:
            self.baseline = SpeedMark(time.monotonic(), step, tokens)

    @property
    def is_warmed_up(self) -> bool:
        return self.baseline is not self.start

    def measure(self, step: int, tokens: int) -> tuple[float, float]:
        """Return tokens per second and seconds per step. A run of only warm-up steps is measured from its start."""
        since = self.baseline if step > self.baseline.step else self.start
        seconds = max(time.monotonic() - since.timestamp, 1e-9)
        return (tokens - since.tokens) / seconds, seconds / max(step - since.step, 1)
