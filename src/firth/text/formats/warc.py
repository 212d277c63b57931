"""Read WARC files, in which crawlers store the web: Common Crawl, the Internet Archive, wget --warc-file.

A file is a sequence of records: a version line, headers, a blank line, `Content-Length` bytes, two line ends. A
`response` record holds an HTTP response with its headers; its HTML becomes a text. The `conversion` records of a WET
file hold plain text already. In a .warc.gz file every record is a gzip member of its own.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from firth.core.errors import UserError, quote
from firth.text.formats.web_page import (
    MAX_PAGE_BYTES,
    decode_declared,
    decode_page,
    extract_page_text,
)
from firth.text.open_text import READ_CHUNK_BYTES, ReadProgress, encoding_hint, open_decompressed

MAX_HEADER_BYTES = 2**16  # of one line, and of all headers of a record
MAX_HTTP_HEADERS_BYTES = 2**17
HTML_TYPES = ("text/html", "application/xhtml+xml")
TEXT_TYPE = "text/plain"
PAGE_RECORDS = ("response", "conversion", "resource")  # the others describe the crawl
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
MAX_GZIP_MEMBERS = 100  # of a body; each copies the rest


class WarcRecord(NamedTuple):
    """A record: its number, its headers by lowercase name, its content (None if it is too large)."""

    number: int
    headers: dict[str, str]
    content: bytes | None


def read_warc_records(file: IO[bytes], name: str) -> Iterator[WarcRecord]:
    """Yield the records of a WARC file; the content of records that hold no page is skipped, and is empty."""
    number = offset = 0
    while True:
        line = file.readline(MAX_HEADER_BYTES)
        offset += len(line)
        if not line:
            return
        if not line.strip() and number:  # between records
            continue
        if not line.startswith(b"WARC/"):
            if not number:
                hint = encoding_hint(line + file.read(READ_CHUNK_BYTES)) if not line.isascii() else ""
                raise UserError(f"{name}: not a WARC file: it does not begin with WARC/1.0. {hint}".rstrip())
            raise UserError(
                f"{name}: damaged after record {number:,}, at byte {offset - len(line):,} of its records. "
                "Download it again."
            )
        number += 1
        where = f"{name}:record {number:,}"
        block = read_header_block(file, where)
        offset += len(block)
        headers = parse_headers(block)
        size_text = headers.get("content-length", "")
        if not (size_text.isascii() and size_text.isdigit() and len(size_text) < 19):
            raise UserError(f"{where}: Content-Length is {quote(size_text)}, not a number of bytes. Download it again.")
        size = int(size_text)
        is_page = headers.get("warc-type", "").lower() in PAGE_RECORDS
        content = file.read(size) if is_page and size <= MAX_PAGE_BYTES else None
        num_read = skip_bytes(file, size) if content is None else len(content)
        if num_read < size:
            raise UserError(f"{where}: the file is cut: {num_read:,} of {size:,} bytes are there. Download it again.")
        offset += size
        yield WarcRecord(number, headers, content if is_page else b"")


def read_header_block(file: IO[bytes], where: str) -> bytes:
    lines: list[bytes] = []
    size = 0
    while (line := file.readline(MAX_HEADER_BYTES)).strip():
        lines.append(line)
        size += len(line)
        if size > MAX_HEADER_BYTES:
            raise UserError(f"{where}: headers of more than {MAX_HEADER_BYTES:,} bytes. The file is damaged.")
    return b"".join([*lines, line])


def parse_headers(block: bytes) -> dict[str, str]:
    """Return headers by lowercase name; the first of several with a name counts."""
    headers: dict[str, str] = {}
    for line in block.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), value.strip())
    return headers


def skip_bytes(file: IO[bytes], size: int) -> int:
    """Read over `size` bytes; return how many there were."""
    left = size
    while left and (chunk := file.read(min(left, READ_CHUNK_BYTES))):
        left -= len(chunk)
    return size - left


class HttpContent(NamedTuple):
    """The body of an HTTP response, its media type and its declared encoding."""

    body: bytes
    media_type: str
    charset: str


def split_media_type(value: str) -> tuple[str, str]:
    """Return the media type and the charset of a Content-Type.

    >>> split_media_type('Text/HTML; charset="UTF-8"')
    ('text/html', 'UTF-8')
    """
    media_type, *parameters = value.split(";")
    charsets = (
        value.strip() for p in parameters for key, _, value in [p.partition("=")] if key.strip().lower() == "charset"
    )
    return media_type.strip().lower(), next(charsets, "").strip("\"'")


def parse_http_response(content: bytes) -> HttpContent | str:
    """Return the body of a response with status 200, or the reason why it is no page."""
    head_end = content.find(b"\r\n\r\n", 0, MAX_HTTP_HEADERS_BYTES)
    gap = 4 if head_end >= 0 else 2
    head_end = head_end if head_end >= 0 else content.find(b"\n\n", 0, MAX_HTTP_HEADERS_BYTES)
    if head_end < 0 or not content.startswith(b"HTTP/"):
        return "records without an HTTP response"
    status, _, rest = content[:head_end].partition(b"\n")
    if status.split()[1:2] != [b"200"]:
        return "responses with a status other than 200"
    headers = parse_headers(rest)
    media_type, charset = split_media_type(headers.get("content-type", ""))
    if media_type not in (*HTML_TYPES, TEXT_TYPE):
        return "responses that are neither HTML nor plain text"
    body = decode_body(content[head_end + gap :], headers)
    return "pages whose compression is damaged or unknown" if body is None else HttpContent(body, media_type, charset)


def decode_body(body: bytes, headers: dict[str, str]) -> bytes | None:
    """Undo the transfer and content encodings of a body; None if that is not possible.

    Common Crawl stores pages decoded, with the headers of the server. So the body itself decides, not the header alone.
    """
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = join_chunks(body)
    encoding = headers.get("content-encoding", "").lower()
    if encoding in ("gzip", "x-gzip", "deflate") and body[:1] in (b"\x1f", b"\x78"):
        return decompress_body(body)
    if encoding == "deflate":
        body = inflate_headless(body)
    elif encoding in ("br", "zstd") and body.lstrip()[:1] != b"<":
        return None
    return body if len(body) <= MAX_PAGE_BYTES else None


def decompress_body(body: bytes) -> bytes | None:
    """Return the data of a body in gzip, of all its members, or zlib; None if it is damaged or too large."""
    data = b""
    for _ in range(MAX_GZIP_MEMBERS):
        decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
        try:
            data += decompressor.decompress(body, MAX_PAGE_BYTES + 1 - len(data))
        except zlib.error:
            return None
        body = decompressor.unused_data
        if len(data) > MAX_PAGE_BYTES or not body.startswith(b"\x1f\x8b"):
            return data if len(data) <= MAX_PAGE_BYTES else None
    return None


def inflate_headless(body: bytes) -> bytes:
    """Return the data of a body in deflate without the header of zlib, as some servers send it; else the body."""
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = decompressor.decompress(body, MAX_PAGE_BYTES + 1)
    except zlib.error:
        return body
    return data if decompressor.eof and not decompressor.unused_data else body


def join_chunks(body: bytes) -> bytes:
    """Return the data of a chunked body; a body that is not chunked is returned as it is."""
    parts: list[bytes] = []
    start = 0
    while (line_end := body.find(b"\r\n", start, start + 1000)) >= 0:
        try:
            size = int(body[start:line_end].partition(b";")[0], 16)
        except ValueError:
            return body if not parts else b"".join(parts)
        if size <= 0:
            break
        parts.append(body[line_end + 2 : line_end + 2 + size])
        start = line_end + 2 + size + 2
    return b"".join(parts) if parts else body


def read_warc_texts(
    path: Path, encoding: str, name: str, read_progress: ReadProgress, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield the texts of the pages of a WARC or WET file; count those that have none."""
    with open_decompressed(path, name, read_progress) as file:
        for record in read_warc_records(file, name):
            text = extract_record(record, encoding, name)
            if isinstance(text, str):
                yield f"record {record.number}", text
            elif text is not None:
                skipped[text.reason] += 1


class SkippedRecord(NamedTuple):
    """Why a record with a page gives no text."""

    reason: str


def extract_record(record: WarcRecord, encoding: str, name: str) -> str | SkippedRecord | None:
    """Return the text of a record, the reason why it has none, or None for a record that holds no page."""
    if record.headers.get("warc-type", "").lower() not in PAGE_RECORDS:
        return None
    if record.content is None:
        return SkippedRecord(f"records over {MAX_PAGE_BYTES:,} bytes")
    media_type, charset = split_media_type(record.headers.get("content-type", ""))
    response: HttpContent | str = HttpContent(record.content, media_type, charset)
    if media_type == "application/http":
        response = parse_http_response(record.content)
    elif media_type == "text/dns":
        return None
    if isinstance(response, str):
        return SkippedRecord(response)
    if response.media_type == TEXT_TYPE:
        text = decode_declared(response.body, response.charset or "utf-8", encoding)
        return SkippedRecord("texts in an unknown encoding") if text is None else text.replace("\r\n", "\n").strip()
    if response.media_type not in HTML_TYPES:
        return SkippedRecord("responses that are neither HTML nor plain text")
    page = decode_page(response.body, response.charset, encoding)
    if page is None:
        return SkippedRecord("pages in an unknown encoding")
    text = extract_page_text(page, name)
    return SkippedRecord("web pages without a main text") if text is None else text
