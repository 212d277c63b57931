"""Samples at each checkpoint: the same sentences each time, in little time, and a training that does not notice."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import firth
from firth.core.errors import UserError
from firth.core.html import HtmlPage
from firth.evaluate.checkpoint_samples import make_checkpoint_sampler
from firth.evaluate.companions import COMPANIONS
from firth.evaluate.pretraining_report import add_checkpoints_section
from firth.models import get_preset, make_model
from firth.objectives import OBJECTIVES
from firth.recipes import pretraining_recipe
from firth.tokens import open_shards
from firth.train import Recipe, load_recipe, pretrain
from firth.train.compute import ComputeConfig
from firth.train.dataloader import open_recipe_shards
from firth.train.samples import MAX_READ_CHECKPOINTS, SAMPLES_FILE, CheckpointSamples, read_samples

CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
ALL_THE_TIME = ("firth.train.samples.TIME_SHARE", 1.0)  # a run of a tenth of a second has no time for samples


@pytest.fixture(scope="module")
def shards(corpus_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    firth.tokenizer([corpus_file], folder / "tokenizer", "unigram", 400)
    firth.prepare([corpus_file], folder / "tokenizer", folder / "shards")
    return folder / "shards"


def make_recipe(shards: Path, folder: Path, preset: str, **fields: Any) -> Recipe:
    opened = open_shards(shards)
    model = replace(get_preset(preset), num_layers=1, vocab_size=opened.tokenizer.vocab.size)
    sizes = {"max_steps": 6, "save_steps": 2, "max_seq_length": 32, "per_device_train_batch_size": 4, "eval_rows": 4}
    own = {"output_dir": str(folder), "data": str(shards), "warm_start": "none", "compile": False}
    return pretraining_recipe(model, **sizes | own | fields)


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = make_recipe(shards, tmp_path_factory.mktemp("samples") / "run", "unilm-tiny", objective=OBJECTIVES["mlm"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*ALL_THE_TIME)
        pretrain(recipe, companions=COMPANIONS)
    return Path(recipe.output_dir)


def test_each_checkpoint_fills_the_same_blanks(run: Path) -> None:
    lines = read_samples(run)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert len(list(run.glob("checkpoint-*"))) == 2  # the first one is gone
    sentences = [[(sample["before"], sample["after"]) for sample in line["samples"]] for line in lines]
    assert sentences[0] == sentences[1] == sentences[2]
    assert len(sentences[0]) == 3
    for sample in lines[-1]["samples"]:
        assert sample["answer"]
        assert len(sample["guesses"]) == 4
        assert 0 < sum(p for _, p in sample["guesses"]) <= 1
    page = HtmlPage("run", "pretrain")
    add_checkpoints_section(page, lines)
    assert page.to_html().count("<tr><td>6</td>") == 3


def test_training_does_not_notice(run: Path, tmp_path: Path) -> None:
    recipe = replace(load_recipe(run / "recipe.yaml", Recipe), output_dir=str(tmp_path / "plain"), samples=0)
    pretrain(recipe, companions=COMPANIONS)
    assert not (tmp_path / "plain" / SAMPLES_FILE).exists()
    for name in ("log.jsonl", "final/model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (run / name).read_bytes()


def test_a_resumed_run_keeps_the_samples_before_its_step(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*ALL_THE_TIME)
    recipe = make_recipe(shards, tmp_path / "run", "t5-tiny", max_steps=4)
    pretrain(recipe, companions=COMPANIONS)
    file = tmp_path / "run" / SAMPLES_FILE
    first = file.read_text().splitlines()
    file.write_text("\n".join([*first, '{"step": 5, "samples": []}', '{"step": 6']))
    longer = replace(recipe, max_steps=6, samples=2)  # samples may change, and the steps with allow_change
    pretrain(longer, resume=True, allow_change=True, companions=COMPANIONS)
    lines = file.read_text().splitlines()
    assert lines[: len(first)] == first
    assert [len(json.loads(line)["samples"]) for line in lines] == [3, 3, 2]
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


def test_no_samples_where_a_model_needs_the_batches_of_training(run: Path) -> None:
    recipe = load_recipe(run / "recipe.yaml", Recipe)
    shards = open_recipe_shards(recipe)
    assert make_checkpoint_sampler(recipe, shards) is not None
    for changes in ({"samples": 0}, {"parallel": "fsdp"}, {"memory": 8}, {"fp8": True}):
        assert make_checkpoint_sampler(Recipe(**{**vars(recipe), **changes}), shards) is None


def test_a_text_is_cut_at_its_deadline(shards: Path, tmp_path: Path) -> None:
    recipe = make_recipe(shards, tmp_path, "gpt2-tiny")
    sample = make_checkpoint_sampler(recipe, open_shards(shards))
    assert sample is not None
    model = make_model(recipe.model).train()
    model.tokenizer, before = open_shards(shards).tokenizer, torch.get_rng_state()
    cut, whole = sample(model, time.monotonic()), sample(model, time.monotonic() + 60)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(x["text"].startswith(y["text"]) and x != y for x, y in zip(whole, cut, strict=True))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_samples_take_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, allowed = Clock(), list[float]()
    monkeypatch.setattr("firth.train.samples.time", clock)

    def sample(model: Any, deadline: float) -> list[dict[str, Any]]:
        allowed.append(deadline - clock.now)
        clock.now += 0.5
        return [{"before": "a", "text": "b"}]

    samples = CheckpointSamples(tmp_path / SAMPLES_FILE, 0, sample, CPU)
    for step, now in enumerate((1.0, 20.0, 60.0, 99.0, 200.0), 1):
        clock.now = now
        samples.write(step, None)  # type: ignore[arg-type]
    with samples:
        pass
    assert [line["step"] for line in read_samples(tmp_path)] == [1, 5]  # 0.5 s are due after each 50 s more
    assert allowed == pytest.approx([0.05, 1.5])

    def fails(model: Any, deadline: float) -> list[dict[str, Any]]:
        raise UserError("no mask token")

    broken = CheckpointSamples(tmp_path / "broken.jsonl", 0, fails, CPU)
    with broken:
        broken.write(1, None)  # type: ignore[arg-type]
        broken.write(2, None)  # type: ignore[arg-type]
    assert capsys.readouterr().err.count("no mask token") == 1
    assert (tmp_path / "broken.jsonl").read_text() == ""


def test_foreign_lines_are_left_out(tmp_path: Path) -> None:
    lines = [{"step": i, "samples": [{"before": "<b>x", "text": "y"}]} for i in range(500)]
    wrong: list[Any] = [{"step": 1}, {"step": 2, "samples": [3]}, {"step": 3, "samples": [{"before": 4}]}]
    wrong.append({"step": 4, "samples": [{"before": "a", "guesses": [["b"]]}]})
    (tmp_path / SAMPLES_FILE).write_text("".join(json.dumps(line) + "\n" for line in [*wrong, *lines]))
    found = read_samples(tmp_path)
    assert len(found) == MAX_READ_CHECKPOINTS
    assert [found[0]["step"], found[-1]["step"]] == [0, 499]
    page = HtmlPage("run", "pretrain")
    add_checkpoints_section(page, found)
    assert "&lt;b&gt;x" in page.to_html()
