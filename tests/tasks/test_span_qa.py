"""Answers are exact stretches of the context, whatever the tokenizer does to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, FAMILIES, model_for, parts, tokenizer_of

from firth.models.presets import bert
from firth.tasks import FinetuneRecipe, Prediction, make_task
from firth.tasks.headed import Laid
from firth.tasks.span_qa import Part, SpanQA, find, fullest, spans, stretches, target_of, trimmed
from firth.text import Answer, Example

CONTEXTS = [
    "The BIG Red fox — naïve, Ünïcode; «blue» 狐狸 lives near the river.",
    "  a cat\u00a0and\tthe dog 🦊 is not   small\n red ",
    "ＦＵＬＬ width ﬁne ligature, İstanbul and Straße",
]


def task_of(kind: str, lowercase: bool, length: int = 64) -> SpanQA:
    tokenizer = tokenizer_of(kind, lowercase)
    family = {"wordpiece": "bert", "byte-bpe": "gpt2", "unigram": "xlnet"}[kind]
    config = FAMILIES[family][1](tokenizer.vocab.size)
    if family == "bert":
        config = bert(1, 32, 2, tokenizer.vocab.size)
    if family == "gpt2":
        config = FAMILIES["roberta"][1](tokenizer.vocab.size)
    return SpanQA(tokenizer, config, length, unanswerable=False)


def perfect(task: SpanQA, items: list[Any]) -> list[Prediction]:
    """What is predicted when the logits point at the right answers."""
    batch, laid = task.batch(items), task.lay(items)
    assert isinstance(laid, Laid)
    return task.read(items, 10 * np.maximum(batch.target, 0), laid)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_whole_words_come_back_to_the_letter(kind: str, lowercase: bool) -> None:
    task, examples = task_of(kind, lowercase, 60), list[Example]()
    for context in CONTEXTS:
        for word in context.split():
            whole = word.strip(".,;«»") or word
            examples.append(Example(len(examples), ("a fox", context), (Answer(whole, context.index(whole)),)))
    items = task.encode(examples)
    assert task.not_found == 0
    for e, p in zip(examples, perfect(task, items), strict=True):
        best = (p.extra or {})["nbest"][0]
        assert e.texts[1][best["start"] : best["start"] + len(best["text"])] == best["text"] == p.prediction
        if kind == "wordpiece" or "fi" in e.target[0].text:
            assert e.target[0].text in p.prediction
        else:
            assert p.prediction == e.target[0].text


def test_every_prediction_is_a_stretch_of_its_context() -> None:
    config, tokenizer = parts("bert")
    examples = [Example(i, ("red fox", c), (Answer(c[4:9], 4),)) for i, c in enumerate(CONTEXTS)]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    items = task.encode(examples)
    model = model_for(task, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    for e, p in zip(examples, task.predict(model, items, CPU, 2), strict=True):
        best = (p.extra or {})["nbest"]
        assert p.prediction == best[0]["text"] != ""
        assert 1 < len(best) <= 20
        assert len({b["text"] for b in best}) == len(best)
        assert sum(b["probability"] for b in best) == pytest.approx(1)
        assert [b["probability"] for b in best] == sorted((b["probability"] for b in best), reverse=True)
        for b in best:
            assert e.texts[1][b["start"] : b["start"] + len(b["text"])] == b["text"] == b["text"].strip()


def test_long_contexts_are_read_in_stretches() -> None:
    assert stretches(5, 8) == [(0, 5)]
    assert stretches(9, 8) == [(0, 8), (4, 5)]
    assert stretches(20, 8) == [(0, 8), (4, 8), (8, 8), (12, 8)]
    assert stretches(600, 400) == [(0, 400), (128, 400), (256, 344)]
    assert stretches(0, 8) == [(0, 0)]
    for size in range(1, 60):
        seen = {i for first, many in stretches(size, 8) for i in range(first, first + many)}
        assert seen == set(range(size))


def test_an_answer_is_learned_where_it_is_seen_and_elsewhere_there_is_none() -> None:
    config, tokenizer = parts("bert")
    context = " ".join(["red"] * 20 + ["fox"] + ["blue"] * 20)
    example = Example(0, ("fox", context), (Answer("fox", context.index("fox")),))
    task = make_task("span-qa", [example], tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQA)
    (item,) = task.encode([example])
    assert len(item.parts) > 3
    assert task.said == ["1 context was longer than 20 tokens, and read in stretches."]
    fox = tokenizer.encode("fox")[0]
    for sheet, part in zip(item.sheets, item.parts, strict=True):
        assert sheet.size <= 20
        target = target_of(sheet, part, item.answer)
        assert target.sum(0, where=target > 0).tolist() == [1, 1]
        (start,), (end,) = np.flatnonzero(target[:, 0] == 1), np.flatnonzero(target[:, 1] == 1)
        inside = fox in sheet.ids[part.begins :]
        assert (sheet.ids[start] == fox) == inside
        assert start == end == (sheet.ids.index(fox, part.begins) if inside else 0)
        assert (target[1 : part.begins] == -1).all(), "the question is no answer"
        assert (target[part.begins + part.size :] == -1).all()
    assert task.batch([item]).num_answers == len(item.parts)
    assert perfect(task, [item])[0].prediction == "fox"


def test_each_token_counts_where_most_is_around_it() -> None:
    assert fullest([Part(0, 8, 3), Part(4, 8, 3)]).tolist() == [0] * 6 + [1] * 6
    assert fullest([Part(0, 5, 3)]).tolist() == [0] * 5


def test_spans_are_ordered_and_short_enough() -> None:
    logits = np.zeros((40, 2))
    logits[5, 0] = logits[3, 1] = 9.0  # ends before it starts
    logits[2, 0] = 5.0
    found = spans(logits, np.ones(40, bool))
    assert max(found)[1:] == (2, 3)
    assert all(0 <= end - start < 30 for _, start, end in found)
    usable = np.ones(40, bool)
    usable[2] = False
    assert all(start != 2 for _, start, _ in spans(logits, usable))


def test_answers_are_found_or_counted() -> None:
    assert find("a cat and a cat", "cat", 2) == 2
    assert find("a cat and a cat", "cat", 11) == 12
    assert find("a cat and a cat", "cat", 3) == 2
    assert find("a cat", "dog", 0) is None
    assert trimmed("a  cat ", 1, 7) == (3, 6)
    config, tokenizer = parts("bert")
    examples = [Example(0, ("a", "the cat"), (Answer("dog", 4),)), Example(1, ("a", "the cat"), (Answer("cat", 4),))]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    items = task.encode(examples)
    assert task.said == ["1 answer was not found in the context."]
    assert task.batch(items).num_answers == 1
    with torch.no_grad():
        assert np.isfinite(model_for(task, config).losses(task.batch(items).to(CPU.device))["answers"].item())


def test_the_threshold_is_chosen_on_held_out_examples_and_kept() -> None:
    config, tokenizer = parts("bert")
    examples = [
        Example(0, ("a", "the cat"), (Answer("cat", 4),)),
        Example(1, ("a", "the dog"), (Answer("dog", 4),)),
        Example(2, ("a", "the fox"), ()),
    ]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQA)
    assert task.unanswerable
    assert task.threshold == 0.5

    def say(text: str, no_answer: float) -> Prediction:
        return task.chosen(Prediction("", extra={"nbest": [{"text": text}], "no_answer": no_answer}))

    predictions = [say("cat", 0.1), say("dog", 0.7), say("fox", 0.9)]
    assert [p.prediction for p in predictions] == ["cat", "", ""]
    settled = task.settle(examples, predictions)
    assert [p.prediction for p in settled] == ["cat", "dog", ""]
    assert task.threshold == pytest.approx(0.7)
    assert task.score(examples, settled)["f1"] == 1
    again = make_task("span-qa", task.facts(), tokenizer, config)
    assert isinstance(again, SpanQA)
    assert again.threshold == task.threshold
    assert again.unanswerable


def test_no_answer_is_told_from_the_first_place() -> None:
    config, tokenizer = parts("bert")
    examples = [Example(0, ("a", "the cat"), ()), Example(1, ("a", "the dog"), (Answer("dog", 4),))]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQA)
    found = perfect(task, task.encode(examples))
    assert [p.prediction for p in found] == ["", "dog"]
    assert found[0].extra is not None
    assert found[0].extra["no_answer"] > 0.99
    assert found[0].extra["nbest"][0]["text"] == ""
