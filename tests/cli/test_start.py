"""Help and mistakes answer at once: they do not load torch, which takes seconds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import firth
from firth.cli.main import app, main

# Runs several command lines in one process, and prints the exit code of each and whether torch is loaded after it.
RUN_ALL = """
import contextlib, io, json, sys
from firth.cli.main import main
for line in json.loads(sys.argv[1]):
    sys.argv = ["firth", *line.split()]
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main()
    except SystemExit as e:
        print(e.code, "torch" in sys.modules, flush=True)
"""
MISTAKES = [
    "pretrain",
    "pretrain bert-tiny --data missing.txt --output-dir x",
    "pretrain bert-tinny --data here.txt --output-dir x",
    "pretrain bert-tiny --data here.txt --output-dir x --learning-rate fast",
    "pretrain bert-tiny --data here.txt --output-dir x model.no_such_field=3",
    "pretrain bert-tiny --data here.txt --output-dir x --no-such-option",
    "finetune missing --train missing.csv",
    "finetune missing --task classify --train missing.csv --dev missing.csv --output-dir x",
    "evaluate missing --data missing.csv",
    "evaluate missing --task perplexity",
    "predict missing text",
    "chat missing",
    "plan --fit missing",
    "check missing.txt",
    "tokenizer missing.txt --output-dir x",
    "prepare missing.txt --tokenizer missing --output-dir x",
    "show bert-tinny --data here.txt",
    "predict missing here.txt",
    "no-such-command",
    "--no-such-option",
]
RIGHT = ["--help", "--version", "pretrain --help", "pretrain --help-all", "finetune --help", "models"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("start")
    (folder / "here.txt").write_text("A text.\n")
    lines = [*RIGHT, *MISTAKES]
    given = [re.sub(r" (missing|here|x\b)", rf" {folder}/\1", line) for line in lines]
    words = [sys.executable, "-c", RUN_ALL, json.dumps(given)]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "Traceback" not in found.stderr
    assert [path.name for path in folder.iterdir()] == ["here.txt"], "a mistake writes nothing"
    return dict(zip(lines, found.stdout.splitlines(), strict=True))


def test_the_list_of_commands_cuts_no_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--help"], standalone_mode=False)
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


@pytest.mark.parametrize("line", RIGHT)
def test_help_does_not_load_torch(outcomes: dict[str, str], line: str) -> None:
    assert outcomes[line] == "0 False"


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_does_not_load_torch(outcomes: dict[str, str], line: str) -> None:
    assert outcomes[line] == "2 False"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as e:
        patch.setattr(sys, "argv", ["firth", "--version"])
        main()
    assert not e.value.code
    assert capsys.readouterr().out.startswith(f"firth {firth.__version__} (Python ")
