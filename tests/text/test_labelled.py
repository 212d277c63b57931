"""Labelled files in every format, and the errors for broken ones."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.text import python_docs
from firth.text.documents import AnswerSpan, Example
from firth.text.labelled import read_labelled


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


ROWS: list[tuple[str, dict[str, Any], Example]] = [
    ("regress", {"text_a": "a", "text_b": "b", "score": 2}, Example(1, ("a", "b"), 2.0)),
    ("regress", {"text": "a", "label": "2.5"}, Example(1, ("a",), 2.5)),
    ("choice", {"context": "a", "choices": ["b", "c", "d"], "gold": 2}, Example(1, ("a", "b", "c", "d"), 2)),
    ("choice", {"context": "a", "choice1": "b", "choice2": "c", "gold": "0"}, Example(1, ("a", "b", "c"), 0)),
    (
        "choice",
        {"choice10": "d", "choice2": 7, "choice1": "b", "context": "a", "gold": 2},
        Example(1, ("a", *"b7d"), 2),
    ),
    ("tag", {"tokens": ["New", "York"], "tags": ["B-LOC", "I-LOC"]}, Example(1, ("New", "York"), ("B-LOC", "I-LOC"))),
    (
        "tag",
        {"tokens": ["he", "ran"], "tags": [1, 0], "predicate": 1},
        Example(1, ("he", "ran"), ("1", "0"), ((1, 2),)),
    ),
    (
        "relation",
        {"text": "Ann met Bo", "head": [0, 3], "tail": [8, 10], "label": "met"},
        Example(1, ("Ann met Bo",), "met", ((0, 3), (8, 10))),
    ),
    (
        "relation",
        {"tokens": ["Ann", "met", "Bo", "Li"], "head": [2, 4], "tail": [0, 1], "label": "by"},
        Example(1, ("Ann met Bo Li",), "by", ((8, 13), (0, 3))),
    ),
    (
        "span-qa",
        {"id": "q", "question": "who?", "context": "Bo ran", "answers": [{"text": "Bo", "start": 0}]},
        Example("q", ("who?", "Bo ran"), (AnswerSpan("Bo", 0),)),
    ),
    ("span-qa", {"question": "who?", "context": "Bo ran", "answers": []}, Example(1, ("who?", "Bo ran"), ())),
    (
        "text-to-text",
        {"source": "a", "target": "b", "references": ["c", "b"]},
        Example(1, ("a",), "b", references=("b", "c")),
    ),
    ("text-to-text", {"source": "a", "references": ["c", "b"]}, Example(1, ("a",), "c", references=("c", "b"))),
    (
        "lm",
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        Example(1, ("user", "hi", "assistant", "ho")),
    ),
    ("lm", {"prompt": "hi", "response": "ho"}, Example(1, ("user", "hi", "assistant", "ho"))),
    ("lm", {"prompt": "hi", "completion": "ho"}, Example(1, ("user", "hi", "assistant", "ho"))),
    ("lm", {"text": "once"}, Example(1, ("text", "once"))),
    ("embed", {"text_a": "a", "text_b": "b"}, Example(1, ("a", "b"))),
    ("embed", {"text_a": "a", "text_b": "b", "label": 0.5}, Example(1, ("a", "b"), 0.5)),
    ("minimal-pairs", {"good": "he is", "bad": "he are"}, Example(1, ("he is", "he are"))),
    (
        "minimal-pairs",
        {"sentence_good": "he is", "sentence_bad": "he are", "UID": "verb"},
        Example(1, ("he is", "he are"), references=("verb",)),
    ),
    ("cloze", {"context": "the sky is", "answer": "blue"}, Example(1, ("the sky is",), "blue")),
    (
        "word-in-context",
        {"word": "run", "text_a": "We ran.", "text_b": "a long run", "label": False},
        Example(1, ("We ran.", "a long run"), "false", ((3, 6), (7, 10))),
    ),
    ("word-similarity", {"word1": "sun", "word2": "sky", "score": "5"}, Example(1, ("sun", "sky"), 5.0)),
    ("analogy", {"a": "x", "b": "y", "c": "v", "d": "w"}, Example(1, ("x", "y", "v"), "w")),
]


@pytest.mark.parametrize(("task", "row", "example"), ROWS)
def test_every_task_from_jsonl_and_json(tmp_path: Path, task: str, row: dict[str, Any], example: Example) -> None:
    assert read_labelled(write(tmp_path / "a.jsonl", json.dumps(row)), task) == [example]
    assert read_labelled(write(tmp_path / "a.json", json.dumps([row], indent=1)), task) == [example]


@pytest.mark.parametrize(("task", "row", "example"), [r for r in ROWS if r[0] != "lm"])
def test_every_task_from_a_table(tmp_path: Path, task: str, row: dict[str, Any], example: Example) -> None:
    cells = [value if isinstance(value, str) else json.dumps(value) for value in row.values()]
    path = write(tmp_path / "a.tsv.gz", "\t".join(row) + "\n" + "\t".join(cells) + "\n")
    [read] = read_labelled(path, task)
    assert read == example._replace(id=read.id)


@pytest.mark.parametrize(
    ("task", "row"),
    [
        ("classify", {"text": "a"}),
        ("pair", {"text_a": "a", "text_b": "b", "label": None}),
        ("regress", {"text": "a", "score": ""}),
        ("choice", {"context": "a", "choices": ["b", "c"]}),
        ("tag", {"tokens": ["a"]}),
        ("relation", {"text": "a b", "head": [0, 1], "tail": [2, 3]}),
        ("span-qa", {"question": "a", "context": "b"}),
        ("text-to-text", {"source": "a"}),
        ("cloze", {"context": "a"}),
        ("analogy", {"a": "x", "b": "y", "c": "v"}),
    ],
)
def test_a_test_set_may_lack_its_answers(tmp_path: Path, task: str, row: dict[str, Any]) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    assert read_labelled(path, task, require_labels=False)[0].target is None
    assert f"{path}:1" in refusal(path, task)


def test_answers_that_are_there_are_read_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "y"}')
    assert read_labelled(path, "classify", require_labels=False)[0].target == "y"


def test_a_table_may_spell_words_with_spaces(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "tokens\ttags\n[ New York ]\tO B I O\n")
    assert read_labelled(path, "tag") == [Example(2, ("[", "New", "York", "]"), ("O", "B", "I", "O"))]


def test_lines_of_objects_may_be_called_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    assert [e.target for e in read_labelled(path, "classify")] == ["x", "y"]


def test_plain_text_for_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.txt.gz", "one\ntwo\n\n\nthree\n")
    assert read_labelled(path, "lm") == [Example(1, ("text", "one\ntwo")), Example(5, ("text", "three"))]
    assert "2 documents: a.txt.gz split on blank lines" in capsys.readouterr().err
    assert ".json, .txt, plain or as" in refusal(write(tmp_path / "a.pdf", "x"), "lm")


def test_analogies_as_their_makers_wrote_them(tmp_path: Path) -> None:
    path = write(tmp_path / "questions-words.txt", ": capitals\nAthens Greece Oslo Norway\n")
    assert read_labelled(path, "analogy") == [
        Example(2, ("Athens", "Greece", "Oslo"), "Norway", references=("capitals",))
    ]
    assert refusal(write(path, "Athens Greece Oslo\n"), "analogy") == f"{path}:1: 3 words, but an analogy has 4."


def test_pairs_of_words_as_gensim_has_them(tmp_path: Path) -> None:
    remarks = "# a collection\n# Word 1\tWord 2\tHuman (mean)\n"
    pairs = [Example(3, ("love", "sex"), 6.77), Example(5, ("New York", "city"), 8.0)]
    for name in ("wordsim.tsv", "simlex.txt"):
        path = write(tmp_path / name, remarks + "love\tsex\t6.77\n\nNew York\tcity\t8\n")
        assert read_labelled(path, "word-similarity") == pairs
    assert read_labelled(write(tmp_path / "a.tsv", "love\tsex\t6.77\n"), "word-similarity")[0].target == 6.77
    assert read_labelled(write(tmp_path / "a.txt", "love sex 6.77\n"), "word-similarity")[0].target == 6.77
    headed = write(tmp_path / "b.tsv", "word1\tword2\tscore\nlove\tsex\t6.77\n")
    assert read_labelled(headed, "word-similarity") == [Example(2, ("love", "sex"), 6.77)]
    said = refusal(write(tmp_path / "c.txt", "love sex\n"), "word-similarity")
    assert said == f"{tmp_path / 'c.txt'}:1: 'love sex' is not two words and a number."
    assert "which is not a number" in refusal(write(tmp_path / "d.txt", "love sex much\n"), "word-similarity")


def test_an_example_may_have_an_id_by_another_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "guid,text,label\nx7,fine,yes\n")
    assert read_labelled(path, "classify", {"id": "guid"})[0].id == "x7"


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


def test_labels_of_several_types_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", "".join(f'{{"text": "t", "label": {x}}}\n' for x in ("1", '"1"', "true", "2.5")))
    assert [e.target for e in read_labelled(path, "classify")] == ["1", "1", "true", "2.5"]
    said = " ".join(capsys.readouterr().err.split())
    assert """the labels in 'label' are of 3 kinds: 1 (number), "1" (text), true (true or false).""" in said
    path = write(tmp_path / "a.jsonl", '{"text": "t", "label": 1}\n{"text": "t", "label": 2}\n')
    read_labelled(path, "classify")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("mark", [";", "\t", ","])
def test_the_header_of_a_csv_tells_what_separates_its_columns(mark: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f'\ufefftext{mark}label\n"good{mark} ""very"""{mark}1\n')
    assert [(e.texts, e.target) for e in read_labelled(path, "classify")] == [((f'good{mark} "very"',), "1")]


def test_quotation_marks_are_characters_in_tsv_and_quotes_in_csv(tmp_path: Path) -> None:
    tsv = write(tmp_path / "a.tsv", 'text\tlabel\n"open\tyes\nclose"\tno\n')
    assert [e.texts[0] for e in read_labelled(tsv, "classify")] == ['"open', 'close"']
    csv = write(tmp_path / "a.csv", 'text,label\n"two\nlines",yes\nlast,no\n')
    assert read_labelled(csv, "classify") == [Example(2, ("two\nlines",), "yes"), Example(4, ("last",), "no")]


def test_long_cells_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\n" + "x" * 200_000 + ",yes\n")
    assert len(read_labelled(path, "classify")[0].texts[0]) == 200_000


def test_lone_surrogates_are_replaced_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "a\\ud800", "label": "yes"}\n{"text": "b", "label": "no"}')
    assert [e.texts[0] for e in read_labelled(path, "classify")] == ["a\ufffd", "b"]
    assert "1 example with lone surrogates" in capsys.readouterr().err


def test_pydocs_is_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Example("p.f", ("some text",), "p")]
    monkeypatch.setattr(
        python_docs, "make_pydocs_examples", lambda task, part: made if (task, part) == ("pair", "dev") else []
    )
    assert read_labelled("pydocs", "pair", split="dev") == made


# Mistakes


def test_unknown_task(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.csv", "clasify") == "unknown task 'clasify'. Did you mean 'classify'?"


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.csv") == f"{tmp_path / 'a.csv'}: no such file."


@pytest.mark.parametrize("name", ["a.parquet", "a.xlsx.gz", "labels"])
def test_unknown_extension(tmp_path: Path, name: str) -> None:
    assert "labelled files are .jsonl, .csv, .tsv, .json, plain or as .gz, .xz, .bz2, .zst" in refusal(
        write(tmp_path / name, "x")
    )


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", '{"body": "x", "label": "y"}'), ("a.tsv", "body\tlabel\nx\ty")])
def test_missing_column(tmp_path: Path, name: str, text: str) -> None:
    message = refusal(write(tmp_path / name, text))
    assert "no column 'text'; there are: body, label. Name the right one: --columns text=NAME." in message


def test_unknown_role(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text,label\nx,y\n")
    message = refusal(path, columns={"labl": "gold"})
    assert message == "--columns labl=gold: there is no role 'labl' here. Did you mean 'label'?"


def test_line_that_is_not_json(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "y"}\n{"text": \n')
    assert refusal(path).startswith(f"{path}:2: not JSON")


def test_empty_cell(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "x", "label": "y"}\n{"text": " ", "label": "y"}')
    assert refusal(path) == f"{path}:2: column 'text' is empty. Fill it in, or delete the line."
    path = write(tmp_path / "a.csv", "text,label\nx,y\n" + "x,\n" * 4)
    words = "column 'label' is empty in 4 of 5 rows (line 3, 4, 5, ...). Fill it in, or delete these rows."
    assert refusal(path) == f"{path}: {words}"


def test_values_that_are_neither_text_nor_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": 3, "label": "y"}')
    assert refusal(path) == f"{path}:1: column 'text' holds 3, which is not text."
    path = write(tmp_path / "c.jsonl", '{"source": "x", "target": ["y", "z"]}')
    with pytest.raises(UserError, match=r"which is not text. If several answers are right, .* references=target"):
        read_labelled(path, "text-to-text")
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


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("regress", {"text": "a", "score": "abc"}, "column 'score' holds \"abc\", which is not a number."),
    (
        "regress",
        {"text": "a", "score": "3,5"},
        "column 'score' holds \"3,5\", which is not a number. Write numbers with a decimal point.",
    ),
    (
        "tag",
        {"tokens": "['Juma', 'left']", "tags": "O O"},
        "column 'tokens' holds \"['Juma', 'left']\", a list as Python prints it. Write it as JSON (json.dumps).",
    ),
    (
        "tag",
        {"tokens": "['Juma' 'left']", "tags": "O O"},
        "column 'tokens' holds \"['Juma' 'left']\", a list as Python prints it. Write it as JSON (json.dumps).",
    ),
    ("regress", {"text": "a", "score": True}, "column 'score' holds true, which is not a number."),
    ("regress", {"text": "a", "score": "nan"}, "column 'score' holds \"nan\", which is not a number."),
    ("embed", {"text_a": "a", "text_b": "b", "label": "no"}, "column 'label' holds \"no\", which is not a number."),
    (
        "choice",
        {"context": "a", "choices": ["b", "c"], "gold": 2},
        "column 'gold' is 2, but the 2 choices are counted from 0 to 1.",
    ),
    (
        "choice",
        {"context": "a", "choices": ["b", "c"], "gold": "B"},
        "column 'gold' holds \"B\", which is not a whole number.",
    ),
    ("choice", {"context": "a", "choices": ["b"], "gold": 0}, "column 'choices' has fewer than 2 choices."),
    ("choice", {"context": "a", "choices": "b", "gold": 0}, "column 'choices' holds \"b\", which is not a list."),
    ("choice", {"context": "a", "choices": ["b", " "], "gold": 0}, "column 'choices' is empty."),
    ("choice", {"context": "a", "choice1": "b", "choice2": None, "gold": 0}, "column 'choices' is empty."),
    ("classify", {"text": "a", "label": math.nan}, "the label is NaN, as programs write a missing value."),
    ("tag", {"tokens": ["a"], "tags": [-math.inf]}, "the label is -Infinity, as programs write a missing value."),
    ("tag", {"tokens": ["a"], "tags": "O"}, "column 'tags' is the text \"O\", and 'tokens' is a list. Give a list"),
    ("tag", {"tokens": ["a", "b"], "tags": ["O"]}, "2 tokens, but 1 tag. Each token needs one."),
    ("tag", {"tokens": ["a", ""], "tags": ["O", "O"]}, "column 'tokens' has an empty word."),
    ("tag", {"tokens": [], "tags": []}, "column 'tokens' has no words."),
    (
        "tag",
        {"tokens": ["a"], "tags": ["O"], "predicate": 1},
        "column 'predicate' is [1, 2), outside of the 1 words.",
    ),
    (
        "relation",
        {"text": "abc", "head": [0, 4], "tail": [0, 1], "label": "x"},
        "column 'head' is [0, 4), outside of the 3 characters.",
    ),
    (
        "relation",
        {"text": "abc", "head": [0, 1], "tail": [2], "label": "x"},
        "column 'tail' holds [2], which is not [start, end].",
    ),
    (
        "span-qa",
        {"question": "a", "context": "b", "answers": [{"text": 3}]},
        "column 'answers' holds {\"text\": 3}, which is not like",
    ),
    ("span-qa", {"question": "a", "context": "b", "answers": 3}, "column 'answers' holds 3, which is not a list"),
    (
        "lm",
        {"messages": [{"role": "user"}]},
        "column 'messages' has no text for the role and the content of message 1.",
    ),
    ("lm", {"prompt": "a"}, "no column 'response'; there are: prompt."),
    (
        "lm",
        {"Text": "a"},
        "no column 'messages', nor 'prompt' and 'response', nor 'text'; there are: Text. Name",
    ),
    ("text-to-text", {"source": "a", "target": ""}, "column 'target' is empty."),
    ("analogy", {"a": "x", "b": "y", "c": "v"}, "no column 'd'; there are: a, b, c."),
]


@pytest.mark.parametrize(("task", "row", "message"), WRONG)
def test_wrong_values(tmp_path: Path, task: str, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", "\n" + json.dumps(row))
    assert refusal(path, task).startswith(f"{path}:2: {message}")


def test_the_nearest_column_is_named(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.jsonl", '{"Text": "x"}'), "lm").endswith("--columns text=Text.")
    path = write(tmp_path / "a.csv", "Text,label\nx,y\n")
    assert "no column 'text'; there are: Text, label. Name the right one: --columns text=Text." in refusal(path)


def test_a_column_that_was_named_must_be_there_and_goes_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "text_a,text_b,score,gold\na,b,1,2\n")
    assert read_labelled(path, "regress", {"label": "gold"})[0].target == 2.0
    message = refusal(path, "regress", columns={"text_b": "txt_b"})
    assert "no column 'txt_b'; there are: text_a, text_b, score, gold." in message
    assert message.endswith("--columns text_b=text_b.")
    other = write(tmp_path / "dev.csv", "text,label\nx,y\n")  # where train has the column Question
    assert refusal(other, columns={"text": "Question"}).endswith("rename 'text' to 'Question' in this one.")


def test_json_that_is_no_list_of_objects(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "a.json", "3")).endswith("neither a list of objects nor SQuAD's format.")
    assert refusal(write(tmp_path / "b.json", "[3]")).endswith("b.json: item 1 is not an object.")
    assert "c.json:1:3: not JSON (" in refusal(write(tmp_path / "c.json", "[{]"))
    assert refusal(write(tmp_path / "d.json", '[{"text": 3}]')).startswith(
        f"{tmp_path / 'd.json'}: item 1: column 'text'"
    )


def test_a_word_missing_from_its_text_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"word": word, "text_a": "some tea", "text_b": "no tea", "label": "x"} for word in ("tea", "milk")]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [e.spans for e in read_labelled(path, "word-in-context")] == [((5, 8), (3, 6))]
    said = " ".join(capsys.readouterr().err.split())
    assert "1 example left out without the word in both texts (line 2)." in said


def test_a_row_that_is_scored_on_stays_without_its_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Or else the score would be that of the easier rows."""
    rows = [{"word": "milk", "text_a": "some milk", "text_b": "no tea", "label": "x"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [e.spans for e in read_labelled(path, "word-in-context", split="dev")] == [((5, 9), (0, 6))]
    said = " ".join(capsys.readouterr().err.split())
    assert "1 example scored on, but without the word in both texts (line 1)." in said
