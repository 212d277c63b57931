"""Compute requests together that arrive together.

A model computes a batch of 32 texts in hardly more time than one text: most of the time goes to reading the weights
and, on small models, to launching operations. So requests wait a few milliseconds in a queue, and those of the same
operation with the same settings are computed as one batch (dynamic batching).

Each model has one thread that computes. An operation is a generator over a batch: it yields after each step, and sends
each request its answer as soon as that is complete. The thread advances all running batches in turn, one step each.
So a classification does not wait for the end of a long text, and a text that begins later may end earlier. At most
`MAX_RUNNING_BATCHES` batches of several steps run at once: what arrives meanwhile waits, and forms a larger batch.
Where an operation has a `capacity`, jobs join a running batch that has rows left (continuous batching). Such a batch
might never end while its settings are asked for: once a job with other settings has waited for `MAX_JOIN_WAIT_S`, the
oldest batch is closed. It takes no more jobs, ends with those that it has, and the waiting job begins in its place.

The server's event loop hands over a `Job` and reads its events. A job whose client has gone is marked as cancelled;
the operation drops its rows at the next step.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from firth.core.errors import UserError
from firth.serve.errors import ApiError, queue_full_error, stopping_error, to_api_error

MAX_RUNNING_BATCHES = 4  # batches of several steps
MAX_JOIN_WAIT_S = 1.0  # that a job waits while others join all running batches


class Piece(NamedTuple):
    """New text of one of a request's choices."""

    choice: int
    text: str


class Result(NamedTuple):
    """The complete answer, the last event of a job."""

    value: Any


Event = Piece | Result | ApiError


class Operation(NamedTuple):
    """What a batch of jobs is computed by; `has_steps` if it yields between steps.

    `capacity` returns how many rows a batch can hold that begins with so many: jobs that join it are appended to the
    list that `run` got, which takes them out. None: no job can join.
    """

    name: str
    run: Callable[[list[Job]], Iterator[None]]
    has_steps: bool = False
    capacity: Callable[[int], int] | None = None


class Job:
    """One request of a model: an operation, its settings (jobs with equal ones form a batch), its inputs."""

    def __init__(self, operation: Operation, settings: Any, inputs: Any, num_rows: int = 1) -> None:
        self.operation, self.settings, self.inputs, self.num_rows = operation, settings, inputs, num_rows
        self.is_cancelled = self.is_complete = False
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.arrival_s = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None  # the one that reads the events

    @property
    def key(self) -> tuple[str, Any]:
        """What jobs of one batch have in common."""
        return self.operation.name, self.settings

    def cancel(self) -> None:
        """Give up the answer: nobody reads it."""
        self.is_cancelled = True

    @property
    def is_open(self) -> bool:
        return not (self.is_cancelled or self.is_complete)

    def send(self, event: Event) -> None:
        """Hand an event to the event loop; called by the computing thread."""
        self.is_complete = self.is_complete or not isinstance(event, Piece)
        assert self.loop is not None, "submitted"
        try:
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)
        except RuntimeError:  # the loop is closed: the server has stopped
            self.is_cancelled = True


class RunningBatch:
    """The jobs of a batch without an answer, and the steps that compute it."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.operation, self.settings, self.jobs = jobs[0].operation, jobs[0].settings, list(jobs)
        self.arriving = list(jobs)  # not yet taken by the operation
        self.steps = self.operation.run(self.arriving)
        self.is_closed = False  # no job can join any more
        num_rows = sum(job.num_rows for job in jobs)
        self.capacity = num_rows if self.operation.capacity is None else self.operation.capacity(num_rows)

    def can_join(self, job: Job) -> bool:
        is_open = self.operation.capacity is not None and not self.is_closed
        return is_open and self.key == job.key and job.num_rows <= self.num_free_rows

    @property
    def key(self) -> tuple[str, Any]:
        return self.operation.name, self.settings

    @property
    def num_free_rows(self) -> int:
        return self.capacity - sum(job.num_rows for job in self.jobs if job.is_open)

    def join(self, jobs: Sequence[Job]) -> None:
        self.jobs = [job for job in self.jobs if job.is_open] + list(jobs)
        self.arriving += jobs


class BatchWorker:
    """The queue and the computing thread of one model. A step holds `lock`, which models on one GPU share."""

    def __init__(
        self, name: str, max_batch_size: int, batch_wait_s: float, max_queue: int, lock: threading.Lock | None = None
    ) -> None:
        self.lock = lock or threading.Lock()
        self.max_batch_size, self.batch_wait_s, self.max_queue = max_batch_size, batch_wait_s, max_queue
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.is_stopping = False
        self.running: list[RunningBatch] = []
        self.thread = threading.Thread(target=self.work, name=f"firth-{name}", daemon=True)

    def submit(self, job: Job) -> None:
        """Put a job into the queue; raise ApiError if it is full. Called by the event loop that reads the events."""
        job.arrival_s, job.loop = time.monotonic(), asyncio.get_running_loop()
        with self.changed:
            if self.is_stopping:
                raise stopping_error()
            if len(self.waiting) >= self.max_queue:
                self.drop_cancelled()
            if len(self.waiting) >= self.max_queue:
                raise queue_full_error()
            self.waiting.append(job)
            self.changed.notify()

    def stop(self) -> None:
        """End the thread after its current step; jobs without an answer get an error."""
        with self.changed:
            self.is_stopping = True
            self.changed.notify()

    def work(self) -> None:
        while not self.is_stopping:
            if jobs := self.next_batch():
                joined = self.find_joinable(jobs[0])
                if joined is not None:
                    joined.join(jobs)
                else:
                    self.running.append(RunningBatch(jobs))
            self.running = [batch for batch in self.running if self.advance(batch)]
        for job in [*self.waiting, *(job for batch in self.running for job in batch.jobs)]:
            if job.is_open:
                job.send(stopping_error())

    def advance(self, batch: RunningBatch) -> bool:
        """Compute one step of a batch; return whether there are more."""
        try:
            with self.lock:
                next(batch.steps)
        except StopIteration:
            return False
        except Exception as e:
            for job in batch.jobs:
                if job.is_open:
                    job.send(to_api_error(e))
            return False
        return True

    def next_batch(self) -> list[Job]:
        """Return the jobs to begin with now, possibly none; wait for one where nothing is running."""
        with self.changed:
            while not self.is_stopping:
                self.drop_cancelled()
                self.close_batches()
                batch = self.matching_jobs()
                left_s = batch[0].arrival_s + self.batch_wait_s - time.monotonic() if batch else None
                is_full = sum(job.num_rows for job in batch) >= self.max_batch_size
                joins = bool(batch) and self.find_joinable(batch[0]) is not None
                if left_s is not None and (left_s <= 0 or is_full or joins):
                    taken = set(map(id, batch))
                    self.waiting = deque(job for job in self.waiting if id(job) not in taken)
                    return batch
                if self.running:
                    return []
                self.changed.wait(left_s)
            return []

    def drop_cancelled(self) -> None:
        self.waiting = deque(job for job in self.waiting if job.is_open)

    @property
    def can_begin_steps(self) -> bool:
        """Whether one more batch of several steps can run."""
        return sum(batch.operation.has_steps for batch in self.running) < MAX_RUNNING_BATCHES

    def close_batches(self) -> None:
        """Close the oldest running batches, as many as there are settings that have waited too long for a place."""
        if self.can_begin_steps:
            return
        closed = [batch.key for batch in self.running if batch.is_closed]
        latest_s, starving = time.monotonic() - MAX_JOIN_WAIT_S, list[tuple[str, Any]]()
        for job in self.waiting:  # keys are compared, not hashed: a JSON schema has no hash
            waits = job.operation.has_steps and job.arrival_s < latest_s and self.find_joinable(job) is None
            if waits and job.key not in (*closed, *starving):  # one of `closed` ends soon
                starving.append(job.key)
        can_close = [batch for batch in self.running if batch.operation.capacity is not None and not batch.is_closed]
        for batch in can_close[: max(0, len(starving) - len(closed))]:
            batch.is_closed = True

    def matching_jobs(self) -> list[Job]:
        """Return the oldest job that may begin, and those behind it that fit into its batch."""
        can_begin = self.can_begin_steps
        first = next(
            (
                job
                for job in self.waiting
                if not job.operation.has_steps or can_begin or self.find_joinable(job) is not None
            ),
            None,
        )
        if first is None:
            return []
        joined = self.find_joinable(first)
        limit = self.max_batch_size if joined is None else joined.num_free_rows
        batch, num_rows = list[Job](), 0
        for job in self.waiting:
            fits = num_rows + job.num_rows <= limit or not batch
            if fits and job.key == first.key:
                batch.append(job)
                num_rows += job.num_rows
        return batch

    def find_joinable(self, job: Job) -> RunningBatch | None:
        """Return a running batch that a job can join."""
        return next((batch for batch in self.running if batch.can_join(job)), None)


def compute_together(jobs: Sequence[Job], compute: Callable[[Sequence[Job]], Sequence[Any]]) -> Iterator[None]:
    """Send each job its result. Where one of them is wrong, compute them one by one: the others must not fail."""
    jobs = [job for job in jobs if job.is_open]
    try:
        results = compute(jobs) if jobs else []
    except UserError:
        if len(jobs) == 1:
            raise
        for job in jobs:
            yield from compute_alone(job, compute)
        return
    for job, result in zip(jobs, results, strict=True):
        job.send(Result(result))
    yield from ()


def compute_alone(job: Job, compute: Callable[[Sequence[Job]], Sequence[Any]]) -> Iterator[None]:
    try:
        job.send(Result(compute([job])[0]))
    except UserError as e:
        job.send(to_api_error(e))
    yield
