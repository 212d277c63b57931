"""Checkpoints: written whole or not at all, resumed exactly.

`checkpoint-<step>/` is a Hugging Face folder; `training/` beside the weights holds what only a resume needs.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from firth.core.console import warn
from firth.core.errors import UserError
from firth.core.files import atomic_folder, find_corruption, read_json, write_json
from firth.models import Model, load_weights, read_tensors, write_model
from firth.models.hf.convert import unique_state_dict
from firth.models.lora import has_lora
from firth.train.dtensor import distribute_like
from firth.train.unfreeze import FreezeSchedule, ever_trainable

TRAINABLE_WEIGHTS_FILE = "learned.safetensors"
RECURRENT_STATE_FILE = "carry.safetensors"
EMA_FILE = "average.safetensors"
GUARD_FILE = "guard.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
# What a disk says that is full, or must not be written.
DISK_REFUSED_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass
class TrainState:
    """Where a run is."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read
    best_score: float = -math.inf  # of the evaluations so far, where they are judged
    best_step: int = 0  # when that was; 0: not yet
    evals_since_best: int = 0  # evaluations since then
    data_hash: int = 0  # a hash of every batch so far, each chained to the one before
    bad_steps: int = 0  # how many steps were skipped in a row
    halvings: int = 0  # how often micro-batches were halved, as memory was short


class CheckpointPayload(NamedTuple):
    """The tensors of a run: its model, and what else a resume needs, by file and name."""

    model: Model
    training_tensors: dict[str, dict[str, torch.Tensor]]


def collect_payload(
    model: Model,
    optimizer: torch.optim.Optimizer,
    recurrent_state: Mapping[str, torch.Tensor],
    ema: Mapping[str, torch.Tensor],
    guard: Mapping[str, torch.Tensor],
) -> CheckpointPayload:
    """What a checkpoint keeps of a run.

    `recurrent_state` is what the next step needs of the rows of the last one, where they go on from step to step; `ema` the
    running mean of the weights, where there is one; `guard` what is known of the steps so far.
    """
    files: dict[str, Mapping[str, torch.Tensor]] = {OPTIMIZER_FILE: _optimizer_tensors(model, optimizer)}
    if has_lora(model):  # the weights of the folder hold it already, merged, and cannot be taken apart again
        files[TRAINABLE_WEIGHTS_FILE] = trainable_state(model)
    files |= {
        name: some
        for name, some in ((RECURRENT_STATE_FILE, recurrent_state), (EMA_FILE, ema), (GUARD_FILE, guard))
        if some
    }
    return CheckpointPayload(
        model, {file: {k: v.detach() for k, v in tensors.items()} for file, tensors in files.items()}
    )


def save_checkpoint(
    run_dir: Path, payload: CheckpointPayload, state: TrainState, recipe: dict[str, Any], save_total_limit: int
) -> Path:
    """Write `checkpoint-<step>`, and remove the oldest ones beyond `save_total_limit` and the weights of earlier bests."""
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
    """Where a run is, and what it is."""
    write_json(folder / "state.json", {**asdict(state), "recipe": recipe})


def prune_checkpoints(run_dir: Path, state: TrainState, save_total_limit: int) -> None:
    """Remove the oldest checkpoints beyond `save_total_limit`, and the weights of earlier bests."""
    if save_total_limit:
        for old in list_checkpoints(run_dir)[save_total_limit:]:
            remove_folder(old)
    if state.best_step:
        remove_best(run_dir, state.best_step, set(map(read_best_step, list_checkpoints(run_dir))))


def read_best_step(checkpoint: Path) -> int:
    """The best step so far, as a checkpoint knows it; 0 where it knows none, or is damaged."""
    try:
        return int(read_json(checkpoint / "training" / "state.json")["best_step"])
    except (UserError, KeyError, TypeError):
        return 0


@contextmanager
def translate_disk_errors(path: Path) -> Iterator[None]:
    """Let what safetensors says of a disk be the error that Python has for it."""
    try:
        yield
    except SafetensorError as e:
        number = re.search(r"os error (\d+)", str(e))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


@contextmanager
def explain_disk_errors(run_dir: Path) -> Iterator[None]:
    """What a run writes at its end: where a disk does not take it, the error says what is safe, and how to go on."""
    try:
        with translate_disk_errors(run_dir):
            yield
    except OSError as e:
        if e.errno not in DISK_REFUSED_ERRNOS:
            raise
        safe = next((folder for folder in list_checkpoints(run_dir) if find_corruption(folder) is None), None)
        what = f"{safe} is whole" if safe else "What was whole before is whole still"
        e.add_note(f"{what}: make room (or let it be written), and the same command with --resume goes on from there.")
        raise


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The newest first."""
    found = [p for p in run_dir.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True)


def last_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole one; damaged ones are said and passed over."""
    for folder in list_checkpoints(run_dir):
        problem = find_corruption(folder)
        if problem is None:
            return folder
        warn(f"{folder} is damaged ({problem}): going back to the one before.")
    return None


def load_model_weights(folder: Path, model: Model) -> None:
    """Fill a model exactly as it was. Where LoRA learns, the rest of the model is as it began."""
    if has_lora(model):
        load_trainable_state(model, load_file(folder / "training" / TRAINABLE_WEIGHTS_FILE))
    else:
        load_weights(model, read_tensors(folder), str(folder), strict=True)


def load_optimizer(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> TrainState:
    """The same for the optimizer; and where the run was."""
    parameters = dict(model.named_parameters())
    for key, value in _load_training_tensors(
        folder, OPTIMIZER_FILE
    ).items():  # none of a parameter that no step has used yet
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = distribute_like(parameters[name], value)
    facts = read_json(folder / "training" / "state.json")
    return TrainState(**{f.name: facts[f.name] for f in fields(TrainState) if f.name in facts})


def load_recurrent_state(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of the rows of its last step, for the next one."""
    return _load_training_tensors(folder, RECURRENT_STATE_FILE, device)


def load_ema(folder: Path) -> dict[str, torch.Tensor]:
    """The running mean of the weights in a checkpoint."""
    return _load_training_tensors(folder, EMA_FILE)


def load_guard_state(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What a checkpoint knows of the steps before it."""
    return _load_training_tensors(folder, GUARD_FILE, device)


def _load_training_tensors(folder: Path, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a file, or of the parts that several processes wrote of it."""
    path = folder / "training" / name
    files = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))
    return {name: value.to(device) for file in files for name, value in load_file(file).items()}


def trainable_state(model: Model) -> dict[str, torch.Tensor]:
    """What training changes at some time, by our names: all tensors, or those of LoRA and the head beside it."""
    wanted = (
        ever_trainable(model, FreezeSchedule()) if has_lora(model) else {name for name, _ in model.named_parameters()}
    )
    return {name: value.contiguous() for name, value in unique_state_dict(model).items() if name in wanted}


@torch.no_grad()
def load_trainable_state(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """The same, into a model again."""
    state = unique_state_dict(model)
    for name, value in tensors.items():
        state[name].copy_(value)


def save_best(run_dir: Path, model: Model, step: int) -> None:
    """Keep the weights of the best evaluation so far."""
    folder = run_dir / f"best-{step}"
    if folder.exists() and find_corruption(folder) is not None:
        remove_folder(folder)
    with translate_disk_errors(run_dir), atomic_folder(folder) as temporary:
        save_file(trainable_state(model), temporary / TRAINABLE_WEIGHTS_FILE)


def load_best(run_dir: Path, model: Model, step: int) -> bool:
    """Take the weights of the best evaluation; where they are damaged, those of the last step stay, which is said."""
    folder = run_dir / f"best-{step}"
    if problem := find_corruption(folder):
        warn(f"{folder} is damaged ({problem}), and held the best weights: those of the last step are taken.")
        return False
    load_trainable_state(model, load_file(folder / TRAINABLE_WEIGHTS_FILE))
    return True


def remove_best(run_dir: Path, before: int = 0, keep_steps: Container[int] = ()) -> None:
    """Remove the weights of bests before this one, but for those that some checkpoint goes back to; 0 removes all."""
    for folder in run_dir.glob("best-*"):
        step = int(folder.name.removeprefix("best-"))
        if not before or (step < before and step not in keep_steps):
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that a crash in between cannot leave half of it under its name."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _optimizer_tensors(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value.detach().contiguous()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
