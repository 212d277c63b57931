"""The examples of a report: the marks of each task, their order, and a page that is safe and light."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

import firth.evaluate.examples_page as examples_page
from firth.core.html import HtmlPage
from firth.evaluate.examples_page import (
    ExampleRow,
    add_examples,
    answer_row,
    entity_row,
    label_row,
    make_section,
    text_row,
)
from firth.evaluate.marked import diff_words
from firth.evaluate.report import write_run_report
from firth.metrics import format_metric
from firth.tasks import Prediction
from firth.tasks.results import write_predictions
from firth.text import Example
from firth.text.documents import AnswerSpan

EVIL = '</script><script>alert("x")</script>&\''
WORDS = ("Anna", "Okello", "saw", "Lake", "Victoria", "again")
TRUE = ("B-PER", "I-PER", "O", "B-LOC", "I-LOC", "O")


def tagged(tags: str, *probabilities: float) -> Prediction:
    return Prediction(tuple(tags.split()), extra={"probabilities": list(probabilities)} if probabilities else None)


def marks(row: ExampleRow, line: int = 0) -> list[tuple[str, str, str]]:
    return [tuple(part) for part in row.lines[line][1] if part.classes]


def page_of(task: str, pairs: list[tuple[Example, Prediction]]) -> str:
    page = HtmlPage("report")
    add_examples(page, task, pairs)
    return page.to_html()


def test_entities_are_marked_where_they_are_predicted_and_where_they_are_true() -> None:
    row = entity_row(Example(1, WORDS, TRUE), tagged("B-PER O O B-ORG I-ORG B-LOC", 0.9, 0.5, 0.9, 0.8, 0.6, 0.7))
    assert marks(row) == [
        ("Anna", "g g-wrong-boundary p p-wrong-boundary", ""),
        (" Okello", "g g-wrong-boundary", "wrong boundary: PER 90%"),
        ("Lake Victoria", "g g-wrong-type p p-wrong-type", "ORG, right: LOC 60%"),
        ("again", "p p-invented", "invented: LOC 70%"),
    ]
    assert "".join(part.text for part in row.lines[0][1]) == " ".join(WORDS)
    assert row.pairs == [("PER", "PER"), ("LOC", "ORG"), (None, "LOC")]
    assert row.confidence == 0.9
    missed = entity_row(Example(1, WORDS, TRUE), tagged("B-PER I-PER O O O O", 1, 1, 1, 0.7, 0.8, 1))
    assert marks(missed)[1] == ("Lake Victoria", "g g-missed", "missed: LOC 70%")


def test_the_surest_mistakes_come_first_only_with_a_confidence() -> None:
    wrong = "B-PER I-PER O O O O"
    sure, unsure = tagged(wrong, 1, 1, 1, 0.9, 0.9, 1), tagged(wrong, 1, 1, 1, 0.6, 0.6, 1)
    right, unknown = tagged(" ".join(TRUE)), tagged(wrong)

    def section(*predictions: Prediction) -> dict[str, Any]:
        rows = [entity_row(Example(i, WORDS, TRUE), p) for i, p in enumerate(predictions)]
        return make_section("entities", rows)

    known = section(right, unsure, sure)
    assert [row["id"] for row in known["rows"]] == ["2", "1", "0"]
    assert "surest" in known["notes"][0]
    assert {o["sample"].text: o["count"] for o in known["outcomes"]} == {
        "right": "4",
        "missed": "2",
        "invented": "0",
        "wrong type": "0",
        "wrong boundary": "0",
    }
    without = section(unknown, right, unknown)
    assert [row["id"] for row in without["rows"]] == ["0", "2", "1"]
    assert "surest" not in without["notes"][0]
    (matrix,) = [row["cells"] for row in known["confusion"]["rows"] if row["name"] == "LOC"]
    assert [cell["count"] for cell in matrix] == ["1", "0", "2"]  # LOC, PER, missed


@pytest.mark.parametrize(
    ("predicted", "answers", "outcome", "marked"),
    [
        ("lake victoria!", ["Lake Victoria"], "right", ["Lake Victoria"]),
        ("Victoria", ["Lake Victoria"], "partly right", ["Lake ", "Victoria"]),
        ("Kenya", ["Lake Victoria"], "wrong answer", ["Lake Victoria", "Kenya"]),
        ("", ["Lake Victoria"], "missed", ["Lake Victoria"]),
        ("Kenya", [], "invented", ["Kenya"]),
        ("", [], "right", []),
    ],
)
def test_answers_are_marked_in_their_context(
    predicted: str, answers: list[str], outcome: str, marked: list[str]
) -> None:
    context = "Fish from Lake Victoria is eaten in Kenya."
    target = tuple(AnswerSpan(text, context.index(text)) for text in answers)
    row = answer_row("span-qa", Example("q", ("Which lake?", context), target), Prediction(predicted))
    assert row.outcomes == [outcome]
    assert [text for text, _, _ in marks(row, line=1)] == marked
    assert row.is_mistake == (outcome != "right")


def test_a_diff_has_the_words_of_both_texts() -> None:
    parts, similarity = diff_words("the big dog barks.", "the dog barks loudly.")
    assert [(part.text, part.classes[-3:]) for part in parts if part.classes] == [("big", "ins"), ("loudly", "del")]
    assert similarity == pytest.approx(2 * 4 / 10)  # the full stop is a word of its own
    decomposed = "ni\u0303o \u0939\u093f\u0928\u094d\u0926\u0940"  # marks stay with their words
    assert [part.text for part in diff_words(decomposed, decomposed + " x").parts][-1] == "x"
    assert [part.text for part in diff_words("我爱你", "我不爱你").parts] == ["我", "不", "爱你"]
    row = text_row("text-to-text", Example(1, ("source",), "a b", references=("a b", "c d")), Prediction("c d e"))
    assert [text for text, _, _ in marks(row, line=1)] == ["e"]  # against the most similar reference


def test_nothing_in_a_text_or_a_label_becomes_markup() -> None:
    tag = f"B-{EVIL}"
    answer = (AnswerSpan(EVIL, 0),)
    pages = [
        page_of("tag", [(Example(EVIL, (EVIL, "b"), (tag, "O")), Prediction(("O", tag)))]),
        page_of("tag", [(Example(1, (EVIL,), (EVIL,)), Prediction(("X",)))]),
        page_of("classify", [(Example(1, (EVIL,), EVIL), Prediction("other", {EVIL: 0.2, "other": 0.8}))]),
        page_of("span-qa", [(Example(1, (EVIL, EVIL + " more"), answer), Prediction("more"))]),
        page_of("text-to-text", [(Example(1, (EVIL,), EVIL), Prediction("other"))]),
    ]
    for html in pages:
        (script,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)  # the page's own, and no other
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src &#39;sha256-{digest}&#39;" in html
        assert "alert" not in script
        assert "&lt;script&gt;alert(&#34;x&#34;)" in html
        assert not re.search(r"https?:|fetch\(|\bsrc=", html)


def test_a_page_stays_light_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples_page, "MAX_EXAMPLE_ROWS", 3)
    pairs = [(Example(i, (f"text {i}",), "a"), Prediction("b" if i == 4 else "a")) for i in range(5)]
    html = page_of("classify", pairs)
    assert html.count("<li ") == 3
    assert html.index("text 4") < html.index("text 0"), "mistakes come first"
    assert "This page has 3 of 5 examples; predictions.jsonl has all." in html
    monkeypatch.setattr(examples_page, "MAX_EXAMPLE_CHARS", 1000)
    long = [(Example(i, ("word " * 100,), "a"), Prediction("a")) for i in range(3)]
    assert page_of("classify", long).count("<li ") == 1


def test_the_report_of_a_run_has_confidences_and_percentages(tmp_path: Path) -> None:
    example = Example(1, WORDS, TRUE)
    write_predictions(tmp_path / "predictions.jsonl", [example], [tagged("B-PER I-PER O O O O", 1, 1, 1, 0.7, 0.8, 1)])
    (tmp_path / "recipe.yaml").write_text("checkpoint: c\ntrain: t\ndev: d\n")
    scores = {"entity_f1": 2 / 3, "accuracy": 0.9}
    result = {"task": "tag", "from_scratch": False, "steps": [1], "scores": [scores], "best_seed": 0}
    html = write_run_report(tmp_path, result | {"metric": "entity_f1"}, [example]).read_text(encoding="utf-8")
    assert '<td class="number">66.7%</td>' in html
    assert "missed: LOC 70%" in html


def test_a_choice_is_shown_as_its_text() -> None:
    example = Example(1, ("The lake is", "dry.", "full of fish."), 1)
    row, none = (label_row("choice", example, Prediction(p)) for p in (0, None))
    assert [text for line in (-2, -1) for text, _, _ in marks(row, line)] == ["dry.", "full of fish."]
    assert marks(none, -2)[0][0] == "(none)"


def test_many_classes_have_a_list_of_confusions() -> None:
    pairs = [(Example(i, ("text",), f"class {i}"), Prediction("class 0")) for i in range(40)]
    html = page_of("classify", pairs)
    assert "The most frequent confusions." in html
    assert 'class="confusion"' not in html


def test_shares_are_percentages_and_other_scores_are_not() -> None:
    shares = ("accuracy", "HasAns_f1", "sst2.macro_f1", "entity_precision", "exact_match", "mrr_forward", "average")
    assert {format_metric(name, 0.4567) for name in shares} == {"45.7%"}
    others = ("mcc", "spearman", "perplexity", "bleu", "rouge_1", "best_f1_thresh", "eval_loss")
    assert {format_metric(name, 0.4567) for name in others} == {"0.4567"}
    assert format_metric("f1", float("nan")) == "nan"
