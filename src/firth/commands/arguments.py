"""Arguments that several commands share: the name of a model or objective, changes of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firth.core.errors import UserError, did_you_mean, quote
from firth.core.files import read_json
from firth.core.serialization import TYPE_KEY, to_dict
from firth.models import (
    ARCHITECTURE_FAMILIES,
    ModelConfig,
    from_hf_config,
    get_preset,
    is_preset,
    read_config,
    shaped_model,
)
from firth.objectives import OBJECTIVES
from firth.train.recipe import read_yaml_mapping


def is_architecture(model: str | Path) -> bool:
    """Whether MODEL is an architecture, whose size is planned; a checkpoint folder of that name comes first."""
    return str(model) in ARCHITECTURE_FAMILIES and not (Path(model) / "config.json").is_file()


def resolve_model(name: str | Path) -> tuple[ModelConfig, Path | None]:
    """Config of a preset, config file or checkpoint folder, and the folder of its weights.

    An architecture has the config of its smallest model.
    """
    path = Path(name)
    if is_architecture(name):
        return shaped_model(str(name), 2, 64), None
    if path.is_dir() and ((path / "config.json").is_file() or not is_preset(str(name))):
        return read_config(path), path
    if path.is_file():
        return from_hf_config(read_json(path), str(path)), None
    if len(path.parts) > 1:
        raise UserError(
            f"{name}: no such file or folder. Name a checkpoint, a config.json or a preset (`firth models`)."
        )
    return get_preset(str(name)), None


def objective_fields(name: str | None) -> dict[str, Any] | None:
    """The fields of a named objective, which KEY=VALUE can then change."""
    if name is None:
        return None
    if name not in OBJECTIVES:
        raise UserError(f"Unknown objective {quote(name)}. {did_you_mean(name, OBJECTIVES)}")
    return {TYPE_KEY: type(OBJECTIVES[name]).__name__, **to_dict(OBJECTIVES[name])}


def merge_recipe_changes(
    config: str | Path | None,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    fixed_fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Merge a YAML file, options and KEY=VALUE, the later ones on top; the command itself sets `fixed_fields`.

    A run length that is given replaces that of the file: minutes would win over epochs, and steps over both. What the
    file's own length explains, a warm-up of about a tenth and up to ten evaluations, is chosen again by the new one.
    """
    if wrong := [name for name in overrides or {} if name in fixed_fields]:
        raise UserError(
            f"{wrong[0]}={(overrides or {})[wrong[0]]}: set this with its own option or argument (see --help)."
        )
    changes: dict[str, Any] = flatten_keys(read_yaml_mapping(Path(config))) if config else {}
    given = {name: value for name, value in options.items() if value is not None} | dict(overrides or {})
    if given.get("minutes") == 0:  # a saved recipe has it, for no limit
        raise UserError("minutes is 0, and must be more than 0. Leave it out for a run without a time limit.")
    if given.keys() & {"max_steps", "num_train_epochs", "minutes"}:
        for name in explained_by_length(changes):
            del changes[name]
    if given.keys() & {"max_steps", "num_train_epochs"}:
        changes.pop("minutes", None)
    if "num_train_epochs" in given:
        changes.pop("max_steps", None)
    merged = {**changes, **given, **fixed_fields}
    if merged.get("per_device_train_batch_size") == "auto":
        merged["per_device_train_batch_size"] = 0
    return merged


def explained_by_length(recipe: Mapping[str, Any]) -> list[str]:
    """Return the fields of a saved recipe that its number of steps explains.

    >>> explained_by_length({"max_steps": 1875, "warmup_steps": 187, "eval_steps": 188})
    ['warmup_steps', 'eval_steps']
    >>> explained_by_length({"max_steps": 1875, "warmup_steps": 20, "eval_steps": 50})
    []
    """
    steps, warmup, interval = (recipe.get(name) for name in ("max_steps", "warmup_steps", "eval_steps"))
    if not isinstance(steps, int) or steps < 1:
        return []
    found = ["warmup_steps"] if isinstance(warmup, int) and steps / 20 <= warmup <= steps / 5 else []
    return [*found, "eval_steps"] if isinstance(interval, int) and 10 * interval >= steps else found


def flatten_keys(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested keys to dotted ones; a value with a `kind` is replaced as a whole."""
    flat: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and "kind" not in value:
            flat |= flatten_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
