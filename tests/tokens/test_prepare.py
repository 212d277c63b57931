"""Shards do not depend on the number of processes or on interruptions."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from firth.core.console import Progress
from firth.core.errors import UserError
from firth.core.files import find_corruption
from firth.text import Corpus, Document
from firth.text.exact_dedup import DiskFingerprintSet
from firth.text.minhash import MinHashIndex
from firth.text.salient_spans import find_salient_spans
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.boundaries import find_last_tokens, find_last_tokens_by_offset, sentence_end_offsets
from firth.tokens.encode import DocumentEncoder
from firth.tokens.prepare import plan_resources, prepare
from firth.tokens.shard_writer import AppendOnlyFile, npy_header, remove_finished_journal
from firth.tokens.shards import open_shards
from firth.tokens.workers import EncodeWorker

preparing = import_module("firth.tokens.prepare")  # the name in the package is the function

TEXTS = [f"The heron number {i} waits. Mr. Grey saw it {i % 7} times!\nÉtude — the river's heron." for i in range(60)]
MIXED = [
    *(Document(text, f"a.txt:{i}") for i, text in enumerate(TEXTS)),
    *(Document(text, "b.txt", text_pair=text[::-1]) for text in TEXTS[:20]),
    *(Document("的河" * i, "c.jsonl", word_starts=(0, 1)) for i in range(1, 9)),
    *(Document(text, "d.txt") for text in TEXTS[:10]),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, "byte-bpe", 300)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 7)


def make(tokenizer: Tokenizer, folder: Path, documents: Any = None, **options: Any) -> dict[str, Any]:
    options = {"held_out_share": 0.3, "salient": find_salient_spans, **options}
    return prepare(MIXED if documents is None else documents, tokenizer, folder, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def whole(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "s"
    make(tokenizer, folder)
    return folder


def stopped(after: int, error: BaseException) -> Iterator[Document]:
    yield from islice(MIXED, after)
    raise error


# --- processes ----------------------------------------------------------------------------------------------------


def test_any_number_of_workers_writes_the_same_bytes(tokenizer: Tokenizer, whole: Path, tmp_path: Path) -> None:
    make(tokenizer, tmp_path / "s", workers=3)
    assert contents(tmp_path / "s") == contents(whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


def test_an_error_in_a_worker_reaches_the_user(tokenizer: Tokenizer, tmp_path: Path) -> None:
    encoder = DocumentEncoder(tokenizer, 0.0, "en", find_salient=elsewhere)
    tokenizer.save(tmp_path)
    worker = EncodeWorker(encoder, tmp_path)
    try:
        with pytest.raises(UserError, match=r"a.txt:1: the salient span \(5, 9\) is empty or outside"):
            worker([Document("abc", "a.txt:1")])
        (train, aside), _ = worker([Document("the heron", "a.txt:2")])
        assert train.tokens.tolist() == tokenizer.encode("the heron")
        assert not len(aside.tokens)
    finally:
        worker.close()


def elsewhere(text: str) -> list[tuple[int, int]]:
    """Salient spans that lie outside of short texts."""
    return [(5, 9)]


def test_a_worker_that_dies_is_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    worker = EncodeWorker(DocumentEncoder(tokenizer, 0.0, "en"), tmp_path)
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(UserError, match=r"died \(exit code -9.*--resume"):
        worker([Document("abc", "a.txt:1")])
    worker.close()


def test_a_function_without_a_name_stays_in_this_process(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = make(tokenizer, tmp_path / "s", workers=2, salient=lambda text: [(0, 1)])
    assert facts["train"]["salient"] >= facts["train"]["documents"]
    assert "this process works alone" in capsys.readouterr().err


def test_memory_and_small_texts_speak_for_fewer_workers(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "process_memory_bytes", lambda: 100_000_000)
    encoder = DocumentEncoder(tokenizer, 0.0, "en")
    assert plan_resources(4, None, None, encoder).num_workers == 4
    assert plan_resources(4, None, 1000, encoder).num_workers == 1
    few = plan_resources(4, 280_000_000, None, encoder)
    assert few.num_workers == 2
    assert few.chunk_characters < preparing.CHUNK_CHARACTERS
    assert plan_resources(4, 2_000_000_000, None, encoder).chunk_characters == preparing.CHUNK_CHARACTERS
    with pytest.raises(UserError, match=r"--max-memory is too small: at least 120MB are needed"):
        plan_resources(4, 100_000_000, None, encoder)
    with pytest.raises(UserError, match="--workers is -1"):
        plan_resources(-1, None, None, encoder)


# --- stopped and resumed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 5, 7, 50, 71, 97])
def test_resumed_shards_are_the_same_bytes(tokenizer: Tokenizer, whole: Path, tmp_path: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(after, KeyboardInterrupt()))
    assert (tmp_path / ".s.part").exists() == (after >= 7)
    facts = make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)
    assert facts["duplicates"] == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]


def test_without_resume_it_starts_anew(tokenizer: Tokenizer, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()), held_out_share=0.1)
    make(tokenizer, tmp_path / "s")
    assert contents(tmp_path / "s") == contents(whole)


def test_incomplete_shards_are_rebuilt(tokenizer: Tokenizer, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()))
    part, journal = tmp_path / ".s.part" / "train", tmp_path / ".s.journal"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines) + '\n{"documents": 56, "tra')  # a line that was cut off
    data = bytearray((part / "tokens.bin").read_bytes())
    data[json.loads(lines[3])["train"]["files"]["tokens.bin"][0] + 1] ^= 1  # after the third chunk
    (part / "tokens.bin").write_bytes(data + b"not in the journal")
    (part / "words.bin").write_bytes((part / "words.bin").read_bytes()[:-1])
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(21, KeyboardInterrupt()), resume=True)
    assert len(journal.read_text().splitlines()) == 1 + 3
    make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"null", b'{"train": {"files": {"tokens.bin": [1]}}}', b"[" * 99_999])
def test_a_damaged_journal_is_cut_back(tokenizer: Tokenizer, whole: Path, tmp_path: Path, damage: bytes) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()))
    lines = (tmp_path / ".s.journal").read_bytes().splitlines()
    (tmp_path / ".s.journal").write_bytes(b"\n".join([*lines[:2], damage, *lines[3:], b""]))
    make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)


@pytest.mark.parametrize("name", [".s.part", ".s.part/train", ".s.part/train/tokens.bin", ".s.part/tokenizer"])
def test_links_in_unfinished_shards_lead_nowhere(
    tokenizer: Tokenizer, whole: Path, tmp_path: Path, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()))
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine"
    (tmp_path / name).rename(elsewhere)
    before = elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere)
    (tmp_path / name).symlink_to(elsewhere)
    make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)
    assert before == (elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere))


def test_the_journal_of_finished_shards_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".s.journal").write_text("{}")
    (tmp_path / ".s.part").mkdir()
    remove_finished_journal(tmp_path / "s")
    assert (tmp_path / ".s.journal").exists()
    (tmp_path / ".s.part").rmdir()
    remove_finished_journal(tmp_path / "s")
    assert not (tmp_path / ".s.journal").exists()


def test_a_journal_that_is_a_link_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / ".s.journal").symlink_to(tmp_path / "thesis.txt")
    with pytest.raises(UserError, match=r"\.s\.journal is a symbolic link"):
        make(tokenizer, tmp_path / "s")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_stopped_while_it_finishes(
    tokenizer: Tokenizer, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("firth.core.files.swap_folder", fail)
        make(tokenizer, tmp_path / "s")
    assert (tmp_path / ".s.part" / "manifest.json").is_file()
    read: list[int] = []
    monkeypatch.setattr(DocumentEncoder, "__call__", lambda *_: read.append(1))
    make(tokenizer, tmp_path / "s", resume=True)
    assert not read, "nothing is tokenised twice"
    assert contents(tmp_path / "s") == contents(whole)


def test_another_text_or_other_options_raise(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()))
    with pytest.raises(UserError, match=r"these settings differ \(held_out_share: 0.3 -> 0.1\)"):
        make(tokenizer, tmp_path / "s", resume=True, held_out_share=0.1)
    for other in (MIXED[1:], MIXED[:20]):
        with pytest.raises(UserError, match="the first documents of the text differ"):
            make(tokenizer, tmp_path / "s", other, resume=True)
    make(tokenizer, tmp_path / "s", resume=True)


def test_a_full_disk(tokenizer: Tokenizer, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 6000

    def write(grown: AppendOnlyFile, data: bytes) -> None:
        nonlocal free_bytes
        grown.file.write(data[:free_bytes])
        free_bytes -= len(data)
        if free_bytes < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_write(grown, data[len(data) :])
        grown.size, grown.crc = grown.size + len(data), crc32(data, grown.crc)

    real_write = AppendOnlyFile.write
    with monkeypatch.context() as patch:
        patch.setattr(AppendOnlyFile, "write", write)
        with pytest.raises(UserError, match=r"no space is left on the disk. The work so far is saved.*--resume"):
            make(tokenizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len((tmp_path / ".s.journal").read_text().splitlines()) > 2
    make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)
    assert find_corruption(tmp_path / "s") is None


def test_one_broken_file_among_good_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, text in {"a": "The heron waits.", "b": "It sleeps.", "c": "Mr. Grey left."}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    good = (tmp_path / "b.txt").read_bytes()
    (tmp_path / "b.txt").write_bytes(b"It \xffsleeps.")
    with pytest.raises(UserError, match=r"b.txt:1: not UTF-8, see byte 3 of its text"):
        prepare(Corpus([tmp_path]), tokenizer, tmp_path / "s", 0.0)
    assert not (tmp_path / "s").exists()
    (tmp_path / "b.txt").write_bytes(good)
    assert prepare(Corpus([tmp_path]), tokenizer, tmp_path / "s", 0.0, resume=True)["documents"] == 3


def test_two_processes_do_not_write_the_same_shards(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def within() -> Iterator[Document]:
        yield from MIXED
        with pytest.raises(UserError, match="is being prepared by another process"):
            make(tokenizer, tmp_path / "s")

    make(tokenizer, tmp_path / "s", within())
    open_shards(tmp_path / "s")


def test_a_journal_that_was_removed_before_the_lock_is_made_anew(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, found = fcntl.flock, list[bool]()

    def flock(*args: Any) -> None:
        if not found:
            (tmp_path / ".s.journal").unlink()
        lock(*args)
        found.append((tmp_path / ".s.journal").exists())

    monkeypatch.setattr(fcntl, "flock", flock)
    make(tokenizer, tmp_path / "s")
    assert found == [False, True]


# --- how far it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_progress_is_the_share_of_the_source(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """Whatever the source is packed in, and when it is resumed too."""
    text = "\n\n".join(f"Heron {i} waits {i * 7919 % 10007}." for i in range(8000)).encode()
    file, shown = tmp_path / f"a.txt{packing}", list[str]()
    file.write_bytes(gzip.compress(text) if packing else text)
    monkeypatch.setattr("firth.core.console.StatusLine.show", lambda line, text, force=False: shown.append(text))
    monkeypatch.setattr(preparing, "CHUNK_DOCUMENTS", 800)
    monkeypatch.setattr("firth.text.open_text.READ_CHUNK_BYTES", 4096)

    def shares(what: str) -> list[int]:
        return [int(line.partition("(")[2].partition("%")[0]) for line in shown if line.startswith(what)]

    corpus = Corpus([file])
    size = len(file.read_bytes())
    prepare(corpus, tokenizer, tmp_path / "s", total_bytes=corpus.total_bytes)
    assert all(f"/{size:,} bytes (" in line and "MB/s" in line for line in shown if line.startswith("tokenizing"))
    whole = shares("tokenizing")
    assert whole == sorted(whole)
    assert whole[-1] == 100
    assert packing or 20 < whole[4] < 80, "half of the chunks"  # a small .gz is read at once
    shown.clear()
    added, real = [], preparing.ShardWriter.append_chunk

    def add(*parts: Any, **facts: Any) -> None:
        if len(added) == 5:
            raise KeyboardInterrupt
        added.append(real(*parts, **facts))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(preparing.ShardWriter, "append_chunk", add)
        prepare(corpus, tokenizer, tmp_path / "t", total_bytes=corpus.total_bytes)
    shown.clear()
    prepare(corpus, tokenizer, tmp_path / "t", total_bytes=corpus.total_bytes, resume=True)
    assert shares("skipping finished documents")[-1] == 100
    assert shares("tokenizing") == whole[5:], "what was done before counts"


def test_the_remaining_time_is_estimated_from_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0, 10.0, 10.0])
    monkeypatch.setattr("firth.core.console.time.monotonic", lambda: next(clock))
    shown: list[str] = []
    monkeypatch.setattr("firth.core.console.StatusLine.show", lambda line, text, force=False: shown.append(text))
    p = Progress("reading", "bytes", 1000, initial=500)
    p.advance(100)
    assert shown == ["reading: 600/1,000 bytes (60%), 40s left"]


def test_a_text_that_was_read_before_has_no_other_time_left(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may have learned from the same corpus, whose position is at its end then."""
    file = tmp_path / "text.txt"
    file.write_text("\n\n".join(f"The heron waits for fish number {i}." for i in range(200)))
    corpus = Corpus([file])
    assert len(list(corpus)) == 200
    began: list[float] = []
    monkeypatch.setattr("firth.core.console.StatusLine.show", lambda line, text, force=False: None)
    real = Progress.__init__
    monkeypatch.setattr(Progress, "__init__", lambda p, *given: began.append(given[-1]) or real(p, *given))
    prepare(corpus, tokenizer, tmp_path / "s", total_bytes=corpus.total_bytes)
    assert began
    assert not any(began)


def test_a_source_that_cannot_tell_counts_documents(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("firth.core.console.StatusLine.show", lambda line, text, force=False: shown.append(text))
    make(tokenizer, tmp_path / "s", total_bytes=10**6)
    assert all(line.startswith("tokenizing: ") and " documents, " in line and "left" not in line for line in shown)


# --- duplicates ---------------------------------------------------------------------------------------------------


def test_dedup_modes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(60)]
    near = [" ".join(words), " ".join([*words[:-1], "other"]), " ".join(words[::-1]), " ".join(words)]
    found = [Document(text, "a") for text in near]
    for dedup, kept in (("none", 4), ("exact", 3), ("near", 2)):
        facts = prepare(found, tokenizer, tmp_path / dedup, held_out_share=0, dedup=dedup)
        assert (facts["documents"], facts["duplicates"], facts["dedup"]) == (kept, 4 - kept, dedup)


def plant(n: int) -> list[Document]:
    """Texts of which every third is nearly the one before it, and every seventh the same as an earlier one."""
    rng, found = np.random.default_rng(0), []
    for i in range(n):
        words = [f"word{j}" for j in rng.integers(5000, size=60)]
        if i % 3 == 2:
            words = [*found[-1].split()[:-1], "other"]
        found.append(found[rng.integers(len(found))] if i % 7 == 6 else " ".join(words))
    return [Document(text, f"a.txt:{i}") for i, text in enumerate(found)]


PLANTED = plant(150)


@pytest.fixture(scope="module")
def near(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of planted near duplicates, each looked up where it stands."""
    folder, minhash, kept = tmp_path_factory.mktemp("near") / "s", MinHashIndex(), list[Document]()
    exact: set[str] = set()
    for document in PLANTED:
        if document.text not in exact and not minhash.check_and_add(document.text):
            kept.append(document)
        exact.add(document.text)
    make(tokenizer, folder, kept, dedup="none")
    assert 80 < len(kept) < 100
    return folder


def tokens(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_sign_and_the_same_documents_stay(
    tokenizer: Tokenizer, near: Path, tmp_path: Path, workers: int
) -> None:
    facts = make(tokenizer, tmp_path / "s", PLANTED, dedup="near", workers=workers)
    assert tokens(tmp_path / "s") == tokens(near)
    assert facts["duplicates"] == len(PLANTED) - facts["documents"] > 40
    assert "near_texts" not in facts, "nothing was forgotten, so memory has decided nothing"


@pytest.mark.parametrize(("after", "workers"), [(20, 1), (64, 2), (150, 1)])
def test_resumed_near_duplicates_are_the_same(
    tokenizer: Tokenizer, near: Path, tmp_path: Path, after: int, workers: int
) -> None:
    def stopped() -> Iterator[Document]:
        yield from PLANTED[:after]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(), dedup="near", workers=workers)
    facts = make(tokenizer, tmp_path / "s", PLANTED, dedup="near", workers=workers, resume=True)
    assert tokens(tmp_path / "s") == tokens(near)
    assert facts["duplicates"] == len(PLANTED) - facts["documents"]
    assert facts["source"]["documents"] == len(PLANTED)


def test_a_resume_keeps_the_memory_limit(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeated text is found with much memory and not with little; a resume keeps the first limit."""
    monkeypatch.setattr("firth.text.minhash.INITIAL_CAPACITY_TEXTS", 16)
    for name, value in {"process_memory_bytes": int, "release_freed_memory": int, "MIN_CHUNK_CHARACTERS": 10}.items():
        monkeypatch.setattr(preparing, name, value)
    again = Document(" ".join([*PLANTED[0].text.split()[:-1], "again"]), "b.txt")
    documents = [*PLANTED, again]
    little = make(tokenizer, tmp_path / "little", documents, dedup="near", max_memory=2**17)
    much = make(tokenizer, tmp_path / "much", documents, dedup="near", max_memory=2**24)
    assert little["documents"] > much["documents"]
    assert little["near_texts"] == 16

    def stopped() -> Iterator[Document]:
        yield from documents[:100]
        raise KeyboardInterrupt

    for name, begun, memory in (("little", 2**17, 2**24), ("much", 2**24, 2**21)):
        with pytest.raises(KeyboardInterrupt):
            make(tokenizer, tmp_path / "s", stopped(), dedup="near", max_memory=begun)
        capsys.readouterr()
        make(tokenizer, tmp_path / "s", documents, dedup="near", max_memory=memory, resume=True)
        assert "continues as it began: it compares each text with the last" in capsys.readouterr().err
        assert contents(tmp_path / "s") == contents(tmp_path / name)


def test_a_worker_that_dies_while_others_wait_for_their_turn(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, signatures: Any) -> list[int]:
        raise UserError("no turn today")

    monkeypatch.setattr("firth.tokens.dedup.DuplicateFilter.select_new", fail)
    with pytest.raises(UserError, match="no turn today"):
        make(tokenizer, tmp_path / "s", PLANTED, dedup="near", workers=3)


def test_seen_texts_in_little_memory(tmp_path: Path) -> None:
    marks = [int(i).to_bytes(8, "little") for i in np.random.default_rng(0).integers(2**63, size=5000)]
    seen = DiskFingerprintSet(tmp_path / "seen", max_cache_bytes=2**16)
    assert all(seen.is_new(mark) for mark in marks)
    assert (tmp_path / "seen").stat().st_size > 2**16
    assert not any(seen.is_new(mark) for mark in marks)
    seen.close()
    assert not (tmp_path / "seen").exists()


def test_no_disk_space_for_fingerprints(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow: sqlite reports a full disk by an error of its own."""
    program = """
import resource, sys
from importlib import import_module
from firth.text import Document
from firth.tokens import load_tokenizer
module = import_module("firth.tokens.prepare")
resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
module.CHUNK_DOCUMENTS = 100_000  # nothing is written but what was seen
module.plan_resources = lambda *_: module.ResourcePlan(1, 10**9, 2**12)
try:
    documents = (Document(str(i), "a.txt") for i in range(50_000))
    module.prepare(documents, load_tokenizer(sys.argv[1]), sys.argv[2], 0.0)
except Exception as e:
    print(type(e).__name__, e)
"""
    tokenizer.save(tmp_path / "t")
    command = [sys.executable, "-c", program, str(tmp_path / "t"), str(tmp_path / "s")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"UserError {tmp_path / '.s.part'}: no space is left on the disk."), done.stderr
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / ".s.seen").exists()


# --- small parts --------------------------------------------------------------------------------------------------


def test_the_header_is_that_of_numpy(tmp_path: Path) -> None:
    for count in (0, 1, 12_345, 10**15):
        numbers = np.arange(min(count, 20_000))
        np.save(tmp_path / "theirs.npy", numbers)
        if count == len(numbers):
            assert (tmp_path / "theirs.npy").read_bytes() == npy_header(count) + numbers.tobytes()
        assert len(npy_header(count)) == 128


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
def test_the_last_token_of_a_sentence_both_ways(kind: str) -> None:
    tokenizer = train_tokenizer([*TEXTS, "。 我喜欢 你\u0300"], kind, 500)
    for text in [*TEXTS[:5], "我喜欢。你\u0300。我。", "A\u00a0.\u200b B\u0000. C. ", "a\n\n\nb.\tc"]:
        encoding = tokenizer.encode_with_offsets([text])[0]
        edges = sentence_end_offsets(text, "en")
        assert find_last_tokens(encoding, edges) == find_last_tokens_by_offset(encoding, edges)


def test_sentences_of_a_long_text_with_blank_lines() -> None:
    paragraph = " ".join(f"Heron {i} waits at the river." for i in range(20))
    text = "\n\n".join([paragraph] * 60)
    ends = [i + 1 for i, c in enumerate(text) if c == "."]
    assert len(text) > 20_000
    assert sentence_end_offsets(text, "en") == ends


@pytest.mark.parametrize(("kind", "pattern"), [("byte-bpe", "gpt2"), ("byte-bpe", "llama3"), ("unigram", "gpt2")])
def test_a_long_text_in_parts_is_the_same(kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"In 19{i:02} heron {i} waits at the river. It sleeps. Who knows it?" for i in range(80))
    documents = [Document("A heron.", "x"), Document(text, "y"), Document("It sleeps.", "z")]
    encoder = DocumentEncoder(train_tokenizer([text], kind, 500, pattern=pattern), 0.0, "en")
    whole, _ = encoder(documents)
    monkeypatch.setattr(import_module("firth.tokens.encode"), "ENCODE_CHUNK_CHARS", 500)
    parts, _ = encoder(documents)
    assert len(encoder._split_long_text(documents[1], text)) > 5
    for field, other in zip(whole, parts, strict=True):
        assert np.array_equal(field, other)
