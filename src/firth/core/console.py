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

ItemT = TypeVar("ItemT")

stderr_console = Console(stderr=True, highlight=False, soft_wrap=True)
stdout_console = Console(highlight=False)


def say(message: str) -> None:
    """One line on stderr; stdout stays free for tables and JSON."""
    stderr_console.print(escape(message))


def warn(message: str) -> None:
    """One line that a person should not miss."""
    stderr_console.print("[yellow]note:[/yellow] " + escape(message))


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """The table that a verb ends with."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    stdout_console.print(
        escape(title), soft_wrap=True
    )  # not the table's own title, which is broken to the table's width
    stdout_console.print(table)


def format_count(n: int, noun: str, plural: str = "") -> str:
    """How many of something there are, in words; `plural` is the plural where an s does not make it.

    >>> format_count(1, "file"), format_count(1203, "document"), format_count(2, "text was", "texts were")
    ('1 file', '1,203 documents', '2 texts were')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def truncation_messages(n: int, noun: str, max_length_tokens: int) -> list[str]:
    """What to say of so many texts that were cut, if of any.

    >>> truncation_messages(2, "text", 16), truncation_messages(0, "text", 16)
    (['2 texts were longer than 16 tokens, and cut.'], [])
    """
    return (
        [f"{format_count(n, f'{noun} was', f'{noun}s were')} longer than {max_length_tokens} tokens, and cut."]
        if n
        else []
    )


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(42), format_duration(200), format_duration(7500)
    ('42s', '3m20s', '2h05m')
    """
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


@contextmanager
def quiet() -> Iterator[None]:
    """Say nothing meanwhile, such as when a file is read a second time."""
    before, stderr_console.quiet = stderr_console.quiet, True
    try:
        yield
    finally:
        stderr_console.quiet = before


def set_quiet(enabled: bool = True) -> None:
    """Say nothing from here on, on stdout too; or speak again."""
    stderr_console.quiet = stdout_console.quiet = enabled


class StatusLine:
    """One line that is rewritten in place on a terminal, and printed now and then elsewhere (log files, notebooks)."""

    def __init__(self, interval_s: float = 10.0) -> None:
        self.is_live = stderr_console.is_terminal
        self.interval_s = 0.2 if self.is_live else interval_s
        self.last_shown_s = 0.0 if self.is_live else time.monotonic()
        self.width = 0

    def show(self, text: str, force: bool = False) -> None:
        now = time.monotonic()
        if stderr_console.quiet or (not force and now - self.last_shown_s < self.interval_s):
            return
        self.last_shown_s = now
        if self.is_live:
            text = text[: max(stderr_console.width - 1, 20)]
            sys.stderr.write("\r" + text.ljust(self.width))
            sys.stderr.flush()
            self.width = len(text)
        else:
            say(text)

    def close(self) -> None:
        if self.is_live and self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()
            self.width = 0


class Progress:
    """How far a silent phase has come: counts, rate, and time left when the end is known.

    What was `initial` before, by an earlier run, counts in how far it is, and not in how fast.
    """

    def __init__(self, description: str, unit: str, total: float | None, initial: float = 0.0) -> None:
        self.description, self.unit, self.total = description, unit, total
        self.done = self.initial = float(initial)
        self.start_s = time.monotonic()
        self.status_line = StatusLine()

    @property
    def rate(self) -> float:
        """Units a second so far."""
        return (self.done - self.initial) / max(time.monotonic() - self.start_s, 1e-6)

    def advance(self, n: float = 1, note: str = "") -> None:
        self.done += n
        text = f"{self.description}: {self.done:,.0f}"
        if self.total:
            left = max(self.total - self.done, 0) / max(self.rate, 1e-9)
            text += (
                f"/{self.total:,.0f} {self.unit} ({100 * self.done / self.total:.0f}%), {format_duration(left)} left"
            )
        else:
            text += f" {self.unit}, {self.rate:,.0f}/s"
        self.status_line.show(text + (f", {note}" if note else ""))


@contextmanager
def progress(
    description: str, unit: str = "items", total: float | None = None, initial: float = 0.0
) -> Iterator[Progress]:
    """`with progress("tokenising", "documents", n) as p: ... p.advance()`"""
    p = Progress(description, unit, total, initial)
    try:
        yield p
    finally:
        p.status_line.close()


def track(items: Iterable[ItemT], description: str, unit: str = "items", total: float | None = None) -> Iterator[ItemT]:
    """Pass items on, showing how many went by."""
    with progress(description, unit, total) as p:
        for item in items:
            yield item
            p.advance()
