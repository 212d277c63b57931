"""Several tasks at once: mixing rates, scores per task, task.json, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tasks.small import CPU, model_for, parts
from tasks.test_multihead import stop_after

import firth
from firth.core.errors import UserError
from firth.tasks import FinetuneRecipe, finetune
from firth.tasks.multitask import MultiTask, TaskItem, make_mixed_sampler, mixing_rates, qualify_ids
from firth.tasks.recipe import TaskData
from firth.tasks.registry import make_task
from firth.text import Example


def test_rates_as_in_the_paper() -> None:
    """Raffel et al. 2020, section 3.5.2: r = min(e, K) / sum min(e, K); with temperature, r ** (1 / T), normalised."""
    sizes = {"mnli": 400_000, "rte": 2_500, "cola": 8_500}
    capped = np.array([8_000, 2_500, 8_000])
    assert list(mixing_rates(sizes, 1.0, 8_000).values()) == pytest.approx(list(capped / capped.sum()))
    rates = np.array(list(sizes.values())) / sum(sizes.values())
    assert list(mixing_rates(sizes, 0.5, 2**21).values()) == pytest.approx(list(rates**0.5 / (rates**0.5).sum()))
    assert list(mixing_rates(sizes, 0.0, 2**21).values()) == pytest.approx([1 / 3] * 3)


def test_a_window_has_the_rates_and_every_example() -> None:
    items = [TaskItem("a", i) for i in range(300)] + [TaskItem("b", i) for i in range(100)]
    sample = make_mixed_sampler(items, 1.0, 2**19, seed=3)
    window = sample(np.arange(1000))
    assert Counter(item.task for item in window) == {"a": 750, "b": 250}
    seen = Counter(window)
    assert set(seen) == set(items)
    assert set(seen.values()) == {2, 3}, "2.5 epochs of both"
    assert sample(np.arange(500, 520)) == window[500:520], "a function of the index alone"
    assert make_mixed_sampler(items, 1.0, 2**19, seed=4)(np.arange(1000)) != window


def test_items_of_all_tasks_share_a_batch_and_scores_do_not() -> None:
    config, tokenizer = parts("t5")
    examples = {
        "kind": [Example(0, ("a red cat",), "cat"), Example(1, ("a blue dog",), "dog")],
        "copy": [Example(0, ("the river",), "river")],
    }
    names = {"kind": "classify", "copy": "text-to-text"}
    recipe = firth.tasks.FinetuneRecipe(max_seq_length=32, prefix="red: ")
    task = MultiTask({n: make_task(names[n], some, tokenizer, config, recipe) for n, some in examples.items()})
    mixed = [e for n, some in examples.items() for e in qualify_ids(n, some)][::-1]
    items = task.encode(mixed)
    assert [item.task for item in items] == ["copy", "kind", "kind"]
    alone = task.tasks["kind"].encode(examples["kind"])
    assert [item.item for item in items[1:]] == list(alone)[::-1]
    assert task.collate(items).num_targets == sum(len(item.item.answer_ids) for item in items)
    model = model_for(task, config)
    model.tokenizer = tokenizer
    found = task.predict(model, items, CPU, 2)
    assert {p.prediction for p in found[1:]} <= {"cat", "dog"}
    right = [found[0]._replace(prediction="river"), *(p._replace(prediction="dog") for p in found[1:])]
    scores = task.score(mixed, right)
    assert scores["kind.accuracy"] == 0.5
    assert scores["copy.chrf"] == 100
    assert scores["average"] == 0.75


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("names", [("kind", "facts"), ("facts", "kind")])
def test_rows_hold_the_longest_answers_of_any_task(names: tuple[str, str], family: str) -> None:
    """Objects to extract are not cut, and so longer than `max_target_length`, which the other answers have."""
    config, tokenizer = parts(family)
    answer = json.dumps(dict.fromkeys(("cat", "dog", "fox", "horse", "garden", "harbour"), "near the river"))
    examples = {
        "kind": [Example(0, ("a red cat",), "cat"), Example(1, ("a blue dog",), "dog")],
        "facts": [Example(0, ("the river",), answer)],
    }
    kinds = {"kind": "classify", "facts": "extract"}
    recipe = firth.tasks.FinetuneRecipe(max_seq_length=16, max_target_length=8, answer="text")
    task = MultiTask({n: make_task(kinds[n], examples[n], tokenizer, config, recipe) for n in names})
    items = task.encode([e for n in names for e in qualify_ids(n, examples[n])])
    assert task.collate(items).num_targets == sum(len(item.item.answer_ids) for item in items)
    longest = max(len(item.item.answer_ids) for item in items)
    assert task.metadata()["max_target_length"] >= longest > 16, "so that `firth generate` does not cut them"


@pytest.fixture
def files(toy: dict[str, Path]) -> dict[str, Any]:
    return {
        "train": {"kind": toy["train"], "word": toy["train_pairs"]},
        "dev": {"kind": toy["dev"], "word": toy["dev_pairs"]},
    }


def test_two_tasks_in_one_run(files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    run: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4, "seeds": 1, "device": "cpu"}
    run |= {"max_seq_length": 32, "max_target_length": 4}
    out = tmp_path / "run"
    prefix = {"word": "which word? "}
    result = firth.finetune(checkpoint_of("t5"), None, **files, output_dir=out, prefix=prefix, **run)
    assert result["task"] == "multi-task"
    assert result["metric"] == "average"
    saved = yaml.safe_load((out / "recipe.yaml").read_text())
    assert (saved["optim"], saved["learning_rate"]) == ("adafactor", 1e-2), "T5's optimizer"
    assert {n: (t["task"], t["metric"]) for n, t in result["tasks"].items()} == {
        "kind": ("classify", "accuracy"),
        "word": ("text-to-text", "chrf"),
    }
    assert result["mean"] == pytest.approx(np.mean([result["kind.accuracy"], result["word.chrf"] / 100]))
    assert json.loads((out / "results.json").read_text())["tasks"]["kind"]["mean"] == result["kind.accuracy"]
    report = Path(result["report"]).read_text(encoding="utf-8")
    assert all(name in report for name in ("Tasks", "kind", "word", "Confusion"))
    facts = json.loads((out / "final" / "task.json").read_text())
    assert facts["tasks"]["kind"]["prefix"] == "kind: "
    assert facts["tasks"]["word"]["prefix"] == "which word? "
    assert "several tasks" in (out / "final" / "README.md").read_text()
    # evaluated by name, as in training
    again = firth.api.evaluate(out / "final", "kind", files["dev"]["kind"], tmp_path / "kind")
    best = result["scores"][result["best_seed"]]
    assert again["metrics"]["accuracy"] == best["kind.accuracy"]
    with pytest.raises(UserError, match=r"several tasks.*--task kind or word"):
        firth.api.evaluate(out / "final", None, files["dev"]["kind"], tmp_path / "none")
    # the recipe repeats the run, and a resumed run is finished
    config = {"config": out / "recipe.yaml"}
    twin = firth.finetune(checkpoint_of("t5"), "", "", "", tmp_path / "twin", **config)
    assert twin["scores"] == result["scores"]
    again = firth.finetune(checkpoint_of("t5"), None, **files, output_dir=out, prefix=prefix, resume=True, **run)
    assert again["scores"] == result["scores"]


def test_a_mixture_of_answers_as_text_resumes_exactly(
    files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch of T5 has several tasks, in the order of the mixture."""
    few = {name: tmp_path / f"{name}.jsonl" for name in files["train"]}
    for name, file in few.items():
        file.write_text(
            "".join(files["train"][name].read_text().splitlines(keepends=True)[: 9 if name == "kind" else 5])
        )
    kinds = {"kind": "classify", "word": "text-to-text"}
    tasks = {name: TaskData(kinds[name], str(file), str(file), f"{name}: ") for name, file in few.items()}
    fields: dict[str, Any] = {"max_steps": 5, "save_steps": 2, "seeds": 1, "device": "cpu", "max_seq_length": 32}
    fields |= {"mix_temperature": 0.5, "max_target_length": 2, "per_device_train_batch_size": 4, "optim": "adafactor"}
    whole, cut = (
        FinetuneRecipe(checkpoint=str(checkpoint_of("t5")), tasks=tasks, output_dir=str(tmp_path / name), **fields)
        for name in ("whole", "cut")
    )
    first = finetune(whole)
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        finetune(cut)
    monkeypatch.undo()
    assert (tmp_path / "cut" / "seed-0" / "checkpoint-2").is_dir()
    assert finetune(cut, resume=True)["scores"] == first["scores"]
    for name in ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name


def test_shots_are_of_each_task(files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"shots": 4, "max_steps": 1, "seeds": 1, "device": "cpu", "mix_temperature": 0.0, "metric": "kind.mcc"}
    result = firth.finetune(checkpoint_of("t5"), None, **files, output_dir=tmp_path / "run", **options)
    assert result["metric"] == "kind.mcc"
    assert result["chance"] == 0


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "an encoder": ("bert", {}, "text-to-text needs a model that writes"),
    "a dev without train": ("t5", {"dev": {"kind": "a", "word": "b", "worde": "c"}}, "--dev worde=.* 'word'"),
    "a train without dev": ("t5", {"dev": {"kind": "a"}}, "--train word=.* has no --dev word"),
    "a prefix for all": ("t5", {"prefix": "x: "}, "names no task"),
    "a task of heads": ("t5", {"task": {"kind": "embed"}}, "embed are learned alone"),
    "an unknown metric": ("t5", {"metric": "accuracy"}, "average, kind.accuracy"),
    "a temperature": ("t5", {"mix_temperature": 2.0}, "from 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, files: dict[str, Any], checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    family, changes, message = MISTAKES[name]
    with pytest.raises(UserError, match=message):
        firth.finetune(checkpoint_of(family), **{"task": None} | files | changes, output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
