"""A run with FP8 matmuls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from firth.train import Recipe, pretrain, read_log


def test_training_with_fp8_lowers_the_loss(recipe_of: Callable[..., Recipe]) -> None:
    fields = {"max_steps": 30, "save_steps": 100, "learning_rate": 5e-3, "optim": "muon"}
    recipe = recipe_of("gpt2", fp8=True, **fields)
    pretrain(recipe)
    losses = [line["loss"] for line in read_log(Path(recipe.output_dir) / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5
