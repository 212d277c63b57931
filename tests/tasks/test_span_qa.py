"""Predicted answers are exact substrings of the context, for every tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, FAMILIES, model_for, parts, tokenizer_of

from firth.models.presets import bert
from firth.tasks import FinetuneRecipe, Prediction, make_task
from firth.tasks.head_task import PackedBatch
from firth.tasks.span_qa import (
    ContextWindow,
    SpanQATask,
    best_answer_spans,
    find_answer_start,
    max_context_window,
    span_labels,
    split_context_windows,
    trim_whitespace,
)
from firth.text import AnswerSpan, Example

CONTEXTS = [
    "The BIG Red fox — naïve, Ünïcode; «blue» 狐狸 lives near the river.",
    "  a cat\u00a0and\tthe dog 🦊 is not   small\n red ",
    "ＦＵＬＬ width ﬁne ligature, İstanbul and Straße",
]


def task_of(kind: str, lowercase: bool, length: int = 64) -> SpanQATask:
    tokenizer = tokenizer_of(kind, lowercase)
    family = {"wordpiece": "bert", "byte-bpe": "gpt2", "unigram": "xlnet"}[kind]
    config = FAMILIES[family][1](tokenizer.vocab.size)
    if family == "bert":
        config = bert(1, 32, 2, tokenizer.vocab.size)
    if family == "gpt2":
        config = FAMILIES["roberta"][1](tokenizer.vocab.size)
    return SpanQATask(tokenizer, config, length, allows_no_answer=False)


def perfect(task: SpanQATask, items: list[Any]) -> list[Prediction]:
    """The prediction for logits that point at the right answers."""
    batch, laid = task.collate(items), task.pack_items(items)
    assert isinstance(laid, PackedBatch)
    return task.decode_logits(items, 10 * np.maximum(batch.task_labels, 0), laid)


@pytest.mark.parametrize("kind", ["wordpiece", "byte-bpe", "unigram"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_answers_round_trip_exactly(kind: str, lowercase: bool) -> None:
    task, examples = task_of(kind, lowercase, 60), list[Example]()
    for context in CONTEXTS:
        for word in context.split():
            whole = word.strip(".,;«»") or word
            examples.append(Example(len(examples), ("a fox", context), (AnswerSpan(whole, context.index(whole)),)))
    items = task.encode(examples)
    assert task.num_answers_not_found == 0
    for e, p in zip(examples, perfect(task, items), strict=True):
        best = (p.extra or {})["nbest"][0]
        assert e.texts[1][best["start"] : best["start"] + len(best["text"])] == best["text"] == p.prediction
        if kind == "wordpiece" or "fi" in e.target[0].text:
            assert e.target[0].text in p.prediction
        else:
            assert p.prediction == e.target[0].text


def test_every_prediction_is_a_substring_of_its_context() -> None:
    config, tokenizer = parts("bert")
    examples = [Example(i, ("red fox", c), (AnswerSpan(c[4:9], 4),)) for i, c in enumerate(CONTEXTS)]
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


def test_long_contexts_are_read_in_windows() -> None:
    assert split_context_windows(5, 8) == [(0, 5)]
    assert split_context_windows(9, 8) == [(0, 8), (4, 5)]
    assert split_context_windows(20, 8) == [(0, 8), (4, 8), (8, 8), (12, 8)]
    assert split_context_windows(600, 400) == [(0, 400), (128, 400), (256, 344)]
    assert split_context_windows(0, 8) == [(0, 0)]
    for size in range(1, 60):
        seen = {i for first, many in split_context_windows(size, 8) for i in range(first, first + many)}
        assert seen == set(range(size))


def test_windows_without_the_answer_are_labelled_unanswerable() -> None:
    config, tokenizer = parts("bert")
    context = " ".join(["red"] * 20 + ["fox"] + ["blue"] * 20)
    example = Example(0, ("fox", context), (AnswerSpan("fox", context.index("fox")),))
    task = make_task("span-qa", [example], tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQATask)
    (item,) = task.encode([example])
    assert len(item.windows) > 3
    assert task.notices == ["1 context was longer than 20 tokens, and split into windows."]
    fox = tokenizer.encode("fox")[0]
    for sheet, part in zip(item.sequences, item.windows, strict=True):
        assert sheet.num_tokens <= 20
        target = span_labels(sheet, part, item.label)
        assert target.sum(0, where=target > 0).tolist() == [1, 1]
        (start,), (end,) = np.flatnonzero(target[:, 0] == 1), np.flatnonzero(target[:, 1] == 1)
        inside = fox in sheet.ids[part.sequence_start :]
        assert (sheet.ids[start] == fox) == inside
        assert start == end == (sheet.ids.index(fox, part.sequence_start) if inside else 0)
        assert (target[1 : part.sequence_start] == -1).all(), "the question is no answer"
        assert (target[part.sequence_start + part.num_tokens :] == -1).all()
    assert task.collate([item]).num_targets == len(item.windows)
    assert perfect(task, [item])[0].prediction == "fox"


def test_each_token_is_scored_in_its_window_of_maximum_context() -> None:
    assert max_context_window([ContextWindow(0, 8, 3), ContextWindow(4, 8, 3)]).tolist() == [0] * 6 + [1] * 6
    assert max_context_window([ContextWindow(0, 5, 3)]).tolist() == [0] * 5


def test_spans_are_ordered_and_short_enough() -> None:
    logits = np.zeros((40, 2))
    logits[5, 0] = logits[3, 1] = 9.0  # ends before it starts
    logits[2, 0] = 5.0
    found = best_answer_spans(logits, np.ones(40, bool))
    assert max(found)[1:] == (2, 3)
    assert all(0 <= end - start < 30 for _, start, end in found)
    usable = np.ones(40, bool)
    usable[2] = False
    assert all(start != 2 for _, start, _ in best_answer_spans(logits, usable))


def test_answers_that_are_not_found_are_counted() -> None:
    assert find_answer_start("a cat and a cat", "cat", 2) == 2
    assert find_answer_start("a cat and a cat", "cat", 11) == 12
    assert find_answer_start("a cat and a cat", "cat", 3) == 2
    assert find_answer_start("a cat", "dog", 0) is None
    assert trim_whitespace("a  cat ", 1, 7) == (3, 6)
    config, tokenizer = parts("bert")
    examples = [
        Example(0, ("a", "the cat"), (AnswerSpan("dog", 4),)),
        Example(1, ("a", "the cat"), (AnswerSpan("cat", 4),)),
    ]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    items = task.encode(examples)
    assert task.notices == ["1 answer was not found in the context."]
    assert task.collate(items).num_targets == 1
    with torch.no_grad():
        assert np.isfinite(model_for(task, config).losses(task.collate(items).to(CPU.device))["targets"].item())


def test_the_no_answer_threshold_is_calibrated_on_dev_and_saved() -> None:
    config, tokenizer = parts("bert")
    examples = [
        Example(0, ("a", "the cat"), (AnswerSpan("cat", 4),)),
        Example(1, ("a", "the dog"), (AnswerSpan("dog", 4),)),
        Example(2, ("a", "the fox"), ()),
    ]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQATask)
    assert task.allows_no_answer
    assert task.threshold == 0.5

    def say(text: str, no_answer: float) -> Prediction:
        return task.apply_threshold(Prediction("", extra={"nbest": [{"text": text}], "no_answer": no_answer}))

    predictions = [say("cat", 0.1), say("dog", 0.7), say("fox", 0.9)]
    assert [p.prediction for p in predictions] == ["cat", "", ""]
    settled = task.calibrate(examples, predictions)
    assert [p.prediction for p in settled] == ["cat", "dog", ""]
    assert task.threshold == pytest.approx(0.7)
    assert task.score(examples, settled)["f1"] == 1
    again = make_task("span-qa", task.metadata(), tokenizer, config)
    assert isinstance(again, SpanQATask)
    assert again.threshold == task.threshold
    assert again.allows_no_answer


def test_no_answer_points_to_the_first_position() -> None:
    config, tokenizer = parts("bert")
    examples = [Example(0, ("a", "the cat"), ()), Example(1, ("a", "the dog"), (AnswerSpan("dog", 4),))]
    task = make_task("span-qa", examples, tokenizer, config, FinetuneRecipe(max_seq_length=20))
    assert isinstance(task, SpanQATask)
    found = perfect(task, task.encode(examples))
    assert [p.prediction for p in found] == ["", "dog"]
    assert found[0].extra is not None
    assert found[0].extra["no_answer"] > 0.99
    assert found[0].extra["nbest"][0]["text"] == ""
