"""Convert dataclasses to dictionaries (for YAML and JSON) and back, strictly.

cattrs does the conversion. The hooks below add three rules: no silent coercion of scalars, an error for every unknown
key, and a tag for unions. A field whose type is a union of dataclasses names the member under `kind`:
`position: {kind: LearnedPosition, length: 512}`. One error message lists all mistakes with their paths.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import cattrs
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from firth.core.errors import UserError, did_you_mean, quote, shorten

DataclassT = TypeVar("DataclassT")
TYPE_KEY = "kind"
OPEN_SCHEMA = "allow_unknown_keys"  # a dataclass with this attribute describes some keys of a file, and ignores others
MAX_LISTED_MISTAKES = 10  # of one file or recipe
MAX_MISTAKE_CHARS = 1_000  # our own messages list choices; another library's may hold the whole value
_reads_yaml = ContextVar("_reads_yaml", default=True)  # YAML 1.1 parses 1e-3 as a string
MAX_INT = 2**63  # larger whole numbers fit into no array or tensor


def _union_members(t: Any) -> dict[str, type]:
    """Return the dataclasses of a union by name; empty if `t` is not a union of dataclasses."""
    if get_origin(t) not in (Union, types.UnionType):
        return {}
    members = [m for m in get_args(t) if m is not type(None)]
    return {m.__name__: m for m in members} if all(dataclasses.is_dataclass(m) for m in members) else {}


def _structure_union(t: Any) -> Callable[[Any, Any], Any]:
    choices, optional = _union_members(t), type(None) in get_args(t)

    def structure(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        if isinstance(value, str):  # `objective: MLM` is short for `objective: {kind: MLM}`
            value = {TYPE_KEY: value}
        if not isinstance(value, dict) or (TYPE_KEY not in value and len(choices) > 1):
            raise ValueError(f"needs a {quote(TYPE_KEY)}, one of {', '.join(choices)}")
        kind = value.get(TYPE_KEY, next(iter(choices)))
        if not isinstance(kind, str) or kind not in choices:
            raise ValueError(f"unknown {TYPE_KEY} {quote(kind)}. {did_you_mean(str(kind), choices)}")
        return _converter.structure({k: v for k, v in value.items() if k != TYPE_KEY}, choices[kind])

    return structure


def _unstructure_union(t: Any) -> Callable[[Any], Any]:
    def unstructure(value: Any) -> Any:
        return None if value is None else {TYPE_KEY: type(value).__name__, **_converter.unstructure(value, type(value))}

    return unstructure


def _structure_scalar(scalar_type: type, *accepted_types: type) -> Callable[[Any, Any], Any]:
    """Accept only values of the right type: `int(1.5)` is 1 and `bool("no")` is True."""

    def structure(value: Any, _: Any) -> Any:
        if scalar_type is float and isinstance(value, str) and _reads_yaml.get():
            with suppress(ValueError):
                return float(value)
        elif isinstance(value, accepted_types) and (scalar_type is bool or not isinstance(value, bool)):
            if isinstance(value, int) and not -MAX_INT <= value < MAX_INT:
                raise ValueError(f"{quote(value)} is too large")
            return scalar_type(value)
        raise ValueError(f"{quote(value)} is not {TYPE_DESCRIPTIONS[scalar_type]}")

    return structure


def _structure_literal(t: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if value not in get_args(t):
            raise ValueError(f"{quote(value)} is not one of {', '.join(map(str, get_args(t)))}")
        return value

    return structure


def _structure_tuple(t: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):  # a string is not the list of its letters
            raise ValueError(f"{quote(value)} is not a list")
        return tuple(_converter.structure(item, get_args(t)[0]) for item in value)

    return structure


def _structure_fields(t: Any) -> Callable[[Any, Any], Any]:
    is_open = getattr(t, OPEN_SCHEMA, False)
    fields = make_dict_structure_fn(t, _converter, _cattrs_forbid_extra_keys=not is_open)

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{quote(value)} is not a mapping of keys to values")
        return fields(value, t)

    return structure


def _structure_dict(t: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{quote(value)} is not a mapping of keys to values")
        key_type, value_type = get_args(t)
        items = dict[Any, Any]()
        for key, item in value.items():
            try:
                items[_converter.structure(key, key_type)] = _converter.structure(item, value_type)
            except Exception as e:
                raise ValueError(f"{quote(key)}: " + "; ".join(_describe_errors(e))) from None
        return items

    return structure


def _is_mixed_union(t: Any) -> bool:
    """Whether a type is a union of several types that are not all dataclasses, such as `str | Token | None`."""
    members = [m for m in get_args(t) if m is not type(None)]
    return get_origin(t) in (Union, types.UnionType) and len(members) > 1 and not _union_members(t)


def _structure_mixed_union(t: Any) -> Callable[[Any, Any], Any]:
    """Accept the first type of a union that a value has."""

    def structure(value: Any, _: Any) -> Any:
        if value is None and type(None) in get_args(t):
            return None
        mistakes = list[str]()
        for member in get_args(t):
            try:
                return _converter.structure(value, member)
            except Exception as e:
                mistakes += _describe_errors(e) if member is not type(None) else []
        raise ValueError(", and ".join(mistakes))

    return structure


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda t: get_origin(t) is origin


TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_converter = cattrs.Converter()
_converter.register_structure_hook_factory(dataclasses.is_dataclass, _structure_fields)
_converter.register_structure_hook_factory(_has_origin(Literal), _structure_literal)
_converter.register_structure_hook_factory(_has_origin(tuple), _structure_tuple)
_converter.register_structure_hook_factory(_has_origin(dict), _structure_dict)
_converter.register_structure_hook_factory(_is_mixed_union, _structure_mixed_union)
_converter.register_structure_hook_factory(lambda t: bool(_union_members(t)), _structure_union)
_converter.register_unstructure_hook_factory(lambda t: bool(_union_members(t)), _unstructure_union)
_converter.register_structure_hook(int, _structure_scalar(int, int))
_converter.register_structure_hook(float, _structure_scalar(float, int, float))
_converter.register_structure_hook(bool, _structure_scalar(bool, bool))
_converter.register_structure_hook(str, _structure_scalar(str, str))
_converter.register_unstructure_hook_factory(
    _has_origin(tuple), lambda t: lambda value: [_converter.unstructure(v, get_args(t)[0]) for v in value]
)


def to_dict(value: Any) -> Any:
    """Convert a dataclass to dictionaries, lists, numbers and strings."""
    return _converter.unstructure(value)


def from_dict(value: Any, dataclass_type: type[DataclassT], where: str, is_yaml: bool = True) -> DataclassT:
    """Convert a dictionary to a dataclass; a UserError lists every wrong key and value with its path.

    `is_yaml`: a string like 1e-3 is a number. JSON has numbers.
    """
    before = _reads_yaml.set(is_yaml)
    try:
        return _converter.structure(value, dataclass_type)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError) as e:
        mistakes = _describe_errors(e)
        more = f"; and {len(mistakes) - MAX_LISTED_MISTAKES:,} more" * (len(mistakes) > MAX_LISTED_MISTAKES)
        raise UserError(f"{where}: " + "; ".join(mistakes[:MAX_LISTED_MISTAKES]) + more) from None
    finally:
        _reads_yaml.reset(before)


def default_fields(dataclass_type: type, tree: dict[str, Any], path: Sequence[str], kind: Any) -> dict[str, Any] | None:
    """Return the fields of the dataclass `kind` at `path` of a tree, with their defaults; None if it cannot be there.

    A field without a default keeps its value in the tree.
    """
    if not isinstance(kind, str):  # a user's value: any JSON
        return None
    for depth, name in enumerate(path):
        field_type = get_type_hints(dataclass_type).get(name)
        choices, tree = _union_members(field_type), tree[name]
        chosen = choices.get(kind if depth == len(path) - 1 else tree.get(TYPE_KEY, ""), field_type)
        if not dataclasses.is_dataclass(chosen):
            return None
        dataclass_type = chosen  # type: ignore[assignment]
    hints = get_type_hints(dataclass_type)
    fields: dict[str, Any] = {TYPE_KEY: kind}
    for field in dataclasses.fields(dataclass_type):
        if field.default is not dataclasses.MISSING:
            fields[field.name] = _converter.unstructure(field.default, hints[field.name])
        elif field.default_factory is not dataclasses.MISSING:
            fields[field.name] = _converter.unstructure(field.default_factory(), hints[field.name])
        else:
            fields[field.name] = tree.get(field.name)
    return fields


def _describe_errors(e: BaseException, path: str = "") -> list[str]:
    if isinstance(e, ForbiddenExtraKeysError):
        names = [f.name for f in dataclasses.fields(e.cl)]
        return [f"unknown key {quote(path + key)}. {did_you_mean(key, names)}" for key in sorted(e.extra_fields)]
    if isinstance(e, BaseExceptionGroup):
        messages = []
        for inner in e.exceptions:
            names = [n.name for n in getattr(inner, "__notes__", []) if hasattr(n, "name")]
            messages += _describe_errors(inner, path + f"{names[0]}." if names else path)
        return messages
    what = f"{quote(e.args[0])} is missing" if isinstance(e, KeyError) else shorten(e, MAX_MISTAKE_CHARS)
    return [f"{path.rstrip('.')}: {what}" if path else what]
