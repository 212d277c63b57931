"""Columns of words and tags, one word on a line and a blank line after each sentence, as the CoNLL tasks have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from firth.console import count
from firth.errors import UserError
from firth.text.lines import lines

DOCUMENT = "-DOCSTART-"


def conll_records(
    path: Path, encoding: str, columns: Mapping[str, str], answers: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The sentences, each with the number of its first line.

    The first column is the word and the last its tag, unless `columns={"tokens": "2", "tags": "4"}` counts others,
    from 1. Tabs or spaces stand between them. Comments and `-DOCSTART-` are passed over. Without `answers` a file of
    a single column is words alone.
    """
    token_column, tag_column = column_number(columns, "tokens", 1), column_number(columns, "tags", 0)
    width, start = 0, 0
    words: list[str] = []
    tags: list[str] = []
    seen: set[str] = set()

    def sentence() -> dict[str, Any]:
        return {columns["tokens"]: list(words), **({columns["tags"]: list(tags)} if tags else {})}

    for number, line in enumerate(lines(path, encoding), 1):
        cells = cells_in(line)
        if not cells or cells[0] == DOCUMENT:
            if words:
                yield start, sentence()
                words.clear()
                tags.clear()
            continue
        if is_comment(cells, width, seen):
            continue
        if not width:
            width, first = len(cells), number
            check_width(width, token_column, tag_column, answers, f"{path}:{number}")
        elif len(cells) != width:
            raise UserError(f"{path}:{number}: {count(len(cells), 'column')}, but line {first} has {width}.")
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


def cells_in(line: str) -> list[str]:
    """The cells of a line: between tabs if it has some, or else between spaces; none of a blank line."""
    if not line.strip():
        return []
    line = line.rstrip("\n")
    return line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]


def is_comment(cells: list[str], width: int, seen: set[str]) -> bool:
    """Whether a line that begins with # is a comment, and not a word such as # or #monday with its tag."""
    if not cells[0].startswith("#"):
        return False
    if len(cells) != width:
        return width > 0 or cells[0] == "#" or len(cells) == 1
    return cells[0] == "#" and cells[-1] not in seen


def column_number(columns: Mapping[str, str], role: str, usual: int) -> int:
    """A column counted from 1; 0 is the last."""
    name = columns[role]
    if name == role:
        return usual
    if not name.isdecimal() or int(name) < 1:
        raise UserError(f"--columns {role}={name}: these columns have no names. Count them from 1: {role}=2.")
    return int(name)


def check_width(width: int, token_column: int, tag_column: int, answers: bool, where: str) -> None:
    if max(token_column, tag_column) > width:
        raise UserError(
            f"{where}: no column {max(token_column, tag_column)}, there {'is' if width == 1 else 'are'} {width}."
        )
    if width == 1 and answers:
        raise UserError(f"{where}: one column only. Each line needs a word and, after a tab or a space, its tag.")
