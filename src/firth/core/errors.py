"""Errors that the user can fix."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable

MAX_LISTED_CHOICES, NUM_EXCERPT_CHOICES = 60, 10  # more than 60 choices are cut to the first 10


class UserError(Exception):
    """A user's mistake: what is wrong, where (file, line, field), and the fix. The CLI prints it and exits with 2."""


class Interrupted(Exception):  # noqa: N818, no error
    """Ctrl-C or SIGTERM stopped the run after a step; the message says what is saved. `code` is the exit code."""

    code = 128 + signal.SIGINT


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a sentence that names the nearest valid choice or, if none is near, lists the choices.

    >>> did_you_mean("bert-tinny", ["bert-tiny", "gpt2-tiny"])
    "Did you mean 'bert-tiny'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(choices) > MAX_LISTED_CHOICES:
        first = ", ".join(choices[:NUM_EXCERPT_CHOICES])
        return f"There are: {first} and {len(choices) - NUM_EXCERPT_CHOICES:,} more."
    return f"There are: {', '.join(choices)}."
