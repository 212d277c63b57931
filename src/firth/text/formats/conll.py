"""Columns of words and tags, one word on a line and a blank line after each sentence, as the CoNLL tasks have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from firth.core.console import format_count
from firth.core.errors import UserError
from firth.text.open_text import read_lines

DOCSTART_MARKER = "-DOCSTART-"


def read_conll_records(
    path: Path, encoding: str, columns: Mapping[str, str], require_labels: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The sentences, each with the number of its first line.

    The first column is the word and the last its tag, unless `columns={"tokens": "2", "tags": "4"}` counts others,
    from 1. Tabs or spaces stand between them. Comments and `-DOCSTART-` are passed over. Without `require_labels` a file of
    a single column is words alone.
    """
    token_column, tag_column = parse_column_number(columns, "tokens", 1), parse_column_number(columns, "tags", 0)
    width, start = 0, 0
    words: list[str] = []
    tags: list[str] = []
    seen: set[str] = set()

    def sentence() -> dict[str, Any]:
        return {columns["tokens"]: list(words), **({columns["tags"]: list(tags)} if tags else {})}

    for number, line in enumerate(read_lines(path, encoding), 1):
        cells = split_conll_columns(line)
        if not cells or cells[0] == DOCSTART_MARKER:
            if words:
                yield start, sentence()
                words.clear()
                tags.clear()
            continue
        if is_conll_comment(cells, width, seen):
            continue
        if not width:
            width, first = len(cells), number
            check_conll_columns(width, token_column, tag_column, require_labels, f"{path}:{number}")
        elif len(cells) != width:
            raise UserError(f"{path}:{number}: {format_count(len(cells), 'column')}, but line {first} has {width}.")
        word = cells[token_column - 1]
        if not word.strip():
            raise UserError(f"{path}:{number}: no word in column {token_column}. Fill it in, or take the line out.")
        start = start if words else number
        words.append(word)
        if width > 1:
            tags.append(cells[tag_column - 1])
            seen.add(cells[tag_column - 1])
    if words:
        yield start, sentence()


def split_conll_columns(line: str) -> list[str]:
    """The cells of a line: between tabs if it has some, or else between spaces; none of a blank line."""
    if not line.strip():
        return []
    line = line.rstrip("\n")
    return line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]


def is_conll_comment(cells: list[str], num_columns: int, known_tags: set[str]) -> bool:
    """Whether a line that begins with # is a comment, and not a word such as # or #monday with its tag."""
    if not cells[0].startswith("#"):
        return False
    if len(cells) != num_columns:
        return num_columns > 0 or cells[0] == "#" or len(cells) == 1
    return cells[0] == "#" and cells[-1] not in known_tags


def parse_column_number(columns: Mapping[str, str], role: str, default: int) -> int:
    """A column counted from 1; 0 is the last."""
    name = columns[role]
    if name == role:
        return default
    if not name.isdecimal() or int(name) < 1:
        raise UserError(f"--columns {role}={name}: these columns have no names. Count them from 1: {role}=2.")
    return int(name)


def check_conll_columns(num_columns: int, token_column: int, tag_column: int, require_labels: bool, where: str) -> None:
    if max(token_column, tag_column) > num_columns:
        raise UserError(
            f"{where}: no column {max(token_column, tag_column)}, there {'is' if num_columns == 1 else 'are'} {num_columns}."
        )
    if num_columns == 1 and require_labels:
        raise UserError(f"{where}: one column only. Each line needs a word and, after a tab or a space, its tag.")
