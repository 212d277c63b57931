"""Checkpoints that are whole or absent, and resume exactly.

**Exact resume** needs less than one might think. Rows, noise and dropout are functions of (seed, step, row), so no
generator state and no dataloader position is saved. A checkpoint holds

- the weights, in a Hugging Face folder that `AutoModel.from_pretrained` opens: `checkpoint-<step>/`;
- in `training/`: optimizer tensors, LoRA adapters (the model file has them merged), the average of the weights, the
  recurrent state and the guard's statistics (safetensors), and the step and counters (`state.json`). No pickle.

**Whole or absent.** A process can die at any instruction, and a disk can be full. So a checkpoint is written to a
temporary folder, every file is fsynced, a manifest with checksums is added, and the folder is renamed, which a file
system does atomically (`core/files.py`). Resume takes the newest checkpoint whose checksums match and reports a damaged
one.

Optimizer tensors are stored by parameter *name*, not by index, so they do not depend on the number of processes or on
the order of parameter groups.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from firth.core.console import warn
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, read_object, remove_path, write_json
from firth.core.serialization import from_dict
from firth.models import Model, load_weights, read_tensors, write_model
from firth.models.hf.convert import unique_state_dict
from firth.models.hf.tensors import translate_disk_errors
from firth.models.lora import has_lora
from firth.train.dtensor import copy_into, distribute_like
from firth.train.recipe import FreezeSchedule
from firth.train.unfreeze import ever_trainable

TRAINABLE_WEIGHTS_FILE = "trainable.safetensors"
RECURRENT_STATE_FILE = "recurrent_state.safetensors"
AVERAGE_FILE = "average.safetensors"
GUARD_FILE = "guard.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
WHOLE_STATES = ("step", "exp_avg_sq_row", "exp_avg_sq_col")  # of optimizers: not sharded like their parameter
# Errors of a disk that is full or read-only.
DISK_REFUSED_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass
class TrainState:
    """Progress of a run; state.json has it, with the recipe."""

    allow_unknown_keys = True

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read
    best_score: float = -math.inf  # best evaluation so far
    best_step: int = 0  # its step; 0: none yet
    evals_since_best: int = 0  # for early stopping
    data_hash: int = 0  # chained hash of all batches so far
    bad_steps: int = 0  # skipped steps in a row
    num_averaged: int = 0  # steps whose weights are in the average of the weights
    halvings: int = 0  # how often micro-batches were halved after running out of memory


class CheckpointPayload(NamedTuple):
    """Tensors of a checkpoint: the model, and training tensors by file and name."""

    model: Model
    training_tensors: dict[str, dict[str, torch.Tensor]]


def collect_payload(
    model: Model,
    optimizer: torch.optim.Optimizer,
    recurrent_state: Mapping[str, torch.Tensor],
    average: Mapping[str, torch.Tensor],
    guard: Mapping[str, torch.Tensor],
) -> CheckpointPayload:
    """Collect the tensors of a checkpoint; empty mappings write no file."""
    files: dict[str, Mapping[str, torch.Tensor]] = {OPTIMIZER_FILE: _optimizer_tensors(model, optimizer)}
    if has_lora(model):  # the model file has the adapters merged, which cannot be undone
        files[TRAINABLE_WEIGHTS_FILE] = trainable_state(model)
    files |= {
        name: tensors
        for name, tensors in ((RECURRENT_STATE_FILE, recurrent_state), (AVERAGE_FILE, average), (GUARD_FILE, guard))
        if tensors
    }
    return CheckpointPayload(
        model, {file: {k: v.detach() for k, v in tensors.items()} for file, tensors in files.items()}
    )


def save_checkpoint(
    run_dir: Path, payload: CheckpointPayload, state: TrainState, recipe: dict[str, Any], save_total_limit: int
) -> Path:
    """Write `checkpoint-<step>`, then remove checkpoints beyond `save_total_limit` and older best weights."""
    folder = run_dir / f"checkpoint-{state.step}"
    if folder.exists() and find_corruption(folder) is not None:
        remove_folder(folder)
    if not folder.exists():
        with translate_disk_errors(folder), atomic_folder(folder, step=state.step) as temporary:
            write_model(payload.model, temporary)
            training = temporary / "training"
            training.mkdir()
            for file, tensors in payload.training_tensors.items():
                save_file({name: value.contiguous() for name, value in tensors.items()}, training / file)
            write_train_state(training, state, recipe)
    prune_checkpoints(run_dir, state, save_total_limit)
    return folder


def write_train_state(folder: Path, state: TrainState, recipe: dict[str, Any]) -> None:
    """Write the progress of a run and its recipe."""
    write_json(folder / "state.json", {**asdict(state), "recipe": recipe})


def prune_checkpoints(run_dir: Path, state: TrainState, save_total_limit: int) -> None:
    """Remove the oldest checkpoints beyond `save_total_limit`, and older best weights."""
    if save_total_limit:
        for old in list_checkpoints(run_dir)[save_total_limit:]:
            remove_folder(old)
    if state.best_step:
        remove_best(run_dir, state.best_step, set(map(read_best_step, list_checkpoints(run_dir))))


def read_best_step(checkpoint: Path) -> int:
    """Best step that a checkpoint records; 0 if none, or if it is damaged."""
    try:
        return read_train_state(checkpoint).best_step
    except UserError:
        return 0


@contextmanager
def explain_disk_errors(run_dir: Path) -> Iterator[None]:
    """Add the last whole checkpoint and the way to resume to errors of a full or read-only disk."""
    try:
        with translate_disk_errors(run_dir):
            yield
    except OSError as e:
        if e.errno not in DISK_REFUSED_ERRNOS:
            raise
        safe = next((folder for folder in list_checkpoints(run_dir) if find_corruption(folder) is None), None)
        what = f"{safe} is whole" if safe else "Earlier files are intact"
        e.add_note(
            f"{what}: free disk space (or make the folder writable), then resume with the same command and --resume."
        )
        raise


def list_checkpoints(run_dir: Path) -> list[Path]:
    """List checkpoints, newest first."""
    checkpoints = [p for p in run_dir.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(checkpoints, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True)


def last_checkpoint(run_dir: Path) -> Path | None:
    """Return the newest whole checkpoint; warn about damaged ones."""
    for folder in list_checkpoints(run_dir):
        problem = find_corruption(folder)
        if problem is None:
            return folder
        warn(f"{folder} is damaged ({problem}): trying the checkpoint before it.")
    return None


def load_model_weights(folder: Path, model: Model) -> None:
    """Load the weights of a checkpoint; with LoRA the base weights are already there."""
    if has_lora(model):
        load_trainable_state(model, load_file(folder / "training" / TRAINABLE_WEIGHTS_FILE))
    else:
        load_weights(model, read_tensors(folder), str(folder), strict=True)


def load_optimizer(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> TrainState:
    """Load the optimizer state; return the progress of the run."""
    parameters = dict(model.named_parameters())
    for key, value in _load_training_tensors(
        folder, OPTIMIZER_FILE
    ).items():  # a parameter without a gradient so far has no entry
        name, _, entry = key.rpartition("/")
        p = parameters[name]
        optimizer.state[p][entry] = value.to(p.device) if entry in WHOLE_STATES else distribute_like(p, value)
    return read_train_state(folder)


def read_train_state(checkpoint: Path) -> TrainState:
    """Return the progress of a run from the state.json of a checkpoint."""
    file = checkpoint / "training" / "state.json"
    return from_dict(read_object(file), TrainState, str(file))


def load_recurrent_state(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Load the recurrent state of the last step."""
    return _load_training_tensors(folder, RECURRENT_STATE_FILE, device)


def load_average(folder: Path) -> dict[str, torch.Tensor]:
    """Load the average of the weights."""
    return _load_training_tensors(folder, AVERAGE_FILE)


def load_guard_state(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Load the guard's statistics of earlier steps."""
    return _load_training_tensors(folder, GUARD_FILE, device)


def _load_training_tensors(folder: Path, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Load a file, or the parts that several processes wrote."""
    path = folder / "training" / name
    files = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))
    return {name: value.to(device) for file in files for name, value in load_file(file).items()}


def trainable_state(model: Model) -> dict[str, torch.Tensor]:
    """Tensors that training changes, by name: all of them, or LoRA adapters and the head."""
    names = (
        ever_trainable(model, FreezeSchedule()) if has_lora(model) else {name for name, _ in model.named_parameters()}
    )
    return {name: value.contiguous() for name, value in unique_state_dict(model).items() if name in names}


@torch.no_grad()
def load_trainable_state(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors of `trainable_state` into a model, whose own may be sharded."""
    state = unique_state_dict(model)
    for name, value in tensors.items():
        copy_into(state[name], value)


def save_best(run_dir: Path, tensors: dict[str, torch.Tensor], step: int) -> None:
    """Save the weights of the best evaluation so far: the whole tensors of `trainable_state`."""
    folder = run_dir / f"best-{step}"
    if folder.exists() and find_corruption(folder) is not None:
        remove_folder(folder)
    with translate_disk_errors(run_dir), atomic_folder(folder, "weights") as temporary:
        save_file(tensors, temporary / TRAINABLE_WEIGHTS_FILE)


def load_best(run_dir: Path, model: Model, step: int) -> bool:
    """Load the weights of the best evaluation; if they are damaged, warn and keep those of the last step."""
    folder = run_dir / f"best-{step}"
    if problem := find_corruption(folder):
        warn(f"{folder} is damaged ({problem}): keeping the weights of the last step instead of the best ones.")
        return False
    load_trainable_state(model, load_file(folder / TRAINABLE_WEIGHTS_FILE))
    return True


def remove_best(run_dir: Path, before: int = 0, keep_steps: Container[int] = ()) -> None:
    """Remove best weights before a step, except those that a checkpoint refers to; 0 removes all."""
    for folder in run_dir.glob("best-*"):
        if not folder.name.removeprefix("best-").isdecimal():
            continue
        step = int(folder.name.removeprefix("best-"))
        if not before or (step < before and step not in keep_steps):
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a crash in between cannot leave half of it under its name."""
    gone = folder.with_name(f".{folder.name}.old")
    remove_path(gone)
    os.replace(folder, gone)
    remove_path(gone)


def _optimizer_tensors(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.detach().contiguous()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
