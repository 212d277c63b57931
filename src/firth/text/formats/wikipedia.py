"""Read the XML dumps of Wikipedia and other MediaWiki sites: the text of each article.

A dump (`enwiki-latest-pages-articles.xml.bz2`) is one XML document of 100 GB: `<siteinfo>` names the namespaces in the
language of the wiki, and each `<page>` has a title, the number of its namespace and its revisions. Articles are
namespace 0. The file is parsed as it is read, and one page is held in memory. A dump of a whole history has many
revisions of a page, oldest first: the last is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.parsers import expat

from firth.core.errors import UserError, quote, shorten
from firth.text.formats.wikitext import FILE_NAMESPACES, extract_wikitext
from firth.text.open_text import READ_CHUNK_BYTES, ReadProgress, open_decompressed

MAX_PAGE_CHARS = 2**24  # characters; MediaWiki accepts pages of up to 2 MB
MAX_TOKEN_BYTES = 2**22  # bytes of a tag; expat holds it, and reads it again from its beginning with each chunk
MAX_XML_DEPTH = 50  # levels of elements; a dump has 5
ARTICLE_NAMESPACE = "0"
HIDDEN_NAMESPACE_KEYS = ("-2", "6", "14")  # media, file and category: a link to them shows no text
PAGE_FIELDS = ("title", "ns")  # of <page>
REVISION_FIELDS = ("model", "text")  # of <revision>


class DumpParser:
    """Collect the pages of a dump from the events of expat, a parser that is fed chunk by chunk."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages: list[dict[str, str]] = []  # complete, not taken yet
        self.hidden_namespaces = set(FILE_NAMESPACES)
        self.num_events = 0
        self.page: dict[str, str] = {}
        self._path: list[str] = []  # names of the open elements
        self._pieces: list[str] | None = None  # of the text of a field
        self._size = 0
        self._namespace_key = ""
        self.expat = expat.ParserCreate()
        self.expat.buffer_text = True
        self.expat.buffer_size = READ_CHUNK_BYTES
        self.expat.StartElementHandler = self._start
        self.expat.EndElementHandler = self._end
        self.expat.CharacterDataHandler = self._text
        self.expat.StartDoctypeDeclHandler = self._refuse_doctype

    def feed(self, chunk: bytes) -> None:
        """Parse a chunk; an empty one ends the document."""
        try:
            self.expat.Parse(chunk, not chunk)
        except (LookupError, ValueError):  # expat asks Python for an encoding that it does not know
            raise UserError(
                f"{self.name}: not a MediaWiki dump: it declares an encoding that cannot be read. A dump is UTF-8: "
                "download it again."
            ) from None
        except expat.ExpatError as e:
            where = f"{self.name}:{e.lineno}"
            page = f" in the page {quote(self.page['title'])}" if self.page.get("title") else ""
            if not chunk:
                raise UserError(f"{where}: the dump is cut{page}. Download it again.") from None
            reason = expat.errors.messages.get(e.code, str(e))
            raise UserError(
                f"{where}: not the XML of a MediaWiki dump{page} ({reason}). A dump is UTF-8: download it again."
            ) from None

    def _refuse_doctype(self, name: str, *_: object) -> None:
        raise UserError(f"{self.name}: not a MediaWiki dump: it declares a document type, {quote(name)}.{OTHER_XML}")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.num_events += 1
        if not self._path and tag != "mediawiki":
            raise UserError(f"{self.name}: not a MediaWiki dump: its first element is <{shorten(tag)}>.{OTHER_XML}")
        if len(self._path) >= MAX_XML_DEPTH:
            raise UserError(f"{self.name}: not a MediaWiki dump: elements are nested {MAX_XML_DEPTH} deep.{OTHER_XML}")
        parent = self._path[-1] if self._path else ""
        self._path.append(tag)
        if tag == "page":
            self.page = {}
        elif tag == "redirect" and parent == "page":
            self.page["redirect"] = attributes.get("title", "")
        elif tag == "namespace":
            self._namespace_key = attributes.get("key", "")
        is_field = (parent == "page" and tag in PAGE_FIELDS) or (parent == "revision" and tag in REVISION_FIELDS)
        if is_field or tag == "namespace":
            self._pieces, self._size = [], 0

    def _text(self, text: str) -> None:
        self.num_events += 1
        if self._pieces is not None:
            self._size += len(text)
            if self._size <= MAX_PAGE_CHARS:
                self._pieces.append(text)
            else:
                self.page["too long"] = ""

    def _end(self, tag: str) -> None:
        self.num_events += 1
        self._path.pop()
        if tag == "page":
            self.pages.append(self.page)
            self.page = {}
        if self._pieces is None:
            return
        if tag == "namespace":
            if self._namespace_key in HIDDEN_NAMESPACE_KEYS:
                self.hidden_namespaces.add("".join(self._pieces).strip().lower())
        else:
            self.page[tag] = "".join(self._pieces)
        self._pieces = None


OTHER_XML = " Convert other XML to .txt or .jsonl."


def read_wikipedia_dump(
    path: Path, name: str, read_progress: ReadProgress, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield title and text of each article of a dump; count the pages that are none."""
    parser = DumpParser(name)
    with open_decompressed(path, name, read_progress) as file:
        waiting = num_events = 0  # bytes since the last event of the parser
        while True:
            chunk = file.read(READ_CHUNK_BYTES)
            parser.feed(chunk)
            waiting = waiting + len(chunk) if parser.num_events == num_events else 0
            num_events = parser.num_events
            if waiting > MAX_TOKEN_BYTES:
                raise UserError(
                    f"{name}: not a MediaWiki dump: a tag of more than {MAX_TOKEN_BYTES:,} bytes.{OTHER_XML}"
                )
            pages, parser.pages = parser.pages, []
            for page in pages:
                if reason := skip_reason(page):
                    skipped[reason] += 1
                else:
                    title = " ".join(page.get("title", "").split())
                    text = extract_wikitext(page.get("text", ""), parser.hidden_namespaces)
                    if text:
                        yield title, f"{title}\n\n{text}"
                    else:
                        skipped["articles without text"] += 1
            if not chunk:
                return


def skip_reason(page: dict[str, str]) -> str | None:
    """Return why a page is no article, or None."""
    if page.get("ns", ARTICLE_NAMESPACE).strip() != ARTICLE_NAMESPACE:
        return "pages that are no articles"
    text = page.get("text", "")
    if "redirect" in page or text[:9].lower() == "#redirect":
        return "redirects"
    if "too long" in page:
        return f"pages over {MAX_PAGE_CHARS:,} characters"
    if page.get("model", "wikitext").strip() != "wikitext":
        return "pages that are not wikitext"
    return None
