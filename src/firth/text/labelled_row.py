"""One row of a labelled file: typed access to its columns by role, with errors that name file, line and column."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from firth.core.console import format_count, warn
from firth.core.errors import UserError, quote
from firth.text.documents import Example
from firth.text.records import get_column_value, preview_value

LABEL_TYPE_NAMES = {str: "text", bool: "true or false", int: "number", float: "number"}  # JSON types of labels
MAX_LISTED_ROWS = 3  # rows that a printed note names
PYTHON_LIST = re.compile(r"""\[['"].*['"],?\]""", re.DOTALL)  # str() of a list or an array of texts


@dataclass
class RowNotes:
    """Notes about rows of a file that were changed or dropped, printed after reading."""

    path: str
    row_locations: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    unlabelled_lines: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by column
    # column -> type of its labels -> the first label of that type
    label_types: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, noun: str, message: str, location: str) -> None:
        self.row_locations[noun, message].append(location)

    @property
    def is_abridged(self) -> bool:
        """Whether `print_summary` omits rows."""
        return any(len(rows) > MAX_LISTED_ROWS for rows in self.row_locations.values())

    def check_labels(self, num_rows: int) -> None:
        """Raise if rows lack a required label."""
        for column, lines in self.unlabelled_lines.items():
            listed = ", ".join(map(str, lines[:MAX_LISTED_ROWS])) + (", ..." if len(lines) > MAX_LISTED_ROWS else "")
            raise UserError(
                f"{self.path}: column {quote(column)} is empty in {len(lines):,} of {format_count(num_rows, 'row')} "
                f"(line {listed}). Fill it in, or delete these rows."
            )

    def to_records(self) -> list[dict[str, Any]]:
        """Return all notes with all rows, for a JSON file."""
        return [
            {"file": self.path, "note": f"{format_count(len(rows), noun)} {message}", "examples": rows}
            for (noun, message), rows in self.row_locations.items()
        ]

    def print_summary(self) -> None:
        """Print one line per note: the count, the message, and the first rows."""
        for (noun, message), rows in self.row_locations.items():
            listed = ", ".join(rows[:MAX_LISTED_ROWS]) + (", ..." if len(rows) > MAX_LISTED_ROWS else "")
            warn(f"{self.path}: {format_count(len(rows), noun)} {message} ({listed}).")
        for column, kinds in self.label_types.items():
            if len(kinds) > 1:
                examples = ", ".join(f"{preview_value(first)} ({kind})" for kind, first in kinds.items())
                warn(
                    f"{self.path}: the labels in {quote(column)} are of {len(kinds)} kinds: {examples}. Each becomes "
                    'text, so 1 and "1" are the same label.'
                )


@dataclass(slots=True)
class LabelledRow:
    """A record, the column of each role, and whether labels are required."""

    record: Mapping[str, Any]
    columns: Mapping[str, str]
    where: str
    line_number: int
    require_labels: bool
    notes: RowNotes
    split: str = "train"

    def column(self, role: str) -> str:
        return self.columns.get(role, role)

    @property
    def id(self) -> str | int:
        """The id in the row if it is a nonempty string or an integer, otherwise the line number."""
        own = self.record.get(self.column("id"))
        return own if isinstance(own, str | int) and not isinstance(own, bool) and own != "" else self.line_number

    def has_value(self, role: str) -> bool:
        """Whether the row has a value in an optional column. A column that the user named is not optional."""
        if self.require_labels and self.is_column_renamed(role):
            return self.value(role) is not None
        return self.record.get(self.column(role)) is not None

    def is_column_renamed(self, role: str) -> bool:
        return self.column(role) != role

    def first_available_role(self, *roles: str) -> str:
        """Return the first role whose column the row has; roles that the user renamed come before all others."""
        candidates = [role for role in roles if self.is_column_renamed(role)] or roles
        return next((role for role in candidates if self.column(role) in self.record), candidates[0])

    def is_label_missing(self, role: str) -> bool:
        """Whether a label is missing and not required."""
        return not self.require_labels and self.record.get(self.column(role)) in (None, "")

    def value(self, role: str) -> Any:
        return get_column_value(self.record, role, self.column(role), self.where)

    def text(self, role: str) -> str:
        value = self.value(role)
        if not isinstance(value, str):
            is_list = role == "target" and isinstance(value, list)
            fix = f". If several answers are right, name the column as references={self.column(role)}" * is_list
            raise self.column_error(role, f"holds {preview_value(value)}, which is not text{fix}")
        return self.require_nonempty(role, value)

    def require_nonempty(self, role: str, text: str) -> str:
        if not text or text.isspace():
            raise self.column_error(role, "is empty. Fill it in, or delete the line")
        return text

    def label(self, role: str) -> str | None:
        """Return a label as a string: a JSON `true` or `3` becomes "true" or "3".

        `notes` counts the rows that lack a required label; they are None too.
        """
        if self.is_label_missing(role):
            return None
        value = self.value(role)
        if isinstance(value, str) and not value.strip():
            self.notes.unlabelled_lines[self.column(role)].append(self.line_number)
            return None
        self.notes.label_types[self.column(role)].setdefault(LABEL_TYPE_NAMES.get(type(value), ""), value)
        return self.require_nonempty(role, self.to_label(value))

    def to_label(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(
                f"{self.where}: the label is {json.dumps(value)}, as programs write a missing value. Give the right "
                "label, or delete the line."
            )
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        raise UserError(
            f"{self.where}: the label {preview_value(value)} is neither text nor a number nor true or false."
        )

    def score(self, role: str) -> float | None:
        """Return a finite number; a table's cell is parsed."""
        if self.is_label_missing(role):
            return None
        value = self.value(role)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := float(value)):
                    return number
        point = isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+,\d+\s*", value)
        hint = ". Write numbers with a decimal point" if point else ""
        raise self.column_error(role, f"holds {preview_value(value)}, which is not a number{hint}")

    def index(self, role: str) -> int | None:
        """Return an integer; a table's cell is parsed."""
        if self.is_label_missing(role):
            return None
        value = self.value(role)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            with suppress(ValueError):
                return int(value)
        raise self.column_error(role, f"holds {preview_value(value)}, which is not a whole number")

    def list_items(self, role: str) -> list[Any]:
        """Return a list; a table's cell is parsed as JSON."""
        value = parse_json_list(self.value(role))
        if not isinstance(value, list):
            raise self.column_error(role, f"holds {preview_value(value)}, which is not a list")
        return value

    def word_list(self, role: str) -> tuple[str, ...]:
        """Return a list of words or labels; a table's cell is JSON or separated by spaces."""
        value = parse_json_list(self.value(role))
        if isinstance(value, str) and PYTHON_LIST.fullmatch(value.strip()):
            raise self.column_error(
                role, f"holds {preview_value(value)}, a list as Python prints it. Write it as JSON (json.dumps)"
            )
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, list) and all(type(item) is str for item in value):
            return tuple(value)
        return tuple(self.to_label(item) for item in self.list_items(role))

    def text_list(self, role: str) -> tuple[str, ...]:
        """Return a list of nonempty texts."""
        items = self.list_items(role)
        if not all(isinstance(text, str) for text in items):
            raise self.column_error(role, f"holds {preview_value(items)}, which is not a list of texts")
        return tuple(self.require_nonempty(role, text) for text in items)

    def span(self, role: str, length: int, unit: str) -> tuple[int, int]:
        """Return a span [start, end) inside a text of `length` units."""
        items = self.list_items(role)
        if len(items) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in items):
            raise self.column_error(role, f"holds {preview_value(items)}, which is not [start, end]")
        return self.check_span(role, items[0], items[1], length, unit)

    def check_span(self, role: str, start: int, end: int, length: int, unit: str) -> tuple[int, int]:
        if not 0 <= start < end <= length:
            raise self.column_error(role, f"is [{start}, {end}), outside of the {length:,} {unit}")
        return start, end

    def column_error(self, role: str, message: str) -> UserError:
        return UserError(f"{self.where}: column {quote(self.column(role))} {message}.")

    def make_example(self, texts: tuple[str, ...], target: Any = None, **fields: Any) -> Example:
        return Example(self.id, texts, target, **fields)

    def note_skipped(self, noun: str, reason: str) -> None:
        """Note that this row gives no example."""
        self.notes.add(noun, f"left out {reason}", self.location_in_file)

    @property
    def location_in_file(self) -> str:
        """The id of the row, or its line number."""
        return str(self.id) if self.id != self.line_number else f"line {self.line_number:,}"


def parse_json_list(value: Any) -> Any:
    """Parse a cell that holds a JSON list; return any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
