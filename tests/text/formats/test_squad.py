"""SQuAD's nested questions, and answers whose offsets are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.text import Example, read_labelled
from firth.text.documents import AnswerSpan

CONTEXT = "to be or not to be"


def squad(path: Path, *questions: dict[str, Any]) -> Path:
    paragraphs = [{"context": CONTEXT, "qas": list(questions)}]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "Hamlet", "paragraphs": paragraphs}]}))
    return path


def question(**facts: Any) -> dict[str, Any]:
    return {"id": "q", "question": "what?", **facts}


def read(path: Path) -> list[Any]:
    return [example.target for example in read_labelled(path, "span-qa")]


def test_both_versions(tmp_path: Path) -> None:
    path = squad(
        tmp_path / "dev.json",
        question(answers=[{"text": "be", "answer_start": 16}, {"text": "not", "answer_start": 9}]),
        question(id="r", answers=[], is_impossible=True, plausible_answers=[{"text": "or", "answer_start": 6}]),
    )
    assert read_labelled(path, "span-qa") == [
        Example("q", ("what?", CONTEXT), (AnswerSpan("be", 16), AnswerSpan("not", 9))),
        Example("r", ("what?", CONTEXT), ()),
    ]


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({"text": ["be"], "answer_start": [3]}, (AnswerSpan("be", 3),)),
        ({"text": [], "answer_start": []}, ()),
        (["be", "not"], (AnswerSpan("be", 3), AnswerSpan("not", 9))),
        ("not", (AnswerSpan("not", 9),)),
        ("", ()),
    ],
)
def test_other_spellings_of_answers(tmp_path: Path, answers: Any, found: tuple[AnswerSpan, ...]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "what?", "context": CONTEXT, "answers": answers}))
    assert read(path) == [found]


@pytest.mark.parametrize(("said", "found"), [(0, 3), (4, 3), (12, 16), (17, 16), (-1, 3), (400, 16)])
def test_a_wrong_offset_is_moved_to_the_nearest_occurrence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: int, found: int
) -> None:
    path = squad(tmp_path / "a.json", question(answers=[{"text": "be", "answer_start": said}]))
    assert read(path) == [(AnswerSpan("be", found),)]
    assert "1 answer moved to where the context has the same words (q)." in " ".join(capsys.readouterr().err.split())


def test_an_answer_that_is_nowhere_is_left_out_and_so_is_its_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, kept = {"text": "bee", "answer_start": 3}, {"text": "be", "answer_start": 3}
    path = squad(tmp_path / "a.json", question(answers=[lost, kept]), question(id="r", answers=[lost]))
    assert read(path) == [(AnswerSpan("be", 3),)]
    said = " ".join(capsys.readouterr().err.split())
    assert "2 answers left out, as the context does not have the same words (q, r)." in said
    assert "1 question left out without an answer in the context (r)." in said


def test_a_question_that_is_scored_on_stays_whatever_its_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The official scorers count every question: one less would be another score."""
    lost = {"text": "bee", "answer_start": 3}
    path = squad(tmp_path / "a.json", question(answers=[lost]))
    (example,) = read_labelled(path, "span-qa", split="dev")
    assert example.target == (AnswerSpan("bee", -1),)
    assert "1 answer scored on, but not in the context (q)." in " ".join(capsys.readouterr().err.split())


def test_spaces_around_an_answer_are_not_part_of_it(tmp_path: Path) -> None:
    assert read(squad(tmp_path / "a.json", question(answers=[{"text": "not  ", "answer_start": 9}]))) == [
        (AnswerSpan("not", 9),)
    ]


def test_a_nest_of_another_form(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [{"qas": [{"id": 1}]}]}]}))
    with pytest.raises(UserError, match=r"article 1 is not in SQuAD's format \(no 'context'\)"):
        read(path)
