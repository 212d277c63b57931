"""Run several jobs in parallel, each in its own process: one small model leaves most of a GPU idle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

Key = TypeVar("Key")
Input = TypeVar("Input")
Result = TypeVar("Result")


def run_parallel(
    job: Callable[[Input], Result], inputs: Iterable[tuple[Key, Input]], num_processes: int, log: Path
) -> Iterator[tuple[Key, Result]]:
    """Yield results as they finish. The next input is drawn when a process is free; the output goes to the log.

    After an error no job starts, and the results of those that run are yielded before it is raised.

    >>> dict(run_parallel(abs, [("a", -1), ("b", 2)], 1, Path("unused")))
    {'a': 1, 'b': 2}
    """
    if num_processes == 1:
        yield from ((key, job(value)) for key, value in inputs)
        return
    pending = iter(inputs)
    running: dict[Future[Result], Key] = {}
    threads = max(1, (os.cpu_count() or 1) // num_processes)
    with ProcessPoolExecutor(num_processes, get_context("spawn"), init_process, (log, threads)) as pool:
        error: BaseException | None = None
        while True:
            while error is None and len(running) < num_processes and (item := next(pending, None)) is not None:
                running[pool.submit(job, item[1])] = item[0]
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                key, failed = running.pop(done), done.exception()
                if failed is None:
                    yield key, done.result()
                error = error or failed
        if error is not None:
            raise error


def init_process(log: Path, threads: int) -> None:
    """Give a new process its share of the cores, and send its output to the log."""
    torch.set_num_threads(threads)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
