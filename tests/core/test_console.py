"""What reaches the terminal, and the time left over all runs of a series."""

from __future__ import annotations

import io
import sys

import pytest
from rich.text import Text

from firth.core import console
from firth.core.console import format_time_left, run_series


def test_time_left_over_seeds_and_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks, the second three times as large, of two seeds each; a seed of the small task takes 100 s."""
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    assert format_time_left(60) == "1m00s left"
    with run_series([10, 30]) as tasks:
        for size in (1, 3):
            with run_series([1.0, 1.0]) as seeds:
                for _ in range(2):
                    now += 60 * size
                    elapsed, total = now, 2 * 100 + 2 * 300
                    assert format_time_left(40 * size) == f"{console.format_duration(total - elapsed)} left in all"
                    now += 40 * size
                    seeds.end_run()
            tasks.end_run()
    with run_series([1.0]):
        assert format_time_left(60) == "1m00s left", "one run is no series"


NAME = "a\x1b]0;title\x07\x1b[2J\rb\x9b1m\u202ec\udcff.txt:100: [red]x[/red]"  # sequences, emoji code, markup, a byte
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x0db\x9b1m\u202ec\xff.txt:100: [red]x[/red]"


def test_no_name_controls_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for show in (console.say, console.warn, console.print_error):
        show(NAME)
    monkeypatch.setattr(console.stderr_console, "_force_terminal", True)
    line = console.StatusLine(interval_s=0)
    line.show(NAME, force=True)
    monkeypatch.undo()
    assert capsys.readouterr().err == f"{SHOWN}\nnote: {SHOWN}\nerror: {SHOWN}\n\r{SHOWN[:79]}"
    console.show_table(NAME, [NAME], [(NAME,)])
    out = capsys.readouterr().out
    assert out.count(SHOWN) == 3
    assert out.replace("\n", "").isprintable()


def test_a_styled_text_is_escaped_too() -> None:
    file = io.StringIO()
    console.SafeConsole(file=file, force_terminal=True, color_system="standard").print(Text("a\x1b[2J", "bold"))
    assert file.getvalue() == "\x1b[1ma\\x1b[2J\x1b[0m\n"


def test_a_pipe_gets_a_text_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    console.print_text("a\x1b[2J")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.print_text("a\x1b[2J", end="")
    assert capsys.readouterr().out == "a\x1b[2J\na\\x1b[2J"
