"""The whole way, at a toy size: a small corpus of two packages, a few steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import firth.lab.quickstart as lab
from firth.core.errors import UserError
from firth.core.files import find_corruption
from firth.models import load_model
from firth.tasks import FinetuneRecipe
from firth.text import Corpus, python_docs
from firth.train import Recipe, load_recipe


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    things = {
        "sea": (["ship", "wave", "harbour", "sailor", "anchor"], ["deep", "salty", "blue", "stormy"]),
        "kitchen": (["pan", "oven", "spoon", "baker", "recipe"], ["warm", "sweet", "fresh", "spicy"]),
    }
    records = [
        python_docs.DocstringRecord(
            package, f"{package}.f{i}", f"Return the {a} {x} that is near the {b} {y} of number {n}.", ()
        )
        for package, (nouns, adjectives) in things.items()
        for i, (x, y, a, b, n) in enumerate(
            itertools.islice(itertools.product(nouns, nouns, adjectives, adjectives, range(3)), 700)
        )
    ]
    monkeypatch.setattr(python_docs, "load_pydocs", lambda: records)
    for name, value in {
        "QUICKSTART_VOCAB_SIZE": 420,
        "LABEL_COUNTS": (8, 16),
        "QUICKSTART_SEEDS": 2,
        "FINETUNE_STEPS": 3,
    }.items():
        monkeypatch.setattr(lab, name, value)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_three_architectures_side_by_side() -> None:
    result = lab.quickstart(minutes=0.02, all=True)
    assert [(row["model"], row["labels"]) for row in result["table"]] == [
        (shape, labels) for shape in ("encoder", "decoder", "encoder-decoder") for labels in (8, 16)
    ]
    for row in result["table"]:
        assert row["gain"] == pytest.approx(row["pretrained"]["mean"] - row["scratch"]["mean"])
        assert row["gain"] == pytest.approx(row["gain_from_counting"] + row["gain_from_pretraining"])
    page = Path(result["report"]).read_text(encoding="utf-8")
    for words in ("word frequencies only", "Pretraining: decoder", "from scratch", "kind: SpanCorruption", "<svg"):
        assert words in page
    assert json.loads(Path("quickstart/results.json").read_text()) == result
    assert load_model("quickstart/decoder/pretraining/final").config.architecture == "decoder"


def test_a_second_run_gets_a_folder_of_its_own_and_resume_repeats_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, found = lab.ArchitectureRun.run, list[dict[str, Any]]()
    monkeypatch.setattr(lab.ArchitectureRun, "run", lambda *given: found.append(run(*given)) or found[-1])
    first = lab.quickstart(minutes=0.02)
    said = capsys.readouterr().err
    for words in ("Plan: four steps", "Step 2 of 4: fine-tuning the same model", "(8 runs)", "counted embeddings add"):
        assert words in said
    recipes = {
        arm: load_recipe(Path(f"quickstart/encoder/{arm}-8/recipe.yaml"), FinetuneRecipe)
        for arm in ("scratch", "counted", "pretrained")
    }
    assert {(r.max_steps, r.learning_rate, r.dev) for r in recipes.values()} == {(3, 7.3e-4, "pydocs:test")}
    # the arms differ in their start: the second has other embeddings than the first, and equal weights otherwise
    scratch, counted = (load_model(f"quickstart/encoder/start-{arm}").state_dict() for arm in ("scratch", "counted"))
    changed = {name for name in scratch if not torch.equal(scratch[name], counted[name])}
    assert changed
    assert all("token" in name or "embed" in name or "head" in name for name in changed), changed
    pretrained = load_recipe(Path("quickstart/encoder/pretraining/recipe.yaml"), Recipe)
    assert pretrained.checkpoint.endswith("start-counted")
    weights = Path("quickstart/encoder/pretraining/final/model.safetensors")
    written = weights.stat().st_mtime_ns
    again = lab.quickstart("quickstart", minutes=0.02, resume=True)
    assert again["table"] == first["table"]
    assert weights.stat().st_mtime_ns == written
    monkeypatch.setattr(lab.ArchitectureRun, "run", lambda *given: found[0])  # only its folder is looked at
    assert lab.quickstart(minutes=0.02)["output_dir"] == "quickstart-2"
    monkeypatch.setattr(lab.ArchitectureRun, "run", run)
    with pytest.raises(UserError, match="exists already"):
        lab.quickstart("quickstart", minutes=0.02)
    lab.quickstart("quickstart", minutes=0.02, overwrite=True)
    assert find_corruption(Path("quickstart/encoder/pretraining/final")) is None


@pytest.mark.parametrize(
    ("loss", "words"), [(6.21, "0.07 worse than word frequencies"), (6.10, "little more than"), (5.5, "0.64 better")]
)
def test_the_sentence_on_the_loss_agrees_with_its_numbers(loss: float, words: str) -> None:
    assert words in lab.describe_final_loss({"eval_loss": loss, "unigram_entropy": 6.14}, "encoder")


def test_a_busy_machine_gets_more_time_and_smaller_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = lab.architecture_setups(False)["encoder"]
    run = lab.ArchitectureRun(Path("encoder"), "encoder", setup, 0, False)
    shards = run.prepare(Corpus(["pydocs"]), 8)
    planned = {}
    for step_seconds in (0.1, 0.6, 4.0):
        monkeypatch.setattr(lab, "time_pretraining", lambda recipe, s=step_seconds: (s, 1))
        for max_seconds in (90.0, 180.0):  # with minutes of the user, and without
            recipe, seconds = run.plan_pretraining(shards, Path("start-counted"), 90.0, max_seconds)
            assert seconds == step_seconds * recipe.per_device_train_batch_size / 32
            assert recipe.threads == 1
            planned[step_seconds, max_seconds] = recipe.per_device_train_batch_size, round(60 * recipe.minutes)
    assert planned == {
        (0.1, 90.0): (32, 90),
        (0.1, 180.0): (32, 90),
        (0.6, 90.0): (16, 90),
        (0.6, 180.0): (32, 120),
        (4.0, 90.0): (8, 90),
        (4.0, 180.0): (8, 180),
    }
    lab.print_plan(lab.TimeBudget(300.0, 390.0), ["encoder"])
    said = capsys.readouterr().err
    assert "pretraining takes 1m30s more, and makes about 180 steps of 8 rows" in said
    assert "Plan: four steps in about 5m00s (6m30s on a busy machine)." in said


def test_no_time_is_a_mistake() -> None:
    with pytest.raises(UserError, match="more than 0"):
        lab.quickstart(minutes=0)
