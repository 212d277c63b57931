"""Read what a text must match: a JSON schema, a regex, a list of choices or a grammar.

Each becomes a grammar of llguidance, which computes the permitted next tokens (`constraint.py`). Mistakes are found
here, before a model is loaded, and an error names the part of the schema: "#/properties/age: Unknown format: year".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from firth.core.errors import MAX_REASON_CHARS, UserError, quote, shorten
from firth.core.files import read_json, read_utf8
from firth.core.parse import parse_json
from firth.generate.config import GenerationConfig

# White space in JSON: one space, or a line break and an indentation. A model cannot write blanks forever.
JSON_WHITESPACE = r"\x20|\n(\x20{0,16}|\t{0,4})"
MAX_CACHED_GRAMMARS = 64
MIN_LLGUIDANCE_VERSION = (1, 9)  # several end tokens
EOS_BYTE = 256  # of the tokenizer whose tokens are the 256 bytes
# Keywords of JSON Schema whose value is a schema, a list of schemas or an object of schemas.
SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
SCHEMA_LIST_KEYWORDS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas", *DEFINITIONS)

# Rules beside llguidance's own patterns of formats. Those permit 29 February in every year, and a year 0, which most
# programs refuse.
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
REAL_DATE = (
    f"^({LEAP_YEAR}-02-29|(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{{2}}|[1-9][0-9]{{3}})-("
    "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])))"
)
# They permit a second 60 in any minute. RFC 3339 (section 5.7) has it at 23:59:60 UTC alone, which is 15:59:60-08:00.
# Zones with minutes, as +05:30, get no leap seconds: 2,832 more alternatives come near llguidance's limit for a step.
LEAP_SECONDS = "|".join(
    f"{hour:02}:59:60(\\.[0-9]+)?({'[zZ]|' if hour == 23 else ''}[+]{(hour + 1) % 24:02}:00|-{23 - hour:02}:00)"
    for hour in range(24)
)
REAL_SECOND = f"^([0-9-]+[tT])?([0-9]+:[0-9]+:[0-5].*|{LEAP_SECONDS})$"
# They bound the labels of a host name, not their sum: 255 octets with the length of each label (RFC 1035, 2.3.4).
MAX_HOSTNAME_CHARS = 253
# They have no IPv4 address in place of the last two groups (RFC 4291, 2.2). This is the grammar of RFC 3986, 3.2.2.
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
GROUP = "[0-9a-fA-F]{1,4}"
LAST_GROUPS = f"({GROUP}:{GROUP}|({BYTE}[.]){{3}}{BYTE})"
IPV6 = "|".join(
    [
        f"({GROUP}:){{6}}{LAST_GROUPS}",
        f"::({GROUP}:){{5}}{LAST_GROUPS}",
        *(f"(({GROUP}:){{0,{n}}}{GROUP})?::({GROUP}:){{{4 - n}}}{LAST_GROUPS}" for n in range(5)),
        f"(({GROUP}:){{0,5}}{GROUP})?::{GROUP}",
        f"(({GROUP}:){{0,6}}{GROUP})?::",
    ]
)
FORMAT_RULES: dict[str, list[dict[str, Any]]] = {
    "date": [{"pattern": REAL_DATE}],
    "date-time": [{"pattern": REAL_DATE}, {"pattern": REAL_SECOND}],
    "time": [{"pattern": REAL_SECOND}],
    "hostname": [{"maxLength": MAX_HOSTNAME_CHARS}],
    "ipv6": [{"pattern": f"^({IPV6})$"}],
}
REPLACED_FORMATS = ("ipv6",)  # where llguidance's own pattern permits too little


class Grammar(NamedTuple):
    """What a text must match. `body` is a grammar in the JSON form of llguidance."""

    kind: str  # the option that gave it
    body: dict[str, Any]

    @property
    def is_json(self) -> bool:
        return self.kind == "json_schema"

    def with_fixed_spaces(self) -> Grammar:
        """Return the grammar with one way to space JSON: `{"a": 1, "b": 2}`."""
        if not self.is_json:
            return self
        schema = self.body["json_schema"]
        options = {**schema["x-guidance"], "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
        options.pop("whitespace_pattern", None)  # it would win over `whitespace_flexible`
        return self._replace(body={"json_schema": {**schema, "x-guidance": options}})

    def to_llguidance(self, leading_space: str = "") -> str:
        """Return the grammar as llguidance reads it; `leading_space` is put before it: "", '" "' or '" "?'.

        Without `no_forcing`, text that is sure to follow would be permitted in one spelling only, and a model that
        spells it in other tokens would be pushed off its own.
        """
        start = f'%llguidance {{"no_forcing": true}}\nstart: {leading_space} @body'
        return json.dumps({"grammars": [{"lark_grammar": start}, {**self.body, "name": "body"}]})


def import_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise UserError("Structured output needs the package llguidance: pip install llguidance") from None
    if tuple(map(int, version("llguidance").split(".")[:2])) < MIN_LLGUIDANCE_VERSION:
        raise UserError(f"Structured output needs a newer llguidance than {version('llguidance')}: pip install -U it.")
    return llguidance


def read_grammar(generation_config: GenerationConfig) -> Grammar | None:
    """Return the grammar that the options `json_schema`, `regex`, `choices` or `grammar` describe; None for none.

    A JSON schema is a dictionary, JSON text or a file; choices are a list or text with commas; a grammar is text in
    Lark's or llama.cpp's (GBNF) notation, or a file.
    """
    kind = generation_config.constraint
    if kind is None:
        return None
    value = getattr(generation_config, kind)
    grammar = Grammar(kind, {"json_schema": read_schema, "choices": read_choices}.get(kind, read_rules)(kind, value))
    if error := compile_error(grammar):
        raise UserError(describe_error(grammar, value, error))
    return grammar


def read_schema(kind: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str | Path) and str(value):
        is_text = isinstance(value, str) and value.lstrip().startswith("{")
        value = parse_json(str(value), kind) if is_text else read_json(Path(value))
    if not isinstance(value, dict):
        raise UserError(f"A JSON schema must be an object of keywords, and this one is {quote(shorten(repr(value)))}.")
    given = value.get("x-guidance", {})
    if not isinstance(given, dict):
        raise UserError(f"{kind}: #/x-guidance must be an object of options, and is {quote(shorten(repr(given)))}.")
    options = {"whitespace_pattern": JSON_WHITESPACE, **given}
    return {"json_schema": {**with_exact_formats(value), "x-guidance": options}}


def with_exact_formats(part: Any) -> Any:
    """Return a part of a schema, with `FORMAT_RULES` wherever a format has some.

    >>> with_exact_formats({"items": {"format": "hostname"}})["items"]
    {'format': 'hostname', 'allOf': [{'maxLength': 253}]}
    """
    if not isinstance(part, dict):
        return part
    changed = {}
    for key, value in part.items():
        if key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            value = [with_exact_formats(inner) for inner in value]
        elif key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            value = {name: with_exact_formats(inner) for name, inner in value.items()}
        elif key in SCHEMA_KEYWORDS:
            value = with_exact_formats(value)
        changed[key] = value
    name, others = str(part.get("format")), changed.get("allOf", [])
    if name in FORMAT_RULES and isinstance(others, list):
        changed["allOf"] = [*others, *FORMAT_RULES[name]]
        if name in REPLACED_FORMATS:
            del changed["format"]
    return changed


def read_choices(kind: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = parse_json(value, kind) if value.startswith("[") else [text.strip() for text in value.split(",")]
    is_list = isinstance(value, Sequence) and len(value) > 0
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise UserError("choices must be texts, none of them empty: --choices yes,no or choices=['yes', 'no'].")
    return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)}


def read_rules(kind: str, value: Any) -> dict[str, Any]:
    """Return a regex or a grammar."""
    llguidance = import_llguidance()
    if not isinstance(value, str | Path) or not str(value):
        raise UserError(f"{kind} must be a text, and is {quote(shorten(repr(value)))}.")
    if kind == "regex":
        return json.loads(llguidance.LLMatcher.grammar_from_regex(value))["grammars"][0]
    is_text = isinstance(value, str) and ("start:" in value or "::=" in value)
    text = str(value) if is_text else read_utf8(Path(value))
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception as e:  # the converter raises whatever it meets
        raise UserError(f"{'The grammar' if is_text else value}: {' '.join(str(e).split())}.") from None


# --- errors ---------------------------------------------------------------------------------------------------------


class ByteTokens:
    """A tokenizer whose tokens are the bytes, for checks that need no model."""

    eos_token_id, bos_token_id, special_token_ids = EOS_BYTE, None, (EOS_BYTE,)
    tokens = (*(bytes([i]) for i in range(EOS_BYTE)), b"<eos>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@cache
def byte_tokenizer() -> Any:
    llguidance = import_llguidance()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(ByteTokens()))


def byte_matcher(grammar: Grammar) -> Any:
    """Return a matcher over bytes, at the beginning of the text."""
    return import_llguidance().LLMatcher(byte_tokenizer(), grammar.to_llguidance(), log_level=0)


def compile_error(grammar: Grammar) -> str:
    return compile_error_of_text(grammar.to_llguidance())


@lru_cache(maxsize=MAX_CACHED_GRAMMARS)
def compile_error_of_text(grammar: str) -> str:
    """Return why a grammar does not compile, or ""; a prompt after the other asks for the same grammar."""
    matcher = import_llguidance().LLMatcher(byte_tokenizer(), grammar, log_level=0)
    return str(matcher.get_error()) if matcher.is_error() else ""


def describe_error(grammar: Grammar, value: Any, error: str) -> str:
    """Return one line: the file, the part that is wrong, and why."""
    is_file = grammar.kind in ("json_schema", "grammar") and isinstance(value, str | Path) and Path(value).is_file()
    where = str(value) if is_file else grammar.kind
    if grammar.is_json:
        pointer, error = find_wrong_part(grammar.body["json_schema"], error)
        where += f": #{pointer}"
    reasons = [line.strip() for line in error.splitlines() if line.strip()]
    if "error:" in error:  # of the regex library: the pattern, a line of carets, the reason
        reasons = [line.removeprefix("error: ") for line in reasons if line.startswith("error: ")]
    reason = reasons[0].replace("Unimplemented keys:", "not supported:").rstrip(".")
    if reason.startswith("Resource"):
        reason = "a reference must point into the same schema: #/$defs/NAME"
    if reason.startswith("oneOf"):
        reason = 'the parts of oneOf must exclude each other; "x-guidance": {"coerce_one_of": true} reads it as anyOf'
    return f"{where}: {shorten(reason, MAX_REASON_CHARS)}."


def find_wrong_part(schema: Mapping[str, Any], error: str) -> tuple[str, str]:
    """Return the JSON pointer of the innermost part that does not compile by itself, and its error."""
    shared = {key: schema[key] for key in (*DEFINITIONS, "x-guidance") if key in schema}
    part, pointer, is_found = schema, "", True
    while is_found:
        is_found = False
        for path, inner in iter_parts(part):
            own = compile_error(Grammar("json_schema", {"json_schema": {**shared, **inner}}))
            if own and ("does not exist" not in own or "does not exist" in error):
                part, pointer, error, is_found = inner, pointer + path, own, True
                break
    key = next((key for key in part if f"'{key}'" in error or f'"{key}"' in error), "")
    if not key:  # the keyword without which the part compiles
        others = {key: {**shared, **{name: value for name, value in part.items() if name != key}} for key in part}
        keys = sorted(others, key=lambda key: key == "type")  # without a type, no other keyword has a meaning
        key = next((key for key in keys if not compile_error(Grammar("json_schema", {"json_schema": others[key]}))), "")
    return pointer + (f"/{key}" if key else ""), error


def escape_pointer(name: str) -> str:
    """Return a name as RFC 6901 writes it in a JSON pointer.

    >>> escape_pointer("a/b~c")
    'a~1b~0c'
    """
    return name.replace("~", "~0").replace("/", "~1")


def iter_parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON pointer and the schema of each direct part of a schema."""
    for key, value in sorted(
        schema.items(), key=lambda item: item[0] not in DEFINITIONS
    ):  # those that refer come later
        parts: list[tuple[str, Any]] = []
        if key in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            parts = [(f"/{key}/{i}", part) for i, part in enumerate(value)]
        elif key in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            parts = [(f"/{key}/{escape_pointer(name)}", part) for name, part in value.items()]
        elif key in SCHEMA_KEYWORDS:
            parts = [(f"/{key}", value)]
        yield from ((path, part) for path, part in parts if isinstance(part, dict))
