"""The text of an HTML mail, in one pass over its tags.

`html.parser` searches the whole rest of a page for the end of each tag that nobody closes: 30 kB of `<a ` take it 20
seconds. Here every such search happens once for a page. Whatever is no tag is text, as in a browser.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

BLANK_LINES = re.compile(r"\n{3,}")
LONG_REFERENCE = re.compile(r"&#(?:x[0-9a-f]{100,}+|[0-9]{100,}+);?", re.IGNORECASE)  # no character has that number
# After the name of a tag: attributes, whose quoted values may hold ">". A quote counts only behind "=".
TAG_END = re.compile(r"""(?:[^>=]++|=\s*+(?:"[^"]*+"|'[^']*+')?+)*+>""")
TAG_NAME = re.compile(r"</?([a-zA-Z][^\s/>]*+)")
RAW_TEXT_END = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in ("script", "style")}
BLOCK_TAGS = frozenset(
    (
        *("address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "footer", "header", "hr", "li"),
        *("ol", "h1", "h2", "h3", "h4", "h5", "h6", "p", "pre", "section", "table", "tr", "ul"),
    )
)
HIDDEN_TAGS = frozenset(("script", "style", "title", "template"))


def unescape_html(text: str) -> str:
    """Replace `&amp;` and `&#233;` by their characters.

    Python converts the digits of a reference to a number first, and refuses more than 4,300 of them.

    >>> unescape_html("caf&#233; &" + "#" + "9" * 5000)
    'café \\ufffd'
    """
    return html.unescape(LONG_REFERENCE.sub("\ufffd", text))


def split_tags(page: str) -> Iterator[tuple[str, str]]:
    """Yield (text, "") for each text, and ("", tag) for each tag: "p" or "/p", lowercase. Comments are left out."""
    start = search_from = 0  # of the text that is not yielded yet, and of the search for the next tag
    last_end = page.rfind(">")  # no tag ends behind it
    quotes_close = comments_close = True
    while 0 <= (opening := page.find("<", search_from)) < last_end:
        name = TAG_NAME.match(page, opening)
        if name:
            tag_end = TAG_END.match(page, name.end()) if quotes_close else None
            if tag_end is None:  # a quote that nobody closes: from here on, the next ">" ends a tag
                quotes_close = False
            end = tag_end.end() if tag_end else page.find(">", name.end()) + 1
        elif page.startswith(("<!", "<?", "</"), opening):
            close = page.find("-->", opening + 2) if comments_close and page.startswith("<!--", opening) else -1
            if close < 0 and page.startswith("<!--", opening):
                comments_close = False
            end = close + 3 if close >= 0 else page.find(">", opening) + 1
        else:
            search_from = opening + 1
            continue
        if opening > start:
            yield page[start:opening], ""
        if name:
            tag = name[1].lower()
            is_opening, is_closing = page[opening + 1] != "/", "/" in (page[opening + 1], page[end - 2])
            if is_opening:
                yield "", tag
            if is_closing:  # `</p>` and `<p/>`
                yield "", f"/{tag}"
            elif tag in RAW_TEXT_END:
                closing = RAW_TEXT_END[tag].search(page, end)
                if closing is None:  # the rest is a script
                    return
                end = closing.start()
        start = search_from = end
    if start < len(page):
        yield page[start:], ""


def html_to_text(page: str) -> str:
    """Return the text of an HTML mail; block elements begin a line, and quotations begin with `> `.

    A mail has no menus, so that all of it is text.

    >>> html_to_text("<p>One <b>two</b></p><blockquote>old</blockquote>")
    'One two\\n\\n> old'
    """
    pieces = ["\n"]
    hidden = quoted = 0  # elements that are open
    is_head = False
    for text, tag in split_tags(page):
        if tag:
            change, name = (-1, tag[1:]) if tag[0] == "/" else (1, tag)
            if name in HIDDEN_TAGS:
                hidden = max(0, hidden + change)
            if name == "blockquote":
                quoted = max(0, quoted + change)
            if name in BLOCK_TAGS:
                pieces.append("\n")
            if name in BLOCK_TAGS or name in ("head", "body"):
                is_head = tag == "head"  # HTML lets a page leave out `</head>`
        elif not hidden and not is_head:
            text = unescape_html(text)
            words = " ".join(text.split())
            piece = " " * text[:1].isspace() + words + " " * (text[-1:].isspace() and bool(words))
            pieces.append(("> " if quoted and words and pieces[-1].endswith("\n") else "") + piece)
    lines = "".join(pieces).split("\n")
    return BLANK_LINES.sub("\n\n", "\n".join(" ".join(line.split()) for line in lines)).strip()
