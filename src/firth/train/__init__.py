"""A recipe to a run folder."""

from firth.train.checkpoint import State, last_checkpoint
from firth.train.device import Machine, choose_machine
from firth.train.folder import run_folder
from firth.train.log import read_log
from firth.train.loop import Diverged, Interrupted, Outcome, fit
from firth.train.pretrain import finish, pretrain, pretrain_in, settle
from firth.train.recipe import Recipe, Training, load_recipe, override, parse_overrides, read_yaml, save_recipe
from firth.train.step import Run

__all__ = [
    "Diverged",
    "Interrupted",
    "Machine",
    "Outcome",
    "Recipe",
    "Run",
    "State",
    "Training",
    "choose_machine",
    "finish",
    "fit",
    "last_checkpoint",
    "load_recipe",
    "override",
    "parse_overrides",
    "pretrain",
    "pretrain_in",
    "read_log",
    "read_yaml",
    "run_folder",
    "save_recipe",
    "settle",
]
