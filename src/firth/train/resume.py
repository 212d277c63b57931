"""How a run goes on: with the recipe it had, on the data it had, from where it was or from further back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.core.files import MANIFEST_FILE, find_corruption, read_json
from firth.tokens import MixedShards, ShardSet
from firth.train.checkpoint import list_checkpoints, remove_folder
from firth.train.log import RunLog, read_log
from firth.train.recipe import Recipe, TrainingConfig, recipe_differences, save_recipe

ResumedRecipeT = TypeVar("ResumedRecipeT", bound=TrainingConfig)
# Fields that a run may leave open, and then fixes, or notes of itself.
RESOLVED_FIELDS = (
    "max_steps",
    "warmup_steps",
    "eval_steps",
    "shards_checksum",
    "train_checksum",
    "dev_checksum",
    "skips",
)
IMMUTABLE_FIELDS = (
    "model",
    "optim",
    "ema_decay",
    "order",
    "memory",
    "tokenizer",
)  # what a checkpoint's tensors depend on
COMPUTE_FIELDS = (
    "parallel",
    "cpu_offload",
    "device",
)  # how a step is computed, not what: each can go on from any checkpoint
BATCH_SIZE_FIELDS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "processes",
)  # whose product a run keeps
# Fields that name files and folders.
PATH_FIELDS = ("output_dir", "data", "checkpoint", "teacher", "train", "dev", "baseline")


def is_run_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has come to its last step; one that is given more steps goes on."""
    results = folder / "results.json"
    return (
        results.is_file()
        and find_corruption(folder / "final") is None
        and read_json(results)["steps"] >= recipe.max_steps
    )


def merge_recipe(
    saved: ResumedRecipeT,
    requested: ResumedRecipeT,
    allow_change: bool = False,
    immutable: Sequence[str] = IMMUTABLE_FIELDS,
) -> ResumedRecipeT:
    """The recipe that a resumed run goes on with; anything that was changed is said, and refused unless allowed.

    What is left open now is as it was settled then, and a run's folder may have been moved. The fields in `immutable`
    cannot change within a run.
    """
    asked = requested.minutes, requested.max_steps or saved.max_steps
    if allow_change and requested.minutes and asked != (saved.minutes, saved.max_steps):
        say(
            f"the run was planned as {format_count(saved.max_steps, 'step')}; --max-steps N without --minutes changes that"
        )
    settled = {
        name: getattr(saved, name) for name in RESOLVED_FIELDS if hasattr(requested, name) and is_unset(requested, name)
    }
    if requested.engine.compile_regions is None:
        settled["engine"] = replace(requested.engine, compile_regions=saved.engine.compile_regions)
    places = {name: getattr(requested, name) for name in PATH_FIELDS if is_same_path(saved, requested, name)}
    ways = {name: getattr(requested, name) for name in COMPUTE_FIELDS}
    saved, requested = (
        replace(saved, **places, **ways),
        keep_global_batch_size(saved, replace(requested, **settled), allow_change),
    )
    changed = recipe_differences(saved, requested)
    if fixed := [change for change in changed if change.split(":")[0].split(".")[0] in immutable]:
        raise UserError(
            "A resumed run keeps its recipe, and this one differs: " + "; ".join(fixed) + ". "
            "The checkpoints were made with these: leave them as they were, or start a new run."
        )
    if changed and not allow_change:
        raise UserError(
            "A resumed run keeps its recipe, and this one differs: " + "; ".join(changed) + ". "
            "Leave these options as they were, allow it with --allow-change, or start a new run."
        )
    if changed:
        say("from here on the recipe differs: " + "; ".join(changed))
    return requested


def keep_global_batch_size(saved: ResumedRecipeT, requested: ResumedRecipeT, allow_change: bool) -> ResumedRecipeT:
    """A run keeps its batch however many processes it goes on in: each then computes more of it, or less."""
    then = {name: getattr(saved, name) for name in BATCH_SIZE_FIELDS}
    same = all(getattr(requested, name) == then[name] for name in BATCH_SIZE_FIELDS[:2])
    adapted = requested.global_batch_size == saved.global_batch_size and not allow_change
    if requested.processes == saved.processes or not (same or adapted):
        return requested
    say(
        f"the run began in {format_count(saved.processes, 'process', 'processes')} and goes on in {requested.processes}: "
        f"a step still learns from {format_count(saved.global_batch_size, 'row')}"
    )
    return replace(requested, **then)


def verify_same_shards(recipe: Recipe, shards: ShardSet | MixedShards, allow_change: bool) -> Recipe:
    """Note the checksum of the shards when a run begins; when it goes on, read them whole and compare."""
    parts = shards.sources.values() if isinstance(shards, MixedShards) else [shards]
    files = [read_json(part.folder / MANIFEST_FILE)["files"] for part in parts]
    found = f"{crc32(json.dumps(files, sort_keys=True).encode()):08x}"
    if recipe.shards_checksum:
        for part in parts:
            part.verify()
    if recipe.shards_checksum not in ("", found):
        if not allow_change:
            raise UserError(
                f"{recipe.data or 'The mix'} is not what it was when this run began: its shards have changed. Put the "
                "old ones back, start a new run, or go on with the new ones by --allow-change."
            )
        say("from here on the run reads other shards than those that it began with")
    return replace(recipe, shards_checksum=found)


def rewind_run(folder: Path, recipe: Recipe, steps: int) -> Recipe:
    """Go back to the last whole checkpoint at least so many steps before the trouble, and pass over its text.

    All text from the checkpoint to there is left out, which the recipe notes: any later resume leaves it out too.
    """
    start, last = rewind_checkpoints(folder, steps)
    recipe = replace(recipe, skips=extend_skips(recipe.skips, start, last))
    save_recipe(recipe, folder / "recipe.yaml")
    truncate_log(folder, start, last)
    return recipe


def extend_skips(skips: Sequence[tuple[int, int]], start_step: int, last_step: int) -> tuple[tuple[int, int], ...]:
    """What is left out (from a step on, so many) after one more way back, from `last_step` to `start_step`.

    What an earlier way back has left out between them stays out: the text goes on after all that was read.

    >>> longer_skips([], 4, 10), longer_skips([(4, 6)], 4, 8), longer_skips([(4, 6)], 2, 8)
    (((4, 6),), ((4, 6), (4, 4)), ((2, 12),))
    """
    before = [skip for skip in skips if skip[0] <= start_step]
    between = sum(count for first, count in skips if first > start_step)
    return (*before, (start_step, last_step - start_step + between))


def rewind_checkpoints(folder: Path, steps: int) -> tuple[int, int]:
    """The step of the checkpoint that a run goes back to, and the last of its trouble; newer checkpoints are removed.

    The trouble is the steps that were skipped at the end of the log, or else the last step.
    """
    if steps < 0:
        raise UserError(f"--rewind is {steps}, and must be at least 0.")
    log = folder / "log.jsonl"
    lines = [line for line in read_log(log) if "data" in line] if log.is_file() else []
    if not lines:
        raise UserError(f"{folder} has no steps to rewind: start it without --rewind.")
    last = first = lines[-1]["step"]
    for line in reversed(lines):
        if "skipped" not in line or line["step"] < first - 1:
            break
        first = line["step"]
    found = list_checkpoints(folder)
    early = [p for p in found if int(p.name.split("-")[1]) < first - steps and find_corruption(p) is None]
    if not early:
        raise UserError(
            f"{folder} has no whole checkpoint {format_count(steps, 'step')} before step {first}. Rewind by less, or start "
            "anew (--save-total-limit keeps more of them)."
        )
    for newer in found[: found.index(early[0])]:
        remove_folder(newer)
    return int(early[0].name.split("-")[1]), last


def truncate_log(folder: Path, start_step: int, last_step: int) -> None:
    """Cut the log of a run that goes back, and note it there."""
    with RunLog(folder / "log.jsonl", start_step) as cut:
        cut.write(step=start_step, rewound_from=last_step, passed_over=last_step - start_step)
    between = format_count(last_step - start_step, "step")
    say(f"going back from step {last_step} to step {start_step}; the text of the {between} between is passed over")


def is_unset(recipe: TrainingConfig, name: str) -> bool:
    """Whether a field says nothing, and is found when a run begins."""
    if name == "max_steps":
        return bool(recipe.minutes) or not recipe.max_steps
    return getattr(recipe, name) < 0 if name == "warmup_steps" else not getattr(recipe, name)


def is_same_path(saved: TrainingConfig, requested: TrainingConfig, name: str) -> bool:
    """Whether two recipes name one file or folder, counted from the run's own folder where it lies in there."""
    if not hasattr(requested, name):
        return False

    def place(recipe: TrainingConfig) -> Path:
        path, home = Path(getattr(recipe, name)).absolute(), Path(recipe.output_dir).absolute()
        return path.relative_to(home) if path.is_relative_to(home) else path

    return bool(getattr(requested, name)) == bool(getattr(saved, name)) and place(saved) == place(requested)
