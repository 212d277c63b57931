"""Which beginnings of a JSON text a schema can still tell apart.

Tokens that leave spaces open have several readings (`constraint.py`): `"x.y"`, `"x. y"`, `"x .y"`. A string with ten
places for a space has a thousand, more than can be followed. But a schema asks little about a string: is it this name
or value, does it match this pattern or format, how long is it? Readings with the same answers have the same
continuations, so one of them is enough.

What can be forgotten:

- of a closed string, all but the answers;
- of a closed value, the answers too: what may follow depends on the keys. They stay where several objects or lists are
  alternatives (`anyOf`), since a value may decide between these;
- of a closed object or list, its keys too, with the same exception.

Of an open string, it matters which names and values it may become, how long it is, and how far it is in the patterns
that it may still match. The bytes that a pattern permits next stand for how far it is. That is a guess: two readings of
the same length may differ in a later byte.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from firth.generate.grammar import Grammar, byte_matcher

SCALAR_TYPES = {"string", "number", "integer", "boolean", "null"}
OPEN_STRING = re.compile(r'([^"\\]|\\.)*\\?')
END_OF_PATTERN = re.compile(r"\$|\\z")
QUOTE = ord('"')


class StringRules:
    """What a schema asks about strings. Every text in it counts as a name or value, its descriptions too."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        values = list(iter_values(schema))
        parts = [value for value in values if isinstance(value, dict)]
        self.names = {value for value in values if isinstance(value, str)}.union(*parts)
        self.sorted_names, self.joined_names = sorted(self.names), {name.replace(" ", "") for name in self.names}
        self.has_alternatives = any(map(has_alternatives, parts))
        shortest = [part["minLength"] for part in parts if isinstance(part.get("minLength"), int | float)]
        longest = [part["maxLength"] for part in parts if isinstance(part.get("maxLength"), int | float)]
        # of these lengths on, the answers are others
        self.lengths = sorted({0, *map(int, shortest), *(int(length) + 1 for length in longest)})
        keys = [part["patternProperties"] for part in parts if isinstance(part.get("patternProperties"), dict)]
        patterns = sorted({part["pattern"] for part in parts if isinstance(part.get("pattern"), str)}.union(*keys))
        formats = sorted({part["format"] for part in parts if isinstance(part.get("format"), str)})
        schemas = [{"pattern": pattern} for pattern in patterns] + [{"format": name} for name in formats]
        self.no_string = OpenString("", "", consume([string_matcher(schema) for schema in schemas], '"'))
        # a pattern without an end matches whatever follows the match
        self.has_end = [bool(END_OF_PATTERN.search(pattern)) for pattern in patterns] + [True] * len(formats)


def iter_values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values in it."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from iter_values(inner)


def has_alternatives(part: Mapping[str, Any]) -> bool:
    """Whether several objects or lists are alternatives, so that what is in them decides which it is.

    >>> has_alternatives({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}), has_alternatives({"enum": [[1], [2]]})
    (False, True)
    """
    choices = [part[key] for key in ("anyOf", "oneOf") if isinstance(part.get(key), list)]
    return max(sum(map(count_containers, parts)) for parts in [*choices, [part]]) > 1


def count_containers(part: Any) -> int:
    """Return how many objects and lists a part of a schema lists; any number of one kind counts as one."""
    if not isinstance(part, dict):
        return int(part is not False)
    if isinstance(part.get("enum"), list):
        return sum(isinstance(value, dict | list) for value in part["enum"])
    if "const" in part:
        return int(isinstance(part["const"], dict | list))
    types = part.get("type", "object")
    return int(not {*(types if isinstance(types, list) else [types])} <= SCALAR_TYPES)


def string_matcher(schema: dict[str, Any]) -> Any:
    return byte_matcher(Grammar("json_schema", {"json_schema": {"type": "string", **schema}}))


def consume(matchers: list[Any], text: str) -> list[Any]:
    """Return copies of the matchers after more text; None for those that do not permit it."""
    data, copies = list(text.encode()), [matcher and matcher.deep_copy() for matcher in matchers]
    return [copy if copy and copy.try_consume_tokens(data) == len(data) else None for copy in copies]


@dataclass(frozen=True)
class OpenString:
    """The beginning of a string."""

    text: str
    escape: str  # the beginning of an escape after it, as in JSON: a backslash, for instance
    matchers: list[Any]  # one for each pattern and format; None where the string cannot match any more

    def split(self, written: str) -> tuple[str, str]:
        r"""Return how much of a JSON text belongs to the string, and its quote and what follows.

        >>> OpenString("a", "\\", []).split('""}')
        ('"', '"}')
        """
        match = OPEN_STRING.match(self.escape + written)
        assert match is not None
        end = match.end() - len(self.escape)
        return written[:end], written[end:]

    def extend(self, written: str) -> OpenString:
        r"""Return the string with more text, as it is written in JSON.

        >>> OpenString("a", "\\u00", []).extend("e9 b").text
        'aé b'
        """
        text, escape = self.text, self.escape
        for char in written:
            if not escape and char != "\\":
                text += char
                continue
            escape += char
            if len(escape) == (6 if escape[1:2] == "u" else 2):
                text, escape = text + json.loads(f'"{escape}"'), ""
        return OpenString(text, escape, consume(self.matchers, written))

    def answers(self, rules: StringRules) -> Hashable:
        """Return what a schema can know of the string, if it ends here."""
        name = self.text if self.text in rules.names else None
        is_match = (bool(matcher and matcher.is_accepting()) for matcher in consume(self.matchers, '"'))
        return name, bisect_right(rules.lengths, len(self.text)), *is_match

    def answers_so_far(self, rules: StringRules) -> tuple[Hashable, int]:
        """Return what a schema can know of the string, if it goes on: its length is the second.

        Lengths matter up to the longest that is asked for, but a pattern may count any.
        """
        at = bisect_left(rules.sorted_names, self.text)
        is_beginning = at < len(rules.sorted_names) and rules.sorted_names[at].startswith(self.text)
        progress: list[Hashable] = [matcher and matcher.compute_bitmask() for matcher in self.matchers]
        for i, (next_bytes, has_end) in enumerate(zip(progress, rules.has_end, strict=True)):
            if isinstance(next_bytes, bytes) and not has_end and next_bytes[QUOTE // 8] >> QUOTE % 8 & 1:
                progress[i] = True
        counts = any(isinstance(next_bytes, bytes) for next_bytes in progress)
        length = len(self.text) if counts else min(len(self.text), rules.lengths[-1])
        return (self.text if is_beginning else None, *progress), length


@dataclass(frozen=True)
class JsonPrefix:
    """The beginning of a JSON text, as far as what may follow depends on it."""

    rules: StringRules
    answers: tuple[tuple[Hashable, ...], ...] = ((),)  # for the strings of each open object or list
    brackets: str = ""  # that are open
    is_value: bool = True  # whether the next string is a value, not a key
    string: OpenString | None = None
    num_misread: int = 0  # strings that the schema has, but with other spaces

    @property
    def state(self) -> tuple[Hashable, int]:
        """Equal for readings of the same tokens that the schema cannot tell apart. The second is a length."""
        known, length = self.string.answers_so_far(self.rules) if self.string else (None, 0)
        return (self.answers, known), length

    def extend(self, text: str) -> JsonPrefix:
        """Return the prefix with more text, which the grammar permits."""
        prefix = self
        while text:
            string = prefix.string
            if string is None:
                prefix, text = prefix.extend_outside(text[0]), text[1:]
                continue
            inside, text = string.split(text)
            string = string.extend(inside) if inside else string
            prefix, text = prefix.close(string) if text else replace(prefix, string=string), text[1:]
        return prefix

    def extend_outside(self, char: str) -> JsonPrefix:
        """Return the prefix with a character that stands outside of strings, or begins one."""
        if char == '"':
            return replace(self, string=self.rules.no_string)
        if char in "[{":
            return replace(self, answers=(*self.answers, ()), brackets=self.brackets + char, is_value=char == "[")
        if char in "]}":
            *outer, closed = self.answers
            prefix = replace(self, answers=tuple(outer), brackets=self.brackets[:-1])
            return prefix.add(closed) if self.rules.has_alternatives else prefix
        return replace(self, is_value=char == ":" or self.brackets[-1] == "[") if char in ":," else self

    def close(self, string: OpenString) -> JsonPrefix:
        """Return the prefix with the quote that ends a string."""
        text, rules = string.text, self.rules
        is_misread = text not in rules.names and text.replace(" ", "") in rules.joined_names
        prefix = replace(self, string=None, num_misread=self.num_misread + is_misread)
        return prefix if self.is_value and not rules.has_alternatives else prefix.add(string.answers(rules))

    def add(self, answer: Hashable) -> JsonPrefix:
        *outer, last = self.answers
        return replace(self, answers=(*outer, (*last, answer)))
