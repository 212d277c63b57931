"""A packed batch gives the same predictions and losses as its examples one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, WORDS, model_for, parts

from firth.tasks import FinetuneRecipe, Task, make_task
from firth.text import Example
from firth.text.documents import AnswerSpan

RECIPE = FinetuneRecipe(max_target_length=8)


def text(rng: random.Random, most: int = 4) -> str:
    return " ".join(rng.choice(WORDS[:-2]) for _ in range(rng.randint(2, most)))


def examples(name: str, number: int = 11, seed: int = 0) -> list[Example]:
    """Random examples of every task."""
    rng, found = random.Random(seed), []
    for i in range(number):
        a, b = text(rng), text(rng)
        word_a, word_b = a.split()[0], b.split()[0]
        label = "yes" if i % 2 else "no"
        choices = tuple(text(rng, 4) for _ in range(2 + i % 3))
        words = tuple(a.split())
        made: dict[str, Example] = {
            "classify": Example(i, (a,), label),
            "pair": Example(i, (a, b), label),
            "regress": Example(i, (a, b), float(i)),
            "choice": Example(i, (a, *choices), i % 2),
            "tag": Example(i, words, tuple(rng.choice(("O", "B-X", "I-X")) for _ in words)),
            "relation": Example(i, (a,), label, ((0, len(word_a)), (a.rindex(" ") + 1, len(a)))),
            "word-in-context": Example(i, (a, b), label, ((0, len(word_a)), (0, len(word_b)))),
            "span-qa": Example(i, (word_b, a), (AnswerSpan(word_a, 0),) if i % 3 else ()),
        }
        found.append(made[name])
    return found


def task_of(name: str, family: str) -> tuple[Task, Any]:
    config, tokenizer = parts(family)
    recipe = replace(RECIPE, max_seq_length=config.max_length or 64)
    return make_task(name, examples(name), tokenizer, config, recipe), config


TASKS = ["classify", "pair", "regress", "choice", "tag", "relation", "word-in-context", "span-qa"]
CASES = [(name, family) for family in ("bert", "gpt2", "xlnet") for name in TASKS]
CASES += [(name, "bart") for name in ("classify", "pair", "regress", "relation", "span-qa")]
CASES += [("pair", "roberta"), ("regress", "llama"), ("tag", "bart"), ("tag", "t5")]
CASES += [(name, "t5gemma") for name in ("classify", "pair", "choice", "relation", "span-qa", "tag")]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_packed_equals_unpacked(name: str, family: str) -> None:
    task, config = task_of(name, family)
    items = task.encode(examples(name))
    model = model_for(task, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        packed = task.collate(items)
        assert packed.input_ids.shape[0] < sum(len(item.sequences) for item in items)
        together = model.losses(packed.to(CPU.device))
        alone = [model.losses(task.collate([item]).to(CPU.device)) for item in items]
        for part, value in together.items():
            assert value.item() == pytest.approx(sum(a[part].item() for a in alone), rel=1e-4)
            assert part in packed.loss_counts
        counts = [task.collate([item]).loss_counts for item in items]
        assert packed.loss_counts == {k: sum(c[k] for c in counts) for k in packed.loss_counts}
    many = task.predict(model, items, CPU, 100)
    single = task.predict(model, items, CPU, 1)
    assert [p.prediction for p in many] == (
        pytest.approx([p.prediction for p in single], abs=1e-5) if name == "regress" else [p.prediction for p in single]
    )
    for p, q in zip(many, single, strict=True):
        if p.scores is not None and q.scores is not None:
            assert p.scores == pytest.approx(q.scores, abs=1e-5)
            assert sum(p.scores.values()) == pytest.approx(1)


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_packed_logits_equal_a_padded_call(family: str) -> None:
    """The same texts through the model's forward, one row each."""
    task, config = task_of("pair", family)
    items = task.encode(examples("pair"))
    model = model_for(task, config).eval()
    model.tokenizer = task.tokenizer
    width = max(item.num_tokens for item in items)
    pad = task.tokenizer.vocab.pad
    ids = torch.tensor([item.sequences[0].ids + [pad] * (width - item.num_tokens) for item in items])
    mask = torch.tensor([[1] * item.num_tokens + [0] * (width - item.num_tokens) for item in items])
    extra = {}
    if family == "bert":
        segments = [item.sequences[0].token_type_ids + [0] * (width - item.num_tokens) for item in items]
        extra["token_type_ids"] = torch.tensor(segments)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, **extra).logits.softmax(-1).numpy()
    found = task.predict(model, items, CPU, 100)
    scores = np.array([[p.scores[label] for label in task.labels] for p in found if p.scores is not None])
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_batches_are_reproducible() -> None:
    for name in TASKS:
        task, _ = task_of(name, "bert")
        items = task.encode(examples(name))
        for a, b in zip(task.collate(items), task.collate(items), strict=True):
            np.testing.assert_array_equal(a, b)


def test_similarity_packs_both_orders() -> None:
    task, _ = task_of("regress", "gpt2")
    items = task.encode(examples("regress"))
    batch = task.collate(items)
    assert batch.target_positions.shape[1] == 2 * batch.task_labels.shape[1]
    for row in range(len(batch.input_ids)):
        for k, value in enumerate(batch.task_labels[row]):
            if not np.isnan(value):
                first, second = batch.target_positions[row, 2 * k : 2 * k + 2]
                item = items[int(value)]
                for position, sequence in ((first, item.sequences[0]), (second, item.sequences[1])):
                    assert (
                        batch.input_ids[row, position - sequence.num_tokens + 1 : position + 1].tolist() == sequence.ids
                    )


def test_a_decoder_has_an_auxiliary_lm_loss() -> None:
    task, config = task_of("classify", "gpt2")
    items = task.encode(examples("classify"))
    batch = task.collate(items)
    assert batch.loss_counts["lm_targets"] == sum(item.num_tokens - 1 for item in items)
    row = batch.input_ids[0]
    inside = batch.labels[0] >= 0
    assert (batch.labels[0][inside] == row[1:][inside[:-1]]).all()
    assert set(model_for(task, config).losses(batch.to(CPU.device))) == {"targets", "lm_targets"}
