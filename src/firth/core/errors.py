"""A user's mistake, told in one or two lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_CHOICES_LISTED_FULLY, NUM_CHOICES_IN_EXCERPT = 60, 10  # of more choices than MANY only SOME are listed


class UserError(Exception):
    """What is wrong, where (file, line, field), and what to do. The verbs print it and exit with 2."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A sentence that names the nearest right choice, or lists them all; of very many, some.

    >>> did_you_mean("bert-tinny", ["bert-tiny", "gpt2-tiny"])
    "Did you mean 'bert-tiny'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    if len(choices) > MAX_CHOICES_LISTED_FULLY:
        return (
            "There are: "
            + ", ".join(choices[:NUM_CHOICES_IN_EXCERPT])
            + f" and {len(choices) - NUM_CHOICES_IN_EXCERPT:,} more."
        )
    return "There are: " + ", ".join(choices) + "."
