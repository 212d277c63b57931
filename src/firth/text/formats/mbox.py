"""Read mbox files, in which mail programs and mailing-list archives store e-mails.

A message begins with a line `From sender date`; inside of messages such lines are written `>From`. The text of a
message is its plain part or, without one, its HTML part. Attachments are left out. So are quoted replies, which repeat
other messages of the archive, and signatures, unless `keep` names them.
"""

from __future__ import annotations

import email.policy
import re
from collections import Counter
from collections.abc import Collection, Iterator
from email.errors import MessageError
from email.message import EmailMessage, MIMEPart
from email.parser import BytesParser
from html.parser import HTMLParser
from pathlib import Path
from typing import IO

from firth.core.errors import UserError
from firth.text.formats.web_page import decode_declared, decode_page
from firth.text.open_text import ReadProgress, encoding_hint, open_decompressed

MAX_MESSAGE_BYTES = 2**26  # with attachments; a larger one is skipped
MAX_TEXT_BYTES = 2**23  # of the part that is read
SHOWN_HEADERS = ("From", "To", "Cc", "Date", "Subject")
FROM_LINE = re.compile(rb"From \S+.{0,200}\d{4}")
QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)
QUOTED_LINE = re.compile(r"\s*(?:>|\|(?=\s))")
# The line above a quoted text ends with a colon and has a date or an address: "On 3 May 2024, Ada <ada@a.org> wrote:".
DATE_OR_ADDRESS = re.compile(r"@|\b(?:19|20)\d\d\b|\d:\d\d|\b\d{1,2}[./]\d{1,2}[./]")
WRAPPED_ATTRIBUTION = re.compile(rf"(?:{DATE_OR_ADDRESS.pattern}).*[^.!?:\s]\s*$")
MAX_ATTRIBUTION_CHARS = 250
MAX_ATTRIBUTION_LINES = 3
ORIGINAL_MESSAGE = re.compile(
    r"\s*-{3,}\s*(?:Original Message|Forwarded message|Urspr|Message d'origine)", re.IGNORECASE
)
SIGNATURE_MARK = "-- "
BLANK_LINES = re.compile(r"\n{3,}")
BLOCK_TAGS = frozenset(
    (
        "address",
        "article",
        "aside",
        "blockquote",
        "br",
        "dd",
        "div",
        "dl",
        "dt",
        "footer",
        "header",
        "hr",
        "li",
        "ol",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "p",
        "pre",
        "section",
        "table",
        "tr",
        "ul",
    )
)
HIDDEN_TAGS = frozenset(("script", "style", "head", "title", "template"))


def read_mbox_texts(
    path: Path, encoding: str, name: str, read_progress: ReadProgress, skipped: Counter[str], keep: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the text of each message of an mbox file; `keep` lists `MAIL_PARTS`."""
    with open_decompressed(path, name, read_progress) as file:
        for number, data in enumerate(split_messages(file, name), 1):
            if data is None:
                skipped[f"messages over {MAX_MESSAGE_BYTES:,} bytes"] += 1
                continue
            try:
                text = extract_message(data, encoding, keep)
            except (MessageError, ValueError, LookupError, AttributeError, IndexError, TypeError, RecursionError):
                text = None  # the email package raises these for damaged headers and deep nesting
            if text:
                yield f"message {number}", text
            else:
                skipped["messages without a text that can be decoded"] += 1


def split_messages(file: IO[bytes], name: str) -> Iterator[bytes | None]:
    """Yield the bytes of each message without its `From ` line; None for one that is too large."""
    lines: list[bytes] = []
    size, after_blank, has_message = 0, True, False
    while line := file.readline(MAX_MESSAGE_BYTES):
        if after_blank and FROM_LINE.match(line):
            if has_message:
                yield b"".join(lines) if size <= MAX_MESSAGE_BYTES else None
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


def extract_message(data: bytes, encoding: str, keep: Collection[str]) -> str | None:
    """Return the subject or the headers, and the text of a message; None if it has no text."""
    message = BytesParser(policy=email.policy.default).parsebytes(QUOTED_FROM.sub(rb"\1", data))
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
    joined: list[str] = []
    is_open, depth = False, 0
    for line in text.split("\n"):
        new_depth = len(line) - len(line.lstrip(">"))
        content = line[new_depth:].removeprefix(" ")
        if is_open and new_depth == depth and content != SIGNATURE_MARK:
            joined[-1] += content
        else:
            joined.append(">" * new_depth + (" " if new_depth else "") + content)
        is_open, depth = content.endswith(" ") and content != SIGNATURE_MARK, new_depth
        if is_open and remove_space:
            joined[-1] = joined[-1][:-1]
    return "\n".join(joined)


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
    end = len(lines)
    while end and not lines[end - 1].strip():
        end -= 1
    start = end - 1
    while start > 0 and end - start < MAX_ATTRIBUTION_LINES and WRAPPED_ATTRIBUTION.search(lines[start - 1]):
        start -= 1
    attribution = " ".join(lines[max(start, 0) : end]).strip()
    if len(attribution) <= MAX_ATTRIBUTION_CHARS and attribution.endswith(":") and DATE_OR_ADDRESS.search(attribution):
        del lines[start:]


class MailHtmlParser(HTMLParser):
    """Collect the text of an HTML mail: it has no menus, so that all of it is text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._hidden = self._quoted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in HIDDEN_TAGS
        if tag == "blockquote":
            self._quoted += 1
        if tag in BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in HIDDEN_TAGS))
        if tag == "blockquote":
            self._quoted = max(0, self._quoted - 1)
        if tag in BLOCK_TAGS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            words = " ".join(data.split())
            before, after = data[:1].isspace(), data[-1:].isspace()
            piece = " " * before + words + " " * (after and bool(words))
            self.pieces.append(("> " if self._quoted and words and self._at_line_start() else "") + piece)

    def _at_line_start(self) -> bool:
        return not self.pieces or self.pieces[-1].endswith("\n")


def html_to_text(page: str) -> str:
    """Return the text of an HTML mail; block elements begin a line, and quotations begin with `> `.

    >>> html_to_text("<p>One <b>two</b></p><blockquote>old</blockquote>")
    'One two\\n\\n> old'
    """
    parser = MailHtmlParser()
    parser.feed(page)
    parser.close()
    lines = "".join(parser.pieces).split("\n")
    return BLANK_LINES.sub("\n\n", "\n".join(" ".join(line.split()) for line in lines)).strip()
