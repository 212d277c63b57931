"""Labelled files in every format, and what is said of the broken ones."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firth.errors import UserError
from firth.text import pydocs
from firth.text.labelled import Example, read_labelled


def write(path: Path, text: str) -> Path:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress}
    pack = packers.get(path.suffix, bytes)
    path.write_bytes(pack(text.encode()))
    return path


def refusal(path: str | Path, task: str = "classify", **options: Any) -> str:
    with pytest.raises(UserError) as e:
        read_labelled(path, task, **options)
    return str(e.value)


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '\n{"text": "so good", "label": "yes"}\n{"text": "so, so", "label": "no"}\n'),
        ("a.tsv", "label\ttext\nyes\tso good\nno\tso, so\n"),
        ("a.csv", 'text,other,label\r\nso good,,yes\r\n"so, so",,no\r\n'),
    ],
)
def test_every_format_gives_the_same_examples(tmp_path: Path, name: str, text: str, packed: str) -> None:
    path = write(tmp_path / (name + packed), text)
    assert read_labelled(str(path), "classify") == [Example(2, ("so good",), "yes"), Example(3, ("so, so",), "no")]


def test_tasks_have_their_own_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", '{"id": "q1", "source": "a", "target": "b", "text_a": "c", "text_b": "d", "label": 1}'
    )
    assert read_labelled(path, "text-to-text") == [Example("q1", ("a",), "b")]
    assert read_labelled(path, "pair") == [Example("q1", ("c", "d"), "1")]


def test_columns_rename(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "sentence,gold\nfine,yes\n")
    assert read_labelled(path, "classify", {"text": "sentence", "label": "gold"}) == [Example(2, ("fine",), "yes")]


def test_labels_become_strings(tmp_path: Path) -> None:
    rows = [f'{{"text": "x", "label": {label}}}' for label in ("true", "false", "3", "2.5", '"3"')]
    path = write(tmp_path / "a.jsonl", "\n".join(rows))
    assert [e.target for e in read_labelled(path, "classify")] == ["true", "false", "3", "2.5", "3"]


def test_quotation_marks_are_characters_in_tsv_and_quotes_in_csv(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", 'text\tlabel\n"open\tyes\nclose"\tno\n')
    assert [e.texts[0] for e in read_labelled(tsv, "classify")] == ['"open', 'close"']
    csv = write(tmp_path / "a.csv", 'text,label\n"two\nlines",yes\nlast,no\n')
    assert read_labelled(csv, "classify") == [Example(2, ("two\nlines",), "yes"), Example(4, ("last",), "no")]


def test_long_cells_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\n" + "x" * 200_000 + ",yes\n")
    assert len(read_labelled(path, "classify")[0].texts[0]) == 200_000


def test_half_characters_are_replaced_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud800", "label": "yes"}\n{"text": "b", "label": "no"}')
    assert [e.texts[0] for e in read_labelled(path, "classify")] == ["a\ufffd", "b"]
    assert "1 example with half characters" in capsys.readouterr().err


def test_pydocs_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Example("p.f", ("some text",), "p")]
    monkeypatch.setattr(pydocs, "examples", lambda task, part: made if (task, part) == ("pair", "dev") else [])
    assert read_labelled("pydocs", "pair", part="dev") == made


# Mistakes


def test_unknown_task(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.csv", "clasify") == "task 'clasify' is not known. Did you mean 'classify'?"


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.csv") == f"{tmp_path / 'a.csv'}: no such file."


@pytest.mark.parametrize("name", ["a.parquet", "a.xlsx.gz", "labels"])
def test_unknown_extension(tmp_path: Path, name: str) -> None:
    assert "labelled files are .jsonl, .csv, .tsv, plain or as .gz or .xz" in refusal(write(tmp_path / name, "x"))


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"body": "x", "label": "y"}'), ("a.tsv", "body\tlabel\nx\ty")])
def test_missing_column(tmp_path: Path, name: str, text: str) -> None:
    message = refusal(write(tmp_path / name, text))
    assert "no column 'text'; there are: body, label. Name the right one: --columns text=NAME." in message


def test_unknown_role(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\nx,y\n")
    message = refusal(path, columns={"labl": "gold"})
    assert message == "--columns labl=gold: nothing is called 'labl' here. Did you mean 'label'?"


def test_line_that_is_not_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "y"}\n{"text": \n')
    assert refusal(path).startswith(f"{path}:2: not JSON")


@pytest.mark.parametrize(
    ("line", "column"),
    [('{"text": " ", "label": "y"}', "text"), ('{"text": "x", "label": ""}', "label")],
)
def test_empty_cell(tmp_path: Path, line: str, column: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"text": "x", "label": "y"}}\n{line}')
    assert refusal(path) == f"{path}:2: column {column!r} is empty. Fill it in, or take the line out."


def test_values_that_are_neither_text_nor_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": 3, "label": "y"}')
    assert refusal(path) == f"{path}:1: column 'text' holds 3, which is not text."
    path = write(tmp_path / "b.jsonl", '{"text": "x", "label": null}')
    assert refusal(path).startswith(f"{path}:1: the label null is neither text nor a number")


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", ""), ("a.csv", ""), ("a.tsv", "text\tlabel\n")])
def test_empty_file(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text)
    assert refusal(path) == f"{path}: no examples in this file."


def test_row_with_other_cells_than_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\nx\ty\nz\n")
    assert refusal(path) == f"{path}:3: 1 cell, but the first line names 2."


def test_quote_that_never_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,label\nx,y\n"z,y\n')
    assert refusal(path).startswith(f"{path}:3: not a row of a .csv file (unexpected end of data)")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\ncaf\xe9,y\n")
    assert "see byte 14 of its text" in refusal(path)
    assert read_labelled(path, "classify", encoding="latin-1") == [Example(2, ("caf\u00e9",), "y")]
