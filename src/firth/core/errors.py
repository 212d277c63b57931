"""Errors that the user can fix."""

from __future__ import annotations

import difflib
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

MAX_LISTED_CHOICES, NUM_EXCERPT_CHOICES = 60, 10  # more than 60 choices are cut to the first 10
MAX_QUOTED_CHARS = 60  # of a user's value in a message
MAX_REASON_CHARS = 200  # of another library's message in ours
MAX_WORD_CHARS = 500  # of a message; paths are shorter
NO_SYNONYMS: Mapping[str, str] = MappingProxyType({})
LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARS + 1},}}")


class UserError(Exception):
    """A user's mistake: what is wrong, where (file, line, field), and the fix. The CLI prints it and exits with 2."""


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C or SIGTERM stopped the run after a step; the message says what is saved. `code` is the exit code."""

    code = 128 + signal.SIGINT


def quote(value: Any) -> str:
    """Return at most `MAX_QUOTED_CHARS` characters of a value, as `repr` writes it, for a message.

    `repr` of a value from a file may have no end in sight: ten lines of YAML aliases, each a list of ten times the
    alias before it, stand for 10^10 items. Here only the part that is shown is written.

    >>> quote("ab"), quote([1, "x", {"k": None}]), quote("a" * 99)[-6:], len(quote(list(range(10**6))))
    ("'ab'", "[1, 'x', {'k': None}]", 'aaa...', 60)
    """
    written = ""
    for piece in _repr_pieces(value):
        written += piece
        if len(written) > MAX_QUOTED_CHARS:
            return written[: MAX_QUOTED_CHARS - 3] + "..."
    return written


def _repr_pieces(value: Any) -> Iterator[str]:
    """Yield `repr(value)` piece by piece; a piece is a bracket, a comma, or an excerpt of a scalar."""
    if type(value) in (list, tuple, dict):
        brackets = "[]" if type(value) is list else "()" if type(value) is tuple else "{}"
        yield brackets[0]
        for i, item in enumerate(value):
            yield ", " * (i > 0)
            yield from _repr_pieces(item)
            if type(value) is dict:
                yield ": "
                yield from _repr_pieces(value[item])
        yield "," * (type(value) is tuple and len(value) == 1)
        yield brackets[1]
    elif isinstance(value, str | bytes):
        yield repr(value[: MAX_QUOTED_CHARS + 1])
    elif isinstance(value, int) and value.bit_length() > 4 * MAX_QUOTED_CHARS:
        yield hex(value)  # Python refuses to write more than 4,300 decimal digits
    else:
        yield repr(value)


def shorten(text: object, max_chars: int = MAX_QUOTED_CHARS) -> str:
    """Return a text on one line, cut to `max_chars` characters; for values and reasons in a message.

    >>> shorten("one\\ntwo", 60), shorten("abcdefgh", 6)
    ('one two', 'abc...')
    """
    words = " ".join(str(text)[: 4 * max_chars].split())
    return words if len(words) <= max_chars else words[: max_chars - 3] + "..."


def shorten_words(text: str) -> str:
    """Return a message with its words of more than `MAX_WORD_CHARS` cut: a value that was not quoted by `quote`.

    >>> len(shorten_words("no file " + "x" * 10**6 + " here"))
    136
    """
    return LONG_WORD.sub(lambda match: match[0][:100] + "..." + match[0][-20:], text)


def reason(error: Exception) -> str:
    """Return the message of an exception of another library, on one line and not too long, for our own message."""
    return shorten(error, MAX_REASON_CHARS)


def list_names(names: Iterable[object], max_names: int = 20) -> str:
    """Return the first names of a list, for a message.

    >>> list_names(["a", "b", "c"]), list_names(["a", "b", "c"], 2)
    ('a, b, c', 'a, b and 1 more')
    """
    names = list(names)
    rest = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return ", ".join(map(shorten, names[:max_names])) + rest


def did_you_mean(name: str, choices: Iterable[str], synonyms: Mapping[str, str] = NO_SYNONYMS) -> str:
    """Return a sentence that names the nearest valid choice or, if none is near, lists the choices.

    `synonyms` are the choices under the names that other programs give them.

    >>> did_you_mean("bert-tinny", ["bert-tiny", "gpt2-tiny"])
    "Did you mean 'bert-tiny'?"
    >>> did_you_mean("ner", ["tag", "pair"], {"ner": "tag"})
    "Did you mean 'tag'?"
    """
    choices = sorted(choices)
    if (same := synonyms.get(name.lower().replace("_", "-"))) in choices:
        return f"Did you mean {quote(same)}?"
    close = difflib.get_close_matches(name[:MAX_REASON_CHARS], choices, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {quote(close[0])}?"
    num_listed = NUM_EXCERPT_CHOICES if len(choices) > MAX_LISTED_CHOICES else MAX_LISTED_CHOICES
    return f"There are: {list_names(choices, num_listed)}."
