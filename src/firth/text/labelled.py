"""Read labelled .jsonl, .tsv and .csv files, plain or compressed, into examples."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from firth.console import warn
from firth.errors import UserError, nearest
from firth.text import pydocs
from firth.text.clean import repair
from firth.text.corpus import count, extension, json_records, known_encoding, lines, rename, text_in, value_in
from firth.text.kinds import Example as Example

Records = Iterator[tuple[int, dict[str, Any]]]


class Columns(NamedTuple):
    """The columns that a task reads, and the one it asks for."""

    texts: tuple[str, ...]
    target: str


TASKS = {
    "classify": Columns(("text",), "label"),
    "pair": Columns(("text_a", "text_b"), "label"),
    "text-to-text": Columns(("source",), "target"),
}


def read_labelled(
    path: str | Path,
    task: str,
    columns: Mapping[str, str] | None = None,
    part: str = "train",
    encoding: str = "utf-8",
) -> list[Example]:
    """The examples of a file, in its order, with labels as strings (a JSON `true` or `3` becomes "true" or "3").

    The columns are those of `TASKS`, unless `columns={"text": "sentence"}` names others. The path "pydocs" is the
    built-in data; only there `part` chooses between "train" and "dev".
    """
    if task not in TASKS:
        raise UserError(f"task {task!r} is not known. {nearest(task, TASKS)}")
    if path == pydocs.NAME:
        return pydocs.examples(task, part)
    wanted = TASKS[task]
    named = rename(columns, [*wanted.texts, wanted.target])
    examples = []
    for number, record in records(Path(path), known_encoding(encoding)):
        where = f"{path}:{number}"
        texts = tuple(filled(text_in(record, role, named[role], where), named[role], where) for role in wanted.texts)
        label = as_label(value_in(record, wanted.target, named[wanted.target], where), where)
        examples.append(Example(own_id(record, number), texts, filled(label, named[wanted.target], where)))
    if not examples:
        raise UserError(f"{path}: no examples in this file.")
    return whole_characters(examples, str(path))


def whole_characters(examples: list[Example], path: str) -> list[Example]:
    """Replace half characters, which no tokenizer takes, and say so."""
    whole = [Example(e.id, tuple(map(repair, e.texts)), repair(e.target)) for e in examples]
    broken = sum(new != old for new, old in zip(whole, examples, strict=True))
    if broken:
        warn(f"{path}: {count(broken, 'example')} with half characters (lone surrogates) replaced by U+FFFD.")
    return whole


def own_id(record: Mapping[str, Any], number: int) -> str | int:
    """The example's own `id` if it has a usable one, or else its line."""
    own = record.get("id")
    return own if isinstance(own, str | int) and not isinstance(own, bool) else number


def as_label(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise UserError(f"{where}: the label {json.dumps(value)[:40]} is neither text nor a number nor true or false.")


def filled(text: str, column: str, where: str) -> str:
    if not text.strip():
        raise UserError(f"{where}: column {column!r} is empty. Fill it in, or take the line out.")
    return text


def records(path: Path, encoding: str) -> Records:
    """The rows of a file by column name, each with the number of its first line."""
    kind = extension(path)
    if kind not in READERS:
        kinds = ", ".join(READERS)
        raise UserError(f"{path}: labelled files are {kinds}, plain or as .gz or .xz; {kind or 'this'!r} is not.")
    return READERS[kind](path, encoding)


def table_records(path: Path, encoding: str, delimiter: str, quoting: Literal[0, 3]) -> Records:
    """The rows of a table whose first line names the columns; each row must have as many cells as that."""
    csv.field_size_limit(sys.maxsize)  # its default of 131,072 characters is less than a long document has
    rows = csv.reader(lines(path, encoding), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] | None = None
    number = 1
    try:
        for row in rows:
            if header is None:
                header = row
            elif row and len(row) != len(header):
                raise UserError(f"{path}:{number}: {count(len(row), 'cell')}, but the first line names {len(header)}.")
            elif row:
                yield number, dict(zip(header, row, strict=True))
            number = rows.line_num + 1
    except csv.Error as e:
        raise UserError(f"{path}:{number}: not a row of a {extension(path)} file ({e}).") from None


# In .tsv a quotation mark is a character like any other, as GLUE's files and most corpora have it.
READERS: dict[str, Callable[[Path, str], Records]] = {
    ".jsonl": json_records,
    ".csv": partial(table_records, delimiter=",", quoting=csv.QUOTE_MINIMAL),
    ".tsv": partial(table_records, delimiter="\t", quoting=csv.QUOTE_NONE),
}
