"""Small files that stand for gigabytes, and things that are no files: told in one line, before the memory is gone."""

from __future__ import annotations

import lzma
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firth.cli.main import read_input_file
from firth.core.errors import UserError
from firth.evaluate.vectors import read_vectors
from firth.text import open_text, records
from firth.text.corpus import Corpus
from firth.text.labelled import read_labelled
from firth.text.records import read_parquet_records

SMALL_LIMIT = 2**17  # instead of 16 and 64 Mi: the tests stay fast


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_text, "MAX_EXPANDED_BYTES", SMALL_LIMIT)
    monkeypatch.setattr(records, "MAX_LINE_CHARS", SMALL_LIMIT)


def peak_bytes(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


COMPRESSED: dict[str, tuple[str, str]] = {
    "a.json.xz": ("classify", '[{"text": "' + "x" * 2**20),
    "a.jsonl.xz": ("classify", '{"text": "x", "label": "a"}\n' * 2**15),
    "a.csv.xz": ("classify", "text,label\n" + "x,a\n" * 2**17),
    "a.conll.xz": ("tag", "word O\n" * 2**17),  # one sentence
    "a.txt.xz": ("analogy", "a b c d\n" * 2**16),
    "line.conll.xz": ("tag", "x" * 2**20),
    "b.tsv.xz": ("word-similarity", "a\tb\t1\n" * 2**16),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_labelled_file_that_expands_without_end_is_refused(name: str, tmp_path: Path) -> None:
    task, text = COMPRESSED[name]
    (tmp_path / name).write_bytes(lzma.compress(text.encode(), preset=1))
    with pytest.raises(UserError, match=rf"{name}.*(expand to|a line of more than)"):
        read_labelled(tmp_path / name, task)


def test_prompts_and_vectors_have_the_same_bound(tmp_path: Path) -> None:
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"x" * 2**20, preset=1))
    with pytest.raises(UserError, match=r"expand to|a line of more than"):
        read_input_file(str(tmp_path / "a.txt.xz"), ("text",), "utf-8")
    with pytest.raises(UserError, match=r"expand to|a line of more than"):
        read_vectors(tmp_path / "a.txt.xz")


def test_lone_surrogates_of_prompts_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud800 cat"}\n')
    assert read_input_file(str(tmp_path / "a.jsonl"), ("text",), "utf-8") == ["a \ufffd cat"]


def test_documents_may_repeat_themselves(tmp_path: Path) -> None:
    """They are read one by one."""
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x"}\n' * 2**14, preset=1))
    assert sum(1 for _ in Corpus(tmp_path / "a.jsonl.xz")) == 2**14


def test_a_parquet_file_with_a_dictionary_is_read_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 rows of 1 MB, stored once: 2 kB."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(records, "MAX_LINE_CHARS", 2**21)
    monkeypatch.setattr(open_text, "MAX_EXPANDED_BYTES", 2**21)
    texts = ["x" * 10**6, None, "y"] * 170
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 3_000
    read = [
        (n, r["text"] and (r["text"][0], len(r["text"])))
        for n, r in read_parquet_records(tmp_path / "a.parquet", ["text"])
    ]
    assert read == [(i, t and (t[0], len(t))) for i, t in enumerate(texts, 1)]
    assert peak_bytes(lambda: [None for _ in read_parquet_records(tmp_path / "a.parquet", ["text"])]) < 40 * 10**6
    monkeypatch.setattr(records, "MAX_LINE_CHARS", 10**5)
    with pytest.raises(UserError, match=r"a.parquet:row 1: 1,000,000 bytes of text, more than 100,000"):
        list(read_parquet_records(tmp_path / "a.parquet", ["text"]))


def test_a_parquet_page_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["x" * 2**23]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match=r"a.parquet: [\d,]+ bytes expand to 8,"):
        list(Corpus(tmp_path / "a.parquet"))


def test_a_parquet_row_group_of_negative_length_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a cat"] * 50}), path)
    data = bytearray(path.read_bytes())
    at = data.rfind(b"\x16\x64")  # in the last row group: a 64-bit field, 50 as a zigzag number
    data[at + 1] = 0x63  # -50
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"a.parquet: a damaged .parquet file: it has 50 rows, and its row groups -50"):
        list(Corpus(path))


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: list(Corpus(path)),
    "labelled": lambda path: read_labelled(path.rename(path.with_suffix(".csv")), "classify"),
    "conll": lambda path: read_labelled(path, "tag"),
    "glue": lambda path: read_labelled(path, "classify"),
    "prompts": lambda path: read_input_file(str(path), ("text",), "utf-8"),
    "folder": lambda path: list(Corpus(path.parent)),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_pipe_is_refused_before_it_is_opened(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening a FIFO waits for a writer."""
    os.mkfifo(tmp_path / "a.txt")
    errors: list[BaseException] = []

    def read() -> None:
        try:
            SPECIAL[name](tmp_path / "a.txt")
        except BaseException as e:
            errors.append(e)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "waits for the pipe"
    assert isinstance(errors[0], UserError)
    told = capsys.readouterr().err + str(errors[0])
    assert "pipe" in told


def test_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a pipe, a socket or a device"):
        list(Corpus(tmp_path / "zero.txt"))
    (tmp_path / "b.txt").write_text("a text")
    assert [d.text for d in Corpus(tmp_path)] == ["a text"]
