"""Records, a value for each column: the lines of .jsonl, the rows of .csv, .tsv and .parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from firth.console import count
from firth.errors import UserError, nearest
from firth.text.lines import OPENERS, Meter, lines, need, opened

Records = Iterator[tuple[int, dict[str, Any]]]
LONGEST_LINE = 2**26  # characters: a record is parsed whole, and this bounds the memory that takes
BATCH_BYTES = 2**24  # of a .parquet file, about so much is in memory at a time


def extension(path: Path) -> str:
    """What says how to read a file, whether or not it is compressed.

    >>> extension(Path("a.jsonl.xz")), extension(Path("B.TXT"))
    ('.jsonl', '.txt')
    """
    inner = Path(path.stem) if path.suffix.lower() in OPENERS else path
    return inner.suffix.lower()


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# Reading


def json_records(path: Path, encoding: str = "utf-8", name: str | None = None, meter: Meter | None = None) -> Records:
    """The objects of a .jsonl file with their line numbers; blank lines are passed over."""
    name = name or str(path)
    for number, line in enumerate(whole_lines(path, encoding, name, meter), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as e:
            reason = getattr(e, "msg", e)  # without JSON's own "line 1", which is not the file's
            raise UserError(f"{name}:{number}: not JSON ({reason}). Each line must be one object.") from None
        if not isinstance(record, dict):
            raise UserError(f'{name}:{number}: not an object. Each line must be like {{"text": "..."}}.')
        yield number, record


def whole_lines(path: Path, encoding: str, name: str, meter: Meter | None) -> Iterator[str]:
    """The lines of a file of records; one that is too long to be parsed in bounded memory is refused."""
    for number, line in enumerate(lines(path, encoding, LONGEST_LINE, name, meter), 1):
        if len(line) >= LONGEST_LINE and not line.endswith("\n"):
            raise UserError(
                f"{name}:{number}: a line of more than {LONGEST_LINE:,} characters. "
                "Give such text as .txt, which is read in pieces, or on more lines."
            )
        yield line


def table_records(
    path: Path,
    encoding: str = "utf-8",
    name: str | None = None,
    meter: Meter | None = None,
    delimiter: str = ",",
    quoting: Literal[0, 3] = 0,
) -> Records:
    """The rows of a table whose first line names the columns; each row must have as many cells as that."""
    name = name or str(path)
    csv.field_size_limit(LONGEST_LINE)  # its default of 131,072 characters is less than a long document has
    rows = csv.reader(whole_lines(path, encoding, name, meter), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for row in rows:
            if header is None:
                header = row
                if twice := next((column for column in row if column and row.count(column) > 1), None):
                    raise UserError(f"{name}:{number}: the column {twice!r} stands twice. Give each a name of its own.")
            elif row and len(row) != len(header):
                raise UserError(f"{name}:{number}: {count(len(row), 'cell')}, but the first line names {len(header)}.")
            elif row:
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1
    except csv.Error as e:
        raise UserError(f"{name}:{number}: not a row of a {extension(path)} file ({e}).") from None


def parquet_records(path: Path, wanted: Collection[str], meter: Meter | None = None) -> Records:
    """The rows of a .parquet file by number from 1, with those of the wanted columns that it has.

    They are read a few at a time, so that memory does not grow with the file.
    """
    if path.suffix.lower() in OPENERS:
        raise UserError(f"{path}: a .parquet file is compressed inside. Decompress {path.suffix} first.")
    parquet = need("pyarrow.parquet", f"{path}: reading .parquet files")
    number = 0
    try:
        with opened(path) as file:  # ours, so that a file which may not be read is said as of any other
            table = parquet.ParquetFile(file, pre_buffer=False)
            size, num_rows = path.stat().st_size, max(table.metadata.num_rows, 1)
            there = dict.fromkeys(table.schema_arrow.names)
            names = [column for column in there if column in wanted]
            with (meter or Meter()).reading(size, lambda: size * number // num_rows):
                for batch in table.iter_batches(batch_rows(table.metadata), columns=names):
                    for record in batch.to_pylist():
                        number += 1
                        yield number, there | record
    except UserError:
        raise
    except Exception as e:  # pyarrow raises many kinds for a damaged file
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a whole .parquet file, after row {number:,} ({reason}).") from None


def batch_rows(facts: Any) -> int:
    """How many rows of a .parquet file to read at a time, by their mean size."""
    size = sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups))
    return max(1, min(1024, BATCH_BYTES * facts.num_rows // max(size, 1)))


# In .tsv a quotation mark is a character like any other, as GLUE's files and most corpora have it.
READERS: dict[str, Callable[..., Records]] = {
    ".jsonl": json_records,
    ".csv": table_records,
    ".tsv": partial(table_records, delimiter="\t", quoting=csv.QUOTE_NONE),
}


# Columns


def rename(columns: Mapping[str, str] | None, roles: Iterable[str]) -> dict[str, str]:
    """The column of each role: of the same name, unless the user named another."""
    named = {role: role for role in roles}
    for role, column in (columns or {}).items():
        if role not in named:
            raise UserError(f"--columns {role}={column}: nothing is called {role!r} here. {nearest(role, named)}")
        named[role] = column
    return named


class NoColumn(UserError):  # noqa: N818, named for what is wrong
    """A column that is missing; `there` are those that a record has."""

    def __init__(self, message: str, there: tuple[str, ...]) -> None:
        super().__init__(message)
        self.there = there


def value_in(record: Mapping[str, Any], role: str, column: str, where: str, nor: str = "") -> Any:
    """What a record holds in a column; if there is none, the error says which there are, and what else would do."""
    if column not in record:
        there = ", ".join(str(name)[:40] for name in record) or "none"
        close = get_close_matches(role if nor else column, map(str, record), n=1)
        hint = f"Name the right one: --columns {role}={close[0] if close else 'NAME'}."
        if len(record) == 1 and ";" in there:
            hint = "It looks separated by semicolons: save it with commas (.csv) or tabs (.tsv)."
        raise NoColumn(f"{where}: no column {column!r}{nor}; there are: {there}. {hint}", tuple(map(str, record)))
    return record[column]


def text_in(record: Mapping[str, Any], role: str, column: str, where: str) -> str:
    """As `value_in`, for what must be text."""
    value = value_in(record, role, column, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {short(value)}, which is not text.")
    return value


def short(value: Any) -> str:
    """The beginning of any value, to show in a message."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]
