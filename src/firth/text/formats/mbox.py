"""Read mbox files, in which mail programs and mailing-list archives store e-mails, and .eml files with one e-mail.

A message begins with a line `From sender date`; inside of messages such lines are written `>From`. The text of a
message is its plain part or, without one, its HTML part. Attachments are left out. So are quoted replies, which repeat
other messages of the archive, and signatures, unless `keep` names them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from email.errors import MessageError
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser
from email.policy import EmailPolicy
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from firth.core.errors import UserError
from firth.text.formats.mail_html import BLANK_LINES, html_to_text
from firth.text.formats.web_page import decode_declared, decode_page
from firth.text.open_text import ReadProgress, encoding_hint, open_decompressed

MAX_MESSAGE_BYTES = 2**26  # with attachments; a larger one is skipped
MAX_TEXT_BYTES = 2**23  # of the part that is read
SHOWN_HEADERS = ("From", "To", "Cc", "Date", "Subject")
MAX_HEADER_CHARS = 5000  # of a subject or a list of addresses; the rest is left out
MAX_CONTENT_HEADER_CHARS = 1000  # of Content-Type and the like
MAX_FROM_LINE_BYTES = 1000  # of a line that begins a message
FROM_LINE = re.compile(rb"From \S++.{0,200}?\d{4}")
TIME = re.compile(rb"\d:\d\d")
QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
QUOTED_LINE = re.compile(r"\s*(?:>|\|(?=\s))")
# The line above a quoted text ends with a colon and has a date or an address: "On 3 May 2024, Ada <ada@a.org> wrote:".
DATE_OR_ADDRESS = re.compile(r"@|\b(?:19|20)\d\d\b|\d:\d\d|\b\d{1,2}[./]\d{1,2}[./]")
SENTENCE_ENDS = (".", "!", "?", ":")
MAX_ATTRIBUTION_CHARS = 250
MAX_ATTRIBUTION_LINES = 3
MAX_ATTRIBUTION_GAP = 5  # blank lines between it and the quoted text
ORIGINAL_MESSAGE = re.compile(
    r"\s*-{3,}\s*(?:Original Message|Forwarded message|Urspr|Message d'origine)", re.IGNORECASE
)
SIGNATURE_MARK = "-- "


def read_mbox_texts(
    path: Path, encoding: str, name: str, read_progress: ReadProgress, skipped: Counter[str], keep: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the text of each message of an mbox file; `keep` lists `MAIL_PARTS`."""
    with open_decompressed(path, name, read_progress) as file:
        for number, data in enumerate(split_messages(file, name), 1):
            if data is None:
                skipped[f"messages over {MAX_MESSAGE_BYTES:,} bytes"] += 1
                continue
            if text := try_extracting(QUOTED_FROM.sub(rb"\1", data), encoding, keep):
                yield f"message {number}", text
            else:
                skipped["messages without a text that can be decoded"] += 1


def read_eml_texts(
    path: Path, encoding: str, name: str, read_progress: ReadProgress, skipped: Counter[str], keep: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the text of the one message of an .eml file."""
    with open_decompressed(path, name, read_progress) as file:
        data = file.read(MAX_MESSAGE_BYTES + 1)
    if len(data) > MAX_MESSAGE_BYTES:
        skipped[f"messages over {MAX_MESSAGE_BYTES:,} bytes"] += 1
    elif text := try_extracting(data, encoding, keep):
        yield "", text
    else:
        skipped["messages without a text that can be decoded"] += 1


def try_extracting(data: bytes, encoding: str, keep: Collection[str]) -> str | None:
    """Return the text of a message, or None: the email package fails for damaged headers and deep nesting."""
    try:
        return extract_message(data, encoding, keep)
    except (MessageError, ValueError, LookupError, AttributeError, IndexError, TypeError, RecursionError):
        return None


def split_messages(file: IO[bytes], name: str) -> Iterator[bytes | None]:
    """Yield the bytes of each message without its `From ` line; None for one that is too large.

    Some programs write a sentence that begins with "From " as it is. So where the first `From ` line has a time, as
    almost all have, a line without one is text.
    """
    lines: list[bytes] = []
    size, after_blank, has_message, has_time = 0, True, False, False
    while line := file.readline(MAX_MESSAGE_BYTES):
        if after_blank and is_from_line(line, has_time):
            if has_message:
                yield b"".join(lines) if size <= MAX_MESSAGE_BYTES else None
            else:
                has_time = is_from_line(line, True)
            lines, size, has_message = [], 0, True
        elif not has_message and line.strip():
            hint = (
                encoding_hint(line) if not line.isascii() else "Give a single message a first line like `From a 2024`."
            )
            raise UserError(f"{name}: not an mbox file: its first line does not begin with `From `. {hint}")
        else:
            size += len(line)
            if size <= MAX_MESSAGE_BYTES:
                lines.append(line)
            else:
                lines = []
        after_blank = not line.strip()
    if has_message:
        yield b"".join(lines) if size <= MAX_MESSAGE_BYTES else None


def is_from_line(line: bytes, has_time: bool) -> bool:
    """
    >>> is_from_line(b"From a@b.org Tue Mar  5 10:01:46 2024", True), is_from_line(b"From May 2024 on", True)
    (True, False)
    """
    line = line[:MAX_FROM_LINE_BYTES]
    return FROM_LINE.match(line) is not None and (not has_time or TIME.search(line) is not None)


class MailPolicy(EmailPolicy):
    """Parse the beginning of each header, once: the `email` package takes 10 µs for a character, at each access."""

    @lru_cache(maxsize=32)  # noqa: B019, there is one policy
    def header_fetch_parse(self, name: str, value: str) -> Any:
        is_content = name.lower().startswith("content-")
        return super().header_fetch_parse(name, value[: MAX_CONTENT_HEADER_CHARS if is_content else MAX_HEADER_CHARS])


MAIL_POLICY = MailPolicy()


def extract_message(data: bytes, encoding: str, keep: Collection[str]) -> str | None:
    """Return the subject or the headers, and the text of a message; None if it has no text."""
    message = BytesParser(policy=MAIL_POLICY).parsebytes(data)
    assert isinstance(message, EmailMessage)
    part = message.get_body(preferencelist=("plain", "html"))
    body = extract_part(part, encoding, keep) if part is not None else None
    if not body:
        return None
    if "headers" in keep:
        shown = [f"{key}: {decode_header(message, key)}" for key in SHOWN_HEADERS if message[key] is not None]
        head = "\n".join(shown)
    else:
        head = decode_header(message, "Subject")
    return f"{head}\n\n{body}" if head else body


def decode_header(message: EmailMessage, key: str) -> str:
    """Return a header as text on one line: encoded words (`=?utf-8?q?...?=`) are decoded by the policy."""
    raw = next((value for name, value in message.raw_items() if name.lower() == key.lower()), "")
    if raw.isascii():
        return " ".join(str(message[key] or "").split())
    return " ".join((decode_declared(raw.encode("utf-8", "surrogateescape")) or "").split())  # bytes without a name


def extract_part(part: MIMEPart, encoding: str, keep: Collection[str]) -> str | None:
    """Return the text of a plain or HTML part."""
    payload = part.get_payload(decode=True)
    if not isinstance(payload, bytes) or len(payload) > MAX_TEXT_BYTES:
        return None
    is_html = part.get_content_subtype() == "html"
    decoded = (decode_page if is_html else decode_declared)(payload, part.get_content_charset() or "", encoding)
    if decoded is None:
        return None
    text = decoded.replace("\r\n", "\n")
    if is_html:
        text = html_to_text(text)
    elif str(part.get_param("format", "")).lower() == "flowed":
        text = join_flowed(text, str(part.get_param("delsp", "")).lower() == "yes")
    if "signatures" not in keep:
        text = remove_signature(text)
    if "quotes" not in keep:
        text = remove_quoted(text)
    return BLANK_LINES.sub("\n\n", text).strip()


def join_flowed(text: str, remove_space: bool = False) -> str:
    r"""Join the soft line breaks of `format=flowed` (RFC 3676): a line that ends with a space continues in the next.

    >>> join_flowed("a long \nline\n-- \nme")
    'a long line\n-- \nme'
    """
    joined: list[list[str]] = []  # the pieces of each line
    is_open, depth = False, 0
    for line in text.split("\n"):
        new_depth = len(line) - len(line.lstrip(">"))
        content = line[new_depth:].removeprefix(" ")
        is_continued = is_open and new_depth == depth and content != SIGNATURE_MARK
        if not is_continued:
            joined.append([">" * new_depth + (" " if new_depth else "")])
        is_open, depth = content.endswith(" ") and content != SIGNATURE_MARK, new_depth
        joined[-1].append(content[:-1] if is_open and remove_space else content)
    return "\n".join(map("".join, joined))


def remove_signature(text: str) -> str:
    """Cut a text at the line `-- `, which begins a signature."""
    lines = text.split("\n")
    marks = [i for i, line in enumerate(lines) if line == SIGNATURE_MARK or line.rstrip("\r") == SIGNATURE_MARK]
    return "\n".join(lines[: marks[-1]]) if marks else text


def remove_quoted(text: str) -> str:
    """Remove quoted lines (`> ...`), the line above that says who wrote them, and a whole message that is appended."""
    kept: list[str] = []
    in_quote = False
    for line in text.split("\n"):
        if ORIGINAL_MESSAGE.match(line):
            break
        is_quoted = QUOTED_LINE.match(line) is not None
        if is_quoted and not in_quote:
            remove_attribution(kept)
        if not is_quoted:
            kept.append(line)
        in_quote = is_quoted
    return "\n".join(kept)


def remove_attribution(lines: list[str]) -> None:
    """Remove a last line like `On 3 May 2024, Ada <ada@a.org> wrote:`, which mail programs wrap to up to three lines.

    A line above belongs to it if it has a date or an address and does not end a sentence.
    """
    end, first = len(lines), max(0, len(lines) - MAX_ATTRIBUTION_GAP)
    while end > first and not lines[end - 1].strip():
        end -= 1
    start = end - 1
    while start > 0 and end - start < MAX_ATTRIBUTION_LINES and is_wrapped_attribution(lines[start - 1]):
        start -= 1
    attribution = " ".join(lines[max(start, 0) : end]).strip()
    if len(attribution) <= MAX_ATTRIBUTION_CHARS and attribution.endswith(":") and DATE_OR_ADDRESS.search(attribution):
        del lines[start:]


def is_wrapped_attribution(line: str) -> bool:
    """Whether a line has a date or an address and does not end a sentence.

    >>> is_wrapped_attribution("On 3 May 2024, Ada"), is_wrapped_attribution("We met in May 2024.")
    (True, False)
    """
    return len(line) <= MAX_ATTRIBUTION_CHARS and bool(
        DATE_OR_ADDRESS.search(line) and not line.rstrip().endswith(SENTENCE_ENDS)
    )
