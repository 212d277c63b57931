"""Reading takes time in proportion to the text: units that made a reader search the rest again and again."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest

from firth.core.errors import UserError
from firth.text.formats.mail_html import html_to_text
from firth.text.formats.mbox import extract_message, join_flowed, remove_quoted, split_messages
from firth.text.formats.pdf import join_hyphenated
from firth.text.formats.wikitext import extract_wikitext
from firth.text.normalize import apply_normal_forms

MAX_SECONDS = 2.0  # of a processor; a quadratic search takes 4 to 100 of these


def split_lines_of(text: str) -> None:
    file = io.BytesIO(b"From a" + text.encode())
    with pytest.raises(UserError, match="not an mbox file"):
        list(split_messages(file, "a.mbox"))


def parse_content_type(text: str) -> None:
    extract_message(f"Content-Type: {text}\n\nhello".encode(), "utf-8", ())


@pytest.mark.parametrize(
    ("read", "unit", "chars"),
    [
        *((html_to_text, unit, 60_000) for unit in ("<a ", "<a", "<!--", "<a b='", "<a b='>' ")),
        (html_to_text, "</", 200_000),
        *((extract_wikitext, unit, 60_000) for unit in (",", " ;", "[http:" + "a" * 20_000)),
        (extract_wikitext, "{{lang|fr|" + " " * 30_000 + "b}}", 60_000),
        (extract_wikitext, "\n{|", 400_000),
        (remove_quoted, "@" * 4000 + ".\nb:\n>\n", 64_000),
        (remove_quoted, "> \n\n", 60_000),
        (join_flowed, "a \n", 1_000_000),
        (join_hyphenated, "a", 60_000),
        (split_lines_of, "a", 2_000_000),
        (parse_content_type, ",", 100_000),
        (lambda text: apply_normal_forms(text, ["nfc", "nfkc"]), "\u0301\u0327", 100_000),
    ],
)
def test_time_grows_with_the_text(read: Callable[[str], object], unit: str, chars: int) -> None:
    text = unit * (chars // len(unit)) + "b\n"
    started = time.process_time()
    read(text)
    assert time.process_time() - started < MAX_SECONDS
