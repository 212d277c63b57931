"""Every way in which files become documents, and every way in which they cannot."""

from __future__ import annotations

import builtins
import gzip
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firth.errors import UserError
from firth.text import corpus as module
from firth.text import pydocs
from firth.text.corpus import Block, Corpus, Document, blocks, cut_at_space, lines


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    pack = packers.get(path.suffix, bytes)
    path.write_bytes(pack(data))
    return path


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus]


def refusal(*paths: str | Path, **options: Any) -> str:
    """The message with which a corpus is refused, at the start or while it is read."""
    with pytest.raises(UserError) as e:
        list(Corpus(paths, **options))
    return str(e.value)


# Documents


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "A.TXT"])
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
    monkeypatch.setattr(module, "WHOLE", 10)
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


def test_half_characters_are_replaced_and_counted(tmp_path: Path) -> None:
    corpus = Corpus([write(tmp_path / "a.jsonl", '{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')])
    assert texts(corpus) == ["a\ufffdb", "\U0001f600"]
    assert "; 1 with half characters" in corpus.describe()


def test_text_is_kept_but_for_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfe\xcc\x81 \xef\xac\x81\xc2\xa0\tx\ry\r\nz\r\n\r\nnext\x0bline\r\n")
    assert texts(Corpus([path])) == ["e\u0301 \ufb01\u00a0\tx\ry\nz", "next\x0bline"]


def test_encoding_is_taken(tmp_path: Path) -> None:
    assert texts(Corpus([write(tmp_path / "a.txt", b"caf\xe9")], encoding="latin-1")) == ["caf\u00e9"]
    wide = write(tmp_path / "b.txt", "a\u010a\r\n\r\nb\n".encode("utf-16"))
    assert texts(Corpus([wide], encoding="utf-16")) == ["a\u010a", "b"]


def test_a_corpus_can_be_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo")
    corpus = Corpus(str(path))
    assert corpus.describe() == "0 documents: nothing read yet"
    assert texts(corpus) == texts(corpus) == ["one", "two"]
    assert corpus.describe() == "2 documents: a.txt split on blank lines"
    assert corpus.bytes == 8


def test_the_built_in_corpus_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = pydocs.Record("p", "p.f", "Some text.", ())
    monkeypatch.setattr(pydocs, "everything", lambda: [record])
    corpus = Corpus(["pydocs", write(tmp_path / "a.txt", "mine")])
    assert list(corpus) == [Document("Some text.", "pydocs:p.f"), Document("mine", f"{tmp_path / 'a.txt'}:1")]
    assert corpus.describe() == "2 documents: a.txt split on blank lines, the built-in pydocs"
    assert corpus.bytes == 10 + 4


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
    assert corpus.describe().endswith("; 3 with words of their own")


def test_columns_name_the_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a", "b"], "words": 2}\n')
    columns = {"words": "tokens"}
    assert list(Corpus([path], columns=columns)) == [Document("a b", f"{path}:1", (0, 2))]
    assert "no column 'tokens'" in refusal(write(tmp_path / "b.jsonl", '{"text": "a"}'), columns=columns)


def test_a_count_of_words_is_no_list_of_them(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a b", "words": 2}\n')
    corpus = Corpus([path])
    assert list(corpus) == [Document("a b", f"{path}:1")]
    assert "; 1 with 'words' that is no list of words and is not read" in corpus.describe()
    message = f"{path}:1: column 'words' holds 2, which is no list of words."
    assert refusal(path, columns={"words": "words"}) == message


def test_words_must_be_in_the_text_in_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x"}\n{"text": "one two", "words": ["two", "one"]}\n')
    assert refusal(path) == f"{path}:2: the word 'one' does not occur in the text after its character 7."
    path = write(tmp_path / "b.jsonl", '{"text": "one", "words": ["one", 2]}\n')
    assert refusal(path) == f"{path}:1: column 'words' holds [\"one\", 2], which is no list of words."


def test_a_document_may_have_two_sides(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        '{"text_a": "the heron", "text_b": "der Reiher"}\n{"text": "alone", "text_a": "no", "text_b": "no"}\n',
    )
    corpus = Corpus([path])
    assert list(corpus) == [
        Document("the heron", f"{path}:1", second="der Reiher"),
        Document("alone", f"{path}:2"),
    ]
    assert list(corpus.texts()) == ["the heron", "der Reiher", "alone"]
    assert corpus.describe().endswith("; 1 with two sides (text_a and text_b)")


def test_columns_name_the_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "no", "en": "heron", "de": "Rei\\ud800her"}\n')
    columns = {"text_a": "en", "text_b": "de"}
    corpus = Corpus([path], columns=columns)
    assert [document.sides for document in corpus] == [("heron", "Rei\ufffdher")]
    assert "with two sides (en and de)" in corpus.describe()
    assert "1 with half characters" in corpus.describe()
    assert "no column 'de'" in refusal(write(tmp_path / "b.jsonl", '{"en": "heron"}'), columns=columns)
    assert "Name the text, or its two sides" in refusal(path, columns={**columns, "text": "text"})


def test_words_of_two_sides_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text_a": "a", "text_b": "b", "words": ["a"]}\n')
    assert refusal(path).startswith(f"{path}:1: words and two sides.")
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
    path.write_text(("a line of forty characters, all in all.\n" * 25 + "\n") * 30_000)
    assert path.stat().st_size > 30e6
    tracemalloc.start()
    n = sum(1 for _ in Corpus([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 30_000
    assert peak < 1e6


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"first\n\n" + b"x\n" * 100_000 + b"\xff")
    assert next(iter(Corpus([path]))).text == "first"  # the bad byte at the end has not been met


def test_text_without_blank_lines_is_cut_between_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 8)
    corpus = Corpus([write(tmp_path / "a.txt", "aa bb cc dd ee ff\n\ngg")])
    assert texts(corpus) == ["aa bb ", "cc dd ee ", "ff", "gg"]
    assert corpus.describe().endswith("; 2 cut because they are over 8 characters")


def test_blocks_by_hand() -> None:
    stream = ["a\n", "b\n", "\n", "c\n", " \n", "d"]
    assert list(blocks(stream, True, 100)) == [Block(1, "a\nb\n", False), Block(4, "c\n", False), Block(6, "d", False)]
    assert list(blocks(stream, False, 100)) == [Block(1, "a\nb\n\nc\n \nd", False)]
    assert list(blocks(stream, True, 4)) == [Block(1, "a\nb\n", True), Block(4, "c\n", False), Block(6, "d", False)]
    assert cut_at_space("word") == ("word", "")
    assert cut_at_space("two words\n") == ("two words\n", "")


# Mistakes


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.txt") == f"{tmp_path / 'no.txt'}: no such file or folder."
    with pytest.raises(UserError, match="no such file"):
        list(lines(tmp_path / "no.txt"))


def test_unknown_extension(tmp_path: Path) -> None:
    assert "Give .txt or .jsonl" in refusal(write(tmp_path / "a.pdf", "x"))


def test_folder_with_nothing_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing to read in this folder" in refusal(tmp_path)
    write(tmp_path / "a.md", "x")
    assert "nothing to read in this folder" in refusal(tmp_path)


def test_other_files_in_a_folder_are_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "a.md", "b.md", "c.csv.gz", "Makefile"):
        write(tmp_path / name, "x")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = Corpus([tmp_path])
    assert texts(corpus) == texts(corpus) == ["x"]
    said = capsys.readouterr().err
    assert said.count("left out") == 1
    assert "5 left out that are not .txt or .jsonl files (.csv, .md, linked folder, no extension)" in said


def test_empty_corpus(tmp_path: Path) -> None:
    assert "no documents" in refusal(write(tmp_path / "a.txt", "\n \n"), write(tmp_path / "b.jsonl", ""))
    assert "no path given" in refusal()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz", "a.jsonl"])
def test_not_utf8(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, b'{"text": "caf\xc3\xa9"}\n' * 200_000 + b"caf\xe9\n")
    message = refusal(path)
    assert message.startswith(f"{path}: not UTF-8, see byte {18 * 200_000 + 3:,} of its text.")
    assert "--encoding latin-1, for example, reads every file as Latin-1" in message


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


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.xz"])
def test_truncated_compressed_file(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, "".join(f'{{"text": "{i}"}}\n' for i in range(5000)))
    path.write_bytes(path.read_bytes()[:-20])
    assert refusal(path) == f"{path}: the compressed file was cut short. Fetch or compress it again."


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.xz"])
def test_file_that_is_not_compressed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("plain text")
    assert refusal(path).startswith(f"{path}: not a whole {path.suffix} file")


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "x")

    def refuse(file: Any, *rest: Any) -> Any:
        if file == path:
            raise PermissionError(13, "Permission denied", str(file))
        return builtins.open(file, *rest)

    monkeypatch.setattr(module, "open", refuse, raising=False)
    assert refusal(path) == f"{path}: cannot be read (Permission denied)."
