"""Values in messages: short, whatever their size."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import firth
from firth.core.errors import MAX_QUOTED_CHARS, UserError, did_you_mean, list_names, quote
from firth.core.serialization import from_dict
from firth.evaluate.gguf_layout import no_graph
from firth.models import ModelConfig
from firth.models.presets import bert
from firth.text.formats.registry import parse_mail_parts
from firth.text.normalize import parse_normal_forms
from firth.text.open_text import check_encoding
from firth.text.records import preview_value
from firth.train.recipe import TrainingConfig, parse_overrides

ALIAS_BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}*a{i - 1}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    "value",
    ["", "it's", "b\n\x1b", 12, -0.5, None, True, [], (), (1,), {}, [1, ("a", b"b")], {"k": [None, {}]}, {1, 2}],
)
def test_a_short_value_is_quoted_as_repr_writes_it(value: Any) -> None:
    assert quote(value) == repr(value)


@pytest.mark.parametrize("value", ["ab" * 20_000, list(range(10**6)), {"k": "v" * 99}, [16**5000], [["x" * 30] * 9]])
def test_a_long_value_is_cut(value: Any) -> None:
    assert len(quote(value)) == MAX_QUOTED_CHARS
    assert quote(value).endswith("...")


def test_no_message_writes_what_yaml_aliases_stand_for() -> None:
    """Thirty lines stand for 10^30 items: only the shown part is written. A list that holds itself has no end."""
    bomb = yaml.safe_load(ALIAS_BOMB)["a29"]
    assert quote(bomb) == "[" * 30 + "'x', 'x'], ['x', 'x'], ['x'..."
    assert quote(yaml.safe_load("&a [*a]")) == "[" * 57 + "..."
    assert len(preview_value(bomb)) == 40
    with pytest.raises(UserError, match=r"num_layers: \[+'x', .* is not a whole number") as error:
        from_dict({"num_layers": bomb, "mlp": bomb, "position": bomb}, ModelConfig, "here")
    assert len(str(error.value)) < 1_000
    with pytest.raises(UserError, match="is given twice") as error:
        parse_overrides([f"a={'x' * 40_000}", "a=1"])
    assert len(str(error.value)) < 200


def test_a_file_with_many_mistakes_lists_the_first_ones() -> None:
    with pytest.raises(UserError, match=r"here: unknown key 'kkk.*; and 90 more") as error:
        from_dict({f"{'k' * 30_000}{i}": 1 for i in range(100)}, TrainingConfig, "here")
    assert len(str(error.value)) < 10_000


def test_whole_numbers_that_no_tensor_can_have_are_refused() -> None:
    for value in (2**63, yaml.safe_load(f"0x{'f' * 5000}")):
        with pytest.raises(UserError, match=r"num_layers: .* is too large"):
            from_dict({"num_layers": value}, ModelConfig, "here")


def test_names_are_shortened() -> None:
    assert len(list_names(["n" * 1000] * 100)) < 21 * MAX_QUOTED_CHARS + 50
    assert len(did_you_mean("x" * 30_000, ["n" * 1000] * 100)) < 11 * MAX_QUOTED_CHARS + 50


def test_every_message_uses_the_helper() -> None:
    """`{value!r}` writes the whole value: only names in Python's own errors and cut texts are written so."""
    bounded = re.compile(r"\[:\d+\]!r}|AttributeError|prefix|preview_first_row")
    lines = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(firth.__file__).parent.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if "!r}" in line and not bounded.search(line)
    ]
    assert lines == []


# Not cut: paths, names of our own, values that were compared with a list of choices before.
SHOWN_WHOLE = {
    *("path", "folder", "tokenizer_path", "checkpoint", "finetuned", "against", "data", "other"),
    *("owner", "unit", "role", "task", "expected_task", "shots", "repeat", "tracker", "strategy"),
}


def find_raw_option_values(source: str) -> list[str]:
    """Return `--option {value}` of messages where the value is a variable, not a constant, that no helper cuts."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    errors = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "UserError"]
    found = []
    for text in (node for call in errors for node in ast.walk(call) if isinstance(node, ast.JoinedStr)):
        for before, value in zip(text.values, text.values[1:], strict=False):
            if isinstance(before, ast.Constant) and re.search(r"--[a-z][a-z-]*[ =]$", str(before.value)):
                inner = value.value if isinstance(value, ast.FormattedValue) else value
                if isinstance(inner, ast.Name) and inner.id not in SHOWN_WHOLE and not inner.id.isupper():
                    found.append(f"{str(before.value)[-20:]}{inner.id}")
    return found


def test_every_value_of_an_option_is_cut() -> None:
    assert find_raw_option_values('raise UserError(f"--host {host}: no. {quote(host)} --data {path}")') == [
        "--host host"
    ]
    for path in sorted(Path(firth.__file__).parent.rglob("*.py")):
        assert find_raw_option_values(path.read_text(encoding="utf-8")) == [], path


def test_values_of_options_are_cut() -> None:
    for check in (check_encoding, parse_mail_parts, parse_normal_forms):
        with pytest.raises(UserError) as told:
            check("x" * 5000)
        assert len(str(told.value)) < 300
    assert len(no_graph(bert(2, 8, 2), "head", "x" * 5000, "bert")) < 200
