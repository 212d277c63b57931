"""Which language a text is in, told offline by py3langid."""

from __future__ import annotations

from functools import cache

from firth.errors import UserError
from firth.text.lines import need

ENOUGH = 2000  # characters from the start of a text that tell its language


def language_of(text: str) -> str:
    """The ISO 639 code of the likeliest language of a text."""
    return str(need("py3langid", "--language").classify(text[:ENOUGH])[0])


@cache
def known_codes() -> list[str]:
    """The languages that are told apart."""
    return sorted(str(code) for code, _ in need("py3langid", "--language").rank(""))


def known_languages(names: str | None) -> list[str]:
    """The languages that are asked for, as "en" or "de,fr"."""
    codes = [name.strip().lower() for name in (names or "").split(",") if name.strip()]
    for code in codes:
        if code not in known_codes():
            raise UserError(f"--language {code}: not known. There are: {', '.join(known_codes())}.")
    return codes
