"""Web archives: files that warcio writes, the records of Common Crawl's WET files, and damaged ones."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text.corpus import Corpus
from firth.text.formats import warc
from firth.text.formats.warc import decode_body, join_chunks, parse_http_response, read_warc_records

PROSE = "The lighthouse keeper climbed the stairs every evening to light the lamp. "


def html(body: str, charset: str = "") -> str:
    meta = f'<meta charset="{charset}">' if charset else ""
    return (
        f"<!DOCTYPE html><html><head>{meta}<title>A page</title></head><body><nav><a href='/'>Home</a> Menu</nav>"
        f"<article><h1>Lamps</h1><p>{body}</p><p>{PROSE * 3}</p></article><footer>Cookies</footer></body></html>"
    )


def write_warc(path: Path, responses: list[tuple[bytes, list[tuple[str, str]], str]]) -> Path:
    """Write pages as warcio does, which crawlers use: one gzip member per record."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    with path.open("wb") as file:
        writer = WARCWriter(file, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "test"}))
        for i, (body, headers, status) in enumerate(responses):
            http = StatusAndHeaders(status, headers, protocol="HTTP/1.1")
            url = f"https://example.org/{i}"
            writer.write_record(
                writer.create_warc_record(url, "request", payload=io.BytesIO(b"GET / HTTP/1.1\r\n\r\n"))
            )
            writer.write_record(writer.create_warc_record(url, "response", payload=io.BytesIO(body), http_headers=http))
    return path


HTML_TYPE = ("Content-Type", "text/html; charset=utf-8")
RESPONSES = [
    (html("Grüße vom Leuchtturm.").encode(), [HTML_TYPE], "200 OK"),
    (gzip.compress(html("Compressed by the server.").encode()), [HTML_TYPE, ("Content-Encoding", "gzip")], "200 OK"),
    (html("Café déjà vu.", "iso-8859-1").encode("cp1252"), [("Content-Type", "text/html")], "200 OK"),
    (html("Это маяк на море.").encode("koi8_r"), [("Content-Type", "text/html; charset=koi8-r")], "200 OK"),
    (b"Plain text of a page.\r\nSecond line.", [("Content-Type", "text/plain")], "200 OK"),
    (b"not found", [HTML_TYPE], "404 Not Found"),
    (b"\x89PNG....", [("Content-Type", "image/png")], "200 OK"),
    (b"\x0b\x02\x80\xff" * 9, [HTML_TYPE, ("Content-Encoding", "br")], "200 OK"),
    (b"<html><body></body></html>", [HTML_TYPE], "200 OK"),
]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz"])
def test_pages_of_an_archive(name: str, tmp_path: Path) -> None:
    corpus = Corpus(write_warc(tmp_path / name, RESPONSES))
    documents = list(corpus)
    first_lines = [next(line for line in d.text.splitlines() if line != "Lamps") for d in documents]
    assert first_lines == [
        "Grüße vom Leuchtturm.",
        "Compressed by the server.",
        "Café déjà vu.",
        "Это маяк на море.",
        "Plain text of a page.",
    ]
    assert [d.source.rpartition(":")[2] for d in documents] == [
        "record 3",
        "record 5",
        "record 7",
        "record 9",
        "record 11",
    ]
    assert not any(word in d.text for d in documents for word in ("Menu", "Cookies", "<"))
    told = corpus.describe()
    assert told.startswith(f"5 documents: {name} with one document per web page; 1 skipped: pages whose compression")
    assert "; 1 skipped: responses that are neither HTML nor plain text; 1 skipped: responses with a status" in told
    assert told.endswith("1 skipped: web pages without a main text")


def test_the_same_records_as_warcio(tmp_path: Path) -> None:
    from warcio.archiveiterator import ArchiveIterator

    path = write_warc(tmp_path / "a.warc.gz", RESPONSES)
    with path.open("rb") as file:
        theirs = [(r.rec_type, r.content_stream().read()) for r in ArchiveIterator(file, no_record_parse=True)]
    with gzip.open(path) as file:
        ours = list(read_warc_records(file, "a"))
    assert [r.headers["warc-type"] for r in ours] == [kind for kind, _ in theirs]
    assert [r.content for r in ours] == [data if kind == "response" else b"" for kind, data in theirs]


WET = (
    "WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Type: application/warc-fields\r\nContent-Length: 11\r\n\r\n"
    "a: b\r\nc: d\n\r\n\r\n"
    "WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: http://a.org/\r\n"
    "WARC-Identified-Content-Language: deu\r\nContent-Type: text/plain\r\nContent-Length: 13\r\n\r\n"
    "Grüße\nwelt\n\r\n\r\n"
)


def test_wet_files_hold_text(tmp_path: Path) -> None:
    (tmp_path / "CC-MAIN-20240220211055-00000.warc.wet.gz").write_bytes(gzip.compress(WET.encode()))
    (document,) = Corpus(tmp_path)
    assert document.text == "Grüße\nwelt"


def test_http_bodies() -> None:
    assert join_chunks(b"4\r\nWiki\r\n5;x=y\r\npedia\r\n0\r\n\r\n") == b"Wikipedia"
    assert join_chunks(b"<html>not chunked</html>") == b"<html>not chunked</html>"
    assert decode_body(zlib.compress(b"<p>a"), {"content-encoding": "deflate"}) == b"<p>a"
    assert decode_body(b"<p>a", {"content-encoding": "gzip"}) == b"<p>a"  # decoded by the crawler
    assert decode_body(zlib.compress(b"<p>a")[2:-4], {"content-encoding": "deflate"}) == b"<p>a"  # without its header
    assert decode_body(b"Kept", {"content-encoding": "deflate"}) == b"Kept"
    assert decode_body(gzip.compress(b"<p>") + gzip.compress(b"a"), {"content-encoding": "gzip"}) == b"<p>a"
    bomb = zlib.compress(b"\0" * (warc.MAX_PAGE_BYTES + 1))
    assert decode_body(bomb, {"content-encoding": "deflate"}) is None
    members = gzip.compress(b"") * (warc.MAX_GZIP_MEMBERS + 1)
    assert decode_body(members, {"content-encoding": "gzip"}) is None
    assert parse_http_response(b"HTTP/1.1 200 OK\nContent-Type: text/plain\n\nbody") == (b"body", "text/plain", "")
    assert parse_http_response(b"garbage") == "records without an HTTP response"


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(UserError) as told:
        list(Corpus(path))
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)
    return str(told.value)


def test_damaged_archives(tmp_path: Path) -> None:
    path, wet = tmp_path / "a.warc", WET.encode()
    assert "record 2: the file is cut: 9 of 13 bytes are there. Download it again." in refusal(path, wet[:-8])
    assert "not a WARC file: it does not begin with WARC/1.0. It looks like a .gz file" in refusal(
        path, gzip.compress(wet)
    )
    assert "not a WARC file" in refusal(path, b"<html>")
    assert "damaged after record 1, at byte" in refusal(
        path, wet.replace(b"a: b\r\nc: d\n\r\n\r\n", b"a: b\r\nc: d\nxx\r\n")
    )
    assert "Content-Length is '-1', not a number" in refusal(path, wet.replace(b": 11", b": -1"))
    assert "headers of more than" in refusal(path, b"WARC/1.0\r\n" + b"a: b\r\n" * 20_000)
    assert "the compressed file is truncated" in refusal(tmp_path / "b.warc.gz", gzip.compress(wet)[:-9])
    assert "no documents, only empty text" in refusal(path, wet[: wet.index(b"WARC/1.0\r\nWARC-Type: conv")])


def test_a_large_record_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warc, "MAX_PAGE_BYTES", 12)
    assert "1 skipped: records over 12 bytes" in refusal(tmp_path / "a.wet", WET.encode())
    monkeypatch.setattr(warc, "MAX_PAGE_BYTES", 13)
    (document,) = Corpus(tmp_path / "a.wet")
    assert document.text.startswith("Grüße")
