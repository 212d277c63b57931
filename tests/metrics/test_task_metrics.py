"""Every task has its metrics, the deciding one first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from firth.core.errors import UserError
from firth.metrics import compute_metrics
from firth.metrics.task_metrics import TASK_METRIC_FNS

PAIRS = [((1.0, 0.0), (1.0, 0.1)), ((0.0, 1.0), (0.1, 1.0))]
# Task -> predictions, references, what comes out.
CASES: dict[str, tuple[list[Any], list[Any], dict[str, float]]] = {
    "classify": (["a", "b"], ["a", "a"], {"accuracy": 0.5, "macro_f1": 1 / 3, "mcc": 0.0}),
    "pair": (["1", "1"], ["1", "0"], {"accuracy": 0.5, "macro_f1": 1 / 3, "mcc": 0.0, "f1": 2 / 3}),
    "word-in-context": (["F", "T"], ["F", "T"], {"accuracy": 1, "macro_f1": 1, "mcc": 1, "f1": 1}),
    "relation": (["x", "no_relation"], ["x", "x"], {"f1": 2 / 3, "accuracy": 0.5, "macro_f1": 1 / 3}),
    "regress": ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0], {"pearson": 0.5, "spearman": 0.5, "mean_absolute_error": 2 / 3}),
    "choice": ([0, 3, 1], [0, 3, 2], {"accuracy": 2 / 3}),
    "tag": (
        [("B-A", "O")],
        [("B-A", "B-A")],
        {"entity_f1": 2 / 3, "entity_precision": 1, "entity_recall": 0.5, "accuracy": 0.5},
    ),
    "span-qa": (
        ["the cat sat", ""],
        [("cat",), ()],
        {"f1": 5 / 6, "exact": 0.5, "HasAns_f1": 2 / 3, "HasAns_exact": 0, "NoAns_f1": 1, "NoAns_exact": 1},
    ),
    "text-to-text": (
        ["one two three four"],
        [["x", "one two three four"]],
        {
            "chrf": 100,
            "bleu": 100,
            **{f"rouge_{n}": 100 for n in ("1", "2", "l", "lsum")},
            "exact_match": 1,
            "answer_match": 1,
        },
    ),
    "extract": (
        ['{"a": 1, "b": ["x", "y"]}', '{"a":'],
        ['{"a": 1.0, "b": ["y", "z"]}', '{"a": 2}'],
        {
            "field_f1": 4 / 7,
            "field_precision": 2 / 3,
            "field_recall": 0.5,
            "exact_match": 0,
            "valid": 0.5,
            "match.a": 0.5,
            "match.b": 0,
        },
    ),
    "lm": ([math.log(8), math.log(8)], [(1, 2), (1, 1)], {"perplexity": 8, "bits_per_byte": 2}),
    "perplexity": ([math.log(16)], [(2, 4)], {"perplexity": 4, "bits_per_byte": 1}),
    "pseudo-likelihood": ([math.log(16)], [(2, 4)], {"pseudo_perplexity": 4}),
    "embed": ([0.1, 0.2, 0.9], [1.0, 2.0, 3.0], {"spearman": 1, "pearson": np.corrcoef([1, 2, 9], [1, 2, 3])[0, 1]}),
    "minimal-pairs": ([(1, 0), (1, 0), (0, 1)], ["a", "a", "b"], {"accuracy": 2 / 3, "group_accuracy": 0.5}),
    "cloze": ([" cat", "dog"], ["cat", "fox"], {"accuracy": 0.5}),
    "word-similarity": ([0.1, None, 0.3], [1.0, 5.0, 2.0], {"spearman": 1, "known": 2 / 3}),
    "analogy": (
        ["b", "b", "x", None],
        [("b", "s"), ("b", "s"), ("c", "t"), ("d", "t")],
        {"accuracy": 2 / 3, "section_accuracy": 0.5, "known": 0.75},
    ),
}


def test_every_task_is_tried_here() -> None:
    assert CASES.keys() == TASK_METRIC_FNS.keys()


@pytest.mark.parametrize("task", CASES)
def test_by_hand(task: str) -> None:
    predictions, references, expected = CASES[task]
    scores = compute_metrics(task, predictions, references)
    assert scores == pytest.approx(expected)
    assert list(scores) == list(expected), "the deciding metric comes first"
    assert all(type(value) is float or value == int(value) for value in scores.values())


@pytest.mark.parametrize("task", CASES)
def test_mistakes_are_named(task: str) -> None:
    predictions, references, _ = CASES[task]
    with pytest.raises(UserError, match=f"{len(predictions) - 1} predictions for {len(predictions)} references"):
        compute_metrics(task, predictions[:-1] or predictions * 0, references)
    with pytest.raises(UserError, match="No predictions"):
        compute_metrics(task, [], [])


def test_which_metrics_there_are_depends_on_the_truth_alone() -> None:
    """So that every seed has the same."""
    assert "f1" in compute_metrics("classify", ["c", "a"], ["b", "a"])
    assert "f1" not in compute_metrics("classify", ["a", "b"], ["a", "a"])


def test_vectors_without_a_truth_are_searched() -> None:
    scores = compute_metrics("embed", PAIRS, [None, None])
    assert next(iter(scores)) == "precision_at_1"
    assert scores["precision_at_1"] == scores["mrr"] == 1


def test_parts_of_speech_have_accuracy_only() -> None:
    assert compute_metrics("tag", [("NOUN", "VERB")], [("NOUN", "NOUN")]) == {"accuracy": 0.5}


def test_no_word_known_is_no_score() -> None:
    scores = compute_metrics("analogy", [None], [("d", "s")])
    assert math.isnan(scores["accuracy"])
    assert scores["known"] == 0


def test_the_nearest_task_is_named() -> None:
    with pytest.raises(UserError, match="Did you mean 'classify'"):
        compute_metrics("clasify", ["a"], ["a"])


def test_an_empty_answer_matches_no_punctuation() -> None:
    assert compute_metrics("text-to-text", ["", "The cat!"], ["???", "cat"])["answer_match"] == 0.5
