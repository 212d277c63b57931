"""Atomic writes: after a crash, a file or folder is either complete or absent.

A file is written under a temporary name, fsynced, and renamed over the old one: POSIX renames are atomic. A folder is
written in the same way, with a manifest of sizes and SHA-256 checksums as its last file. Whoever finds the manifest
knows that the folder is complete, and `find_corruption` verifies its content. All files get the mode that the umask
says: safetensors creates its own with 0600.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from firth.core.errors import UserError
from firth.core.parse import parse_json, parse_yaml

MANIFEST_FILE = "manifest.json"
MODEL_CARD_FILE = "README.md"  # people edit it: replacing a folder keeps it, and a changed one is not foreign


def fsync_folder(folder: Path) -> None:
    """Make the directory entries of a folder durable; fsync of a file covers its content only."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new one, even after a crash or on a full disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        with suppress(OSError):
            temporary.unlink()
        if e.errno is not None:  # the OSError of a full disk names no file
            e.filename, e.filename2 = str(path), None
        raise
    fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_results(path: Path, value: Any) -> None:
    """Write results as strict JSON: NaN and Inf become null."""
    write_json(path, replace_nonfinite(value))


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and Inf by None, in nested lists and dictionaries too.

    >>> replace_nonfinite({"f1": float("nan"), "seeds": (0.5, float("inf"))})
    {'f1': None, 'seeds': [0.5, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: replace_nonfinite(part) for name, part in value.items()}
    return [replace_nonfinite(part) for part in value] if isinstance(value, list | tuple) else value


def read_utf8(path: Path) -> str:
    """Return the text of a file; a UserError if it cannot be read or is not UTF-8."""
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for a writer
            raise UserError(f"{path}: not a file.")
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except UnicodeDecodeError as e:
        line = e.object.count(b"\n", 0, e.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (the byte {e.object[e.start]:#04x}).") from None


def read_json(path: Path) -> Any:
    return parse_json(read_utf8(path), str(path))


def read_yaml(path: Path) -> Any:
    return parse_yaml(read_utf8(path), str(path))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def atomic_folder(path: Path, partial_folder: Path | None = None, **metadata: Any) -> Iterator[Path]:
    """Write a folder under a temporary name; on success fsync it, add the manifest, and rename it to `path`.

    `metadata` is stored in the manifest beside `files`. A crash leaves a `.NAME.tmp`, which the next writer removes.
    An existing folder is replaced, unless it holds foreign files. `partial_folder` is an existing folder to finish
    under the name `path`; it is kept when an error occurs.
    """
    check_no_foreign_files(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_folder or path.with_name(f".{path.name}.tmp")
    if partial_folder is None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    (temporary / MANIFEST_FILE).unlink(missing_ok=True)
    try:
        yield temporary
        files, mode = {}, umask_mode(temporary)
        for file in sorted(p for p in temporary.rglob("*") if p.is_file()):
            if file.stat().st_mode & 0o777 != mode:
                file.chmod(mode)
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            files[file.relative_to(temporary).as_posix()] = {"bytes": file.stat().st_size, "sha256": file_sha256(file)}
        write_json(temporary / MANIFEST_FILE, {**metadata, "files": files})
        if (path / MODEL_CARD_FILE).is_file() and MODEL_CARD_FILE not in files:
            shutil.copyfile(path / MODEL_CARD_FILE, temporary / MODEL_CARD_FILE)
        for folder in [p for p in temporary.rglob("*") if p.is_dir()]:
            fsync_folder(folder)
        swap_folder(temporary, path)
    except BaseException:
        if partial_folder is None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def umask_mode(folder: Path) -> int:
    """Return the mode of a new file in `folder`; `os.umask` would change it for other threads meanwhile."""
    probe = folder / ".mode.tmp"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    return mode


def check_disk_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise a UserError if the disk of `folder`, which may not exist yet, has less free space than `needed_bytes`."""
    parent = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    if needed_bytes > free:
        raise UserError(
            f"{folder}: {purpose} takes {format_bytes(needed_bytes)}, and the disk has {format_bytes(free)} free. Free "
            "some space, choose a folder on another disk, or a smaller model."
        )


def format_bytes(num_bytes: float) -> str:
    """
    >>> format_bytes(512), format_bytes(3_250_000), format_bytes(16e9)
    ('512 bytes', '3.2 MB', '16.0 GB')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def swap_folder(temporary: Path, path: Path) -> None:
    """Rename a finished folder to `path`; if that fails, restore the folder that was there before."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    try:
        os.replace(temporary, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise
    fsync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def find_corruption(folder: Path) -> str | None:
    """Return the first defect of a folder that `atomic_folder` wrote, or None if every file matches the manifest."""
    manifest = folder / MANIFEST_FILE
    if not manifest.is_file():
        return f"{manifest.name} is missing"
    try:
        files = read_json(manifest)["files"]
    except (UserError, KeyError, TypeError):
        return f"{manifest.name} cannot be read"
    for name, fact in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != fact["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, not {fact['bytes']}"
        if file_sha256(file) != fact["sha256"]:
            return f"{name} does not match its checksum"
    return None


def check_output_folder(path: Path, noun: str, overwrite: bool = False) -> None:
    """Raise a UserError, before any work is done, if `path` exists or cannot be written.

    `overwrite` allows a folder that Firth wrote, but never one with foreign files.
    """
    if overwrite:
        check_no_foreign_files(path)
    elif not is_missing_or_empty(path):
        raise UserError(f"{path} exists already. Name another {noun}, or pass --overwrite.")
    check_writable(path)


def is_missing_or_empty(path: Path) -> bool:
    """Whether `path` is missing or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def check_no_foreign_files(path: Path) -> None:
    """Raise a UserError if a folder holds files that `atomic_folder` did not write, so that a typo loses no data."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; a folder is needed. Name another one.")
    try:
        known = {name.split("/")[0] for name in read_json(path / MANIFEST_FILE)["files"]}
        known |= {MANIFEST_FILE, MODEL_CARD_FILE}
    except (UserError, KeyError, TypeError):
        known = set()
    if foreign := sorted(p.name for p in path.iterdir() if p.name not in known):
        raise UserError(
            f"{path} holds files that Firth did not write ({', '.join(foreign[:3])}): it is not replaced. "
            "Name another folder, or move them away."
        )


def check_writable(path: Path) -> None:
    """Raise a UserError if permissions or a file in the way prevent writing a folder."""
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"{path} cannot be made: {parent} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: no permission in {parent}.")
