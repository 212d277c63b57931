"""Shards while they grow: files that are only added to, and a journal that says how far they are whole."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from firth.core.errors import UserError
from firth.tokens.encode import TokenizedDocuments

SHARD_PARTS = ("train", "held_out")
READ_BLOCK_BYTES = 2**24  # bytes that are read at once
NPY_HEADER_BYTES = 128  # bytes: numpy gives this many to a list of numbers, however long it is


class AppendOnlyFile:
    """A file that is only added to, with a checksum of what is in it."""

    def __init__(self, path: Path, size: int = 0, crc: int = 0) -> None:
        self.size, self.crc = size, crc
        self.file: IO[bytes] = open(path, "r+b" if size else "wb")  # noqa: SIM115, closed by close()
        self.file.truncate(size)
        self.file.seek(size)

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.size += len(data)
        self.crc = zlib.crc32(data, self.crc)

    def reserve(self, size: int) -> None:
        """Room at the beginning for what is known at the end; it does not count in the checksum."""
        self.file.write(bytes(size))
        self.size += size


class BitPacker:
    """Bits on their way to a file, eight to a byte, the first one highest; `pending_bits` is less than a byte."""

    def __init__(self, pending_bits: Sequence[int] = ()) -> None:
        self.pending_bits = np.array(pending_bits, dtype=bool)

    def pack(self, bits: np.ndarray) -> bytes:
        bits = np.concatenate([self.pending_bits, bits])
        whole = len(bits) // 8 * 8
        self.pending_bits = bits[whole:]
        return np.packbits(bits[:whole]).tobytes()


class ShardPartWriter:
    """The files of one part (train or held out) of shards."""

    def __init__(self, folder: Path, has_salient: bool, state: dict[str, Any] | None = None) -> None:
        """Begin, or go on where a `mark` says; what was written after it is cut off."""
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
            self.files["splits.npy"].write(bytes([255] * 8) * self.num_documents)  # -1 for all before
        if "splits.npy" in self.files:
            self.files["splits.npy"].write(documents.first_side_lengths.tobytes())
        self.files["offsets.npy"].write((self.num_tokens + np.cumsum(documents.document_lengths)).tobytes())
        self.num_documents += len(documents.document_lengths)
        self.num_tokens += len(documents.tokens)
        self.text_bytes += int(documents.text_bytes.sum())

    def flush(self) -> None:
        for grown in self.files.values():
            grown.file.flush()

    def close(self) -> None:
        for grown in self.files.values():
            grown.file.close()

    def state_dict(self) -> dict[str, Any]:
        """How far the files are, as JSON."""
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "text_bytes": self.text_bytes,
            "files": {name: [grown.size, grown.crc] for name, grown in self.files.items()},
            "rest": {name: bits.pending_bits.astype(int).tolist() for name, bits in self.bit_packers.items()},
        }

    def finish(self) -> None:
        """Write what stands at the beginning or the very end of files. Doing it twice does no harm."""
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
    """What stands before `num_values` numbers of 64 bits in a .npy file."""
    fields = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({num_values},), }}"
    return (
        b"\x93NUMPY\x01\x00"
        + (NPY_HEADER_BYTES - 10).to_bytes(2, "little")
        + fields.ljust(NPY_HEADER_BYTES - 11).encode()
        + b"\n"
    )


def count_set_bits(file: Path) -> int:
    """How many bits of a file are set."""
    return sum(int(np.bitwise_count(np.frombuffer(block, np.uint8)).sum()) for block in read_blocks(file))


def read_blocks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as f:
        while block := f.read(READ_BLOCK_BYTES):
            yield block


class ShardWriter:
    """Both parts and the journal. `begin` or `go_on`, then `add` and `commit`, then `finish`.

    The journal is a file beside the folder. Its first line says what is made of what; each further one is written
    when a chunk is in the files, and says their sizes and checksums then.
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
        """Put a chunk into the files, and then say so in the journal."""
        for part, more in zip(self.part_writers, documents_by_part, strict=True):
            part.append(more)
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
    """Shards that grow in `.NAME.part`, with `.NAME.journal` beside it; what is done stays when anything goes wrong.

    With `resume` they go on where the last whole chunk ended, in the way that the header says; what is named in
    `fixed_keys` stays as it was begun with. Two processes cannot write the same shards.
    """
    folder, file = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.journal")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is being prepared by another process.") from None
        lines = read_journal(journal) if resume else []
        if lines:
            header = header | {name: lines[0][name] for name in fixed_keys if name in header and name in lines[0]}
        if lines and lines[0] != header:
            raise different_settings_error(path, lines[0], header)
        lines = lines[:1] + find_valid_entries(folder, lines[1:])
        if not lines[1:]:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        rewrite_journal(journal, [header, *lines[1:]])
        state = ShardWriter(folder, journal, header, has_salient, lines[-1] if lines[1:] else None)
        try:
            yield state
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            advice = (
                "What is done is kept: make room, and run it again with --resume." if state.last_entry else "Make room."
            )
            raise UserError(f"{folder}: no room is left on the disk. {advice}") from None
        finally:
            for part in state.part_writers:
                close_quietly(part)
            if not state.last_entry and folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                file.unlink(missing_ok=True)


def close_quietly(part_writer: ShardPartWriter) -> None:
    """Close files whose last bytes may have no room any more: they are after the last mark."""
    for grown in part_writer.files.values():
        with suppress(OSError):
            grown.file.close()


def read_journal(journal: IO[str]) -> list[dict[str, Any]]:
    """The lines of a journal; the last one may have been cut off."""
    journal.seek(0)
    found = []
    for line in journal:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break
        if not line.endswith("\n"):
            found.pop()
    return found


def rewrite_journal(journal: IO[str], entries: Sequence[dict[str, Any]]) -> None:
    journal.seek(0)
    journal.truncate()
    journal.writelines(json.dumps(line) + "\n" for line in entries)
    journal.flush()


def find_valid_entries(folder: Path, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines up to the last one at which all files are as it says."""
    good = len(entries)
    for part in SHARD_PARTS:
        names = {name for line in entries for name in line[part]["files"]}
        for name in sorted(names):
            marks = [line[part]["files"].get(name) for line in entries]
            first_wrong = next(
                (i for i, right in enumerate(checksums_match(folder / part / name, marks)) if not right), good
            )
            good = min(good, first_wrong)
    return list(entries[:good])


def checksums_match(file: Path, sizes_and_crcs: Sequence[Sequence[int] | None]) -> Iterator[bool]:
    """Whether a file has the checksum of each mark (size, crc) at its size; None asks nothing."""
    crc, done = 0, NPY_HEADER_BYTES if file.suffix == ".npy" else 0
    if not file.is_file():
        yield from (mark is None for mark in sizes_and_crcs)
        return
    with open(file, "rb") as f:
        f.seek(done)
        for mark in sizes_and_crcs:
            while mark is not None and done < mark[0]:
                block = f.read(min(READ_BLOCK_BYTES, mark[0] - done))
                if not block:
                    break
                crc, done = zlib.crc32(block, crc), done + len(block)
            yield mark is None or (done, crc) == tuple(mark)


def different_settings_error(path: Path, earlier: dict[str, Any], now: dict[str, Any]) -> UserError:
    changed = [f"{name}: {earlier.get(name)} -> {now[name]}" for name in now if earlier.get(name) != now[name]]
    return UserError(
        f"{path} was begun in another way ({'; '.join(changed)}). Give the same options to --resume, or start anew "
        "with --overwrite."
    )
