"""The text of PDF files, by `pypdf`.

A PDF places glyphs on pages. It has no words and no paragraphs: `pypdf` finds lines by their positions. Two things
would hurt a language model and are undone here: words that are hyphenated at the end of a line, and headers, footers
and page numbers, which stand between the two halves of a sentence.
"""

from __future__ import annotations

import io
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from firth.core.errors import UserError, reason
from firth.text.open_text import (
    DECOMPRESSORS,
    ReadProgress,
    check_expansion,
    encoding_hint,
    import_optional,
    open_decompressed,
)

MAX_PDF_BYTES = 2**28  # of a file that is compressed again: it is held in memory
MAX_PAGE_OPERATIONS = 200_000  # of a page; one of text has some thousands, a map a million
MAX_PDF_CHARS = 2**26
MIN_REPEATED_PAGES = 3  # a line on as many pages, and on half of all, is a header or a footer
DIGITS = re.compile(r"\d+")
# A word is tried from its start alone, without backtracking: linear time for any text.
HYPHENATED = re.compile(r"(?<!\w)(\w++)[-\u2010\u00ad]\n(?=(\w++))")  # the second part may be hyphenated again
WORD = re.compile(r"\w+(?:-\w+)*")


def load_pypdf(name: str) -> Any:
    """Import pypdf, which logs every irregularity of a file."""
    pypdf = import_optional("pypdf", f"{name}: reading .pdf files")
    logging.getLogger("pypdf").setLevel(logging.CRITICAL + 1)
    return pypdf


class PageTooLarge(Exception):  # noqa: N818, no error of the program
    """A page with more drawing operations than a page of text has."""


def read_pdf_text(
    path: Path, name: str, read_progress: ReadProgress, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield the text of a PDF file."""
    pypdf = load_pypdf(name)
    with open_decompressed(path, name, read_progress) as stored:
        file = hold_in_memory(stored, path, name) if path.suffix.lower() in DECOMPRESSORS else stored
        start = file.read(1024)
        if b"%PDF-" not in start:
            hint = encoding_hint(start) if not start.isascii() else ""
            raise UserError(f"{name}: not a PDF file: it does not begin with %PDF. {hint}".rstrip())
        file.seek(0)
        try:
            reader = pypdf.PdfReader(file)
            if reader.is_encrypted and not reader.decrypt(""):
                raise UserError(
                    f"{name}: encrypted with a password. Remove it first: qpdf --decrypt --password=PASSWORD "
                    f"{path.name} plain.pdf"
                )
            pages = list(extract_pages(reader, name, skipped))
        except UserError:
            raise
        except pypdf.errors.DependencyError:
            raise UserError(f"{name}: encrypted with AES. Install what reads it: pip install cryptography") from None
        except pypdf.errors.LimitReachedError as e:
            raise UserError(f"{name}: a PDF file that expands without bound ({reason(e)}). Leave it out.") from None
        except Exception as e:  # pypdf raises many types for a damaged file
            told = reason(e) or type(e).__name__
            raise UserError(f"{name}: not a complete PDF file ({told}). Download or export it again.") from None
    text = join_pages(pages)
    if text:
        yield "", text
    else:
        skipped["PDF files without text (scanned pages need OCR first)"] += 1


def hold_in_memory(file: IO[bytes], path: Path, name: str) -> IO[bytes]:
    """Return the whole content of a compressed file: pypdf jumps about in it."""
    data = file.read(MAX_PDF_BYTES + 1)
    check_expansion(len(data), path.stat().st_size, name)
    return io.BytesIO(data)


def extract_pages(reader: Any, name: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the text of each page, up to `MAX_PDF_CHARS` in all."""
    num_chars = 0
    for page in reader.pages:
        num_operations = 0

        def count(*_: object) -> None:
            nonlocal num_operations
            num_operations += 1
            if num_operations > MAX_PAGE_OPERATIONS:
                raise PageTooLarge

        text = ""
        with suppress(PageTooLarge):  # inside of nested drawings, pypdf catches it itself
            text = page.extract_text(visitor_operand_before=count)
        if num_operations > MAX_PAGE_OPERATIONS:
            skipped["PDF pages that are drawings"] += 1
            continue
        num_chars += len(text)
        if num_chars > MAX_PDF_CHARS:
            raise UserError(f"{name}: more than {MAX_PDF_CHARS:,} characters. Split it.")
        yield text


def join_pages(pages: Sequence[str]) -> str:
    """Join pages to one text, without headers, footers and hyphens at line ends."""
    lines = [[line.rstrip() for line in page.replace("\r\n", "\n").strip().split("\n")] for page in pages]
    for edge in (0, -1):
        repeated = find_repeated_edges(lines, edge)
        for page in lines:
            if page and edge_key(page[edge]) in repeated:
                page.pop(edge)
    return join_hyphenated("\n".join(line for page in lines for line in page)).strip()


def edge_key(line: str) -> str:
    """Return a line with every number as #, so that "12 | Chapter 3" and "13 | Chapter 3" are equal."""
    return DIGITS.sub("#", line.strip())


def find_repeated_edges(pages: Sequence[Sequence[str]], edge: int) -> set[str]:
    """Return the first (0) or last (-1) lines that stand on at least half of the pages."""
    counts = Counter(edge_key(page[edge]) for page in pages if page and page[edge].strip())
    return {key for key, n in counts.items() if n >= max(MIN_REPEATED_PAGES, len(pages) / 2)}


def join_hyphenated(text: str) -> str:
    r"""Join words that are hyphenated at the end of a line. The rest of the text tells whether the hyphen stays.

    >>> join_hyphenated("a well-known ex-\nample of well-\nknown")
    'a well-known example of well-known'
    """
    words = Counter(match[0].lower() for match in WORD.finditer(text))

    def join(match: re.Match[str]) -> str:
        first, second = match[1], match[2]
        if words[f"{first}-{second}".lower()] > words[f"{first}{second}".lower()] or not second[0].islower():
            return f"{first}-"
        return first

    return HYPHENATED.sub(join, text)
