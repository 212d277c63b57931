"""Tables in pipes and on terminals."""

from __future__ import annotations

import io

import pytest

from firth.core import console

NAME, WORDS = "a-checkpoint-with-a-name-of-more-than-eighty-characters/" + 40 * "x" + "/final", 12 * "long text "


def table(monkeypatch: pytest.MonkeyPatch, **options: object) -> str:
    file = io.StringIO()
    monkeypatch.setattr(console, "stdout_console", console.SafeConsole(file=file, **options))
    console.show_table("Title", ["name", "text", "score"], [(NAME, WORDS.strip(), 0.5), ("short", "", 1)])
    return file.getvalue()


def test_a_piped_table_has_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = table(monkeypatch).splitlines()
    assert len(lines) == 7
    assert NAME in lines[4]
    assert WORDS.strip() in lines[4]


@pytest.mark.parametrize("options", [{"force_terminal": True, "color_system": None}, {}])
def test_a_narrow_table_wraps_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    text = table(monkeypatch, **options)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 60
    cells = "".join(line.split("│")[1].strip() for line in text.splitlines() if "│" in line)
    assert NAME in cells
