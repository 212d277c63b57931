"""Scores from sums are those of the scorers, on everything and on every sample of a bootstrap."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from firth.metrics import additive_entity_score, compute_metrics, entity_f1, is_additive_metric, make_additive_score
from firth.metrics.additive import ADDITIVE_METRICS
from firth.metrics.bootstrap import paired_bootstrap

NUM = 40
WORDS = ["the", "old", "mill", "by", "a", "river", "stands", "still", "today", "."]
TAGS = ["O", "O", "B-PER", "I-PER", "B-V", "S-LOC", "E-LOC"]


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(0, 8)))


def labels(rng: random.Random) -> list[tuple[Any, Any]]:
    return [(rng.choice("ab"), rng.choice("aab")) for _ in range(NUM)]


def relations(rng: random.Random) -> list[tuple[Any, Any]]:
    names = ["no_relation", "born_in", "works_for"]
    return [(rng.choice(names), rng.choice(names)) for _ in range(NUM)]


def tags(rng: random.Random) -> list[tuple[Any, Any]]:
    sizes = [rng.randint(1, 9) for _ in range(NUM)]
    return [(rng.choices(TAGS, k=size), tuple(rng.choices(TAGS, k=size))) for size in sizes]


def answers(rng: random.Random) -> list[tuple[Any, Any]]:
    return [(text(rng), [text(rng) for _ in range(rng.randint(0, 3))]) for _ in range(NUM)]


def texts(rng: random.Random) -> list[tuple[Any, Any]]:
    found = [(text(rng), [text(rng) + "x" for _ in range(rng.randint(1, 3))]) for _ in range(NUM)]
    return [(predicted, [*right, predicted] if rng.random() < 0.3 else right) for predicted, right in found]


def likelihoods(rng: random.Random) -> list[tuple[Any, Any]]:
    return [(rng.uniform(1, 90), (rng.randint(1, 30), rng.randint(30, 99))) for _ in range(NUM)]


def choices(rng: random.Random) -> list[tuple[Any, Any]]:
    return [(rng.randrange(4), rng.randrange(4)) for _ in range(NUM)]


def objects(rng: random.Random) -> list[tuple[Any, Any]]:
    def draw() -> str:
        value = {name: rng.randrange(3) for name in "abc" if rng.random() < 0.8}
        return json.dumps(value)[: rng.choice((None, None, -1))]

    return [(draw(), json.dumps({"a": rng.randrange(3), "c": 1})) for _ in range(NUM)]


DATA: dict[str, Callable[[random.Random], list[tuple[Any, Any]]]] = {
    **dict.fromkeys(("classify", "pair", "word-in-context"), labels),
    "relation": relations,
    "choice": choices,
    "tag": tags,
    "span-qa": answers,
    "text-to-text": texts,
    "extract": objects,
    "lm": likelihoods,
}


@pytest.mark.parametrize(("task", "metric"), ADDITIVE_METRICS)
def test_as_the_scorer_has_it(task: str, metric: str) -> None:
    rng = random.Random(f"{task} {metric}")
    one, true = zip(*DATA[task](rng), strict=True)
    if (task, metric) == ("span-qa", "exact_match"):  # of SQuAD 1.1, where every question has an answer
        true = tuple(right or ["the mill"] for right in true)
    other = rng.sample(one, NUM) if task != "tag" else [rng.choices(TAGS, k=len(tags)) for tags in true]
    slow = paired_bootstrap(lambda p, r: compute_metrics(task, p, r)[metric], one, other, true, num_samples=15)
    fast = paired_bootstrap(lambda p, r: make_additive_score(task, metric, p, r), one, other, true, num_samples=15)
    assert slow.low < slow.high
    assert fast[:5] == pytest.approx(slow[:5], rel=1e-12, abs=1e-12)


def test_types_that_are_left_out() -> None:
    rng = random.Random(0)
    one, true = zip(*tags(rng), strict=True)
    found = additive_entity_score("f1", one, true, exclude={"V"}).score_sample(np.ones(NUM))
    assert found == entity_f1(one, true, exclude={"V"}) != entity_f1(one, true)


def test_what_is_no_matter_of_sums() -> None:
    assert not is_additive_metric("regress", "pearson", [1.0, 2.0])
    many = [str(i) for i in range(20)]
    assert is_additive_metric("classify", "mcc", many[:10])
    assert not is_additive_metric("classify", "mcc", many)
    assert is_additive_metric("classify", "accuracy", many)
