"""Answers cut from a text, by hand and against torchmetrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchmetrics.functional.text import squad as official

from firth.core.errors import UserError
from firth.metrics import squad_per_question
from firth.metrics.squad import best_no_answer_threshold, squad_exact_match, squad_f1, squad_scores


class Answer(NamedTuple):
    text: str
    start: int


@pytest.fixture
def exact_numbers() -> Iterator[None]:
    """torchmetrics in double precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_by_hand() -> None:
    predictions = ["The Denver Broncos!", "in Santa Clara", "1999"]
    references = [["Denver Broncos"], ["Levi's Stadium", "Santa Clara, California"], ["2000"]]
    assert squad_exact_match(predictions, references) == pytest.approx(1 / 3)
    # "in santa clara" and "santa clara california" share 2 of 3 words: 2/3.
    assert squad_f1(predictions, references) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert squad_f1(predictions, [[Answer(text, 0) for text in texts] for texts in references]) == pytest.approx(5 / 9)


def test_a_word_said_twice_is_shared_twice_only_if_both_say_it() -> None:
    assert squad_f1(["no no no"], [["no no yes"]]) == pytest.approx(2 / 3)


def test_no_answer() -> None:
    # Right silence, wrong silence, an answer where there is none.
    exact, f1 = squad_per_question(["", "", "x"], [[], ["x"], []])
    assert exact.tolist() == f1.tolist() == [1, 0, 0]


def test_where_both_scripts_differ() -> None:
    """Nothing is left of the answer "A": equal texts, but no word to share, which only 2.0 forgives."""
    assert [each.tolist() for each in squad_per_question(["the"], [["A"]], version=1)] == [[1], [0]]
    assert [each.tolist() for each in squad_per_question(["the"], [["A"]], version=2)] == [[1], [1]]
    # 2.0 forgets that answer if there is another one.
    assert [each.tolist() for each in squad_per_question(["the"], [["A", "letter A"]], version=1)] == [[1], [0]]
    assert [each.tolist() for each in squad_per_question(["the"], [["A", "letter A"]], version=2)] == [[0], [0]]
    # Without a word on it: 2 only where a question has no answer.
    assert squad_f1(["the"], [["A"]]) == 0
    assert squad_f1(["the", ""], [["A"], []]) == 1
    with pytest.raises(UserError, match=r"Question 1 .* has no answer"):
        squad_f1(["a", "b"], [["a"], []], version=1)


WORDS = st.lists(st.sampled_from(["Paris", "paris,", "the", "an", "42", "É", "New-York", "new"]), max_size=5)
TEXT = WORDS.map(lambda words: " ".join([*words, "x."]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.just("") | TEXT, st.lists(TEXT, max_size=3)), min_size=1, max_size=5))
def test_as_torchmetrics(exact_numbers: None, questions: list[tuple[str, list[str]]]) -> None:
    predictions, references = map(list, zip(*questions, strict=True))
    theirs = official(
        [{"id": str(i), "prediction_text": text} for i, text in enumerate(predictions)],
        [{"id": str(i), "answers": {"text": texts or [""], "answer_start": []}} for i, texts in enumerate(references)],
    )
    assert 100 * squad_exact_match(predictions, references) == pytest.approx(float(theirs["exact_match"]), abs=1e-9)
    assert 100 * squad_f1(predictions, references) == pytest.approx(float(theirs["f1"]), abs=1e-9)
    assert squad_f1(predictions, references, version=2) == squad_f1(predictions, references)


def test_scores_of_answerable_and_unanswerable_by_hand() -> None:
    predictions = ["big cat", "dog", "fox"]
    references = [["cat"], ["dog"], []]
    assert squad_scores(predictions, references) == pytest.approx(
        {
            "exact": 1 / 3,
            "f1": (2 / 3 + 1) / 3,
            "HasAns_exact": 1 / 2,
            "HasAns_f1": 5 / 6,
            "NoAns_exact": 0,
            "NoAns_f1": 0,
        }
    )
    # The fox is the least sure. Exact match: silence on all gives 1; the cat (0.1) adds 0, the dog (0.3) adds 1, the
    # fox takes 1 away. F1: the cat adds 2/3, the dog 1.
    scores = squad_scores(predictions, references, no_answer_probability=[0.1, 0.3, 0.9], threshold=0.3)
    assert scores["exact"] == scores["best_exact"] == pytest.approx(2 / 3)
    assert scores["f1"] == scores["best_f1"] == pytest.approx((2 / 3 + 1 + 1) / 3)
    assert scores["best_exact_thresh"] == scores["best_f1_thresh"] == 0.3
    assert scores["NoAns_f1"] == 1
    assert squad_scores(["a"], [["b"]]).keys() == {"exact", "f1", "HasAns_exact", "HasAns_f1"}


def test_answers_without_words_by_hand() -> None:
    """An article alone is right for an unanswerable question, but the search for the best threshold counts it wrong.

    An answer that is an article alone is no answer: only the empty prediction is right, and only without a threshold.
    """
    assert squad_scores(["the", "x"], [[], ["x"]], [0.1, 0.2]) == pytest.approx(
        {"f1": 1, "exact": 1, "HasAns_f1": 1, "HasAns_exact": 1, "NoAns_f1": 1, "NoAns_exact": 1}
        | {"best_f1": 0.5, "best_f1_thresh": 0.0, "best_exact": 0.5, "best_exact_thresh": 0.0}
    )
    assert squad_scores(["", "x"], [["The"], []])["HasAns_exact"] == 1
    assert squad_scores(["a", "x"], [["The"], []], [0.9, 0.9], threshold=0.5)["HasAns_exact"] == 0


def test_the_best_threshold_may_be_to_answer_nothing() -> None:
    assert best_no_answer_threshold([0, 0], ["x", "y"], [["a"], []], [0.5, 0.2]) == (0.5, 0.0)
    # Saying nothing of one's own accord costs nothing.
    assert best_no_answer_threshold([0, 1], ["", "y"], [[], ["y"]], [0.2, 0.5]) == (1.0, 0.5)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "x", "x y"]), st.sampled_from([[], ["x"], ["y x", "z"]])), min_size=1))
def test_no_threshold_is_better_than_the_best(questions: list[tuple[str, list[str]]]) -> None:
    predictions, references = map(list, zip(*questions, strict=True))
    no_answer = [(7 * i % 101 + 1) / 102 for i in range(len(questions))]  # all different
    best = squad_scores(predictions, references, no_answer)
    for metric in ("exact", "f1"):
        tried = {t: squad_scores(predictions, references, no_answer, threshold=t)[metric] for t in [0.0, *no_answer]}
        assert best[f"best_{metric}"] == pytest.approx(max(tried.values()), abs=1e-9)
        assert tried[best[f"best_{metric}_thresh"]] == pytest.approx(max(tried.values()), abs=1e-9)
