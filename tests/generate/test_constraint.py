"""Structured output: the tokens that a grammar permits, for every kind of tokenizer and way of decoding."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from generate.random_schemas import draw_schema

from firth import api
from firth.core.errors import UserError
from firth.generate import GenerationConfig, generate_results, stream_text
from firth.generate.constraint import Constraint, MaskRequest, TokenMasks, make_constraint, unpack_masks
from firth.generate.grammar import byte_matcher, import_llguidance, read_grammar
from firth.models import Model, ModelConfig, get_eos_token_ids, make_model
from firth.models.config import LearnedPosition
from firth.models.presets import bart, gpt2, llama, t5_v1_1
from firth.tokens import Tokenizer, train_tokenizer
from firth.tokens.token_bytes import token_bytes

TEXTS = [
    'the quick brown fox jumps over the lazy dog. It is 3.14 or 42 - 7, isn\'t it? Yes: "no" (maybe)!',
    'é ü ø ß größe ä 北京 {"name": [1, 2.5e-7, true, false, null], "tags": {"k_a": "x\\ny"}} @#$%^&*+=/<>|~`;',
    "0 1 2 3 4 5 6 7 8 9 0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ zyxwvutsrqponmlkjihgfedcba",
]
# tokenizer and model: every kind of tokenizer, decoders and encoder-decoders, with and without forced BOS
MODELS: dict[str, Callable[[int], ModelConfig]] = {
    "byte-bpe": lambda size: gpt2(1, 16, 2, size, position=LearnedPosition(1024)),
    "unigram": lambda size: t5_v1_1(1, 16, 2, 24, size),
    "char": lambda size: llama(1, 16, 2, 24, size, num_kv_heads=1),
    "wordpiece": lambda size: bart(1, 16, 2, size, position=LearnedPosition(1024)),
    "bpe": lambda size: gpt2(1, 16, 2, size, position=LearnedPosition(1024)),
}
EXACT_KINDS = ("byte-bpe", "unigram", "char")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(TEXTS * 3, kind, 500) for kind in (*MODELS, "word")}


@pytest.fixture(scope="module")
def models(tokenizers: dict[str, Tokenizer]) -> dict[str, Model]:
    made = {}
    for kind, config in MODELS.items():
        torch.manual_seed(0)
        made[kind] = make_model(config(tokenizers[kind].vocab.size)).eval()
        made[kind].tokenizer = tokenizers[kind]
    return made


def build(tokenizer: Tokenizer, is_continuation: bool = False, **settings: Any) -> Constraint:
    grammar = read_grammar(GenerationConfig(**settings))
    assert grammar is not None
    eos = tokenizer.vocab.eos if tokenizer.vocab.eos is not None else tokenizer.vocab.sep
    return make_constraint(grammar, tokenizer, [eos], is_continuation)


def validate(value: Any, schema: dict[str, Any]) -> None:
    judge = jsonschema.Draft202012Validator
    judge(schema, format_checker=judge.FORMAT_CHECKER).validate(value)


# --- bytes of tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*EXACT_KINDS, "byte fallback"])
def test_bytes_of_tokens_are_what_the_tokenizer_decodes(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind] if kind in tokenizers else train_tokenizer(TEXTS, "unigram", 500, byte_fallback=True)
    spelling, rng = token_bytes(tokenizer), random.Random(0)
    ids = [i for i in range(tokenizer.vocab.size) if spelling.pieces[i]]
    assert not {*ids} & {*tokenizer.vocab.special_ids}
    for _ in range(200):
        drawn = rng.choices(ids, k=8)
        text = b"".join(spelling.pieces[i] for i in drawn)
        if spelling.drops_first_space:
            text = text.removeprefix(b" ")
        expected = text.decode(errors="replace")
        if kind != "byte fallback" or "\ufffd" not in expected:  # it writes a whole run of bytes as invalid
            assert tokenizer.decode(drawn) == expected
    for text in TEXTS:
        assert spelling.has_optional_spaces is False
        joined = b"".join(spelling.pieces[i] for i in tokenizer.encode(text)).decode()
        assert joined.removeprefix(" " if spelling.drops_first_space else "") == text


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "word"])
def test_words_and_spaces_are_what_the_tokenizer_decodes(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Without their spaces, since the decoder guesses these."""
    tokenizer = tokenizers[kind]
    spelling, text = token_bytes(tokenizer), TEXTS[0]
    joined = b"".join(spelling.pieces[i] for i in tokenizer.encode(text)).decode()
    assert spelling.has_optional_spaces
    assert joined == tokenizer.decode(tokenizer.encode(text)).replace(" ", "")


# --- 1,000 schemas ---------------------------------------------------------------------------------------------------


def check_instances(tokenizers: dict[str, Tokenizer], seeds: range) -> int:
    """Feed the tokens of valid instances to the constraint, which must accept all; return their number."""
    num_accepted = 0
    for seed in seeds:
        drawn, kinds = draw_schema(random.Random(seed)), list(MODELS)
        instances = [drawn.instance() for _ in range(3)]
        for kind in (kinds[seed % len(kinds)], kinds[(seed + 2) % len(kinds)]):
            tokenizer = tokenizers[kind]
            constraint = build(tokenizer, json_schema=drawn.schema)
            for instance, indent in zip(instances, (None, None, 2), strict=True):
                validate(instance, drawn.schema)
                text = json.dumps(instance, ensure_ascii=False, indent=indent)
                ids = tokenizer.encode(text)
                if tokenizer.vocab.unk in ids:
                    continue
                row = constraint.start_row()
                for i, token in enumerate(ids):
                    assert row.permitted()[token], (seed, kind, text, constraint.text(ids[:i]))
                    row.accept(token)
                facts = constraint.facts(ids)
                assert facts["complete"], (seed, kind, text)
                if kind in EXACT_KINDS:
                    assert facts["value"] == instance
                    assert constraint.text(ids) == text
                else:
                    validate(facts["value"], drawn.schema)
                num_accepted += 1
    return num_accepted


def check_outputs(models: dict[str, Model], seeds: range, max_new_tokens: int = 300) -> tuple[int, int]:
    """Let random models write; return how many texts are complete and how many were cut."""
    num_complete = num_cut = 0
    for seed in seeds:
        drawn, kinds = draw_schema(random.Random(seed)), list(models)
        ways = (dict(temperature=1.0), dict(temperature=1.0), dict(), dict(num_beams=2))
        model, settings = models[kinds[seed % len(kinds)]], ways[seed % len(ways)]
        results = generate_results(
            model, ["the fox", "a"], json_schema=drawn.schema, max_new_tokens=max_new_tokens, seed=seed, **settings
        )
        for result in results:
            if result["complete"]:
                num_complete += 1
                assert result["value"] == json.loads(result["text"])
                validate(result["value"], drawn.schema)
            else:
                num_cut += 1
                assert result["value"] is None
    return num_complete, num_cut


def test_accepts_every_valid_instance(tokenizers: dict[str, Tokenizer]) -> None:
    assert check_instances(tokenizers, range(24)) > 100


def test_every_output_validates(models: dict[str, Model]) -> None:
    num_complete, num_cut = check_outputs(models, range(10), max_new_tokens=120)
    assert num_complete > 2 * num_cut


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
LIST_OF_ITSELF = {
    "type": "object",
    "properties": {"c": {"type": "array", "items": {"$ref": "#"}}},
    "additionalProperties": False,
}
SHORT_TEXTS = {"type": "object", "patternProperties": {"^a": {"type": "string", "maxLength": 2}}}
CLOSED = {"properties": {"a": True, "b": False}, "additionalProperties": False, "type": "object"}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (TREE, [{"v": 1, "l": {"v": 2, "l": {"v": 3}}}], [{"l": {"v": 1}}, {"v": 1, "l": 3}]),
        (LIST_OF_ITSELF, [{"c": [{"c": []}, {}]}], [{"c": [1]}]),
        ({**SHORT_TEXTS, "additionalProperties": False}, [{"a1": "x", "a": "äß"}, {}], [{"b": "x"}, {"a": "abc"}]),
        ({"enum": ["größe", "北京", "é"]}, ["größe", "北京", "é"], ["e", "北"]),
        ({"const": {"größe": "北京"}}, [{"größe": "北京"}], [{"größe": "北"}]),
        ({"type": "number"}, [1e-7, 6.02e23, -0.0, 1.5e10, 0, -3], ["1"]),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, [-1.5, 0, 1.999], [2, -1.6]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["北京", "äß", "aé北"], ["北", "äßüé", ""]),
        ({"type": "object", "minProperties": 1, "maxProperties": 2}, [{"a": 1}, {"a": 1, "b": 2}], [{}]),
        (CLOSED, [{"a": [1]}, {}], [{"b": 1}]),
        ({"type": ["string", "null"], "maxLength": 2}, ["ab", None], ["abc", 1]),
        ({"type": "string", "pattern": "^[äöü]+$"}, ["äö"], ["ao"]),
        (
            {"type": "string", "format": "date"},
            ["2024-02-29", "2000-02-29", "2023-12-31", "0001-01-01", "9999-04-30", "1900-02-28", "0004-02-29"],
            ["2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01", "2023-13-01", "2024-1-01"],
        ),
    ],
    ids=str,
)
def test_keywords(
    tokenizers: dict[str, Tokenizer], schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    for kind in EXACT_KINDS:
        tokenizer = tokenizers[kind]
        constraint = build(tokenizer, json_schema=schema)
        for value in [*valid, *invalid]:
            if value in valid:
                validate(value, schema)
            else:
                with pytest.raises(jsonschema.ValidationError):
                    validate(value, schema)
            ids = tokenizer.encode(json.dumps(value, ensure_ascii=False))
            assert constraint.facts(ids)["complete"] == (value in valid), (kind, value)


def test_days_of_a_time(tokenizers: dict[str, Tokenizer]) -> None:
    """Each day of a leap year and of another one, in a schema that has a pattern and `allOf` already."""
    leap_day = {"type": "string", "format": "date-time", "pattern": "Z$", "allOf": [{"pattern": "^2"}]}
    constraint = build(tokenizers["byte-bpe"], json_schema={"anyOf": [{"type": "null"}, leap_day]})
    for year in (2023, 2024, 2100):
        for day in itertools.product(range(1, 13), range(28, 32)):
            text = f"{year}-{day[0]:02}-{day[1]:02}"
            try:
                is_day = bool(datetime.date.fromisoformat(text))
            except ValueError:
                is_day = False
            ids = tokenizers["byte-bpe"].encode(f'"{text}T12:00:00Z"')
            assert constraint.facts(ids)["complete"] == is_day, text


LABELS = ".".join(["a" * 63] * 3)  # 191 characters


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        (
            "time",
            ["23:59:60Z", "23:59:60.5z", "23:59:60+00:00", "15:59:60-08:00", "00:59:60+01:00", "12:30:59+05:30"],
            ["22:59:60Z", "23:58:60Z", "23:59:60+01:00", "15:59:60+08:00", "00:59:60-01:00", "23:59:61Z", "12:30:60Z"],
        ),
        (
            "date-time",
            ["2016-12-31T23:59:60Z", "1990-12-31T15:59:60-08:00", "2024-02-29t00:00:00.25+14:00"],
            ["2016-12-31T23:58:60Z", "1990-12-31T23:59:60-08:00", "2023-02-29T23:59:60Z"],
        ),
        (
            "hostname",
            ["a", "3com.example", "a-b.c--d", "a" * 63, f"{LABELS}.{'b' * 61}", "a." * 126 + "b"],
            ["", "a" * 64, f"{LABELS}.{'b' * 62}", "a." * 126 + "bb", "-a.b", "a-.b", "a..b", "a.", ".a", "a_b", "ä.b"],
        ),
        (
            "ipv6",
            ["::ffff:192.168.0.1", "64:ff9b::255.255.255.255", "1:2:3:4:5:6:0.0.0.0", "::", "2001:db8::A"],
            [
                "::ffff:192.168.0.256",
                "::ffff:192.168.01.1",
                "::1.2.3",
                "1.2.3.4",
                "1.2.3.4::",
                "::12345",
                "fe80::1%eth0",
            ],
        ),
    ],
    ids=["time", "date-time", "hostname", "ipv6"],
)
def test_formats(name: str, valid: list[str], invalid: list[str]) -> None:
    """The rules of RFC 3339, 1123 and 4291, which packages for JSON Schema check in part only."""
    accepted = accepted_by({"type": "string", "format": name}, [*valid, *invalid])
    assert accepted == [True] * len(valid) + [False] * len(invalid)


def accepted_by(schema: dict[str, Any], values: list[str]) -> list[bool]:
    grammar = read_grammar(GenerationConfig(json_schema=schema))
    assert grammar is not None
    found = []
    for value in values:
        text, matcher = json.dumps(value, ensure_ascii=False).encode(), byte_matcher(grammar)
        found.append(matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting())
    return found


def test_every_form_of_an_ipv6_address() -> None:
    """All numbers of groups before and after "::", or without it, alone and before an IPv4 address."""
    forms = [
        (":".join(["ab0"] * left) + between + ":".join(["1"] * right + tail))
        for left, right in itertools.product(range(9), repeat=2)
        for between in ("::", ":", "")
        for tail in ([], ["10.0.255.1"])
    ]
    assert accepted_by({"type": "string", "format": "ipv6"}, forms) == [is_ipv6(form) for form in forms]


def is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


@pytest.mark.slow
def test_accepts_every_valid_instance_of_a_thousand_schemas(tokenizers: dict[str, Tokenizer]) -> None:
    num_accepted = check_instances(tokenizers, range(1000))
    print(f"{num_accepted} instances are accepted, none rejected")
    assert num_accepted > 4000


@pytest.mark.slow
def test_every_output_for_a_thousand_schemas_validates(models: dict[str, Model]) -> None:
    num_complete, num_cut = check_outputs(models, range(1000))
    print(f"{num_complete} texts are complete and valid, {num_cut} were cut")
    assert num_complete > 4 * num_cut


# --- tokens that leave spaces open -----------------------------------------------------------------------------------


def closed_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
HOSTNAME, X_Y = {"type": "string", "format": "hostname"}, {"const": "x.y"}
MANY_SPACES = "a.b,c:d.e,f:g.h,i:j.k,l:m.n"  # 13 places where a space may stand, and usually does
EXACT_LENGTH = {"minLength": len(MANY_SPACES), "maxLength": len(MANY_SPACES)}
FREE_KEYS = {
    "type": "object",
    "properties": {"x.y": HOSTNAME, "name": TEXT},
    "additionalProperties": {"type": "string", "pattern": "[0-9]"},
}
NUMBERS_AND_TEXT = [{"type": "array", "items": {"type": "number", "maximum": 90}}, {"type": "string", "maxLength": 8}]
BY_TEXT = {"anyOf": [closed_object(k=X_Y, b=NUMBER), closed_object(k={**TEXT, "pattern": "^x"}, c=NUMBER)]}
BY_FORMAT = {"anyOf": [closed_object(k=HOSTNAME, b=NUMBER), closed_object(k=TEXT, c=NUMBER)]}
BY_LIST = {
    "anyOf": [
        closed_object(k={"type": "array", "items": X_Y}, b=NUMBER),
        closed_object(k={"type": "array", "items": TEXT}, c=NUMBER),
    ]
}


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
@pytest.mark.parametrize(
    ("schema", "instance"),
    [
        (FREE_KEYS, {"x.y": "www.3-com.example", "name": "fox"}),
        (FREE_KEYS, {"x.y": "a.3", "x. y": "3"}),
        ({"type": "array", "prefixItems": NUMBERS_AND_TEXT}, [[1.5, 2.5, 3.5, 4.5, 5.5], ",a-b-c-d"]),
        ({"type": "string", **EXACT_LENGTH}, MANY_SPACES),
        (
            closed_object(a={"type": "string", "pattern": f"^.{{{len(MANY_SPACES)}}}$"}, b=NUMBER),
            {"a": MANY_SPACES, "b": 1},
        ),
        (BY_TEXT, {"k": "x.y", "b": 1}),
        (BY_TEXT, {"k": "x.y", "c": 1}),
        (BY_TEXT, {"k": "x. y", "c": 1}),
        (BY_FORMAT, {"k": "a.b.c.d.e.f.g", "b": 1}),
        (BY_FORMAT, {"k": "a.b.c.d.e.f.g", "c": 1}),
        (BY_LIST, {"k": ["x.y"] * 9, "b": 1}),
        (BY_LIST, {"k": ["x.y"] * 9, "c": 1}),
        (closed_object(**{"é b": {**TEXT, "maxLength": 4}}, n=TEXT), {"é b": '"\\/\n', "n": "tab\there \\"}),
    ],
)
def test_open_spaces_exclude_no_instance(
    tokenizers: dict[str, Tokenizer], kind: str, schema: dict[str, Any], instance: Any
) -> None:
    """However many ways there are to read a string, those that the schema tells apart are kept."""
    tokenizer = tokenizers[kind]
    constraint, ids = build(tokenizer, json_schema=schema), tokenizer.encode(json.dumps(instance, ensure_ascii=False))
    row = constraint.start_row()
    for token in ids:
        assert row.permitted()[token], row.readings[0].text
        row.accept(token)
    assert row.permitted()[constraint.vocabulary.eos_ids].all()
    validate(constraint.facts(ids)["value"], schema)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_names_are_read_as_the_schema_has_them(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Of "x.y" and "x. y", the second is more usual; where both are valid, the first is in the schema."""
    schema = {"type": "object", "properties": {"x.y": TEXT}, "additionalProperties": TEXT}
    tokenizer = tokenizers[kind]
    for instance in ({"x.y": "fox"}, {"x.y": "fox", "x. y": "dog"}, {"dog": "x.y"}):
        ids = tokenizer.encode(json.dumps(instance))
        assert build(tokenizer, json_schema=schema).facts(ids)["value"] == instance


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_one_reading_is_kept_where_the_schema_asks_nothing(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Of a text with many spaces, and of lists: JSON has one space after a comma and a colon, and no other."""
    tokenizer = tokenizers[kind]
    for instance in ([MANY_SPACES] * 3, {"a": [1, -2.5, {"b": [[], 3]}], "c": MANY_SPACES}):
        row = build(tokenizer, json_schema={"type": ["object", "array"]}).start_row()
        row.accept_all(tokenizer.encode(json.dumps(instance)))
        assert len(row.readings) == 1


def test_a_vocabulary_of_whole_words_of_bits(tokenizers: dict[str, Tokenizer]) -> None:
    """llguidance's masks of 288 tokens, and of as many with a space, have one word more than twice nine."""
    tokenizer = train_tokenizer(TEXTS * 3, "wordpiece", 288)
    assert tokenizer.vocab.size == 288
    row = build(tokenizer, json_schema=TEXT).start_row()
    for token in tokenizer.encode('"the fox"'):
        assert row.permitted()[token]
        row.accept(token)
    assert row.permitted().sum() == 1


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize(
    ("text", "permits_all"),
    [
        ("1e400", False),
        ("[-2e308", False),
        ('{"1e999": 9e+309', False),
        ("1" * 310, False),
        ('{"a": [1.7e308, -6.02e23, 1e-400, 0e0]}', True),
        ('["1e400", "x1e400"]', True),
        ("1" * 309, True),
    ],
)
def test_numbers_are_finite(tokenizers: dict[str, Tokenizer], kind: str, text: str, permits_all: bool) -> None:
    """No float64 holds 1e400 or a whole number of 310 digits, and readers of JSON make it infinite."""
    tokenizer = tokenizers[kind]
    row, ids, found = build(tokenizer, json_schema={}).start_row(), tokenizer.encode(text), list[bool]()
    if tokenizer.vocab.unk in ids:  # WordPiece reads no word of 300 characters
        ids = [*tokenizer.encode("1"), *(tokenizer.backend.token_to_id("##1") for _ in text[1:])]
    for token in ids:
        found.append(bool(row.permitted()[token]))
        row.accept(token)
    assert all(found) == permits_all
    assert all(found[:-2]), "forbidden where the number becomes infinite"
    if kind not in EXACT_KINDS:
        assert bool(row.readings) == permits_all


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MODELS))
def test_masks_of_a_batch_are_those_of_its_rows(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Ten rows, which several threads compute, at ten places of a text; a mask that is not asked for stays."""
    tokenizer = tokenizers[kind]
    constraint, ids = build(tokenizer, json_schema=PERSON), tokenizer.encode('{"name": "fox", "age": 42}')
    rows = [constraint.start_row() for _ in range(10)]
    for i, row in enumerate(rows):
        row.accept_all(ids[: i * len(ids) // 9])
    words_BW = np.full((12, constraint.vocabulary.num_words), 7, dtype=np.int32)
    TokenMasks(words_BW).write([MaskRequest(i + 1, row) for i, row in enumerate(rows)])
    assert (words_BW[[0, 11]] == 7).all()
    for i, found_V in enumerate(unpack_masks(words_BW[1:11], tokenizer.vocab.size)):
        alone = constraint.start_row()
        for token in ids[: i * len(ids) // 9]:
            assert alone.permitted()[token]
            alone.accept(token)
        assert found_V.tolist() == alone.permitted().tolist()
    assert found_V.nonzero()[0].tolist() == list(constraint.vocabulary.eos_ids)


@pytest.mark.parametrize("kind", ["byte-bpe", "wordpiece"])
def test_eos_before_the_shortest_length(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """A row that may not end yet gets EOS only where nothing else may follow. Scores without a token are forbidden."""
    tokenizer = tokenizers[kind]
    constraint, size = build(tokenizer, regex="a{1,2}"), tokenizer.vocab.size
    (eos,) = constraint.vocabulary.eos_ids
    state, a = constraint.start(2, size + 70, torch.device("cpu")), tokenizer.encode("a")[-1]
    state.accept([a, a])
    assert not state.forbidden(may_end=True)[0, eos]
    assert state.forbidden(may_end=False)[0, eos]
    assert not state.forbidden(may_end=False)[0].all()
    state.accept([a, eos])
    for may_end in (True, False):
        assert [(~row).nonzero()[:, 0].tolist() for row in state.forbidden(may_end)] == [[eos], [eos]]


# --- ways of decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"num_beams": 3}], ids=["greedy", "sample", "beams"])
def test_batch_gives_the_same_texts_as_single_prompts(
    models: dict[str, Model], kind: str, settings: dict[str, Any]
) -> None:
    prompts, options = ["the fox", "a", "lazy dog or"], dict(json_schema=PERSON, max_new_tokens=80, **settings)
    together = generate_results(models[kind], prompts, **options)
    for result in together:
        assert result["complete"]
        validate(json.loads(result["text"]), PERSON)
    first = generate_results(models[kind], prompts[:1], **options)
    assert first[0]["text"] == together[0]["text"]


def test_regex_choices_and_grammar(models: dict[str, Model]) -> None:
    for model in models.values():
        pattern = "[a-z]{3}-[0-9]{2}"
        (result,) = generate_results(model, ["the"], regex=pattern, temperature=1.0)
        assert re.fullmatch(pattern, result["text"])
        (result,) = generate_results(model, ["the"], choices=["yes, sir", "no"])
        assert result["value"] in ("yes, sir", "no")
        (result,) = generate_results(model, ["the"], choices="lazy,dog")
        assert result["value"] in ("lazy", "dog")
        grammar = 'start: "x" op "y"\nop: "+" | "-"\n'
        (result,) = generate_results(model, ["the"], grammar=grammar)
        assert result["text"].replace(" ", "") in ("x+y", "x-y")
        (result,) = generate_results(model, ["the"], grammar='root ::= "x" ("+" | "-") "y"')
        assert result["text"].replace(" ", "") in ("x+y", "x-y")


def test_mask_keeps_the_model_s_preferences(models: dict[str, Model]) -> None:
    """Sampling follows the model's own probabilities of the permitted tokens."""
    model, choices = models["char"], ["a", "c", "e"]
    options: dict[str, Any] = dict(temperature=1.0, max_new_tokens=1, num_return_sequences=2000)
    free = generate_results(model, ["the"], **options)
    share = [sum(result["new"] == choice for result in free) for choice in choices]
    drawn = generate_results(model, ["the"], **options, grammar='start: "a" | "c" | "e"')
    for choice, number in zip(choices, share, strict=True):
        expected = number / sum(share)
        assert abs(sum(r["text"] == choice for r in drawn) / sum(r["complete"] for r in drawn) - expected) < 0.25
    best = generate_results(model, ["the"], choices=choices, num_beams=3, num_return_sequences=3)
    scores = [result["score"] for result in best]
    assert scores == sorted(scores, reverse=True)


def test_other_rules_never_win_over_the_grammar(models: dict[str, Model]) -> None:
    options = dict(no_repeat_ngram_size=1, repetition_penalty=2.0, min_new_tokens=40, max_new_tokens=50)
    (result,) = generate_results(models["char"], ["the"], choices=["aaaa"], **options)
    assert result["text"] == "aaaa"


def test_continuation_may_begin_with_a_space(tokenizers: dict[str, Tokenizer], models: dict[str, Model]) -> None:
    tokenizer = tokenizers["byte-bpe"]
    constraint = build(tokenizer, True, choices=["the", "fox"])
    ids = tokenizer.encode(" fox")
    assert constraint.text(ids) == "fox"
    assert constraint.facts(ids)["value"] == "fox"
    assert not build(tokenizer, False, choices=["the", "fox"]).facts(ids)["complete"]
    exact = build(tokenizer, True, choices=[" fox", "the"])  # the space is part of the text
    assert exact.facts(ids)["value"] == " fox"


def test_cut_text_says_so(models: dict[str, Model], capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "string", "minLength": 50}
    (result,) = generate_results(models["char"], ["the"], json_schema=schema, max_new_tokens=10)
    assert (result["complete"], result["finished"], result["value"]) == (False, False, None)
    api.generate(models["char"], "the", json_schema=schema, max_new_tokens=10)
    assert "cut after 10 new tokens, before --json-schema was satisfied" in capsys.readouterr().err


def test_text_that_ends_with_the_last_token_is_complete(models: dict[str, Model]) -> None:
    (result,) = generate_results(models["char"], ["the"], choices=["abc"], max_new_tokens=3)
    assert (result["text"], result["complete"]) == ("abc", True)


def test_stream_is_the_text(models: dict[str, Model]) -> None:
    for kind in ("byte-bpe", "wordpiece"):
        (result,) = generate_results(models[kind], ["the"], json_schema=PERSON, max_new_tokens=80)
        pieces = list(stream_text(models[kind], "the", json_schema=PERSON, max_new_tokens=80))
        assert "".join(pieces) == result["text"]


def test_api_gives_the_text_alone(models: dict[str, Model]) -> None:
    texts = api.generate(models["byte-bpe"], ["the fox", "a"], json_schema=PERSON)
    assert len(texts) == 2
    for text in texts:
        validate(json.loads(text), PERSON)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_vocabulary_without_the_characters(tokenizers: dict[str, Tokenizer]) -> None:
    plain = train_tokenizer(["the fox jumps"] * 3, "char", 100)
    with pytest.raises(UserError, match=r"No token of this char tokenizer can begin the text: it must start with '\{'"):
        build(plain, json_schema={"type": "object"})


def test_dead_end_names_the_text(capsys: pytest.CaptureFixture[str], models: dict[str, Model]) -> None:
    """A word tokenizer knows `{` but not every key."""
    model = models["char"]
    api.generate(model, "the", choices=["fox☃"])
    assert "has no token that can follow 'fox'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"json_schema": {"properties": {"a": {"format": "year"}}}}, "#/properties/a/format: Unknown format: year"),
        (
            {"json_schema": {"items": {"anyOf": [{"type": "null"}, {"pattern": "(?=a)", "type": "string"}]}}},
            "#/items/anyOf/1/pattern: look",
        ),
        ({"json_schema": {"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}}, "#/$defs/x/not: not supported"),
        ({"json_schema": {"$ref": "#/$defs/y"}}, "#/$ref: Pointer '/$defs/y' does not exist"),
        ({"json_schema": {"$ref": "b.json#/c"}}, "#/$ref: a reference must point into the same schema"),
        (
            {"json_schema": {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"format": "year"}}}},
            "#/$defs/b/format: Unknown format: year",
        ),
        (
            {"json_schema": {"properties": {"a/b": {"properties": {"c~d": {"type": "x"}}}}}},
            "#/properties/a~1b/properties/c~0d/type: Invalid type",
        ),
        ({"json_schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "#/oneOf: the parts of oneOf"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "#/minimum: Unsatisfiable"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "#/uniqueItems: not supported"),
        ({"json_schema": {"x-guidance": 3}}, "#/x-guidance must be an object"),
        ({"json_schema": ""}, "A JSON schema must be an object"),
        ({"json_schema": '{"type":'}, "json_schema:1:9: not JSON"),
        ({"json_schema": "missing.json"}, "missing.json: no such file"),
        ({"regex": "(a"}, "regex: unclosed group"),
        ({"choices": []}, "choices must be texts"),
        ({"grammar": "start: foo\n"}, 'unknown name: "foo"'),
    ],
)
def test_errors_name_the_part(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_grammar(GenerationConfig(**settings))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(UserError, match="json_schema and regex are both given"):
        GenerationConfig(json_schema={}, regex="a")
    with pytest.raises(UserError, match="stop would cut"):
        GenerationConfig(regex="a", stop=["b"])


def test_without_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match="pip install llguidance"):
        read_grammar(GenerationConfig(regex="a"))


def test_file_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text('{"type": "strng"}')
    with pytest.raises(UserError, match=r"s\.json: #/type: Invalid type: strng"):
        read_grammar(GenerationConfig(json_schema=str(file)))


def test_eos_of_every_model(models: dict[str, Model]) -> None:
    """Each of a model's EOS ids is permitted where a text is complete, and nowhere else."""
    for model in models.values():
        assert model.tokenizer is not None
        grammar = read_grammar(GenerationConfig(choices=["fox"]))
        assert grammar is not None
        eos_ids = get_eos_token_ids(model, model.tokenizer.vocab)
        row = make_constraint(grammar, model.tokenizer, eos_ids, False).start_row()
        assert not row.permitted()[list(eos_ids)].any()
        for token in model.tokenizer.encode("fox"):
            row.accept(token)
        assert row.permitted()[list(eos_ids)].all()


def test_an_old_llguidance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firth.generate.grammar.version", lambda name: "1.6.1")
    with pytest.raises(UserError, match=r"newer llguidance than 1\.6\.1"):
        import_llguidance()
