"""Which seeds of a run are finished, diverged or can be resumed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from firth.core.console import say
from firth.core.errors import UserError
from firth.core.files import find_corruption, read_object
from firth.models import Model, read_config
from firth.tasks.recipe import FinetuneRecipe
from firth.tasks.results import DIVERGED_KEY
from firth.tasks.seed_model import has_same_labels
from firth.tokens import load_tokenizer
from firth.train import save_recipe
from firth.train.checkpoint import list_checkpoints
from firth.train.resume import extend_skips, read_results, rewind_checkpoints, truncate_log


@dataclass(frozen=True)
class SeedResults:
    """The keys of a seed's results.json that are read again."""

    allow_unknown_keys = True

    scores: dict[str, float | None]
    steps: int
    seconds: float
    examples_per_second: float | None
    best_step: int | None = None


@dataclass(frozen=True)
class DivergedResults:
    """results.json of a seed whose loss diverged."""

    allow_unknown_keys = True

    diverged: str
    steps: int
    seconds: float


def is_seed_finished(seed_folder: Path) -> bool:
    """Whether a seed has results and an intact model."""
    return (
        find_corruption(seed_folder / "final") is None
        and read_results(seed_folder / "results.json", SeedResults) is not None
    )


def has_seed_diverged(seed_folder: Path) -> bool:
    """Whether a seed ended because its loss diverged."""
    try:
        return DIVERGED_KEY in read_object(seed_folder / "results.json", DivergedResults)
    except UserError:
        return False


def clear_diverged_seeds(seed_folders: Iterable[Path]) -> None:
    """Delete the results of diverged seeds, so that they resume from their last checkpoints."""
    for seed_folder in filter(has_seed_diverged, seed_folders):
        (seed_folder / "results.json").unlink()


def report_finished_seeds(folder: Path, recipe: FinetuneRecipe, changed: bool) -> None:
    """Say that a changed recipe does not apply to finished seeds."""
    done = [f"seed-{seed}" for seed in range(recipe.seeds) if is_seed_finished(folder / f"seed-{seed}")]
    if changed and done:
        say(f"{', '.join(done)}: done already, and left as before the change.")


def rewind_seed(folder: Path, recipe: FinetuneRecipe, steps: int) -> FinetuneRecipe:
    """Rewind the unfinished seed and save the skipped examples in the recipe."""
    name = next((f"seed-{seed}" for seed in range(recipe.seeds) if not is_seed_finished(folder / f"seed-{seed}")), None)
    if name is None:
        raise UserError(f"{folder} is finished: there is nothing to rewind.")
    start, last = rewind_checkpoints(folder / name, steps)
    clear_diverged_seeds([folder / name])
    recipe = replace(recipe, skips={**recipe.skips, name: extend_skips(recipe.skips.get(name, ()), start, last)})
    save_recipe(recipe, folder / "recipe.yaml")
    truncate_log(folder / name, start, last)
    return recipe


def check_seed_resumable(seed_folder: Path, model: Model) -> None:
    """Raise if the last intact checkpoint has other labels or another tokenizer than the model."""
    checkpoint = next((folder for folder in list_checkpoints(seed_folder) if find_corruption(folder) is None), None)
    if checkpoint is None:
        return
    if not has_same_labels(read_config(checkpoint), model.config.head):
        raise UserError(f"{checkpoint} was trained with other labels than the examples have now: start a new run.")
    if model.tokenizer and load_tokenizer(checkpoint).fingerprint != model.tokenizer.fingerprint:
        raise UserError(f"{checkpoint} was trained with another tokenizer than this one: start a new run.")
