"""Records, a value for each column: the lines of .jsonl, the rows of .csv, .tsv and .parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from firth.core.console import format_count
from firth.core.errors import UserError, did_you_mean
from firth.text.open_text import DECOMPRESSORS, ReadProgress, import_optional, open_decompressed, read_lines

NumberedRecords = Iterator[tuple[int, dict[str, Any]]]
MAX_LINE_CHARS = 2**26  # characters: a record is parsed whole, and this bounds the memory that takes
PARQUET_BATCH_BYTES = 2**24  # of a .parquet file, about so much is in memory at a time


def data_extension(path: Path) -> str:
    """What says how to read a file, whether or not it is compressed.

    >>> data_extension(Path("a.jsonl.xz")), data_extension(Path("B.TXT"))
    ('.jsonl', '.txt')
    """
    inner = Path(path.stem) if path.suffix.lower() in DECOMPRESSORS else path
    return inner.suffix.lower()


def is_numeric_string(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# Reading


def read_jsonl_records(
    path: Path, encoding: str = "utf-8", name: str | None = None, read_progress: ReadProgress | None = None
) -> NumberedRecords:
    """The objects of a .jsonl file with their line numbers; blank lines are passed over."""
    name = name or str(path)
    for number, line in enumerate(read_record_lines(path, encoding, name, read_progress), 1):
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


def read_record_lines(path: Path, encoding: str, name: str, read_progress: ReadProgress | None) -> Iterator[str]:
    """The lines of a file of records; one that is too long to be parsed in bounded memory is refused."""
    for number, line in enumerate(read_lines(path, encoding, MAX_LINE_CHARS, name, read_progress), 1):
        if len(line) >= MAX_LINE_CHARS and not line.endswith("\n"):
            raise UserError(
                f"{name}:{number}: a line of more than {MAX_LINE_CHARS:,} characters. "
                "Give such text as .txt, which is read in pieces, or on more lines."
            )
        yield line


def read_table_records(
    path: Path,
    encoding: str = "utf-8",
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    delimiter: str = ",",
    quoting: Literal[0, 3] = 0,
) -> NumberedRecords:
    """The rows of a table whose first line names the columns; each row must have as many cells as that."""
    name = name or str(path)
    csv.field_size_limit(MAX_LINE_CHARS)  # its default of 131,072 characters is less than a long document has
    rows = csv.reader(
        read_record_lines(path, encoding, name, read_progress), delimiter=delimiter, quoting=quoting, strict=True
    )
    header: list[str] | None = None
    number = 1
    try:
        for row in rows:
            if header is None:
                header = row
                if twice := next((column for column in row if column and row.count(column) > 1), None):
                    raise UserError(f"{name}:{number}: the column {twice!r} stands twice. Give each a name of its own.")
            elif row and len(row) != len(header):
                raise UserError(
                    f"{name}:{number}: {format_count(len(row), 'cell')}, but the first line names {len(header)}."
                )
            elif row:
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1
    except csv.Error as e:
        raise UserError(f"{name}:{number}: not a row of a {data_extension(path)} file ({e}).") from None


def read_parquet_records(
    path: Path, wanted_columns: Collection[str], read_progress: ReadProgress | None = None
) -> NumberedRecords:
    """The rows of a .parquet file by number from 1, with those of the wanted columns that it has.

    They are read a few at a time, so that memory does not grow with the file.
    """
    if path.suffix.lower() in DECOMPRESSORS:
        raise UserError(f"{path}: a .parquet file is compressed inside. Decompress {path.suffix} first.")
    parquet = import_optional("pyarrow.parquet", f"{path}: reading .parquet files")
    number = 0
    try:
        with open_decompressed(path) as file:  # ours, so that a file which may not be read is said as of any other
            table = parquet.ParquetFile(file, pre_buffer=False)
            size, num_rows = path.stat().st_size, max(table.metadata.num_rows, 1)
            there = dict.fromkeys(table.schema_arrow.names)
            names = [column for column in there if column in wanted_columns]
            with (read_progress or ReadProgress()).track_file(size, lambda: size * number // num_rows):
                for batch in table.iter_batches(parquet_batch_rows(table.metadata), columns=names):
                    for record in batch.to_pylist():
                        number += 1
                        yield number, there | record
    except UserError:
        raise
    except Exception as e:  # pyarrow raises many kinds for a damaged file
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a whole .parquet file, after row {number:,} ({reason}).") from None


def parquet_batch_rows(metadata: Any) -> int:
    """How many rows of a .parquet file to read at a time, by their mean size."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(1024, PARQUET_BATCH_BYTES * metadata.num_rows // max(size, 1)))


# In .tsv a quotation mark is a character like any other, as GLUE's files and most corpora have it.
RECORD_READERS: dict[str, Callable[..., NumberedRecords]] = {
    ".jsonl": read_jsonl_records,
    ".csv": read_table_records,
    ".tsv": partial(read_table_records, delimiter="\t", quoting=csv.QUOTE_NONE),
}


# Columns


def resolve_columns(columns: Mapping[str, str] | None, roles: Iterable[str]) -> dict[str, str]:
    """The column of each role: of the same name, unless the user named another."""
    named = {role: role for role in roles}
    for role, column in (columns or {}).items():
        if role not in named:
            raise UserError(f"--columns {role}={column}: nothing is called {role!r} here. {did_you_mean(role, named)}")
        named[role] = column
    return named


class MissingColumnError(UserError):
    """A column that is missing; `available_columns` are those that a record has."""

    def __init__(self, message: str, available_columns: tuple[str, ...]) -> None:
        super().__init__(message)
        self.available_columns = available_columns


def get_column_value(record: Mapping[str, Any], role: str, column: str, where: str, alternatives: str = "") -> Any:
    """What a record holds in a column; if there is none, the error says which there are, and what else would do."""
    if column not in record:
        there = ", ".join(str(name)[:40] for name in record) or "none"
        close = get_close_matches(role if alternatives else column, map(str, record), n=1)
        hint = f"Name the right one: --columns {role}={close[0] if close else 'NAME'}."
        if len(record) == 1 and ";" in there:
            hint = "It looks separated by semicolons: save it with commas (.csv) or tabs (.tsv)."
        raise MissingColumnError(
            f"{where}: no column {column!r}{alternatives}; there are: {there}. {hint}", tuple(map(str, record))
        )
    return record[column]


def get_column_text(record: Mapping[str, Any], role: str, column: str, where: str) -> str:
    """As `get_column_value`, for what must be text."""
    value = get_column_value(record, role, column, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {preview_value(value)}, which is not text.")
    return value


def preview_value(value: Any) -> str:
    """The beginning of any value, to show in a message."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]
