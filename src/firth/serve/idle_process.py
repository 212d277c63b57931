"""Processes that compute when nothing else does: the doctor, and samples of checkpoints.

A run that is watched may need every core. So whatever the server computes for the tab Runs has a process of its own,
with one thread, Linux's idle priority and no GPU: it takes the cycles that the run leaves, and frees its memory when it
ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def start_idle_process(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start `python -m ARGUMENTS` at idle priority, with pipes for its input, its output and its messages."""
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
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


def last_line(text: str) -> str:
    """Return the last line that is not empty: the message of a command that failed."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
