"""Checkpoints: how many are kept, how a damaged one is handled, and that `transformers` opens them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from firth.core.errors import UserError
from firth.core.files import MANIFEST_FILE, find_corruption, remove_path
from firth.models import load_model
from firth.train import Recipe, last_checkpoint, pretrain
from firth.train.checkpoint import list_checkpoints, load_model_weights, load_optimizer
from firth.train.optim import make_optimizer

Recipes = Callable[..., Recipe]


@pytest.fixture
def run(recipe_of: Recipes) -> Path:
    """A run of six steps that kept every checkpoint."""
    recipe = recipe_of("bert", max_steps=6, save_steps=2, save_total_limit=0)
    pretrain(recipe)
    return Path(recipe.output_dir)


def names(run: Path) -> list[str]:
    return [p.name for p in list_checkpoints(run)]


@pytest.mark.parametrize(("limit", "kept"), [(0, [6, 4, 2]), (1, [6]), (2, [6, 4]), (9, [6, 4, 2])])
def test_save_total_limit_keeps_the_newest(limit: int, kept: list[int], recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=6, save_steps=2, save_total_limit=limit)
    pretrain(recipe)
    assert names(Path(recipe.output_dir)) == [f"checkpoint-{step}" for step in kept]


def test_a_resumed_run_removes_the_checkpoints_that_a_kill_left(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=6, save_steps=2, save_total_limit=2)
    pretrain(recipe)
    run = Path(recipe.output_dir)
    shutil.copytree(run / "checkpoint-4", run / "checkpoint-2")  # the run is killed before it removes this one
    for path in (run / "final", run / "results.json"):
        remove_path(path)
    pretrain(recipe, resume=True)
    assert names(run) == ["checkpoint-6", "checkpoint-4"]


def test_last_step_is_always_saved(recipe_of: Recipes) -> None:
    recipe = recipe_of("bert", max_steps=3, save_steps=2)
    pretrain(recipe)
    assert names(Path(recipe.output_dir)) == ["checkpoint-3", "checkpoint-2"]


def test_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", ".checkpoint-11.tmp"):
        (tmp_path / name).mkdir()
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]


def test_damaged_checkpoints_are_reported_and_skipped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = run / "checkpoint-6" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    middle = run / "checkpoint-4" / "training" / "optimizer.safetensors"
    data = bytearray(middle.read_bytes())
    data[-1] ^= 1
    middle.write_bytes(data)
    assert last_checkpoint(run) == run / "checkpoint-2"
    said = capsys.readouterr().err
    assert "checkpoint-6 is damaged (model.safetensors has" in said
    assert "checkpoint-4 is damaged (training/optimizer.safetensors does not match" in said


def test_no_intact_checkpoint(run: Path) -> None:
    for folder in list_checkpoints(run):
        (folder / MANIFEST_FILE).unlink()
    assert last_checkpoint(run) is None


def test_no_pickle_is_written(run: Path) -> None:
    kinds = {p.suffix for p in run.rglob("*") if p.is_file()}
    assert kinds <= {".json", ".jsonl", ".safetensors", ".yaml", ""}
    assert {p.name for p in run.rglob("*") if p.is_file() and not p.suffix} <= {".lock"}


def test_resume_refuses_a_checkpoint_without_its_head(run: Path, recipe_of: Recipes) -> None:
    folder = run / "checkpoint-6"
    model = load_model(folder)
    optimizer = make_optimizer(model, recipe_of("bert"))
    load_model_weights(folder, model)
    assert load_optimizer(folder, model, optimizer).step == 6
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.transform.dense.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"missing, such as head.dense.weight"):
        load_model_weights(folder, model)


@pytest.mark.parametrize(
    ("family", "kind"),
    [("bert", "AutoModelForMaskedLM"), ("gpt2", "AutoModelForCausalLM"), ("t5", "AutoModelForSeq2SeqLM")],
)
def test_transformers_logits_are_equal(family: str, kind: str, recipe_of: Recipes) -> None:
    recipe = recipe_of(family, dropout=0.1, max_steps=2)
    pretrain(recipe)
    for folder in (Path(recipe.output_dir) / "checkpoint-2", Path(recipe.output_dir) / "final"):
        assert find_corruption(folder) is None
        ours, theirs = load_model(folder), getattr(transformers, kind).from_pretrained(folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        inputs = dict(tokenizer("The cat slept by the river.", return_tensors="pt").items())
        assert ours.tokenizer is not None
        assert set(ours.tokenizer.encode("The cat slept by the river.")) <= set(inputs["input_ids"][0].tolist())
        if family == "t5":
            inputs["decoder_input_ids"] = torch.tensor([[0, 7, 8, 9, 0]])
            inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0, 0]])
        with torch.no_grad():
            a, b = ours(**inputs).logits, theirs(**inputs).logits
        if family == "t5":  # what stands at padding means nothing
            a, b = a[:, :3], b[:, :3]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
