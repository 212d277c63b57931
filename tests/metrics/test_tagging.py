"""Stretches of words, by hand and against seqeval."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import seqeval.metrics
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities

from firth.core.errors import UserError
from firth.metrics import ClassMetrics, entity_f1, entity_precision, entity_recall, per_type_metrics
from firth.metrics.tagging import count_entities, extract_entity_spans, match_entities, tag_accuracy

TRUE = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "I-LOC", "O"]]
PREDICTED = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "O", "O"]]


def test_by_hand() -> None:
    # Guessed: PER 0-2 (right), PER 3-4, LOC 0-1; true: PER 0-2, LOC 3-4, LOC 0-2.
    assert entity_precision(PREDICTED, TRUE) == pytest.approx(1 / 3)
    assert entity_recall(PREDICTED, TRUE) == pytest.approx(1 / 3)
    assert entity_f1(PREDICTED, TRUE) == pytest.approx(1 / 3)
    assert tag_accuracy(PREDICTED, TRUE) == pytest.approx(5 / 7)
    assert per_type_metrics(PREDICTED, TRUE) == {
        "LOC": ClassMetrics(0.0, 0.0, 0.0, 2),
        "PER": pytest.approx(ClassMetrics(0.5, 1, 2 / 3, 1)),
    }
    assert entity_f1(PREDICTED, TRUE, exclude={"LOC"}) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("predicted", "true", "outcomes"),
    [
        ("B-PER I-PER O", "B-PER I-PER O", "right"),
        ("O O O", "B-PER I-PER O", "missed"),
        ("O O B-LOC", "O O O", "invented"),
        ("B-LOC I-LOC O", "B-PER I-PER O", "wrong type"),
        ("B-PER O O", "B-PER I-PER O", "wrong boundary"),
        ("O O B-PER", "B-PER I-PER O", "missed, invented"),  # no word in common
        ("B-LOC O O", "B-PER I-PER O", "invented, missed"),  # neither words nor type: nothing is right
        ("B-PER B-PER I-PER", "B-PER I-PER I-PER", "invented, wrong boundary"),  # two for one: the longer overlap
        ("B-PER I-PER I-PER", "B-PER O B-PER", "wrong boundary, missed"),  # one for two: the leftmost of equals
        ("B-PER I-PER B-LOC", "B-PER B-PER B-LOC", "wrong boundary, missed, right"),
        ("B-PER B-LOC O", "B-LOC B-LOC O", "wrong type, right"),
        ("I-PER I-PER O", "B-PER I-PER O", "right"),  # another scheme, the same entity
    ],
)
def test_the_five_outcomes_by_hand(predicted: str, true: str, outcomes: str) -> None:
    matches = match_entities(predicted.split(), true.split())
    assert ", ".join(match.outcome for match in matches) == outcomes
    entities = {"true": extract_entity_spans(true.split()), "predicted": extract_entity_spans(predicted.split())}
    for side, spans in entities.items():  # each entity has one outcome
        assert sorted(span for match in matches if (span := getattr(match, side))) == sorted(spans)


def test_an_excluded_type_has_no_outcome() -> None:
    assert match_entities(["B-V", "O"], ["O", "B-V"], exclude=("V",)) == []


def test_every_scheme_gives_the_same_stretches() -> None:
    expected = [("A", 0, 2), ("A", 2, 3), ("B", 4, 7)]
    iob1 = ["I-A", "I-A", "B-A", "O", "I-B", "I-B", "I-B"]
    iob2 = ["B-A", "I-A", "B-A", "O", "B-B", "I-B", "I-B"]
    bioes = ["B-A", "E-A", "S-A", "O", "B-B", "I-B", "E-B"]
    bilou = ["B-A", "L-A", "U-A", "O", "B-B", "I-B", "L-B"]
    for tags in (iob1, iob2, bioes, bilou):
        assert extract_entity_spans(tags) == expected


def test_a_stretch_does_not_reach_into_the_next_sentence() -> None:
    assert entity_f1([["B-A"], ["I-A"]], [["B-A"], ["B-A"]]) == 1.0


def test_types_may_have_hyphens_and_may_be_missing() -> None:
    assert extract_entity_spans(["B-C-ARG1", "I-C-ARG1", "I-ARG1"]) == [("C-ARG1", 0, 2), ("ARG1", 2, 3)]
    assert extract_entity_spans(["B", "I", "O"]) == [("_", 0, 2)]


def test_nothing_found_is_zero_not_an_error() -> None:
    assert entity_f1([["O"]], [["O"]]) == 0.0
    assert entity_f1([["O"]], [["B-A"]]) == 0.0


TAGS = st.sampled_from(["O", "O", *(f"{place}-{name}" for place in "BIES" for name in ("A", "B", "C-A"))])
SENTENCES = st.lists(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(deadline=None)
@given(SENTENCES)
def test_any_tags_as_seqeval(sentences: list[list[tuple[str, str]]]) -> None:
    predicted = [[p for p, _ in sentence] for sentence in sentences]
    true = [[t for _, t in sentence] for sentence in sentences]
    counts = Counter(m.outcome for p, t in zip(predicted, true, strict=True) for m in match_entities(p, t))
    paired = counts["right"] + counts["wrong type"] + counts["wrong boundary"]
    totals = [counts["right"], paired + counts["invented"], paired + counts["missed"]]
    assert totals == count_entities(predicted, true, ())
    for tags in true:
        assert [(c.type, c.start, c.end - 1) for c in extract_entity_spans(tags)] == get_entities(tags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        official = seqeval.metrics
        assert entity_f1(predicted, true) == pytest.approx(official.f1_score(true, predicted), abs=1e-9)
        assert entity_precision(predicted, true) == pytest.approx(official.precision_score(true, predicted), abs=1e-9)
        assert entity_recall(predicted, true) == pytest.approx(official.recall_score(true, predicted), abs=1e-9)
        assert tag_accuracy(predicted, true) == pytest.approx(official.accuracy_score(true, predicted), abs=1e-9)
        rows = per_type_metrics(predicted, true)
        if rows:  # seqeval's report needs one entity
            table = official.classification_report(true, predicted, output_dict=True)
            assert {*rows} == {*table} - {"micro avg", "macro avg", "weighted avg"}
            for name, row in rows.items():
                assert row == pytest.approx(tuple(table[name].values()), abs=1e-9)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"Sentence 1 .* has 2 words but 1 predicted"):
        entity_f1([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(UserError, match="'NOUN' marks no span"):
        entity_f1([["NOUN"]], [["O"]])
    with pytest.raises(UserError, match="No predictions"):
        tag_accuracy([], [])
    with pytest.raises(UserError, match="no sentence has a word"):
        tag_accuracy([[]], [[]])
