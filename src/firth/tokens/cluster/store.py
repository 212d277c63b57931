"""Where tasks leave their results: a folder that all machines see, or object storage. A commit is a small JSON file.

A task may be killed at any moment, and run twice at the same time: the cluster starts it again when it loses sight of a
machine that still works. So a task writes its arrays under a name of its own, fsyncs and renames them, and then writes
`NAME.json` with their size and SHA-256 in the same way. Whoever finds that file knows that the task is done. Tasks are
pure functions of the text, so two runs of one write the same bytes, and it does not matter which comes last.

Object storage needs no renames: an object appears when all of it has arrived.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np

from firth.core.errors import UserError, reason
from firth.core.files import remove_path, write_bytes
from firth.core.parse import parse_json
from firth.text.open_text import import_optional

URL_MARK = "://"
ENTRY_SUFFIX = ".json"
OWN_CHECKSUM = "entry_sha256"  # of the entry itself
STORAGE_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "s3fs", "gcsfs", "google", "adlfs", "azure", "fsspec")


class Readable(Protocol):
    """Files by name."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes: ...


class Store(Readable, Protocol):
    """Files by name, in one folder without folders inside."""

    url: str

    def write(self, name: str, data: bytes) -> None: ...

    def has(self, name: str) -> bool: ...

    def clear(self) -> None: ...


class FolderStore:
    """Files in a folder."""

    def __init__(self, url: str) -> None:
        self.url, self.folder = url, Path(url)

    def write(self, name: str, data: bytes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"{name}.{uuid.uuid4().hex}"
        write_bytes(own, data)
        os.replace(own, self.folder / name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(self.folder / name, "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def clear(self) -> None:
        remove_path(self.folder)


class ObjectStore:
    """Objects under a prefix such as s3://bucket/work."""

    def __init__(self, url: str) -> None:
        self.url, (self.filesystem, self.path) = url, open_filesystem(url)

    def write(self, name: str, data: bytes) -> None:
        self.filesystem.pipe_file(f"{self.path}/{name}", data)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop == start:  # object storage refuses an empty range
            return b""
        return bytes(self.filesystem.cat_file(f"{self.path}/{name}", start=start or None, end=stop))

    def has(self, name: str) -> bool:
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(f"{self.path}/{name}"))

    def clear(self) -> None:
        self.filesystem.invalidate_cache()
        if self.filesystem.exists(self.path):
            self.filesystem.rm(self.path, recursive=True)


class LoadedFile:
    """A file of a store that was read once and compared with its checksum."""

    def __init__(self, store: Store, name: str, checksum: str) -> None:
        self.data = store.read(name)
        if hashlib.sha256(self.data).hexdigest() != checksum:
            raise UserError(f"{store.url}/{name} does not match its checksum. Run the command again with --resume.")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.data[start:stop]


def open_store(url: str) -> Store:
    return ObjectStore(url) if is_url(url) else FolderStore(url)


def is_url(path: str | Path) -> bool:
    """Whether a path is on object storage.

    >>> is_url("s3://bucket/text"), is_url("text/a.jsonl")
    (True, False)
    """
    return isinstance(path, str) and URL_MARK in path


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    fsspec = import_optional("fsspec", f"{url}: object storage")
    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as e:  # s3fs, gcsfs and others are packages of their own
        raise UserError(f"{url}: {str(e).rstrip('.')}. Install it on every machine.") from None
    except ValueError as e:
        raise UserError(f"{url}: {str(e).rstrip('.')}. Use s3://, gs:// or a folder.") from None
    return filesystem, path.rstrip("/")


@contextmanager
def storage_errors(url: str | Path) -> Iterator[None]:
    """Turn the errors of storage libraries, which have types of their own, into one line: no credentials, no bucket."""
    try:
        yield
    except Exception as e:
        if type(e).__module__.partition(".")[0] not in STORAGE_LIBRARIES:
            raise
        raise UserError(
            f"{url}: cannot be read or written ({reason(e).rstrip('.') or type(e).__name__}). Check its name, the "
            "credentials and the network."
        ) from None


# --- commits --------------------------------------------------------------------------------------------------------


def commit(store: Store, name: str, arrays: Mapping[str, np.ndarray], **facts: Any) -> dict[str, Any]:
    """Write the arrays of a task, then its entry: layout, size, checksum and `facts`. Return the entry."""
    layout, offset, blocks = {}, 0, list[bytes]()
    for key, array in arrays.items():
        blocks.append(np.ascontiguousarray(array).tobytes())
        layout[key] = [array.dtype.str, list(array.shape), offset]
        offset += len(blocks[-1])
    data = b"".join(blocks)
    entry = {"arrays": layout, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **facts}
    entry[OWN_CHECKSUM] = entry_checksum(entry)
    store.write(name, data)
    store.write(name + ENTRY_SUFFIX, json.dumps(entry).encode())
    return entry


def find_commit(store: Store, name: str) -> dict[str, Any] | None:
    """Return the entry of a finished task whose arrays are whole; None if it must run."""
    if not (store.has(name + ENTRY_SUFFIX) and store.has(name)):
        return None
    try:
        entry = read_commit(store, name)
    except UserError:
        return None
    return entry if hashlib.sha256(store.read(name)).hexdigest() == entry["sha256"] else None


def read_commit(store: Store, name: str) -> dict[str, Any]:
    """Return an entry that `commit` wrote; a UserError for one that was changed since."""
    entry = read_entry(store, name)
    if entry.get(OWN_CHECKSUM) != entry_checksum(entry):
        raise UserError(
            f"{store.url}/{name}{ENTRY_SUFFIX} does not match its checksum. Run the command again with --resume."
        )
    return entry


def entry_checksum(entry: Mapping[str, Any]) -> str:
    """Return the SHA-256 of an entry without the checksum itself."""
    rest = {key: value for key, value in entry.items() if key != OWN_CHECKSUM}
    written = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


def read_entry(store: Store, name: str) -> dict[str, Any]:
    entry = parse_json(store.read(name + ENTRY_SUFFIX).decode("utf-8", "replace"), f"{store.url}/{name}{ENTRY_SUFFIX}")
    if not isinstance(entry, dict):
        raise UserError(f"{store.url}/{name}{ENTRY_SUFFIX} is not the entry of a task.")
    return entry


def read_array(
    store: Readable, name: str, entry: Mapping[str, Any], key: str, start: int = 0, stop: int | None = None
) -> np.ndarray:
    """Read the rows [start, stop) of an array of a task."""
    dtype, shape, offset = entry["arrays"][key]
    stop = shape[0] if stop is None else stop
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(shape[1:], dtype=np.int64))
    data = store.read(name, offset + start * row_bytes, offset + stop * row_bytes)
    return np.frombuffer(data, dtype).reshape(stop - start, *shape[1:])


# --- folders --------------------------------------------------------------------------------------------------------


def write_folder(store: Store, prefix: str, folder: Path) -> list[str]:
    """Copy the files of a folder to a store; return their names."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    for name in names:
        store.write(f"{prefix}-{name}", (folder / name).read_bytes())
    return names


def read_folder(store: Store, prefix: str, names: list[str]) -> TemporaryDirectory[str]:
    """Copy files of a store to a temporary folder."""
    folder = TemporaryDirectory(prefix="firth-")
    for name in names:
        write_bytes(Path(folder.name) / name, store.read(f"{prefix}-{name}"))
    return folder


def upload_folder(folder: Path, url: str, last: str) -> None:
    """Copy a folder to object storage, the file `last` after all others: whoever finds it finds the whole folder."""
    filesystem, target = open_filesystem(url)
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in [*(name for name in files if name != last), last]:
        filesystem.put_file(str(folder / name), f"{target}/{name}")
