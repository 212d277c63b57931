"""Lines end at \n only, long ones come in chunks, and binary files are recognized."""

from __future__ import annotations

import gzip
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firth.core.errors import UserError
from firth.text import Corpus
from firth.text import open_text as module
from firth.text.open_text import (
    DECOMPRESSORS,
    check_encoding,
    estimate_text_bytes,
    guess_encoding,
    import_optional,
    read_lines,
    split_long_line,
)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def refusal(path: Path, encoding: str = "utf-8") -> str:
    with pytest.raises(UserError) as e:
        list(read_lines(path, encoding))
    return str(e.value)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    text = "a\u2028b\x0bc\x0cd\x85e\u2029f\rg\nh\r\ni"
    assert list(read_lines(write(tmp_path / "a.txt", text.encode()))) == [
        "a\u2028b\x0bc\x0cd\x85e\u2029f\rg\n",
        "h\n",
        "i",
    ]


@given(
    st.lists(st.sampled_from(["a", "é", "\n", "\r", "\r\n", "\u2028", "longer words"]), max_size=60),
    st.integers(1, 12),
    st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_lines_do_not_depend_on_the_read_size(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], piece: int, longest: int
) -> None:
    """For any read size, lines end at \n, and long ones are split."""
    text = "".join(parts)
    path = write(tmp_path_factory.getbasetemp() / "law.txt", text.encode())
    expected = [line.removesuffix("\r") + "\n" for line in text.split("\n")]
    expected[-1] = text.split("\n")[-1]
    before, module.READ_CHUNK_BYTES = module.READ_CHUNK_BYTES, piece
    try:
        found, cut = list(read_lines(path)), list(read_lines(path, max_chars=longest))
    finally:
        module.READ_CHUNK_BYTES = before
    assert found == [line for line in expected if line]
    assert "".join(cut) == "".join(found)
    assert all(len(part.rstrip("\n")) <= longest for part in cut)
    assert [part for part in cut if part == "\n"] == [line for line in found if line == "\n"]


def test_a_byte_order_mark_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_CHUNK_BYTES", 1)
    assert list(read_lines(write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\xef\xbb\xbftwo"))) == ["one\n", "\ufefftwo"]


def test_a_line_feed_stays_with_its_piece() -> None:
    assert list(split_long_line("12345678\n", 4)) == ["1234", "5678\n"]
    assert list(split_long_line("123456789\n", 4)) == ["1234", "5678", "9\n"]
    assert list(split_long_line("\n", 4)) == ["\n"]


SENTENCES = {
    "cp1252": "Le café est situé à côté de l'école où j'étais élève.",
    "cp1250": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "cp1251": "Это простой русский текст, который нужно прочитать.",
    "koi8_r": "Это простой русский текст, который нужно прочитать.",
    "cp1253": "Αυτό είναι ένα απλό ελληνικό κείμενο.",
    "cp1256": "هذا نص عربي بسيط للاختبار",
    "cp932": "①これは日本語の文章です。とても短いです。",
    "euc_jp": "これは日本語の文章です。とても短いです。",
    "cp949": "이것은 간단한 한국어 문장입니다. 똠방각하",
    "gb18030": "这是一个简单的中文句子，我们在这里测试编码。",
    "big5": "這是一個簡單的中文句子，我們在這裡測試編碼。",
    "utf-16": "plain",
    "utf-32": "plain",
    "utf-16-le": "plain words",
    "utf-16-be": "plain words",
}


@pytest.mark.parametrize("encoding", SENTENCES)
def test_the_likely_encoding(tmp_path: Path, encoding: str) -> None:
    data = SENTENCES[encoding].encode(encoding)
    assert guess_encoding(data) == encoding
    path = write(tmp_path / "a.txt", data)
    assert f"It looks like {encoding}: --encoding {encoding} decodes every file with it." in refusal(path)
    assert "".join(read_lines(path, encoding)) == SENTENCES[encoding]


@pytest.mark.parametrize("text", ["été à la plage, où déjà", "naïve", "Zoë – „Straße“", "smørrebrød på øen"])
def test_letters_that_mix_with_ascii_are_latin(text: str) -> None:
    assert guess_encoding(text.encode("cp1252")) == "cp1252"


@pytest.mark.parametrize("text", ["<b>Привет</b>, Hello <i>мир</i> и люди", "Это тест (test)"])
def test_letters_of_their_own_are_not(text: str) -> None:
    assert guess_encoding(text.encode("cp1251")) == "cp1251"


def test_a_text_that_ends_in_the_middle_of_a_character(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\ndéjà vu €".encode()[:-1])
    where = "ends in the middle of a character of UTF-8, see byte"
    assert refusal(path) == f"{path}:2: {where} 14 of its text. It is truncated: download it again."
    path = write(tmp_path / "b.txt", b"caf\xe9")
    assert refusal(path).endswith("It is truncated: download it again, or name its --encoding.")


def test_damage_that_decompression_lets_through(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress(b"caf\xe9 au lait"))
    assert refusal(path).endswith("Or the compressed file is damaged: download it again.")


def test_no_likely_encoding() -> None:
    assert guess_encoding(bytes(range(128, 256))) is None
    assert guess_encoding(b"") is None


def test_where_the_text_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo\nthr\xe9e\n")
    for piece in (1, 4, 2**16):
        monkeypatch.setattr(module, "READ_CHUNK_BYTES", piece)
        assert refusal(path).startswith(f"{path}:3: not UTF-8, see byte 11 of its text.")


def test_utf16_without_its_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "plain words".encode("utf-16-le"))
    assert "It looks like utf-16-le" in refusal(path, "utf-16")
    assert "It looks like utf-16-le" in refusal(path)  # it decodes, as letters and zeros


def test_binary_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", bytes(range(256)) * 10)
    assert "not text: control characters are more than 10% of its start" in refusal(path, "latin-1")
    assert refusal(path) == (
        f"{path}:2: not UTF-8, see byte 128 of its text. It does not look like text: leave it out."
    )
    assert "It looks like a .zip file" in refusal(write(tmp_path / "b.txt", b"PK\x03\x04\x14\xff\xff" * 9))
    assert list(read_lines(write(tmp_path / "c.txt", b"\x1b[31mred\x1b[0m, and one \x00 in plenty of text"))) != []


@pytest.mark.parametrize(
    "name",
    [
        "utf9",
        "hex",
        "rot13",
        "zlib",
        "nul\x00",
        "raw_unicode_escape",
        "unicode-escape",
        "idna",
        "punycode",
        "undefined",
    ],
)
def test_unknown_encodings_raise(name: str) -> None:
    with pytest.raises(UserError, match="no such encoding"):
        check_encoding(name)


def test_a_missing_library_is_named() -> None:
    with pytest.raises(
        UserError,
        match=rf"needs the package pyarrow. Install it: {re.escape(sys.executable)} -m pip install 'firth\[data\]'$",
    ):
        import_optional("pyarrow.nothing_of_the_kind", "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"x")
    path.chmod(0)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)."


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, name: str) -> None:
    """Its first part is a text of its own: without an error, the rest would be missing silently."""
    text = b"".join(b"%d\n" % (i * 7919 % 10**6) for i in range(200_000))
    path = write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    lines = read_lines(path)
    assert next(lines) == "0\n"
    os.truncate(path, 2**17 // 8)
    with pytest.raises(UserError, match=r"cut from [\d,]+ to [\d,]+ bytes while it was read|file is truncated"):
        list(lines)
    with open(write(tmp_path / "b.txt", text), "ab") as file:  # a file that grows is read as far as it goes
        lines = read_lines(tmp_path / "b.txt")
        next(lines)
        file.write(b"more\n")
        file.flush()
        assert len(list(lines)) >= 199_999


@pytest.mark.parametrize("extension", [".gz", ".xz", ".bz2"])
def test_the_text_of_a_compressed_file_is_estimated(
    extension: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"".join(b"line %d: the cat sat on the mat\n" % (i * i) for i in range(20_000))
    file = tmp_path / f"a.txt{extension}"
    with DECOMPRESSORS[extension](file, "wb") as out:
        out.write(text)
    assert estimate_text_bytes(file) == len(text)
    assert Corpus(file).text_bytes == len(text) > 3 * Corpus(file).total_bytes
    monkeypatch.setattr("firth.text.open_text.RATIO_SAMPLE_BYTES", len(text) // 2)
    blocks = 0.6 if extension == ".bz2" else 0.3  # bzip2 reads blocks of 900 kB, larger than this file
    assert estimate_text_bytes(file) == pytest.approx(len(text), rel=blocks)
    file.write_bytes(file.read_bytes()[:40])
    assert estimate_text_bytes(file) == 40, "damage is reported by reading"
