"""Time left, over all runs of a series."""

from __future__ import annotations

import pytest

from firth.core import console
from firth.core.console import format_time_left, run_series


def test_time_left_over_seeds_and_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, the second three times as large, of two seeds each; a seed of the small task takes 100 s."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    assert format_time_left(60) == "1m00s left"
    with run_series([10, 30]) as tasks:
        for size in (1, 3):
            with run_series([1.0, 1.0]) as seeds:
                for _ in range(2):
                    now += 60 * size
                    elapsed, total = now, 2 * 100 + 2 * 300
                    assert format_time_left(40 * size) == f"{console.format_duration(total - elapsed)} left in all"
                    now += 40 * size
                    seeds.end_run()
            tasks.end_run()
    with run_series([1.0]):
        assert format_time_left(60) == "1m00s left", "one run is no series"
