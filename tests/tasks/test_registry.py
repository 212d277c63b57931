"""Which task class each architecture gets, and which combinations raise."""

from __future__ import annotations

from typing import Any

import pytest
from tasks.small import FAMILIES, parts

from firth.core.errors import UserError
from firth.models.config import (
    AuxiliaryLM,
    ClassificationHead,
    LMHead,
    MultipleChoiceHead,
    RegressionHead,
    SpanHead,
    TokenClassificationHead,
)
from firth.tasks import FinetuneRecipe, make_task
from firth.tasks.finetune import recipes_of_tasks
from firth.tasks.recipe import TaskData
from firth.tasks.template import DELIMITER_TOKEN, EXTRACT_TOKEN
from firth.tasks.text_labels import (
    VerbalizedChoiceTask,
    VerbalizedQATask,
    VerbalizedRegressionTask,
    VerbalizedTask,
    round_regression_labels,
)
from firth.text import Example
from firth.text.documents import AnswerSpan

EXAMPLES = {
    "classify": [Example(0, ("a cat",), "yes"), Example(1, ("a dog",), "no")],
    "pair": [Example(0, ("a cat", "a dog"), "yes"), Example(1, ("a dog", "a fox"), "no")],
    "regress": [Example(0, ("a cat", "a dog"), 0.0), Example(1, ("a dog", "a fox"), 5.0)],
    "choice": [Example(0, ("a", "cat", "dog"), 1)],
    "tag": [Example(0, ("a", "cat"), ("O", "B-A"))],
    "relation": [
        Example(0, ("cat dog",), "yes", ((0, 3), (4, 7))),
        Example(1, ("cat dog",), "no", ((4, 7), (0, 3))),
    ],
    "word-in-context": [Example(0, ("cat", "cat"), "yes", ((0, 3), (0, 3)))],
    "span-qa": [Example(0, ("a", "the cat"), (AnswerSpan("cat", 4),))],
    "text-to-text": [Example(0, ("a cat",), "cat")],
}


def made(name: str, family: str, **fields: Any) -> Any:
    config, tokenizer = parts(family)
    recipe = FinetuneRecipe(**{"max_seq_length": 32, "max_target_length": 8} | fields)
    return make_task(name, EXAMPLES[name], tokenizer, config, recipe)


HEADS = {
    "classify": ClassificationHead,
    "pair": ClassificationHead,
    "regress": RegressionHead,
    "choice": MultipleChoiceHead,
    "tag": TokenClassificationHead,
    "relation": ClassificationHead,
    "word-in-context": ClassificationHead,
    "span-qa": SpanHead,
}


@pytest.mark.parametrize("name", HEADS)
def test_encoders_and_decoders_have_a_head_for_every_task(name: str) -> None:
    for family in FAMILIES:
        config, _ = parts(family)
        if config.architecture == "encoder-decoder":
            continue
        task = made(name, family)
        wanted = task.configure_model(config)
        assert isinstance(wanted.head, HEADS[name])
        assert wanted.problems() == []
        writes = config.architecture == "decoder" and name not in ("tag", "span-qa")
        assert wanted.extras == ((AuxiliaryLM(head=config.head),) if writes else ())
        added = {DELIMITER_TOKEN, EXTRACT_TOKEN} if config.architecture == "decoder" else set()
        assert {
            n for n in (DELIMITER_TOKEN, EXTRACT_TOKEN) if task.tokenizer.backend.token_to_id(n) is not None
        } == added
        assert task.metadata()["task"] == task.name == name


def test_encoder_decoders() -> None:
    for name in ("classify", "pair", "regress", "relation", "word-in-context", "span-qa"):
        assert isinstance(made(name, "bart").configure_model(parts("bart")[0]).head, HEADS[name])
        reads_encoder = made(name, "t5gemma").configure_model(parts("t5gemma")[0])
        assert isinstance(reads_encoder.head, HEADS[name])
        assert reads_encoder.head_reads_encoder
        assert not reads_encoder.has_decoder
        assert isinstance(made(name, "t5gemma", answer="text"), VerbalizedTask)
        words = made(name, "t5")
        assert isinstance(words, VerbalizedTask)
        assert isinstance(words.configure_model(parts("t5")[0]).head, LMHead)
    for family in ("bart", "t5"):
        assert isinstance(made("tag", family).configure_model(parts(family)[0]).head, TokenClassificationHead)
    assert isinstance(made("choice", "bart"), VerbalizedChoiceTask)
    assert isinstance(made("choice", "t5"), VerbalizedChoiceTask)
    assert isinstance(made("span-qa", "t5"), VerbalizedQATask)
    assert isinstance(made("regress", "t5"), VerbalizedRegressionTask)
    assert isinstance(made("classify", "gpt2", answer="text"), VerbalizedTask)
    assert isinstance(made("text-to-text", "t5gemma").configure_model(parts("t5gemma")[0]).head, LMHead)


@pytest.mark.parametrize(("family", "answer"), [("t5gemma", "text"), ("bart", "text"), ("gpt2", "auto")])
def test_a_generated_text_makes_all_answers_of_an_encoder_decoder_texts(family: str, answer: str) -> None:
    tasks = {name: TaskData(name, "train", "dev", "") for name in ("classify", "text-to-text")}
    config, _ = parts(family)
    assert recipes_of_tasks(FinetuneRecipe(tasks=tasks), config)["classify"].answer == answer
    alone = recipes_of_tasks(FinetuneRecipe(tasks={"classify": tasks["classify"]}), config)
    assert alone["classify"].answer == "auto"


def test_regression_targets_are_rounded_as_in_t5() -> None:
    assert round_regression_labels([0.0, 0.31, 5.0, 4.9]) == ("0.0", "0.4", "4.8", "5.0")
    assert round_regression_labels([0.0, 1.0, 0.51]) == ("0.00", "0.52", "1.00")
    task = made("regress", "t5")
    assert task.as_text_example(Example(0, ("x", "y"), 4.2)).target == "5.0"
    assert task.as_text_example(Example(0, ("x", "y"), 4.2)).texts == ("sentence1: x sentence2: y",)


@pytest.mark.parametrize(
    ("name", "family", "fields", "message"),
    [
        ("tag", "t5", {"answer": "text"}, "tag labels every word, so its answer cannot be generated"),
        ("tag", "gpt2", {"answer": "text"}, "cannot be generated as text"),
        ("classify", "bert", {"answer": "text"}, "An encoder generates no text"),
        ("classify", "gpt2", {"answer": "song"}, "answer is 'song', and must be auto, head or text"),
        ("text-to-text", "bert", {}, "text-to-text needs a model that writes"),
    ],
)
def test_unsupported_tasks_raise(name: str, family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(name, family, **fields)


def test_unknown_names_and_labels_raise() -> None:
    config, tokenizer = parts("bert")
    with pytest.raises(UserError, match=r"Unknown task 'clasify'. Did you mean 'classify'"):
        make_task("clasify", [], tokenizer, config, FinetuneRecipe())
    task = made("classify", "bert")
    assert task.labels == ("no", "yes")
    with pytest.raises(UserError, match="Example 7: the label 'maybe' is none of no, yes"):
        task.encode([Example(7, ("a cat",), "maybe")])


def test_a_published_decoder_keeps_its_tokenizer() -> None:
    config, tokenizer = parts("gpt2")
    task = make_task("classify", {"labels": ["no", "yes"]}, tokenizer, config)
    assert task.tokenizer is tokenizer
    (item,) = task.encode([Example(0, ("a cat",), "yes")])
    assert item.sequences[0].ids[-1] == tokenizer.vocab.eos
