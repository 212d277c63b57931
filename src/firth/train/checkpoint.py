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

from firth.console import warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_json
from firth.models import Model, load_weights, read_tensors, write_model
from firth.models.lora import has_lora
from firth.models.weights import own_state
from firth.train.parts import like
from firth.train.unfreeze import Pace, ever_learning

LEARNED = "learned.safetensors"
CARRY = "carry.safetensors"
AVERAGE = "average.safetensors"
GUARD = "guard.safetensors"
OPTIMIZER = "optimizer.safetensors"
# What a disk says that is full, or must not be written.
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass
class State:
    """Where a run is."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read
    best: float = -math.inf  # of the evaluations so far, where they are judged
    best_step: int = 0  # when that was; 0: not yet
    waited: int = 0  # evaluations since then
    data: int = 0  # a hash of every batch so far, each chained to the one before
    bad_steps: int = 0  # how many steps were skipped in a row
    halvings: int = 0  # how often micro-batches were halved, as memory was short


class Kept(NamedTuple):
    """The tensors of a run: its model, and what else a resume needs, by file and name."""

    model: Model
    training: dict[str, dict[str, torch.Tensor]]


def to_keep(
    model: Model,
    optimizer: torch.optim.Optimizer,
    carry: Mapping[str, torch.Tensor],
    average: Mapping[str, torch.Tensor],
    guard: Mapping[str, torch.Tensor],
) -> Kept:
    """What a checkpoint keeps of a run.

    `carry` is what the next step needs of the rows of the last one, where they go on from step to step; `average` the
    running mean of the weights, where there is one; `guard` what is known of the steps so far.
    """
    files: dict[str, Mapping[str, torch.Tensor]] = {OPTIMIZER: _optimizer_tensors(model, optimizer)}
    if has_lora(model):  # the weights of the folder hold it already, merged, and cannot be taken apart again
        files[LEARNED] = learned(model)
    files |= {name: some for name, some in ((CARRY, carry), (AVERAGE, average), (GUARD, guard)) if some}
    return Kept(model, {file: {k: v.detach() for k, v in tensors.items()} for file, tensors in files.items()})


def save_checkpoint(run: Path, kept: Kept, state: State, recipe: dict[str, Any], keep: int) -> Path:
    """Write `checkpoint-<step>`, and remove the oldest ones beyond `keep` and the weights of earlier bests."""
    folder = run / f"checkpoint-{state.step}"
    if folder.exists() and damage(folder) is not None:
        remove_folder(folder)
    if not folder.exists():
        with disk_errors(folder), whole_folder(folder, step=state.step) as temporary:
            write_model(kept.model, temporary)
            training = temporary / "training"
            training.mkdir()
            for file, tensors in kept.training.items():
                save_file({name: value.contiguous() for name, value in tensors.items()}, training / file)
            write_state(training, state, recipe)
    tidy(run, state, keep)
    return folder


def write_state(training: Path, state: State, recipe: dict[str, Any]) -> None:
    """Where a run is, and what it is."""
    write_json(training / "state.json", {**asdict(state), "recipe": recipe})


def tidy(run: Path, state: State, keep: int) -> None:
    """Remove the oldest checkpoints beyond `keep`, and the weights of earlier bests."""
    if keep:
        for old in list_checkpoints(run)[keep:]:
            remove_folder(old)
    if state.best_step:
        forget_best(run, state.best_step, set(map(best_known, list_checkpoints(run))))


def best_known(checkpoint: Path) -> int:
    """The best step so far, as a checkpoint knows it; 0 where it knows none, or is damaged."""
    try:
        return int(read_json(checkpoint / "training" / "state.json")["best_step"])
    except (UserError, KeyError, TypeError):
        return 0


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Let what safetensors says of a disk be the error that Python has for it."""
    try:
        yield
    except SafetensorError as e:
        number = re.search(r"os error (\d+)", str(e))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


@contextmanager
def last_writes(run: Path) -> Iterator[None]:
    """What a run writes at its end: where a disk does not take it, the error says what is safe, and how to go on."""
    try:
        with disk_errors(run):
            yield
    except OSError as e:
        if e.errno not in REFUSED:
            raise
        safe = next((folder for folder in list_checkpoints(run) if damage(folder) is None), None)
        what = f"{safe} is whole" if safe else "What was whole before is whole still"
        e.add_note(f"{what}: make room (or let it be written), and the same command with --resume goes on from there.")
        raise


def list_checkpoints(run: Path) -> list[Path]:
    """The newest first."""
    found = [p for p in run.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("checkpoint-")), reverse=True)


def last_checkpoint(run: Path) -> Path | None:
    """The newest whole one; damaged ones are said and passed over."""
    for folder in list_checkpoints(run):
        problem = damage(folder)
        if problem is None:
            return folder
        warn(f"{folder} is damaged ({problem}): going back to the one before.")
    return None


def load_model_weights(folder: Path, model: Model) -> None:
    """Fill a model exactly as it was. Where LoRA learns, the rest of the model is as it began."""
    if has_lora(model):
        put_back(model, load_file(folder / "training" / LEARNED))
    else:
        load_weights(model, read_tensors(folder), str(folder), whole=True)


def load_optimizer(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> State:
    """The same for the optimizer; and where the run was."""
    parameters = dict(model.named_parameters())
    for key, value in _kept(folder, OPTIMIZER).items():  # none of a parameter that no step has used yet
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = like(parameters[name], value)
    facts = read_json(folder / "training" / "state.json")
    return State(**{f.name: facts[f.name] for f in fields(State) if f.name in facts})


def load_carry(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of the rows of its last step, for the next one."""
    return _kept(folder, CARRY, device)


def load_average(folder: Path) -> dict[str, torch.Tensor]:
    """The running mean of the weights in a checkpoint."""
    return _kept(folder, AVERAGE)


def load_guard(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What a checkpoint knows of the steps before it."""
    return _kept(folder, GUARD, device)


def _kept(folder: Path, name: str, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """The tensors of a file, or of the parts that several processes wrote of it."""
    path = folder / "training" / name
    files = [path] if path.is_file() else sorted(path.parent.glob(f"{path.stem}-*-of-*{path.suffix}"))
    return {name: value.to(device) for file in files for name, value in load_file(file).items()}


def learned(model: Model) -> dict[str, torch.Tensor]:
    """What training changes at some time, by our names: all tensors, or those of LoRA and the head beside it."""
    wanted = ever_learning(model, Pace()) if has_lora(model) else {name for name, _ in model.named_parameters()}
    return {name: value.contiguous() for name, value in own_state(model).items() if name in wanted}


@torch.no_grad()
def put_back(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """The same, into a model again."""
    state = own_state(model)
    for name, value in tensors.items():
        state[name].copy_(value)


def save_best(run: Path, model: Model, step: int) -> None:
    """Keep the weights of the best evaluation so far."""
    folder = run / f"best-{step}"
    if folder.exists() and damage(folder) is not None:
        remove_folder(folder)
    with disk_errors(run), whole_folder(folder) as temporary:
        save_file(learned(model), temporary / LEARNED)


def load_best(run: Path, model: Model, step: int) -> bool:
    """Take the weights of the best evaluation; where they are damaged, those of the last step stay, which is said."""
    folder = run / f"best-{step}"
    if problem := damage(folder):
        warn(f"{folder} is damaged ({problem}), and held the best weights: those of the last step are taken.")
        return False
    put_back(model, load_file(folder / LEARNED))
    return True


def forget_best(run: Path, before: int = 0, but: Container[int] = ()) -> None:
    """Remove the weights of bests before this one, but for those that some checkpoint goes back to; 0 removes all."""
    for folder in run.glob("best-*"):
        step = int(folder.name.removeprefix("best-"))
        if not before or (step < before and step not in but):
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
