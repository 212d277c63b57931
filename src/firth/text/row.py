"""One row of a labelled file: its columns by role, and where it stands should something be wrong with it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from firth.console import count, warn
from firth.errors import UserError
from firth.text.kinds import Example
from firth.text.records import short, value_in

KINDS = {str: "text", bool: "true or false", int: "number", float: "number"}  # of labels, as JSON has them
LISTED = 3  # places that a note names before it only counts


@dataclass
class Notes:
    """What happened to the rows of a file that its reader should be told at the end, and to which."""

    path: str
    places: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[str, dict[str, Any]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # of labels, each with its first

    def add(self, noun: str, what: str, place: str) -> None:
        self.places[noun, what].append(place)

    @property
    def shortened(self) -> bool:
        """Whether `tell` leaves places out."""
        return any(len(places) > LISTED for places in self.places.values())

    def whole(self) -> list[dict[str, Any]]:
        """The same with all places, for a file."""
        return [
            {"file": self.path, "note": f"{count(len(places), noun)} {what}", "examples": places}
            for (noun, what), places in self.places.items()
        ]

    def tell(self) -> None:
        """One line for each thing that happened: how often, what, and the first places."""
        for (noun, what), places in self.places.items():
            more = ", ..." if len(places) > LISTED else ""
            warn(f"{self.path}: {count(len(places), noun)} {what} ({', '.join(places[:LISTED])}{more}).")
        for column, kinds in self.kinds.items():
            if len(kinds) > 1:
                some = ", ".join(f"{short(first)} ({kind})" for kind, first in kinds.items())
                warn(
                    f"{self.path}: the labels in {column!r} are of {len(kinds)} kinds: {some}. Each becomes text, so "
                    '1 and "1" are the same label.'
                )


@dataclass(slots=True)
class Row:
    """A record, the column of each role in it, and whether it must have answers."""

    record: Mapping[str, Any]
    columns: Mapping[str, str]
    where: str
    number: int
    answers: bool
    notes: Notes
    part: str = "train"

    def column(self, role: str) -> str:
        return self.columns.get(role, role)

    @property
    def id(self) -> str | int:
        """The row's own id if it has a usable one, or else its line."""
        own = self.record.get(self.column("id"))
        return own if isinstance(own, str | int) and not isinstance(own, bool) and own != "" else self.number

    def has(self, role: str) -> bool:
        """Whether the row has something in a column that it may lack, unless the user named that column."""
        if self.answers and self.named(role):
            return self.value(role) is not None
        return self.record.get(self.column(role)) is not None

    def named(self, role: str) -> bool:
        return self.column(role) != role

    def first(self, *roles: str) -> str:
        """The role that the user named a column for, or else the first of those that the row has, or else of all."""
        those = [role for role in roles if self.named(role)] or roles
        return next((role for role in those if self.column(role) in self.record), those[0])

    def lacks(self, role: str) -> bool:
        """Whether an answer is missing and may be."""
        return not self.answers and self.record.get(self.column(role)) in (None, "")

    def value(self, role: str) -> Any:
        return value_in(self.record, role, self.column(role), self.where)

    def text(self, role: str) -> str:
        value = self.value(role)
        if not isinstance(value, str):
            several = role == "target" and isinstance(value, list)
            way = f". Where several answers are right, name the column as references={self.column(role)}" * several
            raise self.error(role, f"holds {short(value)}, which is not text{way}")
        return self.filled(role, value)

    def filled(self, role: str, text: str) -> str:
        if not text or text.isspace():
            raise self.error(role, "is empty. Fill it in, or take the line out")
        return text

    def label(self, role: str) -> str | None:
        """A label as a string: a JSON `true` or `3` becomes "true" or "3"."""
        if self.lacks(role):
            return None
        value = self.value(role)
        self.notes.kinds[self.column(role)].setdefault(KINDS.get(type(value), ""), value)
        return self.filled(role, self.as_label(value))

    def as_label(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, bool | int | float):
            return json.dumps(value)
        raise UserError(f"{self.where}: the label {short(value)} is neither text nor a number nor true or false.")

    def score(self, role: str) -> float | None:
        """A finite number, also where a table spells it."""
        if self.lacks(role):
            return None
        value = self.value(role)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                if math.isfinite(number := float(value)):
                    return number
        raise self.error(role, f"holds {short(value)}, which is not a number")

    def index(self, role: str) -> int | None:
        """A whole number, also where a table spells it."""
        if self.lacks(role):
            return None
        value = self.value(role)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            with suppress(ValueError):
                return int(value)
        raise self.error(role, f"holds {short(value)}, which is not a whole number")

    def items(self, role: str) -> list[Any]:
        """A list; a table spells it as JSON."""
        value = listed(self.value(role))
        if not isinstance(value, list):
            raise self.error(role, f"holds {short(value)}, which is not a list")
        return value

    def words(self, role: str) -> tuple[str, ...]:
        """A list of texts, or of labels; a table may spell it with spaces between."""
        value = listed(self.value(role))
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, list) and all(type(item) is str for item in value):
            return tuple(value)
        return tuple(self.as_label(item) for item in self.items(role))

    def texts(self, role: str) -> tuple[str, ...]:
        """A list of texts, none of them empty."""
        found = self.items(role)
        if not all(isinstance(text, str) for text in found):
            raise self.error(role, f"holds {short(found)}, which is not a list of texts")
        return tuple(self.filled(role, text) for text in found)

    def span(self, role: str, length: int, unit: str) -> tuple[int, int]:
        """A stretch [start, end) of what is `length` units long."""
        found = self.items(role)
        if len(found) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in found):
            raise self.error(role, f"holds {short(found)}, which is not [start, end]")
        return self.stretch(role, found[0], found[1], length, unit)

    def stretch(self, role: str, start: int, end: int, length: int, unit: str) -> tuple[int, int]:
        if not 0 <= start < end <= length:
            raise self.error(role, f"is [{start}, {end}), outside of the {length:,} {unit} that there are")
        return start, end

    def error(self, role: str, what: str) -> UserError:
        return UserError(f"{self.where}: column {self.column(role)!r} {what}.")

    def example(self, texts: tuple[str, ...], target: Any = None, **more: Any) -> Example:
        return Example(self.id, texts, target, **more)

    def leave_out(self, noun: str, what: str) -> None:
        """No example comes of this row: say so at the end."""
        self.notes.add(noun, f"left out {what}", self.place)

    @property
    def place(self) -> str:
        """The row inside its file: its own id, or its line."""
        return str(self.id) if self.id != self.number else f"line {self.number:,}"


def listed(value: Any) -> Any:
    """What a cell of a table means: a list, if it spells one as JSON, or else itself."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
