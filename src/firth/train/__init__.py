"""Training: a recipe -> a run folder with log, checkpoints and final model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firth.core.lazy import make_lazy

if TYPE_CHECKING:
    from firth.core.errors import Interrupted
    from firth.train.checkpoint import last_checkpoint
    from firth.train.compute import ComputeConfig, choose_compute
    from firth.train.folder import run_folder
    from firth.train.log import read_log, token_loss_name
    from firth.train.loop import Diverged, FitResult, fit
    from firth.train.pretrain import pretrain, pretrain_in_folder
    from firth.train.recipe import (
        Recipe,
        TrainingConfig,
        apply_overrides,
        load_recipe,
        parse_overrides,
        read_yaml_mapping,
        save_recipe,
    )
    from firth.train.step import TrainingRun

__all__ = [
    "ComputeConfig",
    "Diverged",
    "FitResult",
    "Interrupted",
    "Recipe",
    "TrainingConfig",
    "TrainingRun",
    "apply_overrides",
    "choose_compute",
    "fit",
    "last_checkpoint",
    "load_recipe",
    "parse_overrides",
    "pretrain",
    "pretrain_in_folder",
    "read_log",
    "read_yaml_mapping",
    "run_folder",
    "save_recipe",
    "token_loss_name",
]

make_lazy(__name__)
