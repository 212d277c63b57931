"""How a run goes on: with the recipe it had, on the data it had, from where it was or from further back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from firth.console import count, say
from firth.errors import UserError
from firth.files import MANIFEST, damage, read_json
from firth.tokens import MixedShards, Prepared
from firth.train.checkpoint import list_checkpoints, remove_folder
from firth.train.log import Log, read_log
from firth.train.recipe import Recipe, Training, differences, save_recipe

R = TypeVar("R", bound=Training)
# Fields that a run may leave open, and then fixes, or notes of itself.
SETTLED = (
    *("max_steps", "warmup_steps", "eval_steps", "shards_checksum", "train_checksum", "dev_checksum", "skips"),
    "compile_parts",
)
FIXED = ("model", "optim", "ema_decay", "order", "memory", "tokenizer")  # what a checkpoint's tensors depend on
WAYS = ("parallel", "cpu_offload", "device")  # how a step is computed, not what: each can go on from any checkpoint
BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "processes")  # whose product a run keeps
# Fields that name files and folders.
PLACES = ("output_dir", "data", "checkpoint", "teacher", "train", "dev", "baseline")


def is_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has come to its last step; one that is given more steps goes on."""
    results = folder / "results.json"
    return results.is_file() and damage(folder / "final") is None and read_json(results)["steps"] >= recipe.max_steps


def same_recipe(earlier: R, now: R, allow_change: bool = False, never: Sequence[str] = FIXED) -> R:
    """The recipe that a resumed run goes on with; anything that was changed is said, and refused unless allowed.

    What is left open now is as it was settled then, and a run's folder may have been moved. The fields in `never`
    cannot change within a run.
    """
    asked = now.minutes, now.max_steps or earlier.max_steps
    if allow_change and now.minutes and asked != (earlier.minutes, earlier.max_steps):
        say(f"the run was planned as {count(earlier.max_steps, 'step')}; --max-steps N without --minutes changes that")
    settled = {name: getattr(earlier, name) for name in SETTLED if hasattr(now, name) and left_open(now, name)}
    places = {name: getattr(now, name) for name in PLACES if same_place(earlier, now, name)}
    ways = {name: getattr(now, name) for name in WAYS}
    earlier, now = replace(earlier, **places, **ways), same_batch(earlier, replace(now, **settled), allow_change)
    changed = differences(earlier, now)
    if fixed := [change for change in changed if change.split(":")[0].split(".")[0] in never]:
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
    return now


def same_batch(earlier: R, now: R, allow_change: bool) -> R:
    """A run keeps its batch however many processes it goes on in: each then computes more of it, or less."""
    then = {name: getattr(earlier, name) for name in BATCH}
    same = all(getattr(now, name) == then[name] for name in BATCH[:2])
    adapted = now.global_batch == earlier.global_batch and not allow_change
    if now.processes == earlier.processes or not (same or adapted):
        return now
    say(
        f"the run began in {count(earlier.processes, 'process', 'processes')} and goes on in {now.processes}: "
        f"a step still learns from {count(earlier.global_batch, 'row')}"
    )
    return replace(now, **then)


def same_shards(recipe: Recipe, shards: Prepared | MixedShards, allow_change: bool) -> Recipe:
    """Note the checksum of the shards when a run begins; when it goes on, read them whole and compare."""
    parts = shards.parts.values() if isinstance(shards, MixedShards) else [shards]
    files = [read_json(part.folder / MANIFEST)["files"] for part in parts]
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


def go_back(folder: Path, recipe: Recipe, steps: int) -> Recipe:
    """Go back to the last whole checkpoint at least so many steps before the trouble, and pass over its text.

    All text from the checkpoint to there is left out, which the recipe notes: any later resume leaves it out too.
    """
    start, last = turn_back(folder, steps)
    recipe = replace(recipe, skips=longer_skips(recipe.skips, start, last))
    save_recipe(recipe, folder / "recipe.yaml")
    pass_over(folder, start, last)
    return recipe


def longer_skips(skips: Sequence[tuple[int, int]], start: int, last: int) -> tuple[tuple[int, int], ...]:
    """What is left out (from a step on, so many) after one more way back, from `last` to `start`.

    What an earlier way back has left out between them stays out: the text goes on after all that was read.

    >>> longer_skips([], 4, 10), longer_skips([(4, 6)], 4, 8), longer_skips([(4, 6)], 2, 8)
    (((4, 6),), ((4, 6), (4, 4)), ((2, 12),))
    """
    before = [skip for skip in skips if skip[0] <= start]
    between = sum(count for first, count in skips if first > start)
    return (*before, (start, last - start + between))


def turn_back(folder: Path, steps: int) -> tuple[int, int]:
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
    early = [p for p in found if int(p.name.split("-")[1]) < first - steps and damage(p) is None]
    if not early:
        raise UserError(
            f"{folder} has no whole checkpoint {count(steps, 'step')} before step {first}. Rewind by less, or start "
            "anew (--save-total-limit keeps more of them)."
        )
    for newer in found[: found.index(early[0])]:
        remove_folder(newer)
    return int(early[0].name.split("-")[1]), last


def pass_over(folder: Path, start: int, last: int) -> None:
    """Cut the log of a run that goes back, and note it there."""
    with Log(folder / "log.jsonl", start) as cut:
        cut.write(step=start, rewound_from=last, passed_over=last - start)
    between = count(last - start, "step")
    say(f"going back from step {last} to step {start}; the text of the {between} between is passed over")


def left_open(recipe: Training, name: str) -> bool:
    """Whether a field says nothing, and is found when a run begins."""
    if name == "max_steps":
        return bool(recipe.minutes) or not recipe.max_steps
    if name == "compile_parts":
        return recipe.compile_parts is None
    return getattr(recipe, name) < 0 if name == "warmup_steps" else not getattr(recipe, name)


def same_place(earlier: Training, now: Training, name: str) -> bool:
    """Whether two recipes name one file or folder, counted from the run's own folder where it lies in there."""
    if not hasattr(now, name):
        return False

    def place(recipe: Training) -> Path:
        path, home = Path(getattr(recipe, name)).absolute(), Path(recipe.output_dir).absolute()
        return path.relative_to(home) if path.is_relative_to(home) else path

    return bool(getattr(now, name)) == bool(getattr(earlier, name)) and place(earlier) == place(now)
