"""Mutators: change bytes, JSON values and texts in the ways in which files are damaged or made to harm.

Each takes a `random.Random` first, and draws everything from it: the same seed gives the same input.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import math
import random
from collections.abc import Callable
from typing import Any

RAW = "\u2063raw:"  # a string with this prefix is written to JSON and YAML without quotes
ODD_NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**9, 2 * 10**7, 4 * 10**9, 10**18),
    *(0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
]
ODD_TEXTS = [
    *("", " ", "a", "\0", "\n", "\r\n", "\t", "null", "NaN", "-1", "1e999", "0x10", "true", "yes", "~", "[", "{", "%s"),
    *("../../etc/passwd", "/dev/zero", "/dev/null", ".", "a/b", "a" * 300, "x" * 100_000, "[red]", ":100:"),
    *("\u202e", "\ufeff", "\u2028", "\ud800", "\U0001f600", "e\u0301", "İ", "ß", "\x1b[31m", "ǆ", "\uffff", "٣"),
    *("{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "__class__", "!!python/object:os.system", "*a", "&a"),
]
RAW_TEXTS = ["9" * 5000, "-" + "9" * 400 + "e9", "[" * 100_000, '{"a":' * 5000, "1e400", "2020-13-45", "nan", "'", '"']
ODD_BYTES = [
    *(b"\0", b"\xff", b"\xff\xfe", b"\xef\xbb\xbf", b"\r", b"\n\n\n", b"\x80", b"\xed\xa0\x80", b'"', b"{", b"}", b"["),
    *(b"\xc3", b"\t", b",", b":", b"\\", b"\x1b[2J", b"- ", b"&a [*a]", b"\x1f\x8b", b"PK\x03\x04", b"\0" * 64),
]
REPEATED_UNITS = [
    *(b"a", b",", b" ", b"\t", b" \t", b"\n", b"-\n", b"a-", b"(", b")", b"[", b"[[", b"{{", b"{|\n", b"|", b"<"),
    *(
        b"<a ",
        b"<!--",
        b"<a b='",
        b"</",
        b"&",
        b"&#",
        b"9",
        b"=",
        b"'''a",
        b"[http:",
        b"@",
        b">\n",
        b"a \n",
        b";",
        b"A. ",
    ),
    *(
        b"2024:\n>\n",
        "\u0301".encode(),
        "\u0301\u0327".encode(),
        "\u0436".encode(),
        "\u8a9e".encode(),
        b"\xff",
        b"=?utf-8?q?",
    ),
]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, 1),
    ".bz2": lambda data: bz2.compress(data, 1),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".zst": lambda data: compress_zst(data),
}


def compress_zst(data: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(data, "zstd", asbytes=True))


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    """A number, text, list or dictionary that a reader may not expect."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(ODD_NUMBERS)
    if kind < 7:
        return rng.choice(ODD_TEXTS)
    if kind == 7:
        return rng.choice([None, True, False])
    if kind == 8:
        return RAW + rng.choice(RAW_TEXTS)
    if depth > 2:
        return rng.choice([[], {}])
    values = [odd_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if rng.random() < 0.5 else {rng.choice(ODD_TEXTS[:40]): value for value in values}


def locations(value: Any, parents: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """All (container, key) of a nested value."""
    found = [] if parents is None else parents
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in pairs:
        found.append((value, key))
        locations(part, found)
    return found


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Change one to three locations of a nested value in place: replace, remove, rename, nest, repeat or swap."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        found = locations(value)
        if not found or rng.random() < 0.02:
            return odd_value(rng)
        container, key = rng.choice(found)
        kind = rng.randrange(8)
        if kind < 4:
            container[key] = odd_value(rng)
        elif kind == 4:
            del container[key]
        elif kind == 5 and isinstance(container, dict):
            container[rng.choice([f"{key}_", str(key).upper(), rng.choice(ODD_TEXTS[:40])])] = container.pop(key)
        elif kind == 6:
            container[key] = rng.choice([[container[key]], {"a": container[key]}, str(container[key])])
        else:
            other, at = rng.choice(found)
            container[key] = json.loads(json.dumps(other.get(at) if isinstance(other, dict) else None))
    return value


def dump_json(value: Any, indent: int | None = None) -> bytes:
    text = json.dumps(value, indent=indent)
    mark = json.dumps(RAW)[1:-1]
    while (start := text.find(f'"{mark}')) >= 0:
        end = text.index('"', start + len(mark) + 1)
        while text[end - 1] == "\\":
            end = text.index('"', end + 1)
        text = text[:start] + json.loads(text[start : end + 1]).removeprefix(RAW) + text[end + 1 :]
    return text.encode()


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Change the values of a JSON file, or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    return dump_json(mutate_value(rng, json.loads(data)), rng.choice([None, 2]))


def mutate_jsonl(rng: random.Random, data: bytes) -> bytes:
    """Change one or two lines of a JSON Lines file, or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    lines = data.splitlines()
    for i in rng.sample(range(len(lines)), min(len(lines), rng.choice([1, 1, 2]))):
        lines[i] = dump_json(mutate_value(rng, json.loads(lines[i])))
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, repeat, overwrite or insert bytes, one to four times."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.choice([1, 2, 8, 100, 10**9]))
        kind = rng.randrange(7)
        if kind == 0 and start < len(changed):
            changed[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[start:]
        elif kind == 2:
            del changed[start:end]
        elif kind == 3:
            changed[start:start] = changed[start : min(end, start + 10_000)] * rng.choice([1, 2, 50])
        elif kind == 4:
            changed[start:start] = rng.choice(ODD_BYTES) * rng.choice([1, 1, 3, 1000])
        elif kind == 5:
            odd = rng.choice([rng.randbytes(8), b"\xff" * 8, b"\0" * 8, (2**40).to_bytes(8, "little")])
            changed[start : start + 8] = odd
        else:
            changed[start:start] = rng.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
    return bytes(changed)


def repeat_unit(rng: random.Random, data: bytes) -> bytes:
    """Insert a unit of the input, or one that begins some markup, 20 to 500 kB of it: readers must take linear time."""
    start = rng.randrange(len(data) + 1)
    unit = data[start : start + rng.choice([1, 2, 3, 5, 10, 40])] or b"a"
    unit = rng.choice([unit, rng.choice(REPEATED_UNITS)])
    at, size = rng.randrange(len(data) + 1), int(20_000 * 25 ** rng.random())
    return data[:at] + unit * (size // len(unit)) + data[at:]


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Change the bytes of a text or a document, or repeat a unit of it."""
    return repeat_unit(rng, data) if rng.random() < 0.1 else mutate_bytes(rng, data)


def mutate_lines(rng: random.Random, data: bytes, separator: bytes) -> bytes:
    """Change a table of separated cells: drop, repeat or replace cells, shuffle lines; or change its bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    lines = data.split(b"\n")
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(len(lines))
        cells = lines[i].split(separator)
        cell, kind = rng.randrange(len(cells)), rng.randrange(5)
        if kind == 0:
            del cells[cell]
        elif kind == 1:
            cells[cell:cell] = cells[cell : cell + 1] * rng.choice([1, 2, 3000])
        elif kind == 2:
            cells[cell] = str(rng.choice([*ODD_NUMBERS, *ODD_TEXTS])).encode("utf-8", "surrogatepass")
        elif kind == 3:
            cells[cell] = b'"' + cells[cell]
        else:
            rng.shuffle(lines)
        lines[i] = separator.join(cells)
    return b"\n".join(lines)


def compress_and_damage(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    """Compress a text, then often damage the stream; returns the extension too, now and then the wrong one."""
    extension = rng.choice(list(COMPRESS))
    packed = COMPRESS[extension](data)
    if rng.random() < 0.6:
        packed = mutate_bytes(rng, packed)
    return rng.choice(list(COMPRESS)) if rng.random() < 0.1 else extension, packed


def bomb(extension: str, unit: bytes, megabytes: int = 1000) -> bytes:
    """A stream of `megabytes`, made of equal members, which gzip, bzip2, xz and zstd all allow."""
    size = 2**20 * 4
    member = COMPRESS[extension](unit * (size // len(unit)))
    out = io.BytesIO()
    for _ in range(megabytes // 4):
        out.write(member)
    return out.getvalue()
