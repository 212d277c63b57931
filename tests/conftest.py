"""What all tests share: quiet libraries, one thread per worker, and a small corpus."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported anywhere. Subprocesses inherit these too.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as shells have it for what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # so that Ctrl-C, in the tests of it, is one there too

NUM_DOCUMENTS = 300
ANIMALS = ["cat", "dog", "horse", "fox", "heron", "goat", "otter", "crow"]
PLACES = ["river", "garden", "harbour", "forest", "market", "bridge", "old mill", "railway station"]
PEOPLE = ["Anna", "the baker", "Mr. Grey", "a child", "the teacher", "my neighbour", "Ravi", "the sailor"]
TIMES = ["In the morning", "At noon", "Before the rain", "Last winter", "Every Sunday", "Late at night"]
VERBS = ["saw", "followed", "fed", "painted", "called", "lost", "found", "remembered"]
SENTENCES = [
    "{time}, {person} {verb} the {animal} near the {place}.",
    "The {animal} slept by the {place}, and {person} did not wake it.",
    "{person} said that the {animal} was older than the {place}.",
    "Nobody knew why the {animal} came back to the {place}.",
    "{time} the {place} is quiet; only the {animal} is there.",
    "If {person} {verb} it, the {animal} would leave the {place}.",
]


def document(rng: random.Random) -> str:
    """Two to five short sentences about one animal, one place and one person."""
    words = {"animal": rng.choice(ANIMALS), "place": rng.choice(PLACES), "person": rng.choice(PEOPLE)}
    sentences = (
        rng.choice(SENTENCES).format(time=rng.choice(TIMES), verb=rng.choice(VERBS), **words)
        for _ in range(rng.randint(2, 5))
    )
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def pytest_collection_finish() -> None:
    """Save what thousands of small runs would repeat: a tenth of the CPU time of all tests.

    Without a GPU, `torch.manual_seed` formats the stack three times, for devices that never start. Modules and tests
    live as long as the process: the garbage collector need not look at them again. What a test writes must outlive
    the test, not a power failure.
    """
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.manual_seed = torch.default_generator.manual_seed
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    os.fsync = lambda fd: None


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 300 different short English documents, split on blank lines; the same in every session."""
    rng = random.Random(0)
    documents: dict[str, None] = {}
    while len(documents) < NUM_DOCUMENTS:
        documents[document(rng)] = None
    path = tmp_path_factory.mktemp("corpus") / "animals.txt"
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def quota() -> Iterator[Callable[[int | None], None]]:
    """Limit the size of files to this many bytes: writes beyond it fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    """An interrupted command ignores Ctrl-C from then on, and so would each process that a later test starts."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture(autouse=True)
def full_precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests of a GPU compare with float32: commands set TF32 for the whole process, and so for the tests after them."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    yield
    monkeypatch.undo()
    torch.set_float32_matmul_precision(before)
