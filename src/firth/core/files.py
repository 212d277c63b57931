"""Atomic writes: after a crash, a file or folder is either complete or absent.

A file is written under a temporary name, fsynced, and renamed over the old one: POSIX renames are atomic. A folder is
written in the same way, with a manifest of sizes and SHA-256 checksums as its last file. Whoever finds the manifest
knows that the folder is complete, and `find_corruption` verifies its content. All files get the mode that the umask
says: safetensors creates its own with 0600.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from firth.core.errors import UserError, quote
from firth.core.parse import parse_json, parse_yaml
from firth.core.serialization import from_dict

if TYPE_CHECKING:
    import numpy as np

MANIFEST_FILE = "manifest.json"
# What a folder holds. Its manifest says so: --overwrite replaces a folder of the same kind only.
KINDS = ("model", "adapter", "weights", "tokenizer", "shards", "rows", "vectors", "counts", "phrases", "onnx", "gguf")
PID_SUFFIX = re.compile(r"\.\d+\.tmp")  # of a temporary folder of one process
URL_SCHEME = re.compile(r"[a-z][a-z0-9+]+:/")
VERIFIED_FILE = ".verified.json"  # sizes and times of shards whose content was verified (tokens/shards.py)
MODEL_CARD_FILE = "README.md"  # people edit it: replacing a folder keeps it, and a changed one is not foreign


def remove_path(path: Path) -> None:
    """Remove a file, a folder or a link, never what a link points to; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def fsync_folder(folder: Path) -> None:
    """Make the directory entries of a folder durable; fsync of a file covers its content only."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def create_file(path: Path) -> IO[bytes]:
    """Create a file and open it for writing; what a killed writer left under its name is removed first.

    A link of that name is removed too, never followed: the file that it points to stays as it is.
    """
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "wb")


def open_in_place(path: Path, append: bool = False, buffering: int = -1, allow_hard_links: bool = False) -> IO[bytes]:
    """Open a file that is changed in place (a log, a journal) or never written (a lock), without truncating it.

    A UserError refuses links: Firth makes none, and would write to another file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_APPEND if append else 0)
    try:
        file = open(os.open(path, flags, 0o666), "ab+" if append else "rb+", buffering)  # noqa: SIM115
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a symbolic link to another file. Remove the link.") from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or (found.st_nlink > 1 and not allow_hard_links):
        file.close()
        problem = "a hard link to another file" if stat.S_ISREG(found.st_mode) else "not a regular file"
        raise UserError(f"{path} is {problem}. Remove it, or copy the folder without links.")
    return file


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Replace a file atomically: readers see the old or the new one, even after a crash or on a full disk."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with create_file(temporary) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError) and e.errno is not None:  # the OSError of a full disk names no file
            e.filename, e.filename2 = str(path), None
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    with atomic_file(path) as file:
        file.write(data)


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write an array as .npy. `np.save` writes with the C library, whose error on a full disk has no errno."""
    import numpy as np

    array = np.ascontiguousarray(array)
    with atomic_file(path) as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(array.data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8. The bytes of a file name that is not UTF-8 are written as escapes, which are JSON's own too."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


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


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; a UserError for a pipe, which would wait for a writer, and for a device without end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"{path}: not a file.")
    return open(fd, "rb")


def read_utf8(path: Path) -> str:
    """Return the text of a file; a UserError if it cannot be read or is not UTF-8."""
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror}).") from None
    except UnicodeDecodeError as e:
        line = e.object.count(b"\n", 0, e.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (the byte {e.object[e.start]:#04x}).") from None


def check_link_stays_inside(file: Path, folder: Path) -> None:
    """Raise a UserError for a link out of a folder: a copy of its target may be published with the folder's own files.

    Folders in the cache of the Hub consist of links: NAME/snapshots/REVISION/FILE leads to NAME/blobs.
    """
    root = folder.resolve()
    root = root.parent.parent if root.parent.name == "snapshots" else root
    if not file.resolve().is_relative_to(root):
        raise UserError(f"{file} is a link to a file outside of {folder}. Replace it by a file, or remove it.")


def copy_file(source: Path, target: Path, folder: Path) -> None:
    """Copy a file of `folder`, which may be somebody else's, to `target`, whose folder is made."""
    check_link_stays_inside(source, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(source) as read, create_file(target) as written:
        shutil.copyfileobj(read, written)


def read_json(path: Path) -> Any:
    return parse_json(read_utf8(path), str(path))


def read_object(path: Path, schema: type | None = None) -> dict[str, Any]:
    """Read a JSON object. Its keys must have the types of the fields of the dataclass `schema`.

    Files that Firth wrote are read like a user's: disks fail, and people edit and exchange them.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must be an object of keys and values, and is {quote(value)}.")
    if schema is not None:
        from_dict(value, schema, str(path), is_yaml=False)
    return value


def read_yaml(path: Path) -> Any:
    return parse_yaml(read_utf8(path), str(path))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextmanager
def atomic_folder(
    path: Path, kind: str = "model", partial_folder: Path | None = None, **metadata: Any
) -> Iterator[Path]:
    """Write a folder under a temporary name; on success fsync it, add the manifest, and rename it to `path`.

    `kind` and `metadata` are stored in the manifest beside `files`. A crash leaves a `.NAME.tmp`, which the next writer
    removes. An existing folder is replaced, unless it holds foreign files; damaged files of its own are replaced too.
    `partial_folder` is an existing folder to finish under the name `path`; it is kept when an error occurs.
    """
    assert kind in KINDS, kind
    check_no_foreign_files(path, kind, compare_content=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_folder or path.with_name(f".{path.name}.tmp")
    if partial_folder is None:
        remove_path(temporary)
        temporary.mkdir()
    (temporary / MANIFEST_FILE).unlink(missing_ok=True)
    try:
        yield temporary
        for leftover in list(temporary.rglob(".*.tmp")):  # of a writer that was killed in the partial folder
            remove_path(leftover)
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
        write_json(temporary / MANIFEST_FILE, {"kind": kind, **metadata, "files": files})
        if (path / MODEL_CARD_FILE).is_file() and MODEL_CARD_FILE not in files:
            write_bytes(temporary / MODEL_CARD_FILE, (path / MODEL_CARD_FILE).read_bytes())
        for folder in [p for p in temporary.rglob("*") if p.is_dir()]:
            fsync_folder(folder)
        swap_folder(temporary, path)
    except BaseException:
        if partial_folder is None:
            remove_path(temporary)
        raise


def umask_mode(folder: Path) -> int:
    """Return the mode of a new file in `folder`; `os.umask` would change it for other threads meanwhile."""
    probe = folder / ".mode.tmp"
    create_file(probe).close()
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
        remove_path(old)
        os.replace(path, old)
    try:
        os.replace(temporary, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise
    fsync_folder(path.parent)
    remove_path(old)


def find_corruption(folder: Path) -> str | None:
    """Return the first defect of a folder that `atomic_folder` wrote, or None if every file matches the manifest."""
    if not (folder / MANIFEST_FILE).is_file():
        return f"{MANIFEST_FILE} is missing"
    try:
        files = read_manifest(folder)["files"]
    except UserError:
        return f"{MANIFEST_FILE} cannot be read"
    return next((problem for name in files if (problem := find_file_defect(folder, name, files[name]))), None)


def find_file_defect(folder: Path, name: str, fact: Mapping[str, Any]) -> str | None:
    """Return how a file differs from its entry in a manifest, or None."""
    file = folder / name
    if not file.is_file():
        return f"{name} is missing"
    if (size := file.stat().st_size) != fact["bytes"]:
        return f"{name} has {size} bytes, not {fact['bytes']}"
    return None if file_sha256(file) == fact["sha256"] else f"{name} does not match its checksum"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder; raise a UserError if it does not have the form that `atomic_folder` writes."""
    return check_manifest(read_json(folder / MANIFEST_FILE), folder / MANIFEST_FILE)


def check_manifest(manifest: Any, name: str | Path) -> dict[str, Any]:
    """Return the JSON of a manifest; raise a UserError if it does not have the form that `atomic_folder` writes."""
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(is_manifest_entry(entry, fact) for entry, fact in files.items()):
        raise UserError(f"{name} is not a manifest that Firth wrote.")
    return dict(manifest)


def is_manifest_entry(name: str, fact: Any) -> bool:
    """Whether an entry of a manifest names a file inside of the folder, with its size and checksum."""
    inside = bool(name) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
    return inside and isinstance(fact, dict) and type(fact.get("bytes")) is int and type(fact.get("sha256")) is str


def check_output_folder(
    path: Path, noun: str, overwrite: bool = False, kind: str = "model", resume: bool = False
) -> None:
    """Raise a UserError, before any work is done, if `path` exists or cannot be written.

    `overwrite` allows a folder of this kind that Firth wrote, but none with foreign or changed files. `resume` also
    allows damaged files, which it writes again.
    """
    if URL_SCHEME.match(path.as_posix()):  # Path shortens :// to :/
        raise UserError(f"{path} is on object storage; this command writes to a folder. Name a folder as {noun}.")
    check_utf8_name(path)
    if overwrite or resume:
        check_no_foreign_files(path, kind, compare_content=not resume)
    elif not is_missing_or_empty(path):
        raise UserError(f"{path} exists already. Name another {noun}, or pass --overwrite.")
    check_writable(path)


def is_missing_or_empty(path: Path) -> bool:
    """Whether `path` is missing or an empty folder."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def check_no_foreign_files(path: Path, kind: str, compare_content: bool = True) -> None:
    """Raise a UserError if replacing a folder would lose anything that `atomic_folder` did not write there."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; a folder is needed. Name another one.")
    if foreign := list(islice(iter_foreign_files(path, compare_content), 3)):
        raise UserError(
            f"{path} holds files that Firth did not write, or that were changed since ({', '.join(foreign)}): it is "
            "not replaced. Name another folder, or move them away."
        )
    if (path / MANIFEST_FILE).is_file() and (found := read_manifest(path)["kind"]) != kind:
        raise UserError(
            f"{path} is of kind {found}, not {kind}: it is not replaced. Name another folder, or remove it."
        )


def iter_foreign_files(folder: Path, compare_content: bool = True) -> Iterator[str]:
    """Yield the files in a folder that no manifest of ours lists, or that have another content than it says.

    A manifest of another program, or of another form, lists nothing. Folders inside may have manifests of their own,
    such as rows beside shards. Firth makes no links, so a link is foreign.
    """
    try:
        manifest = read_manifest(folder)
    except (UserError, OSError):
        manifest = {}
    is_ours = manifest.get("kind") in KINDS
    files = manifest["files"] if is_ours else {}
    own = {MANIFEST_FILE, MODEL_CARD_FILE, VERIFIED_FILE, f".{VERIFIED_FILE}.tmp"} if is_ours else set()
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        for inner in sorted(here / name for name in folders):
            if inner.is_symlink():
                yield inner.relative_to(folder).as_posix()
            elif is_ours and PID_SUFFIX.search(inner.name):
                folders.remove(inner.name)
            elif (inner / MANIFEST_FILE).is_file():
                folders.remove(inner.name)
                names_inside = iter_foreign_files(inner, compare_content)
                yield from ((inner / name).relative_to(folder).as_posix() for name in names_inside)
        for file in sorted((here / name).relative_to(folder).as_posix() for name in names):
            listed = (file in own or file in files) and not (folder / file).is_symlink()
            if not listed or (compare_content and file in files and find_file_defect(folder, file, files[file])):
                yield file


def check_utf8_name(path: Path) -> None:
    """Raise a UserError for a folder of weights whose name is not UTF-8: safetensors opens no file in it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(f"{path}: a folder of weights needs a name in UTF-8. Rename it, or name another.") from None


def check_writable(path: Path) -> None:
    """Raise a UserError if permissions or a file in the way prevent writing a folder."""
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UserError(f"{path} cannot be made: {parent} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be written: no permission in {parent}.")
