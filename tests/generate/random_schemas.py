"""Random JSON schemas of the kinds of the JSON-Schema test suite, each with a random valid instance.

`draw_schema(rng)` returns a schema and a function that draws an instance. Instances have their properties in the order
of the schema, as constrained decoding writes them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_DEPTH = 3
WORDS = ("red", "a b", "x-1", "Anna", "it's", "ü", "北京", 'say "no"', "tab\there", "back\\slash", "line\nbreak", "")
# pattern -> texts that match
PATTERNS = {
    "^[a-z]{2,4}$": ("ab", "wxyz"),
    "^\\d{3}-\\d{2}$": ("123-45", "000-00"),
    "^(yes|no)( sir)?$": ("yes", "no sir"),
    "^[A-Z][a-z]*$": ("A", "Zoo"),
    "^#[0-9a-fA-F]{6}$": ("#00ffAA",),
    "[0-9]": ("7", "a1b", "99"),
    "^a": ("a", "abc"),
}
FORMATS = {
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("23:59:59Z", "00:00:00+01:00"),
    "date-time": ("2024-02-29T12:30:00Z", "1999-12-31T23:59:59.5+01:00"),
    "ipv4": ("127.0.0.1", "255.255.255.255"),
    "ipv6": ("2001:db8::1", "::ffff:192.168.0.1"),
    "hostname": ("localhost", "www.3-com.example"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "email": ("a@b.example", "first.last@host.example"),
}


class Drawn(NamedTuple):
    schema: dict[str, Any]
    instance: Callable[[], Any]


def draw_schema(rng: random.Random) -> Drawn:
    """Draw an object, array or scalar schema; one in four refers to its definitions."""
    if rng.random() < 0.25:
        inner, leaf = draw_any(rng, 1), draw_scalar(rng)
        key = rng.choice(("$defs", "definitions"))
        names = {"inner": inner, "leaf": leaf}
        used = {name: {"$ref": f"#/{key}/{name}"} for name in names}
        schema = {
            "type": "object",
            "properties": used,
            "required": ["leaf"],
            "additionalProperties": False,
            key: {name: drawn.schema for name, drawn in names.items()},
        }
        return Drawn(schema, lambda: {"inner": inner.instance(), "leaf": leaf.instance()})
    if rng.random() < 0.05:
        return draw_tree(rng)
    return draw_any(rng, 0)


def draw_any(rng: random.Random, depth: int) -> Drawn:
    kinds = [draw_scalar] if depth >= MAX_DEPTH else [draw_scalar, draw_object, draw_object, draw_array, draw_any_of]
    make = rng.choice(kinds)
    return make(rng) if make is draw_scalar else make(rng, depth + 1)


def draw_scalar(rng: random.Random) -> Drawn:
    return rng.choice((draw_string, draw_string, draw_integer, draw_number, draw_fixed, draw_choice))(rng)


def draw_fixed(rng: random.Random) -> Drawn:
    kind = rng.choice(("boolean", "null", "const"))
    if kind == "const":
        value = rng.choice((*WORDS, 3, -2.5, True, None, [1, "x"], {"k": [None, "v"]}))
        return Drawn({"const": value}, lambda: value)
    return Drawn({"type": kind}, lambda: rng.choice((True, False)) if kind == "boolean" else None)


def draw_choice(rng: random.Random) -> Drawn:
    values = rng.sample([*WORDS, 0, 17, -1.5, False, None], rng.randint(1, 4))
    return Drawn({"enum": values}, lambda: rng.choice(values))


def draw_string(rng: random.Random) -> Drawn:
    kind = rng.choice(("length", "length", "pattern", "format"))
    if kind == "pattern":
        pattern, texts = rng.choice(list(PATTERNS.items()))
        return Drawn({"type": "string", "pattern": pattern}, lambda: rng.choice(texts))
    if kind == "format":
        name, texts = rng.choice(list(FORMATS.items()))
        return Drawn({"type": "string", "format": name}, lambda: rng.choice(texts))
    low = rng.randint(0, 3)
    high = low + rng.randint(0, 5)
    letters = string.ascii_letters + ' .,-"\\/äß北\n'
    text = lambda: "".join(rng.choice(letters) for _ in range(rng.randint(low, high)))  # noqa: E731
    return Drawn({"type": "string", "minLength": low, "maxLength": high}, text)


def draw_integer(rng: random.Random) -> Drawn:
    low = rng.randint(-1000, 1000)
    high = low + rng.randint(0, 500)
    schema: dict[str, Any] = {"type": "integer"}
    step = rng.choice((1, 1, 1, 5))
    if step > 1:
        schema["multipleOf"] = step
        low, high = -(-low // step) * step, -(-high // step) * step
    schema |= {"minimum": low} if rng.random() < 0.5 else {"exclusiveMinimum": low - 1}
    schema |= {"maximum": high} if rng.random() < 0.5 else {"exclusiveMaximum": high + 1}
    return Drawn(schema, lambda: rng.randrange(low, high + 1, step))


def draw_number(rng: random.Random) -> Drawn:
    low, high = sorted(round(rng.uniform(-100, 100), 2) for _ in range(2))
    schema = {"type": "number", "minimum": low, "maximum": high}
    if rng.random() < 0.3:
        return Drawn({"type": "number"}, lambda: rng.choice((0, -7, 1.25, 1e-7, 6.02e23)))
    return Drawn(schema, lambda: rng.choice((low, high, round(rng.uniform(low, high), 3))))


def draw_object(rng: random.Random, depth: int) -> Drawn:
    names = rng.sample(["id", "name", "a b", "größe", "x.y", "tags", "n1"], rng.randint(0, 4))
    parts = {name: draw_any(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema: dict[str, Any] = {"type": "object", "properties": {name: part.schema for name, part in parts.items()}}
    if required:
        schema["required"] = rng.sample(required, len(required))
    others = rng.choice(("closed", "closed", "typed", "patterned"))
    extra = draw_scalar(rng)
    if others == "closed":
        schema["additionalProperties"] = False
    elif others == "typed":
        schema["additionalProperties"] = extra.schema
    else:
        schema |= {"patternProperties": {"^k_[a-z]$": extra.schema}, "additionalProperties": False}

    def instance() -> dict[str, Any]:
        own = {name: parts[name].instance() for name in names if name in required or rng.random() < 0.5}
        if others != "closed":
            keys = ("k_a", "k_z") if others == "patterned" else ("other", "k 2", "ø")
            own |= {key: extra.instance() for key in keys if rng.random() < 0.3}
        return own

    return Drawn(schema, instance)


def draw_array(rng: random.Random, depth: int) -> Drawn:
    low = rng.randint(0, 2)
    high = low + rng.randint(0, 2)
    if rng.random() < 0.25:
        first = [draw_any(rng, depth) for _ in range(rng.randint(1, 2))]
        schema = {"type": "array", "prefixItems": [part.schema for part in first], "items": False}
        return Drawn(schema | {"minItems": len(first)}, lambda: [part.instance() for part in first])
    item = draw_any(rng, depth)
    schema = {"type": "array", "items": item.schema, "minItems": low, "maxItems": high}
    return Drawn(schema, lambda: [item.instance() for _ in range(rng.randint(low, high))])


def draw_any_of(rng: random.Random, depth: int) -> Drawn:
    parts = [draw_any(rng, depth) for _ in range(rng.randint(2, 3))]
    if rng.random() < 0.3:
        kinds = rng.sample(["string", "integer", "boolean", "null"], 2)
        values = {"string": "x", "integer": 5, "boolean": True, "null": None}
        limits = {"maxLength": 4, "minimum": -10, "maximum": 10}
        return Drawn({"type": kinds, **limits}, lambda: values[rng.choice(kinds)])
    return Drawn({"anyOf": [part.schema for part in parts]}, lambda: rng.choice(parts).instance())


def draw_tree(rng: random.Random) -> Drawn:
    """Draw a recursive schema."""
    node = {
        "type": "object",
        "properties": {
            "value": {"type": "integer", "minimum": 0, "maximum": 9},
            "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
        },
        "required": ["value"],
        "additionalProperties": False,
    }

    def instance(depth: int = 0) -> dict[str, Any]:
        own: dict[str, Any] = {"value": rng.randint(0, 9)}
        if depth < 2 and rng.random() < 0.6:
            own["children"] = [instance(depth + 1) for _ in range(rng.randint(0, 2))]
        return own

    return Drawn({"$ref": "#/$defs/node", "$defs": {"node": node}}, instance)
