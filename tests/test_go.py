"""`python3 go.py test` runs every check, says which failed, and returns the first exit code."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from firth.core.console import runnable

ROOT = Path(__file__).resolve().parents[1]
# Stands for Python: `python -m TOOL ...` says its words, and fails with 3 if the file TOOL.fails is there.
FAKE_PYTHON = """#!/bin/sh
echo "ran $*"
if [ -e "$(dirname "$0")/$2.fails" ]; then exit 3; fi
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("go", ROOT / "go.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    monkeypatch.setattr(module, "PYTHON", python)
    monkeypatch.setattr(module, "install", lambda extras: None)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # go.py changes it
    return module


@pytest.mark.parametrize("fails", [[], ["ruff"], ["mypy"], ["pytest"], ["mypy", "pytest"]])
def test_every_check_runs_whatever_fails(
    go: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], fails: list[str]
) -> None:
    for tool in fails:
        (tmp_path / f"{tool}.fails").touch()
    assert go.main(["test", "tests/models"]) == (3 if fails else 0)
    shown = capfd.readouterr()
    ran = ["ruff check .", "ruff format --check .", "pytest -n 2 --dist worksteal tests/models", "mypy"]
    assert shown.out.splitlines() == [f"ran -m {step}" for step in ran]
    failed = ", ".join(step for step in ran if step.split()[0] in fails)
    assert shown.err.splitlines()[-1] == ("go.py: failed: " + failed if failed else "go.py: all checks passed")


def test_printed_commands_begin_as_the_command_did(go: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRTH_PROGRAM", "")
    monkeypatch.setattr(go.sys, "argv", ["my tools/go.py", "models"])
    started: list[list[str]] = []
    monkeypatch.setattr(go.os, "execv", lambda path, words: started.append(words))
    go.main(["models"])
    assert started[0][1:] == ["models"]
    python = Path(sys.executable).name
    assert runnable("firth predict run/final") == f"{python} 'my tools/go.py' predict run/final"


@pytest.mark.parametrize("forbidden", ["", "1"])
def test_bytecode_is_kept_in_the_environment(go: ModuleType, forbidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", forbidden)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    go.keep_bytecode()
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert os.environ.get("PYTHONPYCACHEPREFIX") == (str(go.VENV / "bytecode") if forbidden else None)
