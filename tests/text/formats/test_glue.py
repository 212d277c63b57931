"""GLUE's own files, in their official layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text import Example, find_glue_suite, read_labelled
from firth.text.formats.glue import detect_glue_task

MNLI = ["index", "promptID", "pairID", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse"]
MNLI += ["sentence2_parse", "sentence1", "sentence2", "label1"]
FILES: dict[str, list[list[str]]] = {
    "CoLA/train.tsv": [["gj04", "1", "", 'He said "so'], ["gj04", "0", "*", "He so said"]],
    "CoLA/dev.tsv": [["gj04", "1", "", "We ran"]],
    "CoLA/test.tsv": [["index", "sentence"], ["0", "They ran"]],
    "SST-2/train.tsv": [["sentence", "label"], ["a fine film ", "1"]],
    "SST-2/dev.tsv": [["sentence", "label"], ["a long film", "0"]],
    "MRPC/train.tsv": [["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["1", "70", "71", "He ran", "He fled"]],
    "MRPC/dev.tsv": [["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["0", "72", "73", "He ran", "He sat"]],
    "STS-B/dev.tsv": [
        ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"],
        ["7", "news", "f", "2012", "1", "none", "none", "A dog", "A hound", "4.750"],
    ],
    "QQP/dev.tsv": [
        ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
        ["12", "1", "2", "Why?", "How?", "0"],
    ],
    "MNLI/train.tsv": [[*MNLI, "gold_label"], ["3", *"abcdef", "He ran", "He sat", "neutral", "contradiction"]],
    "MNLI/dev_matched.tsv": [
        [*MNLI, "label2", "gold_label"],
        ["0", *"abcdef", "He ran", "He moved", "neutral", "neutral", "entailment"],
    ],
    "MNLI/dev_mismatched.tsv": [
        [*MNLI, "label2", "gold_label"],
        ["0", *"abcdef", "He ran", "He won", "neutral", "neutral", "neutral"],
    ],
    "QNLI/dev.tsv": [["index", "question", "sentence", "label"], ["0", "Who?", "He did", "not_entailment"]],
    "RTE/dev.tsv": [["index", "sentence1", "sentence2", "label"], ["0", "He ran", "He moved", "entailment"]],
    "WNLI/dev.tsv": [["index", "sentence1", "sentence2", "label"], ["0", "He ran", "He moved", "1"]],
}


def write(path: Path, rows: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, rows in FILES.items():
        write(tmp_path / name, rows)
    (tmp_path / "diagnostic").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "task", "example"),
    [
        ("CoLA/dev.tsv", "classify", Example(1, ("We ran",), "1")),
        ("SST-2/train.tsv", "classify", Example(2, ("a fine film ",), "1")),
        ("MRPC/train.tsv", "pair", Example(2, ("He ran", "He fled"), "1")),
        ("STS-B/dev.tsv", "regress", Example(7, ("A dog", "A hound"), 4.75)),
        ("STS-B/dev.tsv", "embed", Example(7, ("A dog", "A hound"), 4.75)),
        ("QQP/dev.tsv", "pair", Example("12", ("Why?", "How?"), "0")),
        ("MNLI/train.tsv", "pair", Example(3, ("He ran", "He sat"), "contradiction")),
        ("MNLI/dev_mismatched.tsv", "pair", Example(0, ("He ran", "He won"), "neutral")),
        ("QNLI/dev.tsv", "pair", Example(0, ("Who?", "He did"), "not_entailment")),
        ("RTE/dev.tsv", "pair", Example(0, ("He ran", "He moved"), "entailment")),
        ("WNLI/dev.tsv", "pair", Example(0, ("He ran", "He moved"), "1")),
    ],
)
def test_no_columns_need_be_named(folder: Path, name: str, task: str, example: Example) -> None:
    assert read_labelled(folder / name, task) == [example]


def test_cola_has_no_header_and_quotation_marks_are_characters(folder: Path) -> None:
    assert read_labelled(folder / "CoLA/train.tsv", "classify") == [
        Example(1, ('He said "so',), "1"),
        Example(2, ("He so said",), "0"),
    ]


def test_test_sets_have_no_labels(folder: Path) -> None:
    assert read_labelled(folder / "CoLA/test.tsv", "classify", require_labels=False) == [Example(0, ("They ran",))]


def test_mrpc_as_its_makers_published_it(tmp_path: Path) -> None:
    rows = [["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"], ["1", "7", "8", '"He ran', "He fled"]]
    path = write(tmp_path / "mrpc" / "msr_paraphrase_train.txt", rows)
    assert read_labelled(path, "pair") == [Example(2, ('"He ran', "He fled"), "1")]
    assert find_glue_suite(tmp_path)["mrpc"].train == path


def test_rows_that_the_official_readers_skip_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*FILES["QQP/dev.tsv"], ["13", "3", "4", "Who"], ["14", "3", "4", "", "Who?", "1"], ["15"] * 5 + ["2"]]
    path = write(folder / "QQP/train.tsv", rows)
    assert [e.id for e in read_labelled(path, "pair")] == ["12"]
    said = " ".join(capsys.readouterr().err.split())
    assert "1 line left out with too few columns (line 3)." in said
    assert "1 line left out without a text (line 4)." in said
    assert "1 line left out whose is_duplicate is none of 0, 1 (line 5)." in said


def test_a_file_is_known_by_folder_and_header(folder: Path) -> None:
    task = detect_glue_task(folder / "MNLI" / "dev_matched.tsv")
    assert task is not None
    assert (task.name, task.task, task.columns["label"]) == ("mnli", "pair", "gold_label")
    assert detect_glue_task(write(folder / "mine" / "dev.tsv", FILES["RTE/dev.tsv"])) is None
    assert (
        detect_glue_task(write(folder / "RTE" / "mine.tsv", [["text_a", "text_b", "label"], ["a", "b", "c"]])) is None
    )
    assert detect_glue_task(folder / "RTE" / "none.tsv") is None
    assert read_labelled(folder / "RTE" / "mine.tsv", "pair") == [Example(2, ("a", "b"), "c")]


def test_the_wrong_task_raises_without_columns(folder: Path) -> None:
    with pytest.raises(UserError, match=r"GLUE's rte is a 'pair' task, not 'classify'. Pass --task pair."):
        read_labelled(folder / "RTE/dev.tsv", "classify")
    [example] = read_labelled(folder / "CoLA/dev.tsv", "text-to-text", {"source": "sentence", "target": "label"})
    assert example == Example(1, ("We ran",), "1")


def test_suite(folder: Path) -> None:
    suite = find_glue_suite(folder)
    assert list(suite) == ["cola", "sst-2", "mrpc", "sts-b", "qqp", "mnli", "qnli", "rte", "wnli"]
    assert {name: task.metrics for name, task in suite.items() if task.metrics != ("accuracy",)} == {
        "cola": ("mcc",),
        "mrpc": ("accuracy", "f1"),
        "sts-b": ("pearson", "spearman"),
        "qqp": ("accuracy", "f1"),
    }
    assert [task.task for task in suite.values()] == ["classify"] * 2 + ["pair", "regress"] + ["pair"] * 5
    assert suite["cola"].train == folder / "CoLA/train.tsv"
    assert suite["cola"].test == {"test": folder / "CoLA/test.tsv"}
    assert suite["rte"].train is None
    assert suite["mnli"].dev == {
        "matched": folder / "MNLI/dev_matched.tsv",
        "mismatched": folder / "MNLI/dev_mismatched.tsv",
    }
    for task in suite.values():
        for file in task.dev.values():
            assert len(read_labelled(file, task.task, task.columns)) == 1


def test_a_folder_without_glue(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of GLUE's tasks is here"):
        find_glue_suite(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_glue_suite(tmp_path / "none")
