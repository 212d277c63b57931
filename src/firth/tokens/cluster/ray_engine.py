"""Run tasks on a Ray cluster: one `ray.remote` function, which any worker of any machine can call.

A spec and an entry travel as JSON, and everything large stays in the work folder. So Ray has nothing to keep: when a
machine is lost, Ray starts its tasks on another one, and finds the committed ones done.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from firth.core.console import say
from firth.core.errors import UserError
from firth.tokens.cluster.engine import run_one
from firth.tokens.cluster.tasks import Spec

MAX_RETRIES = 20  # of a task whose worker or machine is lost
TASKS_PER_CPU = 2  # tasks that are submitted at once for each core of the cluster
MAX_STARTS = 4  # of a local cluster: Ray gives up after 30 s, which is too short on a busy machine
LOCAL = "local"  # address of a cluster that Ray starts here


class RayEngine:
    """Runs tasks on a cluster that `open_ray_engine` has connected to."""

    def __init__(self, ray: Any, workers: int = 0) -> None:
        self.ray, self.workers = ray, workers
        self.remote = ray.remote(num_cpus=1, max_retries=MAX_RETRIES)(run_remotely)

    def run(self, specs: Sequence[Spec]) -> Iterator[tuple[int, dict[str, Any]]]:
        waiting, running = list(enumerate(specs))[::-1], dict[Any, int]()
        while waiting or running:
            while waiting and len(running) < self.max_running():
                index, spec = waiting.pop()
                running[self.remote.remote(json.dumps(spec))] = index
            done, _ = self.ray.wait(list(running), num_returns=1)
            for reference in done:
                index = running.pop(reference)
                yield index, self.get_entry(reference, specs[index])

    def max_running(self) -> int:
        """Number of tasks to submit at once; machines may join or leave the cluster meanwhile."""
        return self.workers or max(1, TASKS_PER_CPU * int(self.ray.cluster_resources().get("CPU", 1)))

    def get_entry(self, reference: Any, spec: Spec) -> dict[str, Any]:
        try:
            outcome = json.loads(self.ray.get(reference))
        except self.ray.exceptions.RayTaskError as e:
            raise describe_failure(e, spec) from e
        except self.ray.exceptions.RayError as e:
            raise UserError(
                f"Task {spec['task']} ({spec['kind']}) was lost {MAX_RETRIES + 1} times ({str(e).splitlines()[0]}). "
                "Run the command again with --resume when the cluster is well."
            ) from None
        if "error" in outcome:
            raise UserError(outcome["error"])
        return dict(outcome["entry"])


def run_remotely(spec: str) -> str:
    """Run a task in a worker of the cluster. An error of the user comes back as a value, not as an exception."""
    try:
        return json.dumps({"entry": run_one(json.loads(spec))})
    except UserError as e:
        return json.dumps({"error": str(e)})


def describe_failure(error: Exception, spec: Spec) -> Exception:
    """Return the error for an exception in a worker."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ImportError):
        return UserError(
            f"A machine of the cluster cannot import {cause.name or cause}. Install the same version of firth on every "
            "machine, with the extra ray."
        )
    return RuntimeError(f"Task {spec['task']} ({spec['kind']}) failed on the cluster: {cause or error}")


@contextmanager
def open_ray_engine(address: str | None = None, workers: int = 0) -> Iterator[RayEngine]:
    """Connect to the cluster at `address`, or start one on this machine with `workers` cores (0: all of them)."""
    ray = import_ray()
    if ray.is_initialized():
        yield RayEngine(ray, workers)
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "address": address or LOCAL}
    if address is None:
        options |= {"num_cpus": workers or None, "include_dashboard": False}
    try:
        with exported_path():
            start_with_patience(lambda: ray.init(**options))
    except Exception as e:  # Ray raises many types, `Exception` itself among them
        place = f"the cluster at {address}" if address else "a cluster on this machine"
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"--engine ray: cannot connect to {place} ({reason.rstrip('.')}).") from None
    try:
        yield RayEngine(ray, workers)
    finally:
        ray.shutdown()


StartedT = TypeVar("StartedT")


def start_with_patience(start: Callable[[], StartedT]) -> StartedT:
    """Start a machine of Ray again if it was too slow."""
    for _ in range(MAX_STARTS - 1):
        try:
            return start()
        except Exception as e:
            if "timed out during startup" not in str(e):
                raise
            say("Ray took more than 30 s to start: starting it again.")
    return start()


@contextmanager
def exported_path() -> Iterator[None]:
    """Set PYTHONPATH to what this process imports from: workers on this machine inherit it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def import_ray() -> Any:
    """Import Ray, which reads its settings from the environment then. It must not report usage to its makers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        install = f"{shlex.quote(sys.executable)} -m pip install 'firth[ray]'"
        raise UserError(f"--engine ray needs the extra ray. Install it: {install}") from None
    return ray
