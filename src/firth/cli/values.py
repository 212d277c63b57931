"""Parsers of option values that are written as one text: `text=body,label=topic`, `4G`, `128,256`."""

from __future__ import annotations

import re
from pathlib import Path

from firth.core.errors import UserError, quote


def parse_columns(text: str, option: str) -> dict[str, str]:
    """
    >>> parse_columns("text=body,label=class", "--columns")
    {'text': 'body', 'label': 'class'}
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    if bad := [name for name, equals, value in pairs if not (name and equals and value)]:
        raise UserError(f"{option}: {quote(bad[0])} is not name=column. Write {option} text=sentence,label=gold.")
    return {name: value for name, _, value in pairs}


def parse_named(texts: list[str], option: str) -> str | dict[str, str]:
    """One value, or several by name. A file whose name has a = counts as a file.

    >>> parse_named(["a.csv"], "--train"), parse_named(["x=a.csv", "y=b.csv"], "--train")
    ('a.csv', {'x': 'a.csv', 'y': 'b.csv'})
    """
    named = [text.partition("=") for text in texts if re.match(r"[\w-]+=", text) and not Path(text).exists()]
    if not named and len(texts) == 1:
        return texts[0]
    if len(named) < len(texts):
        raise UserError(f"{option} is given {len(texts)} times: name each value, as {option} a={texts[0]}.")
    values = {name: value for name, _, value in named}
    if len(values) < len(named):
        raise UserError(f"Two {option} have the same name: {', '.join(name for name, _, _ in named)}.")
    return values


def parse_bytes(text: str, option: str) -> int | None:
    """
    >>> parse_bytes("512MB", "--max-memory"), parse_bytes("1.5 g", "--max-memory"), parse_bytes("", "--max-memory")
    (512000000, 1500000000, None)
    """
    if not text:
        return None
    units = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*?)b?", text.strip().lower())
    if match is None or match[2] not in units:
        raise UserError(f"{option}: {quote(text)} is not a size. Write it as 512MB or 4GB.")
    return int(float(match[1]) * units[match[2]])


def parse_numbers(text: str, option: str) -> dict[str, float]:
    """
    >>> parse_numbers("a=0.7,b=0.3", "--mix")
    {'a': 0.7, 'b': 0.3}
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    try:
        return {name.strip(): float(value) for name, _, value in pairs}
    except ValueError:
        raise UserError(f"{option}: {quote(text)} is not NAME=NUMBER. Write {option} a=0.7,b=0.3.") from None


def parse_list(text: str, option: str) -> list[str]:
    """
    >>> parse_list("cola, rte", "--tasks"), parse_list("none", "--kinds")
    (['cola', 'rte'], [])
    """
    return [] if text == "none" else [part.strip() for part in text.split(",") if part.strip()]


def parse_sizes(text: str, option: str) -> list[int]:
    try:
        return list(map(int, parse_list(text, option)))
    except ValueError:
        raise UserError(f"{option}: {quote(text)} is not a list of whole numbers. Write {option} 4096,8192.") from None


def parse_escapes(text: str, option: str) -> str:
    """A text in which the shell's \\n and \\t stand for a line break and a tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def parse_resume(text: str, option: str) -> bool:
    if text.lower() not in ("auto", "true"):
        raise UserError(f"{option}: {quote(text)} is not 'auto', the last complete checkpoint of the run.")
    return True
