"""`firth prepare`, really killed at any moment: resumed, it writes the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from firth.core.files import find_corruption
from firth.text import Corpus
from firth.tokens import load_tokenizer, prepare, train_tokenizer

SOURCE = Path(__file__).parents[2] / "src"
# As the verb does it, in little chunks and without what a model needs: most of the time goes into the work.
PROGRAM = """
import sys
from importlib import import_module
from firth.text import Corpus
from firth.tokens import load_tokenizer
module = import_module("firth.tokens.prepare")
module.CHUNK_DOCUMENTS, module.MIN_PARALLEL_BYTES = 20, 0
text, tokenizer, folder, workers, dedup = sys.argv[1:]
corpus = Corpus([text])
print("begun", flush=True)
used, workers = load_tokenizer(tokenizer), int(workers)
module.prepare(corpus, used, folder, 0.2, total_bytes=1, workers=workers, dedup=dedup, resume=True)
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    words = [
        "the",
        "heron",
        "waits",
        "at",
        "a",
        "river",
        "where",
        "Mr.",
        "Grey",
        "saw",
        "it",
        "rise",
        "again.",
        "Nobody",
        "knows",
        "why!",
    ]
    file = tmp_path_factory.mktemp("text") / "text.txt"
    paragraphs = [" ".join(rng.choices(words, k=rng.randint(20, 400))) for _ in range(1500)]
    paragraphs[9::10] = [f"{paragraph} again" for paragraph in paragraphs[8::10]]  # near duplicates
    file.write_text("\n\n".join(paragraphs))
    return file


@pytest.fixture(scope="module")
def whole(text: Path) -> Path:
    corpus, folder = Corpus([text]), text.parent / "whole"
    prepare(corpus, train_tokenizer(corpus.texts(), "byte-bpe", 300), folder, 0.2)
    return folder


def start(text: Path, whole: Path, folder: Path, workers: int, dedup: str = "exact") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(text), str(whole / "tokenizer"), str(folder), str(workers), dedup]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-s", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


@pytest.mark.parametrize(("workers", "dedup"), [(1, "exact"), pytest.param(2, "near", marks=pytest.mark.slow)])
def test_killed_at_any_moment(text: Path, whole: Path, tmp_path: Path, workers: int, dedup: str) -> None:
    rng = random.Random(workers)
    for _ in range(4):
        process = start(text, whole, tmp_path / "s", workers, dedup)
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(rng.uniform(0, 1.5))
        process.kill()
        process.wait()
        end = time.monotonic() + 300
        while children(process.pid):  # workers end by themselves when their pipe does
            assert time.monotonic() < end, "a worker outlives the process that it works for"
            time.sleep(0.05)
        assert find_corruption(tmp_path / "s") is None or not (tmp_path / "s").exists()
    process = start(text, whole, tmp_path / "s", workers, dedup)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    if dedup == "near":
        whole = tmp_path / "near"
        facts = prepare(Corpus([text]), load_tokenizer(tmp_path / "s" / "tokenizer"), whole, 0.2, dedup="near")
        assert facts["duplicates"] > 100
    assert files(tmp_path / "s") == files(whole)


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_interrupted_by_the_keyboard(text: Path, whole: Path, tmp_path: Path) -> None:
    process = start(text, whole, tmp_path / "s", 2)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    journal, end = tmp_path / ".s.journal", time.monotonic() + 300
    while not (journal.is_file() and journal.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < end
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to workers too
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGINT
    assert not children(process.pid)
    assert not (tmp_path / "s").exists()
    assert journal.read_bytes().count(b"\n") > 2
