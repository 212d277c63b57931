"""Several tasks with one head each: the mix of steps, heads, gradients, prediction by name, and exact resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tasks.conftest import write_jsonl
from tasks.small import CPU, model_for, parts

import firth
from firth.core.errors import UserError
from firth.models import MultiTaskHead, load_model, make_model
from firth.tasks.multitask import MultiTask, TaskItem, make_mixed_sampler, qualify_ids, split_into_batches
from firth.tasks.registry import make_task
from firth.text import AnswerSpan, Example

EXAMPLES: dict[str, tuple[str, list[Example]]] = {
    "kind": ("classify", [Example(0, ("a red cat",), "cat"), Example(1, ("a blue dog",), "dog")]),
    "same": ("pair", [Example(0, ("a cat", "the cat"), "yes"), Example(1, ("a dog", "the fox"), "no")]),
    "size": ("regress", [Example(0, ("a big horse",), 1.0), Example(1, ("a small fox",), 0.0)]),
    "words": ("tag", [Example(0, ("a", "red", "cat"), ("D", "A", "N")), Example(1, ("the", "dog"), ("D", "N"))]),
    "where": ("span-qa", [Example(0, ("the cat", "the cat is near the river"), (AnswerSpan("river", 20),))]),
    "which": ("choice", [Example(0, ("a cat is", "small", "a river"), 0)]),
}


def make_tasks(family: str, names: list[str]) -> tuple[MultiTask, list[Example], Any]:
    config, tokenizer = parts(family)
    recipe = firth.tasks.FinetuneRecipe(max_seq_length=32)
    own = {n: EXAMPLES[n] for n in names}
    tasks = {n: make_task(kind, some, tokenizer, config, recipe) for n, (kind, some) in own.items()}
    return MultiTask(tasks), [e for n, (_, some) in own.items() for e in qualify_ids(n, some)], config


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart", "t5gemma"])
def test_a_head_per_task_equals_a_model_of_that_task_alone(family: str) -> None:
    """Loss and gradient of the shared backbone and of the head are those of a model with this head only."""
    names = [name for name in EXAMPLES if (family, name) != ("bart", "which")]
    task, examples, config = make_tasks(family, names)
    model = model_for(task, config).eval()  # some heads have dropout
    assert isinstance(model.config.head, MultiTaskHead)
    model.tokenizer = task.tokenizer
    for some in split_into_batches(task.encode(examples), 2):
        name = some[0].task
        own_config = replace(model.config, head=model.config.head[name])
        alone = make_model(own_config).eval()
        prefix = f"head.heads.task_{name}."
        state = model.state_dict()
        alone.load_state_dict(
            {k: v for k, v in state.items() if not k.startswith("head.")}
            | {f"head.{k.removeprefix(prefix)}": v for k, v in state.items() if k.startswith(prefix)}
        )
        batch = task.collate(some)
        assert batch.head == name
        losses = [m.losses(batch.to(CPU.device))["targets"] for m in (model, alone)]
        assert losses[0] == losses[1] > 0
        model.zero_grad()
        for loss in losses:
            loss.backward()
        shared = dict(model.named_parameters())
        for key, p in alone.named_parameters():
            mine = shared[prefix + key.removeprefix("head.") if key.startswith("head.") else key]
            assert (mine.grad is None) == (p.grad is None)
            assert p.grad is None or torch.equal(mine.grad, p.grad), key
        others = [p for key, p in shared.items() if key.startswith("head.") and not key.startswith(prefix)]
        assert all(p.grad is None for p in others), "other heads have no gradient, so that the optimizer leaves them"
        alone_task = task.tasks[name]
        encoded = [item.item for item in some]
        mine = alone_task.predict(model, encoded, CPU, 2)
        assert mine == alone_task.predict(alone, encoded, CPU, 2)


def test_a_step_has_one_task_and_the_steps_have_the_rates() -> None:
    items = [TaskItem("a", i) for i in range(30)] + [TaskItem("b", i) for i in range(10)]
    sample = make_mixed_sampler(items, 1.0, 2**19, seed=3, run_length=4)
    stream = sample(np.arange(4000))
    steps = [stream[i : i + 4] for i in range(0, 4000, 4)]
    assert all(len({item.task for item in step}) == 1 for step in steps)
    assert Counter(step[0].task for step in steps) == {"a": 750, "b": 250}
    seen = Counter(item for step in steps for item in step)
    assert set(seen.values()) == {100}, "4,000 items are 100 epochs of both"
    assert sample(np.arange(40, 44)) == steps[10], "a function of the index alone"
    weighted = make_mixed_sampler(items, 1.0, 2**19, 3, {"a": 1, "b": 4}, run_length=4)
    assert Counter(item.task for item in weighted(np.arange(0, 4000, 4))) == {"a": 200, "b": 800}


@pytest.fixture(scope="module")
def files(toy: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The toy's classes, and a tag for each word."""
    folder, found = tmp_path_factory.mktemp("tags"), {}
    for side in ("train", "dev"):
        rows = [json.loads(line) for line in toy[side].read_text().splitlines()]
        tagged = [
            {"tokens": r["text"].split(), "tags": ["N" if w == r["word"] else "O" for w in r["text"].split()]}
            for r in rows
        ]
        found[side] = {"kind": toy[side], "word": write_jsonl(folder / f"{side}.jsonl", tagged)}
    return found


RUN: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 8, "seeds": 1, "device": "cpu", "eval_steps": 2}
RUN |= {"max_seq_length": 32, "learning_rate": 1e-3, "mix_weights": {"kind": 1.0, "word": 1.0}, "save_steps": 2}


def test_two_heads_in_one_run(files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = firth.finetune(checkpoint_of("bert"), None, **files, output_dir=out, **RUN)
    assert {n: (t["task"], t["metric"]) for n, t in result["tasks"].items()} == {
        "kind": ("classify", "accuracy"),
        "word": ("tag", "accuracy"),
    }
    facts = json.loads((out / "final" / "task.json").read_text())
    assert facts["task"] == "multi-task"
    assert {name: own["head"] for name, own in facts["tasks"].items()} == {"kind": "kind", "word": "word"}
    best = result["scores"][0]
    for name in ("kind", "word"):
        again = firth.api.evaluate(out / "final", name, files["dev"][name], tmp_path / name)
        assert again["metrics"]["accuracy"] == best[f"{name}.accuracy"]
    predicted = firth.predict(out / "final", "I saw the fox today", task="kind")
    assert predicted["label"] in ("animal", "place")
    assert firth.predict(out / "final", "I saw the fox", task="word")["words"] == ["I", "saw", "the", "fox"]
    with pytest.raises(UserError, match="kind, word"):
        firth.predict(out / "final", "I saw the fox")
    # one head becomes a model of `transformers`
    firth.export(out / "final", tmp_path / "one", task="kind")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert firth.predict(tmp_path / "one", "I saw the fox today") == predicted
    with pytest.raises(UserError, match=r"There is no task 'knd'.*'kind'"):
        firth.export(out / "final", tmp_path / "two", task="knd")
    # another fine-tuning starts from the shared backbone, with a head of its own
    target = firth.finetune(
        out / "final",
        "classify",
        files["train"]["kind"],
        files["dev"]["kind"],
        tmp_path / "next",
        **RUN | {"max_steps": 1, "mix_weights": {}},
    )
    assert target["metric"] == "accuracy"
    shared, tuned = load_model(out / "final").state_dict(), load_model(tmp_path / "next" / "final").state_dict()
    assert {k for k in tuned if not k.startswith("head.")} == {k for k in shared if not k.startswith("head.")}


def test_resume_is_exact(
    files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops after its first checkpoint ends with the weights of an uninterrupted one."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    first = firth.finetune(checkpoint_of("bert"), None, **files, output_dir=whole, **RUN)
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        firth.finetune(checkpoint_of("bert"), None, **files, output_dir=cut, **RUN)
    monkeypatch.undo()
    second = firth.finetune(checkpoint_of("bert"), None, **files, output_dir=cut, resume=True, **RUN)
    assert second["scores"] == first["scores"]
    a, b = (load_model(run / "final").state_dict() for run in (whole, cut))
    assert all(torch.equal(a[name], b[name]) for name in a)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Interrupt the training when the batches of a later step are made."""
    from firth.tasks.shape_buckets import ShapeCountingBatches

    original = ShapeCountingBatches.__call__

    def call(self: ShapeCountingBatches, step: int) -> Any:
        if step > steps:
            raise KeyboardInterrupt
        return original(self, step)

    monkeypatch.setattr(ShapeCountingBatches, "__call__", call)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a weight of no task": ({"mix_weights": {"kind": 1.0, "wrd": 1.0}}, "'wrd' is not a task.*'word'"),
    "a task without a weight": ({"mix_weights": {"kind": 1.0}}, "no weight for the task 'word'"),
    "a weight of 0": ({"mix_weights": {"kind": 1.0, "word": 0.0}}, "word=0 must be above 0"),
    "a teacher": ({"teacher": "x", "mix_weights": {}}, "for one task"),
    "an embedder": ({"task": {"kind": "classify", "word": "embed"}, "mix_weights": {}}, "learned alone"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        firth.finetune(checkpoint_of("bert"), **{"task": None} | files | RUN | changes, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
