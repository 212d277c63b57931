"""SuperGLUE's own files, each cast into a kind of example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.text import Example, find_superglue_suite, read_labelled

PASSAGE = "Bo met Ann in Oslo\n@highlight\nBo smiled"
LINES: dict[str, dict[str, Any]] = {
    "BoolQ": {"question": "is it", "passage": "It is.", "idx": 3, "label": True},
    "CB": {"premise": "It is.", "hypothesis": "It was", "label": "neutral", "idx": 0},
    "COPA": {"premise": "I fell.", "choice1": "I ran.", "choice2": "I sat.", "question": "cause", "label": 0, "idx": 1},
    "MultiRC": {
        "idx": 4,
        "passage": {
            "text": "<b>Sent 1: </b>Bo ran.<br><b>Sent 2: </b>He fell.<br>",
            "questions": [
                {"question": "Who?", "idx": 9, "answers": [{"text": "Bo", "idx": 1, "label": 1}]},
                {"question": "What?", "idx": 10, "answers": [{"text": "Nothing", "idx": 2, "label": 0}]},
            ],
        },
    },
    "ReCoRD": {
        "source": "x",
        "passage": {
            "text": PASSAGE,
            "entities": [
                {"start": 0, "end": 1},
                {"start": 7, "end": 9},
                {"start": 14, "end": 17},
                {"start": 30, "end": 31},
            ],
        },
        "qas": [{"query": "In @placeholder it rains", "answers": [{"start": 14, "end": 17, "text": "Oslo"}], "idx": 6}],
        "idx": 2,
    },
    "RTE": {"premise": "It is.", "hypothesis": "It was", "label": "entailment", "idx": 0},
    "WiC": {
        "word": "run",
        "sentence1": "We ran.",
        "sentence2": "A run",
        "idx": 0,
        "label": False,
        "start1": 3,
        "end1": 6,
        "start2": 2,
        "end2": 5,
        "version": 1.1,
    },
    "WSC": {
        "text": "The ball hit the table, and it broke.",
        "target": {"span1_index": 3, "span1_text": "The table", "span2_index": 6, "span2_text": "it"},
        "idx": 5,
        "label": True,
    },
}
EXAMPLES = {
    "BoolQ": ("pair", [Example(3, ("It is.", "is it"), "true")]),
    "CB": ("pair", [Example(0, ("It is.", "It was"), "neutral")]),
    "COPA": ("choice", [Example(1, ("I fell. What was the cause of this?", "I ran.", "I sat."), 0)]),
    "MultiRC": (
        "pair",
        [
            Example("4-9-1", ("Bo ran. He fell. Who?", "Bo"), "1"),
            Example("4-10-2", ("Bo ran. He fell. What?", "Nothing"), "0"),
        ],
    ),
    "ReCoRD": (
        "choice",
        [
            Example(
                6,
                ("Bo met Ann in Oslo Bo smiled", "In Bo it rains", "In Ann it rains", "In Oslo it rains"),
                2,
                ((3, 5), (3, 6), (3, 7)),
                ("Oslo",),
            )
        ],
    ),
    "RTE": ("pair", [Example(0, ("It is.", "It was"), "entailment")]),
    "WiC": ("word-in-context", [Example(0, ("We ran.", "A run"), "false", ((3, 6), (2, 5)))]),
    "WSC": ("relation", [Example(5, ("The ball hit the table, and it broke.",), "true", ((13, 22), (28, 30)))]),
}


def write(path: Path, line: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(line) + "\n")
    return path


@pytest.mark.parametrize("name", LINES)
def test_casts(tmp_path: Path, name: str) -> None:
    task, examples = EXAMPLES[name]
    path = write(tmp_path / name / "train.jsonl", LINES[name])
    assert read_labelled(path, task) == examples


@pytest.mark.parametrize("name", ["BoolQ", "CB", "COPA", "RTE", "WiC", "WSC"])
def test_test_sets_have_no_labels(tmp_path: Path, name: str) -> None:
    task, examples = EXAMPLES[name]
    path = write(tmp_path / name / "test.jsonl", {k: v for k, v in LINES[name].items() if k != "label"})
    assert read_labelled(path, task, require_labels=False) == [examples[0]._replace(target=None)]


def test_a_query_of_record_may_have_its_answer_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = LINES["ReCoRD"]
    other = {"query": "In @placeholder it snows", "answers": [{"text": "Rome", "start": 0, "end": 3}], "idx": 7}
    path = write(tmp_path / "ReCoRD" / "val.jsonl", {**line, "qas": [*line["qas"], other]})
    assert [example.id for example in read_labelled(path, "choice", split="train")] == [6]
    assert "1 query left out without a right answer among the entities (7)" in capsys.readouterr().err
    for answers in (True, False):
        right, none = read_labelled(path, "choice", split="dev", require_labels=answers)
        assert (right.target, none.target, none.references) == (2, -1, ("Rome",))
        assert "where every choice is wrong (7)" in capsys.readouterr().err
    unlabelled = {**line, "qas": [{"query": "In @placeholder it rains", "idx": 6}]}
    path = write(tmp_path / "ReCoRD" / "test.jsonl", unlabelled)
    assert read_labelled(path, "choice", split="dev", require_labels=False)[0].target is None


def test_wic_is_a_pair_too(tmp_path: Path) -> None:
    path = write(tmp_path / "WiC" / "train.jsonl", LINES["WiC"])
    assert read_labelled(path, "pair") == [Example(0, ("We ran.", "A run"), "false")]


def test_a_file_of_ones_own_is_not_cast(tmp_path: Path) -> None:
    path = write(tmp_path / "RTE" / "train.jsonl", {"text_a": "a", "text_b": "b", "label": "c"})
    assert read_labelled(path, "pair") == [Example(1, ("a", "b"), "c")]
    path = write(path, LINES["RTE"])
    columns = {"text_a": "hypothesis", "text_b": "premise"}
    assert read_labelled(path, "pair", columns) == [Example(1, ("It was", "It is."), "entailment")]


def test_mistakes(tmp_path: Path) -> None:
    path = write(tmp_path / "COPA" / "train.jsonl", {**LINES["COPA"], "question": "why"})
    with pytest.raises(UserError, match=r"train.jsonl:1: not in the format of SuperGLUE's copa \('why'\)"):
        read_labelled(path, "choice")
    with pytest.raises(UserError, match="SuperGLUE's copa is a 'choice' task, not 'pair'"):
        read_labelled(path, "pair")
    path = write(tmp_path / "WiC" / "train.jsonl", {**LINES["WiC"], "start1": float("inf")})
    with pytest.raises(UserError, match=r"train.jsonl:1: not in the format of SuperGLUE's wic"):
        read_labelled(path, "word-in-context")


def test_suite(tmp_path: Path) -> None:
    for name, line in LINES.items():
        write(tmp_path / name / "train.jsonl", line)
        write(tmp_path / name / "val.jsonl", line)
    suite = find_superglue_suite(tmp_path)
    assert list(suite) == ["boolq", "cb", "copa", "multirc", "record", "rte", "wic", "wsc"]
    assert suite["cb"].metrics == ("accuracy", "macro_f1")
    assert suite["wsc"].dev == {"dev": tmp_path / "WSC" / "val.jsonl"}
    assert suite["wsc"].test == {}
    for task in suite.values():
        assert read_labelled(task.dev["dev"], task.task, task.columns)
