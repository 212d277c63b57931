"""Every way in which files become documents, and every error."""

from __future__ import annotations

import builtins
import bz2
import errno
import gzip
import io
import lzma
import os
import re
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from firth.core.errors import UserError
from firth.text import corpus as module
from firth.text import open_text as lines_module
from firth.text import python_docs, records
from firth.text.corpus import Corpus, Document, TextBlock, iter_text_blocks, split_at_last_space
from firth.text.open_text import read_lines


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".bz2": bz2.compress,
        ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    pack = packers.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def refusal(*paths: str | Path, **options: Any) -> str:
    """The message of the error that a corpus raises, at the start or while it is read."""
    with pytest.raises(UserError) as e:
        list(Corpus(paths, **options))
    return str(e.value)


# Documents


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "a.txt.bz2", "a.txt.zst", "A.TXT"])
def test_a_named_text_file_is_split_on_blank_lines(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "one\n  two\n\n \t\n\nthree\n")
    corpus = Corpus([path])
    assert list(corpus) == [Document("one\n  two", f"{path}:1"), Document("three", f"{path}:6")]
    assert corpus.describe() == f"2 documents: {name} split on blank lines"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz"])
def test_jsonl_has_one_document_per_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '{"text": "one\\n\\ntwo"}\n\n{"text": "th\u2028ree", "id": 7}')
    corpus = Corpus([path])
    assert list(corpus) == [Document("one\n\ntwo", f"{path}:1"), Document("th\u2028ree", f"{path}:3")]
    assert corpus.describe() == f"2 documents: {name} with one document per line"


def test_columns_name_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "no", "body": "yes"}\n')
    assert texts(Corpus([path], columns={"text": "body"})) == ["yes"]


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    write(tmp_path / "b/z.txt", "z\n\nz")
    write(tmp_path / "b/.hidden.txt", "no")
    write(tmp_path / ".git/a.txt", "no")
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "c.jsonl", '{"text": "c"}')
    corpus = Corpus([tmp_path])
    assert texts(corpus) == ["a", "z\n\nz", "c"]
    assert corpus.describe() == "3 documents: 2 files whole, 1 file with one document per line"


def test_a_large_file_in_a_folder_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WHOLE_FILE_CHARS", 10)
    write(tmp_path / "just.txt", "1234\n\n789\n")
    write(tmp_path / "over.txt", "1234\n\n7890\n")
    corpus = Corpus([tmp_path])
    assert texts(corpus) == ["1234\n\n789", "1234", "7890"]
    assert corpus.describe() == "3 documents: 1 file split on blank lines, 1 file whole"


def test_documents_forces_the_way(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n  one\n\ntwo\n\n")
    assert texts(Corpus([path], documents="file")) == ["\n  one\n\ntwo"]
    assert texts(Corpus([tmp_path], documents="file")) == ["\n  one\n\ntwo"]
    assert texts(Corpus([tmp_path], documents="blank-line")) == ["  one", "two"]


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "x"}\n{"text": " \\n"}\n')
    corpus = Corpus([path])
    assert texts(corpus) == ["x"]
    assert corpus.describe() == "1 document: a.jsonl with one document per line; 2 empty and skipped"


def test_lone_surrogates_are_replaced_and_counted(tmp_path: Path) -> None:
    corpus = Corpus([write(tmp_path / "a.jsonl", '{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')])
    assert texts(corpus) == ["a\ufffdb", "\U0001f600"]
    assert "; 1 with lone surrogates" in corpus.describe()


def test_lone_surrogates_of_utf_7_are_replaced(tmp_path: Path) -> None:
    corpus = Corpus([write(tmp_path / "a.txt", b"a+2AA-b\n\nc")], encoding="utf-7")
    assert texts(corpus) == ["a\ufffdb", "c"]


def test_text_is_unchanged_except_for_bom_and_crlf(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfe\xcc\x81 \xef\xac\x81\xc2\xa0\tx\ry\r\nz\r\n\r\nnext\x0bline\r\n")
    assert texts(Corpus([path])) == ["e\u0301 \ufb01\u00a0\tx\ry\nz", "next\x0bline"]


def test_encoding_option_is_used(tmp_path: Path) -> None:
    assert texts(Corpus([write(tmp_path / "a.txt", b"caf\xe9")], encoding="latin-1")) == ["caf\u00e9"]
    wide = write(tmp_path / "b.txt", "a\u010a\r\n\r\nb\n".encode("utf-16"))
    assert texts(Corpus([wide], encoding="utf-16")) == ["a\u010a", "b"]


def test_a_corpus_can_be_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo")
    corpus = Corpus(str(path))
    assert corpus.describe() == "0 documents: nothing read yet"
    assert texts(corpus) == texts(corpus) == ["one", "two"]
    assert corpus.describe() == "2 documents: a.txt split on blank lines"
    assert corpus.total_bytes == 8


def test_the_built_in_corpus_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = python_docs.DocstringRecord("p", "p.f", "Some text.", ())
    monkeypatch.setattr(python_docs, "load_pydocs", lambda: [record])
    corpus = Corpus(["pydocs", write(tmp_path / "a.txt", "mine")])
    assert list(corpus) == [Document("Some text.", "pydocs:p.f"), Document("mine", f"{tmp_path / 'a.txt'}:1")]
    assert corpus.describe() == "2 documents: a.txt split on blank lines, the built-in pydocs"
    assert corpus.total_bytes == 10 + 4


# Tables


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.zst"])
def test_csv_has_one_document_per_row(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, '\ufeffid,text\r\n1,"one, ""two""\r\nthree"\r\n\r\n2,th\u2028ree\r\n')
    corpus = Corpus([path])
    assert list(corpus) == [Document('one, "two"\nthree', f"{path}:2"), Document("th\u2028ree", f"{path}:5")]
    assert corpus.describe() == f"2 documents: {name} with one document per row"


@pytest.mark.parametrize("rows", ["text\rone\rtwo\r", "text\nfine\none\rtwo\n"])
def test_carriage_returns_alone_end_no_row(tmp_path: Path, rows: str) -> None:
    (tmp_path / "a.tsv").write_bytes(rows.encode())
    with pytest.raises(UserError, match=r"a.tsv:[13]: not a row of a .tsv file \(a carriage return \\r that no \\n"):
        list(Corpus(tmp_path / "a.tsv"))


def test_tsv_has_no_quotation_marks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", 'body\tid\n"one\t1\ntwo"\t2\n')
    assert texts(Corpus([path], columns={"text": "body"})) == ['"one', 'two"']
    assert "no column 'text'; there are: body, id" in refusal(path)


def test_parquet_has_one_document_per_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"n": [1, 2, 3], "text": ["one\n\none", "two", ""], "tokens": [["one", "one"], ["two"], []]})
    pq.write_table(table, path, row_group_size=1)
    corpus = Corpus([path])
    assert list(corpus) == [Document("one\n\none", f"{path}:row 1"), Document("two", f"{path}:row 2")]
    assert corpus.describe() == "2 documents: a.parquet with one document per row; 1 empty and skipped"
    words = Corpus([path], columns={"words": "tokens"})
    assert [document.word_starts for document in words] == [(0, 5), (0,)]


def test_parquet_column_of_another_type(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None], "n": [1, 2], "raw": [b"x", b"y"]}), path)
    assert refusal(path) == f"{path}:row 2: column 'text' holds null, which is not text."
    assert refusal(path, columns={"text": "n"}) == f"{path}:row 1: column 'n' holds 1, which is not text."
    assert "column 'raw' holds" in refusal(path, columns={"text": "raw"})
    message = f"{path}:row 1: no column 'txt'; there are: text, n, raw. Name the right one: --columns text=text."
    assert refusal(path, columns={"text": "txt"}) == message


def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [str(i) * 50 for i in range(1000)]}), path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert refusal(path).startswith(f"{path}: not a complete .parquet file, after row 0 (")
    assert "Decompress .gz first" in refusal(write(tmp_path / "a.parquet.gz", data))


def test_large_parquet_does_not_enter_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "PARQUET_BATCH_BYTES", 2**20)
    path = tmp_path / "large.parquet"
    text = pa.array([f"{i} " + "many words " * 300 for i in range(2000)])
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for _ in range(10):
            writer.write_table(pa.table({"text": text}))
    before = pa.default_memory_pool().bytes_allocated()
    del text
    peaks = [pa.default_memory_pool().bytes_allocated() - before for _ in Corpus([path])]
    assert len(peaks) == 20_000
    assert max(peaks) < 20e6  # of 66 MB


def test_a_folder_of_mixed_files(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "b.csv.bz2", "text\nb\n")
    write(tmp_path / "c.jsonl.gz", '{"text": "c"}')
    write(tmp_path / "d/e.tsv", "text\ne\n")
    pq.write_table(pa.table({"text": ["f"]}), tmp_path / "d/f.parquet")
    corpus = Corpus([tmp_path])
    assert texts(corpus) == ["a", "b", "c", "e", "f"]
    said = "5 documents: 1 file whole, 1 file with one document per line, 3 files with one document per row"
    assert corpus.describe() == said


# Standard input


def give(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_standard_input_can_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, b"one\n\ntwo")
    corpus = Corpus(["-"])
    assert list(corpus) == list(corpus) == [Document("one", "stdin:1"), Document("two", "stdin:3")]
    assert corpus.describe() == "2 documents: stdin split on blank lines"
    assert corpus.total_bytes == 8


def test_standard_input_may_be_jsonl(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, b'\xef\xbb\xbf\n{"text": "one"}\n{"text": 2}\n')
    with pytest.raises(UserError, match="stdin:3: column 'text' holds 2, which is not text"):
        list(Corpus(["-"]))
    give(monkeypatch, gzip.compress(b"text"))
    assert "stdin:1: not UTF-8, see byte 1 of its text. It looks like a .gz file" in refusal("-")
    assert "named twice" in refusal("-", "-")


# Cleaning


def test_text_is_normalised_only_on_request(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "E\u0301 \ufb01t"}\n{"text": "plain"}\n{"words": ["A\ufb01", "B"]}\n')
    assert texts(Corpus([path])) == ["E\u0301 \ufb01t", "plain", "A\ufb01 B"]
    assert texts(Corpus([path], normalize="nfc")) == ["\u00c9 \ufb01t", "plain", "A\ufb01 B"]
    corpus = Corpus([path], normalize="nfkc,lower")
    assert [(d.text, d.word_starts) for d in corpus] == [("\u00e9 fit", None), ("plain", None), ("afi b", (0, 4))]
    assert corpus.describe().endswith("; 2 changed by --normalize nfkc,lower (6 characters replaced)")
    assert "Did you mean 'nfkc'?" in refusal(path, normalize="nfkd")


def test_filters_count_what_they_drop(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a b c\n\nonly two\n\none two three four\n\nxx yy zz vv")
    corpus = Corpus([path], min_words=3, max_words=4, min_characters=8)
    assert texts(corpus) == texts(corpus) == ["one two three four", "xx yy zz vv"]
    assert corpus.describe().endswith("; 1 left out, under 3 words; 1 left out, under 8 characters")
    assert refusal(path, min_words=9) == f"{path}: no documents, 4 left out, under 9 words. Name files with text."
    assert "no document has that many words" in refusal(path, min_words=9, max_words=3)


def test_documents_in_other_languages_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    english = "The heron stands in the shallow water and waits for the fish to come."
    german = "Der Reiher steht im flachen Wasser und wartet darauf, dass die Fische kommen."
    path = write(tmp_path / "a.txt", f"{english}\n\n{german}")
    assert texts(Corpus([path], language="en")) == [english]
    assert texts(Corpus([path], language="en,de")) == [english, german]
    corpus = Corpus([path], language="de")
    assert texts(corpus) == [german]
    assert corpus.describe().endswith("; 1 left out, not in the language de")
    assert "--language klingon: unknown language. There are: " in refusal(path, language="klingon")


# Words and sides


def test_words_may_come_with_their_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text": "我喜欢你。", "words": ["我", "喜欢", "你", "。"]}\n'
        '{"words": ["New York", "is", "far"]}\n'
        '{"text": "a b", "words": null}\n'
        '{"text": "ab ab", "words": ["ab", "", "b"]}\n',
    )
    corpus = Corpus([path])
    assert list(corpus) == [
        Document("我喜欢你。", f"{path}:1", (0, 1, 3, 4)),
        Document("New York is far", f"{path}:2", (0, 9, 12)),
        Document("a b", f"{path}:3"),
        Document("ab ab", f"{path}:4", (0, 4)),
    ]
    assert corpus.describe().endswith("; 3 with listed words")


def test_columns_name_the_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a", "b"], "words": 2}\n')
    columns = {"words": "tokens"}
    assert list(Corpus([path], columns=columns)) == [Document("a b", f"{path}:1", (0, 2))]
    assert "no column 'tokens'" in refusal(write(tmp_path / "b.jsonl", '{"text": "a"}'), columns=columns)


def test_a_count_of_words_is_no_list_of_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a b", "words": 2}\n')
    corpus = Corpus([path])
    assert list(corpus) == [Document("a b", f"{path}:1")]
    assert "; 1 with an ignored 'words' that is not a list of words" in corpus.describe()
    message = f"{path}:1: column 'words' holds 2, which is not a list of words."
    assert refusal(path, columns={"words": "words"}) == message


def test_words_must_be_in_the_text_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"text": "one two", "words": ["two", "one"]}\n')
    assert refusal(path) == f"{path}:2: the word 'one' does not occur in the text after its character 7."
    path = write(tmp_path / "b.jsonl", '{"text": "one", "words": ["one", 2]}\n')
    assert refusal(path) == f"{path}:1: column 'words' holds [\"one\", 2], which is not a list of words."


def test_a_document_may_have_two_sides(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text_a": "the heron", "text_b": "der Reiher"}\n{"text": "alone", "text_a": "no", "text_b": "no"}\n',
    )
    corpus = Corpus([path])
    assert list(corpus) == [
        Document("the heron", f"{path}:1", text_pair="der Reiher"),
        Document("alone", f"{path}:2"),
    ]
    assert list(corpus.texts()) == ["the heron", "der Reiher", "alone"]
    assert corpus.describe().endswith("; 1 with two texts (text_a and text_b)")


def test_columns_name_the_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "no", "en": "heron", "de": "Rei\\ud800her"}\n')
    columns = {"text_a": "en", "text_b": "de"}
    corpus = Corpus([path], columns=columns)
    assert [document.texts for document in corpus] == [("heron", "Rei\ufffdher")]
    assert "with two texts (en and de)" in corpus.describe()
    assert "1 with lone surrogates" in corpus.describe()
    assert "no column 'de'" in refusal(write(tmp_path / "b.jsonl", '{"en": "heron"}'), columns=columns)
    assert "Name the text, or the two texts of a pair" in refusal(path, columns={**columns, "text": "text"})


def test_words_of_text_pairs_raise(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text_a": "a", "text_b": "b", "words": ["a"]}\n')
    assert refusal(path).startswith(f"{path}:1: words and a text pair.")
    assert list(Corpus([path], columns={"words": "words"})) == [Document("a", f"{path}:1", (0,))]


def test_an_empty_side_empties_the_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text_a": "a", "text_b": " "}\n{"text_a": "a", "text_b": "b"}\n')
    corpus = Corpus([path])
    assert texts(corpus) == ["a"]
    assert "; 1 empty and skipped" in corpus.describe()
    assert "no column 'text_b'" in refusal(write(tmp_path / "b.jsonl", '{"text_a": "a"}'))


# Memory


def test_a_large_file_does_not_enter_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text(("a line of forty characters, all in all.\n" * 25 + "\n") * 6_000)
    assert path.stat().st_size > 6e6
    tracemalloc.start()
    n = sum(1 for _ in Corpus([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 6_000
    assert peak < 1e6


def test_only_the_needed_documents_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"first\n\n" + b"x\n" * 100_000 + b"\xff")
    assert next(iter(Corpus([path]))).text == "first"  # the bad byte at the end has not been met


def test_text_without_blank_lines_is_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT_CHARS", 8)
    corpus = Corpus([write(tmp_path / "a.txt", "aa bb cc dd ee ff\n\ngg")])
    assert texts(corpus) == ["aa bb ", "cc dd ee ", "ff", "gg"]
    assert corpus.describe().endswith("; 2 cut because they are over 8 characters")


def test_long_records_are_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT_CHARS", 8)
    corpus = Corpus([write(tmp_path / "a.jsonl", '{"text": "aa bb cc dd ee ff"}\n{"text": "gg"}\n')])
    assert [(d.text, d.source[-1]) for d in corpus] == [("aa bb ", "1"), ("cc dd ee ", "1"), ("ff", "1"), ("gg", "2")]
    assert corpus.describe().endswith("; 2 cut because they are over 8 characters")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_a_line_that_is_too_long_to_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(records, "MAX_LINE_CHARS", 100)
    first = '{"text": "x"}\n' if name == "a.jsonl" else "text\n"
    path = write(tmp_path / name, first + "x" * 1000 + "\n")
    assert refusal(path).startswith(f"{path}:2: a line of more than 100 characters.")


def test_a_cell_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_LINE_CHARS", 100)
    path = write(tmp_path / "a.csv", 'text\n"' + "x\n" * 1000)
    assert refusal(path) == f"{path}:2: not a row of a .csv file (field larger than field limit (100))."


def test_a_single_line_does_not_enter_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT_CHARS", 2**16)
    path = write(tmp_path / "a.txt", "no line ends here, " * 1_000_000)
    tracemalloc.start()
    total = sum(len(document.text) for document in Corpus([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 19_000_000
    assert peak < 2e6


def test_blocks_by_hand() -> None:
    stream = ["a\n", "b\n", "\n", "c\n", " \n", "d"]
    assert list(iter_text_blocks(stream, True, 100)) == [
        TextBlock(1, "a\nb\n", False),
        TextBlock(4, "c\n", False),
        TextBlock(6, "d", False),
    ]
    assert list(iter_text_blocks(stream, False, 100)) == [TextBlock(1, "a\nb\n\nc\n \nd", False)]
    assert list(iter_text_blocks(stream, True, 4)) == [
        TextBlock(1, "a\nb\n", True),
        TextBlock(4, "c\n", False),
        TextBlock(6, "d", False),
    ]
    assert split_at_last_space("word") == ("word", "")
    assert split_at_last_space("two words\n") == ("two words\n", "")


# Mistakes


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.txt") == f"{tmp_path / 'no.txt'}: no such file or folder."
    with pytest.raises(UserError, match="no such file"):
        list(read_lines(tmp_path / "no.txt"))


def test_unknown_extension(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.docx", "x")).endswith(
        "a.docx: .docx files are not read. Save it as plain text, .txt."
    )
    for name in ("GPL-3", "notes.tex", "x.1.gz"):  # a named file is plain text, unless its bytes say otherwise
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"one\n\ntwo") if name.endswith(".gz") else b"one\n\ntwo")
        assert [d.text for d in Corpus(path)] == ["one", "two"]
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    assert "not UTF-8" in refusal(tmp_path / "a.png")


def test_a_pattern_names_files(tmp_path: Path) -> None:
    for name in ("49960", "49961", "deeper/51060"):  # as in 20 Newsgroups
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, name)
    assert [d.text for d in Corpus(tmp_path / "*")] == ["49960", "49961"]
    assert [d.text for d in Corpus(str(tmp_path / "**"))] == ["49960", "49961", "deeper/51060"]
    assert "no file matches this pattern" in refusal(tmp_path / "*.txt")
    assert "needs a pattern" in refusal(tmp_path)


def test_folder_with_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to read in this folder" in refusal(tmp_path)
    write(tmp_path / "a.tex", "x")
    assert "nothing to read in this folder" in refusal(tmp_path)


def test_other_files_in_a_folder_are_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "a.tex", "b.tex", "c.doc.gz", "Makefile"):
        write(tmp_path / name, "x")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = Corpus([tmp_path])
    assert texts(corpus) == texts(corpus) == ["x"]
    said = capsys.readouterr().err
    assert said.count("left out") == 1
    assert (
        "5 left out that are not .txt, .text, .md, .rst, .jsonl, .csv, .tsv, .parquet, .warc, .wet, .xml, .html,"
        in said
    )
    assert "(.doc, .tex, linked folder, no extension)" in said


def test_empty_corpus(tmp_path: Path) -> None:
    assert "no documents" in refusal(write(tmp_path / "a.txt", "\n \n"), write(tmp_path / "b.jsonl", ""))
    assert "no path given" in refusal()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.jsonl"])
def test_not_utf8(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b'{"text": "cafe "}\n' * 20_000 + b"caf\xe9\n")
    message = refusal(path)
    assert message.startswith(f"{path}:20001: not UTF-8, see byte {18 * 20_000 + 3:,} of its text.")
    assert "It looks like cp1252: --encoding cp1252 decodes every file with it." in message


def test_mixed_encodings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"caf\xc3\xa9\n" * 20_000 + b"caf\xe9\n")
    message = refusal(path)
    assert message.startswith(
        f"{path}:20001: not UTF-8, see byte 120,003 of its text. The text before it is UTF-8, so the file"
    )
    assert "mixes encodings or is damaged there" in message


def test_a_character_that_the_file_cuts_short(tmp_path: Path) -> None:
    assert "see byte 3 of its text" in refusal(write(tmp_path / "a.txt", b"caf\xc3"))


def test_unknown_encoding_and_way(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    assert refusal(path, encoding="utf9").startswith("--encoding utf9: no such encoding.")
    assert refusal(path, documents="blank-lines").endswith("Did you mean 'blank-line'?")


def test_line_that_is_not_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n\n{"text": x}\n')
    assert refusal(path) == f"{path}:3: not JSON (Expecting value). Each line must be one object."
    deep = write(tmp_path / "b.jsonl", "[" * 200_000)
    assert refusal(deep).startswith(f"{deep}:1: not JSON")


def test_line_that_is_not_an_object(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '"x"\n')
    assert refusal(path) == f'{path}:1: not an object. Each line must be like {{"text": "..."}}.'


def test_missing_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"body": "y", "id": 1}\n')
    message = f"{path}:2: no column 'text'; there are: body, id. Name the right one: --columns text=NAME."
    assert refusal(path) == message


def test_column_that_is_not_text_and_unknown_role(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": null}\n')
    assert refusal(path) == f"{path}:1: column 'text' holds null, which is not text."
    assert "Did you mean 'text'?" in refusal(path, columns={"txt": "body"})


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.xz", "a.tsv.bz2", "a.csv.zst"])
def test_truncated_compressed_file(tmp_path: Path, name: str) -> None:
    line = "text" if "sv" in name else '{"text": "%d"}'
    path = write(tmp_path / name, "".join(line.replace("%d", str(i)) + "\n" for i in range(5000)))
    path.write_bytes(path.read_bytes()[:-20])
    message = refusal(path)
    assert message.endswith(": the compressed file is truncated. Download or compress it again.")
    assert re.fullmatch(r"(:\d+)?", message.removeprefix(str(path)).partition(": ")[0]), "at which line"


def test_a_file_that_is_cut_short_late_says_at_which_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", "".join(f"{i} {i * 7919 % 10007}\n" for i in range(40_000)))
    path.write_bytes(path.read_bytes()[:-20])
    line = int(refusal(path).removeprefix(f"{path}:").partition(":")[0])
    assert 1000 < line <= 40_001


def test_a_disk_that_fails_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x")

    class Failing(io.BytesIO):
        def fileno(self) -> int:
            return os.open(path, os.O_RDONLY)

        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.open", lambda *_, **__: Failing())
    assert refusal(path) == f"{path}: cannot be read (Input/output error)."


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz", "a.txt.bz2", "a.txt.zst"])
def test_file_that_is_not_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("plain text")
    assert refusal(path).startswith(f"{path}: not a complete {path.suffix} file")


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x")

    def refuse(file: Any, *rest: Any) -> Any:
        if file == path:
            raise PermissionError(13, "Permission denied", str(file))
        return builtins.open(file, *rest)

    monkeypatch.setattr(lines_module, "open", refuse, raising=False)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)."


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_column_that_stands_twice(tmp_path: Path, name: str) -> None:
    mark = "," if name == "a.csv" else "\t"
    path = write(tmp_path / name, f"text{mark}text\none{mark}other\n")
    assert refusal(path) == f"{path}:1: two columns are named 'text'. Rename one."


def test_one_is_not_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DOCUMENT_CHARS", 8)
    corpus = Corpus([write(tmp_path / "a.txt", "one two three")])
    texts(corpus)
    assert corpus.describe().endswith("; 1 cut because it is over 8 characters")
    corpus = Corpus([write(tmp_path / "a.jsonl", '{"text": "A", "words": ["A"]}')], normalize="lower")
    texts(corpus)
    said = corpus.describe()
    assert said.endswith("; 1 with listed words; 1 changed by --normalize lower (1 character replaced)")


# How far reading has come


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2", "a.txt.xz", "a.txt.zst", "a.jsonl.gz", "a.csv"])
def test_the_position_is_that_in_the_file_on_the_disk(tmp_path: Path, name: str) -> None:
    words = [f"heron {i} {i * 7919 % 100_003}" for i in range(60_000)]
    forms = {".txt": "{}\n\n", ".jsonl": '{{"text": "{}"}}\n', ".csv": "{}\n"}
    form = forms[records.data_extension(Path(name))]
    path = write(tmp_path / name, ("text\n" if ".csv" in name else "") + "".join(map(form.format, words)))
    corpus = Corpus([path])
    progress = []
    for i, _ in enumerate(corpus):
        if i % 10_000 == 9_999:
            assert corpus.bytes_read is not None
            progress.append(corpus.bytes_read / corpus.total_bytes)
    assert progress == sorted(progress)
    ahead = 0.2 if Path(name).suffix in (".txt", ".csv") else 0.5  # others are read in larger blocks
    assert progress[2] == pytest.approx(0.5, abs=ahead), "half of the documents are about half of the file"
    assert corpus.bytes_read == corpus.total_bytes


def test_the_position_in_several_files_and_in_parquet(tmp_path: Path) -> None:
    write(tmp_path / "t" / "a.txt", "x" * 500)
    pq.write_table(pa.table({"text": [f"text {i}" for i in range(100)]}), tmp_path / "t" / "b.parquet")
    write(tmp_path / "t" / "c.txt.gz", "y" * 500)
    corpus = Corpus([tmp_path / "t"])
    sizes = [(tmp_path / "t" / name).stat().st_size for name in ("a.txt", "b.parquet", "c.txt.gz")]
    progress = [corpus.bytes_read for _ in corpus]
    assert progress[0] == sizes[0]
    assert progress[50] == sizes[0] + sizes[1] * 50 // 100
    assert corpus.bytes_read == sum(sizes) == corpus.total_bytes
    next(iter(corpus))
    assert corpus.bytes_read == sizes[0], "every iteration counts anew"


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_built_in_corpus_knows_its_position_and_others_do_not(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not real:  # reading the documentation of all packages takes most of a minute
        made = [python_docs.DocstringRecord("p", f"p.f{i}", "Some téxt. " * i, ()) for i in range(1, 4)]
        monkeypatch.setattr(python_docs, "load_pydocs", lambda: made)
    corpus = Corpus("pydocs")
    for _ in corpus:
        pass
    assert corpus.bytes_read == corpus.total_bytes
    corpus.datasets = [object()]  # type: ignore[list-item]
    assert corpus.bytes_read is None
    assert module.corpus_bytes_read([]) is None
