"""Engines run tasks: one after the other here, or on a cluster (`ray_engine.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from firth.tokens.cluster.guard import run_guarded
from firth.tokens.cluster.tasks import WATCHED_TASKS, Spec, run_task


class Engine(Protocol):
    """Runs tasks in any order and yields the index and the entry of each."""

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]: ...


class SerialEngine:
    """Runs tasks in this process, one after the other."""

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
        for index, spec in enumerate(specs):
            yield index, run_one(spec)


def run_one(spec: Spec) -> dict[str, Any]:
    """Run a task, in a child process if its documents have a time limit."""
    if spec["kind"] in WATCHED_TASKS and spec.get("document_timeout"):
        return run_guarded(spec, spec["document_timeout"])
    return run_task(spec)
