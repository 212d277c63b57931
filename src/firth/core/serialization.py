"""Frozen dataclasses to and from plain dictionaries (YAML, JSON), with every mistake named.

A field that may hold one of several types says which under `kind`: `position: {kind: LearnedPosition, length: 512}`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import cattrs
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from firth.core.errors import UserError, did_you_mean

DataclassT = TypeVar("DataclassT")
TYPE_KEY = "kind"


def _union_members(t: Any) -> dict[str, type]:
    """The dataclasses of a union by name; empty when it is not such a union."""
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
            raise ValueError(f"needs a {TYPE_KEY!r}, one of {', '.join(choices)}")
        kind = value.get(TYPE_KEY, next(iter(choices)))
        if kind not in choices:
            raise ValueError(f"unknown {TYPE_KEY} {kind!r}. {did_you_mean(str(kind), choices)}")
        return _converter.structure({k: v for k, v in value.items() if k != TYPE_KEY}, choices[kind])

    return structure


def _unstructure_union(t: Any) -> Callable[[Any], Any]:
    def unstructure(value: Any) -> Any:
        return None if value is None else {TYPE_KEY: type(value).__name__, **_converter.unstructure(value, type(value))}

    return unstructure


def _structure_scalar(scalar_type: type, *accepted_types: type) -> Callable[[Any, Any], Any]:
    """Take a number for a number and a word for a word; Python's own conversion takes 1.5 for 1 and 'no' for True."""

    def structure(value: Any, _: Any) -> Any:
        if scalar_type is float and isinstance(value, str):  # YAML reads 1e-3 as a word
            with suppress(ValueError):
                return float(value)
        elif isinstance(value, accepted_types) and (scalar_type is bool or not isinstance(value, bool)):
            return scalar_type(value)
        raise ValueError(f"{value!r} is not {TYPE_DESCRIPTIONS[scalar_type]}")

    return structure


def _structure_literal(t: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if value not in get_args(t):
            raise ValueError(f"{value!r} is not one of {', '.join(map(str, get_args(t)))}")
        return value

    return structure


def _structure_tuple(t: Any) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):  # a word is not the list of its letters
            raise ValueError(f"{value!r} is not a list")
        return tuple(_converter.structure(item, get_args(t)[0]) for item in value)

    return structure


def _structure_fields(t: Any) -> Callable[[Any, Any], Any]:
    fields = make_dict_structure_fn(t, _converter, _cattrs_forbid_extra_keys=True)

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is not a group of keys and values")
        return fields(value, t)

    return structure


def _has_origin(origin: Any) -> Callable[[Any], bool]:
    return lambda t: get_origin(t) is origin


TYPE_DESCRIPTIONS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
_converter = cattrs.Converter()
_converter.register_structure_hook_factory(dataclasses.is_dataclass, _structure_fields)
_converter.register_structure_hook_factory(_has_origin(Literal), _structure_literal)
_converter.register_structure_hook_factory(_has_origin(tuple), _structure_tuple)
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
    """A dataclass as dictionaries, lists, numbers and words."""
    return _converter.unstructure(value)


def from_dict(value: Any, dataclass_type: type[DataclassT], where: str) -> DataclassT:
    """The dataclass that a dictionary describes; a UserError names every wrong key and value in it."""
    try:
        return _converter.structure(value, dataclass_type)
    except (cattrs.BaseValidationError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{where}: " + "; ".join(_describe_errors(e))) from None


def _describe_errors(e: BaseException, path: str = "") -> list[str]:
    if isinstance(e, ForbiddenExtraKeysError):
        names = [f.name for f in dataclasses.fields(e.cl)]
        return [f"unknown key {path + key!r}. {did_you_mean(key, names)}" for key in sorted(e.extra_fields)]
    if isinstance(e, BaseExceptionGroup):
        found = []
        for inner in e.exceptions:
            names = [n.name for n in getattr(inner, "__notes__", []) if hasattr(n, "name")]
            deeper = path + f"{names[0]}." if names else path
            found += _describe_errors(inner, deeper)
        return found
    what = f"{e.args[0]!r} is missing" if isinstance(e, KeyError) else str(e)
    return [f"{path.rstrip('.')}: {what}" if path else what]
