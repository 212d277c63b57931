"""Processes that compute when nothing else does: the doctor, and samples of checkpoints.

A run that is watched may need every core. So whatever the server computes for the tab Runs has a process of its own,
with one thread, Linux's idle priority and no GPU: it takes the cycles that the run leaves, and frees its memory when it
ends.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


class IdleWorker:
    """A thread that runs one idle process after the other; both end with the server."""

    def __init__(self, name: str) -> None:
        self.lock, self.worker = threading.Lock(), ThreadPoolExecutor(1, name)
        self.process: subprocess.Popen[str] | None = None
        self.is_stopped = False

    def hold(self, process: subprocess.Popen[str]) -> None:
        """Note the process that computes now."""
        with self.lock:
            self.process = process
            if self.is_stopped:
                process.kill()

    def stop(self) -> None:
        with self.lock:
            self.is_stopped = True
            if self.process is not None:
                self.process.kill()
        self.worker.shutdown(wait=False, cancel_futures=True)


def start_idle_process(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start `python -m ARGUMENTS` at idle priority, with pipes for its input, its output and its messages."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    lower_priority(process.pid)
    return process


def lower_priority(pid: int) -> None:
    """Let a process compute when nothing else does; threads that it starts later inherit this."""
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or not allowed
        try:
            os.setpriority(os.PRIO_PROCESS, pid, 19)
        except OSError:
            return


def limit_cpu_seconds(pid: int, seconds: float) -> None:
    """End a process with SIGXCPU after so many whole seconds of computing; an infinite limit is none. Linux only."""
    if sys.platform == "linux" and seconds < math.inf:
        import resource

        limit = max(1, int(seconds))
        with suppress(OSError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_CPU, (limit, limit + 1))


def last_line(text: str) -> str:
    """Return the last line that is not empty: the message of a command that failed."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
