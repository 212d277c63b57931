"""Tasks with generated answers: questions about a text, numbers, labels with a prefix."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tasks.small import ANIMALS, CPU, PLACES, learn, parts

from firth.models import make_model
from firth.tasks import FinetuneRecipe, encode_task_prompts, make_task
from firth.text import Example
from firth.text.documents import AnswerSpan


def made(name: str, family: str, known: list[Example], **fields: Any) -> Any:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(**{"max_seq_length": 48, "max_target_length": 8, "answer": "text"} | fields)
    return make_task(name, known, tokenizer, config, recipe), config


def questions(number: int = 64) -> list[Example]:
    """What lives there? Unanswerable if the text names a place only."""
    rng, found = random.Random(0), []
    for i in range(number):
        animal, place = rng.choice(ANIMALS), rng.choice(PLACES)
        context = f"the {animal} lives near the {place}" if i % 3 else f"the {place} is not near"
        answer = (AnswerSpan(animal, 4),) if i % 3 else ()
        found.append(Example(i, ("lives", context), answer))
    return found


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_answers_to_questions_are_generated(family: str) -> None:
    known = questions()
    task, config = made("span-qa", family, known)
    items = task.encode(known)
    assert task.as_text_example(known[1]).texts[0] == f"question: lives context: {known[1].texts[1]}"
    model = learn(task, config, items, 150, rate=5e-3)
    found = task.predict(model, items, CPU, 20)
    scores = task.score(known, found)
    assert scores["f1"] > 0.9
    assert scores["exact"] > 0.9
    assert found[0].prediction == ""
    assert task.metadata()["task"] == "span-qa"
    again = make_task("span-qa", task.metadata(), task.tokenizer, model.config)
    assert again.predict(model, again.encode(known), CPU, 64) == found


@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_a_prompt_is_encoded_as_in_training(family: str) -> None:
    known = [Example(i, (f"a {word} cat",), word) for i, word in enumerate(("big", "small"))]
    task, config = made("classify", family, known, prefix="near: ")
    model = make_model(task.configure_model(config))
    model.tokenizer = task.tokenizer
    (item,) = task.encode([Example(0, ("a red dog",))])
    assert encode_task_prompts(model, task.metadata(), ["a red dog"]) == [item.ids]
    assert task.tokenizer.decode(item.ids).strip().startswith("near: a red dog")
    assert encode_task_prompts(model, {}, ["a red dog"]) == ["a red dog"]


def test_numbers_are_generated() -> None:
    rng = random.Random(0)
    known = []
    for i in range(48):
        size, colour = rng.choice(["big", "small"]), rng.choice(["red", "blue"])
        known.append(Example(i, (f"a {size} cat", f"a {colour} dog"), 2.0 * (size == "big") + (colour == "red")))
    task, config = made("regress", "t5", known)
    assert task.labels == ("0.0", "1.0", "2.0", "3.0")
    items = task.encode(known)
    found = task.predict(learn(task, config, items, 120, rate=1e-2), items, CPU, 20)
    assert all(isinstance(p.prediction, float) for p in found)
    assert task.score(known, found)["pearson"] > 0.9


def test_a_prefix_names_the_task() -> None:
    known = [Example(0, ("a cat", "a dog"), "yes"), Example(1, ("a dog", "a fox"), "no")]
    task, _ = made("pair", "t5", known, prefix="near ")
    (item, _) = task.encode(known)
    assert task.tokenizer.decode(item.ids) == "near sentence1: a cat sentence2: a dog"
    assert task.metadata()["prefix"] == "near "
