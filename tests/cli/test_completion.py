"""Tab completes commands, options and values, in the way in which bash and zsh ask for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMPLETED = {
    "firth pre": ["prepare", "pretrain", "predict"],
    "firth pretrain --warm": ["--warmup-steps", "--warm-start"],
    "firth pretrain bert-t": ["bert-tiny"],
    "firth pretrain enc": ["encoder", "encoder-decoder"],
    "firth pretrain encoder --objective span-c": ["span-corruption", "span-corruption-and-mlm"],
    "firth evaluate run --task word-": ["word-in-context", "word-similarity"],
    "firth tokenizer --kind byte": ["byte-bpe"],
    "firth pretrain gpt2 --parallel d": ["ddp"],
    "firth export run/final --format g": ["gguf", "glove"],
    "firth export run/final --dtype q": ["q8_0"],
    "firth export run/final --quantize i": ["int8"],
    "firth pretrain gpt2 --data a.t": [],  # the shell completes file names
}
# One process for all command lines: each would take half a second to start.
RUN_ALL = """
import contextlib, io, json, os, sys
from firth.cli.main import main
found = []
for line in json.loads(sys.argv[1]):
    os.environ |= {"_FIRTH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    sys.argv, text = ["firth"], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        main()
    found.append(text.getvalue().split())
print(json.dumps([found, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def completed() -> dict[str, list[str]]:
    words = [sys.executable, "-c", RUN_ALL, json.dumps(list(COMPLETED))]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    found, has_torch = json.loads(done.stdout)
    assert not has_torch
    return dict(zip(COMPLETED, found, strict=True))


@pytest.mark.parametrize("line", COMPLETED)
def test_completion(line: str, completed: dict[str, list[str]]) -> None:
    assert set(completed[line]) >= set(COMPLETED[line])
    assert all(word.startswith(line.split()[-1]) for word in completed[line])
    assert bool(completed[line]) == bool(COMPLETED[line])
