"""Checkpoints: written whole or not at all, resumed exactly.

`checkpoint-<step>/` is a Hugging Face folder; `training/` beside the weights holds what only a resume needs.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from firth.console import warn
from firth.files import damage, read_json, whole_folder, write_json
from firth.models import Model, load_weights, read_tensors, write_model


@dataclass
class State:
    """Where a run is."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # tokens read


def save_checkpoint(
    run: Path, model: Model, optimizer: torch.optim.Optimizer, state: State, recipe: dict[str, Any], keep: int
) -> Path:
    """Write `checkpoint-<step>` and remove the oldest ones beyond `keep`."""
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
        write_json(training / "state.json", {"step": state.step, "tokens": state.tokens, "recipe": recipe})
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
    """Fill model and optimizer exactly as they were."""
    load_weights(model, read_tensors(folder), str(folder), whole=True)
    saved = load_file(folder / "training" / "optimizer.safetensors")
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for p in group["params"]:
            if f"{names[p]}/step" not in saved:  # no step has used it yet
                continue
            entries = {key: saved[f"{names[p]}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {
                k: v if k == "step" and p.device.type == "cpu" else v.to(p.device) for k, v in entries.items()
            }
    facts = read_json(folder / "training" / "state.json")
    return State(step=facts["step"], tokens=facts["tokens"])


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
