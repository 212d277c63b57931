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

from firth.errors import UserError
from firth.tokens.tokenise import Tokenised

PARTS = ("train", "held_out")
BLOCK = 2**24  # bytes that are read at once
NPY_HEADER = 128  # bytes: numpy gives this many to a list of numbers, however long it is


class Grown:
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


class Bits:
    """Bits on their way to a file, eight to a byte, the first one highest; `rest` is less than a byte."""

    def __init__(self, rest: Sequence[int] = ()) -> None:
        self.rest = np.array(rest, dtype=bool)

    def whole_bytes(self, bits: np.ndarray) -> bytes:
        bits = np.concatenate([self.rest, bits])
        whole = len(bits) // 8 * 8
        self.rest = bits[whole:]
        return np.packbits(bits[:whole]).tobytes()


class GrowingPart:
    """The files of one part (train or held out) of shards."""

    def __init__(self, folder: Path, salient: bool, mark: dict[str, Any] | None = None) -> None:
        """Begin, or go on where a `mark` says; what was written after it is cut off."""
        folder.mkdir(exist_ok=True)
        mark = mark or {"documents": 0, "tokens": 0, "text_bytes": 0, "files": {}, "rest": {}}
        self.folder = folder
        self.num_documents, self.num_tokens = mark["documents"], mark["tokens"]
        self.text_bytes = mark["text_bytes"]
        self.bits = {name: Bits(mark["rest"].get(name, ())) for name in ("words", "sentences", *["salient"] * salient)}
        names = ["tokens.bin", "offsets.npy", *(f"{name}.bin" for name in self.bits)]
        self.files = {name: Grown(folder / name, *mark["files"].get(name, ())) for name in names}
        if "splits.npy" in mark["files"]:
            self.files["splits.npy"] = Grown(folder / "splits.npy", *mark["files"]["splits.npy"])
        else:
            (folder / "splits.npy").unlink(missing_ok=True)
        if not mark["files"]:
            self.files["offsets.npy"].reserve(NPY_HEADER)
            self.files["offsets.npy"].write(bytes(8))

    def add(self, more: Tokenised) -> None:
        self.files["tokens.bin"].write(more.tokens.tobytes())
        for name, bits in self.bits.items():
            self.files[f"{name}.bin"].write(bits.whole_bytes(getattr(more, name)))
        if "splits.npy" not in self.files and (more.splits >= 0).any():
            self.files["splits.npy"] = Grown(self.folder / "splits.npy")
            self.files["splits.npy"].reserve(NPY_HEADER)
            self.files["splits.npy"].write(bytes([255] * 8) * self.num_documents)  # -1 for all before
        if "splits.npy" in self.files:
            self.files["splits.npy"].write(more.splits.tobytes())
        self.files["offsets.npy"].write((self.num_tokens + np.cumsum(more.lengths)).tobytes())
        self.num_documents += len(more.lengths)
        self.num_tokens += len(more.tokens)
        self.text_bytes += int(more.text_bytes.sum())

    def flush(self) -> None:
        for grown in self.files.values():
            grown.file.flush()

    def close(self) -> None:
        for grown in self.files.values():
            grown.file.close()

    def mark(self) -> dict[str, Any]:
        """How far the files are, as JSON."""
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "text_bytes": self.text_bytes,
            "files": {name: [grown.size, grown.crc] for name, grown in self.files.items()},
            "rest": {name: bits.rest.astype(int).tolist() for name, bits in self.bits.items()},
        }

    def finish(self) -> None:
        """Write what stands at the beginning or the very end of files. Doing it twice does no harm."""
        for name, bits in self.bits.items():
            self.files[f"{name}.bin"].file.write(np.packbits(bits.rest).tobytes())
        for name in {"offsets.npy", "splits.npy"} & self.files.keys():
            file = self.files[name].file
            file.seek(0)
            file.write(npy_header((self.files[name].size - NPY_HEADER) // 8))
        self.flush()

    def facts(self) -> dict[str, int]:
        facts = {"documents": self.num_documents, "tokens": self.num_tokens, "text_bytes": self.text_bytes}
        return facts | {name: count_bits(self.folder / f"{name}.bin") for name in self.bits}


def npy_header(count: int) -> bytes:
    """What stands before `count` numbers of 64 bits in a .npy file."""
    fields = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}"
    return (
        b"\x93NUMPY\x01\x00" + (NPY_HEADER - 10).to_bytes(2, "little") + fields.ljust(NPY_HEADER - 11).encode() + b"\n"
    )


def count_bits(file: Path) -> int:
    """How many bits of a file are set."""
    return sum(int(np.bitwise_count(np.frombuffer(block, np.uint8)).sum()) for block in blocks(file))


def blocks(file: Path) -> Iterator[bytes]:
    with open(file, "rb") as f:
        while block := f.read(BLOCK):
            yield block


class Growing:
    """Both parts and the journal. `begin` or `go_on`, then `add` and `commit`, then `finish`.

    The journal is a file beside the folder. Its first line says what is made of what; each further one is written
    when a chunk is in the files, and says their sizes and checksums then.
    """

    def __init__(
        self, folder: Path, journal: IO[str], header: dict[str, Any], salient: bool, line: dict[str, Any] | None
    ) -> None:
        self.folder, self.journal, self.header = folder, journal, header
        self.line = line or {}
        self.parts = [GrowingPart(folder / name, salient, self.line.get(name)) for name in PARTS]

    def add(self, results: Sequence[Tokenised], **facts: Any) -> None:
        """Put a chunk into the files, and then say so in the journal."""
        for part, more in zip(self.parts, results, strict=True):
            part.add(more)
            part.flush()
        self.line = {**facts, **{name: part.mark() for name, part in zip(PARTS, self.parts, strict=True)}}
        self.journal.write(json.dumps(self.line) + "\n")
        self.journal.flush()


@contextmanager
def growing(
    path: Path, header: dict[str, Any], salient: bool, resume: bool, settled: Sequence[str] = ()
) -> Iterator[Growing]:
    """Shards that grow in `.NAME.part`, with `.NAME.journal` beside it; what is done stays when anything goes wrong.

    With `resume` they go on where the last whole chunk ended, in the way that the header says; what is named in
    `settled` stays as it was begun with. Two processes cannot write the same shards.
    """
    folder, file = path.with_name(f".{path.name}.part"), path.with_name(f".{path.name}.journal")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a+", encoding="utf-8") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is being prepared by another process.") from None
        lines = whole_lines(journal) if resume else []
        if lines:
            header = header | {name: lines[0][name] for name in settled if name in header and name in lines[0]}
        if lines and lines[0] != header:
            raise other_work(path, lines[0], header)
        lines = lines[:1] + last_whole(folder, lines[1:])
        if not lines[1:]:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        rewrite(journal, [header, *lines[1:]])
        state = Growing(folder, journal, header, salient, lines[-1] if lines[1:] else None)
        try:
            yield state
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            advice = "What is done is kept: make room, and run it again with --resume." if state.line else "Make room."
            raise UserError(f"{folder}: no room is left on the disk. {advice}") from None
        finally:
            for part in state.parts:
                close_quietly(part)
            if not state.line and folder.exists():
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                file.unlink(missing_ok=True)


def close_quietly(part: GrowingPart) -> None:
    """Close files whose last bytes may have no room any more: they are after the last mark."""
    for grown in part.files.values():
        with suppress(OSError):
            grown.file.close()


def whole_lines(journal: IO[str]) -> list[dict[str, Any]]:
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


def rewrite(journal: IO[str], lines: Sequence[dict[str, Any]]) -> None:
    journal.seek(0)
    journal.truncate()
    journal.writelines(json.dumps(line) + "\n" for line in lines)
    journal.flush()


def last_whole(folder: Path, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines up to the last one at which all files are as it says."""
    good = len(lines)
    for part in PARTS:
        names = {name for line in lines for name in line[part]["files"]}
        for name in sorted(names):
            marks = [line[part]["files"].get(name) for line in lines]
            first_wrong = next((i for i, right in enumerate(agree(folder / part / name, marks)) if not right), good)
            good = min(good, first_wrong)
    return list(lines[:good])


def agree(file: Path, marks: Sequence[Sequence[int] | None]) -> Iterator[bool]:
    """Whether a file has the checksum of each mark (size, crc) at its size; None asks nothing."""
    crc, done = 0, NPY_HEADER if file.suffix == ".npy" else 0
    if not file.is_file():
        yield from (mark is None for mark in marks)
        return
    with open(file, "rb") as f:
        f.seek(done)
        for mark in marks:
            while mark is not None and done < mark[0]:
                block = f.read(min(BLOCK, mark[0] - done))
                if not block:
                    break
                crc, done = zlib.crc32(block, crc), done + len(block)
            yield mark is None or (done, crc) == tuple(mark)


def other_work(path: Path, earlier: dict[str, Any], now: dict[str, Any]) -> UserError:
    changed = [f"{name}: {earlier.get(name)} -> {now[name]}" for name in now if earlier.get(name) != now[name]]
    return UserError(
        f"{path} was begun in another way ({'; '.join(changed)}). Give the same options to --resume, or start anew "
        "with --overwrite."
    )
