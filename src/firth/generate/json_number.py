"""Keep the numbers of JSON within the range of float64.

A schema permits `1e400` and a whole number of 5,000 digits. No float64 holds them: Python reads the first as infinity,
which is not JSON, and refuses the second. So a token is forbidden if the number that it continues would become
infinite. Nothing else is excluded: `0`, a negative exponent or the end of the number may always follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
NUMBER_CHARS = b"-+.0123456789eE"
NUMBER_START = re.compile(rb"-?[0-9].*")
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
LONG_NUMBER = re.compile(rb"[0-9]{100}|[eE]\+?[0-9]{3}")  # in a token: it may make any number infinite
MAX_SAFE_CHARS = 150  # of a number without an exponent, which a token without `LONG_NUMBER` leaves finite
BEFORE_NUMBER = b" \n\t,:[{"  # in the token that begins it


def is_infinite(text: bytes) -> bool:
    """Whether the number at the beginning of a text is beyond float64.

    >>> is_infinite(b"1e400"), is_infinite(b"-2e308,"), is_infinite(b"1e308"), is_infinite(b"1e-400"), is_infinite(b"e")
    (True, True, False, False, False)
    """
    match = NUMBER.match(text)
    return match is not None and math.isinf(float(match[0]))


def number_tail(text: bytes) -> bytes:
    """Return the number, or its beginning, at the end of a text that is not within a string.

    >>> number_tail(b'[3, -1.5e'), number_tail(b'{"a": true')
    (b'-1.5e', b'')
    """
    match = NUMBER_START.search(text[len(text.rstrip(NUMBER_CHARS)) :])
    return match[0] if match else b""


def is_within_string(text: bytes) -> bool:
    r"""Whether a JSON text ends within a string.

    >>> is_within_string(b'{"a": "1e'), is_within_string(b'{"a\\"": 1e')
    (True, False)
    """
    return b'"' in STRING.sub(b"", text)


class NumberTokens:
    """The tokens of a vocabulary that may continue a number."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.heads = [token for token, piece in enumerate(pieces) if piece[:1] in NUMBER_CHARS and piece]
        self.whole = {token for token in self.heads if not pieces[token].strip(NUMBER_CHARS)}
        self.ends_in_number = self.whole | {token for token, piece in enumerate(pieces) if number_tail(piece)}
        self.long = [token for token, piece in enumerate(pieces) if LONG_NUMBER.search(piece)]

    def tail(self, tokens: Sequence[int]) -> bytes:
        """Return the number at the end of a text that is not within a string."""
        if not tokens or tokens[-1] not in self.ends_in_number:
            return b""
        start = len(tokens) - 1
        while start and tokens[start] in self.whole:
            start -= 1
        return number_tail(b"".join(self.pieces[token] for token in tokens[start:]))

    def too_large(self, tail: bytes) -> list[int]:
        """Return the tokens that make the number infinite which ends a text, or which they begin themselves."""
        has_exponent = b"e" in tail or b"E" in tail
        suspects = self.heads if has_exponent or len(tail) > MAX_SAFE_CHARS else self.long
        return [token for token in suspects if is_infinite(tail + self.pieces[token].lstrip(BEFORE_NUMBER))]
