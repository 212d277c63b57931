"""JSON and YAML that anyone may have written: every failure is one line with its place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from firth.core import parse
from firth.core.errors import UserError
from firth.core.files import read_json, read_yaml
from firth.core.parse import parse_json, parse_yaml

ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(10 * [f'*{old}'])}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD_JSON = {
    "no value": ('{\n"a": 1,\n"b": }', "f:3:6: not JSON (Expecting value)."),
    "5,000 digits": ('{\n"a": ' + 5000 * "9" + "}", "f:2: not JSON (Exceeds the limit (4300 digits))."),
    "100,000 brackets": (100_000 * "[", "f: not JSON (lists or objects are nested too deeply)."),
    "101 brackets": (101 * "[" + 101 * "]", "f: not JSON (lists or objects are nested too deeply)."),
}
BAD_YAML = {
    "two colons": ("x: 1\na: b: c", "f:2:5: not valid YAML (mapping values are not allowed here)."),
    "5,000 digits": ("x: 1\na: " + 5000 * "9", "f:2:4: not valid YAML (no int that can be read: Exceeds the limit"),
    "5,000 digits in hexadecimal": ("a: 0x" + 5000 * "f", "f:1:4: not valid YAML (no int that can be read: more than"),
    "a tag without its value": ("a: !!timestamp x", "f:1:4: not valid YAML (no timestamp that can be read"),
    "a tag that runs code": ("a: !!python/object:os.system x", "f:1:4: not valid YAML (could not determine a constr"),
    "a key that is a number": ("a:\n  1: b", "f:2:3: not valid YAML (the key 1 is not a string: quote it)."),
    "a key that is false": ("no: b", "f:1:1: not valid YAML (the key no is not a string: quote it)."),
    "a key that is a list": ("[a]: b", "f:1:1: not valid YAML (the key [...] is not a string: quote it)."),
    "a key twice": ("a: 1\nb: 2\na: 3", "f:3:1: not valid YAML (the key a occurs twice)."),
    "a control character": ("a: 1\nb: \x00", "f:2: not valid YAML (the character 0x0 is not allowed)."),
    "10,000 brackets": (10_000 * "{a: ", "f: not valid YAML (lists or objects are nested too deeply)."),
    "101 brackets": (101 * "[" + 101 * "]", "f: not valid YAML (lists or objects are nested too deeply)."),
    "too many characters": (1_000_001 * "a", "f has 1,000,001 characters, and YAML may have 1,000,000."),
    "aliases of aliases": (ALIASES, "f: its aliases stand for more than 100,000 values"),
    "an alias in itself": ("a: &a [*a]", "f: its aliases stand for more than 100,000 values, or for themselves."),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json_is_one_line(case: str) -> None:
    text, message = BAD_JSON[case]
    with pytest.raises(UserError) as caught:
        parse_json(text, "f")
    assert str(caught.value) == message


def test_a_trailing_comma_in_json_is_one_line() -> None:
    """Since Python 3.13 json points at the comma itself."""
    messages = r"Illegal trailing comma|Expecting property name"
    with pytest.raises(UserError, match=rf"^f:(2:7|3:1): not JSON \(({messages})[^\n]*$"):
        parse_json('{\n"a": 1,\n}', "f")


@pytest.mark.parametrize("case", BAD_YAML)
def test_bad_yaml_is_one_line(case: str) -> None:
    text, message = BAD_YAML[case]
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "f")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_yaml_has_a_bound_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML reads some ten thousand values a second."""
    monkeypatch.setattr(parse, "MAX_YAML_VALUES", 10)
    assert parse_yaml("[" + 8 * "1," + "1]", "f") == 9 * [1]
    with pytest.raises(UserError, match=r"^f:1:20: not valid YAML \(more than 10 values\)\.$"):
        parse_yaml("[" + 9 * "1," + "1]", "f")


def test_what_is_not_too_deep() -> None:
    text = 100 * "[" + 100 * "]"
    assert parse_json(text, "f") == parse_yaml(text, "f") == json.loads(text)
    assert len(parse_json("[" + 1000 * "[]," + "[]]", "f")) == 1001


def test_yaml_values() -> None:
    """A date is a string, also one that no calendar has; anchors and merged mappings work."""
    text = "a: 2020-13-45\nb: &b {x: 1, y: .inf}\nc: {<<: *b, x: 2}\nd: [1.5, yes, null, '1']\n"
    value = parse_yaml(text, "f")
    assert value["a"] == "2020-13-45"
    assert value["c"] == {"x": 2, "y": float("inf")}
    assert value["d"] == [1.5, True, None, "1"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latin").write_bytes(b"{\n'a': '\xe9'}")
    os.mkfifo(tmp_path / "fifo")
    reasons = {
        tmp_path / "none": "none: no such file.",
        tmp_path: f"{tmp_path.name}: not a file.",
        tmp_path / "fifo": "fifo: not a file.",
        tmp_path / "loop": "loop: cannot be read (Too many levels of symbolic links).",
        tmp_path / (300 * "a"): "a: cannot be read (File name too long).",
        tmp_path / "latin": "latin:2: not UTF-8 (the byte 0xe9).",
    }
    for path, reason in reasons.items():
        for read in (read_json, read_yaml):
            with pytest.raises(UserError) as caught:
                read(path)
            assert str(caught.value).endswith(reason)
    (tmp_path / "bom").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "bom") == read_yaml(tmp_path / "bom") == {"a": 1}
