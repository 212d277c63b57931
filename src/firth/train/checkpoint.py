"""Checkpoints: written whole or not at all, resumed exactly.

`checkpoint-<step>/` is a Hugging Face folder; `training/` beside the weights holds what only a resume needs.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from firth.console import warn
from firth.errors import UserError
from firth.files import damage, read_json, whole_folder, write_json
from firth.models import Model, load_weights, read_tensors, write_model
from firth.models.lora import has_lora
from firth.models.weights import own_state

LEARNED = "learned.safetensors"
CARRY = "carry.safetensors"
AVERAGE = "average.safetensors"


@dataclass
class State:
    """Where a run is."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read
    best: float = -math.inf  # of the evaluations so far, where they are judged
    best_step: int = 0  # when that was; 0: not yet
    waited: int = 0  # evaluations since then


def save_checkpoint(
    run: Path,
    model: Model,
    optimizer: torch.optim.Optimizer,
    state: State,
    recipe: dict[str, Any],
    keep: int,
    carry: Mapping[str, torch.Tensor] | None = None,
    average: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write `checkpoint-<step>` and remove the oldest ones beyond `keep`.

    `carry` is what the next step needs of the rows of the last one, where they go on from step to step; `average` the
    running mean of the weights, where there is one.
    """
    folder = run / f"checkpoint-{state.step}"
    if folder.exists():
        if damage(folder) is None:
            return folder
        remove_folder(folder)
    with whole_folder(folder, step=state.step) as temporary:
        write_model(model, temporary)
        training = temporary / "training"
        training.mkdir()
        save_file(_optimizer_tensors(model, optimizer), training / "optimizer.safetensors")
        if has_lora(model):  # the weights above hold it already, merged, and cannot be taken apart again
            save_file(learned(model), training / LEARNED)
        for file, tensors in ((CARRY, carry), (AVERAGE, average)):
            if tensors:
                save_file({name: value.contiguous() for name, value in tensors.items()}, training / file)
        write_json(training / "state.json", {**asdict(state), "recipe": recipe})
    if keep:
        for old in list_checkpoints(run)[keep:]:
            remove_folder(old)
    return folder


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


def load_checkpoint(folder: Path, model: Model, optimizer: torch.optim.Optimizer) -> State:
    """Fill model and optimizer exactly as they were. Where LoRA learns, the rest of the model is as it began."""
    training = folder / "training"
    if has_lora(model):
        put_back(model, load_file(training / LEARNED))
    else:
        load_weights(model, read_tensors(folder), str(folder), whole=True)
    saved = load_file(training / "optimizer.safetensors")
    parameters = dict(model.named_parameters())
    for key, value in saved.items():  # none of a parameter that no step has used yet
        name, _, entry = key.rpartition("/")
        optimizer.state[parameters[name]][entry] = value.to(parameters[name].device)
    facts = read_json(training / "state.json")
    return State(**{f.name: facts[f.name] for f in fields(State) if f.name in facts})


def load_carry(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """What a checkpoint keeps of the rows of its last step, for the next one."""
    return _kept(folder, CARRY, device)


def load_average(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The running mean of the weights in a checkpoint."""
    return _kept(folder, AVERAGE, device)


def _kept(folder: Path, name: str, device: torch.device) -> dict[str, torch.Tensor]:
    file = folder / "training" / name
    return {name: value.to(device) for name, value in load_file(file).items()} if file.is_file() else {}


def learned(model: Model) -> dict[str, torch.Tensor]:
    """What training changes, by our names: all tensors, or those of LoRA and the head where the body is frozen."""
    wanted = {name for name, p in model.named_parameters() if p.requires_grad or not has_lora(model)}
    return {name: value.contiguous() for name, value in own_state(model).items() if name in wanted}


@torch.no_grad()
def put_back(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    """The same, into a model again."""
    state = own_state(model)
    for name, value in tensors.items():
        state[name].copy_(value)


def save_best(run: Path, model: Model, step: int) -> None:
    """Keep the weights of the best evaluation so far."""
    with whole_folder(run / f"best-{step}") as temporary:
        save_file(learned(model), temporary / LEARNED)


def load_best(run: Path, model: Model, step: int) -> None:
    """Take the weights of the best evaluation."""
    folder = run / f"best-{step}"
    if problem := damage(folder):
        raise UserError(f"{folder} is damaged ({problem}), and held the best weights. Start anew with --overwrite.")
    put_back(model, load_file(folder / LEARNED))


def forget_best(run: Path, but: int = 0) -> None:
    """Remove the weights of earlier bests, once a checkpoint knows the later one."""
    for folder in run.glob("best-*"):
        if folder.name != f"best-{but}":
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
