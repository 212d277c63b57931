"""Dataclasses to and from plain dictionaries, and every mistake named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from firth.core.errors import UserError
from firth.core.serialization import from_dict, to_dict
from firth.models import PRESETS, ClassificationHead, ModelConfig
from firth.models.task_heads import with_classification_head


@dataclass(frozen=True)
class Small:
    count: int = 1
    rate: float = 0.5
    flag: bool = False
    name: str = "x"
    limit: int | None = None


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_through_json(name: str) -> None:
    config = PRESETS[name]
    assert from_dict(json.loads(json.dumps(to_dict(config))), ModelConfig, "here") == config


def test_a_field_of_several_types_says_which() -> None:
    plain = to_dict(PRESETS["t5-tiny"])
    assert plain["position"] == {"kind": "T5Bias", "num_buckets": 32, "max_distance": 128}
    classes = with_classification_head(PRESETS["bert-tiny"], ("good", "bad"))
    assert (
        to_dict(classes)["head"].items()
        >= {"kind": "ClassificationHead", "names": ["good", "bad"], "has_pooler": True}.items()
    )
    assert from_dict(to_dict(classes), ModelConfig, "here").head == ClassificationHead(("good", "bad"), has_pooler=True)


def test_a_kind_alone_is_short_for_its_defaults() -> None:
    plain = to_dict(PRESETS["bert-tiny"]) | {"position": "T5Bias"}
    assert to_dict(from_dict(plain, ModelConfig, "here"))["position"] == {
        "kind": "T5Bias",
        "num_buckets": 32,
        "max_distance": 128,
    }


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"rate": "1e-3"}, Small(rate=0.001)),
        ({"rate": 2}, Small(rate=2.0)),
        ({"limit": 3}, Small(limit=3)),
        ({"limit": None}, Small()),
        ({"flag": True}, Small(flag=True)),
        ({}, Small()),
    ],
)
def test_what_is_taken(given: dict[str, Any], wanted: Small) -> None:
    assert from_dict(given, Small, "here") == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": "1.5"}, "here: count: '1.5' is not a whole number"),
        ({"count": 1.5}, "here: count: 1.5 is not a whole number"),
        ({"count": True}, "here: count: True is not a whole number"),
        ({"count": None}, "here: count: None is not a whole number"),
        ({"rate": "fast"}, "here: rate: 'fast' is not a number"),
        ({"rate": True}, "here: rate: True is not a number"),
        ({"flag": "no"}, "here: flag: 'no' is not true or false"),
        ({"flag": 0}, "here: flag: 0 is not true or false"),
        ({"name": 3}, "here: name: 3 is not a string"),
        ({"limit": "many"}, "here: limit: 'many' is not a whole number"),
        ({"cuont": 3}, "here: unknown key 'cuont'. Did you mean 'count'?"),
        ([1, 2], "here: [1, 2] is not a mapping of keys to values"),
        (None, "here: None is not a mapping"),
        ("small", "here: 'small' is not a mapping"),
    ],
)
def test_what_is_refused(given: Any, message: str) -> None:
    with pytest.raises(UserError) as e:
        from_dict(given, Small, "here")
    assert str(e.value).startswith(message)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": {"dims": 3}}, "unknown key 'mlp.dims'. Did you mean 'dim'?"),
        ({"mlp": {"dim": 3, "activation": "swish"}}, "mlp.activation: 'swish' is not one of relu, gelu, gelu-tanh"),
        (
            {"position": {"kind": "LernedPosition"}},
            "position: unknown kind 'LernedPosition'. Did you mean 'LearnedPosition'?",
        ),
        ({"position": {"length": 3}}, "position: needs a 'kind', one of NoPosition, LearnedPosition"),
        (
            {"position": {"kind": "LearnedPosition", "lenght": 3}},
            "unknown key 'position.lenght'. Did you mean 'length'?",
        ),
        ({"mlp": 3}, "mlp: 3 is not a mapping of keys to values"),
        ({"head": {"kind": "ClassificationHead", "names": [1]}}, "head.names: 1 is not a string"),
        ({"head": {"kind": "ClassificationHead", "names": "yes"}}, "head.names: 'yes' is not a list"),
        ({"position": 3}, "position: needs a 'kind'"),
    ],
)
def test_where_it_is_wrong_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as e:
        from_dict(to_dict(PRESETS["bert-tiny"]) | changes, ModelConfig, "config.json")
    assert message in str(e.value)


def test_every_mistake_is_named_at_once() -> None:
    plain = to_dict(PRESETS["bert-tiny"]) | {"dim": "wide", "dropuot": 0.1}
    plain.pop("vocab_size")
    with pytest.raises(UserError) as e:
        from_dict(plain, ModelConfig, "config.json")
    for part in ("dim: 'wide' is not a whole number", "'vocab_size' is missing", "'dropuot'. Did you mean 'dropout'?"):
        assert part in str(e.value)
