"""Detect the language of a text, offline, with py3langid."""

from __future__ import annotations

from functools import cache

from firth.core.errors import UserError, shorten
from firth.text.open_text import import_optional

LANGUAGE_SAMPLE_CHARS = 2000  # characters at the start of a text that are classified


def detect_language(text: str) -> str:
    """Return the ISO 639 code of the most likely language."""
    return str(import_optional("py3langid", "--language").classify(text[:LANGUAGE_SAMPLE_CHARS])[0])


@cache
def supported_language_codes() -> list[str]:
    """Return the codes that py3langid can detect."""
    return sorted(str(code) for code, _ in import_optional("py3langid", "--language").rank(""))


def parse_language_codes(names: str | None) -> list[str]:
    """Parse a comma-separated list of language codes, such as "en" or "de,fr"."""
    codes = [name.strip().lower() for name in (names or "").split(",") if name.strip()]
    for code in codes:
        if code not in supported_language_codes():
            raise UserError(
                f"--language {shorten(code)}: unknown language. There are: {', '.join(supported_language_codes())}."
            )
    return codes
