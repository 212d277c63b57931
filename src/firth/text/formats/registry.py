"""Files that hold documents in a format of their own: web archives, Wikipedia dumps, web pages, PDF, e-mail.

A reader yields the place of each text inside of its file ("record 12", or nothing if the file is one document) and the
text, and counts what it skips by reason. It is imported when a file needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from firth.core.errors import UserError, did_you_mean, shorten
from firth.text.open_text import ReadProgress, open_decompressed

SNIFFED_BYTES = 10_000
FIRTH_PAGE = b'<meta name="generator" content="firth '  # see core/html.py
MAIL_PARTS = ("headers", "quotes", "signatures")  # that are left out of e-mails


class FormatInput(NamedTuple):
    """A file to read, and how: `skipped` counts texts that are left out, by reason."""

    path: Path
    name: str  # in messages
    encoding: str  # of texts that declare none
    keep_mail: tuple[str, ...]
    read_progress: ReadProgress
    skipped: Counter[str]


LocatedTexts = Iterator[tuple[str, str]]


def read_warc(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.warc import read_warc_texts

    return read_warc_texts(given.path, given.encoding, given.name, given.read_progress, given.skipped)


def read_wikipedia(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.wikipedia import read_wikipedia_dump

    return read_wikipedia_dump(given.path, given.name, given.read_progress, given.skipped)


def read_html(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.web_page import read_web_page

    return read_web_page(given.path, given.encoding, given.name, given.read_progress, given.skipped)


def read_pdf(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.pdf import read_pdf_text

    return read_pdf_text(given.path, given.name, given.read_progress, given.skipped)


def read_mbox(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.mbox import read_mbox_texts

    return read_mbox_texts(given.path, given.encoding, given.name, given.read_progress, given.skipped, given.keep_mail)


def read_eml(given: FormatInput) -> LocatedTexts:
    from firth.text.formats.mbox import read_eml_texts

    return read_eml_texts(given.path, given.encoding, given.name, given.read_progress, given.skipped, given.keep_mail)


class DocumentFormat(NamedTuple):
    """How a kind of file is read, how its documents are described, and the share of its bytes that is text, about."""

    read: Callable[[FormatInput], LocatedTexts]
    description: str
    text_share: float


DOCUMENT_FORMATS = {
    ".warc": DocumentFormat(read_warc, "with one document per web page", 0.03),
    ".wet": DocumentFormat(read_warc, "with one document per web page", 0.9),
    ".xml": DocumentFormat(read_wikipedia, "with one document per article", 0.5),
    ".html": DocumentFormat(read_html, "as the main text of a web page", 0.05),
    ".htm": DocumentFormat(read_html, "as the main text of a web page", 0.05),
    ".pdf": DocumentFormat(read_pdf, "as the text of a PDF", 0.05),
    ".mbox": DocumentFormat(read_mbox, "with one document per message", 0.3),
    ".eml": DocumentFormat(read_eml, "with one document per message", 0.3),
}


def foreign_kind(path: Path, extension: str) -> str | None:
    """Return what a file of a folder is, if its extension fits and it is no text: other XML, a report of Firth."""
    if extension not in (".xml", ".html"):
        return None
    with open_decompressed(path) as file:
        start = file.read(SNIFFED_BYTES)
    if extension == ".xml":
        return None if b"<mediawiki" in start.replace(b"\0", b"") else ".xml that is no Wikipedia dump"
    return "report of Firth" if FIRTH_PAGE in start else None


def parse_mail_parts(given: str) -> tuple[str, ...]:
    """Return the parts that `--keep-mail` names.

    >>> parse_mail_parts("quotes, headers")
    ('quotes', 'headers')
    """
    parts = tuple(part.strip() for part in given.split(",") if part.strip())
    for part in parts:
        if part not in MAIL_PARTS:
            raise UserError(f"--keep-mail {shorten(given)}: unknown part. {did_you_mean(part, MAIL_PARTS)}")
    return parts
