"""Parse JSON and YAML that anyone may have written: every failure is a UserError with the file and the location.

The parsers of Python raise many types: ValueError for a number of 5,000 digits or for the 45th of a month,
RecursionError for 100,000 brackets, AttributeError for `!!timestamp x`. Here each becomes one line.

YAML is read with fewer guesses than YAML 1.1 makes. A date is a string, a key is a string, and a key occurs once in its
mapping, as the specification demands and PyYAML does not check. Aliases are allowed, as long as what they stand for is
not larger than `MAX_YAML_VALUES`: each of ten lines with ten aliases to the line before it multiplies by ten.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, Node, ScalarNode

from firth.core.errors import UserError

MAX_YAML_VALUES = 100_000  # scalars, lists and mappings, each alias counted with its content
MAX_YAML_CHARS = 1_000_000  # of a file: PyYAML reads about 100 kB a second, and a recipe has a few kB
MAX_DEPTH = 100  # of lists and objects in each other: code that walks them recurses
MAX_INT_BITS = 1024  # a larger whole number is no float either, and Python does not print 4,300 digits
LONG_NUMBER = re.compile(r"\d{4000}")
TOO_DEEP = "lists or objects are nested too deeply"
STRING_TAG, MERGE_TAG, TIMESTAMP_TAG = (f"tag:yaml.org,2002:{name}" for name in ("str", "merge", "timestamp"))


def parse_json(text: str, name: str, line_number: int | None = None) -> Any:
    """Parse the JSON of a file; with `line_number`, of one line in it."""
    try:
        value = json.loads(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
            raise RecursionError
        return value
    except json.JSONDecodeError as e:
        reason, location = e.msg, f":{e.lineno}:{e.colno}"
    except ValueError as e:
        digits = LONG_NUMBER.search(text)
        reason, location = _first_clause(e), f":{text.count(chr(10), 0, digits.start()) + 1}" if digits else ""
    except RecursionError:
        reason, location = TOO_DEEP, ""
    if line_number is not None:
        raise UserError(f"{name}:{line_number}: not JSON ({reason}). Each line must be one object.")
    raise UserError(f"{name}{location}: not JSON ({reason}).")


def parse_yaml(text: str, name: str) -> Any:
    """Parse the YAML of a file."""
    if len(text) > MAX_YAML_CHARS:
        raise UserError(f"{name} has {len(text):,} characters, and YAML may have {MAX_YAML_CHARS:,}.")
    try:
        value = yaml.load(text, _Loader)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise UserError(f"{name}:{line}: not valid YAML (the character {e.character:#x} is not allowed).") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        location = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(str(e.problem or e.context).split())[:200]
        raise UserError(f"{name}{location}: not valid YAML ({problem}).") from None
    except RecursionError:
        raise UserError(f"{name}: not valid YAML ({TOO_DEEP}).") from None
    if _count_values(value, {}) > MAX_YAML_VALUES:
        raise UserError(f"{name}: its aliases stand for more than {MAX_YAML_VALUES:,} values, or for themselves.")
    if _is_too_deep(value):
        raise UserError(f"{name}: not valid YAML ({TOO_DEEP}).")
    return value


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with string keys that occur once, without dates, and with a location for every error."""

    num_nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.num_nodes += 1
        if self.num_nodes > MAX_YAML_VALUES:
            mark = self.peek_event().start_mark
            raise ConstructorError(None, None, f"more than {MAX_YAML_VALUES:,} values", mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise ValueError(f"more than {MAX_INT_BITS} bits")
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as e:  # constructors of scalars raise ValueError, KeyError, AttributeError ...
            problem = f"no {node.tag.rpartition(':')[2]} that can be read: {_first_clause(e)}"
            raise ConstructorError(None, None, problem, node.start_mark) from None
        return value

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value if isinstance(node, MappingNode) else ():
            shown = key.value[:60] if isinstance(key, ScalarNode) else "[...]"
            if key.tag not in (STRING_TAG, MERGE_TAG):
                raise ConstructorError(None, None, f"the key {shown} is not a string: quote it", key.start_mark)
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {shown} occurs twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != TIMESTAMP_TAG]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _is_too_deep(value: Any) -> bool:
    """Whether a value has lists and objects in each other, more than `MAX_DEPTH` of them."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [part for part in level if isinstance(part, list | dict)]
        if not level:
            return False
        level = [item for part in level for item in (part.values() if isinstance(part, dict) else part)]
    return True


def _count_values(value: Any, counts: dict[int, int]) -> int:
    """Number of values in lists and mappings, those of an alias each time; above the limit for one inside itself."""
    if not isinstance(value, list | dict):
        return 1
    if id(value) not in counts:
        counts[id(value)] = MAX_YAML_VALUES + 1  # while its items are counted
        items = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_count_values(item, counts) for item in items)
    return counts[id(value)]


def _first_clause(error: Exception) -> str:
    """The message of an exception without its advice to programmers."""
    return str(error).partition(";")[0].partition(" for integer string conversion")[0][:200]
