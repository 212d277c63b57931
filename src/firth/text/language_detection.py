"""Which language a text is in, told offline by py3langid."""

from __future__ import annotations

from functools import cache

from firth.core.errors import UserError
from firth.text.open_text import import_optional

LANGUAGE_SAMPLE_CHARS = 2000  # characters from the start of a text that tell its language


def detect_language(text: str) -> str:
    """The ISO 639 code of the likeliest language of a text."""
    return str(import_optional("py3langid", "--language").classify(text[:LANGUAGE_SAMPLE_CHARS])[0])


@cache
def supported_language_codes() -> list[str]:
    """The languages that are told apart."""
    return sorted(str(code) for code, _ in import_optional("py3langid", "--language").rank(""))


def parse_language_codes(names: str | None) -> list[str]:
    """The languages that are asked for, as "en" or "de,fr"."""
    codes = [name.strip().lower() for name in (names or "").split(",") if name.strip()]
    for code in codes:
        if code not in supported_language_codes():
            raise UserError(f"--language {code}: not known. There are: {', '.join(supported_language_codes())}.")
    return codes
