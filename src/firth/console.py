"""What a person sees while a verb works: lines and progress on stderr, tables on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

T = TypeVar("T")

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False)


def say(message: str) -> None:
    """One line on stderr; stdout stays free for tables and JSON."""
    err.print(escape(message))


def warn(message: str) -> None:
    """One line that a person should not miss."""
    err.print("[yellow]note:[/yellow] " + escape(message))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The table that a verb ends with."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    out.print(escape(title), soft_wrap=True)  # not the table's own title, which is broken to the table's width
    out.print(table)


def count(n: int, noun: str, several: str = "") -> str:
    """How many of something there are, in words; `several` is the plural where an s does not make it.

    >>> count(1, "file"), count(1203, "document"), count(2, "text was", "texts were")
    ('1 file', '1,203 documents', '2 texts were')
    """
    return f"{n:,} {noun if n == 1 else several or noun + 's'}"


def too_long(n: int, noun: str, length: int) -> list[str]:
    """What to say of so many texts that were cut, if of any.

    >>> too_long(2, "text", 16), too_long(0, "text", 16)
    (['2 texts were longer than 16 tokens, and cut.'], [])
    """
    return [f"{count(n, f'{noun} was', f'{noun}s were')} longer than {length} tokens, and cut."] if n else []


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(200), duration(7500)
    ('42s', '3m20s', '2h05m')
    """
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing meanwhile, such as when a file is read a second time."""
    before, err.quiet = err.quiet, True
    try:
        yield
    finally:
        err.quiet = before


def hush(still: bool = True) -> None:
    """Say nothing from here on, on stdout too; or speak again."""
    err.quiet = out.quiet = still


class Line:
    """One line that is rewritten in place on a terminal, and printed now and then elsewhere (log files, notebooks)."""

    def __init__(self, every: float = 10.0) -> None:
        self.live = err.is_terminal
        self.every = 0.2 if self.live else every
        self.last = 0.0 if self.live else time.monotonic()
        self.width = 0

    def show(self, text: str, force: bool = False) -> None:
        now = time.monotonic()
        if err.quiet or (not force and now - self.last < self.every):
            return
        self.last = now
        if self.live:
            text = text[: max(err.width - 1, 20)]
            sys.stderr.write("\r" + text.ljust(self.width))
            sys.stderr.flush()
            self.width = len(text)
        else:
            say(text)

    def close(self) -> None:
        if self.live and self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()
            self.width = 0


class Progress:
    """How far a silent phase has come: counts, rate, and time left when the end is known.

    What was `done` before, by an earlier run, counts in how far it is, and not in how fast.
    """

    def __init__(self, what: str, unit: str, total: float | None, done: float = 0.0) -> None:
        self.what, self.unit, self.total = what, unit, total
        self.done = self.before = float(done)
        self.start = time.monotonic()
        self.line = Line()

    @property
    def rate(self) -> float:
        """Units a second so far."""
        return (self.done - self.before) / max(time.monotonic() - self.start, 1e-6)

    def advance(self, n: float = 1, note: str = "") -> None:
        self.done += n
        text = f"{self.what}: {self.done:,.0f}"
        if self.total:
            left = max(self.total - self.done, 0) / max(self.rate, 1e-9)
            text += f"/{self.total:,.0f} {self.unit} ({100 * self.done / self.total:.0f}%), {duration(left)} left"
        else:
            text += f" {self.unit}, {self.rate:,.0f}/s"
        self.line.show(text + (f", {note}" if note else ""))


@contextmanager
def progress(what: str, unit: str = "items", total: float | None = None, done: float = 0.0) -> Iterator[Progress]:
    """`with progress("tokenising", "documents", n) as p: ... p.advance()`"""
    p = Progress(what, unit, total, done)
    try:
        yield p
    finally:
        p.line.close()


def track(items: Iterable[T], what: str, unit: str = "items", total: float | None = None) -> Iterator[T]:
    """Pass items on, showing how many went by."""
    with progress(what, unit, total) as p:
        for item in items:
            yield item
            p.advance()
