"""Several runs at once, each in a process of its own: a small model alone leaves most of a GPU idle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch

Key, Given, Result = TypeVar("Key"), TypeVar("Given"), TypeVar("Result")


def at_once(
    work: Callable[[Given], Result], calls: Iterable[tuple[Key, Given]], jobs: int, log: Path
) -> Iterator[tuple[Key, Result]]:
    """Results as they come. The next call is asked for when there is room for it; what processes say is in the log.

    >>> dict(at_once(abs, [("a", -1), ("b", 2)], 1, Path("unused")))
    {'a': 1, 'b': 2}
    """
    if jobs == 1:
        yield from ((key, work(given)) for key, given in calls)
        return
    waiting = iter(calls)
    running: dict[Future[Result], Key] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), begin, (log, max(1, (os.cpu_count() or 1) // jobs))) as pool:
        while True:
            while len(running) < jobs and (call := next(waiting, None)) is not None:
                running[pool.submit(work, call[1])] = call[0]
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()


def begin(log: Path, threads: int) -> None:
    """In a new process: its share of the cores, and no word on the screen."""
    torch.set_num_threads(threads)
    sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
