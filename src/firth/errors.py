"""A user's mistake, told in one or two lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY, SOME = 60, 10  # of more choices than MANY only SOME are listed


class UserError(Exception):
    """What is wrong, where (file, line, field), and what to do. The verbs print it and exit with 2."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """A sentence that names the nearest right choice, or lists them all; of very many, some.

    >>> nearest("bert-tinny", ["bert-tiny", "gpt2-tiny"])
    "Did you mean 'bert-tiny'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(choices) > MANY:
        return "There are: " + ", ".join(choices[:SOME]) + f" and {len(choices) - SOME:,} more."
    return "There are: " + ", ".join(choices) + "."
