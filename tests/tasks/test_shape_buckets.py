"""Shape buckets: batches are padded to few shapes, and no loss or prediction changes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tasks.small import CPU, model_for, parts
from tasks.test_alone import CASES, examples

from firth.objectives import IGNORE_INDEX, Batch
from firth.tasks import FinetuneRecipe, Task, finetune, make_task
from firth.tasks.finetune_job import MIN_STEPS_TO_COMPILE, resolve_compile_options
from firth.tasks.multitask import MultiTask
from firth.tasks.shape_buckets import (
    BatchShape,
    ShapeBuckets,
    batch_shape,
    choose_row_buckets,
    fit_shape_buckets,
    pad_batch,
    unpad_logits,
)
from firth.text import Example
from firth.train import ComputeConfig
from firth.train.recipe import EngineConfig

FEW = ComputeConfig(torch.device("cpu"), False, compile=True)


def test_row_buckets_minimize_padding() -> None:
    """Two buckets: with 5 and 9 it is 90 * 5 + 10 * 9 = 540 rows, with 6 and 9 it is 99 * 6 + 9 = 603."""
    count = Counter({4: 10, 5: 80, 6: 9, 9: 1})
    assert choose_row_buckets(count, 1) == (9,)
    assert choose_row_buckets(count, 2) == (5, 9)
    assert choose_row_buckets(count, 3) == (5, 6, 9)
    assert choose_row_buckets(count, 9) == (4, 5, 6, 9)


def test_a_batch_by_hand() -> None:
    batch = Batch(
        np.array([[7, 8]]), document_ids=np.array([[0, 0]]), position_ids=np.array([[0, 1]]),
        target_positions=np.array([[1]]),
        task_labels=np.array([[3]]),
    )  # fmt: skip
    found = pad_batch(batch, BatchShape(2, 3, 0, 2), 5)
    assert found.input_ids.tolist() == [[7, 8, 5], [5, 5, 5]]
    assert found.document_ids.tolist() == [[0, 0, -1], [-1, -1, -1]]
    assert found.position_ids.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert found.target_positions.tolist() == [[1, 0], [0, 0]]
    assert found.task_labels.tolist() == [[3, IGNORE_INDEX], [IGNORE_INDEX, IGNORE_INDEX]]
    assert found.loss_counts == batch.loss_counts == {"targets": 1, "tokens": 2}
    assert unpad_logits(np.arange(4).reshape(2, 2), batch_shape(batch), batch_shape(found)).tolist() == [[0]]


def test_batches_larger_than_the_sample_get_few_shapes() -> None:
    shapes = ShapeBuckets((3, 4), 64, 0, 8, 0)
    assert shapes.bucket_for(BatchShape(1, 16, 0, 2)) == BatchShape(3, 64, 0, 8)
    assert shapes.bucket_for(BatchShape(4, 64, 0, 8)) == BatchShape(4, 64, 0, 8)
    assert shapes.bucket_for(BatchShape(6, 65, 0, 9)) == BatchShape(6, 128, 0, 16)


def of(name: str, family: str) -> tuple[Any, Any, list[Example]]:
    config, tokenizer = parts(family)
    known = pairs() if name == "embed" else written() if name in WRITTEN else examples(name)
    recipe = FinetuneRecipe(max_target_length=8, max_seq_length=config.max_length or 64)
    task = make_task(WRITTEN.get(name, name), known, tokenizer, config, recipe)
    return task, model_for(task, config), known


WRITTEN = {"text-to-text": "text-to-text", "lm": "lm"}


def pairs() -> list[Example]:
    return [Example(i, e.texts) for i, e in enumerate(examples("pair"))]


def written() -> list[Example]:
    return [Example(i, e.texts[:1], e.texts[1]) for i, e in enumerate(examples("pair"))]


OTHERS = [("embed", "bert"), ("embed", "gpt2"), ("embed", "t5"), ("text-to-text", "t5"), ("text-to-text", "bart")]
OTHERS += [("text-to-text", "gpt2")]


@pytest.mark.parametrize(("name", "family"), [*CASES, *OTHERS])
def test_padding_changes_nothing(name: str, family: str) -> None:
    """Losses, gradients and counts are equal for every shape."""
    task, model, known = of(name, family)
    model.eval()
    batch = task.collate(task.encode(known))
    now = batch_shape(batch)
    larger = pad_batch(
        batch, BatchShape(now.rows + 3, now.width + 64, now.decoder_width and now.decoder_width + 16, now.slots * 4), 0
    )
    assert larger.loss_counts == batch.loss_counts
    found = []
    for one in (batch, larger):
        model.zero_grad()
        losses = model.losses(one.to(torch.device("cpu")))
        sum(losses.values()).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        found.append([*(float(x.detach()) for x in losses.values()), float(norm)])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "family"), [*CASES, *OTHERS[:3]])
def test_predictions_are_equal(name: str, family: str) -> None:
    task, model, known = of(name, family)
    items = task.encode(known)
    plain, few = task.predict(model, items, CPU, 3), task.predict(model, items, FEW, 3)
    assert task.num_shapes <= 4
    for a, b in zip(plain, few, strict=True):
        if name in ("regress", "embed"):
            assert b.prediction == pytest.approx(a.prediction, abs=1e-5)
        else:
            assert b.prediction == a.prediction
        if a.scores:
            assert b.scores == pytest.approx(a.scores, abs=1e-5)


def test_shapes_of_many_batches_are_few() -> None:
    rng = np.random.default_rng(0)
    config, tokenizer = parts("bert")
    known = [Example(i, (" ".join(["cat"] * int(n)),), "ab"[i % 2]) for i, n in enumerate(rng.integers(2, 25, 600))]
    task = make_task("classify", known, tokenizer, config, FinetuneRecipe(max_seq_length=32))
    items = task.encode(known)
    batches = [task.collate([items[i] for i in rng.permutation(600)[:16]]) for _ in range(200)]
    shapes = fit_shape_buckets(batches[:100], 0)
    assert len({batch_shape(batch) for batch in batches}) > 4
    found = [shapes(batch) for batch in batches]
    assert len({batch_shape(batch) for batch in found}) <= 4
    tokens = sum(batch.num_tokens for batch in batches)
    assert tokens / sum(batch.input_ids.size for batch in found) > 0.75


def test_which_runs_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long runs use the default of the device; short ones, and those with --minutes, do not compile."""
    config, tokenizer = parts("bert")
    task = make_task("classify", {"labels": ["a", "b"]}, tokenizer, config)
    usual = FinetuneRecipe(per_device_train_batch_size=10)

    def resolved(recipe: FinetuneRecipe, num_examples: int, task: Task = task) -> FinetuneRecipe:
        return resolve_compile_options(recipe, task, config, num_examples)

    assert resolved(usual, 10 * MIN_STEPS_TO_COMPILE).compile is None
    assert resolved(usual, 3 * MIN_STEPS_TO_COMPILE).compile is False
    assert resolved(replace(usual, shots=100), 10 * MIN_STEPS_TO_COMPILE).compile is False
    assert resolved(replace(usual, max_steps=MIN_STEPS_TO_COMPILE), 9).compile is None
    assert resolved(replace(usual, minutes=5.0), 10 * MIN_STEPS_TO_COMPILE).compile is False
    for in_turn in (replace(usual, crf=True), replace(usual, bilstm=8)):
        assert resolved(in_turn, 10 * MIN_STEPS_TO_COMPILE).compile is False
    assert resolved(replace(usual, compile=True), 9).compile is True
    assert resolved(replace(usual, compile=True), 9).engine.cuda_graphs is None
    assert resolved(replace(usual, engine=EngineConfig(compile_regions=True)), 9).compile is None
    assert resolved(usual, 9).engine.cuda_graphs is None  # on a CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolved(usual, 9).engine.cuda_graphs is True
    assert resolved(replace(usual, engine=EngineConfig(cuda_graphs=False)), 9).engine.cuda_graphs is False
    for changes in (
        {"unfreeze_every": 5},
        {"bilstm": 8},
        {"engine": EngineConfig(weights="bf16")},
        {"gradient_checkpointing": True},
    ):
        assert resolved(replace(usual, **changes), 9).engine.cuda_graphs is False
    several = MultiTask({"one": task, "two": make_task("classify", {"labels": ["c", "d"]}, tokenizer, config)})
    assert resolved(usual, 9, several).engine.cuda_graphs is False, "a head rests in a step"


def test_a_bucketed_run_is_equal(
    checkpoint_of: Any,
    toy: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With buckets as if compiled: equal losses, scores and predictions; the number of shapes is reported."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    results, losses = [], []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        recipe = FinetuneRecipe(
            checkpoint=str(checkpoint_of("bert")), task="classify", train=str(toy["train"]), dev=str(toy["dev"]),
            output_dir=str(folder), seeds=1, max_steps=12, per_device_train_batch_size=5, max_seq_length=32,
            learning_rate=1e-3, compile=compiled, save_steps=100,
        )  # fmt: skip
        results.append(finetune(recipe))
        log = [line for line in (folder / "seed-0" / "log.jsonl").read_text().splitlines() if '"loss"' in line]
        losses.append([json.loads(line)["loss"] for line in log])
    plain, few = results
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    assert plain["accuracy"] == few["accuracy"]
    facts = [json.loads((tmp_path / name / "seed-0" / "results.json").read_text()) for name in ("False", "True")]
    assert [one["compiled"] for one in facts] == [False, True]
    assert facts[1]["shapes"]["train"] <= 4
    assert facts[1]["shapes"]["evaluate"] <= 4
    assert "the step is compiled for batches of 2 rows of 32 tokens" in capsys.readouterr().err
