"""Shards are the same however many processes made them, and however often the work was stopped."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from firth.errors import UserError
from firth.files import damage
from firth.text import Document
from firth.text.salient import salient
from firth.text.seen import Seen
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.edges import last_tokens, last_tokens_of_all, sentence_edges
from firth.tokens.growing import Grown, npy_header
from firth.tokens.prepare import choose_scale, prepare
from firth.tokens.shards import open_shards
from firth.tokens.tokenise import Way
from firth.tokens.workers import Worker

preparing = import_module("firth.tokens.prepare")  # the name in the package is the function

TEXTS = [f"The heron number {i} waits. Mr. Grey saw it {i % 7} times!\nÉtude — the river's heron." for i in range(60)]
MIXED = [
    *(Document(text, f"a.txt:{i}") for i, text in enumerate(TEXTS)),
    *(Document(text, "b.txt", second=text[::-1]) for text in TEXTS[:20]),
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
    options = {"held_out_share": 0.3, "salient": salient, **options}
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


def test_a_mistake_that_a_worker_finds_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    way = Way(tokenizer, 0.0, "en", salient=elsewhere)
    tokenizer.save(tmp_path)
    worker = Worker(way, tmp_path)
    try:
        with pytest.raises(UserError, match=r"a.txt:1: the salient span \(5, 9\) is empty or outside"):
            worker([Document("abc", "a.txt:1")])
        train, aside = worker([Document("the heron", "a.txt:2")])
        assert train.tokens.tolist() == tokenizer.encode("the heron")
        assert not len(aside.tokens)
    finally:
        worker.close()


def elsewhere(text: str) -> list[tuple[int, int]]:
    """Salient spans that lie outside of short texts."""
    return [(5, 9)]


def test_a_worker_that_dies_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    worker = Worker(Way(tokenizer, 0.0, "en"), tmp_path)
    worker.process.kill()
    worker.process.wait()
    with pytest.raises(UserError, match=r"ended by itself \(exit code -9\).*--resume"):
        worker([Document("abc", "a.txt:1")])
    worker.close()


def test_a_function_without_a_name_stays_in_this_process(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = make(tokenizer, tmp_path / "s", workers=2, salient=lambda text: [(0, 1)])
    assert facts["train"]["salient"] >= facts["train"]["documents"]
    assert "this one works alone" in capsys.readouterr().err


def test_memory_and_small_texts_speak_for_fewer_workers(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "own_memory", lambda: 100_000_000)
    way = Way(tokenizer, 0.0, "en")
    assert choose_scale(4, None, None, way).workers == 4
    assert choose_scale(4, None, 1000, way).workers == 1
    few = choose_scale(4, 270_000_000, None, way)
    assert few.workers == 2
    assert few.characters < preparing.CHUNK_CHARACTERS
    assert choose_scale(4, 2_000_000_000, None, way).characters == preparing.CHUNK_CHARACTERS
    with pytest.raises(UserError, match=r"--max-memory is too little: 11\dMB are needed"):
        choose_scale(4, 100_000_000, None, way)
    with pytest.raises(UserError, match="--workers is -1"):
        choose_scale(-1, None, None, way)


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


def test_what_is_not_whole_is_made_again(tokenizer: Tokenizer, whole: Path, tmp_path: Path) -> None:
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


def test_stopped_while_it_finishes(
    tokenizer: Tokenizer, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("firth.files.put_in_place", fail)
        make(tokenizer, tmp_path / "s")
    assert (tmp_path / ".s.part" / "manifest.json").is_file()
    read: list[int] = []
    monkeypatch.setattr(Way, "__call__", lambda *_: read.append(1))
    make(tokenizer, tmp_path / "s", resume=True)
    assert not read, "nothing is tokenised twice"
    assert contents(tmp_path / "s") == contents(whole)


def test_other_text_and_other_options_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "s", stopped(50, KeyboardInterrupt()))
    with pytest.raises(UserError, match=r"begun in another way \(held_out_share: 0.3 -> 0.1\)"):
        make(tokenizer, tmp_path / "s", resume=True, held_out_share=0.1)
    for other in (MIXED[1:], MIXED[:20]):
        with pytest.raises(UserError, match="The text is not the one that was begun with"):
            make(tokenizer, tmp_path / "s", other, resume=True)
    make(tokenizer, tmp_path / "s", resume=True)


def test_a_full_disk(tokenizer: Tokenizer, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 6000

    def write(grown: Grown, data: bytes) -> None:
        nonlocal room
        grown.file.write(data[:room])
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real_write(grown, data[len(data) :])
        grown.size, grown.crc = grown.size + len(data), crc32(data, grown.crc)

    real_write = Grown.write
    with monkeypatch.context() as patch:
        patch.setattr(Grown, "write", write)
        with pytest.raises(UserError, match=r"no room is left on the disk. What is done is kept: make room.*--resume"):
            make(tokenizer, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert len((tmp_path / ".s.journal").read_text().splitlines()) > 2
    make(tokenizer, tmp_path / "s", resume=True)
    assert contents(tmp_path / "s") == contents(whole)
    assert damage(tmp_path / "s") is None


def test_two_processes_do_not_write_the_same_shards(tokenizer: Tokenizer, tmp_path: Path) -> None:
    def within() -> Iterator[Document]:
        yield from MIXED
        with pytest.raises(UserError, match="is being prepared by another process"):
            make(tokenizer, tmp_path / "s")

    make(tokenizer, tmp_path / "s", within())
    open_shards(tmp_path / "s").verify()


# --- duplicates ---------------------------------------------------------------------------------------------------


def test_near_duplicates_are_dropped_when_asked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(60)]
    near = [" ".join(words), " ".join([*words[:-1], "other"]), " ".join(words[::-1]), " ".join(words)]
    found = [Document(text, "a") for text in near]
    for way, kept in (("none", 4), ("exact", 3), ("near", 2)):
        facts = prepare(found, tokenizer, tmp_path / way, held_out_share=0, dedup=way)
        assert (facts["documents"], facts["duplicates"], facts["dedup"]) == (kept, 4 - kept, way)


def test_seen_texts_in_little_memory(tmp_path: Path) -> None:
    marks = [int(i).to_bytes(8, "little") for i in np.random.default_rng(0).integers(2**63, size=5000)]
    seen = Seen(tmp_path / "seen", max_memory=2**16)
    assert all(seen.is_new(mark) for mark in marks)
    assert (tmp_path / "seen").stat().st_size > 2**16
    assert not any(seen.is_new(mark) for mark in marks)
    seen.close()
    assert not (tmp_path / "seen").exists()


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
        encoding = tokenizer.encodings([text])[0]
        edges = sentence_edges(text, "en")
        assert last_tokens(encoding, edges) == last_tokens_of_all(encoding, edges)


def test_sentences_of_a_long_text_with_blank_lines() -> None:
    paragraph = " ".join(f"Heron {i} waits at the river." for i in range(20))
    text = "\n\n".join([paragraph] * 60)
    ends = [i + 1 for i, c in enumerate(text) if c == "."]
    assert len(text) > 20_000
    assert sentence_edges(text, "en") == ends


@pytest.mark.parametrize(("kind", "pattern"), [("byte-bpe", "gpt2"), ("byte-bpe", "llama3"), ("unigram", "gpt2")])
def test_a_long_text_in_parts_is_the_same(kind: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(f"In 19{i:02} heron {i} waits at the river. It sleeps. Who knows it?" for i in range(80))
    documents = [Document("A heron.", "x"), Document(text, "y"), Document("It sleeps.", "z")]
    way = Way(train_tokenizer([text], kind, 500, pattern=pattern), 0.0, "en")
    whole, _ = way(documents)
    monkeypatch.setattr(import_module("firth.tokens.tokenise"), "LONG", 500)
    parts, _ = way(documents)
    assert len(way._parts(documents[1], text)) > 5
    for field, other in zip(whole, parts, strict=True):
        assert np.array_equal(field, other)
