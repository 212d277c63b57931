"""The weight files of a checkpoint folder, sharded or not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from firth.core.errors import UserError, quote, reason
from firth.core.files import check_utf8_name, read_object

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class WeightIndexFile:
    """The key of model.safetensors.index.json that is read: the file of each tensor."""

    allow_unknown_keys = True

    weight_map: dict[str, str]


def list_weight_files(folder: Path) -> list[str]:
    index = folder / (WEIGHTS_FILE + ".index.json")
    if not index.is_file():
        return [WEIGHTS_FILE]
    names = sorted({*read_object(index, WeightIndexFile)["weight_map"].values()})
    if not names:
        raise UserError(f"{index}: weight_map is empty: not an index of weights.")
    if outside := next((name for name in names if Path(name).name != name), None):
        raise UserError(f"{index}: weight_map names {quote(outside)}, and must name files of this folder.")
    return names


def find_weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files of a checkpoint; raise a UserError where there are none."""
    names = list_weight_files(folder)
    if not (folder / names[0]).is_file():
        if any(folder.glob("*.bin")):
            raise UserError(
                f"{folder} has its weights in a .bin file, a pickle that can run any code when it is opened. "
                "Convert it with transformers: AutoModel.from_pretrained(...).save_pretrained(...)."
            )
        raise UserError(f"{folder} has no {WEIGHTS_FILE}: not a checkpoint.")
    return names


def read_tensors(folder: Path, keep_names: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint folder, sharded or not: all of them, or those in `keep_names`."""
    check_utf8_name(folder)
    names = find_weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as f:
                tensors |= {key: f.get_tensor(key) for key in f.keys() if keep_names is None or key in keep_names}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            raise UserError(
                f"{folder / name} cannot be read ({reason(e)}): the file is damaged or cut short."
            ) from None
    return tensors


@contextmanager
def translate_disk_errors(path: Path) -> Iterator[None]:
    """Turn safetensors' I/O errors into OSError."""
    try:
        yield
    except SafetensorError as e:
        number = re.search(r"os error (\d+)", str(e))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
