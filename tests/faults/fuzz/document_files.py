"""Whole files of each document format, tiny: the fuzzer damages them."""

from __future__ import annotations

import zlib

PROSE = "The cat slept near the river and the dog ran home at noon. "
HTML = (
    "<!DOCTYPE html><html><head><meta charset='utf-8'><title>Cats</title></head><body><nav><a href='/'>Home</a></nav>"
    f"<article><h1>Cats</h1><p>{PROSE * 4}</p><ul><li>one</li></ul><table><tr><td>1</td></tr></table>"
    "<p>caf&eacute; &amp; more</p></article><footer>end</footer></body></html>"
).encode()
WIKITEXT = (
    "{{Infobox|a=[[b|c]]}}\n{| class=x\n! a\n|-\n| b\n|}\n[[File:a.jpg|thumb|a [[b]]]]\n'''Cats''' ({{lang|de|K}}) "
    f"are [[animal]]s.&lt;ref&gt;{{{{cite}}}}&lt;/ref&gt; {PROSE}\n== Head ==\n* one &lt;math&gt;x&lt;/math&gt;\n----\n"
    "&lt;nowiki&gt;[[x]]&lt;/nowiki&gt; &lt;!-- c --&gt; [http://a.org b] -{zh-hans:a;zh-hant:b}-\n[[Category:A]]\n"
)


def dump_page(title: str, ns: int, text: str) -> str:
    return (
        f"  <page>\n    <title>{title}</title>\n    <ns>{ns}</ns>\n    <id>1</id>\n    <revision>\n      <id>2</id>\n"
        "      <model>wikitext</model>\n      <format>text/x-wiki</format>\n"
        f'      <text bytes="9" xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


DUMP = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n  <siteinfo>\n'
    '    <namespaces>\n      <namespace key="6">File</namespace>\n    </namespaces>\n  </siteinfo>\n'
    + dump_page("Cats", 0, WIKITEXT)
    + dump_page("Talk:Cats", 1, "a question")
    + dump_page("Dogs", 0, PROSE)
    + "</mediawiki>\n"
).encode()


def warc_record(kind: str, content_type: str, content: bytes) -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def http_response(body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n" + headers + b"\r\n" + body


WARC = b"".join(
    [
        warc_record("warcinfo", "application/warc-fields", b"software: fuzz\r\n"),
        warc_record("response", "application/http; msgtype=response", http_response(HTML)),
        warc_record(
            "response",
            "application/http; msgtype=response",
            http_response(zlib.compress(HTML), b"Content-Encoding: deflate\r\n"),
        ),
        warc_record("conversion", "text/plain", PROSE.encode()),
    ]
)
MBOX = f"""From a@example.org Tue Mar  5 10:01:46 2024
From: =?utf-8?q?J=C3=BCrgen?= <a@example.org>
Subject: =?utf-8?b?Q2F0cw==?=
MIME-Version: 1.0
Content-Type: multipart/alternative; boundary="b"

--b
Content-Type: text/plain; charset=utf-8; format=flowed
Content-Transfer-Encoding: quoted-printable

caf=C3=A9 {PROSE.strip()}
On 5 Mar 2024, B <b@example.org> wrote:
> {PROSE}
--b
Content-Type: text/html; charset=utf-8

<p>{PROSE}</p>
--b--

From b@example.org Tue Mar  5 10:01:46 2024
Subject: Re: Cats
Content-Type: text/html

<p>{PROSE}</p><blockquote>old</blockquote>
""".encode()


def make_pdf(text: str) -> bytes:
    stream = zlib.compress(f"BT /H 12 Tf 14 TL 72 720 Td ({text}) Tj T* ({text}) Tj ET".encode())
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [4 0 R] /Count 1 /MediaBox [0 0 612 792] >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        b"<< /Type /Page /Parent 2 0 R /Resources << /Font << /H 3 0 R >> >> /Contents 5 0 R >>",
        b"<< /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
    out, offsets = bytearray(b"%PDF-1.7\n"), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return bytes(out + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start)


# expat knows four encodings, and asks Python for the others.
XML_ENCODINGS = ("shift_jis", "utf-7", "idna", "no-such", "utf-16")
DOCUMENT_FILES = {
    "a.warc": WARC,
    "a.wet": warc_record("conversion", "text/plain", PROSE.encode()),
    "a.xml": DUMP,
    **{f"{name}.xml": f'<?xml version="1.0" encoding="{name}"?>'.encode() + DUMP for name in XML_ENCODINGS},
    "a.html": HTML,
    "a.pdf": make_pdf(PROSE),
    "a.mbox": MBOX,
}
