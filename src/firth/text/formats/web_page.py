"""The main text of a web page, without menus, advertisements and footers, by `trafilatura`.

A page is bytes in the encoding that its HTTP header, its `<meta charset>` or its byte order mark names; many name none,
and some name a wrong one. `decode_declared` tries these, then UTF-8, then the likely encoding.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.text.open_text import (
    ENCODING_BY_BOM,
    ESCAPE_CODECS,
    ReadProgress,
    check_expansion,
    encoding_hint,
    guess_encoding,
    import_optional,
    looks_binary,
    open_decompressed,
)

MAX_PAGE_BYTES = 2**23  # of HTML; the largest pages of Common Crawl have 1 to 2 MB
MAX_PAGE_ELEMENTS = 50_000  # of a page; extracting takes 0.2 s for every thousand in the worst case
MAX_REPLACED_SHARE = 0.01  # of the characters of a page that its encoding cannot decode
SNIFFED_BYTES = 2**12
META_CHARSET = re.compile(rb"<meta[^<>]{0,500}charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
XML_ENCODING = re.compile(rb"<\?xml[^<>]{0,200}encoding\s*=\s*[\"']([\w.:-]{1,40})")
ELEMENT = re.compile(r"<[A-Za-z]")
# Browsers read the encoding on the left as the larger one on the right, and pages rely on it (WHATWG, Encoding).
WEB_ENCODINGS = {
    "iso8859-1": "cp1252",
    "ascii": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "gb2312": "gb18030",
    "gbk": "gb18030",
}


def load_trafilatura(name: str) -> Any:
    """Import trafilatura, which logs every page that it cannot read: here these are counted."""
    trafilatura = import_optional("trafilatura", f"{name}: reading web pages")
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL + 1)
    logging.getLogger("htmldate").setLevel(logging.CRITICAL + 1)
    return trafilatura


def find_codec(name: str) -> str | None:
    """Return Python's name of an encoding, as the web uses it; None if there is none.

    >>> find_codec("ISO-8859-1"), find_codec("x-no-such")
    ('cp1252', None)
    """
    try:
        codec = codecs.lookup(name.strip())
    except (LookupError, ValueError):
        return None
    is_text = getattr(codec, "_is_text_encoding", True) and codec.name not in ESCAPE_CODECS
    return WEB_ENCODINGS.get(codec.name, codec.name) if is_text else None


def decode_declared(data: bytes, *declared: str) -> str | None:
    """Decode by the first of the declared encodings that fits, UTF-8, or a guess; None for bytes that are no text."""
    by_bom = next((encoding for bom, encoding in ENCODING_BY_BOM.items() if data.startswith(bom)), "")
    names = dict.fromkeys(filter(None, map(find_codec, [by_bom or "utf-8", *declared, "utf-8"])))
    if by_bom or data.startswith(codecs.BOM_UTF8):
        candidates = list(names)
    else:  # UTF-8 that decodes is UTF-8, whatever is declared; ASCII bytes may be ISO-2022
        first = [name for name in names if name.startswith("iso2022") or name == "hz"]
        candidates = [*first, "utf-8", *(name for name in names if name not in (*first, "utf-8"))]
    is_binary = False
    for codec in candidates:
        text = try_decoding(data, codec)
        if text is not None and not looks_binary(text[: 2**16]):
            return text.removeprefix("\ufeff")
        is_binary = is_binary or text is not None  # zeros are UTF-8 too: another encoding may be declared, as UTF-16
    if is_binary:
        return None
    guess = guess_encoding(data[: 2**16])
    if guess is not None and (text := try_decoding(data, guess)) is not None:
        return None if looks_binary(text[: 2**16]) else text.removeprefix("\ufeff")
    text = data.decode(candidates[-1] if len(candidates) > 1 else "utf-8", "replace")
    return text if text.count("\ufffd") <= MAX_REPLACED_SHARE * len(text) else None


def try_decoding(data: bytes, codec: str) -> str | None:
    try:
        return data.decode(codec)
    except (UnicodeError, LookupError):
        return None


def decode_page(data: bytes, *declared: str) -> str | None:
    """As `decode_declared`, also by the encoding that the page itself names."""
    head = data[:SNIFFED_BYTES]
    in_page = [
        match[1].decode("ascii", "replace") for rule in (META_CHARSET, XML_ENCODING) if (match := rule.search(head))
    ]
    return decode_declared(data, *filter(None, declared), *in_page)


def extract_page_text(page: str, name: str) -> str | None:
    """Return the main text of a page, or None if it has none or is too large."""
    if len(page) > MAX_PAGE_BYTES or len(ELEMENT.findall(page)) > MAX_PAGE_ELEMENTS:
        return None
    try:
        text = load_trafilatura(name).extract(page, include_comments=False, include_tables=False)
    except UserError:
        raise
    except Exception:  # of a page that lxml or trafilatura cannot take
        return None
    return text.strip() if text else None


def read_web_page(
    path: Path, encoding: str, name: str, read_progress: ReadProgress, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield the main text of an .html file."""
    load_trafilatura(name)
    with open_decompressed(path, name, read_progress) as file:
        data = file.read(MAX_PAGE_BYTES + 1)
    if len(data) > MAX_PAGE_BYTES:
        check_expansion(len(data), path.stat().st_size, name)
        raise UserError(f"{name}: a page of more than {MAX_PAGE_BYTES:,} bytes. Save its text as .txt.")
    page = decode_page(data, *([encoding] if find_codec(encoding) != "utf-8" else []))
    if page is None:
        raise UserError(f"{name}: not HTML in a known encoding. {encoding_hint(data[: 2**16])}")
    text = extract_page_text(page, name)
    if text is None:
        skipped["web pages without a main text"] += 1
    else:
        yield "", text
