"""Exact resume, and rewind.

A resumed run continues as if it had never stopped: on a CPU its log and final weights are equal bit for bit. That needs
the same recipe, the same data and the complete state.

- Recipe: `recipe.yaml` holds every resolved setting. `merge_recipe` compares it with the requested one and refuses
  differences unless `--allow-change`. Settings that the checkpoint's tensors depend on can never change.
- Data: batches are a pure function of (shards, seed, step), so there is no reader position to restore.
  `verify_same_shards` compares checksums, because other shards would silently give other batches.
- State: weights, optimizer, recurrent state, average and guard come from the last intact checkpoint (`loop.py`).

Rewind (`--resume --rewind N`) is the remedy for divergence that PaLM used (Chowdhery et al. 2022, section 5.1): restart
from a checkpoint before the spike and skip the batches between. `rewind_run` removes the newer checkpoints and adds the
skipped span to `Recipe.skips`. From that step on, the dataloader reads later batches, in this and any further resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from firth.core.console import format_count, say, warn
from firth.core.errors import UserError
from firth.core.files import MANIFEST_FILE, find_corruption, read_object, write_json
from firth.core.serialization import from_dict
from firth.tokens import MixedShards, ShardSet
from firth.train.checkpoint import list_checkpoints, remove_folder
from firth.train.log import RunLog, read_log
from firth.train.recipe import Recipe, TrainingConfig, recipe_differences, save_recipe
from firth.train.tracking import TRACKER_FILE

ResumedRecipeT = TypeVar("ResumedRecipeT", bound=TrainingConfig)
DataclassT = TypeVar("DataclassT")
CONTENT_CHECKSUM_KEY = "content_sha256"  # of intermediate results
# Fields that a run resolves or records itself: unset ones take the saved value on resume.
RESOLVED_FIELDS = (
    "max_steps",
    "warmup_steps",
    "eval_steps",
    "threads",
    "global_batch_tokens",
    "shards_checksum",
    "train_checksum",
    "dev_checksum",
    "skips",
)
# Fields that decide which tensors a checkpoint holds: they cannot change within a run.
IMMUTABLE_FIELDS = ("model", "optim", "ema_decay", "tail_average", "order", "memory", "tokenizer")
# Fields that decide where a step is computed and shown: they may change, as checkpoints do not depend on them.
COMPUTE_FIELDS = ("parallel", "shard_size", "cpu_offload", "device", "report_to", "push_to_hub", "public", "samples")
# Fields whose product is the global batch size, which a run keeps.
BATCH_SIZE_FIELDS = ("per_device_train_batch_size", "gradient_accumulation_steps", "processes")
# Fields that name files and folders: the run folder may have moved.
PATH_FIELDS = ("output_dir", "data", "checkpoint", "teacher", "train", "dev", "baseline")


@dataclass(frozen=True)
class FinishedRun:
    """The key of results.json that tells whether a run is finished."""

    allow_unknown_keys = True

    steps: int


def is_run_finished(folder: Path, recipe: Recipe) -> bool:
    """Whether a run has reached its last step. A finished run with a higher `max_steps` continues."""
    if find_corruption(folder / "final") is not None:
        return False
    results = read_results(folder / "results.json", FinishedRun)
    return results is not None and results["steps"] >= recipe.max_steps


def read_results(file: Path, schema: type | None = None) -> dict[str, Any] | None:
    """Return the results of a finished run; None without them or, with a warning, where they are damaged."""
    try:
        return read_object(file, schema) if file.is_file() else None
    except UserError as e:
        warn(f"{e} The results are computed again from the last checkpoint.")
        return None


def write_intermediate(file: Path, value: Mapping[str, Any]) -> None:
    """Write what a resumed run shall not compute again, with a checksum: a wrong digit would be trained on."""
    write_json(file, {**value, CONTENT_CHECKSUM_KEY: checksum_content(value)})


def read_intermediate(file: Path, dataclass_type: type[DataclassT]) -> DataclassT | None:
    """Return what `write_intermediate` wrote; None without it or, with a warning, where the file is damaged."""
    if not file.is_file():
        return None
    try:
        stored = read_object(file)
        if stored.pop(CONTENT_CHECKSUM_KEY, None) != checksum_content(stored):
            raise UserError(f"{file} does not match its checksum.")
        return from_dict(stored, dataclass_type, str(file), is_yaml=False)
    except UserError as e:
        warn(f"{e} It is not used.")
        return None


def checksum_content(value: Mapping[str, Any]) -> str:
    """Return a checksum of a JSON object; tuples count as lists."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def merge_recipe(
    saved: ResumedRecipeT,
    requested: ResumedRecipeT,
    allow_change: bool = False,
    immutable: Sequence[str] = IMMUTABLE_FIELDS,
) -> ResumedRecipeT:
    """Return the recipe of a resumed run: `requested`, with its unset fields taken from `saved`.

    Raise UserError on a difference, unless `allow_change`; a difference in an `immutable` field is always refused.
    """
    schedule = requested.minutes, requested.max_steps or saved.max_steps
    if allow_change and requested.minutes and schedule != (saved.minutes, saved.max_steps):
        say(f"the run keeps its {format_count(saved.max_steps, 'step')}; --max-steps N without --minutes changes that")
    resolved = {
        name: getattr(saved, name) for name in RESOLVED_FIELDS if hasattr(requested, name) and is_unset(requested, name)
    }
    if not requested.per_device_train_batch_size and requested_batch(requested) in (0, requested_batch(saved)):
        # sums of another split are rounded differently
        resolved |= {name: getattr(saved, name) for name in BATCH_SIZE_FIELDS[:2]}
    if requested.engine.compile_regions is None:
        resolved["engine"] = replace(requested.engine, compile_regions=saved.engine.compile_regions)
    paths = {name: getattr(requested, name) for name in PATH_FIELDS if is_same_path(saved, requested, name)}
    compute = {name: getattr(requested, name) for name in COMPUTE_FIELDS if hasattr(requested, name)}
    saved, requested = (
        replace(saved, **paths, **compute),
        keep_global_batch_size(saved, replace(requested, **resolved), allow_change),
    )
    changed = recipe_differences(saved, requested)
    if fixed := [change for change in changed if change.split(":")[0].split(".")[0] in immutable]:
        raise UserError(
            "Cannot resume: these settings differ from the saved recipe: " + "; ".join(fixed) + ". "
            "The checkpoints depend on them: restore the saved values, or start a new run."
        )
    if changed and not allow_change:
        raise UserError(
            "Cannot resume: these settings differ from the saved recipe: " + "; ".join(changed) + ". "
            "Restore the saved values, accept the change with --allow-change, or start a new run."
        )
    if changed:
        say("from here on the recipe differs: " + "; ".join(changed))
    return requested


def requested_batch(recipe: TrainingConfig) -> int:
    """Return the global batch in tokens; 0 if it is to be chosen, or set by its rows."""
    return getattr(recipe, "global_batch_tokens", 0)


def keep_global_batch_size(saved: ResumedRecipeT, requested: ResumedRecipeT, allow_change: bool) -> ResumedRecipeT:
    """Keep the global batch size when the number of processes or the micro-batch changes.

    Each process computes more or fewer rows; another micro-batch is accumulated more or less often.
    """
    rows, same_tokens = requested.per_device_train_batch_size, 0 < requested_batch(requested) == requested_batch(saved)
    if same_tokens and rows == saved.per_device_train_batch_size and requested.gradient_accumulation_steps == 1:
        requested = replace(requested, gradient_accumulation_steps=saved.gradient_accumulation_steps)
    elif same_tokens and rows != saved.per_device_train_batch_size:
        device_rows = saved.global_batch_size // requested.processes
        if device_rows % rows:
            raise UserError(
                f"The run's global batch is {format_count(saved.global_batch_size, 'row')}, which "
                f"per_device_train_batch_size={rows} does not divide. Choose a number that does, or leave it out."
            )
        requested = replace(requested, gradient_accumulation_steps=device_rows // rows)
    saved_sizes = {name: getattr(saved, name) for name in BATCH_SIZE_FIELDS}
    same = all(getattr(requested, name) == saved_sizes[name] for name in BATCH_SIZE_FIELDS[:2])
    adapted = requested.global_batch_size == saved.global_batch_size and not allow_change
    if requested.processes == saved.processes or not (same or adapted):
        return requested
    say(
        f"the run started with {format_count(saved.processes, 'process', 'processes')} and resumes with "
        f"{requested.processes}: the global batch stays {format_count(saved.global_batch_size, 'row')}"
    )
    return replace(requested, **saved_sizes)


def verify_same_shards(recipe: Recipe, shards: ShardSet | MixedShards, allow_change: bool) -> Recipe:
    """Record the shards' checksum in a new run's recipe; on resume compare it. Opening has verified the files."""
    parts = shards.sources.values() if isinstance(shards, MixedShards) else [shards]
    files = [read_object(part.folder / MANIFEST_FILE)["files"] for part in parts]
    checksum = f"{crc32(json.dumps(files, sort_keys=True).encode()):08x}"
    if recipe.shards_checksum not in ("", checksum):
        if not allow_change:
            raise UserError(
                f"{recipe.data or 'The mix'} is not what it was when this run began: its shards have changed. "
                "Restore the old shards, start a new run, or accept the new ones with --allow-change."
            )
        say("from here on the run reads other shards than at its start")
    return replace(recipe, shards_checksum=checksum)


def rewind_run(folder: Path, recipe: Recipe, steps: int) -> Recipe:
    """Go back to the last intact checkpoint at least `steps` steps before the first bad step; return the new recipe.

    The recipe records the batches from the checkpoint to the last bad step as skipped, for all later resumes.
    """
    start, last = rewind_checkpoints(folder, steps)
    recipe = replace(recipe, skips=extend_skips(recipe.skips, start, last))
    save_recipe(recipe, folder / "recipe.yaml")
    truncate_log(folder, start, last)
    return recipe


def extend_skips(skips: Sequence[tuple[int, int]], start_step: int, last_step: int) -> tuple[tuple[int, int], ...]:
    """Return the skips, each (first step, number of steps), after a rewind from `last_step` to `start_step`.

    Batches that an earlier rewind skipped in this span stay skipped: no batch is read twice.

    >>> extend_skips([], 4, 10), extend_skips([(4, 6)], 4, 8), extend_skips([(4, 6)], 2, 8)
    (((4, 6),), ((4, 6), (4, 4)), ((2, 12),))
    """
    kept_skips = [skip for skip in skips if skip[0] <= start_step]
    num_skipped = sum(count for first, count in skips if first > start_step)
    return (*kept_skips, (start_step, last_step - start_step + num_skipped))


def rewind_checkpoints(folder: Path, steps: int) -> tuple[int, int]:
    """Return the step of the checkpoint to restart from and the last bad step; remove the newer checkpoints.

    The bad steps are the skipped ones at the end of the log, or else the last step.
    """
    if steps < 0:
        raise UserError(f"--rewind is {steps}, and must be at least 0.")
    log = folder / "log.jsonl"
    lines = [line for line in read_log(log) if "data" in line] if log.is_file() else []
    if not lines:
        raise UserError(f"{folder} has no logged steps to rewind: start it without --rewind.")
    last = first = lines[-1]["step"]
    for line in reversed(lines):
        if "skipped" not in line or line["step"] < first - 1:
            break
        first = line["step"]
    checkpoints = list_checkpoints(folder)
    candidates = [p for p in checkpoints if int(p.name.split("-")[1]) < first - steps and find_corruption(p) is None]
    if not candidates:
        raise UserError(
            f"{folder} has no intact checkpoint {format_count(steps, 'step')} before step {first}. Use a smaller "
            "--rewind, or start a new run with a higher --save-total-limit."
        )
    for newer in checkpoints[: checkpoints.index(candidates[0])]:
        remove_folder(newer)
    return int(candidates[0].name.split("-")[1]), last


def truncate_log(folder: Path, start_step: int, last_step: int) -> None:
    """Cut the log back to `start_step` and record the rewind in it. A tracker, which cannot go back, starts anew."""
    (folder / TRACKER_FILE).unlink(missing_ok=True)
    with RunLog(folder / "log.jsonl", start_step) as run_log:
        run_log.write(step=start_step, rewound_from=last_step, passed_over=last_step - start_step)
    skipped = format_count(last_step - start_step, "step")
    say(f"rewinding from step {last_step} to step {start_step}; the batches of {skipped} are skipped")


def is_unset(recipe: TrainingConfig, name: str) -> bool:
    """Whether a field is left for the run to resolve."""
    if name == "max_steps":
        return bool(recipe.minutes) or not recipe.max_steps
    return getattr(recipe, name) < 0 if name == "warmup_steps" else not getattr(recipe, name)


def is_same_path(saved: TrainingConfig, requested: TrainingConfig, name: str) -> bool:
    """Whether two recipes name the same path; a path inside the run folder is compared relative to it."""
    if not hasattr(requested, name):
        return False

    def resolved_path(recipe: TrainingConfig) -> Path:
        path, home = Path(getattr(recipe, name)).absolute(), Path(recipe.output_dir).absolute()
        return path.relative_to(home) if path.is_relative_to(home) else path

    return bool(getattr(requested, name)) == bool(getattr(saved, name)) and resolved_path(saved) == resolved_path(
        requested
    )
