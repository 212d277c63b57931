"""Console output of the commands: messages and progress on stderr, tables on stdout.

File names and texts come from others, and an escape sequence in one could retitle the window, hide a line or fake one.
So every message passes `escape_controls` here, at the last step before the terminal.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from firth.core.errors import shorten_words

ItemT = TypeVar("ItemT")
MAX_PIPED_COLUMNS = 10_000  # width of a table that is not wrapped
# Control characters but line ends and tabs, marks that reverse the direction of text, and surrogates: the bytes of a
# file name that is not UTF-8.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Return a text whose control characters are visible instead of obeyed; line ends and tabs stay.

    >>> escape_controls("a\\x1b[2Jb"), escape_controls("caf\\udce9.txt"), escape_controls("naïve\\t字")
    ('a\\\\x1b[2Jb', 'caf\\\\xe9.txt', 'naïve\\t字')
    """
    return CONTROLS.sub(_escape_control, text)


def _escape_control(match: re.Match[str]) -> str:
    code = ord(match[0])
    code -= 0xDC00 if 0xDC80 <= code <= 0xDCFF else 0  # PEP 383: the byte that could not be decoded
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class SafeConsole(Console):
    """A console without markup and emoji codes (`e.txt:100:` is a line of a file) that escapes control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, force_jupyter=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def is_notebook() -> bool:
    """Whether this process is the kernel of a Jupyter notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


# A notebook shows stderr as if it were an error, and calls itself a terminal, though it keeps every line.
_NOTEBOOK_OPTIONS: dict[str, Any] = {"force_terminal": False} if is_notebook() else {}
stderr_console = SafeConsole(stderr=not is_notebook(), soft_wrap=True, **_NOTEBOOK_OPTIONS)
stdout_console = SafeConsole(**_NOTEBOOK_OPTIONS)


def say(message: str) -> None:
    """Print one line on stderr; stdout stays free for tables and JSON."""
    stderr_console.print(
        escape_controls(shorten_words(message))
    )  # rich removes some control characters instead of showing them


def warn(message: str) -> None:
    """Print one highlighted line on stderr."""
    stderr_console.print(Text.assemble(("note:", "yellow"), " ", escape_controls(shorten_words(message))))


def print_error(message: str) -> None:
    """Print the error that ends a command on stderr."""
    stderr_console.print(Text.assemble(("error:", "red"), " ", escape_controls(shorten_words(message))))


def print_text(text: str, end: str = "\n") -> None:
    """Print a text on stdout as it is; a terminal gets it with its control characters escaped."""
    print(escape_controls(text) if sys.stdout.isatty() else text, end=end, flush=True)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table on stdout, the first column left-aligned and the others right-aligned.

    On a terminal long cells wrap. In a pipe or a file a row stays one line, so that `grep` and `cut` find whole names;
    COLUMNS in the environment wraps it there too.
    """
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(escape_controls(column), justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(escape_controls(str(cell)) for cell in row))
    stdout_console.print(escape_controls(title), soft_wrap=True)  # Table(title=...) would wrap it at the table's width
    if stdout_console.is_terminal or "COLUMNS" in os.environ:
        stdout_console.print(table)
        return
    unlimited = stdout_console.options.update(max_width=MAX_PIPED_COLUMNS)
    before, stdout_console.width = stdout_console.width, stdout_console.measure(table, options=unlimited).maximum
    try:
        stdout_console.print(table)
    finally:
        stdout_console.width = before


def escape_character(c: str) -> str:
    """Return a printable form of a character, so that no text controls the terminal.

    >>> escape_character("a"), escape_character(" "), escape_character("\\n"), escape_character("\\x1b")
    ('a', '␣', '⏎', '\\\\x1b')
    """
    named = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return named.get(c) or (c if c.isprintable() else c.encode("unicode_escape").decode())


def format_count(n: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun; `plural` is needed where an s does not form the plural.

    >>> format_count(1, "file"), format_count(1203, "document"), format_count(2, "text was", "texts were")
    ('1 file', '1,203 documents', '2 texts were')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def truncation_messages(n: int, noun: str, max_length_tokens: int) -> list[str]:
    """Return a message about `n` truncated texts, or no message if `n` is 0.

    >>> truncation_messages(2, "text", 16), truncation_messages(0, "text", 16)
    (['2 texts were longer than 16 tokens, and cut.'], [])
    """
    count = format_count(n, f"{noun} was", f"{noun}s were")
    return [f"{count} longer than {max_length_tokens} tokens, and cut."] if n else []


def program() -> list[str]:
    """Return how this environment starts firth: by go.py if that started it, by its name if that is on the path."""
    own = ["firth"] if shutil.which("firth") else [sys.executable, "-m", "firth"]
    return shlex.split(os.environ.get("FIRTH_PROGRAM", "")) or own


def runnable(command: str) -> str:
    """Return a command of firth as this environment starts it.

    >>> runnable("firth predict run/final") == shlex.join([*program(), "predict", "run/final"]), runnable("")
    (True, '')
    """
    return shlex.join(program()) + command.removeprefix("firth") if command.startswith("firth ") else command


def format_passes(passes: float) -> str:
    """
    >>> format_passes(0.0312), format_passes(1.0), format_passes(22.96)
    ('0.03 passes', '1.00 passes', '23.0 passes')
    """
    return f"{passes:.{2 if passes < 10 else 1}f} passes"


def format_duration(seconds: float) -> str:
    """Format a duration for a status line.

    >>> format_duration(42), format_duration(200), format_duration(7500)
    ('42s', '3m20s', '2h05m')
    """
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn any error inside the block into a warning: a report must not fail a run whose model is written."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as e:
        warn(f"the report could not be written ({type(e).__name__}: {e}). The run itself is not affected.")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence stderr inside the `with` block, for example while a file is read a second time."""
    before, stderr_console.quiet = stderr_console.quiet, True
    try:
        yield
    finally:
        stderr_console.quiet = before


def set_quiet(enabled: bool = True) -> None:
    """Silence stderr and stdout, or turn them on again."""
    stderr_console.quiet = stdout_console.quiet = enabled


class OverallProgress:
    """A bar over all phases of a command, by time, in front of the status line of each phase."""

    WIDTH = 16

    def __init__(self, elapsed_s: Callable[[], float], total_s: float) -> None:
        self.elapsed_s, self.total_s = elapsed_s, total_s

    def __str__(self) -> str:
        share = min(self.elapsed_s() / self.total_s, 0.99)
        done = round(share * self.WIDTH)
        return f"[{'#' * done}{'-' * (self.WIDTH - done)}] {100 * share:.0f}%  "


@contextmanager
def overall_progress(elapsed_s: Callable[[], float], total_s: float) -> Iterator[None]:
    """Show one bar over everything inside the `with` block, which takes about `total_s`."""
    StatusLine.overall = OverallProgress(elapsed_s, total_s)
    try:
        yield
    finally:
        StatusLine.overall = None


def extend_overall_progress(seconds: float) -> None:
    """Add seconds to the expected time of the command's bar, if there is one."""
    if StatusLine.overall is not None:
        StatusLine.overall.total_s += seconds


class StatusLine:
    """A line that is rewritten in place on a terminal, and printed every `interval_s` in log files and notebooks."""

    overall: OverallProgress | None = None  # of the command, in front of every line

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
        text = escape_controls(f"{self.overall or ''}{text}")
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


class RunSeries:
    """Runs one after the other, such as the seeds of a fine-tuning; the time of a run is proportional to its size.

    Series can be nested: the tasks of a suite, and the seeds of each task.
    """

    def __init__(self, sizes: Sequence[float]) -> None:
        self.sizes, self.num_done = sizes, 0
        self.start_s = time.monotonic()

    def end_run(self) -> None:
        self.num_done += 1

    def seconds_left(self, run_seconds_left: float) -> float:
        """Return the seconds to the end of the series, given those to the end of the current run."""
        seconds = time.monotonic() - self.start_s + run_seconds_left
        begun, later = sum(self.sizes[: self.num_done + 1]), sum(self.sizes[self.num_done + 1 :])
        return run_seconds_left + later * seconds / max(begun, 1e-9)


_open_series: list[RunSeries] = []  # the outermost first


@contextmanager
def run_series(sizes: Sequence[float]) -> Iterator[RunSeries]:
    """Let status lines inside the block show the time left over all runs: `series.end_run()` follows each of them."""
    _open_series.append(RunSeries(sizes))
    try:
        yield _open_series[-1]
    finally:
        _open_series.pop()


def format_time_left(run_seconds_left: float) -> str:
    """Format the time left for a status line: of this run, or of the whole series where it is one of several.

    >>> format_time_left(200)
    '3m20s left'
    """
    left = run_seconds_left
    for series in reversed(_open_series):
        left = series.seconds_left(left)
    is_one_of_several = any(len(series.sizes) > 1 for series in _open_series)
    return f"{format_duration(left)} left" + (" in all" if is_one_of_several else "")


class Progress:
    """Progress of one phase: count, rate, and time left when the total is known.

    `initial` units were done by an earlier run: they count in the total, not in the rate.
    """

    def __init__(self, description: str, unit: str, total: float | None, initial: float = 0.0) -> None:
        self.description, self.unit, self.total = description, unit, total
        self.done = self.initial = float(initial)
        self.start_s = time.monotonic()
        self.status_line = StatusLine()

    @property
    def rate(self) -> float:
        """Units per second since the start."""
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
    """Show progress while the block runs: `with progress("tokenizing", "documents", n) as p: ... p.advance()`."""
    p = Progress(description, unit, total, initial)
    try:
        yield p
    finally:
        p.status_line.close()


def track(items: Iterable[ItemT], description: str, unit: str = "items", total: float | None = None) -> Iterator[ItemT]:
    """Yield the items and show how many were yielded."""
    with progress(description, unit, total) as p:
        for item in items:
            yield item
            p.advance()
