"""One row of a labelled file: its columns by role, and where it stands should something be wrong with it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from firth.core.console import format_count, warn
from firth.core.errors import UserError
from firth.text.documents import Example
from firth.text.records import get_column_value, preview_value

LABEL_TYPE_NAMES = {str: "text", bool: "true or false", int: "number", float: "number"}  # of labels, as JSON has them
MAX_LISTED_ROWS = 3  # places that a note names before it only counts


@dataclass
class RowNotes:
    """What happened to the rows of a file that its reader should be told at the end, and to which."""

    path: str
    row_locations: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    label_types: dict[str, dict[str, Any]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # of labels, each with its first

    def add(self, noun: str, message: str, location: str) -> None:
        self.row_locations[noun, message].append(location)

    @property
    def is_abridged(self) -> bool:
        """Whether `print_summary` leaves places out."""
        return any(len(places) > MAX_LISTED_ROWS for places in self.row_locations.values())

    def to_records(self) -> list[dict[str, Any]]:
        """The same with all places, for a file."""
        return [
            {"file": self.path, "note": f"{format_count(len(places), noun)} {what}", "examples": places}
            for (noun, what), places in self.row_locations.items()
        ]

    def print_summary(self) -> None:
        """One line for each thing that happened: how often, what, and the first places."""
        for (noun, what), places in self.row_locations.items():
            more = ", ..." if len(places) > MAX_LISTED_ROWS else ""
            warn(
                f"{self.path}: {format_count(len(places), noun)} {what} ({', '.join(places[:MAX_LISTED_ROWS])}{more})."
            )
        for column, kinds in self.label_types.items():
            if len(kinds) > 1:
                some = ", ".join(f"{preview_value(first)} ({kind})" for kind, first in kinds.items())
                warn(
                    f"{self.path}: the labels in {column!r} are of {len(kinds)} kinds: {some}. Each becomes text, so "
                    '1 and "1" are the same label.'
                )


@dataclass(slots=True)
class LabelledRow:
    """A record, the column of each role in it, and whether it must have answers."""

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
        """The row's own id if it has a usable one, or else its line."""
        own = self.record.get(self.column("id"))
        return own if isinstance(own, str | int) and not isinstance(own, bool) and own != "" else self.line_number

    def has_value(self, role: str) -> bool:
        """Whether the row has something in a column that it may lack, unless the user named that column."""
        if self.require_labels and self.is_column_renamed(role):
            return self.value(role) is not None
        return self.record.get(self.column(role)) is not None

    def is_column_renamed(self, role: str) -> bool:
        return self.column(role) != role

    def first_available_role(self, *roles: str) -> str:
        """The role that the user named a column for, or else the first of those that the row has, or else of all."""
        those = [role for role in roles if self.is_column_renamed(role)] or roles
        return next((role for role in those if self.column(role) in self.record), those[0])

    def is_label_missing(self, role: str) -> bool:
        """Whether an answer is missing and may be."""
        return not self.require_labels and self.record.get(self.column(role)) in (None, "")

    def value(self, role: str) -> Any:
        return get_column_value(self.record, role, self.column(role), self.where)

    def text(self, role: str) -> str:
        value = self.value(role)
        if not isinstance(value, str):
            several = role == "target" and isinstance(value, list)
            way = f". Where several answers are right, name the column as references={self.column(role)}" * several
            raise self.column_error(role, f"holds {preview_value(value)}, which is not text{way}")
        return self.require_nonempty(role, value)

    def require_nonempty(self, role: str, text: str) -> str:
        if not text or text.isspace():
            raise self.column_error(role, "is empty. Fill it in, or take the line out")
        return text

    def label(self, role: str) -> str | None:
        """A label as a string: a JSON `true` or `3` becomes "true" or "3"."""
        if self.is_label_missing(role):
            return None
        value = self.value(role)
        self.notes.label_types[self.column(role)].setdefault(LABEL_TYPE_NAMES.get(type(value), ""), value)
        return self.require_nonempty(role, self.to_label(value))

    def to_label(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        raise UserError(
            f"{self.where}: the label {preview_value(value)} is neither text nor a number nor true or false."
        )

    def score(self, role: str) -> float | None:
        """A finite number, also where a table spells it."""
        if self.is_label_missing(role):
            return None
        value = self.value(role)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := float(value)):
                    return number
        raise self.column_error(role, f"holds {preview_value(value)}, which is not a number")

    def index(self, role: str) -> int | None:
        """A whole number, also where a table spells it."""
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
        """A list; a table spells it as JSON."""
        value = parse_json_list(self.value(role))
        if not isinstance(value, list):
            raise self.column_error(role, f"holds {preview_value(value)}, which is not a list")
        return value

    def word_list(self, role: str) -> tuple[str, ...]:
        """A list of texts, or of labels; a table may spell it with spaces between."""
        value = parse_json_list(self.value(role))
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, list) and all(type(item) is str for item in value):
            return tuple(value)
        return tuple(self.to_label(item) for item in self.list_items(role))

    def text_list(self, role: str) -> tuple[str, ...]:
        """A list of texts, none of them empty."""
        found = self.list_items(role)
        if not all(isinstance(text, str) for text in found):
            raise self.column_error(role, f"holds {preview_value(found)}, which is not a list of texts")
        return tuple(self.require_nonempty(role, text) for text in found)

    def span(self, role: str, length: int, unit: str) -> tuple[int, int]:
        """A stretch [start, end) of what is `length` units long."""
        found = self.list_items(role)
        if len(found) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in found):
            raise self.column_error(role, f"holds {preview_value(found)}, which is not [start, end]")
        return self.check_span(role, found[0], found[1], length, unit)

    def check_span(self, role: str, start: int, end: int, length: int, unit: str) -> tuple[int, int]:
        if not 0 <= start < end <= length:
            raise self.column_error(role, f"is [{start}, {end}), outside of the {length:,} {unit} that there are")
        return start, end

    def column_error(self, role: str, message: str) -> UserError:
        return UserError(f"{self.where}: column {self.column(role)!r} {message}.")

    def make_example(self, texts: tuple[str, ...], target: Any = None, **fields: Any) -> Example:
        return Example(self.id, texts, target, **fields)

    def note_skipped(self, noun: str, reason: str) -> None:
        """No example comes of this row: say so at the end."""
        self.notes.add(noun, f"left out {reason}", self.location_in_file)

    @property
    def location_in_file(self) -> str:
        """The row inside its file: its own id, or its line."""
        return str(self.id) if self.id != self.line_number else f"line {self.line_number:,}"


def parse_json_list(value: Any) -> Any:
    """What a cell of a table means: a list, if it spells one as JSON, or else itself."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
