"""Run a task in a process of its own, and skip a document that hangs it or kills it.

A document can hang a worker (a regular expression of a user's function that backtracks for years) or kill it (a text
that takes more memory than there is). A cluster would start the task again, and lose it again. So a task runs in a
child process, and whoever started it waits for signs of life:

1. The child works as usual and reports each second that documents pass. No report for `timeout_s` seconds, or the death
   of the child, ends this run.
2. The task runs again, *carefully*: one document at a time, and each is named before it is touched. A document that
   only met a slow moment passes now, and nothing is skipped.
3. If it stops again, the last document that was named is the cause. The task runs as usual without it, and the entry of
   the task says which document was skipped, and why.

Time counts while documents are processed, not while files are fetched or results are written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

from firth.core.errors import UserError
from firth.tokens.cluster.tasks import Spec, Watch, run_task

MAX_SKIPPED = 100  # documents of a task: with more, something else is wrong
REPORT_EVERY_S = 1.0


class StalledError(Exception):
    """A run of a task stopped at a document: its kind, number and name, and why."""

    def __init__(self, reason: str, document: tuple[str, int, str] | None) -> None:
        super().__init__(reason)
        self.reason, self.document = reason, document


def run_guarded(spec: Spec, timeout_s: float) -> dict[str, Any]:
    """Run a task in a child process without the documents that hang or kill it; return its entry."""
    skipped, known = list(spec.get("skip", [])), list(spec.get("skipped", []))
    is_careful = False
    while True:
        try:
            return run_child({**spec, "skip": skipped, "skipped": known}, timeout_s, is_careful)
        except StalledError as e:
            if is_careful and e.document is None:
                raise UserError(
                    f"Task {spec['task']} ({spec['kind']}) stopped before its first document ({e.reason})."
                ) from None
            if is_careful and e.document is not None:
                kind, number, name = e.document
                skipped.append([kind, number])
                known.append({"document": name, "task": spec["task"], "reason": e.reason})
                if len(known) > MAX_SKIPPED:
                    raise UserError(
                        f"More than {MAX_SKIPPED} documents of task {spec['task']} hang or kill their process; the "
                        f"last one: {name} ({e.reason}). Give more time with --document-timeout, or look at the text."
                    ) from None
            is_careful = not is_careful


def run_child(spec: Spec, timeout_s: float, is_careful: bool) -> dict[str, Any]:
    """Run a task in a child process. Raise `StalledError` if it stops to report or dies."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "TOKENIZERS_PARALLELISM": "false",  # a task uses one core
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-c", "from firth.tokens.cluster.guard import child_main; child_main()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert child.stdin is not None
    assert child.stdout is not None
    messages: SimpleQueue[list[Any] | None] = SimpleQueue()
    Thread(target=forward_messages, args=(child.stdout, messages), daemon=True).start()
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps([spec, is_careful]).encode() + b"\n")
            child.stdin.flush()
        return follow(child, messages, timeout_s)
    finally:
        child.kill()
        child.wait()
        with suppress(BrokenPipeError):
            child.stdin.close()


def forward_messages(pipe: IO[bytes], messages: SimpleQueue[list[Any] | None]) -> None:
    """Put each line of a pipe into a queue, and None at its end."""
    with pipe:
        for line in pipe:
            with suppress(ValueError):  # a line that the death of the child cut off
                messages.put(json.loads(line))
    messages.put(None)


def follow(child: subprocess.Popen[bytes], messages: SimpleQueue[list[Any] | None], timeout_s: float) -> dict[str, Any]:
    """Return the result of a child; raise `StalledError` if it is silent for `timeout_s` with a document."""
    document: tuple[str, int, str] | None = None
    is_processing = False
    while True:
        try:
            message = messages.get(timeout=timeout_s if is_processing else None)
        except Empty:
            raise StalledError(f"no progress within {timeout_s:g} s", document) from None
        if message is None:
            code = child.wait()
            raise StalledError(f"the process died ({describe_exit(code)})", document if is_processing else None)
        word, *values = message
        if word == "done":
            return values[0]
        if word == "error":
            raise UserError(values[0])
        if word in ("start", "finish"):
            is_processing = word == "start"
        elif word == "begin":
            document = values[0], values[1], values[2]


def describe_exit(code: int) -> str:
    """
    >>> describe_exit(-9), describe_exit(3)
    ('SIGKILL', 'exit code 3')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# --- in the child ---------------------------------------------------------------------------------------------------


class ReportingWatch(Watch):
    """A watch that writes to a pipe."""

    def __init__(self, pipe: IO[bytes], skipped: list[list[Any]], is_careful: bool) -> None:
        super().__init__(skipped)
        self.pipe, self.is_careful, self.last_report_s = pipe, is_careful, 0.0

    def report(self, *message: Any) -> None:
        self.pipe.write(json.dumps(message).encode() + b"\n")
        self.pipe.flush()

    def begin(self, kind: str, number: int, what: str) -> None:
        now = time.monotonic()
        if self.is_careful:
            self.report("begin", kind, number, what)
        elif now - self.last_report_s >= REPORT_EVERY_S:
            self.last_report_s = now
            self.report("alive")

    def start(self) -> None:
        self.report("start")

    def finish(self) -> None:
        self.report("finish")


def child_main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write into the pipe
    spec, is_careful = json.loads(sys.stdin.buffer.readline())
    Thread(target=exit_with_parent, daemon=True).start()
    watch = ReportingWatch(pipe, spec["skip"], is_careful)
    try:
        entry = run_task(spec, watch)
    except UserError as e:
        watch.report("error", str(e))
    else:
        watch.report("done", entry)
    pipe.flush()
    os._exit(0)


def exit_with_parent() -> None:
    """End this process when the pipe from its parent ends: a killed worker must not leave it behind."""
    with suppress(OSError):
        os.read(0, 1)
    os._exit(1)
