"""Mailboxes: messages that Python's mailbox module writes, replies, HTML mails, and damaged ones."""

from __future__ import annotations

import gzip
import mailbox
from email.message import EmailMessage
from pathlib import Path

import pytest

from firth.core.errors import UserError
from firth.text.corpus import Corpus
from firth.text.formats import mbox
from firth.text.formats.mbox import html_to_text, join_flowed, remove_quoted

REPLY = """\
Hallo Ada,

On Tue, 5 Mar 2024 at 10:01, Charles Babbage
<charles@example.org> wrote:
> Is the engine ready?
> > It is not.

It is ready: see the drawing.
From here on it works.

--\N{SPACE}
Ada Lovelace
+44 1815
"""


def message(subject: str, text: str = "", **content: str) -> EmailMessage:
    mail = EmailMessage()
    mail["From"] = "Jürgen <j@example.org>"
    mail["To"] = "ada@example.org"
    mail["Date"] = "Tue, 05 Mar 2024 10:01:46 +0000"
    mail["Subject"] = subject
    mail.set_content(text or "x", **content)
    return mail


def write_mbox(path: Path, mails: list[EmailMessage | bytes]) -> Path:
    box = mailbox.mbox(path)
    for mail in mails:
        box.add(mail)
    box.close()
    return path


def test_messages(tmp_path: Path) -> None:
    both = message("Grüße aus 東京", "Plain part: déjà vu.\n", charset="iso-8859-1", cte="quoted-printable")
    both.add_alternative("<p>HTML part</p>", subtype="html")
    both.add_attachment(b"\x89PNG" * 99, maintype="image", subtype="png", filename="a.png")
    only_html = message("Re: HTML")
    only_html.set_content(
        "<html><head><style>p {}</style></head><body><p>Hello <b>Ada</b>,</p><div>it works.</div>"
        "<div>On 5 Mar 2024 Charles wrote:</div><blockquote><p>Does it?</p></blockquote></body></html>",
        subtype="html",
    )
    path = write_mbox(tmp_path / "list.mbox", [message("Re: Engine", REPLY), both, only_html])
    corpus = Corpus(path)
    assert [(d.text, d.source.rpartition(":")[2]) for d in corpus] == [
        ("Re: Engine\n\nHallo Ada,\n\nIt is ready: see the drawing.\nFrom here on it works.", "message 1"),
        ("Grüße aus 東京\n\nPlain part: déjà vu.", "message 2"),
        ("Re: HTML\n\nHello Ada,\n\nit works.", "message 3"),
    ]
    assert corpus.describe() == "3 documents: list.mbox with one document per message"
    (tmp_path / "one.eml").write_bytes(message("Re: Engine", ">From the start\n\nIt is ready.").as_bytes())
    single = Corpus(tmp_path / "one.eml", keep_mail="quotes")
    assert [(d.text, d.source) for d in single] == [
        ("Re: Engine\n\n>From the start\n\nIt is ready.", str(tmp_path / "one.eml"))
    ]
    assert single.describe() == "1 document: one.eml with one document per message"
    (tmp_path / "b.mbox.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert [d.text for d in Corpus(tmp_path / "b.mbox.gz")] == [d.text for d in corpus]


def test_parts_that_are_kept(tmp_path: Path) -> None:
    path = write_mbox(tmp_path / "a.mbox", [message("Re: Engine", REPLY)])
    (document,) = Corpus(path, keep_mail="headers,quotes,signatures")
    head, _, body = document.text.partition("\n\n")
    assert head.splitlines() == [
        "From: Jürgen <j@example.org>",
        "To: ada@example.org",
        "Date: Tue, 05 Mar 2024 10:01:46 +0000",
        "Subject: Re: Engine",
    ]
    assert body == REPLY.strip()
    with pytest.raises(UserError, match=r"--keep-mail quote: unknown part. Did you mean 'quotes'\?"):
        Corpus(path, keep_mail="quote")


def test_bodies() -> None:
    assert join_flowed("> a \n> b\nc \n\nd") == "> a b\nc \nd"
    assert join_flowed("a \nb", remove_space=True) == "ab"
    assert html_to_text("a&nbsp;b<br>c<script>x</script>") == "a b\nc"
    for start in ("<head>h<title>t</title></head><body>", "<head>h<title>t</title><body>", "<head><title>t</title><p>"):
        assert html_to_text(f"<html>{start}text</html>") == "text"
    assert remove_quoted("text\n-----Original Message-----\nFrom: x") == "text"
    assert remove_quoted("Yes, I agree\nOn 5 Mar 2024, B <b@a.org> wrote:\n> old") == "Yes, I agree"
    assert remove_quoted("Since 2023.\nAm 05.03.2024 um 10:01\nschrieb B:\n> alt\nneu") == "Since 2023.\nneu"
    assert remove_quoted("Three things:\n> old") == "Three things:"  # no name and no date: it is the writer's line


def raw(*lines: bytes) -> bytes:
    return b"\n".join([b"From a@b.org Tue Mar  5 10:01:46 2024", *lines, b"", b""])


def test_odd_messages(tmp_path: Path) -> None:
    data = b"".join(
        [
            raw(b"Subject: =?utf-8?q?caf=C3=A9?=", b"Content-Type: text/plain; charset=x-none", b"", "naïve".encode()),
            raw(b"Subject: caf\xe9", b"", "Schöne Grüße aus Köln".encode("cp1252")),
            raw(b"Subject: only a picture", b"Content-Type: image/png", b"", b"iVBORw0KGgo="),
            raw(b"Content-Type: multipart/mixed; boundary=x", b"", b"--x", b"", b"cut"),
            raw(b"", b">From the start", b"to the end"),
            raw(b"", b"From May 2024 on", b"it works"),
            b"".join(
                [b"From x Tue Mar  5 10:01:46 2024\n", b"Content-Type: multipart/mixed; boundary=b\n\n--b\n" * 300]
            ),
        ]
    )
    (tmp_path / "a.mbox").write_bytes(data)
    corpus = Corpus(tmp_path / "a.mbox")
    assert [d.text for d in corpus] == [
        "café\n\nnaïve",
        "café\n\nSchöne Grüße aus Köln",
        "cut",
        "From the start\nto the end",
        "From May 2024 on\nit works",
    ]
    assert "; 2 skipped: messages without a text that can be decoded" in corpus.describe()


def test_files_that_are_no_mailbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.mbox"
    for data, told in (
        (b"Dear Ada,\n", "a.mbox: not an mbox file: its first line does not begin with `From `. Give a single message"),
        (
            gzip.compress(b"x"),
            "a.mbox: not an mbox file: its first line does not begin with `From `. It looks like a .gz",
        ),
        (b"", "a.mbox: no documents, only empty text"),
    ):
        path.write_bytes(data)
        with pytest.raises(UserError) as error:
            list(Corpus(path))
        assert told in str(error.value)
    monkeypatch.setattr(mbox, "MAX_MESSAGE_BYTES", 100)
    path.write_bytes(raw(b"", b"a" * 200) + raw(b"", b"short") + raw(b"", b"line\n" * 50))
    corpus = Corpus(path)
    assert [d.text for d in corpus] == ["short"]
    assert "2 skipped: messages over 100 bytes" in corpus.describe()
