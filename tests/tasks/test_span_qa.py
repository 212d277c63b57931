"""Predicted answers are exact substrings of the context, for every tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, FAMILIES, WORDS, model_for, parts, tokenizer_of

from firth.evaluate import evaluate
from firth.models import make_model
from firth.models.presets import bert
from firth.tasks import FinetuneRecipe, Prediction, finetune, make_task
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
from firth.text import Example
from firth.text.documents import AnswerSpan

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
    for sequence, part in zip(item.sequences, item.windows, strict=True):
        assert sequence.num_tokens <= 20
        target = span_labels(sequence, part, item.label)
        assert target.sum(0, where=target > 0).tolist() == [1, 1]
        (start,), (end,) = np.flatnonzero(target[:, 0] == 1), np.flatnonzero(target[:, 1] == 1)
        inside = fox in sequence.ids[part.sequence_start :]
        assert (sequence.ids[start] == fox) == inside
        assert start == end == (sequence.ids.index(fox, part.sequence_start) if inside else 0)
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


def test_scores_use_the_default_no_answer_threshold_and_report_the_best_one() -> None:
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
        return task.apply_threshold(Prediction("", extra={"answer": text, "no_answer": no_answer}))

    predictions = [say("cat", 0.1), say("dog", 0.7), say("fox", 0.9)]
    assert [p.prediction for p in predictions] == ["cat", "", ""]
    # At probability 0.5, a difference of 0, the dog is missed. The best threshold on these questions finds it.
    assert task.score(examples, predictions) == pytest.approx(
        {"f1": 2 / 3, "exact": 2 / 3, "HasAns_f1": 1 / 2, "HasAns_exact": 1 / 2, "NoAns_f1": 1, "NoAns_exact": 1}
        | {"best_f1": 1, "best_f1_thresh": 0.7, "best_exact": 1, "best_exact_thresh": 0.7}
    )
    assert task.score(examples[:2], predictions[:2]) == {"f1": 0.5, "exact_match": 0.5}, "all answerable: SQuAD 1.1"
    task.threshold = task.best_threshold(examples, predictions)
    settled = [task.apply_threshold(p) for p in predictions]
    assert [p.prediction for p in settled] == ["cat", "dog", ""]
    assert task.threshold == pytest.approx(0.7)
    assert task.score(examples, settled)["f1"] == 1
    again = make_task("span-qa", task.metadata(), tokenizer, config)
    assert isinstance(again, SpanQATask)
    assert again.threshold == task.threshold
    assert again.allows_no_answer


def test_squad_2_scores_equal_those_of_predictions_jsonl(tmp_path: Path) -> None:
    """After training on answerable questions only, every question is answered, unless a threshold is set."""
    config, tokenizer = parts("bert")
    fresh = make_model(config)
    fresh.tokenizer = tokenizer
    fresh.save(tmp_path / "checkpoint")
    rng = random.Random(0)
    words = [word for word in WORDS if word not in ("a", "an", "the")]  # which no score counts
    texts = [" ".join(rng.choices(words, k=9)) for _ in range(11)]
    known = [{"question": t[:5], "context": t, "answers": [{"text": t.split()[3], "start": None}]} for t in texts]
    known, unanswerable = known[:8], [row | {"answers": []} for row in known[8:]]
    for name, rows in (("train", known), ("dev", known + unanswerable)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files: dict[str, Any] = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")}
    files |= {"checkpoint": str(tmp_path / "checkpoint"), "output_dir": str(tmp_path / "run")}
    finetune(FinetuneRecipe(**files, task="span-qa", max_seq_length=24, max_steps=1, seeds=1))

    def means(folder: Path, field: str) -> dict[str, float]:
        """Answers here are single words, so that a word is right or wrong."""
        lines = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
        right = [line[field] in [text for text, _ in line["reference"]] or line[field] == "" for line in lines]
        hits = [hit and bool(line[field]) == bool(line["reference"]) for hit, line in zip(right, lines, strict=True)]
        return {"exact": np.mean(hits), "HasAns_exact": np.mean(hits[:8]), "NoAns_exact": np.mean(hits[8:])}

    scores = json.loads((tmp_path / "run" / "results.json").read_text())
    assert {name: scores[name] for name in means(tmp_path / "run", "prediction")} == means(tmp_path / "run", "answer")
    assert scores["NoAns_f1"] == 0
    assert scores["best_f1"] >= 3 / 11, "as many as no answer at all gives"
    final, folder = tmp_path / "run" / "final", tmp_path / "scores"
    settings: list[dict[str, Any]] = [{"threshold": 0.0}, {"train": files["dev"]}]
    for setting in settings:
        again = evaluate(final, "span-qa", files["dev"], folder, overwrite=True, **setting)
        assert again["metrics"]["best_f1_thresh"] == scores["best_f1_thresh"]
        wanted = means(folder, "prediction")
        assert {name: again["metrics"][name] for name in wanted} == pytest.approx(wanted)
        if "threshold" in setting:
            assert wanted["NoAns_exact"] == 1
            assert again["threshold"] == 0
        else:
            assert again["metrics"]["f1"] == pytest.approx(scores["best_f1"])
            assert again["threshold"] == scores["best_f1_thresh"]


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
