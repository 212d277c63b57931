"""Read CoNLL files: one word per line with its tag in a further column, and a blank line after each sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from firth.core.console import format_count, say
from firth.core.errors import UserError
from firth.text.records import read_record_lines

DOCSTART_MARKER = "-DOCSTART-"
CONLLU_WIDTH, CONLLU_WORD, CONLLU_TAG = 10, 2, 4  # columns: of a line, the one of words, the one of parts of speech
CONLLU_ID = re.compile(r"\d+(?:[-.]\d+)?")  # 1, a multiword token 1-2, an empty node 8.1


def read_conll_records(
    path: Path, encoding: str, columns: Mapping[str, str], require_labels: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the sentences, each with the number of its first line.

    The first column is the word and the last its tag; `columns={"tokens": "2", "tags": "4"}` selects others, counted
    from 1. Tabs or spaces separate columns. Comments and `-DOCSTART-` are skipped. Of CoNLL-U, ten columns that begin
    with the number of the word, the defaults are the word and its universal part of speech; lines of multiword tokens
    and empty nodes are skipped. Without `require_labels` a file may have words only.
    """
    token_column, tag_column = parse_column_number(columns, "tokens", 1), parse_column_number(columns, "tags", 0)
    width, first, start, is_conllu = 0, 0, 0, False
    words: list[str] = []
    tags: list[str] = []
    known_tags: set[str] = set()

    def sentence() -> dict[str, Any]:
        is_default = start == first and columns["tokens"] == "tokens"
        if is_default and len(words) > 1 and words == [str(i + 1) for i in range(len(words))]:
            raise UserError(
                f"{path}:{start}: column 1 counts the words (1, 2 ...). Name the columns of words and tags by their "
                "numbers: --columns tokens=2,tags=3."
            )
        return {columns["tokens"]: list(words), **({columns["tags"]: list(tags)} if tags else {})}

    for number, line in enumerate(read_record_lines(path, encoding), 1):
        cells = split_conll_columns(line)
        if not cells or cells[0] == DOCSTART_MARKER:
            if words:
                yield start, sentence()
                words.clear()
                tags.clear()
            continue
        if is_conll_comment(cells, width, known_tags):
            continue
        if not width:
            width, first = len(cells), number
            is_conllu = width == CONLLU_WIDTH and CONLLU_ID.fullmatch(cells[0]) is not None
            if is_conllu:
                token_column = parse_column_number(columns, "tokens", CONLLU_WORD)
                tag_column = parse_column_number(columns, "tags", CONLLU_TAG)
                say(f"{path}: CoNLL-U, with the words of column {token_column} and the tags of column {tag_column}")
            check_conll_columns(width, token_column, tag_column, require_labels, f"{path}:{number}")
        elif len(cells) != width:
            hint = "" if require_labels else " It was read as CoNLL; for raw sentences use `firth predict`."
            columns_found = format_count(len(cells), "column")
            raise UserError(f"{path}:{number}: {columns_found}, but line {first} has {width}.{hint}")
        if is_conllu and not cells[0].isdecimal():
            continue
        word = cells[token_column - 1]
        if not word.strip():
            raise UserError(f"{path}:{number}: no word in column {token_column}. Fill it in, or delete the line.")
        start = start if words else number
        words.append(word)
        if width > 1:
            tags.append(cells[tag_column - 1])
            known_tags.add(cells[tag_column - 1])
    if words:
        yield start, sentence()


def split_conll_columns(line: str) -> list[str]:
    """Split a line at tabs if it has any, otherwise at spaces; a blank line has no cells."""
    if not line.strip():
        return []
    line = line.rstrip("\n")
    return line.split("\t") if "\t" in line else [cell for cell in line.split(" ") if cell]


def is_conll_comment(cells: list[str], num_columns: int, known_tags: set[str]) -> bool:
    """Whether a line that starts with # is a comment, and not a word such as # or #monday with its tag."""
    if not cells[0].startswith("#"):
        return False
    if len(cells) != num_columns:
        return num_columns > 0 or cells[0] == "#" or len(cells) == 1
    return cells[0] == "#" and cells[-1] not in known_tags


def parse_column_number(columns: Mapping[str, str], role: str, default: int) -> int:
    """Return a column number, counted from 1; 0 is the last column."""
    name = columns[role]
    if name == role:
        return default
    if not name.isdecimal() or int(name) < 1:
        raise UserError(f"--columns {role}={name}: CoNLL columns have no names. Give a number from 1: {role}=2.")
    return int(name)


def check_conll_columns(num_columns: int, token_column: int, tag_column: int, require_labels: bool, where: str) -> None:
    if max(token_column, tag_column) > num_columns:
        verb = "is" if num_columns == 1 else "are"
        raise UserError(f"{where}: no column {max(token_column, tag_column)}, there {verb} {num_columns}.")
    if num_columns == 1 and require_labels:
        raise UserError(f"{where}: one column only. Each line needs a word and, after a tab or a space, its tag.")
