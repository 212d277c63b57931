"""The text of PDF files that matplotlib and pypdf write, and of encrypted, damaged and harmful ones."""

from __future__ import annotations

import io
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text.corpus import Corpus
from firth.text.formats import pdf
from firth.text.formats.pdf import join_hyphenated, join_pages


def make_pdf(pages: Sequence[Sequence[str]], forms: Sequence[bytes] = (), content: bytes | None = None) -> bytes:
    """A PDF with a line of text for each string; `forms` are drawings F0, F1, ... that pages and forms can draw."""
    num_forms, first_page = len(forms), 5 + len(forms)
    names = b"".join(b"/F%d %d 0 R " % (i, 4 + i) for i in range(num_forms))
    resources = b"<< /Font << /H 3 0 R >> /XObject << %s>> >>" % names
    streams = [
        content
        or b"BT /H 12 Tf 14 TL 72 720 Td "
        + b" ".join(b"(%s) Tj T*" % line.encode("latin-1") for line in lines)
        + b" ET"
        for lines in pages
    ]
    kids = b" ".join(b"%d 0 R" % (first_page + 2 * i) for i in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d /MediaBox [0 0 612 792] >>" % (kids, len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        *(
            b"<< /Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources %s /Length %d >>\nstream\n%s\nendstream"
            % (resources, len(form), form)
            for form in forms
        ),
        b"null",
    ]
    for i, stream in enumerate(streams):
        packed = zlib.compress(stream)
        page = b"<< /Type /Page /Parent 2 0 R /Resources %s /Contents %d 0 R >>" % (resources, first_page + 2 * i + 1)
        objects.append(page)
        objects.append(b"<< /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream" % (len(packed), packed))
    out, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return bytes(out + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start))


BOOK = [
    ["The Lighthouse", "The keeper climbed the long stair-", "case every evening. It was a well-known", "Page 1 of 4"],
    ["The Lighthouse", "lamp, and a well-", "known staircase.", "Page 2 of 4"],
    ["The Lighthouse", "Café: in Jean-", "Paul's house.", "Page 3 of 4"],
    ["The Lighthouse", "The end.", "Page 4 of 4"],
]


def test_a_book_without_headers_and_hyphens(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf(BOOK))
    corpus = Corpus(tmp_path / "a.pdf")
    (document,) = corpus
    assert document.text == (
        "The keeper climbed the long staircase every evening. It was a well-known\nlamp, and a well-known staircase.\n"
        "Café: in Jean-Paul's house.\nThe end."
    )
    assert corpus.describe() == "1 document: a.pdf as the text of a PDF"


def test_a_file_of_another_program(tmp_path: Path) -> None:
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    with PdfPages(tmp_path / "a.pdf") as file:
        for i in range(2):
            figure = Figure()
            figure.text(0.1, 0.5, f"Größe {i}: naïve words")
            file.savefig(figure)
    (document,) = Corpus(tmp_path)
    assert document.text == "Größe 0: naïve words\nGröße 1: naïve words"


def test_joined_pages() -> None:
    assert join_pages(["a", "b"]) == "a\nb"
    assert join_pages([]) == ""
    assert join_pages(["7\nx y", "8\nz", "9\nw"]) == "x y\nz\nw"
    assert join_hyphenated("soft\u00ad\nware") == "software"
    assert join_hyphenated("inter-\nna-\ntional") == "international"


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(UserError) as told:
        list(Corpus(path))
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)
    return str(told.value)


def encrypt(user_password: str, algorithm: str) -> bytes:
    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(make_pdf(BOOK)))
    writer.encrypt(user_password, "owner", algorithm=algorithm)
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-256"])
def test_encrypted_files(algorithm: str, tmp_path: Path) -> None:
    told = refusal(tmp_path / "a.pdf", encrypt("secret", algorithm))
    assert "encrypted with a password. Remove it first: qpdf --decrypt" in told
    (tmp_path / "a.pdf").write_bytes(encrypt("", algorithm))  # anybody may read it
    (document,) = Corpus(tmp_path / "a.pdf")
    assert document.text.startswith("The keeper climbed")


def test_damaged_files(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.pdf", make_pdf(BOOK)
    assert "not a PDF file: it does not begin with %PDF. It looks like a .zip file" in refusal(
        path, b"PK\x03\x04\xff" * 9
    )
    assert "not a complete PDF file" in refusal(path, whole[:200])
    assert "not a complete PDF file" in refusal(path, b"%PDF-1.7\n" + b"\0" * 2000)
    assert "1 skipped: PDF files without text (scanned pages need OCR first)" in refusal(path, make_pdf([[]]))


def test_files_made_to_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawings that draw drawings, ten times each; a page of a million operations."""
    monkeypatch.setattr(pdf, "MAX_PAGE_OPERATIONS", 2000)
    nested = [b"/F%d Do " % (i + 1) * 10 for i in range(8)] + [b"BT /H 9 Tf (x) Tj ET"]
    told = refusal(tmp_path / "a.pdf", make_pdf([["x"]], nested, b"/F0 Do"))
    assert "1 skipped: PDF pages that are drawings" in told
    told = refusal(tmp_path / "b.pdf", make_pdf([["x"]], content=b"0 0 m " * 10_000))
    assert "1 skipped: PDF pages that are drawings" in told
    assert "expands without bound" in refusal(tmp_path / "c.pdf", make_pdf([["x"]], content=b" " * (8 * 10**7)))


def test_a_missing_extra_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    told = refusal(tmp_path / "a.pdf", make_pdf(BOOK))
    assert "a.pdf: reading .pdf files needs the package pypdf. Install it:" in told
    assert told.endswith("-m pip install 'firth[data]'")
