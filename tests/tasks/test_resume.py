"""Resuming a fine-tuning: with the same recipe, with an allowed change, or after a rewind."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tasks.small import parts

from firth import api
from firth.core.errors import UserError
from firth.core.files import find_corruption
from firth.evaluate import seed_table
from firth.models import Model
from firth.tasks import FinetuneRecipe, finetune, train_seed
from firth.tasks.chat import ChatTemplate, template_uses_date
from firth.tasks.finetune_data import FinetuneData, check_example_checksums, read_finetune_data
from firth.tasks.results import checksum_examples
from firth.text import Example
from firth.tokens import Tokenizer
from firth.train import TrainingRun, load_recipe, read_log, save_recipe

finetuning = importlib.import_module("firth.tasks.finetune")  # the name in firth.tasks is the function
Checkpoints = Callable[[str], Path]
Toy = dict[str, Path]
DATED = "{{ strftime_now('%d %B %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def plan(checkpoint_of: Checkpoints, toy: Toy, tmp_path: Path) -> Callable[..., FinetuneRecipe]:
    for part in ("train", "dev"):
        (tmp_path / f"{part}.jsonl").write_bytes(toy[part].read_bytes())

    def make(**fields: Any) -> FinetuneRecipe:
        small: dict[str, Any] = dict(
            checkpoint=str(checkpoint_of("bert")),
            train=str(tmp_path / "train.jsonl"),
            dev=str(tmp_path / "dev.jsonl"),
            output_dir=str(tmp_path / "run"),
            max_steps=8,
            save_steps=2,
            save_total_limit=0,
            max_seq_length=32,
            seeds=2,
            learning_rate=3e-3,
            compile=False,
            bf16=False,
        )
        return FinetuneRecipe(**small | fields)

    return make


Plan = Callable[..., FinetuneRecipe]


def stop_in_seed(monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
    """Stop a run at a step of one of its seeds."""

    def make(*given: Any, **named: Any) -> TrainingRun:
        def stop(step: int, model: Model) -> None:
            if step == at and given[5].name == name:
                raise KeyboardInterrupt

        return TrainingRun(*given, **named, hooks=[(1, stop)])

    monkeypatch.setattr(train_seed, "TrainingRun", make)


@pytest.fixture
def stopped(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> FinetuneRecipe:
    """A run whose first seed is finished and whose second has reached step 5."""
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-1", 5)
        with pytest.raises(KeyboardInterrupt):
            finetune(plan())
    return plan()


def change_a_text(file: str, label: bool = False) -> None:
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    if label:
        lines = [line | {"label": line["label"] + "s"} for line in lines]
    else:
        lines[3]["text"] += " again"
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))


def stored(recipe: FinetuneRecipe) -> FinetuneRecipe:
    return load_recipe(Path(recipe.output_dir) / "recipe.yaml", FinetuneRecipe)


def test_a_nan_score_is_saved_as_null_and_read_back(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the correlation of constant predictions: the file is valid JSON, and a resume reads it."""
    evaluate = train_seed.fit
    monkeypatch.setattr(
        train_seed,
        "fit",
        lambda run, resume: (out := evaluate(run, resume)) and replace(out, scores=out.scores | {"odd": math.nan}),
    )
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-1", 5)
        with pytest.raises(KeyboardInterrupt):
            finetune(plan())
    text = (tmp_path / "run" / "seed-0" / "results.json").read_text()
    assert '"odd": null' in text
    result = finetune(plan(), resume=True)
    assert len(result["seeds"]) == 2


def test_a_changed_recipe_raises_without_allow_change(
    stopped: FinetuneRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(stopped, learning_rate=1e-3, seeds=3)
    with pytest.raises(UserError, match=r"learning_rate: 0.003 -> 0.001; seeds: 2 -> 3\. .*--allow-change"):
        finetune(other, resume=True)
    assert stored(stopped).learning_rate == 3e-3
    capsys.readouterr()
    result = finetune(other, resume=True, allow_change=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "from here on the recipe differs: learning_rate: 0.003 -> 0.001; seeds: 2 -> 3" in said
    assert "seed-0: done already, and left as before the change" in said
    assert len(result["seeds"]) == 3
    assert stored(stopped).learning_rate == 1e-3
    rates = [read_log(Path(stopped.output_dir) / f"seed-{i}" / "log.jsonl")[6]["learning_rate"] for i in range(2)]
    assert rates[1] == pytest.approx(rates[0] / 3), "step 7 came after the change"


@pytest.mark.parametrize(
    "fields", [{"optim": "adafactor"}, {"lora_rank": 2}, {"from_scratch": True}, {"ema_decay": 0.5}, {"task": "pair"}]
)
def test_fixed_fields_can_never_change(stopped: FinetuneRecipe, fields: dict[str, Any]) -> None:
    if "task" in fields:
        for file in (stopped.train, stopped.dev):
            lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
            pairs = [{"text_a": line["text"], "text_b": "a", "label": line["label"]} for line in lines]
            Path(file).write_text("".join(json.dumps(line) + "\n" for line in pairs))
    with pytest.raises(UserError, match="start a new run"):
        finetune(replace(stopped, **fields), resume=True, allow_change=True)


def test_changed_examples_raise_without_allow_change(
    stopped: FinetuneRecipe, capsys: pytest.CaptureFixture[str]
) -> None:
    before = stored(stopped).train_checksum
    assert len(before) == 8
    whole = Path(stopped.train).read_text()
    change_a_text(stopped.train)
    with pytest.raises(UserError, match=r"train.jsonl has changed since .*--allow-change"):
        finetune(stopped, resume=True)
    assert stored(stopped).train_checksum == before
    Path(stopped.train).write_text(whole.replace('"label"', ' "label"'))  # the same examples, written otherwise
    check_example_checksums(stored(stopped), read_finetune_data(stopped), False)
    change_a_text(stopped.train)
    finetune(stopped, resume=True, allow_change=True)
    assert "the run continues with changed training examples" in " ".join(capsys.readouterr().err.split())
    assert stored(stopped).train_checksum != before


def test_changed_dev_examples_always_raise(stopped: FinetuneRecipe) -> None:
    change_a_text(stopped.dev)
    with pytest.raises(UserError, match=r"dev.jsonl has changed since .*the same examples"):
        finetune(stopped, resume=True, allow_change=True)


CHANGES = [Example(1, ("ab",), "x", ((0, 2),), ("x", "y")), Example(1, ("ab",), "x", ((0, 1),), ("x", "z"))]


@pytest.mark.parametrize("other", CHANGES)
def test_checksums_include_spans_and_references(other: Example) -> None:
    plain, marked = Example(1, ("ab",), "x"), Example(1, ("ab",), "x", ((0, 1),), ("x", "y"))
    data, changed = (FinetuneData([plain], [e]) for e in (marked, other))
    recipe = check_example_checksums(FinetuneRecipe(train="train.jsonl", dev="dev.jsonl"), data, False)
    assert check_example_checksums(recipe, data, False) == recipe
    with pytest.raises(UserError, match=r"dev.jsonl has changed since"):
        check_example_checksums(recipe, changed, False)


def test_other_labels_always_raise(stopped: FinetuneRecipe) -> None:
    """As many as before, so the shapes would fit."""
    data = read_finetune_data(stopped)
    change_a_text(stopped.train, label=True)
    change_a_text(stopped.dev, label=True)
    recipe = stored(stopped)
    changed = replace(recipe, dev_checksum=checksum_examples(read_finetune_data(stopped).dev))
    assert changed.dev_checksum != checksum_examples(data.dev)
    save_recipe(changed, Path(stopped.output_dir) / "recipe.yaml")
    with pytest.raises(UserError, match="checkpoint-4 was trained with other labels"):
        finetune(stopped, resume=True, allow_change=True)


def test_deterministic_changes_nothing_on_a_cpu(plan: Plan, tmp_path: Path) -> None:
    for name in ("with", "without"):
        finetune(plan(seeds=1, output_dir=str(tmp_path / name), deterministic=name == "with"))
        assert not torch.are_deterministic_algorithms_enabled()
    for name in ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes(), name


# --- a step back


def poison(monkeypatch: pytest.MonkeyPatch, bad: list[int], seeds: tuple[int, ...] = (1,)) -> None:
    """Make the loss of these seeds NaN on the examples of these steps, counted from 0."""
    plain = train_seed.make_finetune_batch_fn
    known: dict[int, int] = {}

    def batch_function(recipe: FinetuneRecipe, *rest: Any, **named: Any) -> Any:
        if recipe.seed in seeds:
            for step in bad:
                known[hash(plain(recipe, *rest[:2])(step)[0].input_ids.tobytes())] = step
        return plain(recipe, *rest, **named)

    def make(*given: Any, **named: Any) -> TrainingRun:
        run = TrainingRun(*given, **named)

        def losses(batch: Any) -> dict[str, torch.Tensor]:
            factor = math.nan if hash(batch.input_ids.cpu().numpy().tobytes()) in known else 1.0
            return {name: factor * value for name, value in run.model.losses(batch).items()}

        run.loss_fn = losses
        return run

    monkeypatch.setattr(train_seed, "make_finetune_batch_fn", batch_function)
    monkeypatch.setattr(train_seed, "TrainingRun", make)


def test_the_diverged_seed_rewinds(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 5 to 7 of seed 1 are bad: it rewinds to checkpoint-4 and skips the examples up to them."""
    poison(monkeypatch, [4, 5, 6])
    recipe = plan(max_bad_steps=3)
    assert finetune(recipe)["diverged"] == [1]
    with pytest.raises(UserError, match="no intact checkpoint 9 steps before step 5"):
        finetune(recipe, rewind=9)
    result = finetune(recipe, rewind=0)
    assert stored(recipe).skips == {"seed-1": ((4, 3),)}
    log = read_log(tmp_path / "run" / "seed-1" / "log.jsonl")
    assert {"step": 4, "rewound_from": 7, "passed_over": 3} in log
    assert [line["step"] for line in log if "loss" in line] == list(range(1, 9))
    assert not any("skipped" in line for line in log)
    assert result["diverged"] == []
    assert len(result["seeds"]) == 2
    with pytest.raises(UserError, match="there is nothing to rewind"):
        finetune(recipe, rewind=0)

    # stopped again on the way, the resumed run passes over the same examples
    again = plan(max_bad_steps=3, output_dir=str(tmp_path / "again"))
    finetune(again)
    poisoned = train_seed.TrainingRun

    def make(*given: Any, **named: Any) -> TrainingRun:
        def stop(step: int, model: Model) -> None:
            if step == 7:
                raise KeyboardInterrupt

        run = poisoned(*given, **named)
        run.hooks.append((1, stop))
        return run

    with monkeypatch.context() as patch:
        patch.setattr(train_seed, "TrainingRun", make)
        with pytest.raises(KeyboardInterrupt):
            finetune(again, rewind=0)
    finetune(again, resume=True)
    for name in ("log.jsonl", "final/model.safetensors", "predictions.jsonl"):
        ours, theirs = (tmp_path / run / "seed-1" / name for run in ("run", "again"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def test_a_diverged_seed_does_not_end_the_others(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(plan(output_dir=str(tmp_path / "whole")))
    poison(monkeypatch, [4, 5, 6], seeds=(0,))
    recipe = plan(max_bad_steps=3, baseline=str(tmp_path / "whole"))
    result = finetune(recipe)
    said = capsys.readouterr().err
    assert "seed-0 diverged and has no score; the other seeds continue. 3 steps in a row were skipped" in said
    assert "seed-0 diverged: accuracy is the mean of 1 of 2 seeds." in said
    assert result["diverged"] == [0]
    assert 0 in result["failed"]
    assert result["best_seed"] == 1
    assert math.isnan(result["seeds"][0])
    assert result["mean"] == result["accuracy"] == result["seeds"][1]
    assert result["steps"] == [7, 8]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    names, rows = seed_table(result)
    assert names == ["metric", "mean", "deviation", "seed 0", "seed 1"]
    assert rows[0] == ("accuracy", result["mean"], 0.0, None, result["mean"])
    with monkeypatch.context() as patch:
        patch.setattr(train_seed, "fit", None)  # nothing is computed again
        again = finetune(recipe, resume=True)
    assert again["diverged"] == [0]
    assert again["mean"] == result["mean"]
    changed = replace(recipe, max_bad_steps=5)  # which gets over the bad steps
    assert finetune(changed, resume=True, allow_change=True)["diverged"] == []


def test_all_seeds_diverged_raises(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, [4, 5, 6], seeds=(0, 1))
    with pytest.raises(UserError, match=r"^The loss of all 2 seeds diverged. The first: 3 steps in a row"):
        finetune(plan(max_bad_steps=3))
    assert not (tmp_path / "run" / "results.json").exists()
    with pytest.raises(UserError, match=r"^3 steps in a row were skipped, from step 5 on"):
        finetune(plan(max_bad_steps=3, seeds=1, output_dir=str(tmp_path / "one")))


def test_allow_change_and_rewind_on_the_command_line(stopped: FinetuneRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("firth.tasks.finetune", lambda *words: given.append(words[1:]) or {"task": "classify"})
    monkeypatch.setattr(sys.modules["firth.evaluate"], "write_run_report_and_card", lambda *words: Path("report.html"))
    words = [stopped.checkpoint, "classify", stopped.train, stopped.dev, stopped.output_dir]
    api.finetune(*words, resume=True, allow_change=True)
    api.finetune(*words, rewind=2)
    assert given == [(True, False, True, None), (False, False, False, 2)]


# --- the day


def test_chat_templates_get_the_start_date_of_the_run() -> None:
    tokenizer = parts("gpt2")[1]
    dated = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.config | {"chat_template": DATED})
    assert template_uses_date(dated)
    assert not template_uses_date(tokenizer)
    assert ChatTemplate(dated, "2024-02-29").render([("user", "the cat")]) == "29 February 2024the cat"
    assert "February 2024" not in ChatTemplate(dated).render([("user", "the cat")])
    with pytest.raises(UserError, match="must be a day"):
        FinetuneRecipe(day="29 February").check()


def test_a_resume_on_another_day_reads_the_same_text(
    checkpoint_of: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    place = tmp_path / "gpt2"
    shutil.copytree(checkpoint_of("gpt2"), place)
    template = "{{ strftime_now('%d') }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    (place / "chat_template.jinja").write_text(template)
    talk = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the river"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 6)
    fields: dict[str, Any] = dict(checkpoint=str(place), task="lm", output_dir=str(tmp_path / "run"), compile=False)
    files = {name: str(tmp_path / "talk.jsonl") for name in ("train", "dev")}
    recipe = FinetuneRecipe(**fields, **files, max_steps=4, save_steps=2, seeds=1, max_seq_length=32, bf16=False)

    class Day(finetuning.date):  # type: ignore[name-defined, misc]
        said = "2025-12-31"

        @classmethod
        def today(cls) -> Any:
            return cls.fromisoformat(cls.said)

    monkeypatch.setattr(finetuning, "date", Day)
    with monkeypatch.context() as patch:
        stop_in_seed(patch, "seed-0", 3)
        with pytest.raises(KeyboardInterrupt):
            finetune(recipe)
    Day.said = "2026-01-01"
    finetune(recipe, resume=True)
    assert stored(recipe).day == "2025-12-31"
    assert json.loads((tmp_path / "run" / "final" / "task.json").read_text())["day"] == "2025-12-31"
    straight = replace(recipe, output_dir=str(tmp_path / "straight"), day="2025-12-31")
    finetune(straight)
    logs = [(tmp_path / name / "seed-0" / "log.jsonl").read_bytes() for name in ("run", "straight")]
    assert logs[0] == logs[1]


# --- a disk that is full at the end


@pytest.mark.parametrize("last", ["write_predictions", "save_seed_model", "write_results", "summarize_seeds"])
def test_a_resume_writes_the_final_files_that_failed(
    last: str, quota: Callable[[int | None], None], plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune(plan(seeds=1, output_dir=str(tmp_path / "straight")))
    module = finetuning if last == "summarize_seeds" else train_seed
    plain = getattr(module, last)

    def full(*given: Any) -> Any:
        quota(150)
        try:
            return plain(*given)
        finally:
            quota(None)

    with monkeypatch.context() as patch:
        patch.setattr(module, last, full)
        with pytest.raises(OSError, match="File too large") as refused:
            finetune(plan(seeds=1))
    assert "with the same command and --resume" in refused.value.__notes__[0]
    run = tmp_path / "run"
    assert not (run / "results.json").exists()
    assert not list(run.rglob(".*.tmp"))
    assert all(find_corruption(folder) is None for folder in run.rglob("final"))
    finetune(plan(seeds=1), resume=True)
    for name in ("final/model.safetensors", "predictions.jsonl", "seed-0/log.jsonl"):
        assert (run / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
