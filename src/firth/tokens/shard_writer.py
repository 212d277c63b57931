"""Write shards so that a run killed at any moment can resume: append-only files and a journal.

Files only grow. After each chunk the journal gets one line with the size and the CRC-32 of every file at that moment
(`ShardPartWriter.state_dict`). A resumed run finds the last line whose sizes and checksums all files have, cuts off
what came later, and continues. A CRC can be extended by the bytes that follow, so
neither writing nor checking reads a byte twice.

What is known only at the end (the .npy headers with their lengths, bits that do not fill a byte) is written by
`finish`, outside of the checksums.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np

from firth.core.errors import UserError
from firth.core.files import create_file, open_in_place, remove_path
from firth.tokens.encode import TokenizedDocuments

SHARD_PARTS = ("train", "held_out")
READ_BLOCK_BYTES = 2**24  # bytes per read
NPY_HEADER_BYTES = 128  # bytes of a .npy header of a one-dimensional array, whatever its length


class AppendOnlyFile:
    """A file that only grows, with the checksum of its contents."""

    def __init__(self, path: Path, size: int = 0, crc: int = 0) -> None:
        self.size, self.crc = size, crc
        self.file: IO[bytes] = open_in_place(path) if size else create_file(path)
        self.file.truncate(size)
        self.file.seek(size)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def reserve(self, size: int) -> None:
        """Reserve bytes for a header that is written at the end; the checksum leaves them out."""
        self.file.write(bytes(size))
        self.size += size


class BitPacker:
    """Packs bits into bytes, the first bit highest; `pending_bits` are those that do not fill a byte yet."""

    def __init__(self, pending_bits: Sequence[int] = ()) -> None:
        self.pending_bits = np.array(pending_bits, dtype=bool)

    def pack(self, bits: np.ndarray) -> bytes:
        bits = np.concatenate([self.pending_bits, bits])
        num_packed = len(bits) // 8 * 8
        self.pending_bits = bits[num_packed:]
        return np.packbits(bits[:num_packed]).tobytes()


class ShardPartWriter:
    """Writes the files of one part (train or held out) of shards."""

    def __init__(self, folder: Path, has_salient: bool, state: dict[str, Any] | None = None) -> None:
        """Start, or continue from a `state_dict`; bytes that were written after it are cut off."""
        folder.mkdir(exist_ok=True)
        state = state or {"documents": 0, "tokens": 0, "text_bytes": 0, "files": {}, "rest": {}}
        self.folder = folder
        self.num_documents, self.num_tokens = state["documents"], state["tokens"]
        self.text_bytes = state["text_bytes"]
        self.bit_packers = {
            name: BitPacker(state["rest"].get(name, ())) for name in ("words", "sentences", *["salient"] * has_salient)
        }
        names = ["tokens.bin", "offsets.npy", *(f"{name}.bin" for name in self.bit_packers)]
        self.files = {name: AppendOnlyFile(folder / name, *state["files"].get(name, ())) for name in names}
        if "splits.npy" in state["files"]:
            self.files["splits.npy"] = AppendOnlyFile(folder / "splits.npy", *state["files"]["splits.npy"])
        else:
            (folder / "splits.npy").unlink(missing_ok=True)
        if not state["files"]:
            self.files["offsets.npy"].reserve(NPY_HEADER_BYTES)
            self.files["offsets.npy"].write(bytes(8))

    def append(self, documents: TokenizedDocuments) -> None:
        self.files["tokens.bin"].write(documents.tokens.tobytes())
        for name, bits in self.bit_packers.items():
            self.files[f"{name}.bin"].write(bits.pack(getattr(documents, name)))
        if "splits.npy" not in self.files and (documents.first_side_lengths >= 0).any():
            self.files["splits.npy"] = AppendOnlyFile(self.folder / "splits.npy")
            self.files["splits.npy"].reserve(NPY_HEADER_BYTES)
            self.files["splits.npy"].write(bytes([255] * 8) * self.num_documents)  # int64 -1 for all documents before
        if "splits.npy" in self.files:
            self.files["splits.npy"].write(documents.first_side_lengths.tobytes())
        self.files["offsets.npy"].write((self.num_tokens + np.cumsum(documents.document_lengths)).tobytes())
        self.num_documents += len(documents.document_lengths)
        self.num_tokens += len(documents.tokens)
        self.text_bytes += int(documents.text_bytes.sum())

    def flush(self) -> None:
        for file in self.files.values():
            file.file.flush()

    def close(self) -> None:
        for file in self.files.values():
            file.file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return counts, file sizes and checksums, as JSON."""
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "text_bytes": self.text_bytes,
            "files": {name: [file.size, file.crc] for name, file in self.files.items()},
            "rest": {name: bits.pending_bits.astype(int).tolist() for name, bits in self.bit_packers.items()},
        }

    def finish(self) -> None:
        """Write .npy headers and the last, partly filled bytes of bits. Idempotent."""
        for name, bits in self.bit_packers.items():
            self.files[f"{name}.bin"].file.write(np.packbits(bits.pending_bits).tobytes())
        for name in {"offsets.npy", "splits.npy"} & self.files.keys():
            file = self.files[name].file
            file.seek(0)
            file.write(npy_header((self.files[name].size - NPY_HEADER_BYTES) // 8))
        self.flush()

    def manifest_facts(self) -> dict[str, int]:
        facts = {"documents": self.num_documents, "tokens": self.num_tokens, "text_bytes": self.text_bytes}
        return facts | {name: count_set_bits(self.folder / f"{name}.bin") for name in self.bit_packers}


def npy_header(num_values: int) -> bytes:
    """Return the .npy header of a one-dimensional int64 array."""
    fields = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({num_values},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + (NPY_HEADER_BYTES - 10).to_bytes(2, "little")
        + fields.ljust(NPY_HEADER_BYTES - 11).encode()
        + b"\n"
    )


def count_set_bits(file: Path) -> int:
    """Number of set bits of a file."""
    return sum(int(np.bitwise_count(np.frombuffer(block, np.uint8)).sum()) for block in read_blocks(file))


def read_blocks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as f:
        while block := f.read(READ_BLOCK_BYTES):
            yield block


class ShardWriter:
    """Writes both parts and the journal, a file beside the folder.

    The first line of the journal is the header: tokenizer and options. Each further line is the state after a chunk.
    """

    def __init__(
        self,
        folder: Path,
        journal: IO[str],
        header: dict[str, Any],
        has_salient: bool,
        last_entry: dict[str, Any] | None,
    ) -> None:
        self.folder, self.journal, self.header = folder, journal, header
        self.last_entry = last_entry or {}
        self.part_writers = [
            ShardPartWriter(folder / name, has_salient, self.last_entry.get(name)) for name in SHARD_PARTS
        ]

    def append_chunk(self, documents_by_part: Sequence[TokenizedDocuments], **facts: Any) -> None:
        """Append a chunk to the files, then its entry to the journal."""
        for part, documents in zip(self.part_writers, documents_by_part, strict=True):
            part.append(documents)
            part.flush()
        self.last_entry = {
            **facts,
            **{name: part.state_dict() for name, part in zip(SHARD_PARTS, self.part_writers, strict=True)},
        }
        self.journal.write(json.dumps(self.last_entry) + "\n")
        self.journal.flush()


@contextmanager
def open_shard_writer(
    path: Path, header: dict[str, Any], has_salient: bool, resume: bool, fixed_keys: Sequence[str] = ()
) -> Iterator[ShardWriter]:
    """Open a writer in `.NAME.part`, with `.NAME.journal` beside it; finished chunks survive any error.

    With `resume` it continues after the last intact chunk; the header must be the same, except for `fixed_keys`, which
    keep their first values. A lock keeps two processes from writing the same shards.
    """
    folder, file = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.journal")
    path.parent.mkdir(parents=True, exist_ok=True)
    with TextIOWrapper(open_locked(file, path), encoding="utf-8", errors="replace") as journal:
        lines = read_journal(journal) if resume else []
        if lines:
            header = header | {name: lines[0][name] for name in fixed_keys if name in header and name in lines[0]}
            if lines[0] != header:
                raise different_settings_error(path, lines[0], header)
        entries = [] if has_symlinks(folder) else find_valid_entries(folder, lines[1:])
        if not entries:
            remove_path(folder)
        folder.mkdir(exist_ok=True)
        rewrite_journal(journal, [header, *entries])
        writer = ShardWriter(folder, journal, header, has_salient, entries[-1] if entries else None)
        try:
            yield writer
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            saved = "The work so far is saved: free some, and run it again with --resume."
            advice = saved if writer.last_entry else "Free some."
            raise UserError(f"{folder}: no space is left on the disk. {advice}") from None
        finally:
            for part in writer.part_writers:
                close_quietly(part)
            if not writer.last_entry and folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                file.unlink(missing_ok=True)


def open_locked(file: Path, path: Path) -> IO[bytes]:
    """Open the journal of the shards `path` and lock it; raise a UserError if another process holds it."""
    while True:
        journal = open_in_place(file, append=True)
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            journal.close()
            raise UserError(f"{path} is being prepared by another process.") from None
        if os.fstat(journal.fileno()).st_nlink:
            return journal
        journal.close()  # its process removed it before the lock: another one may hold a new file of this name


def remove_finished_journal(path: Path) -> None:
    """Remove the journal of finished shards: a process that was killed after their last rename left it."""
    if not path.with_name(f".{path.name}.part").exists():
        path.with_name(f".{path.name}.journal").unlink(missing_ok=True)


def has_symlinks(folder: Path) -> bool:
    """Whether a folder is or holds a symbolic link: the writer makes none, and would write outside of the folder."""
    return any(p.is_symlink() for p in (folder, *folder.rglob("*")))


def close_quietly(part_writer: ShardPartWriter) -> None:
    """Close files on a disk that may be full: bytes that are lost came after the last journal entry."""
    for file in part_writer.files.values():
        with suppress(OSError):
            file.file.close()


def read_journal(journal: IO[str]) -> list[dict[str, Any]]:
    """Return the header and the entries of a journal up to the first line that is damaged or cut off."""
    journal.seek(0)
    lines: list[dict[str, Any]] = []
    for line in journal:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not (line.endswith("\n") and isinstance(content, dict) and (not lines or is_journal_entry(content))):
            break
        lines.append(content)
    return lines


def is_journal_entry(content: dict[str, Any]) -> bool:
    """Whether a line of a journal has the counts and, for each part, a state that `ShardPartWriter` can load."""
    parts: list[Any] = [content.get(part) for part in SHARD_PARTS]
    if not isinstance(content.get("documents"), int) or not all(isinstance(part, dict) for part in parts):
        return False
    counts = [part.get(name) for part in parts for name in ("documents", "tokens", "text_bytes")]
    files = [part.get(name) for part in parts for name in ("files", "rest")]
    if not all(isinstance(count, int) for count in counts) or not all(isinstance(group, dict) for group in files):
        return False
    values = [value for group in files for value in group.values()]
    sizes = [value for part in parts for value in part["files"].values()]
    return all(isinstance(v, list) and all(isinstance(n, int) for n in v) for v in values) and all(
        len(size) == 2 for size in sizes
    )


def rewrite_journal(journal: IO[str], entries: Sequence[dict[str, Any]]) -> None:
    journal.seek(0)
    journal.truncate()
    journal.writelines(json.dumps(entry) + "\n" for entry in entries)
    journal.flush()


def find_valid_entries(folder: Path, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries up to the last one whose sizes and checksums all files have."""
    num_valid = len(entries)
    for part in SHARD_PARTS:
        for name in sorted({name for entry in entries for name in entry[part]["files"]}):
            states = [entry[part]["files"].get(name) for entry in entries]
            matches = checksums_match(folder / part / name, states)
            num_valid = min(num_valid, next((i for i, match in enumerate(matches) if not match), num_valid))
    return list(entries[:num_valid])


def checksums_match(file: Path, sizes_and_crcs: Sequence[Sequence[int] | None]) -> Iterator[bool]:
    """Yield whether a file has each checksum at each (size, crc), in one pass; True for None."""
    crc, done = 0, NPY_HEADER_BYTES if file.suffix == ".npy" else 0
    if not file.is_file():
        yield from (state is None for state in sizes_and_crcs)
        return
    with open(file, "rb") as f:
        f.seek(done)
        for state in sizes_and_crcs:
            while state is not None and done < state[0]:
                block = f.read(min(READ_BLOCK_BYTES, state[0] - done))
                if not block:
                    break
                crc, done = zlib.crc32(block, crc), done + len(block)
            yield state is None or (done, crc) == tuple(state)


def different_settings_error(path: Path, earlier: dict[str, Any], now: dict[str, Any]) -> UserError:
    changed = [
        f"{name}: {earlier.get(name)} -> {now.get(name)}"
        for name in {**earlier, **now}
        if earlier.get(name) != now.get(name)
    ]
    return UserError(
        f"Cannot resume {path}: these settings differ ({'; '.join(changed)}). Give the same options to --resume, or "
        "start anew with --overwrite."
    )
