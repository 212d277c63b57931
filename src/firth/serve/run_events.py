"""Changes of training runs as server-sent events: one text for all who watch.

A page that polls costs the server a request every few seconds, each with its headers, its route and its JSON. Here a
page opens one stream and waits. One task looks at the folder every few seconds while anybody watches, writes what has
changed once, and every stream sends the same bytes: 50 viewers cost 50 writes to a socket, and nothing while nothing
changes.

    data: {"all": true, "runs": [every run]}                        first, and for a stream that was too slow
    data: {"runs": [those that changed], "gone": [names],
           "logs": {name: {"version", "first", "next", "rows"}}, "notes": {name: number}}

`rows` are those from `first` to `next` of the log, as in `/runs/log`; who has another number of rows asks that route.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from firth.serve.run_notes import RunNotes
from firth.serve.runs import RunsFolder, RunSummary

TICK_S = 3.0  # between two looks at the runs
IDLE_TICK_S = 6.0  # where none is trained
HEARTBEAT_S = 25.0  # a proxy closes a connection that is silent for a minute
MAX_EVENT_ROWS = 20  # of one log in an event; of more, every n-th is sent
HEARTBEAT = b":\n\n"

RunInThread = Callable[..., Awaitable[Any]]


class RunEvents:
    """The streams of a server. All but `collect` runs in the event loop."""

    def __init__(self, folder: RunsFolder, notes: RunNotes, run_in_thread: RunInThread) -> None:
        self.folder, self.notes, self.run_in_thread = folder, notes, run_in_thread
        self.sent: dict[str, RunSummary] = {}  # as those who watch know them
        self.positions: dict[str, tuple[int, int]] = {}  # version and next row of each log that was sent
        self.sent_notes: dict[str, int] = {}
        self.sequence, self.event = 0, b""
        self.is_new = asyncio.Event()  # set, and replaced, with each event
        self.num_watchers, self.is_closed = 0, False
        self.task: asyncio.Task[None] | None = None
        self.failure: Exception | None = None

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield all runs, then what changes, until the server stops."""
        self.num_watchers += 1
        try:
            if self.task is None:
                self.failure, self.task = None, asyncio.create_task(self.follow())
            seen = 0
            while not self.is_closed:
                if self.failure is not None:
                    raise self.failure
                if self.sequence > seen:  # a stream that begins, or was too slow for an event, gets all runs
                    text = self.event if seen and self.sequence == seen + 1 else self.make_snapshot()
                    seen = self.sequence
                    yield text
                    continue
                await self.is_new.wait()
                if self.sequence == seen and not self.is_closed and self.failure is None:
                    yield HEARTBEAT
        finally:
            self.num_watchers -= 1

    async def follow(self) -> None:
        """Look at the runs while anybody watches."""
        sent_s = time.monotonic()
        try:
            while self.num_watchers and not self.is_closed:
                text = await self.run_in_thread(self.collect)
                if text or time.monotonic() - sent_s > HEARTBEAT_S:
                    if text:  # a sign of life is no event: a slow stream may still have to send the last one
                        self.sequence, self.event = self.sequence + 1, text
                    sent_s = time.monotonic()
                    self.wake()
                is_training = any(run.state == "running" for run in self.sent.values())
                await asyncio.sleep(TICK_S if is_training else IDLE_TICK_S)
        except Exception as e:  # the streams end with it, and the page opens new ones
            self.failure = e
            self.wake()
        finally:
            self.task = None

    def wake(self) -> None:
        self.is_new.set()
        self.is_new = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        if not self.is_closed:
            self.is_closed = True
            self.wake()

    def make_snapshot(self) -> bytes:
        """Return the event that tells all runs."""
        runs = [run._asdict() for run in self.sent.values()]
        return to_event({"all": True, "runs": runs, "notes": self.sent_notes})

    def collect(self) -> bytes:
        """Return what has changed since the last call as an event; empty where nothing has."""
        runs = self.folder.scan()
        summaries = {name: run.summary for name, run in runs.items() if run.summary is not None}
        changed = [run for name, run in summaries.items() if run != self.sent.get(name)]
        gone = [name for name in self.sent if name not in summaries]
        logs: dict[str, Any] = {}
        for name in summaries:
            version, first = self.positions.get(name, (0, 0))
            part = runs[name].log_after(version, first, MAX_EVENT_ROWS)
            if part.rows and name in self.positions:
                first = first if part.version == version else 0
                logs[name] = {"version": part.version, "first": first, "next": part.next_row, "rows": part.rows}
            self.positions[name] = (part.version, part.next_row)
        notes = {name: number for name in summaries if (number := self.notes.number(runs[name].home))}
        new_notes = {name: number for name, number in notes.items() if self.sent_notes.get(name) != number}
        is_first = not self.sequence
        self.sent, self.sent_notes = summaries, notes
        if not (changed or gone or logs or new_notes or is_first):
            return b""
        return to_event({"runs": [run._asdict() for run in changed], "gone": gone, "logs": logs, "notes": new_notes})


def to_event(value: dict[str, Any]) -> bytes:
    """Return the event as text; with the time, so that a clock that is wrong shows the age of a log nevertheless."""
    return f"data: {json.dumps({'now': time.time(), **value}, separators=(',', ':'))}\n\n".encode()
