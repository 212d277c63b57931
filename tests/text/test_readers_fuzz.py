"""Any file is read, or refused with a message of a line or two; nothing else may happen."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.text.corpus import Corpus
from firth.text.filters import replace_lone_surrogates

EXAMPLES = 300  # for each of eight tests
quick = settings(max_examples=EXAMPLES, deadline=60_000, suppress_health_check=list(HealthCheck), database=None)

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}

SNIPPETS = (
    *(b'{"text": "', b'"}', b'"', b"text", b"text_a", b"words", b"[", b"]", b"{", b"}", b",", b"\t", b" "),
    *(b"\n", b"\r", b"\r\n", b"\0", b"\\ud800", b"\\u", b"\\", b"1e999", b"NaN"),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"caf\xe9"),
)
near_misses = st.lists(st.sampled_from(SNIPPETS) | st.binary(max_size=8), max_size=40).map(b"".join)
anything = near_misses | st.binary(max_size=300)
encodings = st.sampled_from(
    ["utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "shift_jis", "utf-7", "utf-8-sig", "ascii"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def read(path: Path, data: bytes, **options: str) -> list[str] | None:
    """The texts of a file, or None if it is refused with a message of a few lines that names it."""
    path.write_bytes(data)
    try:
        return [text for document in Corpus([path], **options) for text in document.texts]
    except UserError as e:
        message = str(e)
    assert str(path) in message
    assert len(message) < 1000
    return None


@given(data=anything, encoding=encodings, documents=st.sampled_from(["auto", "file"]))
@quick
def test_txt(folder: Path, data: bytes, encoding: str, documents: str) -> None:
    texts = read(folder / "a.txt", data, encoding=encoding, documents=documents)
    assert texts is None or all(text.strip() for text in texts)


@given(data=anything, encoding=encodings)
@quick
def test_jsonl(folder: Path, data: bytes, encoding: str) -> None:
    read(folder / "a.jsonl", data, encoding=encoding)


names = st.sampled_from(["text", "words", "text_a", "text_b", "other"])
values = st.none() | st.booleans() | st.floats() | st.text(max_size=9)


@given(value=st.dictionaries(names, values | st.lists(values, max_size=3), max_size=3) | values)
@quick
def test_jsonl_of_any_value(folder: Path, value: object) -> None:
    texts = read(folder / "b.jsonl", json.dumps(value).encode())
    if isinstance(value, dict) and set(value) == {"text"} and isinstance(value["text"], str):
        assert (texts or []) == [replace_lone_surrogates(value["text"])] * bool(value["text"].strip())


@given(data=anything, encoding=encodings, kind=st.sampled_from([".csv", ".tsv"]))
@quick
def test_tables(folder: Path, data: bytes, encoding: str, kind: str) -> None:
    read(folder / f"a{kind}", b"text" + b"\n" * (len(data) % 2) + data, encoding=encoding)


@given(
    data=anything,
    packing=st.sampled_from(list(PACKERS)),
    damage=st.tuples(st.floats(0, 1), st.integers(0, 255), st.booleans()),
)
@quick
def test_damaged_compression(folder: Path, data: bytes, packing: str, damage: tuple[float, int, bool]) -> None:
    fraction, byte, is_cut = damage
    packed = bytearray(PACKERS[packing](b"some text\n" * 20 + data))
    where = int(fraction * (len(packed) - 1))
    if is_cut:
        del packed[where:]
    else:
        packed[where] = byte
    read(folder / f"a.txt{packing}", bytes(packed))


@given(data=st.binary(max_size=300), packing=st.sampled_from(list(PACKERS)))
@quick
def test_uncompressed_files_with_a_gz_name(folder: Path, data: bytes, packing: str) -> None:
    read(folder / f"b.txt{packing}", data)


def a_parquet_file() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(50)], "n": list(range(50))}), file, row_group_size=20)
    return file.getvalue()


PARQUET = a_parquet_file()


@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=6), end=st.just(1.0) | st.floats(0, 1)
)
@quick
def test_damaged_parquet(folder: Path, changes: list[tuple[float, int]], end: float) -> None:
    data = bytearray(PARQUET[: round(end * len(PARQUET))])
    for fraction, byte in changes if data else []:
        data[int(fraction * (len(data) - 1))] = byte
    read(folder / "a.parquet", bytes(data))


@given(
    values=st.lists(st.none() | st.text(max_size=20), min_size=1, max_size=5)
    | st.lists(st.integers(-(2**60), 2**60), min_size=1)
    | st.lists(st.binary(), min_size=1)
    | st.lists(st.datetimes(), min_size=1)
    | st.lists(st.lists(st.text(max_size=3)), min_size=1),
    column=st.sampled_from(["text", "words", "text_a", "other"]),
)
@quick
def test_parquet_of_any_type(folder: Path, values: list[object], column: str) -> None:
    file = io.BytesIO()
    try:
        table = pa.table({column: values})
    except (pa.ArrowInvalid, UnicodeEncodeError):  # half characters, of which such a file cannot be made
        return
    pq.write_table(table, file)
    texts = read(folder / "b.parquet", file.getvalue())
    if column == "text" and all(isinstance(value, str) for value in values):
        assert (texts or []) == [value for value in values if isinstance(value, str) and value.strip()]
