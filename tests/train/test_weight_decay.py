"""Weight decay by schedule, and of the weights that move towards 0: by hand and against torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from firth.core.errors import UserError
from firth.models import make_model
from firth.objectives import Batch
from firth.tokens import ShardSet
from firth.train import Recipe
from firth.train.compute import ComputeConfig
from firth.train.dataloader import make_pretrain_batch_fn, make_row_dataset
from firth.train.optim import learning_rate_at, make_optimizer
from firth.train.pretrain import build_pretrain_model
from firth.train.recipe import TrainingConfig
from firth.train.step import TrainingRun, build_step_runner, train_step
from firth.train.weight_decay import cautious_decay, weight_decay_factor_at

CPU = ComputeConfig(torch.device("cpu"), bf16=False, compile=False)
Recipes = Callable[..., Recipe]
Make = Callable[[str], ShardSet]


def shrinking(**fields: Any) -> list[float]:
    """Rate times decay in each step of a run of four."""
    training = TrainingConfig(max_steps=4, warmup_steps=1, learning_rate=0.5, weight_decay=0.2, **fields)
    rates = [learning_rate_at(step, training) for step in range(4)]
    return [0.2 * rate * weight_decay_factor_at(step, training, rate) for step, rate in enumerate(rates)]


def test_what_a_step_shrinks_weights_by() -> None:
    assert shrinking() == pytest.approx([0.05, 0.1, 0.2 / 3, 0.1 / 3])
    assert shrinking(weight_decay_schedule="constant") == pytest.approx([0.1] * 4)
    assert shrinking(weight_decay_schedule="to-zero") == pytest.approx([0.05, 0.075, 0.1 / 3, 0.025 / 3])


def test_a_rate_of_zero_and_an_open_number_of_steps_change_nothing() -> None:
    assert weight_decay_factor_at(3, TrainingConfig(weight_decay_schedule="constant"), 0.0) == 1
    assert weight_decay_factor_at(3, TrainingConfig(weight_decay_schedule="to-zero"), 0.1) == 1


@pytest.mark.parametrize("optim", ["adamw", "muon", "adafactor"])
def test_optimizers_follow_the_schedule(optim: Any, recipe_of: Recipes, shards_of: Make) -> None:
    """With gradients of 0 only decay changes the weights: by the same factor in each step of a constant decay.

    LAMB, whose step has the norm of the weights whatever the decay, would show nothing.
    """
    shards = shards_of("bert")
    recipe = recipe_of(
        optim=optim, weight_decay=0.1, learning_rate=0.1, max_steps=3, warmup_steps=0, weight_decay_schedule="constant"
    )
    model = build_pretrain_model(recipe, shards.tokenizer)
    run, optimizer = TrainingRun(recipe, CPU, model, lambda step: []), make_optimizer(model, recipe)
    micro = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)(0)
    runner = build_step_runner(run)
    matrix = model.stack.blocks[0].mlp.up.weight
    ratios = []
    for step in range(3):
        before = matrix.detach().clone()
        with torch.no_grad():
            zero_gradients(run, micro, runner, optimizer, step, learning_rate_at(step, recipe))
        ratios.append((matrix.norm() / before.norm()).item())
    expected = 1 - 0.1 * 0.1 * (before.square().mean().sqrt().item() if optim == "adafactor" else 1.0)
    assert ratios == pytest.approx([expected] * 3, rel=1e-3)


def zero_gradients(run: Any, micro: list[Batch], runner: Any, optimizer: Any, step: int, rate: float) -> None:
    """A training step whose gradients are 0."""
    hooks = [p.register_hook(torch.zeros_like) for p in run.model.parameters()]
    with torch.enable_grad():
        train_step(run, runner, optimizer, micro, step, rate)
    for hook in hooks:
        hook.remove()


def test_cautious_decay_by_hand() -> None:
    p = nn.Parameter(torch.tensor([[1.0, -1.0, 1.0, -1.0, 2.0]]))
    optimizer = torch.optim.SGD([{"params": [p], "weight_decay": 0.5}], lr=0.1)
    p.grad = torch.tensor([[1.0, 1.0, -1.0, -1.0, 0.0]])
    with cautious_decay(optimizer):
        optimizer.step()
    # The first and the fourth move towards 0 by 0.1 and lose 0.05 more; the last one does not move.
    torch.testing.assert_close(p.detach(), torch.tensor([[0.85, -1.1, 1.1, -0.85, 2.0]]))
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_cautious_decay_takes_from_the_plain_step_where_signs_agree(
    optim: str, recipe_of: Recipes, shards_of: Make
) -> None:
    """Step without decay, then the paper's mask: signs of update and weight."""
    shards, results = shards_of("bert"), []
    for decay, cautious in ((0.0, False), (0.3, True)):
        recipe = recipe_of(optim=optim, weight_decay=decay, cautious_weight_decay=cautious, max_steps=1)
        model = build_pretrain_model(recipe, shards.tokenizer)
        first = [p.detach().clone() for p in model.parameters()]
        run, optimizer = TrainingRun(recipe, CPU, model, lambda step: []), make_optimizer(model, recipe)
        micro = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)(0)
        train_step(run, build_step_runner(run), optimizer, micro, 0, 1e-2)
        results.append([p.detach().clone() for p in model.parameters()])
    for before, plain, cautious_p in zip(first, *results, strict=True):
        update = before - plain
        expected = plain - 1e-2 * 0.3 * before * (update * before > 0) if before.ndim >= 2 else plain
        torch.testing.assert_close(cautious_p, expected)


def test_cautious_decay_needs_an_optimizer_that_has_it() -> None:
    with pytest.raises(UserError, match="adamw or muon"):
        TrainingConfig(optim="lamb", cautious_weight_decay=True).check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_bf16_copy_follows_cautious_decay(recipe_of: Recipes, shards_of: Make) -> None:
    """The fused step writes the bf16 copy too, before the decay; the next step must see the decay."""
    shards, compute = shards_of("bert"), ComputeConfig(torch.device("cuda"), bf16=True, compile=False)
    recipe = recipe_of(optim="adamw", weight_decay=0.5, cautious_weight_decay=True, bf16=True)
    recipe = replace(recipe, engine=replace(recipe.engine, weights="bf16"))
    model = make_model(recipe.model).cuda()
    run, optimizer = TrainingRun(recipe, compute, model, lambda step: []), make_optimizer(model, recipe)
    runner = build_step_runner(run)
    micro = make_pretrain_batch_fn(recipe, make_row_dataset(recipe, shards, held_out=False), shards.tokenizer)(0)
    train_step(run, runner, optimizer, micro, 0, 0.1)
    runner.begin_step()
    pairs = zip(model.parameters(), runner.compute_model.parameters(), strict=True)
    assert all(torch.equal(master.bfloat16(), copy) for master, copy in pairs)
