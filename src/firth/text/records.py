"""Read records (a value for each column) from .jsonl, .csv, .tsv and .parquet files, and look up their columns."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from firth.core.console import format_count
from firth.core.errors import UserError, did_you_mean, list_names, quote
from firth.core.parse import parse_json
from firth.text.open_text import (
    DECOMPRESSORS,
    ReadProgress,
    check_expansion,
    import_optional,
    open_decompressed,
    read_lines,
)

NumberedRecords = Iterator[tuple[int, dict[str, Any]]]
MAX_PREVIEW_CHARS = 40  # of a value in a message
MAX_LINE_CHARS = 2**26  # characters; bounds the memory for parsing one record
DUMP_RANGE = re.compile(r"(?<=\.xml)-p\d+p\d+$")
PARQUET_BATCH_BYTES = 2**24  # approximate size of a batch of rows in memory


def data_extension(path: Path) -> str:
    """Return the extension without that of the compression, and without the range of pages in a Wikipedia dump's name.

    >>> data_extension(Path("a.jsonl.xz")), data_extension(Path("B.TXT")), data_extension(Path("a1.xml-p1p41242.bz2"))
    ('.jsonl', '.txt', '.xml')
    """
    inner = Path(path.stem) if path.suffix.lower() in DECOMPRESSORS else path
    return DUMP_RANGE.sub("", inner.suffix.lower())


def is_numeric_string(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


# Reading


def read_jsonl_records(
    path: Path,
    encoding: str = "utf-8",
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    bound_size: bool = False,
) -> NumberedRecords:
    """Yield the objects of a .jsonl file with their line numbers; blank lines are skipped."""
    name = name or str(path)
    for number, line in enumerate(read_record_lines(path, encoding, name, read_progress, bound_size), 1):
        if not line.strip():
            continue
        record = parse_json(line, name, number)
        if not isinstance(record, dict):
            raise UserError(f'{name}:{number}: not an object. Each line must be like {{"text": "..."}}.')
        yield number, record


def read_record_lines(
    path: Path,
    encoding: str,
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    bound_size: bool = True,
) -> Iterator[str]:
    """Yield the lines of a file; a line over `MAX_LINE_CHARS` is a UserError, and a decompression bomb too."""
    name = name or str(path)
    for number, line in enumerate(read_lines(path, encoding, MAX_LINE_CHARS, name, read_progress, bound_size), 1):
        if len(line) >= MAX_LINE_CHARS and not line.endswith("\n"):
            raise UserError(
                f"{name}:{number}: a line of more than {MAX_LINE_CHARS:,} characters. "
                "Use .txt, which is read in pieces, or shorter lines."
            )
        yield line


def read_table_records(
    path: Path,
    encoding: str = "utf-8",
    name: str | None = None,
    read_progress: ReadProgress | None = None,
    delimiter: str = "",
    quoting: Literal[0, 3] = 0,
    bound_size: bool = False,
) -> NumberedRecords:
    """Yield the rows of a table with their line numbers; the first line names the columns. No delimiter: it tells."""
    name = name or str(path)
    csv.field_size_limit(MAX_LINE_CHARS)  # its default of 131,072 characters is too small for documents
    lines = read_record_lines(path, encoding, name, read_progress, bound_size)
    first = list(islice(lines, 1))
    rows = csv.reader(
        chain(first, lines), delimiter=delimiter or csv_delimiter("".join(first)), quoting=quoting, strict=True
    )
    header: list[str] | None = None
    number = 1
    try:
        for row in rows:
            if header is None:
                header = row
                if duplicate := next((column for column in row if column and row.count(column) > 1), None):
                    raise UserError(f"{name}:{number}: two columns are named {quote(duplicate)}. Rename one.")
            elif row and len(row) != len(header):
                raise UserError(
                    f"{name}:{number}: {format_count(len(row), 'cell')}, but the first line names {len(header)}."
                )
            elif row:
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1
    except csv.Error as e:
        fault = str(e)
        if "new-line" in fault:  # Python's advice is for its programmers
            fault = r"a carriage return \r that no \n follows: replace it by a space, or by \n where it ends the line"
        raise UserError(f"{name}:{number}: not a row of a {data_extension(path)} file ({fault}).") from None


def csv_delimiter(header: str) -> str:
    """Return what separates the columns of a .csv file: commas, or semicolons or tabs if its first line has no comma.

    Spreadsheets write semicolons in countries where a comma stands in numbers.

    >>> csv_delimiter("text,label"), csv_delimiter('"text, raw";label'), csv_delimiter("text")
    (',', ';', ',')
    """
    unquoted = re.sub('"[^"]*"', "", header)
    return next((mark for mark in ",;\t" if mark in unquoted), ",")


def read_parquet_records(
    path: Path, wanted_columns: Collection[str], read_progress: ReadProgress | None = None
) -> NumberedRecords:
    """Yield the rows of a .parquet file, numbered from 1; columns that are not wanted are None.

    Rows are read in batches, so memory does not grow with the file. A dictionary page stores a repeated text once, so
    kilobytes may stand for gigabytes: texts stay dictionary-encoded until their row is read.
    """
    if path.suffix.lower() in DECOMPRESSORS:
        raise UserError(f"{path}: a .parquet file is compressed inside. Decompress {path.suffix} first.")
    parquet = import_optional("pyarrow.parquet", f"{path}: reading .parquet files")
    number = 0
    try:
        with open_decompressed(path) as file:  # so that a missing permission has the usual message
            metadata = parquet.read_metadata(file)
            columns = [metadata.schema.column(i) for i in range(metadata.num_columns)]
            texts = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and "." not in c.path]  # not of lists
            table = parquet.ParquetFile(file, metadata=metadata, pre_buffer=False, read_dictionary=texts)
            check_parquet_rows(metadata, str(path))
            size, num_rows = path.stat().st_size, max(metadata.num_rows, 1)
            empty_record = dict.fromkeys(table.schema_arrow.names)
            names = [column for column in empty_record if column in wanted_columns]
            check_parquet_expansion(metadata, size, str(path))
            with (read_progress or ReadProgress()).track_file(size, lambda: size * number // num_rows):
                for batch in table.iter_batches(parquet_batch_rows(metadata), columns=names):
                    for record in iter_batch_records(batch, f"{path}:row ", number):
                        number += 1
                        yield number, empty_record | record
    except UserError:
        raise
    except Exception as e:  # pyarrow raises many types for a damaged file
        reason = str(e).splitlines()[0][:200] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a complete .parquet file, after row {number:,} ({reason}).") from None


def parquet_batch_rows(metadata: Any) -> int:
    """Number of rows per batch, from their mean size."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(1024, PARQUET_BATCH_BYTES * metadata.num_rows // max(size, 1)))


def check_parquet_rows(metadata: Any, name: str) -> None:
    """Raise a UserError for numbers of rows that do not fit: pyarrow ends the process on a row group of -1 rows."""
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    if min(counts, default=0) < 0 or sum(counts) != metadata.num_rows:
        raise UserError(
            f"{name}: a damaged .parquet file: it has {metadata.num_rows:,} rows, and its row groups {sum(counts):,}."
        )


def check_parquet_expansion(metadata: Any, num_bytes: int, name: str) -> None:
    """Raise a UserError for pages that decompress to far more than the file has.

    The sizes of whole row groups are compared: pyarrow ends the process on damaged metadata of a single column.
    """
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    check_expansion(size, num_bytes, name)


def iter_batch_records(batch: Any, where: str, num_before: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, converting a few at a time; a row over `MAX_LINE_CHARS` bytes is a UserError."""
    sizes_N = sum((value_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))
    if (largest := sizes_N.max(initial=0)) > MAX_LINE_CHARS:
        number = num_before + int(sizes_N.argmax()) + 1
        raise UserError(
            f"{where}{number}: {largest:,} bytes of text, more than {MAX_LINE_CHARS:,}. Split it into rows."
        )
    slice_of_row_N = np.cumsum(sizes_N) // PARQUET_BATCH_BYTES
    bounds = [0, *(np.flatnonzero(np.diff(slice_of_row_N)) + 1).tolist(), batch.num_rows]
    for start, end in pairwise(bounds):
        yield from batch.slice(start, end - start).to_pylist()


def value_sizes(array: Any) -> np.ndarray:
    """Return (N,): the bytes of each value of a pyarrow array: those of the dictionary entry, where it has one."""
    if not hasattr(array, "dictionary"):
        return np.full(len(array), array.nbytes // max(len(array), 1), np.int64)
    compute = import_optional("pyarrow.compute", "reading .parquet files")
    lengths_V = compute.binary_length(array.dictionary).fill_null(0).to_numpy(zero_copy_only=False)
    indices_N = array.indices.fill_null(len(lengths_V)).to_numpy(zero_copy_only=False)
    return np.append(lengths_V, 0).astype(np.int64)[indices_N]  # the last entry is that of a missing value


# A quotation mark in a .tsv file is an ordinary character, as in GLUE's files and most corpora.
RECORD_READERS: dict[str, Callable[..., NumberedRecords]] = {
    ".jsonl": read_jsonl_records,
    ".csv": read_table_records,
    ".tsv": partial(read_table_records, delimiter="\t", quoting=csv.QUOTE_NONE),
}


# Columns


def resolve_columns(columns: Mapping[str, str] | None, roles: Iterable[str]) -> dict[str, str]:
    """Return the column of each role: the user's, or the one with the name of the role."""
    named = {role: role for role in roles}
    for role, column in (columns or {}).items():
        if role not in named:
            near = did_you_mean(role, named)
            raise UserError(f"--columns {role}={column}: there is no role {quote(role)} here. {near}")
        named[role] = column
    return named


class MissingColumnError(UserError):
    """A missing column; `available_columns` are the columns of the record."""

    def __init__(self, message: str, available_columns: tuple[str, ...]) -> None:
        super().__init__(message)
        self.available_columns = available_columns


def get_column_value(record: Mapping[str, Any], role: str, column: str, where: str, alternatives: str = "") -> Any:
    """Return a record's value in a column; the error for a missing column lists the available ones."""
    if column not in record:
        names = list_names(record) or "none"
        close = get_close_matches(role if alternatives else column, map(str, record), n=1)
        hint = f"Name the right one: --columns {role}={close[0] if close else 'NAME'}."
        if not close and column != role and role in record:
            hint = f"--columns names the columns of all files: rename {quote(role)} to {quote(column)} in this one."
        elif len(record) == 1 and ";" in names:
            hint = "It looks separated by semicolons: name it .csv."
        raise MissingColumnError(
            f"{where}: no column {quote(column)}{alternatives}; there are: {names}. {hint}", tuple(map(str, record))
        )
    return record[column]


def get_column_text(record: Mapping[str, Any], role: str, column: str, where: str) -> str:
    """As `get_column_value`, for a value that must be a string."""
    value = get_column_value(record, role, column, where)
    if not isinstance(value, str):
        raise UserError(f"{where}: column {quote(column)} holds {preview_value(value)}, which is not text.")
    return value


def preview_value(value: Any) -> str:
    """Return the first characters of a value as JSON, for a message; no more of it is written than is shown."""
    written = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        written += piece[:MAX_PREVIEW_CHARS]
        if len(written) >= MAX_PREVIEW_CHARS:
            break
    return written[:MAX_PREVIEW_CHARS]
