"""Rows that continue from step to step: the recurrent state, its checkpoint, and that nothing else changes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from firth.core.errors import UserError
from firth.models import Model, load_model
from firth.models.config import SlidingWindow, TransformerXL
from firth.models.presets import gpt2, xlnet
from firth.objectives import OBJECTIVES
from firth.recipes import pretraining_recipe
from firth.recipes.pretraining import complete_recipe
from firth.tokens import ShardSet, StreamDataset, open_shards
from firth.train import ComputeConfig, Recipe, TrainingRun, fit, pretrain, read_log
from firth.train.dataloader import HELD_OUT_STREAMS, make_batch, make_pretrain_batch_fn, make_row_dataset
from firth.train.held_out import HeldOutLoss
from firth.train.optim import make_optimizer
from firth.train.pretrain import build_pretrain_model
from firth.train.step import train_step
from firth.train.step_runner import StepRunner

pretraining = importlib.import_module("firth.train.pretrain")  # the name in firth.train is the function
CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Recipes = Callable[..., Recipe]


@pytest.fixture
def streaming(recipe_of: Recipes, shards_of: Callable[[str], ShardSet]) -> Recipes:
    """A recipe of a small XLNet, or of a small decoder with the same positions, with `order: stream`."""

    def get(family: str = "xlnet", dropout: float = 0.0, **fields: Any) -> Recipe:
        shape, make, objective = {"xlnet": ("bert", xlnet, "permutation-lm"), "gpt2": ("gpt2", gpt2, "clm")}[family]
        like = recipe_of(shape, **{"order": "stream", "memory": 16, **fields})
        vocab = shards_of(shape).tokenizer.vocab
        model = make(2, 32, 2, vocab.size, dropout=dropout, attention_dropout=dropout)
        return complete_recipe(
            replace(like, model=replace(model, position=TransformerXL()), objective=OBJECTIVES[objective])
        )

    return get


def made(recipe: Recipe) -> tuple[Model, Callable[[int], Any], StreamDataset, ShardSet]:
    shards = open_shards(Path(recipe.data))
    source = make_row_dataset(recipe, shards, held_out=False)
    assert isinstance(source, StreamDataset)
    return (
        build_pretrain_model(recipe, shards.tokenizer),
        make_pretrain_batch_fn(recipe, source, shards.tokenizer),
        source,
        shards,
    )


def losses(run: str | Path) -> list[float]:
    return [line["loss"] for line in read_log(Path(run) / "log.jsonl") if "loss" in line]


def first_losses(recipe: Recipe, steps: int) -> list[float]:
    """The losses of the first steps, at learning rate 0."""
    model, batches, _, _ = made(recipe)
    run, optimizer, carry = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe), {}
    return [
        train_step(run, StepRunner(model, model.losses, run.compute), optimizer, batches(step), step, 0.0, carry).item()
        for step in range(steps)
    ]


@pytest.mark.parametrize("family", ["xlnet", "gpt2"])
def test_a_step_continues_from_the_state_of_the_last(family: str, streaming: Recipes) -> None:
    """Against a model that is given the states of the previous step by hand."""
    recipe = streaming(family)
    found = first_losses(recipe, 3)
    model, batches, _, _ = made(recipe)
    for step in range(3):
        (batch,) = batches(step)
        wanted = model.losses(batch.to(CPU.device))["targets"].item() / batch.num_targets
        assert found[step] == pytest.approx(wanted, rel=1e-6)
    alone = first_losses(replace(recipe, memory=0), 3)
    assert alone[0] == found[0], "there is nothing before the first step"
    assert alone[1:] != found[1:], "and something before the others"


def test_memory_0_equals_a_model_without_memory(streaming: Recipes, tmp_path: Path) -> None:
    """The losses over the same rows are equal bit for bit."""
    recipe = streaming(memory=0, dropout=0.2)
    found = first_losses(recipe, 3)
    model, batches, _, _ = made(recipe)
    assert model.stack_memories() == {}
    assert model.pop_state() == {}
    stripped = lambda step: [batch._replace(reset_state=None) for batch in batches(step)]  # noqa: E731
    run, optimizer = TrainingRun(recipe, CPU, model, stripped), make_optimizer(model, recipe)
    assert found == [
        train_step(run, StepRunner(model, model.losses, run.compute), optimizer, stripped(i), i, 0.0).item()
        for i in range(3)
    ]


def test_any_split_of_the_batch_gives_the_same_state(streaming: Recipes) -> None:
    whole = streaming(per_device_train_batch_size=4)
    carries: list[dict[str, Tensor]] = []
    for size in (4, 2, 1):
        recipe = replace(whole, per_device_train_batch_size=size, gradient_accumulation_steps=4 // size)
        model, batches, _, _ = made(recipe)
        run, optimizer, carry = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe), {}
        total = [
            train_step(run, StepRunner(model, model.losses, run.compute), optimizer, batches(i), i, 0.0, carry).item()
            for i in range(3)
        ]
        assert {name: tuple(value.shape) for name, value in carry.items()} == {
            "stack.0": (4, 16, 32),
            "stack.1": (4, 16, 32),
        }
        assert not any(value.requires_grad for value in carry.values())
        carries.append(carry | {"total": torch.tensor(total)})
    for carry in carries[1:]:
        torch.testing.assert_close(carry, carries[0])


def test_a_new_epoch_resets_the_state(streaming: Recipes) -> None:
    recipe = streaming()
    model, batches, source, _ = made(recipe)
    run, optimizer = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe)
    late = batches(source.steps_per_epoch)
    assert late[0].reset_state.all()
    junk = {"stack.0": torch.full((4, 16, 32), torch.nan), "stack.1": torch.full((4, 16, 32), torch.nan)}
    found = train_step(
        run, StepRunner(model, model.losses, run.compute), optimizer, late, source.steps_per_epoch, 0.0, junk
    )
    assert found == train_step(
        run, StepRunner(model, model.losses, run.compute), optimizer, late, source.steps_per_epoch, 0.0, {}
    )
    assert not any(value.isnan().any() for value in junk.values()), "and leaves what it has read itself"


class Stop(Exception):  # noqa: N818
    """Raised to interrupt a run."""


@pytest.mark.parametrize("family", ["xlnet", "gpt2"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    family: str, streaming: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = dict(dropout=0.2, gradient_accumulation_steps=2, per_device_train_batch_size=2, max_steps=7, eval_steps=3)
    straight = streaming(family, output_dir=str(tmp_path / "straight"), **fields)
    pretrain(straight)
    stopped = streaming(family, output_dir=str(tmp_path / "stopped"), **fields)
    for at in (1, 3, 6):  # before the first checkpoint, one step after a checkpoint, on a checkpoint

        def stop(now: int, model: Model, at: int = at) -> None:
            if now == at:
                raise Stop

        monkeypatch.setattr(
            pretraining, "TrainingRun", lambda *a, stop=stop, **k: TrainingRun(*a, **k, hooks=[(1, stop)])
        )
        with pytest.raises(Stop):
            pretrain(stopped, resume=True)
    monkeypatch.undo()
    pretrain(stopped, resume=True)
    for name in ("log.jsonl", "final/model.safetensors", "checkpoint-7/training/recurrent_state.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
    assert len(load_file(tmp_path / "straight" / "checkpoint-7" / "training" / "recurrent_state.safetensors")) == 2

    # a run that forgets what was carried is another one
    (tmp_path / "stopped" / "results.json").unlink()
    monkeypatch.setattr("firth.train.loop.load_recurrent_state", lambda folder, device: {})
    for name in ("final", "checkpoint-7"):
        (tmp_path / "stopped" / name).rename(tmp_path / name)
    pretrain(stopped, resume=True)
    assert losses(tmp_path / "stopped") != losses(tmp_path / "straight")


def test_saved_models_have_no_state(streaming: Recipes) -> None:
    recipe = streaming(max_steps=2)
    pretrain(recipe)
    model = load_model(Path(recipe.output_dir) / "final")
    assert model.stack_memories() == {}
    tokens = torch.arange(5, 25).view(2, 10)
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_an_evaluation_has_its_own_state(streaming: Recipes) -> None:
    recipe = streaming(per_device_train_batch_size=2, eval_rows=2 * HELD_OUT_STREAMS + 3)
    model, _, _, shards = made(recipe)
    rows = make_row_dataset(recipe, shards, held_out=True)
    evaluate = HeldOutLoss(recipe, rows, shards.tokenizer, CPU)
    found = evaluate(model)["eval_loss"]
    assert evaluate(model)["eval_loss"] == found
    assert model.pop_state() == {}
    total, count = 0.0, 0
    for first in range(0, recipe.eval_rows, HELD_OUT_STREAMS):
        index = np.arange(first, min(first + HELD_OUT_STREAMS, recipe.eval_rows))
        batch = make_batch(recipe, rows, index, shards.tokenizer.vocab)
        if len(index) < HELD_OUT_STREAMS:
            model.load_state({name: value[: len(index)] for name, value in model.pop_state().items()})
        with torch.no_grad():
            total += model.losses(batch.to(CPU.device))["targets"].item()
        count += batch.num_targets
    assert found == pytest.approx(total / count, rel=1e-6)


@pytest.mark.slow
def test_a_compiled_step_is_equal(streaming: Recipes) -> None:
    recipe = streaming()
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        model, batches, _, _ = made(recipe)
        run, optimizer, carry = TrainingRun(recipe, CPU, model, batches), make_optimizer(model, recipe), {}
        of = wrap(model.losses)
        found.append(
            [
                train_step(run, StepRunner(model, of, run.compute), optimizer, batches(i), i, 0.0, carry).item()
                for i in range(3)
            ]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_any_model_may_have_a_recurrent_state(streaming: Recipes) -> None:
    """The loop uses only `load_state` and `pop_state`: here a model that counts the steps of its rows."""
    recipe = streaming(memory=0, gradient_accumulation_steps=2)
    model, batches, source, _ = made(recipe)
    seen: list[list[int]] = []

    def take_up(carry: dict[str, Tensor]) -> None:
        seen.append(carry["steps"].tolist() if carry else [])

    model.load_state = take_up  # type: ignore[method-assign,assignment]
    model.pop_state = lambda: {"steps": torch.full((4,), len(seen))}  # type: ignore[method-assign]
    fit(TrainingRun(replace(recipe, max_steps=2, eval_steps=2, warmup_steps=0), CPU, model, batches))
    assert seen == [[], [], [1] * 4, [2] * 4]
    assert source.num_streams == 8


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"memory": -1}, "at least 0"),
        ({"order": "packed"}, "--order stream"),
        ({"objective": OBJECTIVES["bilm"]}, "biLM"),
        ({"objective": OBJECTIVES["nsp"], "memory": 0}, "packed rows"),
        ({"objective": OBJECTIVES["static"], "memory": 0}, "num_static_masks"),
        ({"teacher": "somewhere"}, "teacher"),
    ],
)
def test_invalid_combinations_raise(changes: dict[str, Any], says: str, streaming: Recipes) -> None:
    with pytest.raises(UserError, match=says):
        complete_recipe(replace(streaming(), **changes)).check()


def test_memory_needs_relative_positions(streaming: Recipes, recipe_of: Recipes) -> None:
    with pytest.raises(UserError, match="TransformerXL"):
        recipe_of("gpt2", order="stream", memory=4).check()
    with pytest.raises(UserError, match="window"):
        narrow = gpt2(2, 32, 2, 100, position=TransformerXL(), window=SlidingWindow(4, 2))
        pretraining_recipe(narrow, order="stream", memory=4).check()
    with pytest.raises(UserError, match="one stack"):
        recipe_of("t5", order="stream").check()
    recipe_of("gpt2", order="stream").check()
    pretraining_recipe(xlnet(1, 32, 2, 100), order="stream", memory=4).check()
