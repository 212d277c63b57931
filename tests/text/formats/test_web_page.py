"""The main text of .html files, in the encoding that they declare or not."""

from __future__ import annotations

import gzip
import sys
import time
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.core.html import generator_meta_tag
from firth.text.corpus import Corpus
from firth.text.formats import web_page
from firth.text.formats.web_page import decode_declared, decode_page

PROSE = "The lighthouse keeper climbed the stairs every evening to light the lamp. "
PAGE = f"""<!DOCTYPE html>
<html><head><title>Lamps</title><script>var a = "hidden";</script><style>p {{ color: red }}</style></head>
<body><header><nav><ul><li><a href="/">Home</a></li><li><a href="/x">Subscribe</a></li></ul></nav></header>
<main><article><h1>The keeper</h1><p>Grüße &amp; küsse: {PROSE * 3}</p>
<p>{PROSE * 3}</p><ul><li>First point of the list</li></ul></article></main>
<aside>Related articles</aside><footer>All rights reserved. Cookies.</footer></body></html>"""


@pytest.mark.parametrize("name", ["a.html", "a.htm", "a.html.gz"])
def test_the_main_text(name: str, tmp_path: Path) -> None:
    data = PAGE.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    corpus = Corpus(tmp_path / name)
    (document,) = corpus
    assert document.text.startswith("The keeper\nGrüße & küsse: The lighthouse keeper")
    assert not any(word in document.text for word in ("hidden", "Subscribe", "Cookies", "<", "color"))
    assert corpus.describe() == f"1 document: {name} as the main text of a web page"


ENCODED = {
    "meta": (PAGE.replace("<head>", '<head><meta charset="iso-8859-1">').encode("cp1252"), ()),
    "http-equiv": (
        PAGE.replace("<head>", '<head><META HTTP-EQUIV="Content-Type" content="text/html; CHARSET=cp1250">').encode(
            "cp1250"
        ),
        (),
    ),
    "header": (PAGE.encode("cp1252"), ("latin-1",)),
    "a wrong declaration": (PAGE.replace("<head>", '<head><meta charset="koi8-r">').encode(), ()),
    "an unknown declaration": (PAGE.replace("<head>", '<head><meta charset="x-user">').encode(), ("rot13",)),
    "byte order mark": (PAGE.encode("utf-16"), ()),
    "a damaged byte": (PAGE.encode().replace("ß".encode(), b"\xff\xc3\x9f"), ()),
    "xhtml": (f'<?xml version="1.0" encoding="cp1252"?>{PAGE}'.encode("cp1252"), ()),
}


@pytest.mark.parametrize("name", ENCODED)
def test_encodings(name: str) -> None:
    data, declared = ENCODED[name]
    page = decode_page(data, *declared)
    assert page is not None
    assert "küsse" in page


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("Shift_JIS", "cp932", "①髙島屋"),
        ("euc-kr", "cp949", "똠방각하"),
        ("gb2312", "gb18030", "镕堃"),
        ("iso-8859-9", "cp1254", "“İyi”"),
        ("utf-16le", "utf-16-le", "plain words"),
    ],
)
def test_names_of_encodings_mean_what_browsers_read(declared: str, encoding: str, text: str) -> None:
    assert decode_declared(text.encode(encoding), declared) == text


def test_text_that_is_none() -> None:
    assert decode_declared(bytes(range(256)) * 20) is None
    assert decode_declared("日本語の灯台。".encode("iso2022_jp"), "iso-2022-jp") == "日本語の灯台。"


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(UserError) as told:
        list(Corpus(path))
    assert str(told.value).startswith(str(path))
    assert "\n" not in str(told.value)
    return str(told.value)


def test_files_that_are_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.html"
    assert "1 skipped: web pages without a main text" in refusal(path, b"<html><body></body></html>")
    assert "1 skipped: web pages without a main text" in refusal(path, b"")
    assert "not HTML in a known encoding. It looks like a .gz file" in refusal(path, gzip.compress(PAGE.encode()))
    assert "not HTML in a known encoding. It does not look like text" in refusal(path, bytes(range(256)) * 20)
    monkeypatch.setattr(web_page, "MAX_PAGE_BYTES", 500)
    assert "a page of more than 500 bytes" in refusal(path, PAGE.encode())


def test_reports_of_firth_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`firth check .` writes check.html there; the next one must not read it."""
    own = PAGE.replace("<head>", f"<head>{generator_meta_tag('check')}")
    (tmp_path / "check.html").write_text(own)
    (tmp_path / "b.txt").write_text("a text")
    assert [d.text for d in Corpus(tmp_path)] == ["a text"]
    assert "1 left out" in capsys.readouterr().err
    (document,) = Corpus(tmp_path / "check.html")  # named by the user, it is read
    assert document.text.startswith("The keeper")


def test_a_missing_extra_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trafilatura", None)
    told = refusal(tmp_path / "a.html", PAGE.encode())
    assert "a.html: reading web pages needs the package trafilatura. Install it:" in told
    assert told.endswith("-m pip install 'firth[data]'")


@pytest.mark.parametrize("unit", ["<div>", "<b><i>", "<p>a", "<a href='x'>b</a> ", "&amp;", "<!--", "<table><tr><td>x"])
def test_pages_made_to_harm(unit: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<html><body>{unit * (2**14 // len(unit))}{PROSE}")
    (tmp_path / "b.txt").write_text("a text")
    started = time.process_time()
    assert "a text" in [d.text for d in Corpus(tmp_path)]
    assert time.process_time() - started < 20
