"""Columns of words and tags."""

from __future__ import annotations

from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text import Example, read_labelled


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, **options: dict[str, str]) -> str:
    with pytest.raises(UserError) as e:
        read_labelled(path, "tag", **options)  # type: ignore[arg-type]
    return str(e.value)


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

-DOCSTART- -X- -X- O

Bonn NNP B-NP B-LOC
"""


@pytest.mark.parametrize("name", ["a.txt", "a.conll", "a.bio", "a.iob"])
def test_first_column_is_the_word_and_last_the_tag(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, CONLL_2003)
    assert read_labelled(path, "tag") == [
        Example(3, ("EU", "rejects"), ("B-ORG", "O")),
        Example(8, ("Bonn",), ("B-LOC",)),
    ]


def test_columns_are_counted_from_one(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "1\tNew York\tNNP\tO\n2\tis\tVBZ\tO\n")
    assert read_labelled(path, "tag", {"tokens": "2", "tags": "3"}) == [Example(1, ("New York", "is"), ("NNP", "VBZ"))]


def test_comments_are_not_words_that_begin_alike(tmp_path: Path) -> None:
    text = "# sent_id = 1\n#comment\nrt O\n#oslo B-LOC\n# O\n\n# newdoc\n## a b\nyes O\n"
    path = write(tmp_path / "a.conll", text)
    assert read_labelled(path, "tag") == [
        Example(3, ("rt", "#oslo", "#"), ("O", "B-LOC", "O")),
        Example(9, ("yes",), ("O",)),
    ]


def test_words_without_tags_are_a_test_set(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "EU\nrejects\n\nBonn")
    assert read_labelled(path, "tag", require_labels=False) == [Example(1, ("EU", "rejects")), Example(4, ("Bonn",))]
    assert refusal(path).startswith(f"{path}:1: one column only. Each line needs a word and")


def test_mistakes_name_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "EU B-ORG\n\nrejects\n")
    assert refusal(path) == f"{path}:3: 1 column, but line 1 has 2."
    with pytest.raises(UserError, match="read as CoNLL; for raw sentences use `firth predict`"):
        read_labelled(path, "tag", require_labels=False)
    path = write(tmp_path / "b.txt", "EU\tO\n\tO\n")
    assert refusal(path).startswith(f"{path}:2: no word in column 1.")
    assert refusal(path, columns={"tags": "5"}) == f"{path}:1: no column 5, there are 2."
    assert refusal(path, columns={"tags": "ner"}).startswith("--columns tags=ner: CoNLL columns have no names.")
    assert refusal(write(tmp_path / "c.txt", "\n\n")).endswith("no examples in this file.")


CONLLU = """# text = Vámonos al mar.
1-2\tVámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tVamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\tya\tya\tADV\t_\t_\t_\t_\t_\t_
3\tmar\tmar\tNOUN\tN\t_\t1\tobl\t_\tSpaceAfter=No
"""


@pytest.mark.parametrize("name", ["a.conllu", "a.conll"])
def test_words_of_conllu_are_its_second_column(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, CONLLU)
    words = ("Vamos", "nos", "mar")
    assert read_labelled(path, "tag") == [Example(3, words, ("VERB", "PRON", "NOUN"))]
    assert read_labelled(path, "tag", {"tags": "8"}) == [Example(3, words, ("root", "obj", "obl"))]


def test_numbers_of_words_are_not_taken_for_words(tmp_path: Path) -> None:
    path = write(tmp_path / "a.conll", "1\tAnn\tB-PER\n2\tleft\tO\n")
    assert "a.conll:1: column 1 counts the words (1, 2 ...)" in refusal(path)
    assert read_labelled(path, "tag", {"tokens": "1"})[0].texts == ("1", "2")
