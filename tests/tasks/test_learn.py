"""A tiny model of each supported architecture learns every task."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tasks.small import ANIMALS, CPU, PLACES, learn, parts

from firth.tasks import FinetuneRecipe, make_task
from firth.text import Example
from firth.text.documents import AnswerSpan

SIZES, COLOURS = ["big", "small"], ["red", "blue"]


def examples(name: str, number: int = 96) -> list[Example]:
    """Simple rules over words at random positions."""
    rng, found = random.Random(0), []
    for i in range(number):
        animal, place, colour, size = (rng.choice(w) for w in (ANIMALS, PLACES, COLOURS, SIZES))
        other = rng.choice([a for a in ANIMALS if a != animal])
        again = rng.choice([animal, other])
        if name == "classify":
            found.append(Example(i, (f"the {size} {colour} {animal} lives near the {place}",), size))
        elif name == "pair":
            found.append(Example(i, (f"{size} {animal}", f"the {colour} {again}"), colour))
        elif name == "regress":
            found.append(Example(i, (f"a {size} {animal}", f"a {colour} {place}"), 1.0 if size == "big" else -1.0))
        elif name == "choice":
            wrong = [f"the {place}"] * rng.randint(1, 2)
            gold = rng.randint(0, len(wrong))
            found.append(Example(i, (f"a {size}", *wrong[:gold], f"the {animal}", *wrong[gold:]), gold))
        elif name == "tag":
            words = ("the", animal, "lives", "near", place)[rng.randint(0, 2) :]
            tags = tuple("B-A" if w in ANIMALS else "B-P" if w in PLACES else "O" for w in words)
            found.append(Example(i, words, tags))
        elif name == "relation":
            a, b = rng.sample([animal, place], 2)
            text = f"the {a} is near the {b}"
            spans = ((4, 4 + len(a)), (len(text) - len(b), len(text)))
            found.append(Example(i, (text,), "home" if a == animal else "guest", spans))
        elif name == "word-in-context":
            a, b = f"{colour} {animal}", f"{size} {animal}"
            spans = ((len(colour) + 1, len(a)), (len(size) + 1, len(b)))
            found.append(Example(i, (a, b), size, spans))
        elif name == "span-qa":
            context = f"the {size} {animal} lives near the {colour} {place}"
            start = rng.randint(0, 4)
            found.append(Example(i, ("red", context[start:]), answers(context[start:], animal)))
    return found


def answers(context: str, text: str) -> tuple[AnswerSpan, ...]:
    return (AnswerSpan(text, context.index(text)),)


STEPS = {"span-qa": 80, "pair": 60, "word-in-context": 60}
NAMES = ["classify", "pair", "regress", "choice", "tag", "relation", "word-in-context", "span-qa"]
CASES = [(name, "bert", "head") for name in NAMES] + [(name, "gpt2", "head") for name in NAMES]
CASES += [("classify", "bart", "head"), ("regress", "bart", "head"), ("relation", "bart", "head")]
CASES += [(name, "gpt2", "text") for name in ("classify", "pair", "regress", "choice")]
CASES += [(name, "t5", "text") for name in ("pair", "regress", "choice")] + [("regress", "t5", "head")]


@pytest.mark.parametrize(("name", "family", "answer"), CASES)
def test_a_tiny_model_learns(name: str, family: str, answer: Any) -> None:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(max_seq_length=32, max_target_length=8, answer=answer)
    known = examples(name)
    task = make_task(name, known, tokenizer, config, recipe)
    items = task.encode(known)
    steps = STEPS.get(name, 40) * (2 if family != "bert" else 1)
    model = learn(task, config, items, steps, rate=1e-2 if family == "t5" else 5e-3)
    found = task.predict(model, items[:48], CPU, 16)
    scores = task.score(known[:48], found)
    assert task.metric in scores
    assert scores[task.metric] > 0.9

    # made again from its facts, it predicts the same
    again = make_task(name, task.metadata(), task.tokenizer, model.config)
    assert again.tokenizer is task.tokenizer
    same = again.predict(model, again.encode(known[:48]), CPU, 48)
    for p, q in zip(found, same, strict=True):
        assert p.prediction == pytest.approx(q.prediction) if name == "regress" else p.prediction == q.prediction
    assert again.metadata() == task.metadata()


def test_unlabelled_examples_can_be_predicted() -> None:
    for name in NAMES:
        config, tokenizer = parts("bert")
        known = examples(name, 12)
        task = make_task(name, known, tokenizer, config, FinetuneRecipe(max_seq_length=32))
        model = learn(task, config, task.encode(known), 1)
        blank = [e._replace(target=None) for e in known]
        found = task.predict(model, task.encode(blank), CPU, 5)
        assert len(found) == 12
        if name == "tag":
            assert [len(p.prediction) for p in found] == [len(e.texts) for e in known]
        elif name == "choice":
            for p, e in zip(found, known, strict=True):
                assert set(p.scores or ()) == {str(i) for i in range(len(e.texts) - 1)}
        assert np.isfinite(task.collate(task.encode(blank)).input_ids).all()
