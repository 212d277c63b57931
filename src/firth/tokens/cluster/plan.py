r"""Cut the input into tasks: consecutive files or parts of files, in the order in which one process reads them.

The tasks depend on the names and sizes of the files alone, never on the number of machines. So every machine agrees on
them, and a restart with more machines finds the finished ones.

A large file is cut at byte offsets, and a task moves both ends of its part forward to the next boundary between
documents (a line of .jsonl, a blank line of .txt). Two neighbours find the same boundary, so no document is lost or
read twice, and nobody has to read the file first. Compressed files, tables and .parquet files are read whole.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from firth.text.corpus import MAX_WHOLE_FILE_CHARS
from firth.text.open_text import DECOMPRESSORS
from firth.text.records import data_extension

TASK_BYTES = 2**26  # bytes of input per task: about a minute of work
SCAN_BYTES = 2**16  # bytes per read in the search for a boundary
# In these encodings the byte 10 is always a line end, so text can be cut after it.
SPLITTABLE_ENCODINGS = {"utf-8", "ascii", "iso8859-1", "cp1252"}
MAX_CHARACTER_BYTES = 4  # of a character in UTF-8
# No boundary stands before a byte order mark: a reader would remove it, and inside of a text it must stay.
LINE_END = re.compile(rb"\n(?!\xef\xbb\xbf)")
BLANK_LINE = re.compile(rb"\n\r?\n(?!\xef\xbb\xbf)")
BOUNDARY_BYTES = 6  # of a blank line and of what may not follow it

ReadRangeFn = Callable[[int, int], bytes]  # start, stop -> bytes of a file


class InputFile(NamedTuple):
    """A file of the input, as the user named it."""

    path: str  # a path or a URL
    size: int
    version: str  # changes with the content: the time of the last change, or an ETag
    is_user_named: bool


class Slice(NamedTuple):
    """The documents that begin in the bytes [start, stop) of a file; (0, size) is a whole file."""

    file: int  # index of the file
    start: int
    stop: int


def plan_tasks(
    files: Sequence[InputFile], documents: str = "auto", encoding: str = "utf-8", task_bytes: int = TASK_BYTES
) -> list[list[Slice]]:
    """Return the slices of each task: about `task_bytes` each, in the order of the files.

    >>> sizes = {"a.jsonl": 250, "b.csv": 30, "c.csv": 30}
    >>> files = [InputFile(name, size, "", True) for name, size in sizes.items()]
    >>> for task in plan_tasks(files, task_bytes=100):
    ...     print(*map(tuple, task))
    (0, 0, 100)
    (0, 100, 200)
    (0, 200, 250) (1, 0, 30)
    (2, 0, 30)
    """
    tasks: list[list[Slice]] = [[]]
    size = 0
    for index, file in enumerate(files):
        step = task_bytes if is_splittable(file, documents, encoding) else max(file.size, 1)
        for start in range(0, max(file.size, 1), step):
            stop = min(start + step, file.size)
            if tasks[-1] and size + stop - start > task_bytes:
                tasks.append([])
                size = 0
            tasks[-1].append(Slice(index, start, stop))
            size += stop - start
    return tasks


def is_splittable(file: InputFile, documents: str, encoding: str) -> bool:
    """Whether a file has boundaries between documents that can be found from its middle."""
    name = Path(file.path)
    if name.suffix.lower() in DECOMPRESSORS or codecs.lookup(encoding).name not in SPLITTABLE_ENCODINGS:
        return False
    # A smaller file in a folder may be one document (`Corpus`).
    is_split = documents == "blank-line" or file.is_user_named or file.size > MAX_CHARACTER_BYTES * MAX_WHOLE_FILE_CHARS
    kind = data_extension(name)
    return kind == ".jsonl" or (kind == ".txt" and documents != "file" and is_split)


def boundary_pattern(path: str) -> re.Pattern[bytes]:
    return LINE_END if data_extension(Path(path)) == ".jsonl" else BLANK_LINE


def find_slice(read: ReadRangeFn, size: int, start: int, stop: int, pattern: re.Pattern[bytes]) -> tuple[int, int]:
    r"""Return the bytes of the documents that begin in [start, stop); equal ends: no document begins there.

    The end is searched only if a document begins there. So a stretch without boundaries is read by its own tasks and
    once by the task before it, and a file without blank lines is not read to its end by each of its tasks.

    >>> text = b"one\n\ntwo\n\nthree"
    >>> read = lambda start, stop: text[start:stop]
    >>> [find_slice(read, len(text), i, i + 4, BLANK_LINE) for i in (0, 4, 8, 12)]
    [(0, 5), (5, 10), (10, 15), (15, 15)]
    """
    begin = find_boundary(read, size, start, pattern, limit=stop)
    return (begin, find_boundary(read, size, stop, pattern)) if begin < stop else (size, size)


def find_boundary(
    read: ReadRangeFn, size: int, offset: int, pattern: re.Pattern[bytes], limit: int | None = None
) -> int:
    r"""Return the first boundary at or after an offset: 0, the end of the file, or the end of a match of `pattern`.

    The search ends soon after `limit`; the end of the file then says that there is none before it.

    >>> text = b"one\n\ntwo\n\nthree"
    >>> [find_boundary(lambda start, stop: text[start:stop], len(text), i, BLANK_LINE) for i in (0, 1, 5, 6, 11)]
    [0, 5, 5, 10, 15]
    """
    if offset == 0:
        return 0
    position = max(0, offset - BOUNDARY_BYTES)
    while position < min(size, size if limit is None else limit):
        # BOUNDARY_BYTES more than a step: a match at the end of the step is seen with what follows it.
        block = read(position, min(size, position + SCAN_BYTES + BOUNDARY_BYTES))
        for match in pattern.finditer(block):
            if position + match.end() >= offset and match.start() < SCAN_BYTES:
                return position + match.end()
        position += SCAN_BYTES
    return size
